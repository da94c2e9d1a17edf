//! A router with a gRPC front door on a real socket, and a client for it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use baton_membership::{InProcess, Membership as _, Registration, Role};
use baton_proto::status::from_status;
use baton_proto::v1::generate_event::Event;
use baton_proto::v1::inference_client::InferenceClient;
use baton_proto::{Error, v1};
use baton_router::{CallContext, Frontend, Router, RouterConfig, Tenant};
use futures::StreamExt as _;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use crate::workers::{DataLane, Worker};

pub struct Cluster {
    pub membership: InProcess,
    pub frontend: Frontend,
    pub address: SocketAddr,
    pub lane: DataLane,
    shutdown: CancellationToken,
    server: JoinHandle<()>,
    registrations: Vec<Registration>,
}

impl Cluster {
    pub async fn start(change: impl FnOnce(&mut RouterConfig)) -> Self {
        // A machine that stands still for a while is no worker's death, and no reason to end
        // a stream; who tests such bounds sets them.
        let mut config = RouterConfig {
            drain_ms: 100,
            worker_silence_ms: 10_000,
            worker_lost_ms: 20_000,
            answer_timeout_ms: 30_000,
            stream_gap_ms: 30_000,
            ..RouterConfig::default()
        };
        change(&mut config);
        let membership = InProcess::new();
        let router = Router::start(config, Arc::new(membership.clone())).unwrap();
        let frontend = router.frontend();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shutdown = CancellationToken::new();
        let stop = shutdown.clone();
        let server = tokio::spawn(async move {
            router.serve_grpc(listener, stop).await.unwrap();
            router.stop().await;
        });
        Self {
            membership,
            frontend,
            address,
            lane: DataLane::default(),
            shutdown,
            server,
            registrations: Vec::new(),
        }
    }

    /// Starts a worker, lists it, and waits until the router would use it.
    pub async fn worker(&mut self, id: &str, role: Role) -> Worker {
        self.worker_of(id, role, "alphabet").await
    }

    pub async fn worker_of(&mut self, id: &str, role: Role, model: &str) -> Worker {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let worker = Worker::start(id, role, model, &self.lane, any);
        self.list(&worker).await;
        worker
    }

    pub async fn list(&mut self, worker: &Worker) {
        let before = self.ready_workers();
        let registration = self.membership.register(worker.record.clone()).await;
        self.registrations.push(registration.unwrap());
        let role = worker.record.role;
        until("the worker is in rotation", || {
            let known = self
                .frontend
                .models()
                .iter()
                .any(|m| m.name == worker.record.card.name);
            self.ready_workers() > before && (known || role == Role::Prefill)
        })
        .await;
    }

    fn ready_workers(&self) -> u64 {
        let text = self.frontend.metrics_text();
        let ready = |line: &&str| {
            line.starts_with("baton_pool_members{") && line.contains("state=\"ready\"")
        };
        text.lines()
            .filter(ready)
            .filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok())
            .sum()
    }

    pub async fn ready_workers_are(&self, count: u64) {
        until("the right number of workers is in rotation", || {
            self.ready_workers() == count
        })
        .await;
    }

    pub fn channel(&self) -> Channel {
        Channel::from_shared(format!("http://{}", self.address))
            .unwrap()
            .connect_lazy()
    }

    pub fn client(&self) -> InferenceClient<Channel> {
        InferenceClient::new(self.channel())
    }

    /// Runs a request over gRPC to its end.
    pub async fn run(&self, request: v1::GenerateRequest) -> Outcome {
        let mut outcome = Outcome::default();
        let mut stream = match self.client().generate(request).await {
            Ok(response) => response.into_inner(),
            Err(status) => {
                outcome.error = Some(from_status(&status));
                return outcome;
            }
        };
        loop {
            match stream.message().await {
                Ok(Some(event)) => outcome.take(event),
                Ok(None) => return outcome,
                Err(status) => {
                    outcome.error = Some(from_status(&status));
                    return outcome;
                }
            }
        }
    }

    /// One sample of the metrics, by its whole name with labels.
    pub fn metric(&self, name: &str) -> f64 {
        let text = self.frontend.metrics_text();
        let value = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok());
        value.unwrap_or_else(|| panic!("no metric {name} in\n{text}"))
    }

    /// Nothing is left in flight, and the router stops cleanly.
    pub async fn stop(self) {
        until("no request is in flight", || {
            self.metric("baton_requests_in_flight") == 0.0
                && self.metric("baton_queue_tokens") == 0.0
        })
        .await;
        self.shut_down().await;
    }

    /// Stops the router, whatever it is doing.
    pub async fn shut_down(self) {
        self.shutdown.cancel();
        tokio::time::timeout(Duration::from_secs(10), self.server)
            .await
            .expect("the router stops")
            .unwrap();
    }
}

