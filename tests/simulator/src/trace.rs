//! What happened in a run, line by line, and what must not have.
//!
//! Lines are kept as they are written, so that a run can be told afterwards; a digest of
//! all of them says whether two runs were the same.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::time::Duration;

use serde::Serialize;
use tokio::time::Instant;

/// One thing that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    pub at: Duration,
    /// Number of the client's request.
    pub request: Option<u32>,
    /// The worker it happened at, as `name#life`.
    pub worker: Option<String>,
    /// The try to place the request; 0 if it has none.
    pub attempt: u32,
    pub text: String,
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>9.3} s", self.at.as_secs_f64())?;
        match self.request {
            Some(request) => write!(f, "  r{request:<4}")?,
            None => write!(f, "       ")?,
        }
        match self.attempt {
            0 => write!(f, "   ")?,
            attempt => write!(f, " a{attempt}")?,
        }
        let worker = self.worker.as_deref().unwrap_or("-");
        write!(f, "  {worker:<11} {}", self.text)
    }
}

/// A broken invariant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Violation {
    #[serde(rename = "at_seconds", serialize_with = "seconds")]
    pub at: Duration,
    /// Which of the promises it breaks.
    pub invariant: Invariant,
    pub request: Option<u32>,
    pub worker: Option<String>,
    pub what: String,
}

fn seconds<S: serde::Serializer>(at: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(at.as_secs_f64())
}

/// What holds throughout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Invariant {
    /// Every block is in one state, the counts sum to the pool, all come back.
    NoBlockLost,
    /// No lane touches a block that it has no right to.
    NoUseAfterFree,
    /// Every request is answered by its deadline.
    Answered,
    /// No token repeated, missing or wrong, and none after the end.
    RightTokens,
    /// One worker at a time owns a request, and only the life of it that was asked.
    OneOwner,
    /// No request fails where nothing was broken.
    NoNeedlessError,
    /// No panic, no internal error.
    NoPanic,
}

impl Invariant {
    /// In words, for a report.
    pub const fn name(self) -> &'static str {
        match self {
            Self::NoBlockLost => "no block lost",
            Self::NoUseAfterFree => "no block used after it was freed",
            Self::Answered => "every request answered in time",
            Self::RightTokens => "no token repeated, missing or wrong",
            Self::OneOwner => "one owner per request",
            Self::NoNeedlessError => "no needless error",
            Self::NoPanic => "no panic",
        }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.3} s: ", self.at.as_secs_f64())?;
        if let Some(request) = self.request {
            write!(f, "r{request}: ")?;
        }
        if let Some(worker) = &self.worker {
            write!(f, "{worker}: ")?;
        }
        write!(f, "{} ({})", self.what, self.invariant.name())
    }
}

#[derive(Debug, Default)]
struct Inner {
    lines: Vec<Line>,
    violations: Vec<Violation>,
}

/// The record of one run. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Trace {
    start: Instant,
    inner: Arc<Mutex<Inner>>,
}

impl Trace {
    /// An empty record that begins now.
    pub fn begin() -> Self {
        Self {
            start: Instant::now(),
            inner: Arc::default(),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Time since the run began.
    pub fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// Something about the whole cluster or one worker.
    pub fn note(&self, worker: Option<&str>, text: impl Into<String>) {
        self.push(None, worker, 0, text.into());
    }

    /// Something about a request.
    pub fn tell(&self, request: u32, worker: Option<&str>, attempt: u32, text: impl Into<String>) {
        self.push(Some(request), worker, attempt, text.into());
    }

    fn push(&self, request: Option<u32>, worker: Option<&str>, attempt: u32, text: String) {
        let at = self.now();
        let worker = worker.map(str::to_owned);
        self.lock().lines.push(Line {
            at,
            request,
            worker,
            attempt,
            text,
        });
    }

    /// A broken invariant. The first few of a run are kept.
    pub fn violate(
        &self,
        invariant: Invariant,
        request: Option<u32>,
        worker: Option<&str>,
        what: impl Into<String>,
    ) {
        let what = what.into();
        self.push(request, worker, 0, format!("BROKEN: {what}"));
        let at = self.now();
        let mut inner = self.lock();
        if inner.violations.len() < 20 {
            inner.violations.push(Violation {
                at,
                invariant,
                request,
                worker: worker.map(str::to_owned),
                what,
            });
        }
    }

    /// Everything, and what was broken.
    pub fn take(&self) -> (Vec<Line>, Vec<Violation>) {
        let mut inner = self.lock();
        (
            std::mem::take(&mut inner.lines),
            std::mem::take(&mut inner.violations),
        )
    }
}

/// A digest of a whole trace.
pub fn digest(lines: &[Line]) -> String {
    let mut hasher = blake3::Hasher::new();
    for line in lines {
        hasher.update(line.to_string().as_bytes());
        hasher.update(b"\n");
    }
    hasher.finalize().to_hex()[..16].to_owned()
}

/// The lines that tell how `violation` came about: those of its request, and of the
/// workers that had to do with it, without other requests.
pub fn story<'a>(lines: &'a [Line], violation: &Violation) -> Vec<&'a Line> {
    let until = violation.at + Duration::from_millis(1);
    let of_request =
        |line: &&Line| violation.request.is_some() && line.request == violation.request;
    let name = |worker: &str| worker.split('#').next().unwrap_or(worker).to_owned();
    let mut workers: BTreeSet<String> = lines
        .iter()
        .filter(of_request)
        .filter_map(|line| line.worker.as_deref().map(name))
        .collect();
    workers.extend(violation.worker.as_deref().map(name));
    let told = |line: &&Line| {
        let at_worker = line
            .worker
            .as_deref()
            .is_none_or(|worker| workers.contains(&name(worker)));
        // Without a request in question every request at the worker may be the cause.
        let whose = line.request.is_none() || violation.request.is_none();
        line.at <= until && (of_request(line) || whose && at_worker)
    };
    lines.iter().filter(told).collect()
}

thread_local! {
    static PANICS: RefCell<Option<Vec<String>>> = const { RefCell::new(None) };
}

/// Catches the panics of the calling thread's tasks until it is dropped.
pub struct PanicNet;

impl PanicNet {
    /// Spreads it. Panics of other threads are reported as ever.
    pub fn spread() -> Self {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let before = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |info| {
                let caught = PANICS.with_borrow_mut(|panics| {
                    let Some(panics) = panics else { return false };
                    panics.push(info.to_string().replace('\n', " "));
                    true
                });
                if !caught {
                    before(info);
                }
            }));
        });
        PANICS.set(Some(Vec::new()));
        Self
    }

    /// What has panicked since the last time.
    pub fn take(&self) -> Vec<String> {
        PANICS.with_borrow_mut(|panics| panics.as_mut().map(std::mem::take).unwrap_or_default())
    }
}

impl Drop for PanicNet {
    fn drop(&mut self) {
        PANICS.set(None);
    }
}
