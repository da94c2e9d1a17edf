//! What both front doors call: one API below gRPC and HTTP.
//!
//! It authenticates, checks, tokenizes and admits a request and hands it to its
//! [driver](crate::driver). It knows no transport and places nothing itself.

mod resuming;
mod stream;
mod tally;

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use baton_observability::labels::Outcome;
use baton_observability::{AdminState, Readiness, Registry, RouterMetrics, logging, metrics_text};
use baton_proto::slo::Slo;
use baton_proto::work::check_priority;
use baton_proto::{Error, ErrorKind, RequestId, environment, v1};
use baton_tokenizer::{EncodeOptions, Tokenizer};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument as _;

pub use stream::GenerateStream;
pub use tally::Tally;

use crate::admission::Admission;
use crate::auth::{Keys, Tenant};
use crate::config::RouterConfig;
use crate::driver::{Driver, Job, Outlet, Resumed};
use crate::giants::Giants;
use crate::placement::Policy;
use crate::placement::forecast::Margin;
use crate::placement::prefix_index::PrefixIndex;
use crate::resume::fences::Fences;
use crate::resume::{ResumeKeys, check_parameters};
use crate::validate;
use crate::workers::Workers;

/// What the parts of a router share.
pub struct Shared {
    pub config: RouterConfig,
    pub workers: Arc<Workers>,
    pub policy: Box<dyn Policy>,
    pub metrics: RouterMetrics,
    pub registry: Arc<Registry>,
    pub admission: Admission,
    pub keys: Keys,
    pub resume_keys: ResumeKeys,
    pub fences: Fences,
    pub giants: Giants,
    pub prefixes: Mutex<PrefixIndex>,
    /// How far forecasts were off.
    pub margin: Mutex<Margin>,
    /// Owns the task of every request.
    pub requests: TaskTracker,
    /// Ends every request.
    pub stop: CancellationToken,
    /// Since when nothing new is taken.
    pub draining: OnceLock<Instant>,
}

impl Shared {
    /// The prefix index. Held for one look-up or insertion.
    pub fn prefixes(&self) -> MutexGuard<'_, PrefixIndex> {
        self.prefixes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The margin of forecasts. Held for one use.
    pub fn margin(&self) -> MutexGuard<'_, Margin> {
        self.margin.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How a call came in.
#[derive(Clone, Debug)]
pub struct CallContext {
    pub tenant: Tenant,
    /// The client's `x-request-id` as it was sent; empty if none. Goes before the
    /// request's own field.
    pub request_id: String,
    /// The request's time is up then, whatever it is doing.
    pub deadline: Option<Instant>,
    /// When the front door had the request: where TTFT begins.
    pub received: Instant,
}

impl CallContext {
    /// A call received now, without id or deadline.
    pub fn new(tenant: Tenant) -> Self {
        Self {
            tenant,
            request_id: String::new(),
            deadline: None,
            received: Instant::now(),
        }
    }
}

/// The front doors' handle. Cheap to clone.
#[derive(Clone)]
pub struct Frontend {
    shared: Arc<Shared>,
}

impl Frontend {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }

    /// Whose request it is, by the token after `Bearer `.
    ///
    /// # Errors
    /// [`ErrorKind::Unauthenticated`] where keys are in force.
    pub fn authenticate(&self, bearer: Option<&str>) -> Result<Tenant, Error> {
        let tenant = self.shared.keys.authenticate(bearer);
        if tenant.is_err() {
            self.shared
                .metrics
                .requests
                .get(Outcome::Unauthenticated)
                .inc();
        }
        tenant
    }

    /// Runs a request. Resolves once a worker took it, so that every refusal is an
    /// error here; the stream's first item is then `Accepted`, its last `Completed`
    /// or an error.
    ///
    /// # Errors
    /// Every kind: the request is wrong, refused, unplaceable, or too late.
    ///
    /// *Cancel safety*: dropping the future or the stream cancels the request at
    /// its workers.
    pub async fn generate(
        &self,
        request: v1::GenerateRequest,
        call: CallContext,
    ) -> Result<GenerateStream, Error> {
        let tally = Tally::new(&self.shared.metrics);
        let mut stream = match self.prepare(request, call).await {
            Ok(job) => self.spawn(job, tally),
            Err(error) => {
                tracing::debug!(%error, reason = error.reason, "request refused");
                tally.end(Some(&error));
                return Err(error);
            }
        };
        stream.wait_for_acceptance().await?;
        Ok(stream)
    }

