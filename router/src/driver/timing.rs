//! Where a request's time went, on the router's clock.

use std::time::Duration;

use baton_observability::RouterMetrics;
use baton_observability::labels::{Path, TtftPhase};
use baton_observability::latency::{SecondTokenMarks, TtftMarks};
use baton_proto::{Error, ErrorKind, v1};
use tokio::time::Instant;

use super::sessions::Report;
use crate::placement::WorkerKey;
use crate::request::{DecodeEvent, PrefillEvent};

/// The marks of one request, as time since it was received.
pub struct Timing {
    received: Instant,
    marks: TtftMarks,
    first_sent: Option<Duration>,
    last_sent: Duration,
    /// Per choice: when its last token was sent.
    choices: Vec<Option<Duration>>,
    tokens: u64,
    committed: Option<Duration>,
    handoff: Option<v1::Handoff>,
    /// When the time to the first token was foretold, and what was.
    forecast: Option<(Duration, Duration)>,
    local: bool,
    prefill_worker: String,
    decode_worker: String,
}

impl Timing {
    pub fn new(received: Instant, admitted: Instant, tokenized: Instant, n: u32) -> Self {
        let marks = TtftMarks {
            admitted: Some(admitted - received),
            tokenized: Some(tokenized - received),
            ..TtftMarks::default()
        };
        Self {
            received,
            marks,
            first_sent: None,
            last_sent: Duration::ZERO,
            choices: vec![None; n as usize],
            tokens: 0,
            committed: None,
            handoff: None,
            forecast: None,
            local: false,
            prefill_worker: String::new(),
            decode_worker: String::new(),
        }
    }

    /// The machine's time.
    pub fn now(&self) -> Duration {
        self.received.elapsed()
    }

    fn path(&self) -> Path {
        if self.local {
            Path::Local
        } else {
            Path::Disagg
        }
    }

    /// The first token was foretold at `now`, to come after `wait`.
    pub fn foretold(&mut self, now: Duration, wait: Duration) {
        self.forecast = Some((now, wait));
    }

    /// The forecast and what came of it, once, when the first token was sent.
    pub fn take_forecast(&mut self) -> Option<(Duration, Duration)> {
        let first = self.first_sent?;
        let (at, wait) = self.forecast.take()?;
        Some((wait, first.saturating_sub(at)))
    }

    /// A decode worker was chosen.
    pub fn routed(&mut self, decode: &WorkerKey, local: bool) {
        self.decode_worker = decode.id.0.clone();
        self.local = local;
        if local {
            self.prefill_worker.clear();
        }
        if self.first_sent.is_none() {
            self.marks.routed = Some(self.now());
        }
    }

    /// Blocks are granted and a prefill worker is asked.
    pub fn reserved(&mut self, prefill: &WorkerKey) {
        self.prefill_worker = prefill.id.0.clone();
        if self.first_sent.is_none() {
            self.marks.reserved = Some(self.now());
        }
    }

    /// The decode worker computes the prompt after all.
    pub fn goes_local(&mut self) {
        self.local = true;
        self.prefill_worker.clear();
    }

    pub fn heard_from_decode(&mut self, event: &DecodeEvent) {
        let now = self.now();
        match event {
            DecodeEvent::Committed { .. } => self.committed = Some(now),
            _ if self.first_sent.is_some() => {}
            DecodeEvent::Started { .. } => self.marks.prefill_started = Some(now),
            DecodeEvent::Tokens { .. } => self.first_returned(now, None),
            _ => {}
        }
    }

    pub fn heard_from_prefill(&mut self, event: &PrefillEvent, report: Report) {
        let now = self.now();
        self.handoff = report.handoff.or(self.handoff);
        match event {
            _ if self.first_sent.is_some() => {}
            PrefillEvent::Started { .. } => self.marks.prefill_started = Some(now),
            PrefillEvent::First { .. } => self.first_returned(now, report.prefill),
            _ => {}
        }
    }

    /// The token is here; its worker says how long it computed.
    fn first_returned(&mut self, now: Duration, prefill: Option<Duration>) {
        self.marks.first_token_returned = Some(now);
        let started = self.marks.prefill_started.unwrap_or(now);
        self.marks.prefilled = Some(prefill.map_or(now, |took| (started + took).min(now)));
    }

