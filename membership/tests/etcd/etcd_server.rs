//! A real etcd on free loopback ports with its data in a temporary folder.
//!
//! Killed by its process id when dropped. Its heartbeat and election times are
//! short, so that it starts fast and grants a TTL of one second.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use etcd_client::{Client, ConnectOptions};

pub struct EtcdServer {
    folder: tempfile::TempDir,
    port: u16,
    peer_port: u16,
    process: Option<Child>,
}

impl EtcdServer {
    pub async fn start() -> Self {
        // A port that was free a moment ago may be taken; then others are tried.
        for _ in 0..5 {
            let mut server = Self {
                folder: tempfile::tempdir().unwrap(),
                port: free_port(),
                peer_port: free_port(),
                process: None,
            };
            if server.try_start().await {
                return server;
            }
        }
        panic!("etcd did not start on five pairs of ports");
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    pub async fn client(&self) -> Client {
        Client::connect([self.url()], None).await.unwrap()
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
        assert!(self.try_start().await, "etcd did not start again");
    }

    pub fn freeze(&self) {
        self.signal("STOP");
    }

    pub fn thaw(&self) {
        self.signal("CONT");
    }

    fn signal(&self, name: &str) {
        let process = self.process.as_ref().expect("etcd runs");
        let status = Command::new("kill")
            .arg(format!("-{name}"))
            .arg(process.id().to_string())
            .status();
        assert!(status.unwrap().success());
    }

    async fn try_start(&mut self) -> bool {
        let (client, peer) = (self.url(), format!("http://127.0.0.1:{}", self.peer_port));
        let log = std::fs::File::create(self.folder.path().join("log")).unwrap();
        let spawned = Command::new("etcd")
            .arg("--data-dir")
            .arg(self.folder.path().join("data"))
            .args(["--name", "test", "--logger", "zap", "--log-level", "error"])
            .args(["--heartbeat-interval", "50", "--election-timeout", "300"])
            .args([
                "--listen-client-urls",
                &client,
                "--advertise-client-urls",
                &client,
            ])
            .args([
                "--listen-peer-urls",
                &peer,
                "--initial-advertise-peer-urls",
                &peer,
            ])
            .args(["--initial-cluster", &format!("test={peer}")])
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
        let started = Instant::now();
        let options = ConnectOptions::new().with_timeout(Duration::from_millis(500));
        while started.elapsed() < Duration::from_secs(10) {
            if self
                .process
                .as_mut()
                .is_some_and(|one| one.try_wait().unwrap().is_some())
            {
                self.process = None;
                return false;
            }
            let mut client = Client::connect([&client], Some(options.clone()))
                .await
                .unwrap();
            match client.get("ready", None).await {
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

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port()
}