/// Waits for a condition that will hold soon, by polling.
pub async fn until(what: &str, condition: impl Fn() -> bool) {
    for _ in 0..1000 {
        if condition() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("waited for 10 s until {what}");
}

/// What a client saw.
#[derive(Debug, Default)]
pub struct Outcome {
    pub accepted: Option<v1::Accepted>,
    /// Per choice.
    pub ids: Vec<Vec<u32>>,
    pub text: Vec<String>,
    pub finished: Vec<v1::ChoiceFinished>,
    pub completed: Option<v1::Completed>,
    pub error: Option<Error>,
}

impl Outcome {
    pub fn take(&mut self, event: v1::GenerateEvent) {
        let slot = |list: &mut Vec<String>, choice: u32| {
            list.resize(list.len().max(choice as usize + 1), String::new());
        };
        match event.event.unwrap() {
            Event::Accepted(accepted) => {
                assert!(self.accepted.is_none() && self.ids.is_empty());
                self.accepted = Some(accepted);
            }
            Event::Tokens(tokens) => {
                assert!(self.accepted.is_some());
                slot(&mut self.text, tokens.choice);
                let choice = tokens.choice as usize;
                self.ids.resize(self.ids.len().max(choice + 1), Vec::new());
                assert_eq!(
                    tokens.first_index as usize,
                    self.ids[choice].len(),
                    "indices rise without gap or repeat"
                );
                self.ids[choice].extend(tokens.ids);
                self.text[choice].push_str(&tokens.text);
            }
            Event::Finished(finished) => {
                slot(&mut self.text, finished.choice);
                self.text[finished.choice as usize].push_str(&finished.text);
                self.finished.push(finished);
            }
            Event::Completed(completed) => {
                assert!(self.completed.is_none());
                self.completed = Some(completed);
            }
        }
    }

    pub fn usage(&self) -> v1::Usage {
        self.completed.as_ref().expect("completed").usage.unwrap()
    }

    pub fn timings(&self) -> v1::PhaseTimings {
        let completed = self.completed.as_ref().expect("completed");
        completed.timings.clone().unwrap()
    }

    pub fn failed(&self) -> &Error {
        self.error.as_ref().expect("an error")
    }
}

/// A request for `max_tokens` tokens after a prompt of `prompt` bytes.
pub fn request(prompt: usize, max_tokens: u32) -> v1::GenerateRequest {
    v1::GenerateRequest {
        model: "alphabet".into(),
        prompt: Some(v1::generate_request::Prompt::Text("x".repeat(prompt))),
        sampling: Some(v1::SamplingParams {
            max_tokens: Some(max_tokens),
            ..v1::SamplingParams::default()
        }),
        ..v1::GenerateRequest::default()
    }
}

/// Changes the sampling parameters of a request.
pub fn sampling(
    mut request: v1::GenerateRequest,
    change: impl FnOnce(&mut v1::SamplingParams),
) -> v1::GenerateRequest {
    change(request.sampling.get_or_insert_default());
    request
}

/// The alphabet from the letter of index 0 on, for a choice.
pub fn alphabet(choice: u32, count: u32) -> String {
    let byte = |index| crate::workers::letter(choice, index) as u8 as char;
    (0..count).map(byte).collect()
}

/// Calls the front end directly and collects what it says.
pub async fn call(frontend: &Frontend, request: v1::GenerateRequest) -> Outcome {
    let mut outcome = Outcome::default();
    let context = CallContext::new(Tenant::new("default"));
    match frontend.generate(request, context).await {
        Err(error) => outcome.error = Some(error),
        Ok(mut stream) => {
            while let Some(event) = stream.next().await {
                match event {
                    Ok(event) => outcome.take(event),
                    Err(error) => outcome.error = Some(error),
                }
            }
        }
    }
    outcome
}
