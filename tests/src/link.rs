//! A TCP link between two processes that can be slow, or hold everything it is given.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

/// What a link does with bytes, in both directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    Free,
    /// A second, each way.
    Bytes(u64),
    /// Nothing passes; nothing is closed.
    Held,
}

/// Slices of a slow link's second.
const TURN: Duration = Duration::from_millis(20);

pub struct Link {
    address: SocketAddr,
    pace: watch::Sender<Pace>,
    task: JoinHandle<()>,
}

impl Link {
    /// A link to a port of this host, which need not listen yet.
    ///
    /// # Panics
    /// If no port is free.
    pub async fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("its address");
        let pace = watch::Sender::new(Pace::Free);
        let paced = pace.subscribe();
        let task = tokio::spawn(async move {
            let mut pairs = JoinSet::new();
            while let Ok((near, _)) = listener.accept().await {
                pairs.spawn(carry(near, target, paced.clone()));
            }
        });
        Self {
            address,
            pace,
            task,
        }
    }

    /// What to connect to.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// From now on, for connections that are there as well.
    pub fn set(&self, pace: Pace) {
        self.pace.send_replace(pace);
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn carry(near: TcpStream, target: SocketAddr, pace: watch::Receiver<Pace>) {
    let Ok(far) = TcpStream::connect(target).await else {
        return;
    };
    for stream in [&near, &far] {
        drop(stream.set_nodelay(true));
    }
    let (near, far) = (near.into_split(), far.into_split());
    tokio::select! {
        () = pass(near.0, far.1, pace.clone()) => {}
        () = pass(far.0, near.1, pace) => {}
    }
}

/// One direction, until either end is gone.
async fn pass(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut pace: watch::Receiver<Pace>) {
    let mut bytes = vec![0; 64 << 10];
    loop {
        let now = *pace.borrow_and_update();
        let most = match now {
            Pace::Free => bytes.len(),
            Pace::Bytes(second) => {
                tokio::time::sleep(TURN).await;
                let turn = second as f64 * TURN.as_secs_f64();
                (turn as usize).clamp(1, bytes.len())
            }
            Pace::Held => {
                if pace.changed().await.is_err() {
                    return;
                }
                continue;
            }
        };
        let read = tokio::select! {
            read = from.read(&mut bytes[..most]) => read,
            changed = pace.changed() => match changed {
                Ok(()) => continue,
                Err(_) => return,
            },
        };
        let Ok(count @ 1..) = read else { return };
        if to.write_all(&bytes[..count]).await.is_err() {
            return;
        }
    }
}
