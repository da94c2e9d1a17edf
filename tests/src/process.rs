//! A real etcd and real `baton` processes on free loopback ports.
//!
//! Everything started here is ended with its owner, by its process id. When a test
//! fails, the end of each process's log is printed.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use baton_proto::v1;
use baton_proto::v1::decode_worker_client::DecodeWorkerClient;
use baton_proto::v1::inference_client::InferenceClient;
use baton_proto::v1::prefill_worker_client::PrefillWorkerClient;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tokio::time::{sleep, timeout};
use tonic::transport::{Channel, Endpoint};

pub use crate::etcd::{EtcdServer, wait_listed};
use crate::http::Http;
use crate::pace::Stopwatch;

/// Patience for a process to start or to end.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Below the ports that systems give to whoever asks for any.
const PORTS: std::ops::Range<u16> = 12_000..32_000;

/// A port that is free and that nobody comes to by chance, also while whoever has it is started
/// again: each is handed out once, and the system hands out others.
///
/// # Panics
/// If there is none.
pub fn free_port() -> u16 {
    static NEXT: LazyLock<AtomicUsize> =
        LazyLock::new(|| AtomicUsize::new(rand::random::<u16>().into()));
    let many = PORTS.len();
    (0..many)
        .map(|_| PORTS.start + (NEXT.fetch_add(1, Ordering::Relaxed) % many) as u16)
        .find(|port| std::net::TcpListener::bind(("127.0.0.1", *port)).is_ok())
        .expect("a free port")
}

/// A folder of `tests/fixtures`.
pub fn fixture_path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures")
        .join(name)
}

/// The `baton` binary of the profile these tests were built with.
///
/// # Panics
/// If it is not there, saying how to build it.
pub fn baton_binary() -> PathBuf {
    let test = std::env::current_exe().expect("the test's own path");
    // target/PROFILE/deps/TEST
    let profile = test
        .parent()
        .and_then(Path::parent)
        .expect("a target folder");
    let binary = profile.join("baton");
    assert!(
        binary.is_file(),
        "no `{}`: build it with `cargo build -p baton` (scripts/test does)",
        binary.display()
    );
    binary
}

/// A child process with its log.
pub struct Process {
    pub name: String,
    child: Child,
    stdout: Option<Lines<BufReader<ChildStdout>>>,
    log: PathBuf,
}

