//! A TCP link that can be cut: connections break, new ones are closed at once.

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

pub struct Link {
    port: u16,
    connected: watch::Sender<bool>,
    task: tokio::task::JoinHandle<()>,
}

impl Link {
    /// A link to a port on loopback.
    pub async fn to(target: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let connected = watch::Sender::new(true);
        let mut state = connected.subscribe();
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
                            streams.spawn(carry(near, target));
                        }
                    }
                }
            }
        });
        Self {
            port,
            connected,
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
}

impl Drop for Link {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn carry(mut near: TcpStream, target: u16) {
    if let Ok(mut far) = TcpStream::connect(("127.0.0.1", target)).await {
        // A broken connection is this fixture's purpose.
        let _ = tokio::io::copy_bidirectional(&mut near, &mut far).await;
    }
}
