//! Reads along on the wire: what routers and workers tell each other becomes lines of the
//! trace, and who may say what about a request is checked.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use baton_proto::{Epoch, v1};
use bytes::Bytes;
use http_body::Frame;
use prost::Message;

use crate::trace::{Invariant, Trace};
use crate::wire::Host;

/// Bytes before each message: whether it is compressed, and its length.
const PREFIX: usize = 5;

/// Which way something goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// From the router to the worker.
    Up,
    Down,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Decode,
    Prefill,
    Other,
}

/// A request as a router names it to workers: `r12-…` or `r12-….3`.
pub fn request_number(id: &str) -> Option<u32> {
    let (number, _) = id.strip_prefix('r')?.split_once('-')?;
    number.parse().ok()
}

/// Which attempts are counted together: those of one generation of one request.
fn series(id: &str) -> &str {
    id.rsplit_once('.').map_or(id, |(series, _)| series)
}

/// What a call is about.
#[derive(Clone, Debug, Default)]
struct About {
    request: Option<u32>,
    series: String,
    attempt: u32,
    /// The life that the router meant.
    epoch: u64,
}

/// Reads along on one call. Clones share it.
#[derive(Clone)]
pub struct Tap {
    call: Call,
    worker: String,
    epoch: Epoch,
    about: Arc<Mutex<About>>,
    ledger: Arc<Ledger>,
    trace: Trace,
}

impl Tap {
    /// On a call to `uri` at `host`.
    pub fn new(uri: &http::Uri, host: &Host, ledger: &Arc<Ledger>, trace: &Trace) -> Self {
        let call = match uri.path() {
            "/baton.v1.DecodeWorker/Decode" => Call::Decode,
            "/baton.v1.PrefillWorker/Prefill" => Call::Prefill,
            _ => Call::Other,
        };
        Self {
            call,
            worker: host.name.clone(),
            epoch: host.epoch,
            about: Arc::default(),
            ledger: Arc::clone(ledger),
            trace: trace.clone(),
        }
    }

    fn about(&self) -> About {
        let about = self.about.lock().unwrap_or_else(PoisonError::into_inner);
        about.clone()
    }

    fn tell(&self, text: impl Into<String>) {
        let about = self.about();
        if let Some(request) = about.request {
            self.trace
                .tell(request, Some(&self.worker), about.attempt, text);
        }
    }

    /// The head of an answer: a call that fails at once says so there.
    pub fn head(&mut self, headers: &http::HeaderMap) {
        if self.call != Call::Other {
            self.status(headers);
        }
    }

    fn status(&self, headers: &http::HeaderMap) {
        let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
        match text("grpc-status") {
            None | Some("0") => {}
            Some(code) => self.tell(format!(
                "<- status {code}: {}",
                text("grpc-message").unwrap_or_default().replace("%20", " ")
            )),
        }
    }

