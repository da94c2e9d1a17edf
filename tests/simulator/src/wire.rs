//! The calls between routers and workers, without HTTP/2 and without sockets.
//!
//! The generated tonic clients and servers stand at both ends, with their framing and
//! their statuses; between them stands one connection per (router, worker) that delays,
//! stops, resets and refuses. As over TCP, what is sent on a stream arrives in order or
//! not at all: a dark path holds everything back, and a connection that has been dark
//! for too long, or whose other end died, is broken and every call on it fails.
//!
//! ```text
//! client -> [body] --pump--> (arrival time, frame) --reader--> [body] -> server
//! client <- [body] <-reader-- (arrival time, frame) <--pump--- [body] <- server
//! ```

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use baton_proto::{Epoch, Error};
use baton_router::workers::{Broken, Channel, Connect};
use bytes::Bytes;
use futures::future::BoxFuture;
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::body::Body;
use tower::util::BoxCloneSyncService;
use tower::{Service, ServiceExt as _};

use crate::tap::{Ledger, Tap, Way};
use crate::trace::Trace;

/// Frames under way on one stream before its writer waits.
const WINDOW_FRAMES: usize = 64;
/// A connection that has been silent for this long is broken: a keepalive every 2 s
/// that waits 3 s, as between the real processes.
const KEEPALIVE: Duration = Duration::from_secs(5);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

type Request = http::Request<Body>;
type Response = http::Response<Body>;
/// What a worker answers calls with.
pub type WorkerService = BoxCloneSyncService<Request, Response, Infallible>;

/// One life of one worker, as its address leads to it.
#[derive(Clone)]
pub struct Host {
    /// `name#life`.
    pub name: String,
    pub epoch: Epoch,
    pub service: WorkerService,
    /// Ends every task that serves a call.
    pub life: CancellationToken,
}

/// How long things take on a path.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    pub latency: Duration,
    pub jitter: Duration,
}

/// All hosts, and the paths from routers to them.
pub struct Wire {
    trace: Trace,
    ledger: Arc<Ledger>,
    pace: Pace,
    state: Mutex<State>,
}

struct State {
    rng: StdRng,
    hosts: BTreeMap<String, Host>,
    paths: BTreeMap<(u32, String), Arc<Path>>,
}

