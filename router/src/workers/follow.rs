//! Keeps [`Workers`] up to date: one task follows membership, one task per worker
//! follows that worker.
//!
//! A worker's task holds its watch stream: every word brings its load, an end puts
//! it out of rotation, silence or a refused connection makes it lost. It comes
//! back with a growing pause. The same stream tells what its prefix cache holds: all of
//! it at first, then what changed; after a gap the stream is opened anew. Beside it the
//! tokenizer is fetched, once per tokenizer hash. One more task looks after lanes between them.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use baton_membership::{View, WorkerRecord};
use baton_proto::block_hash::BlockHash;
use baton_proto::status::from_status;
use baton_proto::tokenizer_spec::TokenizerSpec;
use baton_proto::v1::decode_worker_client::DecodeWorkerClient;
use baton_proto::v1::prefill_worker_client::PrefillWorkerClient;
use baton_proto::{Error, ErrorKind, environment, limits, v1};
use baton_tokenizer::Tokenizer;
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::Streaming;

use super::acknowledging::Acknowledging;
use super::connect::nowhere;
use super::{Connect, Link, Worker, Workers, cut_lanes};
use crate::placement::WorkerKey;

/// Parts that a silence is counted in.
const SILENCE_PARTS: u32 = 8;
/// Bytes of a tokenizer specification's JSON; the largest known vocabularies
/// (260 000 entries with merges) take about 40 MiB.
const TOKENIZER_BYTES_MAX: usize = 256 << 20;
/// Fetching and building one tokenizer.
const TOKENIZER_TIMEOUT: Duration = Duration::from_secs(60);
/// The pause before a broken stream is opened again: doubles from the first to the last.
const PAUSE_FIRST: Duration = Duration::from_millis(50);
const PAUSE_LAST: Duration = Duration::from_secs(1);

/// How long a worker's silence is borne.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Until it gets no new work.
    pub silence: Duration,
    /// Until it is lost. At least `silence`.
    pub lost: Duration,
}

/// What the tasks need.
pub struct Follower {
    pub workers: Arc<Workers>,
    pub view: watch::Receiver<Arc<View>>,
    pub connect: Arc<dyn Connect>,
    pub patience: Patience,
    pub observer: Arc<dyn Observer>,
}

/// Hears what becomes of workers and their caches.
pub trait Observer: Send + Sync {
    /// It left or was lost.
    fn gone(&self, worker: &WorkerKey);
    /// Its prefix cache changed.
    fn cache_changed(&self, worker: &WorkerKey, changes: &CacheChanges);
}

/// What a worker told of its prefix cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheChanges {
    /// What was known before is void.
    pub snapshot: bool,
    pub stored: Vec<BlockHash>,
    pub removed: Vec<BlockHash>,
}

impl CacheChanges {
    fn from_wire(wire: &v1::CacheChanges) -> Self {
        // A name cut short is none: what is not known costs time alone.
        let names = |bytes: &[u8]| bytes.as_chunks().0.iter().copied().map(BlockHash).collect();
        Self {
            snapshot: wire.snapshot,
            stored: names(&wire.stored),
            removed: names(&wire.removed),
        }
    }
}