impl Process {
    /// Starts `program`; its standard error goes to a file in `folder`.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn start(name: &str, program: &Path, args: &[String], folder: &Path) -> Self {
        let log = folder.join(format!("{name}-{:08x}.log", rand::random::<u32>()));
        let file = std::fs::File::create(&log).expect("a log file");
        let mut command = Command::new(program);
        for (variable, _) in std::env::vars_os() {
            if variable.to_string_lossy().starts_with("BATON_") {
                command.env_remove(variable);
            }
        }
        let mut child = command
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(file)
            .kill_on_drop(true)
            .spawn()
            .unwrap_or_else(|error| panic!("cannot run `{}`: {error}", program.display()));
        let stdout = child.stdout.take().map(|out| BufReader::new(out).lines());
        Self {
            name: name.to_owned(),
            child,
            stdout,
            log,
        }
    }

    /// The next line of standard output that `find` recognises.
    ///
    /// # Panics
    /// If the process ends or stays silent before it.
    pub async fn line<T>(&mut self, find: impl Fn(&str) -> Option<T>) -> T {
        let lines = self.stdout.as_mut().expect("standard output");
        let reading = async {
            while let Some(line) = lines.next_line().await.expect("standard output is text") {
                if let Some(found) = find(&line) {
                    return Some(found);
                }
            }
            None
        };
        let found = timeout(PATIENCE, reading).await;
        found
            .ok()
            .flatten()
            .unwrap_or_else(|| panic!("`{}` did not say it is ready", self.name))
    }

    /// The process id.
    ///
    /// # Panics
    /// If it has ended and been waited for.
    pub fn id(&self) -> u32 {
        self.child.id().expect("the process runs")
    }

    fn signal(&self, signal: Signal) {
        let pid = self.id();
        let pid = Pid::from_raw(i32::try_from(pid).expect("a process id")).expect("not 0");
        kill_process(pid, signal).expect("the process takes the signal");
    }

    /// SIGTERM; returns without waiting.
    pub fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    /// SIGHUP, as from a terminal that is closed; returns without waiting.
    pub fn hang_up(&self) {
        self.signal(Signal::HUP);
    }

    /// SIGSTOP: it answers nothing any more, and its sockets stay open.
    pub fn freeze(&self) {
        self.signal(Signal::STOP);
    }

    /// SIGCONT.
    pub fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    /// SIGKILL; returns when the process is gone.
    ///
    /// # Panics
    /// If it had gone before.
    pub async fn kill(&mut self) {
        self.signal(Signal::KILL);
        self.child
            .wait()
            .await
            .expect("the process can be waited for");
    }

    /// Waits for the end and returns the exit code.
    ///
    /// # Panics
    /// If it goes on too long or died of a signal.
    pub async fn exit_code(&mut self) -> i32 {
        let ended = timeout(PATIENCE, self.child.wait())
            .await
            .unwrap_or_else(|_| panic!("`{}` does not end", self.name));
        let status = ended.expect("the process can be waited for");
        status
            .code()
            .unwrap_or_else(|| panic!("`{}` died of a signal: {status}", self.name))
    }

    /// Whether it still runs.
    ///
    /// # Panics
    /// If the system does not say.
    pub fn runs(&mut self) -> bool {
        let ended = self.child.try_wait();
        ended.expect("the process can be waited for").is_none()
    }

    /// What it wrote to standard error.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Lines of its log that contain this.
    pub fn told(&self, part: &str) -> usize {
        self.log()
            .lines()
            .filter(|line| line.contains(part))
            .count()
    }

    /// Waits until so many lines of its log contain this.
    ///
    /// # Panics
    /// If it does not come to that.
    pub async fn wait_told(&self, part: &str, lines: usize) {
        let waited = Stopwatch::start();
        while self.told(part) < lines {
            assert!(
                waited.elapsed() < PATIENCE,
                "`{}` does not say `{part}` {lines} times",
                self.name
            );
            sleep(Duration::from_millis(10)).await;
        }
    }

    /// The fields of the first line of its log with this message, which may still come: a
    /// moment that is over when somebody looks is told there.
    ///
    /// # Panics
    /// If it does not come.
    pub async fn logged(&self, message: &str) -> Value {
        let waited = Stopwatch::start();
        loop {
            let log = self.log();
            let mut lines = log
                .lines()
                .filter_map(|line| serde_json::from_str(line).ok());
            if let Some(line) = lines.find(|line: &Value| line["message"] == message) {
                return line;
            }
            assert!(
                waited.elapsed() < PATIENCE,
                "`{}` does not say `{message}`",
                self.name
            );
            sleep(Duration::from_millis(10)).await;
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<&str> = log.lines().collect();
            let tail = lines[lines.len().saturating_sub(20)..].join("\n");
            eprintln!("--- end of the log of `{}`:\n{tail}", self.name);
        }
        drop(self.child.start_kill());
    }
}

/// Which pool a worker process belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pool {
    Prefill,
    Decode,
}

/// A `baton prefill` or `baton decode` process.
pub struct Worker {
    pub process: Process,
    pub control: SocketAddr,
    admin: SocketAddr,
    pool: Pool,
}

impl Worker {
    /// What the worker says of itself.
    ///
    /// # Panics
    /// If it does not answer.
    pub async fn describe(&self) -> v1::WorkerDescription {
        let channel = Endpoint::from_shared(format!("http://{}", self.control))
            .expect("an address")
            .connect()
            .await
            .expect("the worker listens");
        let request = v1::DescribeRequest {
            protocol: Some(baton_proto::protocol::CURRENT.into()),
        };
        let answer = match self.pool {
            Pool::Prefill => PrefillWorkerClient::new(channel).describe(request).await,
            Pool::Decode => DecodeWorkerClient::new(channel).describe(request).await,
        };
        answer.expect("the worker describes itself").into_inner()
    }

    /// A client of its admin port.
    pub fn admin(&self) -> Http {
        Http::new(self.admin)
    }

    /// Gets ready to stop the thread of its engine, and no other one, at once.
    ///
    /// # Panics
    /// If that is not possible.
    pub async fn brake(&self) -> Brake {
        self.trace_engine(&[]).await
    }

