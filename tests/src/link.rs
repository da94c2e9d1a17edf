//! A TCP link between two processes that can be slow, hold everything it is given, pass so many
//! bytes and no more, or break.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
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
    /// So many more to the target, over all connections; then nothing goes there, and nothing
    /// is closed.
    Upto(u64),
    /// Nothing passes; nothing is closed.
    Held,
    /// Connections break, and so does whatever connects.
    Closed,
}

/// Slices of a slow link's second.
const TURN: Duration = Duration::from_millis(20);

pub struct Link {
    address: SocketAddr,
    pace: watch::Sender<Pace>,
    books: Arc<Books>,
    task: JoinHandle<()>,
}

/// What went to the target.
#[derive(Default)]
struct Books {
    connections: AtomicU64,
    /// Bytes.
    carried: AtomicU64,
    /// Those that [`Pace::Upto`] still lets pass.
    left: AtomicU64,
}

/// Whether bytes go to the target, which is what is counted, or come from there.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    To,
    From,
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
        let books = Arc::new(Books::default());
        let shared = Arc::clone(&books);
        let task = tokio::spawn(async move {
            let mut pairs = JoinSet::new();
            while let Ok((near, _)) = listener.accept().await {
                shared.connections.fetch_add(1, Ordering::Relaxed);
                pairs.spawn(carry(near, target, paced.clone(), Arc::clone(&shared)));
            }
        });
        Self {
            address,
            pace,
            books,
            task,
        }
    }

    /// What to connect to.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// From now on, for connections that are there as well.
    pub fn set(&self, pace: Pace) {
        if let Pace::Upto(bytes) = pace {
            self.books.left.store(bytes, Ordering::Relaxed);
        }
        self.pace.send_replace(pace);
    }

    /// Connections so far.
    pub fn connections(&self) -> u64 {
        self.books.connections.load(Ordering::Relaxed)
    }

    /// Bytes that went to the target, over all connections.
    pub fn carried(&self) -> u64 {
        self.books.carried.load(Ordering::Relaxed)
    }

    /// Whether [`Pace::Upto`] has let pass what it lets.
    pub fn is_spent(&self) -> bool {
        matches!(*self.pace.borrow(), Pace::Upto(_)) && self.books.left.load(Ordering::Relaxed) == 0
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn carry(
    near: TcpStream,
    target: SocketAddr,
    pace: watch::Receiver<Pace>,
    books: Arc<Books>,
) {
    let mut closed = pace.clone();
    if *closed.borrow() == Pace::Closed {
        return;
    }
    let Ok(far) = TcpStream::connect(target).await else {
        return;
    };
    for stream in [&near, &far] {
        drop(stream.set_nodelay(true));
    }
    let (near, far) = (near.into_split(), far.into_split());
    tokio::select! {
        () = pass(near.0, far.1, pace.clone(), Way::To, &books) => {}
        () = pass(far.0, near.1, pace, Way::From, &books) => {}
        _ = closed.wait_for(|pace| *pace == Pace::Closed) => {}
    }
}

/// One direction, until either end is gone.
async fn pass(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut pace: watch::Receiver<Pace>,
    way: Way,
    books: &Books,
) {
    let mut bytes = vec![0; 64 << 10];
    loop {
        let now = *pace.borrow_and_update();
        let left = match now {
            Pace::Upto(_) if way == Way::To => Some(books.left.load(Ordering::Relaxed)),
            Pace::Held | Pace::Closed => Some(0),
            Pace::Free | Pace::Bytes(_) | Pace::Upto(_) => None,
        };
        let most = match (left, now) {
            (Some(0), _) => {
                if pace.changed().await.is_err() {
                    return;
                }
                continue;
            }
            (Some(left), _) => usize::try_from(left).map_or(bytes.len(), |n| n.min(bytes.len())),
            (None, Pace::Bytes(second)) => {
                tokio::time::sleep(TURN).await;
                let turn = second as f64 * TURN.as_secs_f64();
                (turn as usize).clamp(1, bytes.len())
            }
            (None, _) => bytes.len(),
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
        if way == Way::To {
            let count = count as u64;
            books.carried.fetch_add(count, Ordering::Relaxed);
            if left.is_some() {
                // Never fails: less is always something.
                let less = |left: u64| Some(left.saturating_sub(count));
                let _ = books
                    .left
                    .fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
            }
        }
    }
}
