//! A real etcd with its data in a temporary folder: started, stopped, frozen and emptied, asked
//! what it holds, and written to behind everybody's back.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use baton_etcd::{Client, Options};
use baton_membership::{Etcd, EtcdConfig, Membership as _, WorkerRecord};
use tokio::time::{Instant, sleep, timeout};

use crate::http::Http;
use crate::process::{PATIENCE, Process, free_port};

/// Where the workers of these tests' cluster are.
const WORKERS: &str = "/baton/v1/default/0/workers/";
const LIST_BYTES_MAX: usize = 16 << 20;

/// A running etcd, ended with its owner.
pub struct EtcdServer {
    process: Process,
    address: SocketAddr,
    url: String,
    data: PathBuf,
    args: Vec<String>,
}

impl EtcdServer {
    /// Starts one with short heartbeats, so that it serves within a second.
    ///
    /// # Panics
    /// If etcd is not installed or does not start.
    pub async fn start(folder: &Path) -> Self {
        // A port that was free a moment ago may be taken; then others are tried.
        for _ in 0..5 {
            let (port, peer) = (free_port(), free_port());
            let url = format!("http://127.0.0.1:{port}");
            let peer = format!("http://127.0.0.1:{peer}");
            let data = folder.join(format!("etcd-{port}"));
            let args = [
                "--name=test".to_owned(),
                format!("--data-dir={}", data.display()),
                "--logger=zap".to_owned(),
                "--log-level=error".to_owned(),
                "--heartbeat-interval=50".to_owned(),
                "--election-timeout=300".to_owned(),
                format!("--listen-client-urls={url}"),
                format!("--advertise-client-urls={url}"),
                format!("--listen-peer-urls={peer}"),
                format!("--initial-advertise-peer-urls={peer}"),
                format!("--initial-cluster=test={peer}"),
            ];
            let program = Path::new("etcd");
            assert!(
                which(program),
                "no `etcd`: these tests need a real one, `apt-get install etcd-server`"
            );
            let mut process = Process::start("etcd", program, &args, folder);
            let address = SocketAddr::from(([127, 0, 0, 1], port));
            let started = Instant::now();
            while started.elapsed() < PATIENCE && process.runs() {
                // Connecting first: the client takes a refused connection for a defect.
                if tokio::net::TcpStream::connect(address).await.is_ok() {
                    let health = Http::new(address).get("/health").await;
                    if String::from_utf8_lossy(&health.body).contains("true") {
                        return Self {
                            process,
                            address,
                            url,
                            data,
                            args: args.to_vec(),
                        };
                    }
                }
                sleep(Duration::from_millis(20)).await;
            }
        }
        panic!("etcd did not start on five pairs of ports");
    }

    /// SIGKILL.
    ///
    /// # Panics
    /// If it had gone before.
    pub async fn kill(&mut self) {
        self.process.kill().await;
    }

    /// Removes its data. It must not run.
    ///
    /// # Panics
    /// If it runs.
    pub fn erase(&mut self) {
        assert!(!self.process.runs());
        std::fs::remove_dir_all(&self.data).expect("it had data");
    }

    /// Starts it again, on its ports and with its data.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn restart(&mut self, folder: &Path) {
        self.process = Process::start("etcd", Path::new("etcd"), &self.args, folder);
    }

    /// SIGSTOP.
    pub fn freeze(&self) {
        self.process.freeze();
    }

    /// SIGCONT.
    pub fn thaw(&self) {
        self.process.thaw();
    }

    /// Where it serves.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The same as an address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// A follower of the workers that are registered.
    ///
    /// # Panics
    /// If the address is malformed, which it is not.
    pub fn follow(&self) -> Etcd {
        Etcd::start(EtcdConfig::new(vec![self.url.clone()], "default")).expect("an etcd client")
    }

    /// A client of etcd alone.
    ///
    /// # Panics
    /// If the address is malformed, which it is not.
    pub async fn client(&self) -> Client {
        Client::connect(std::slice::from_ref(&self.url), Options::default())
            .await
            .expect("an etcd client")
    }

    /// The workers that it holds, by id, each with its lease: no follower's view, which may keep
    /// those that etcd has lost. `None` while it does not answer.
    pub async fn workers(&self) -> Option<Vec<(WorkerRecord, i64)>> {
        let client = self.client().await;
        let list = client.list(WORKERS, LIST_BYTES_MAX);
        let answer = timeout(Duration::from_secs(5), list).await.ok()?.ok()?;
        let read = |kv: &baton_etcd::api::KeyValue| {
            let record = WorkerRecord::from_json(&kv.value).ok()?;
            Some((record, kv.lease))
        };
        let mut workers: Vec<_> = answer.kvs.iter().filter_map(read).collect();
        workers.sort_by(|(a, _), (b, _)| a.id.cmp(&b.id));
        Some(workers)
    }

    /// A worker's lease, if it is registered.
    pub async fn lease_of(&self, id: &str) -> Option<i64> {
        let workers = self.workers().await?;
        let found = workers
            .iter()
            .find(|(record, _)| record.id.as_str() == id)?;
        Some(found.1)
    }

    /// Ends a lease by hand.
    ///
    /// # Panics
    /// If there is no such lease.
    pub async fn revoke(&self, lease: i64) {
        let revoked = self.client().await.lease_revoke(lease).await;
        revoked.expect("the lease is there");
    }

    /// Writes that many keys which are nobody's, half of them where workers are, and then forgets
    /// all history.
    ///
    /// # Panics
    /// If etcd does not take them.
    pub async fn fill_and_compact(&self, keys: u32) {
        let client = self.client().await;
        let mut revision = 0;
        for n in 0..keys {
            let key = match n % 2 {
                0 => format!("/junk/{n}"),
                _ => format!("{WORKERS}decode/junk{n}"),
            };
            revision = client.put(key, "not a record").await.expect("a put");
        }
        let compacted = client.compact(revision, true).await;
        compacted.expect("a compaction");
    }

    /// Messages that clients sent it since it started, calls and what streams carry.
    ///
    /// # Panics
    /// If it does not say.
    pub async fn messages(&self) -> f64 {
        let metrics = Http::new(self.address).get("/metrics").await;
        let text = String::from_utf8_lossy(&metrics.body).into_owned();
        let received = text
            .lines()
            .filter(|line| line.starts_with("grpc_server_msg_received_total{"));
        let counts: Vec<f64> = received
            .filter_map(|line| line.rsplit_once(' ')?.1.parse().ok())
            .collect();
        assert!(!counts.is_empty(), "no counters in {text}");
        counts.iter().sum()
    }
}

fn which(program: &Path) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// Waits until the ids of the registered workers are these.
///
/// # Panics
/// If they are not within `patience`.
pub async fn wait_listed(etcd: &Etcd, ids: &[&str], patience: Duration) {
    let mut view = etcd.watch();
    let seen = |view: &baton_membership::View| -> Vec<String> {
        view.workers.keys().map(|id| id.to_string()).collect()
    };
    let waiting = async {
        loop {
            if seen(&view.borrow_and_update()) == ids {
                return;
            }
            view.changed().await.expect("the follower runs");
        }
    };
    if timeout(patience, waiting).await.is_err() {
        let now = seen(&etcd.watch().borrow());
        panic!("after {patience:?} the workers are {now:?}, not {ids:?}");
    }
}