    /// Makes its engine slow, whatever the machine: it stands for that long before and after
    /// each of its system calls, of which a step has a few. Until the returned value is dropped.
    ///
    /// # Panics
    /// If that is not possible.
    pub async fn slow_engine(&self, pause: Duration) -> Held {
        let pause_ms = pause.as_millis().to_string();
        self.trace_engine(&[pause_ms]).await.pull().await
    }

    async fn trace_engine(&self, pause_ms: &[String]) -> Brake {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/hold_thread.py");
        let mut tracer = Command::new("python3")
            .arg(script)
            .arg(self.process.id().to_string())
            .arg("baton-engine")
            .args(pause_ms)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("python3");
        let said = tracer.stdout.take().expect("standard output");
        let mut brake = Brake {
            tracer,
            said: BufReader::new(said).lines(),
        };
        brake.expect("ready").await;
        brake
    }

    /// Stops the thread of its engine until the returned value is dropped.
    ///
    /// # Panics
    /// If that is not possible.
    pub async fn hold_engine(&self) -> Held {
        self.brake().await.pull().await
    }

    /// Its metrics as they are scraped.
    ///
    /// # Panics
    /// If it does not serve them.
    pub async fn metrics(&self) -> String {
        let reply = Http::new(self.admin).get("/metrics").await;
        assert_eq!(reply.status, 200);
        String::from_utf8(reply.body).expect("text")
    }

    /// The samples of one metric added up, whatever their labels.
    ///
    /// # Panics
    /// If it does not serve its metrics, or has no such metric.
    pub async fn metric(&self, name: &str) -> f64 {
        let metrics = self.metrics().await;
        let of_it = metrics.lines().filter_map(|line| {
            let rest = line.strip_prefix(name)?;
            let (_, value) = rest
                .starts_with(['{', ' '])
                .then(|| rest.rsplit_once(' '))??;
            value.parse::<f64>().ok()
        });
        let samples: Vec<f64> = of_it.collect();
        assert!(!samples.is_empty(), "no `{name}` in {metrics}");
        samples.iter().sum()
    }

    /// Bytes of KV that it moved over TCP.
    ///
    /// # Panics
    /// If it does not serve its metrics.
    pub async fn tcp_bytes(&self) -> f64 {
        let metrics = self.metrics().await;
        let of_tcp = metrics.lines().filter(|line| {
            line.starts_with("baton_kv_transfer_bytes_total{") && line.contains("transport=\"tcp\"")
        });
        let value = |line: &str| line.rsplit_once(' ')?.1.parse::<f64>().ok();
        of_tcp.filter_map(value).sum()
    }

    /// Its load now.
    ///
    /// # Panics
    /// If it does not say.
    pub async fn load(&self) -> v1::Load {
        self.describe().await.load.expect("a load")
    }

    /// Stops its engine while it has a request, so that it has it until the returned value is
    /// released. Requests must come meanwhile.
    ///
    /// # Panics
    /// If none comes.
    pub async fn hold_busy_engine(&self) -> Held {
        let waited = Stopwatch::start();
        loop {
            let brake = self.brake().await;
            while self.load().await.requests_running == 0 {
                assert!(
                    waited.elapsed() < PATIENCE,
                    "`{}` gets no requests",
                    self.process.name
                );
            }
            let held = brake.pull().await;
            if self.load().await.requests_running > 0 {
                return held;
            }
            held.release().await;
        }
    }

    /// Waits until it holds nothing for a request.
    ///
    /// Only the pauses between two looks count: the worker answers each of them, and on a
    /// machine where that takes long everything else does.
    ///
    /// # Panics
    /// If something is still held after `patience`.
    pub async fn wait_released(&self, patience: Duration) {
        const PAUSE: Duration = Duration::from_millis(10);
        let mut waited = Duration::ZERO;
        loop {
            let load = self.load().await;
            if crate::cluster::held(&load) == 0 {
                return;
            }
            assert!(
                waited < patience,
                "`{}` still holds after {patience:?}: {load:?}",
                self.process.name
            );
            sleep(PAUSE).await;
            waited += PAUSE;
        }
    }

