//! The router's settings, with their defaults and checks.
//!
//! Unknown keys are refused; a wrong value is refused by name, before anything
//! is bound. Times end in `_ms`. The flags and files they come from are the
//! binary's business.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use baton_proto::name::check_name;
use baton_proto::transport::TlsSettings;
use baton_proto::{Error, slo};
use serde::{Deserialize, Serialize};

use crate::last_view::Seed;

/// Bytes of a resume key: what cannot be guessed, written as text.
const RESUME_KEY_BYTES_MIN: usize = 32;

/// Everything a router can be told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RouterConfig {
    /// Where the gRPC front door listens.
    pub grpc: SocketAddr,
    /// Where the HTTP front door listens.
    pub http: SocketAddr,
    /// TLS of both front doors.
    pub tls: TlsSettings,
    /// TLS towards workers.
    pub worker_tls: TlsSettings,
    /// API key to tenant. Empty: no key is asked for and everybody is the tenant
    /// `default`, which only a loopback address allows.
    pub api_keys: BTreeMap<String, String>,
    /// Allow an address beyond loopback without API keys.
    pub allow_anonymous: bool,

    /// Requests in flight, waiting or running; more are refused at once.
    pub requests_max: u32,
    /// Requests that have no first token yet; more are refused at once.
    pub pending_requests_max: u32,
    /// Prompt tokens of those requests; more are refused at once.
    pub pending_tokens_max: u64,
    /// Requests in flight of one tenant.
    pub tenant_requests_max: u32,

    /// The decode worker computes a prompt itself when at most this many of its
    /// tokens are not cached there. 0 never, 4294967295 always.
    pub local_prefill_tokens_max: u32,
    /// Longer prompts are refused while no prefill worker is there, instead of computed by
    /// decode workers. What was begun goes on all the same.
    pub refuse_without_prefill: bool,
    /// Spans of 16 tokens whose worker the router remembers (about 100 bytes each).
    pub prefix_spans_max: usize,
    /// Failed tries to place a request before it fails.
    pub attempts_max: u32,

    /// The longest time to the first token of requests without a target of their own:
    /// those that would wait longer are refused. Absent: none.
    pub ttft_target_ms: Option<u64>,
    /// The time of a request whose client gave no deadline, and the most a client gets.
    pub request_timeout_ms: u64,
    /// Waiting for a decode worker while there is none; 0 refuses at once. Absent: as long
    /// as the request has.
    pub pool_timeout_ms: Option<u64>,
    /// The longest gap in a stream whose worker died, beyond what computing its tokens again
    /// is foretold to take; then it ends with an error, and may be resumed.
    pub stream_gap_ms: u64,
    /// A worker's first answer to a call.
    pub answer_timeout_ms: u64,
    /// Waiting in a worker's queue.
    pub queue_timeout_ms: u64,
    /// Computing a prompt, from its start to the first token.
    pub prefill_timeout_ms: u64,
    /// A handoff without progress after the first token.
    pub handoff_timeout_ms: u64,
    /// A decoding request without a token. Covers preemption under load.
    pub stall_timeout_ms: u64,
    /// A worker's watch stream without a word (workers send every 250 ms): it gets no
    /// new work, and what it has moves where another worker can take it.
    pub worker_silence_ms: u64,
    /// The same, after which the worker is lost, whether another one is there or not.
    pub worker_lost_ms: u64,
    /// A client that takes nothing while its buffer is full.
    pub slow_client_timeout_ms: u64,
    /// Events buffered for one client; past it the worker's stream is not read.
    pub stream_buffer_events: usize,
    /// What running streams get after a shutdown was asked for.
    pub drain_ms: u64,
    /// What a request without the field `exact` means.
    pub exact: bool,
    /// Secrets that resume tokens are signed (the first) and checked (each) with.
    /// Empty: one is drawn at start, and a token is good at this router alone.
    pub resume_keys: Vec<String>,
    /// How long a resume token is good.
    pub resume_life_s: u64,
    /// Workers to start with while the store cannot be read, `ROLE=HOST:PORT` each.
    pub worker: Vec<String>,
    /// Where the last view of the cluster is kept for such a start.
    pub state_dir: Option<PathBuf>,
}

impl Default for RouterConfig {
    fn default() -> Self {
        Self {
            grpc: SocketAddr::from(([127, 0, 0, 1], 50051)),
            http: SocketAddr::from(([127, 0, 0, 1], 8000)),
            tls: TlsSettings::default(),
            worker_tls: TlsSettings::default(),
            api_keys: BTreeMap::new(),
            allow_anonymous: false,
            requests_max: 4096,
            pending_requests_max: 1024,
            // A thousand prompts of a thousand tokens: 4 MiB of ids.
            pending_tokens_max: 1 << 20,
            tenant_requests_max: 1024,
            local_prefill_tokens_max: 64,
            refuse_without_prefill: false,
            prefix_spans_max: 1 << 16,
            attempts_max: 3,
            ttft_target_ms: None,
            request_timeout_ms: 600_000,
            pool_timeout_ms: None,
            stream_gap_ms: 1_500,
            answer_timeout_ms: 5_000,
            queue_timeout_ms: 60_000,
            prefill_timeout_ms: 120_000,
            handoff_timeout_ms: 10_000,
            stall_timeout_ms: 60_000,
            worker_silence_ms: 1_000,
            worker_lost_ms: 3_000,
            slow_client_timeout_ms: 30_000,
            stream_buffer_events: 64,
            drain_ms: 10_000,
            exact: true,
            resume_keys: Vec::new(),
            resume_life_s: 3_600,
            worker: Vec::new(),
            state_dir: None,
        }
    }
}