    fn spawn(&self, job: Job, tally: Tally) -> GenerateStream {
        let shared = &self.shared;
        let patience = Duration::from_millis(shared.config.slow_client_timeout_ms);
        let (outlet, inlet) = Outlet::new(shared.config.stream_buffer_events, patience);
        let span = logging::request_span(job.request_id.as_str(), "");
        let stream = GenerateStream::new(inlet, job.request_id.clone());
        let driver = Driver::new(Arc::clone(shared), job, tally, outlet);
        shared.requests.spawn(driver.run().instrument(span));
        stream
    }

    /// From a client's request to a checked one.
    async fn prepare(&self, request: v1::GenerateRequest, call: CallContext) -> Result<Job, Error> {
        let shared = &self.shared;
        let deadline = call.received + shared.config.request_timeout();
        let deadline = call.deadline.map_or(deadline, |asked| asked.min(deadline));
        if deadline <= Instant::now() {
            let message = "the request's deadline had passed when it arrived";
            return Err(Error::new(ErrorKind::Deadline, message));
        }
        if shared.draining.get().is_some() {
            return Err(
                Error::new(ErrorKind::Unavailable, "the router is shutting down")
                    .with_reason("DRAINING"),
            );
        }
        validate::check_supported(&request)?;
        let mut slo = Slo::from_wire(request.slo.as_ref(), "slo")?;
        slo.ttft = slo.ttft.or(shared.config.ttft_target());
        let priority = request.priority;
        check_priority(priority, "priority")?;
        let claims = match &request.resume {
            Some(resume) => {
                let keys = &shared.resume_keys;
                Some(keys.open(&resume.resume_token, &call.tenant, unix_seconds())?)
            }
            None => None,
        };
        let model = match &claims {
            Some(claims) => resuming::model(&shared.workers, &request.model, claims)?,
            None => shared.workers.model(&request.model)?,
        };
        validate::check_sampling_early(request.sampling.as_ref(), &model)?;
        let min_tokens = request.sampling.as_ref().and_then(|s| s.min_tokens);
        let rules = validate::stop_rules(&request, min_tokens.unwrap_or(0))?;
        let mut permit = shared.admission.enter(&call.tenant)?;
        let admitted = Instant::now();

        let created = claims
            .as_ref()
            .map_or_else(unix_seconds, |claims| claims.created);
        let given = if call.request_id.is_empty() {
            &request.request_id
        } else {
            &call.request_id
        };
        let unique: u64 = environment::random();
        let request_id = match &claims {
            Some(claims) => claims.request_id.clone(),
            None => format!("{}-{unique:016x}", validate::clean_request_id(given)),
        };
        let generation = resuming::generation(claims.as_ref());
        let exact = request.exact.unwrap_or(shared.config.exact);
        let use_cache = request.use_cache.unwrap_or(true);
        let mut wire_sampling = request.sampling.clone().unwrap_or_default();
        if let Some(claims) = &claims {
            resuming::fill_in(&mut wire_sampling, claims)?;
        }
        let received = request.resume.as_ref().map(|resume| resume.choices.clone());
        let prompt_field = validate::prompt_field(&request);
        let bytes = validate::prompt_bytes(&request);
        let (tokenizer, context_max) = (Arc::clone(&model.tokenizer), model.context_max);
        let encoding = shared.giants.work(bytes, move || {
            validate::prompt(request, created)?.encode(&tokenizer, context_max)
        });
        let prompt = tokio::time::timeout_at(deadline, encoding)
            .await
            .map_err(|_| {
                Error::new(
                    ErrorKind::Deadline,
                    "the request's time ended while its prompt was tokenized",
                )
            })???;
        let tokenized = Instant::now();

        if let Some(claims) = &claims {
            resuming::check_prompt(claims, prompt_field, &prompt)?;
        }
        let seed = environment::random();
        let sampling = validate::sampling(Some(&wire_sampling), prompt.len(), &model, seed)?;
        let resumed = match (&claims, received) {
            (Some(claims), Some(choices)) => {
                check_parameters(claims, &sampling, &rules)?;
                resuming::check_received(&choices, &sampling, model.tokenizer.size())?;
                Some(Resumed {
                    numerics: claims.numerics(),
                    choices,
                })
            }
            _ => None,
        };
        permit.charge(prompt.len() as u64)?;
        let fenced = shared.fences.enter(&request_id, generation)?;
        Ok(Job {
            fenced,
            resumed,
            request_id: RequestId(request_id),
            created,
            tenant: call.tenant,
            model,
            prompt,
            sampling,
            rules,
            use_cache,
            exact,
            slo,
            priority,
            received: call.received,
            admitted,
            tokenized,
            deadline,
            permit,
        })
    }

    /// The models that can be served now.
    pub fn models(&self) -> Vec<v1::Model> {
        self.shared.workers.models()
    }

