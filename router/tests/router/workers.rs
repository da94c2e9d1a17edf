//! Scripted workers: real tonic servers on real sockets that speak `worker.proto`
//! without an engine. Each has a runtime of its own, so that one can be killed
//! like a process.
//!
//! Their "model" writes the alphabet: token `i` of choice `c` is a letter that
//! depends on both alone, so that any worker continues any other's output. The
//! "data lane" is a map of channels in this process.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use baton_membership::{Capacity, Role, WorkerRecord, WorkerState};
use baton_proto::kv_layout::{KvDtype, KvGroup, KvGroupKind, KvLayout};
use baton_proto::live_requests::{LiveRequests, Stop};
use baton_proto::model_card::ModelCard;
use baton_proto::status::{to_detail, to_status};
use baton_proto::tokenizer_spec::{
    ChatTemplate, TokenEntry, TokenKind, TokenizerModel, TokenizerSpec,
};
use baton_proto::v1::decode_worker_server::{DecodeWorker, DecodeWorkerServer};
use baton_proto::v1::prefill_worker_server::{PrefillWorker, PrefillWorkerServer};
use baton_proto::watching::Watchers;
use baton_proto::work::WorkOrder;
use baton_proto::worker_info::{self, WorkerInfo};
use baton_proto::{Epoch, Error, ErrorKind, NumericsId, protocol, transport, v1};
use tokio::sync::{mpsc, oneshot, watch};
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Request, Response, Status, Streaming};

pub type EventStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// What a worker does with requests.
#[derive(Clone, Debug, PartialEq)]
pub enum Act {
    /// All of it, as fast as it can.
    Well,
    /// Waits this long before each token (D) or before the first one (P).
    Slowly(Duration),
    /// D: stands still after this many tokens.
    HoldAfter(u32),
    /// Refuses at once.
    Refuse(Error),
    /// Takes the call and never answers.
    Hang,
    /// Ends with an error after this many tokens (D), or before the first one (P).
    BreakAfter(u32),
    /// P: sends the first token and breaks before the commit.
    BreakAfterFirst,
    /// P: sends the first token, commits, and breaks before it says so.
    BreakAfterCommit,
    /// D: draws other tokens than everybody else.
    Lie,
}

/// The letter a choice has at an index.
pub fn letter(choice: u32, index: u32) -> u32 {
    u32::from(b'a') + (index + choice * 5) % 26
}

/// Commits by ticket.
#[derive(Clone, Default)]
pub struct DataLane(Arc<Mutex<HashMap<Vec<u8>, oneshot::Sender<()>>>>);

/// What a worker saw and does. Shared with the test.
pub struct Script {
    pub act: Mutex<Act>,
    pub starts: Mutex<Vec<v1::DecodeStart>>,
    pub prefills: Mutex<Vec<v1::PrefillRequest>>,
    /// `grpc-timeout` of each call.
    pub timeouts: Mutex<Vec<String>>,
    pub cancelled_choices: Mutex<Vec<u32>>,
    /// Calls whose router went away or cancelled before their end.
    pub cancelled: AtomicU32,
    pub running: AtomicI64,
    /// How often its tokenizer was asked for.
    pub tokenizer_asked: AtomicU32,
    /// What it says of its load, beside what runs.
    pub load: Mutex<v1::Load>,
    live: Mutex<LiveRequests>,
    lane: DataLane,
}

impl Script {
    fn act(&self) -> Act {
        self.act.lock().unwrap().clone()
    }

    fn live(&self) -> MutexGuard<'_, LiveRequests> {
        self.live.lock().unwrap()
    }

    pub fn set(&self, act: Act) {
        *self.act.lock().unwrap() = act;
    }
}

/// A worker in its own runtime.
pub struct Worker {
    pub record: WorkerRecord,
    pub script: Arc<Script>,
    /// Kept so that the watch stream goes on.
    _state: watch::Sender<worker_info::WorkerState>,
    runtime: Option<tokio::runtime::Runtime>,
}

