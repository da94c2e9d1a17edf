//! A TCP link that can be cut (connections break, new ones are closed at once), and whose
//! answers can come late.

use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

pub struct Link {
    port: u16,
    connected: watch::Sender<bool>,
    delay: watch::Sender<Duration>,
    task: tokio::task::JoinHandle<()>,
}

impl Link {
    /// A link to a port on loopback.
    pub async fn to(target: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let connected = watch::Sender::new(true);
        let mut state = connected.subscribe();
        let delay = watch::Sender::new(Duration::ZERO);
        let late = delay.subscribe();
        let task = tokio::spawn(async move {
            let mut streams = JoinSet::new();
            loop {
                tokio::select! {
                    _ = state.changed() => if !*state.borrow_and_update() {
                        streams.shutdown().await;
                    },
                    accepted = listener.accept() => {
                        let (near, _) = accepted.unwrap();
                        if *state.borrow() {
                            streams.spawn(carry(near, target, late.clone()));
                        }
                    }
                }
            }
        });
        Self {
            port,
            connected,
            delay,
            task,
        }
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    pub fn cut(&self) {
        self.connected.send_replace(false);
    }

    pub fn restore(&self) {
        self.connected.send_replace(true);
    }

    /// Whatever the other end says from now on comes that much later.
    pub fn delay_answers(&self, by: Duration) {
        self.delay.send_replace(by);
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.task.abort();
    }
}

// Broken connections are this fixture's purpose: every error ends the two directions.
async fn carry(near: TcpStream, target: u16, delay: watch::Receiver<Duration>) {
    let Ok(far) = TcpStream::connect(("127.0.0.1", target)).await else {
        return;
    };
    let (mut near_reads, mut near_writes) = near.into_split();
    let (mut far_reads, mut far_writes) = far.into_split();
    let asks = tokio::io::copy(&mut near_reads, &mut far_writes);
    let (sender, mut late) = mpsc::channel::<(Instant, Vec<u8>)>(1024);
    let reads = async {
        let mut bytes = vec![0; 16 << 10];
        while let Ok(count @ 1..) = far_reads.read(&mut bytes).await {
            let due = Instant::now() + *delay.borrow();
            if sender.send((due, bytes[..count].to_vec())).await.is_err() {
                break;
            }
        }
    };
    let answers = async {
        while let Some((due, bytes)) = late.recv().await {
            tokio::time::sleep_until(due).await;
            if near_writes.write_all(&bytes).await.is_err() {
                break;
            }
        }
    };
    tokio::select! {
        _ = asks => {}
        () = reads => {}
        () = answers => {}
    }
}
