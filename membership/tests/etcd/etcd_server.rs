//! A real etcd on free loopback ports with its data in a temporary folder.
//!
//! Killed by its process id when dropped. Its heartbeat and election times are
//! short, so that it starts fast and grants a TTL of one second.

use std::ops::Range;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use baton_etcd::{Client, Options};
use rustix::process::{Pid, Signal, kill_process};
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

/// What its ports speak, as PEM.
#[derive(Clone)]
pub struct Tls {
    pub authority: String,
    /// Certificate and key of 127.0.0.1, which serve the clients of these tests as well.
    pub identity: (String, String),
}

pub struct EtcdServer {
    folder: tempfile::TempDir,
    name: String,
    port: u16,
    peer_port: u16,
    /// `name=url` of every member.
    initial_cluster: String,
    arguments: Vec<String>,
    tls: Option<Tls>,
    process: Option<Child>,
}

impl EtcdServer {
    pub async fn start() -> Self {
        Self::start_with(&[], None).await
    }

    /// One with further flags, or whose client port asks for certificates.
    pub async fn start_with(arguments: &[&str], tls: Option<&Tls>) -> Self {
        // A port that was free a moment ago may be taken; then others are tried.
        for _ in 0..5 {
            let mut server = Self::new("test");
            server.initial_cluster = server.as_member();
            server.arguments = arguments.iter().map(|&text| text.to_owned()).collect();
            server.tls = tls.cloned();
            server.spawn();
            if server.is_up().await {
                return server;
            }
        }
        panic!("etcd did not start on five pairs of ports");
    }

    /// Three members of one cluster.
    pub async fn start_three() -> [Self; 3] {
        for _ in 0..5 {
            let mut members = ["one", "two", "three"].map(Self::new);
            let all: Vec<String> = members.iter().map(Self::as_member).collect();
            let mut up = true;
            for member in &mut members {
                member.initial_cluster = all.join(",");
                member.spawn();
            }
            for member in &mut members {
                up &= member.is_up().await;
            }
            if up {
                return members;
            }
        }
        panic!("three members did not start on five sets of ports");
    }

    fn new(name: &str) -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
            name: name.to_owned(),
            port: free_port(),
            peer_port: free_port(),
            initial_cluster: String::new(),
            arguments: Vec::new(),
            tls: None,
            process: None,
        }
    }

    fn as_member(&self) -> String {
        format!("{}=http://127.0.0.1:{}", self.name, self.peer_port)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn url(&self) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        format!("{scheme}://127.0.0.1:{}", self.port)
    }

    pub async fn client(&self) -> Client {
        Client::connect(&[self.url()], self.options())
            .await
            .unwrap()
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }

    /// Removes its data. It must not run.
    pub fn erase(&self) {
        assert!(self.process.is_none());
        std::fs::remove_dir_all(self.folder.path().join("data")).unwrap();
    }

    /// Starts it again on the same ports.
    pub async fn restart(&mut self) {
        assert!(self.process.is_none());
        self.spawn();
        assert!(self.is_up().await, "etcd did not start again");
    }

    pub fn freeze(&self) {
        self.signal(Signal::STOP);
    }

    pub fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        let process = self.process.as_ref().expect("etcd runs");
        kill_process(Pid::from_child(process), signal).unwrap();
    }

    fn options(&self) -> Options {
        let mut options = Options::default();
        if let Some(tls) = &self.tls {
            let (certificate, key) = &tls.identity;
            let trust = ClientTlsConfig::new()
                .ca_certificate(Certificate::from_pem(&tls.authority))
                .identity(Identity::from_pem(certificate, key));
            options.tls = Some(trust);
        }
        options
    }

    fn spawn(&mut self) {
        let (client, peer) = (self.url(), format!("http://127.0.0.1:{}", self.peer_port));
        let log = std::fs::File::create(self.folder.path().join("log")).unwrap();
        let mut command = Command::new("etcd");
        command
            .arg("--data-dir")
            .arg(self.folder.path().join("data"))
            .args([
                "--name",
                &self.name,
                "--logger",
                "zap",
                "--log-level",
                "error",
            ])
            .args(["--heartbeat-interval", "50", "--election-timeout", "300"])
            .args(["--listen-client-urls", &client])
            .args(["--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer])
            .args(["--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &self.initial_cluster])
            .args(&self.arguments);
        if let Some(tls) = &self.tls {
            let (certificate, key) = &tls.identity;
            for (flag, text) in [
                ("--trusted-ca-file", &tls.authority),
                ("--cert-file", certificate),
                ("--key-file", key),
            ] {
                let path = self.folder.path().join(&flag[2..]);
                std::fs::write(&path, text).unwrap();
                command.arg(flag).arg(path);
            }
            command.arg("--client-cert-auth");
        }
        let spawned = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn();
        match spawned {
            Ok(process) => self.process = Some(process),
            Err(error) => panic!(
                "cannot run `etcd` ({error}): these tests need a real etcd, install it with \
                 `apt-get install etcd-server`"
            ),
        }
    }

    /// Waits until it serves; `false` if it ended or does not.
    async fn is_up(&mut self) -> bool {
        let started = Instant::now();
        let mut options = self.options();
        options.request_timeout = Some(Duration::from_millis(500));
        while started.elapsed() < Duration::from_secs(30) {
            if self
                .process
                .as_mut()
                .is_some_and(|one| one.try_wait().unwrap().is_some())
            {
                self.process = None;
                return false;
            }
            let client = Client::connect(&[self.url()], options.clone())
                .await
                .unwrap();
            match client.get("ready").await {
                Ok(_) => return true,
                // With authentication on, being refused is being served.
                Err(error) if error.to_string().contains("user name is empty") => return true,
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
        self.kill();
        false
    }
}

impl Drop for EtcdServer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A port that nobody comes to by chance while its etcd is down: systems hand out those above.
fn free_port() -> u16 {
    const PORTS: Range<u16> = 12_000..32_000;
    let unused = |port: &u16| std::net::TcpListener::bind(("127.0.0.1", *port)).is_ok();
    let mut random = std::iter::repeat_with(|| rand::random_range(PORTS));
    random.find(unused).expect("numbers do not end")
}