    /// The tokenizer of a model by name or revision; of the only one for an empty name.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] (`MODEL_NOT_FOUND`), or [`ErrorKind::Unavailable`]
    /// while no worker of it is known enough.
    pub fn tokenizer(&self, model: &str) -> Result<Arc<Tokenizer>, Error> {
        Ok(self.shared.workers.model(model)?.tokenizer)
    }

    /// Text or a conversation to token ids, as [`Frontend::generate`] would do it.
    ///
    /// # Errors
    /// As a prompt's.
    pub async fn tokenize(
        &self,
        request: v1::TokenizeRequest,
    ) -> Result<v1::TokenizeResponse, Error> {
        use v1::tokenize_request::Input;
        let model = self.shared.workers.model(&request.model)?;
        let tokenizer = Arc::clone(&model.tokenizer);
        let add_special = request.add_special.unwrap_or(true);
        let allowed = request.allow_special_tokens;
        let giants = &self.shared.giants;
        let ids = match request.input {
            None => return Err(Error::invalid("text", "missing")),
            Some(Input::Text(text)) => {
                let options = EncodeOptions {
                    add_special,
                    parse_special: allowed.unwrap_or(validate::RAW_ALLOWS_SPECIAL_TOKENS),
                };
                let encoding = giants.work(text.len(), move || {
                    tokenizer
                        .encode(&text, options)
                        .map_err(|error| validate::tokenizer_error("text", &error))
                });
                encoding.await??
            }
            Some(Input::Chat(chat)) => {
                // However long: nothing is generated.
                let encoding = giants.work(validate::chat_bytes(&chat), move || {
                    validate::chat_prompt(&chat, unix_seconds(), allowed.unwrap_or(false))?
                        .encode(&tokenizer, u32::MAX)
                });
                encoding.await??
            }
        };
        Ok(v1::TokenizeResponse {
            ids,
            context_max: model.context_max,
        })
    }

    /// Token ids to text, special tokens included.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] for an id outside the vocabulary.
    pub async fn detokenize(
        &self,
        request: v1::DetokenizeRequest,
    ) -> Result<v1::DetokenizeResponse, Error> {
        let tokenizer = self.tokenizer(&request.model)?;
        let size = tokenizer.size();
        if let Some(id) = request.ids.iter().find(|id| **id >= size) {
            let message = format!("token id {id} is not below the vocabulary's {size}");
            return Err(Error::invalid("ids", message));
        }
        let bytes = size_of_val(request.ids.as_slice());
        let decoding = move || tokenizer.decode(&request.ids, false);
        let text = self.shared.giants.work(bytes, decoding).await?;
        Ok(v1::DetokenizeResponse { text })
    }

    /// Whether new work is welcome.
    pub fn readiness(&self) -> Readiness {
        if self.shared.draining.get().is_some() {
            return Readiness::not_ready("draining");
        }
        self.shared.workers.readiness()
    }

    /// What people should know beside [`Frontend::readiness`].
    pub fn readiness_detail(&self) -> Option<String> {
        let stale = self.shared.workers.is_stale();
        stale.then(|| {
            "the list of workers cannot be refreshed, the last known one is used".to_owned()
        })
    }

    /// Brings the gauges up to date before a scrape.
    pub fn refresh_metrics(&self) {
        self.shared.workers.publish(&self.shared.metrics);
    }

    /// The router's metrics as OpenMetrics text.
    pub fn metrics_text(&self) -> String {
        self.refresh_metrics();
        metrics_text(&self.shared.registry)
    }

    /// What the admin routes (`/livez`, `/readyz`, `/metrics`) serve.
    pub fn admin_state(&self) -> AdminState {
        let (probe, scrape, detail) = (self.clone(), self.clone(), self.clone());
        AdminState::new(Arc::clone(&self.shared.registry), move || probe.readiness())
            .before_scrape(move || scrape.refresh_metrics())
            .with_detail(move || detail.readiness_detail())
    }

    /// The router's registry, for a process that has several.
    pub fn registry(&self) -> Arc<Registry> {
        Arc::clone(&self.shared.registry)
    }

    /// The router's live metrics.
    pub fn metrics(&self) -> &RouterMetrics {
        &self.shared.metrics
    }

    /// Where long inputs are worked on.
    pub(crate) fn giants(&self) -> &Giants {
        &self.shared.giants
    }

    /// The workers of this router.
    pub(crate) fn workers(&self) -> &Workers {
        &self.shared.workers
    }

    /// The settings in force.
    pub fn config(&self) -> &RouterConfig {
        &self.shared.config
    }
}

/// The time of day.
pub(crate) fn unix_seconds() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |since| {
        i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
    })
}