impl RouterConfig {
    /// Checks every value.
    ///
    /// # Errors
    /// [`baton_proto::ErrorKind::Invalid`] naming the setting, its value and what is allowed.
    pub fn validate(&self) -> Result<(), Error> {
        let counts = [
            ("requests_max", u64::from(self.requests_max)),
            ("pending_requests_max", u64::from(self.pending_requests_max)),
            ("pending_tokens_max", self.pending_tokens_max),
            ("tenant_requests_max", u64::from(self.tenant_requests_max)),
            ("attempts_max", u64::from(self.attempts_max)),
            ("stream_buffer_events", self.stream_buffer_events as u64),
            ("request_timeout_ms", self.request_timeout_ms),
            ("stream_gap_ms", self.stream_gap_ms),
            ("answer_timeout_ms", self.answer_timeout_ms),
            ("queue_timeout_ms", self.queue_timeout_ms),
            ("prefill_timeout_ms", self.prefill_timeout_ms),
            ("handoff_timeout_ms", self.handoff_timeout_ms),
            ("stall_timeout_ms", self.stall_timeout_ms),
            ("worker_silence_ms", self.worker_silence_ms),
            ("slow_client_timeout_ms", self.slow_client_timeout_ms),
            ("resume_life_s", self.resume_life_s),
        ];
        for (field, value) in counts {
            if value == 0 {
                return Err(Error::invalid(field, "0 is not allowed, the least is 1"));
            }
        }
        if let Some(short) = self
            .resume_keys
            .iter()
            .find(|key| key.len() < RESUME_KEY_BYTES_MIN)
        {
            let message = format!(
                "a key of {} bytes, the least is {RESUME_KEY_BYTES_MIN}",
                short.len()
            );
            return Err(Error::invalid("resume_keys", message));
        }
        if let Some(ms) = self.ttft_target_ms {
            slo::ttft_from_ms(ms as f64, "ttft_target_ms")?;
        }
        self.seeds()?;
        if self.worker_lost_ms < self.worker_silence_ms {
            let message = format!(
                "{} is below worker_silence_ms {}",
                self.worker_lost_ms, self.worker_silence_ms
            );
            return Err(Error::invalid("worker_lost_ms", message));
        }
        for (key, tenant) in &self.api_keys {
            if key.trim().is_empty() || tenant.trim().is_empty() {
                return Err(Error::invalid(
                    "api_keys",
                    format!("a key or tenant is empty (tenant `{tenant}`)"),
                ));
            }
            check_name("api_keys", tenant)?;
        }
        for (field, address) in [("grpc", self.grpc), ("http", self.http)] {
            self.check_exposure(field, address)?;
        }
        Ok(())
    }

    /// Refuses an address beyond loopback that nobody needs a key for.
    ///
    /// # Errors
    /// [`baton_proto::ErrorKind::Invalid`] naming the setting.
    pub fn check_exposure(&self, field: &str, address: SocketAddr) -> Result<(), Error> {
        let loopback = address.ip().to_canonical().is_loopback();
        if loopback || self.allow_anonymous || !self.api_keys.is_empty() {
            return Ok(());
        }
        Err(Error::invalid(
            field,
            format!("`{address}` is not loopback; set api_keys or allow_anonymous"),
        ))
    }

    /// The workers named by hand.
    ///
    /// # Errors
    /// [`baton_proto::ErrorKind::Invalid`] naming the setting.
    pub(crate) fn seeds(&self) -> Result<Vec<Seed>, Error> {
        self.worker.iter().map(|text| Seed::parse(text)).collect()
    }

    pub(crate) fn ttft_target(&self) -> Option<Duration> {
        self.ttft_target_ms.map(Duration::from_millis)
    }

    pub(crate) fn request_timeout(&self) -> Duration {
        Duration::from_millis(self.request_timeout_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(change: impl FnOnce(&mut RouterConfig)) -> String {
        let mut config = RouterConfig::default();
        change(&mut config);
        config.validate().unwrap_err().field
    }

    #[test]
    fn defaults_are_allowed_and_wrong_values_are_named() {
        RouterConfig::default().validate().unwrap();
        assert_eq!(refused(|c| c.attempts_max = 0), "attempts_max");
        assert_eq!(
            refused(|c| c.stream_buffer_events = 0),
            "stream_buffer_events"
        );
        assert_eq!(
            refused(|c| drop(c.api_keys.insert("k".into(), String::new()))),
            "api_keys"
        );
    }

    #[test]
    fn nothing_listens_beyond_loopback_without_keys() {
        let everywhere = SocketAddr::from(([0, 0, 0, 0], 8000));
        assert_eq!(refused(|c| c.http = everywhere), "http");
        // IPv4 in IPv6 form is what it stands for.
        assert_eq!(
            refused(|c| c.http = "[::ffff:192.0.2.1]:8000".parse().unwrap()),
            "http"
        );
        for here in ["[::1]:8000", "[::ffff:127.0.0.1]:8000", "127.8.9.1:8000"] {
            let config = RouterConfig {
                http: here.parse().unwrap(),
                ..RouterConfig::default()
            };
            config.validate().unwrap();
        }
        let mut config = RouterConfig {
            http: everywhere,
            ..RouterConfig::default()
        };
        config.api_keys.insert("key".into(), "tenant".into());
        config.validate().unwrap();
    }

    #[test]
    fn unknown_keys_are_refused_by_name() {
        let error = serde_json::from_str::<RouterConfig>(r#"{"attempt_max": 3}"#).unwrap_err();
        assert!(error.to_string().contains("attempt_max"), "{error}");
        let config: RouterConfig = serde_json::from_str(r#"{"attempts_max": 7}"#).unwrap();
        assert_eq!(config.attempts_max, 7);
    }
}