impl Follower {
    /// Follows until `stop`; then every worker's task has ended.
    pub async fn run(self, stop: CancellationToken) {
        let mut view = self.view.clone();
        let mut tasks: JoinSet<()> = JoinSet::new();
        let mut handles: HashMap<WorkerKey, AbortHandle> = HashMap::new();
        tasks.spawn(cut_lanes::look_after(Arc::clone(&self.workers)));
        loop {
            let latest = Arc::clone(&view.borrow_and_update());
            self.apply(&latest, &mut tasks, &mut handles);
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                changed = view.changed() => if changed.is_err() { break },
                Some(_) = tasks.join_next() => {}
            }
        }
        // Membership going away leaves the last view in place, but a stop ends all.
        if !stop.is_cancelled() {
            tracing::warn!("membership ended, serving on the last view");
            stop.cancelled().await;
        }
        tasks.shutdown().await;
    }

    fn apply(
        &self,
        view: &View,
        tasks: &mut JoinSet<()>,
        handles: &mut HashMap<WorkerKey, AbortHandle>,
    ) {
        self.workers
            .stale
            .store(view.stale_since.is_some(), Ordering::Relaxed);
        let mut next: BTreeMap<WorkerKey, Arc<Worker>> = BTreeMap::new();
        for record in view.workers.values() {
            let key = WorkerKey::new(record.id.clone(), record.epoch);
            let known = self.workers.get(&key);
            if let Some(known) = known.filter(|known| known.control == record.control) {
                known.list(record.state);
                next.insert(key, known);
                continue;
            }
            match self.connect(record) {
                Ok(worker) => {
                    tracing::info!(worker = %record.id, epoch = %record.epoch, role = %record.role,
                        address = record.control, model = record.card.name, "worker joined");
                    let worker = Arc::new(worker);
                    let handle = tasks.spawn(follow(
                        Arc::clone(&worker),
                        Arc::clone(&self.workers),
                        self.patience,
                        Arc::clone(&self.observer),
                    ));
                    if let Some(old) = handles.insert(key.clone(), handle) {
                        old.abort();
                    }
                    next.insert(key, worker);
                }
                Err(error) => {
                    let reason = format!("its address cannot be used: {error}");
                    let worker = Worker::new(record, nowhere(reason.clone()));
                    worker.refuse(reason);
                    next.insert(key, Arc::new(worker));
                }
            }
        }
        let mut current = self
            .workers
            .current
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut *current, next);
        for (key, worker) in before {
            if current
                .get(&key)
                .is_some_and(|now| Arc::ptr_eq(now, &worker))
            {
                continue;
            }
            tracing::info!(worker = %key.id, epoch = %key.epoch(), "worker left");
            if !current.contains_key(&key)
                && let Some(handle) = handles.remove(&key)
            {
                handle.abort();
            }
            // The same id in another life: this one is dead, whatever its streams say.
            if current.keys().any(|other| other.id == key.id) {
                lose(&worker, "replaced by a newer life of the same worker");
            }
            self.observer.gone(&key);
        }
    }

    fn connect(&self, record: &WorkerRecord) -> Result<Worker, Error> {
        let channel = self.connect.connect(&record.control)?;
        Ok(Worker::new(record, channel))
    }
}

/// Takes a worker that has fallen silent out of rotation.
fn doubt(worker: &Worker, reason: String) {
    tracing::warn!(worker = %worker.key.id, address = worker.control, reason, "worker silent");
    worker.live.send_modify(|live| {
        live.link = Link::Silent;
        live.ready = false;
        live.reason = reason;
    });
    worker.doubted.notify_waiters();
}

fn lose(worker: &Worker, reason: &str) {
    let news = worker.live.send_if_modified(|live| {
        let news = live.link != Link::Lost;
        live.link = Link::Lost;
        live.ready = false;
        live.reason = reason.to_owned();
        news
    });
    if news {
        worker.doubted.notify_waiters();
    }
}

async fn follow(
    worker: Arc<Worker>,
    workers: Arc<Workers>,
    patience: Patience,
    observer: Arc<dyn Observer>,
) {
    tokio::join!(
        follow_load(&worker, patience, &*observer),
        fetch_tokenizer(&worker, &workers)
    );
}

/// Why a watch stream is over.
enum End {
    /// It ended; the worker may be there.
    Broken(String),
    Lost(String),
}

async fn follow_load(worker: &Worker, patience: Patience, observer: &dyn Observer) {
    let mut pause = PAUSE_FIRST;
    loop {
        let (heard, end) = follow_once(worker, patience, observer).await;
        if heard {
            pause = PAUSE_FIRST;
        }
        match end {
            End::Broken(reason) => {
                tracing::info!(worker = %worker.key.id, reason, "watch stream ended");
                worker.live.send_modify(|live| {
                    live.link = Link::Broken;
                    live.ready = false;
                    live.reason = reason;
                });
            }
            End::Lost(reason) => {
                if worker.live.borrow().link != Link::Lost {
                    tracing::warn!(worker = %worker.key.id, address = worker.control, reason,
                        "worker lost");
                    observer.gone(&worker.key);
                }
                lose(worker, &reason);
            }
        }
        // Spread out, so that routers do not all knock at once.
        tokio::time::sleep(pause.mul_f64(0.75 + 0.5 * environment::random::<f64>())).await;
        pause = (pause * 2).min(PAUSE_LAST);
    }
}