/// A vocabulary of bytes, an end token, and a chat template.
pub fn tokenizer_json() -> Vec<u8> {
    tokenizer_json_with(|_| {})
}

/// The same, changed.
pub fn tokenizer_json_with(change: impl FnOnce(&mut TokenizerSpec)) -> Vec<u8> {
    let mut tokens: Vec<TokenEntry> = (0..=255_u8)
        .map(|byte| TokenEntry {
            text: format!("<0x{byte:02X}>"),
            score: 0.0,
            kind: TokenKind::Byte,
        })
        .collect();
    tokens.push(TokenEntry {
        text: "</s>".into(),
        score: 0.0,
        kind: TokenKind::Control,
    });
    let mut spec = TokenizerSpec {
        model: TokenizerModel::SentencePiece {
            add_space_prefix: false,
        },
        tokens,
        bos: None,
        eos: vec![256],
        unknown: None,
        padding: None,
        add_bos: false,
        add_eos: false,
        chat_templates: vec![ChatTemplate {
            name: "default".into(),
            source: "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}".into(),
        }],
        template_tokens: None,
    };
    change(&mut spec);
    serde_json::to_vec(&spec).unwrap()
}

pub fn card(model: &str) -> ModelCard {
    ModelCard {
        name: model.into(),
        revision: format!("{model}@1").into(),
        architecture: "alphabet".into(),
        vocab_size: 320,
        tokenizer_size: 257,
        context_max: 4096,
        parameters: 1,
        created: 0,
        weight_bytes: 1,
        layout: KvLayout {
            block_size: 16,
            dtype: KvDtype::F32,
            scale_group: 0,
            kv_heads: 1,
            head_dim: 8,
            layers: 1,
            groups: vec![KvGroup {
                kind: KvGroupKind::Full,
                layers: vec![0],
            }],
            numerics: NumericsId([1; 16]),
            origin: None,
            shard: None,
        },
        tokenizer_hash: blake3::hash(&tokenizer_json()).to_hex().to_string(),
    }
}

impl Worker {
    /// Starts a worker on `address` (port 0: any) and waits until it listens.
    pub fn start(id: &str, role: Role, model: &str, lane: &DataLane, address: SocketAddr) -> Self {
        Self::start_with(id, role, model, lane, address, tokenizer_json())
    }

    /// The same with another tokenizer, which its card names.
    pub fn start_with(
        id: &str,
        role: Role,
        model: &str,
        lane: &DataLane,
        address: SocketAddr,
        tokenizer: Vec<u8>,
    ) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let std_listener = std::net::TcpListener::bind(address).unwrap();
        std_listener.set_nonblocking(true).unwrap();
        let address = std_listener.local_addr().unwrap();
        let epoch: u64 = rand::random();
        let record = WorkerRecord {
            id: id.into(),
            epoch: Epoch(epoch),
            role,
            state: WorkerState::Ready,
            control: address.to_string(),
            data: address.to_string(),
            protocol: protocol::CURRENT,
            card: ModelCard {
                tokenizer_hash: blake3::hash(&tokenizer).to_hex().to_string(),
                ..card(model)
            },
            capacity: Capacity::default(),
            topology: String::new(),
        };
        let script = Arc::new(Script {
            act: Mutex::new(Act::Well),
            starts: Mutex::default(),
            prefills: Mutex::default(),
            timeouts: Mutex::default(),
            cancelled_choices: Mutex::default(),
            cancelled: AtomicU32::new(0),
            running: AtomicI64::new(0),
            tokenizer_asked: AtomicU32::new(0),
            load: Mutex::default(),
            live: Mutex::default(),
            lane: lane.clone(),
        });
        let (state, state_rx) = watch::channel(worker_info::WorkerState::Ready);
        let running = Arc::clone(&script);
        let info = WorkerInfo {
            worker_id: id.into(),
            epoch: Epoch(epoch),
            role: role.name(),
            card: Arc::new(record.card.clone()),
            data_address: record.data.clone(),
            tokenizer_json: tokenizer.into(),
            state: state_rx,
            load: Arc::new(move || v1::Load {
                requests_running: running.running.load(Ordering::Relaxed).max(0) as u32,
                ..running.load.lock().unwrap().clone()
            }),
            cache: Arc::default(),
            watchers: Watchers::default(),
        };
        let service = Service {
            info,
            script: Arc::clone(&script),
        };
        runtime.spawn(async move {
            let listener = tokio::net::TcpListener::from_std(std_listener).unwrap();
            transport::server(&transport::TlsSettings::default())
                .unwrap()
                .add_service(DecodeWorkerServer::new(service.clone()))
                .add_service(PrefillWorkerServer::new(service))
                .serve_with_incoming(TcpListenerStream::new(listener))
                .await
                .unwrap();
        });
        Self {
            record,
            script,
            _state: state,
            runtime: Some(runtime),
        }
    }

    /// Ends the worker as SIGKILL would: every connection is closed at once.
    pub fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }

    pub fn address(&self) -> SocketAddr {
        self.record.control.parse().unwrap()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.kill();
    }
}