    /// `count` tokens of a choice were handed to the client's channel.
    pub fn sent(&mut self, choice: u32, count: u64, metrics: &RouterMetrics) {
        let now = self.now();
        let path = self.path();
        if self.first_sent.is_none() {
            self.first_sent = Some(now);
            metrics.time_to_first_token.get(path).observe_duration(now);
            let phases = self.marks.split(now);
            for (phase, took) in phases {
                metrics.ttft_phase.get(phase).observe_duration(took);
            }
            if let Some((at, wait)) = self.forecast {
                let took = now.saturating_sub(at).as_secs_f64();
                metrics
                    .ttft_over_forecast
                    .observe(took / wait.as_secs_f64().max(1e-6));
            }
            let own = [TtftPhase::Admit, TtftPhase::Tokenize, TtftPhase::Route];
            let overhead = phases
                .iter()
                .filter(|(phase, _)| own.contains(phase))
                .map(|(_, took)| *took)
                .sum();
            metrics.overhead.observe_duration(overhead);
        }
        let gaps = metrics.inter_token_latency.get(path);
        let last = &mut self.choices[choice as usize];
        if let Some(last) = *last {
            gaps.observe_duration(now.saturating_sub(last));
        }
        if let (Some(before), Some(first), true) = (*last, self.first_sent, !self.local)
            && before == first
        {
            let marks = SecondTokenMarks {
                committed: self.committed.map(|at| at.saturating_sub(first)),
                decode_started: None,
            };
            for (phase, took) in marks.split(now.saturating_sub(first)) {
                metrics.second_token_phase.get(phase).observe_duration(took);
            }
        }
        *last = Some(now);
        // Tokens that came together are seen together.
        gaps.observe_n(0.0, count - 1);
        self.tokens += count;
        self.last_sent = now;
    }

    /// The request is over.
    pub fn ended(&self, metrics: &RouterMetrics) {
        let path = self.path();
        metrics
            .request_duration
            .get(path)
            .observe_duration(self.now());
        if let Some(first) = self.first_sent {
            // Choices decode side by side: the mean gap is that of one of them.
            let per_choice = self.tokens / self.choices.len().max(1) as u64;
            if per_choice > 1 {
                let gap = (self.last_sent - first).as_secs_f64() / (per_choice - 1) as f64;
                metrics.time_per_output_token.get(path).observe(gap);
            }
        }
    }

    /// The timings as the client gets them.
    pub fn report(&self) -> v1::PhaseTimings {
        let us = |duration: Duration| u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        let ttft = self.first_sent.unwrap_or(Duration::ZERO);
        // Cut to whole microseconds as running totals, so that the parts add up.
        let mut passed = Duration::ZERO;
        let parts = self.marks.split(ttft).map(|(_, took)| {
            let before = us(passed);
            passed += took;
            us(passed) - before
        });
        v1::PhaseTimings {
            admit_us: parts[0],
            tokenize_us: parts[1],
            route_us: parts[2],
            reserve_us: parts[3],
            prefill_queue_us: parts[4],
            prefill_us: parts[5],
            first_token_return_us: parts[6],
            send_us: parts[7],
            ttft_us: us(ttft),
            total_us: us(self.now()),
            path: if self.local { "local" } else { "disagg" }.to_owned(),
            prefill_worker: self.prefill_worker.clone(),
            decode_worker: self.decode_worker.clone(),
            handoff: self.handoff.filter(|_| !self.local),
        }
    }

    /// One line per request. Neither prompt nor output is in it.
    pub fn log(
        &self,
        model: &str,
        prompt_tokens: usize,
        output_tokens: u32,
        outcome: &Result<(), Error>,
    ) {
        let ms = |duration: Duration| duration.as_micros() as f64 / 1e3;
        let ttft_ms = self.first_sent.map(ms);
        let total_ms = ms(self.now());
        let path = if self.local { "local" } else { "disagg" };
        let (prefill, decode) = (&self.prefill_worker, &self.decode_worker);
        match outcome {
            Ok(()) => tracing::info!(
                model,
                path,
                prefill,
                decode,
                prompt_tokens,
                output_tokens,
                ttft_ms,
                total_ms,
                "request finished"
            ),
            // A client that left is no failure of ours.
            Err(error) if error.kind == ErrorKind::Cancelled => tracing::info!(
                model, path, prefill, decode, prompt_tokens, output_tokens, ttft_ms, total_ms,
                reason = error.reason, %error,
                "request cancelled"
            ),
            Err(error) => tracing::warn!(
                model, path, prefill, decode, prompt_tokens, output_tokens, ttft_ms, total_ms,
                reason = error.reason, %error,
                "request failed"
            ),
        }
    }
}