    /// A metric, added up as in [`Worker::metric`], once it stands still. Some are counted a
    /// moment after what they count.
    ///
    /// # Panics
    /// If it goes on and on.
    pub async fn settled(&self, name: &str) -> f64 {
        const PAUSE: Duration = Duration::from_millis(100);
        let mut last = self.metric(name).await;
        for _ in 0..PATIENCE.div_duration_f64(PAUSE) as u32 {
            sleep(PAUSE).await;
            let now = self.metric(name).await;
            if now == last {
                return now;
            }
            last = now;
        }
        panic!("`{name}` of `{}` never stands still", self.process.name)
    }
}

/// What stops an engine's thread at once.
pub struct Brake {
    tracer: Child,
    said: Lines<BufReader<ChildStdout>>,
}

impl Brake {
    async fn expect(&mut self, word: &str) {
        let said = self.said.next_line().await;
        assert_eq!(said.expect("text").as_deref(), Some(word));
    }

    /// Stops it; returns when it stands.
    ///
    /// # Panics
    /// If that is not possible.
    pub async fn pull(mut self) -> Held {
        let order = self.tracer.stdin.as_mut().expect("standard input");
        order.write_all(b"\n").await.expect("the tracer runs");
        self.expect("held").await;
        Held(self.tracer)
    }
}

/// A thread that stands still or is slow. Goes on when this is dropped.
#[must_use]
pub struct Held(Child);

impl Held {
    /// Lets it go on; returns when it may be held again.
    ///
    /// # Panics
    /// If the tracer cannot be waited for.
    pub async fn release(mut self) {
        self.0.kill().await.expect("the tracer ends");
    }
}

/// A `baton router` or `baton up` process.
pub struct RouterProcess {
    pub process: Process,
    pub http: SocketAddr,
    pub grpc: SocketAddr,
}

impl RouterProcess {
    /// A client of the HTTP door.
    pub fn http(&self) -> Http {
        Http::new(self.http)
    }

    fn endpoint(&self) -> Endpoint {
        Endpoint::from_shared(format!("http://{}", self.grpc)).expect("an address")
    }

    /// A client of the gRPC door.
    pub fn grpc(&self) -> InferenceClient<Channel> {
        InferenceClient::new(self.endpoint().connect_lazy())
    }

    /// A client that is sent little before it reads: a long stream that it does not read stays
    /// in its middle here.
    pub fn narrow(&self) -> InferenceClient<Channel> {
        let endpoint = self.endpoint().initial_stream_window_size(1 << 10);
        InferenceClient::new(endpoint.connect_lazy())
    }

    /// One sample of the metrics, by its whole name with labels; 0 if it is not there.
    pub async fn metric(&self, name: &str) -> f64 {
        let reply = self.http().get("/metrics").await;
        let text = String::from_utf8_lossy(&reply.body);
        text.lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
            .unwrap_or(0.0)
    }

    /// Waits until a sample is this: a request's end is counted when its client may have it
    /// already.
    ///
    /// # Panics
    /// If it does not become that.
    pub async fn wait_metric(&self, name: &str, value: f64) {
        let waited = Stopwatch::start();
        loop {
            let now = self.metric(name).await;
            if now == value {
                return;
            }
            assert!(
                waited.elapsed() < PATIENCE,
                "`{name}` is {now}, not {value}"
            );
            sleep(Duration::from_millis(10)).await;
        }
    }

    /// Waits until a model has this many workers, prefill and decode.
    ///
    /// # Panics
    /// If it has not within `patience`.
    pub async fn wait_workers(&self, model: &str, workers: (u32, u32), patience: Duration) {
        let waited = Stopwatch::start();
        loop {
            let answer = self.grpc().list_models(v1::ListModelsRequest {}).await;
            let models = answer.map_or_else(|_| Vec::new(), |answer| answer.into_inner().models);
            let found = models
                .iter()
                .find(|one| one.name == model)
                .map(|one| (one.prefill_workers, one.decode_workers));
            if found == Some(workers) {
                return;
            }
            assert!(
                waited.elapsed() < patience,
                "`{model}` has {found:?} workers, not {workers:?}: {models:?}"
            );
            sleep(Duration::from_millis(10)).await;
        }
    }
}

/// Starts processes that find each other through one etcd.
pub struct Launcher {
    pub etcd: EtcdServer,
    folder: tempfile::TempDir,
}