#[derive(Clone)]
struct Service {
    info: WorkerInfo,
    script: Arc<Script>,
}

/// Counts a call as running, and as cancelled if it ends without `done`.
struct Running(Arc<Script>, bool);

impl Running {
    fn new(script: &Arc<Script>) -> Self {
        script.running.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(script), false)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::Relaxed);
        if !self.1 {
            self.0.cancelled.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn unavailable(message: &str) -> Status {
    to_status(&Error::new(ErrorKind::Unavailable, message))
}

fn event(event: v1::decode_event::Event) -> v1::DecodeEvent {
    v1::DecodeEvent { event: Some(event) }
}

fn sampled(id: u32, last: bool) -> v1::SampledToken {
    let finish = if last {
        v1::FinishReason::Length
    } else {
        v1::FinishReason::Unspecified
    };
    v1::SampledToken {
        id,
        logprobs: Some(v1::Logprobs {
            logprob: -0.5,
            top: Vec::new(),
        }),
        finish: finish.into(),
    }
}

struct Numbers {
    n: u32,
    max_tokens: u32,
    base: Vec<u32>,
}

fn numbers(work: &v1::WorkRequest) -> Numbers {
    let sampling = work.sampling.clone().unwrap();
    let n = sampling.n.unwrap();
    let base = (0..n as usize)
        .map(|choice| {
            work.forced
                .get(choice)
                .map_or(0, |ids| ids.ids.len() as u32)
        })
        .collect();
    Numbers {
        n,
        max_tokens: sampling.max_tokens.unwrap(),
        base,
    }
}

type Events = mpsc::Sender<Result<v1::DecodeEvent, Status>>;

impl Service {
    fn note_timeout<T>(&self, request: &Request<T>) {
        let timeout = request.metadata().get("grpc-timeout");
        let timeout = timeout.map(|value| value.to_str().unwrap().to_owned());
        self.script.timeouts.lock().unwrap().extend(timeout);
    }

    async fn decode(
        self,
        start: v1::DecodeStart,
        mut commands: Streaming<v1::DecodeCommand>,
        events: Events,
        stop: Stop,
    ) {
        use v1::decode_command::Command;
        let mut running = Running::new(&self.script);
        let script = Arc::clone(&self.script);
        let (cancel_tx, mut cancel_rx) = mpsc::channel(16);
        let work = self.work(start, &events, &mut cancel_rx);
        let read = async {
            while let Some(Ok(command)) = commands.next().await {
                match command.command {
                    Some(Command::CancelChoice(cancel)) => {
                        script.cancelled_choices.lock().unwrap().push(cancel.choice);
                        let _ = cancel_tx.send(Told::CancelChoice(cancel.choice)).await;
                    }
                    Some(Command::Reticket(reticket)) => {
                        let _ = cancel_tx.send(Told::Reticket(reticket.attempt)).await;
                    }
                    Some(Command::PrefillLocally(local)) => {
                        let _ = cancel_tx.send(Told::Local(local)).await;
                    }
                    Some(Command::Cancel(_)) => break,
                    _ => {}
                }
            }
        };
        tokio::select! {
            () = work => running.1 = true,
            () = read => {
                // Cancelled: the last word of a request that will not go on.
                let _ = events.send(Ok(event(v1::decode_event::Event::Ended(v1::Ended::default())))).await;
            }
            () = events.closed() => {}
            () = stop.stopped() => {
                let error = stop.reason().as_ref().map(to_detail);
                let ended = v1::decode_event::Event::Ended(v1::Ended { error });
                let _ = events.send(Ok(event(ended))).await;
            }
        }
    }

    async fn work(self, start: v1::DecodeStart, events: &Events, told: &mut mpsc::Receiver<Told>) {
        use v1::decode_event::Event;
        let script = &self.script;
        let work = start.work.clone().unwrap();
        let Numbers {
            n,
            max_tokens,
            mut base,
        } = numbers(&work);
        script.starts.lock().unwrap().push(start.clone());
        let act = script.act();
        if act == Act::Hang {
            std::future::pending::<()>().await;
        }
        let send = async |e: Event| drop(events.send(Ok(event(e))).await);
        let mut local = start.path() == v1::decode_start::Path::Local;
        let mut attempt = start.attempt;
        while !local {
            let ticket: Vec<u8> = rand::random::<[u8; 16]>().to_vec();
            let (tx, rx) = oneshot::channel();
            script.lane.0.lock().unwrap().insert(ticket.clone(), tx);
            let lane = v1::Lane {
                ticket,
                attempt,
                epoch: work.epoch,
                ..v1::Lane::default()
            };
            send(Event::Reserved(v1::Reserved {
                lane: Some(lane),
                cached_tokens: 0,
            }))
            .await;
            tokio::select! {
                committed = rx => {
                    if committed.is_err() {
                        std::future::pending::<()>().await;
                    }
                    let first = (0..n)
                        .map(|c| sampled(letter(c, base[c as usize]), base[c as usize] + 1 == max_tokens))
                        .collect();
                    send(Event::Committed(v1::Committed { first, transfer_us: 1 })).await;
                    break;
                }
                command = told.recv() => match command {
                    Some(Told::Reticket(next)) => attempt = next,
                    Some(Told::Local(told)) => {
                        base = told.forced.iter().map(|ids| ids.ids.len() as u32).collect();
                        base.resize(n as usize, 0);
                        local = true;
                    }
                    _ => {}
                }
            }
        }
        if local {
            send(Event::Started(v1::DecodeStarted {
                cached_tokens: 0,
                queued_us: 1,
            }))
            .await;
        }
        let mut open: Vec<u32> = (0..n).collect();
        let mut sent = 0;
        let first = base.iter().copied().min().unwrap_or(0);
        for index in first..max_tokens {
            if let Act::Slowly(pause) = script.act() {
                tokio::time::sleep(pause).await;
            }
            while let Ok(command) = told.try_recv() {
                if let Told::CancelChoice(choice) = command {
                    open.retain(|open| *open != choice);
                }
            }
            for choice in open.clone() {
                if index < base[choice as usize] {
                    continue;
                }
                if script.act() == Act::BreakAfter(sent) {
                    let _ = events.send(Err(unavailable("the power went out"))).await;
                    return;
                }
                if script.act() == Act::HoldAfter(sent) {
                    std::future::pending::<()>().await;
                }
                let id = match script.act() {
                    Act::Lie => u32::from(b'!'),
                    _ => letter(choice, index),
                };
                send(Event::Tokens(v1::WorkerTokens {
                    choice,
                    first_index: index,
                    tokens: vec![sampled(id, index + 1 == max_tokens)],
                }))
                .await;
                sent += 1;
            }
            if open.is_empty() {
                break;
            }
        }
        for choice in open {
            send(Event::Finished(v1::WorkerChoiceFinished {
                choice,
                reason: v1::FinishReason::Length.into(),
                output_tokens: max_tokens,
            }))
            .await;
        }
        send(Event::Ended(v1::Ended::default())).await;
    }

    async fn prefill(
        self,
        request: v1::PrefillRequest,
        events: mpsc::Sender<Result<v1::PrefillEvent, Status>>,
    ) {
        let mut running = Running::new(&self.script);
        tokio::select! {
            () = self.prefill_work(request, &events) => running.1 = true,
            () = events.closed() => {}
        }
    }

    async fn prefill_work(
        &self,
        request: v1::PrefillRequest,
        events: &mpsc::Sender<Result<v1::PrefillEvent, Status>>,
    ) {
        use v1::prefill_event::Event;
        let script = &self.script;
        script.prefills.lock().unwrap().push(request.clone());
        let act = script.act();
        if act == Act::Hang {
            std::future::pending::<()>().await;
        }
        let send = async |event: Event| {
            drop(
                events
                    .send(Ok(v1::PrefillEvent { event: Some(event) }))
                    .await,
            );
        };
        let fail = async || drop(events.send(Err(unavailable("the power went out"))).await);
        send(Event::Accepted(v1::PrefillAccepted::default())).await;
        send(Event::Started(v1::PrefillStarted {
            cached_tokens: 16,
            queued_us: 1,
        }))
        .await;
        match act {
            Act::Slowly(pause) => tokio::time::sleep(pause).await,
            Act::BreakAfter(_) => return fail().await,
            _ => {}
        }
        let Numbers {
            n,
            max_tokens,
            base,
        } = numbers(request.work.as_ref().unwrap());
        let tokens = (0..n)
            .map(|c| {
                sampled(
                    letter(c, base[c as usize]),
                    base[c as usize] + 1 == max_tokens,
                )
            })
            .collect();
        send(Event::First(v1::First {
            tokens,
            prefill_us: 100,
            cached_tokens: 16,
        }))
        .await;
        if act == Act::BreakAfterFirst {
            return fail().await;
        }
        let ticket = request.lane.unwrap().ticket;
        let commit = script.lane.0.lock().unwrap().remove(&ticket);
        let committed = max_tokens > 1 && commit.is_some_and(|commit| commit.send(()).is_ok());
        if act == Act::BreakAfterCommit {
            return fail().await;
        }
        send(Event::HandedOff(v1::HandedOff {
            committed,
            bytes: 1,
            exposed_us: 1,
            at_link_speed_us: 1,
        }))
        .await;
    }
}

enum Told {
    CancelChoice(u32),
    Reticket(u32),
    Local(v1::PrefillLocally),
}

fn refuse(script: &Script) -> Result<(), Status> {
    match script.act() {
        Act::Refuse(error) => Err(to_status(&error)),
        _ => Ok(()),
    }
}

#[tonic::async_trait]
impl DecodeWorker for Service {
    type DecodeStream = EventStream<v1::DecodeEvent>;
    type TokenizerSpecStream = EventStream<v1::TokenizerSpecChunk>;
    type WatchStream = EventStream<v1::WatchEvent>;

    async fn decode(
        &self,
        request: Request<Streaming<v1::DecodeCommand>>,
    ) -> Result<Response<Self::DecodeStream>, Status> {
        self.note_timeout(&request);
        refuse(&self.script)?;
        let mut commands = request.into_inner();
        let Some(v1::decode_command::Command::Start(start)) = commands
            .message()
            .await?
            .and_then(|command| command.command)
        else {
            return Err(Status::invalid_argument("no start"));
        };
        let work = start.work.as_ref().unwrap();
        let order = WorkOrder::from_wire(work.clone(), self.info.epoch, &self.info.card)
            .map_err(|error| to_status(&error))?;
        let script = Arc::clone(&self.script);
        let id = order.request_id;
        let started = script.live().start(&id, order.fence, Instant::now());
        let stop = started.map_err(|error| to_status(&error))?;
        let (tx, rx) = mpsc::channel(8);
        let running = Service::decode(self.clone(), start, commands, tx, stop);
        tokio::spawn(async move {
            running.await;
            script.live().end(&id);
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(rx))))
    }

    async fn cancel(
        &self,
        request: Request<v1::CancelRequest>,
    ) -> Result<Response<v1::CancelResponse>, Status> {
        let known = self
            .script
            .live()
            .take_cancel(request.into_inner(), Instant::now());
        Ok(Response::new(v1::CancelResponse { known }))
    }

    async fn drain(
        &self,
        _: Request<v1::DrainRequest>,
    ) -> Result<Response<v1::DrainResponse>, Status> {
        Ok(Response::new(v1::DrainResponse::default()))
    }

    async fn describe(
        &self,
        request: Request<v1::DescribeRequest>,
    ) -> Result<Response<v1::WorkerDescription>, Status> {
        let described = self.info.describe(&request.into_inner());
        described
            .map(Response::new)
            .map_err(|error| to_status(&error))
    }

    async fn tokenizer_spec(
        &self,
        _: Request<v1::TokenizerSpecRequest>,
    ) -> Result<Response<Self::TokenizerSpecStream>, Status> {
        self.script.tokenizer_asked.fetch_add(1, Ordering::Relaxed);
        Ok(Response::new(self.info.tokenizer_stream()))
    }

    async fn watch(
        &self,
        request: Request<v1::WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        Ok(Response::new(self.info.watch_stream(request.into_inner())))
    }

    async fn acknowledge_drain(
        &self,
        request: Request<v1::AcknowledgeDrainRequest>,
    ) -> Result<Response<v1::AcknowledgeDrainResponse>, Status> {
        let answer = self.info.drain_acknowledged(request.into_inner());
        Ok(Response::new(answer))
    }
}