/// One watch stream, from call to end; and whether anything was heard.
///
/// A silence first takes the worker out of rotation, on the same stream: a word brings
/// it back. Only a longer one makes it lost.
async fn follow_once(worker: &Worker, patience: Patience, observer: &dyn Observer) -> (bool, End) {
    let silent = |time: Duration| format!("not a word for {} ms", time.as_millis());
    let silence = patience.silence;
    let opened = match unless_silent(silence, open_watch(worker)).await {
        None => return (false, End::Lost(silent(silence))),
        Some(Err(error)) => return (false, End::Lost(error.message)),
        Some(Ok(stream)) => stream,
    };
    let mut stream = opened;
    let mut heard = false;
    let mut sequence = None;
    let mut acknowledging = Acknowledging::default();
    let mut stalled = None;
    loop {
        let next = stream.message();
        tokio::pin!(next);
        let mut word = unless_silent(silence, &mut next).await;
        if word.is_none() {
            doubt(worker, silent(silence));
            word = unless_silent(patience.lost - silence, next).await;
        }
        match word {
            None => return (heard, End::Lost(silent(patience.lost))),
            Some(Err(status)) => return (heard, End::Broken(from_status(&status).message)),
            Some(Ok(None)) => return (heard, End::Broken("it closed its watch stream".to_owned())),
            Some(Ok(Some(event))) => {
                if event.epoch != worker.key.epoch().0 {
                    let reason = "another life of it answers at its address".to_owned();
                    return (heard, End::Lost(reason));
                }
                heard = true;
                if sequence.is_some_and(|before: u64| event.sequence != before + 1) {
                    let reason = "events of its watch stream are missing".to_owned();
                    return (heard, End::Broken(reason));
                }
                sequence = Some(event.sequence);
                if let Some(changes) = &event.cache {
                    observer.cache_changed(&worker.key, &CacheChanges::from_wire(changes));
                }
                if event.state == "stalled" {
                    // As good as silent: what it has moves where another can take it.
                    let reason = "its engine does not move".to_owned();
                    let since = *stalled.get_or_insert_with(Instant::now);
                    let link = worker.live.borrow().link;
                    if since.elapsed() >= patience.lost {
                        lose(worker, &reason);
                    } else if link != Link::Silent && link != Link::Lost {
                        doubt(worker, reason);
                    }
                    continue;
                }
                stalled = None;
                if worker.live.borrow().link == Link::Silent {
                    tracing::info!(worker = %worker.key.id, "worker speaks again");
                }
                worker.live.send_modify(|live| {
                    live.link = Link::Up;
                    live.ready = event.state == "ready";
                    live.load = event.load.unwrap_or_default();
                });
                if event.state == "draining" {
                    acknowledging.draining(worker, event.watch);
                }
            }
        }
    }
}

/// `work`, or `None` after `silence`.
///
/// The time is counted in parts, each begun when the one before is noticed to be
/// over. A machine that stands still for longer than `silence` therefore costs one
/// part, and is not taken for the death of every worker at once.
async fn unless_silent<T>(silence: Duration, work: impl Future<Output = T>) -> Option<T> {
    tokio::pin!(work);
    for _ in 0..SILENCE_PARTS {
        if let Ok(done) = tokio::time::timeout(silence / SILENCE_PARTS, &mut work).await {
            return Some(done);
        }
    }
    None
}

async fn open_watch(worker: &Worker) -> Result<Streaming<v1::WatchEvent>, Error> {
    let channel = worker.channel.clone();
    let request = v1::WatchRequest {
        acknowledges_drain: true,
    };
    let response = if worker.role.prefills() {
        PrefillWorkerClient::new(channel).watch(request).await
    } else {
        DecodeWorkerClient::new(channel).watch(request).await
    };
    response
        .map(tonic::Response::into_inner)
        .map_err(|status| from_status(&status))
}

/// What came of asking a worker for its tokenizer.
enum Fetched {
    Usable(Box<Tokenizer>),
    /// It will be no other one for as long as this worker lives.
    Unusable(Error),
    Failed(Error),
}