impl Launcher {
    /// Starts the etcd.
    ///
    /// # Panics
    /// If it does not start.
    pub async fn start() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let etcd = EtcdServer::start(folder.path()).await;
        Self { etcd, folder }
    }

    /// Starts the etcd again after it was killed.
    pub fn restart_etcd(&mut self) {
        self.etcd.restart(self.folder.path());
    }

    /// A folder for this test's files.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Starts a router, on free ports unless `extra` names them.
    ///
    /// # Panics
    /// If it does not come up.
    pub async fn router(&self, extra: &[&str]) -> RouterProcess {
        let mut args = vec!["router".to_owned()];
        args.push("--etcd-ttl-s=10".to_owned());
        // A busy machine is no reason to end a stream here.
        if !extra.iter().any(|arg| arg.starts_with("--stream-gap-ms=")) {
            args.push("--stream-gap-ms=30000".to_owned());
        }
        if !extra.iter().any(|arg| arg.starts_with("--etcd=")) {
            args.push(format!("--etcd={}", self.etcd.url()));
        }
        if !extra.iter().any(|arg| arg.starts_with("--http=")) {
            args.extend(["--http=127.0.0.1:0".to_owned(), "--grpc=127.0.0.1:0".into()]);
        }
        args.extend(extra.iter().map(|arg| (*arg).to_owned()));
        let mut process = Process::start("router", &baton_binary(), &args, self.folder.path());
        let (http, grpc) = process
            .line(|line| {
                let rest = line.strip_prefix("baton router: http://")?;
                let (http, grpc) = rest.split_once(" grpc ")?;
                Some((http.parse().ok()?, grpc.trim().parse().ok()?))
            })
            .await;
        RouterProcess {
            process,
            http,
            grpc,
        }
    }

    /// Starts a worker on a fixture. Returns once it is registered.
    ///
    /// # Panics
    /// If it does not come up.
    pub async fn worker(&self, pool: Pool, id: &str, fixture: &str, extra: &[&str]) -> Worker {
        let role = match pool {
            Pool::Prefill => "prefill",
            Pool::Decode => "decode",
        };
        let mut args = vec![role.to_owned()];
        args.extend([
            format!("--worker-id={id}"),
            format!("--model={}", fixture_path(fixture).display()),
        ]);
        for default in [
            &*format!("--etcd={}", self.etcd.url()),
            "--etcd-ttl-s=10",
            "--kv-dtype=f32",
            "--kv-tokens=16384",
            "--chunk-tokens=64",
        ] {
            let (flag, _) = default.split_once('=').unwrap_or((default, ""));
            let given = |arg: &&str| arg.split_once('=').is_some_and(|(name, _)| name == flag);
            if !extra.iter().any(given) {
                args.push(default.to_owned());
            }
        }
        args.extend(extra.iter().map(|arg| (*arg).to_owned()));
        let mut process = Process::start(id, &baton_binary(), &args, self.folder.path());
        let (control, admin) = process
            .line(|line| {
                let (control, admin) = line.split_once("control ")?.1.split_once(' ')?;
                let admin = admin.strip_prefix("metrics http://")?;
                let admin = admin.strip_suffix("/metrics")?;
                Some((control.parse().ok()?, admin.parse().ok()?))
            })
            .await;
        Worker {
            process,
            control,
            admin,
            pool,
        }
    }
}

/// Starts `baton up` on a fixture, called `test`, with doors on free ports.
///
/// # Panics
/// If it does not come up.
pub async fn up(fixture: &str, extra: &[&str], folder: &Path) -> RouterProcess {
    let mut args = vec![
        "up".to_owned(),
        format!("--model={}", fixture_path(fixture).display()),
        "--model-name=test".to_owned(),
        "--kv-dtype=f32".to_owned(),
        "--http=127.0.0.1:0".to_owned(),
        "--grpc=127.0.0.1:0".to_owned(),
        "--no-pin".to_owned(),
    ];
    args.extend(extra.iter().map(|arg| (*arg).to_owned()));
    let mut process = Process::start("up", &baton_binary(), &args, folder);
    let http = process
        .line(|line| {
            let at = line.trim().strip_prefix("http ")?.trim();
            at.split_once("://")?.1.parse().ok()
        })
        .await;
    let grpc = process
        .line(|line| line.trim().strip_prefix("grpc ")?.trim().parse().ok())
        .await;
    RouterProcess {
        process,
        http,
        grpc,
    }
}