#[tonic::async_trait]
impl PrefillWorker for Service {
    type PrefillStream = EventStream<v1::PrefillEvent>;
    type TokenizerSpecStream = EventStream<v1::TokenizerSpecChunk>;
    type WatchStream = EventStream<v1::WatchEvent>;

    async fn prefill(
        &self,
        request: Request<v1::PrefillRequest>,
    ) -> Result<Response<Self::PrefillStream>, Status> {
        self.note_timeout(&request);
        refuse(&self.script)?;
        let request = request.into_inner();
        let work = request.work.clone().unwrap();
        baton_proto::work::WorkOrder::from_wire(work, self.info.epoch, &self.info.card)
            .map_err(|error| to_status(&error))?;
        let (tx, rx) = mpsc::channel(8);
        tokio::spawn(Service::prefill(self.clone(), request, tx));
        Ok(Response::new(Box::pin(ReceiverStream::new(rx))))
    }

    async fn cancel(
        &self,
        request: Request<v1::CancelRequest>,
    ) -> Result<Response<v1::CancelResponse>, Status> {
        DecodeWorker::cancel(self, request).await
    }

    async fn drain(
        &self,
        request: Request<v1::DrainRequest>,
    ) -> Result<Response<v1::DrainResponse>, Status> {
        DecodeWorker::drain(self, request).await
    }

    async fn describe(
        &self,
        request: Request<v1::DescribeRequest>,
    ) -> Result<Response<v1::WorkerDescription>, Status> {
        DecodeWorker::describe(self, request).await
    }

    async fn tokenizer_spec(
        &self,
        request: Request<v1::TokenizerSpecRequest>,
    ) -> Result<Response<Self::TokenizerSpecStream>, Status> {
        DecodeWorker::tokenizer_spec(self, request).await
    }

    async fn watch(
        &self,
        request: Request<v1::WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        DecodeWorker::watch(self, request).await
    }

    async fn acknowledge_drain(
        &self,
        request: Request<v1::AcknowledgeDrainRequest>,
    ) -> Result<Response<v1::AcknowledgeDrainResponse>, Status> {
        DecodeWorker::acknowledge_drain(self, request).await
    }

    /// This worker has no lanes.
    async fn probe_lane(
        &self,
        _: Request<v1::ProbeLaneRequest>,
    ) -> Result<Response<v1::ProbeLaneResponse>, Status> {
        Err(Status::unimplemented("no lanes"))
    }
}