async fn fetch_tokenizer(worker: &Worker, workers: &Workers) {
    let hash = &worker.card.tokenizer_hash;
    let mut live: watch::Receiver<super::Live> = worker.live.subscribe();
    let mut pause = PAUSE_FIRST;
    let mut said = String::new();
    loop {
        if live.wait_for(|live| live.link == Link::Up).await.is_err() {
            return;
        }
        let lock = workers.fetch_lock(hash);
        let fetching = lock.lock().await;
        if workers.tokenizer_by_hash(hash).is_some() {
            return;
        }
        let loaded = tokio::time::timeout(TOKENIZER_TIMEOUT, load_tokenizer(worker)).await;
        let loaded = loaded.unwrap_or_else(|_| {
            let message = format!("took longer than {} ms", TOKENIZER_TIMEOUT.as_millis());
            Fetched::Failed(Error::new(ErrorKind::Unavailable, message))
        });
        match loaded {
            Fetched::Usable(tokenizer) => {
                if let Some(error) = tokenizer.chat_template_error() {
                    tracing::warn!(model = worker.card.name, %error, "chat is not available");
                }
                workers.keep_tokenizer(hash, Arc::new(*tokenizer));
                drop(fetching);
                tracing::info!(model = worker.card.name, hash, "tokenizer loaded");
                return;
            }
            Fetched::Unusable(error) => {
                worker.refuse(format!("its tokenizer cannot be used: {error}"));
                return;
            }
            Fetched::Failed(error) => {
                // It is tried again and again; the same trouble is news once.
                let error = error.to_string();
                if said != error {
                    tracing::error!(worker = %worker.key.id, model = worker.card.name, error,
                        "load tokenizer");
                }
                said = error;
                drop(fetching);
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(PAUSE_LAST);
            }
        }
    }
}

async fn load_tokenizer(worker: &Worker) -> Fetched {
    let json = match fetch_specification(worker).await {
        Ok(json) if json.len() <= TOKENIZER_BYTES_MAX => json,
        Ok(_) => {
            let message = format!("tokenizer is larger than {TOKENIZER_BYTES_MAX} bytes");
            return Fetched::Unusable(Error::new(ErrorKind::TooLarge, message));
        }
        Err(error) => return Fetched::Failed(error),
    };
    let wanted = worker.card.tokenizer_hash.clone();
    match environment::off_runtime(move || build_tokenizer(&json, &wanted)).await {
        Ok(Ok(tokenizer)) => Fetched::Usable(Box::new(tokenizer)),
        Ok(Err(error)) => Fetched::Unusable(error),
        Err(error) => Fetched::Failed(Error::new(ErrorKind::Internal, error.to_string())),
    }
}

/// The JSON of the worker's tokenizer; cut off soon after [`TOKENIZER_BYTES_MAX`].
async fn fetch_specification(worker: &Worker) -> Result<Vec<u8>, Error> {
    let channel = worker.channel.clone();
    let request = v1::TokenizerSpecRequest {};
    let response = if worker.role.prefills() {
        PrefillWorkerClient::new(channel)
            .max_decoding_message_size(limits::INTERNAL_MESSAGE_BYTES_MAX)
            .tokenizer_spec(request)
            .await
    } else {
        DecodeWorkerClient::new(channel)
            .max_decoding_message_size(limits::INTERNAL_MESSAGE_BYTES_MAX)
            .tokenizer_spec(request)
            .await
    };
    let mut stream = response
        .map_err(|status| from_status(&status))?
        .into_inner();
    let mut json = Vec::new();
    while let Some(chunk) = stream
        .message()
        .await
        .map_err(|status| from_status(&status))?
    {
        json.extend_from_slice(&chunk.data);
        if json.len() > TOKENIZER_BYTES_MAX {
            break;
        }
    }
    Ok(json)
}

fn build_tokenizer(json: &[u8], wanted: &str) -> Result<Tokenizer, Error> {
    let hash = blake3::hash(json).to_hex();
    if hash.as_str() != wanted {
        return Err(Error::new(
            ErrorKind::Invalid,
            format!("the worker's card names tokenizer `{wanted}`, it sent `{hash}`"),
        )
        .with_field("tokenizer_hash"));
    }
    let spec: TokenizerSpec = serde_json::from_slice(json)
        .map_err(|error| Error::invalid("tokenizer_spec", error.to_string()))?;
    Tokenizer::from_spec(&spec).map_err(|error| Error::new(error.kind(), error.to_string()))
}