impl Wire {
    /// Nothing but time.
    pub fn new(seed: u64, pace: Pace, trace: Trace) -> Arc<Self> {
        Arc::new(Self {
            ledger: Arc::new(Ledger::new(trace.clone())),
            trace,
            pace,
            state: Mutex::new(State {
                rng: StdRng::seed_from_u64(seed),
                hosts: BTreeMap::new(),
                paths: BTreeMap::new(),
            }),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The path of a router to an address.
    pub fn path(&self, router: u32, address: &str) -> Arc<Path> {
        let mut state = self.lock();
        let seed = state.rng.random();
        let path = state.paths.entry((router, address.to_owned()));
        Arc::clone(path.or_insert_with(|| Arc::new(Path::new(seed, self.pace))))
    }

    /// A worker answers at `address` from now on.
    pub fn listen(&self, address: &str, host: Host) {
        self.lock().hosts.insert(address.to_owned(), host);
    }

    /// The worker at `address` is dead: its calls end without a word. Its peers hear of
    /// the end of their connections after a moment, or, if the whole machine is gone,
    /// when their keepalives stay unanswered.
    pub fn kill(&self, address: &str, machine: bool) {
        let (host, paths) = {
            let mut state = self.lock();
            let host = state.hosts.remove(address);
            let paths: Vec<_> = state
                .paths
                .iter()
                .filter(|((_, to), _)| to == address)
                .map(|(_, path)| Arc::clone(path))
                .collect();
            (host, paths)
        };
        let Some(host) = host else { return };
        host.life.cancel();
        for path in paths {
            let Some(connection) = path.lock().connection.clone() else {
                continue;
            };
            tokio::spawn(async move {
                if machine {
                    tokio::time::sleep(KEEPALIVE).await;
                } else {
                    path.hop().await;
                }
                connection.broken.cancel();
            });
        }
    }

    /// Handoffs that workers said were committed.
    pub fn commits(&self) -> u64 {
        self.ledger.commits()
    }

    /// A router is dead: it says and hears nothing any more, and its peers see the end of
    /// their connections after a moment. The next one of this number has new paths.
    pub fn kill_router(&self, number: u32) {
        let mut state = self.lock();
        let (dead, left) = std::mem::take(&mut state.paths)
            .into_iter()
            .partition(|((router, _), _)| *router == number);
        state.paths = left;
        let dead: BTreeMap<_, Arc<Path>> = dead;
        for path in dead.into_values() {
            path.dead.cancel();
            tokio::spawn(async move {
                path.hop().await;
                path.reset();
            });
        }
    }

    fn host(&self, address: &str) -> Option<Host> {
        self.lock().hosts.get(address).cloned()
    }
}

/// The way from one router to one address.
pub struct Path {
    state: Mutex<PathState>,
    lit: Notify,
    /// Its router is.
    dead: CancellationToken,
}

struct PathState {
    rng: StdRng,
    pace: Pace,
    dark: bool,
    /// Times that it went dark.
    nights: u64,
    connection: Option<Connection>,
}

#[derive(Clone)]
struct Connection {
    host: Host,
    broken: CancellationToken,
}

impl Path {
    fn new(seed: u64, pace: Pace) -> Self {
        Self {
            state: Mutex::new(PathState {
                rng: StdRng::seed_from_u64(seed),
                pace,
                dark: false,
                nights: 0,
                connection: None,
            }),
            lit: Notify::new(),
            dead: CancellationToken::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, PathState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes how long things take from now on.
    pub fn set_pace(&self, pace: Pace) {
        self.lock().pace = pace;
    }

    /// Nothing arrives, either way; or it does again, and so does what was held back,
    /// unless the connection is broken by then.
    pub fn darken(self: &Arc<Self>, dark: bool) {
        let mut state = self.lock();
        state.dark = dark;
        if !dark {
            drop(state);
            self.lit.notify_waiters();
            return;
        }
        state.nights += 1;
        let night = state.nights;
        drop(state);
        let path = Arc::clone(self);
        tokio::spawn(async move {
            tokio::time::sleep(KEEPALIVE).await;
            let state = path.lock();
            if state.dark && state.nights == night {
                drop(state);
                path.reset();
            }
        });
    }

    /// Breaks the connection there is: every call on it fails at once, at both ends.
    pub fn reset(&self) {
        let connection = self.lock().connection.take();
        if let Some(connection) = connection {
            connection.broken.cancel();
        }
    }

    fn flight(&self) -> Duration {
        let mut state = self.lock();
        let jitter = state.pace.jitter.as_micros() as u64;
        state.pace.latency + Duration::from_micros(state.rng.random_range(0..=jitter))
    }

    /// Waits until something sent now has arrived.
    async fn hop(&self) {
        self.arrive(Instant::now() + self.flight()).await;
    }

    /// Waits until `at`, and for light. Cancel safe.
    async fn arrive(&self, at: Instant) {
        tokio::time::sleep_until(at).await;
        loop {
            let lit = self.lit.notified();
            tokio::pin!(lit);
            lit.as_mut().enable();
            if !self.lock().dark {
                return;
            }
            lit.await;
        }
    }

    /// The connection there is, or a new one.
    async fn connect(&self, wire: &Wire, address: &str) -> Result<Connection, Broken> {
        let known = |state: &PathState| {
            let connection = state.connection.as_ref()?;
            (!connection.broken.is_cancelled()).then(|| connection.clone())
        };
        if let Some(connection) = known(&self.lock()) {
            return Ok(connection);
        }
        let there_and_back = async {
            self.hop().await;
            self.hop().await;
        };
        if tokio::time::timeout(CONNECT_TIMEOUT, there_and_back)
            .await
            .is_err()
        {
            return Err(broken("connecting took too long"));
        }
        let host = wire
            .host(address)
            .ok_or_else(|| broken("connection refused"))?;
        let mut state = self.lock();
        if let Some(connection) = known(&state) {
            return Ok(connection);
        }
        let connection = Connection {
            host,
            broken: CancellationToken::new(),
        };
        state.connection = Some(connection.clone());
        Ok(connection)
    }
}

fn broken(message: &'static str) -> Broken {
    Broken(Status::unavailable(message).into())
}

fn reset() -> Status {
    Status::unavailable("connection reset by peer")
}

/// How one router reaches workers.
pub struct Router {
    pub wire: Arc<Wire>,
    pub number: u32,
}

impl Connect for Router {
    fn connect(&self, address: &str) -> Result<Channel, Error> {
        Ok(BoxCloneSyncService::new(Caller {
            path: self.wire.path(self.number, address),
            wire: Arc::clone(&self.wire),
            address: address.to_owned(),
        }))
    }
}

/// The client's end of a path.
#[derive(Clone)]
struct Caller {
    wire: Arc<Wire>,
    path: Arc<Path>,
    address: String,
}

impl Service<Request> for Caller {
    type Response = Response;
    type Error = Broken;
    type Future = BoxFuture<'static, Result<Response, Broken>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), Broken>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request) -> Self::Future {
        let dead = self.path.dead.clone();
        let call = call(self.clone(), request);
        Box::pin(async move {
            tokio::select! {
                biased;
                () = dead.cancelled() => Err(broken("this router is dead")),
                called = call => called,
            }
        })
    }
}

async fn call(caller: Caller, request: Request) -> Result<Response, Broken> {
    let Caller {
        wire,
        path,
        address,
    } = caller;
    let connection = path.connect(&wire, &address).await?;
    let Connection { host, broken } = connection;
    let (head, body) = request.into_parts();
    let tap = Tap::new(&head.uri, &host, &wire.ledger, &wire.trace);
    let (up, arriving) = pipe(&path, &broken);
    tokio::spawn(pump(
        Arc::clone(&path),
        broken.clone(),
        body,
        up,
        tap.clone(),
        Way::Up,
    ));
    let gone = || Broken(reset().into());
    tokio::select! {
        biased;
        () = broken.cancelled() => return Err(gone()),
        () = path.hop() => {}
    }
    let (reply, answer) = oneshot::channel();
    let request = Request::from_parts(head, arriving);
    let serving = serve(
        Arc::clone(&path),
        broken.clone(),
        host.service,
        request,
        reply,
        tap,
    );
    let life = host.life;
    tokio::spawn(async move {
        tokio::select! {
            biased;
            () = life.cancelled() => {}
            () = serving => {}
        }
    });
    let answered = async {
        match answer.await {
            Ok((at, response)) => {
                path.arrive(at).await;
                response
            }
            // Its worker is dead; the connection will say so.
            Err(_) => std::future::pending().await,
        }
    };
    tokio::select! {
        biased;
        () = broken.cancelled() => Err(gone()),
        response = answered => Ok(response),
    }
}

/// Runs a call at the worker: the handler, then the body of its answer.
async fn serve(
    path: Arc<Path>,
    broken: CancellationToken,
    service: WorkerService,
    request: Request,
    mut reply: oneshot::Sender<(Instant, Response)>,
    mut tap: Tap,
) {
    let response = tokio::select! {
        biased;
        () = broken.cancelled() => return,
        () = reply.closed() => {
            // The caller's leaving takes as long as anything else to be heard of.
            path.hop().await;
            return;
        }
        response = service.oneshot(request) => response,
    };
    let Ok(response) = response;
    let (head, body) = response.into_parts();
    tap.head(&head.headers);
    let (down, arriving) = pipe(&path, &broken);
    let at = Instant::now() + path.flight();
    let response = Response::from_parts(head, arriving);
    if reply.send((at, response)).is_ok() {
        pump(path, broken, body, down, tap, Way::Down).await;
    }
}

enum Item {
    Frame(Frame<Bytes>),
    Failed(Status),
    End,
}

/// One direction of one stream: what is put in comes out when it has arrived.
fn pipe(path: &Arc<Path>, broken: &CancellationToken) -> (mpsc::Sender<(Instant, Item)>, Body) {
    let (tx, mut rx) = mpsc::channel::<(Instant, Item)>(WINDOW_FRAMES);
    let (path, broken) = (Arc::clone(path), broken.clone());
    let stream = async_stream::stream! {
        loop {
            let next = async {
                match rx.recv().await {
                    Some((at, item)) => {
                        path.arrive(at).await;
                        item
                    }
                    // Its writer died; the connection will say so.
                    None => std::future::pending().await,
                }
            };
            let item = tokio::select! {
                biased;
                () = broken.cancelled() => Item::Failed(reset()),
                item = next => item,
            };
            match item {
                Item::Frame(frame) => yield Ok(frame),
                Item::Failed(status) => {
                    yield Err(status);
                    return;
                }
                Item::End => return,
            }
        }
    };
    (tx, Body::new(StreamBody::new(stream)))
}

/// Takes frames from a body and sends them on their way, until its reader is gone.
async fn pump(
    path: Arc<Path>,
    broken: CancellationToken,
    mut body: Body,
    tx: mpsc::Sender<(Instant, Item)>,
    mut tap: Tap,
    way: Way,
) {
    let mut last = Instant::now();
    loop {
        let frame = tokio::select! {
            biased;
            () = broken.cancelled() => return,
            () = path.dead.cancelled(), if way == Way::Up => return,
            () = tx.closed() => break,
            frame = body.frame() => frame,
        };
        let item = match frame {
            Some(Ok(frame)) => {
                tap.see(way, &frame);
                Item::Frame(frame)
            }
            Some(Err(status)) => Item::Failed(status),
            None => Item::End,
        };
        let over = !matches!(item, Item::Frame(_));
        last = last.max(Instant::now() + path.flight());
        let sent = tokio::select! {
            biased;
            () = broken.cancelled() => return,
            sent = tx.send((last, item)) => sent,
        };
        if over {
            return;
        }
        if sent.is_err() {
            break;
        }
    }
    // The reader's leaving takes as long as anything else; then the body is dropped.
    path.hop().await;
}