    /// A frame is sent.
    pub fn see(&mut self, way: Way, frame: &Frame<Bytes>) {
        if self.call == Call::Other {
            return;
        }
        if let Some(trailers) = frame.trailers_ref() {
            return self.status(trailers);
        }
        let Some(mut data) = frame.data_ref().map(|data| &data[..]) else {
            return;
        };
        while data.len() >= PREFIX {
            let (prefix, rest) = data.split_at(PREFIX);
            let length = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]) as usize;
            let (message, rest) = rest.split_at(length.min(rest.len()));
            data = rest;
            match (self.call, way) {
                (Call::Decode, Way::Up) => self.decode_command(message),
                (Call::Decode, Way::Down) => self.decode_event(message),
                (Call::Prefill, Way::Up) => self.prefill_request(message),
                (Call::Prefill, Way::Down) => self.prefill_event(message),
                (Call::Other, _) => {}
            }
        }
    }

    fn begin(&self, work: Option<&v1::WorkRequest>, attempt: u32) {
        let mut about = self.about.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(work) = work {
            about.request = request_number(&work.request_id);
            about.series = series(&work.request_id).to_owned();
            about.epoch = work.epoch;
        }
        about.attempt = attempt;
    }

    fn decode_command(&self, message: &[u8]) {
        use v1::decode_command::Command;
        let Ok(command) = v1::DecodeCommand::decode(message) else {
            return;
        };
        match command.command {
            Some(Command::Start(start)) => {
                self.begin(start.work.as_ref(), start.attempt);
                let forced = start.work.map(|work| work.forced).unwrap_or_default();
                let forced: Vec<usize> = forced.iter().map(|list| list.ids.len()).collect();
                self.tell(match v1::decode_start::Path::try_from(start.path) {
                    Ok(v1::decode_start::Path::Local) => format!("-> compute, forced {forced:?}"),
                    _ => format!("-> reserve, forced {forced:?}"),
                });
            }
            Some(Command::Reticket(reticket)) => {
                self.begin(None, reticket.attempt);
                self.tell("-> reticket");
            }
            Some(Command::PrefillLocally(local)) => {
                self.begin(None, local.attempt);
                self.tell("-> compute here after all");
            }
            Some(Command::CancelChoice(cancel)) => {
                self.tell(format!("-> cancel choice {}", cancel.choice));
            }
            Some(Command::Cancel(_)) => self.tell("-> cancel"),
            None => {}
        }
    }

    fn decode_event(&self, message: &[u8]) {
        use v1::decode_event::Event;
        let Ok(event) = v1::DecodeEvent::decode(message) else {
            return;
        };
        let about = self.about();
        match event.event {
            Some(Event::Queued(_)) => {
                self.ledger.taken(self, &about, "decode");
                self.tell("<- queued");
            }
            Some(Event::Reserved(reserved)) => {
                let attempt = reserved.lane.map_or(0, |lane| lane.attempt);
                let cached = reserved.cached_tokens;
                self.tell(format!(
                    "<- reserved for a{attempt}, {cached} tokens cached"
                ));
            }
            Some(Event::Started(started)) => {
                self.tell(format!(
                    "<- computes, {} tokens cached",
                    started.cached_tokens
                ));
            }
            Some(Event::Committed(_)) => {
                self.ledger.committed(self, &about);
                self.tell("<- committed");
            }
            Some(Event::Aborted(aborted)) => {
                let why = aborted.error.map(|error| error.message).unwrap_or_default();
                self.tell(format!("<- handoff a{} aborted: {why}", aborted.attempt));
            }
            Some(Event::Tokens(tokens)) => {
                let ids: Vec<u32> = tokens.tokens.iter().map(|token| token.id).collect();
                let (choice, first) = (tokens.choice, tokens.first_index);
                self.tell(format!("<- tokens {ids:?} of choice {choice} from {first}"));
            }
            Some(Event::Finished(finished)) => self.tell(format!(
                "<- choice {} finished after {}",
                finished.choice, finished.output_tokens
            )),
            Some(Event::Leaving(_)) => self.tell("<- leaves, the request is to move"),
            Some(Event::Ended(ended)) => match ended.error {
                Some(error) => self.tell(format!("<- ended: {}", error.message)),
                None => self.tell("<- ended"),
            },
            None => {}
        }
    }

    fn prefill_request(&self, message: &[u8]) {
        let Ok(request) = v1::PrefillRequest::decode(message) else {
            return;
        };
        let attempt = request.lane.as_ref().map_or(0, |lane| lane.attempt);
        self.begin(request.work.as_ref(), attempt);
        let to = request.lane.map(|lane| lane.data_address);
        self.tell(format!("-> prefill for {}", to.unwrap_or_default()));
    }

    fn prefill_event(&self, message: &[u8]) {
        use v1::prefill_event::Event;
        let Ok(event) = v1::PrefillEvent::decode(message) else {
            return;
        };
        match event.event {
            Some(Event::Accepted(_)) => {
                self.ledger.taken(self, &self.about(), "prefill");
                self.tell("<- accepted");
            }
            Some(Event::Started(started)) => {
                self.tell(format!(
                    "<- computes, {} tokens cached",
                    started.cached_tokens
                ));
            }
            Some(Event::First(first)) => {
                let ids: Vec<u32> = first.tokens.iter().map(|token| token.id).collect();
                self.tell(format!("<- first {ids:?}"));
            }
            Some(Event::HandedOff(handed)) => {
                self.tell(format!("<- handed off, committed: {}", handed.committed));
            }
            None => {}
        }
    }
}

/// Who took which attempt of which request.
pub struct Ledger {
    trace: Trace,
    owners: Mutex<BTreeMap<(String, u32, &'static str), String>>,
    commits: Mutex<BTreeMap<(String, u32), String>>,
}

impl Ledger {
    /// Nobody has anything.
    pub fn new(trace: Trace) -> Self {
        Self {
            trace,
            owners: Mutex::default(),
            commits: Mutex::default(),
        }
    }

    /// A worker says that it has taken a request.
    fn taken(&self, tap: &Tap, about: &About, role: &'static str) {
        let Some(request) = about.request else { return };
        if about.epoch != tap.epoch.0 {
            let meant = Epoch(about.epoch);
            self.trace.violate(
                Invariant::OneOwner,
                Some(request),
                Some(&tap.worker),
                format!("took work for the life {meant}, it lives {}", tap.epoch),
            );
        }
        let mut owners = self.owners.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (about.series.clone(), about.attempt, role);
        let owner = owners.entry(key).or_insert_with(|| tap.worker.clone());
        if *owner != tap.worker {
            let what = format!("took attempt {} that {owner} had taken", about.attempt);
            self.trace
                .violate(Invariant::OneOwner, Some(request), Some(&tap.worker), what);
        }
    }

    /// Handoffs that were committed so far.
    pub fn commits(&self) -> u64 {
        let commits = self.commits.lock().unwrap_or_else(PoisonError::into_inner);
        commits.len() as u64
    }

    /// A worker says that a handoff to it is whole.
    fn committed(&self, tap: &Tap, about: &About) {
        let Some(request) = about.request else { return };
        let mut commits = self.commits.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (about.series.clone(), about.attempt);
        if let Some(before) = commits.insert(key, tap.worker.clone()) {
            let what = format!("committed attempt {} after {before}", about.attempt);
            self.trace
                .violate(Invariant::OneOwner, Some(request), Some(&tap.worker), what);
        }
    }
}
