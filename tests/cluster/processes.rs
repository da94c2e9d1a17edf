//! Real processes on a real etcd: workers join and leave, die and come back, and every
//! token a client sees is the oracle's.
//!
//! ```text
//! together   load is shared, SIGTERM leaves cleanly, a router comes back, two models
//! deaths     SIGKILL of prefill and decode workers under load, and at the first token
//! transports what carries KV between processes of one host, and what is left of it
//! moving     a stream whose decode worker dies is the undisturbed one, over both doors
//! frozen     SIGSTOP: the right pool is blamed, and a worker comes back
//! draining   routers say that they know of a worker that leaves
//! hung       an engine does not move in a process that answers
//! leaving    streams that outlast their worker's grace time go on elsewhere
//! terminating  SIGTERM to every role at every moment: what runs ends well, then at once
//! rolling    everything is restarted, one after the other, under load
//! resuming   routers die or stand still, and clients go on at another one
//! views      a new router knows its workers' prefix caches
//! links      a slow or silent link, and clients that leave meanwhile
//! pools      no decode worker is there: requests wait for one, or not for long
//! handoffs   frames of a handoff are lost, cut, repeated or swapped
//! halves     one half of a request fails: nobody waits for the other one
//! queues     more requests than the decode workers take
//! reach      a worker that is there and does no work, or cannot be reached by the other
//! walkouts   clients leave in every manner; what the router held of them
//! deadlines  deadlines that pass in each stage
//! probe      nothing was leaked: whole pools are asked for
//! outage     etcd is gone: routers serve, and start, on what they knew
//! outages    etcd stops, loses its data, stands still; who is listed afterwards
//! blind      a router is cut off from etcd while everything changes
//! leases     a lease ends under a worker that lives
//! reborn     workers die and are back at once where they were
//! transfers  a prefill worker dies while its KV is under way
//! halfway    a decode worker dies at a stated token
//! segments   what is left of shared memory by workers that die again and again
//! no_space   a worker whose pool cannot be had
//! ids        one request id, many requests, two routers
//! place      a worker that is started again where it was
//! addresses  names and IPv6 addresses, wherever an address goes
//! ```
//!
//! Seen to fail: with SIGKILL in place of SIGTERM, since the record then waits for its
//! lease; and on a machine that stood still for three seconds, while the router still
//! took that for the death of every worker.

mod addresses;
mod asked;
mod blind;
mod deadlines;
mod deaths;
mod draining;
mod frozen;
mod halfway;
mod halves;
mod handoffs;
mod hung;
mod ids;
mod leases;
mod leaving;
mod links;
mod moving;
mod no_space;
mod outage;
mod outages;
mod place;
mod pools;
mod probe;
mod queues;
mod reach;
mod reborn;
mod resuming;
mod rolling;
mod segments;
mod terminating;
mod together;
mod transfers;
mod transports;
mod views;
mod walkouts;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use baton_engine::model::Model;
use baton_proto::kv_layout::KvDtype;
use baton_proto::sampling::SamplingParams;
use baton_proto::status::from_status;
use baton_proto::v1::inference_client::InferenceClient;
use baton_proto::{Error, v1};
use baton_tests::client::{self, Collector};
use baton_tests::oracle::{Case, Oracle, Output};
use baton_tests::process::{Brake, Held, RouterProcess, Worker};
use baton_tests::transcript::Transcript;
use futures::future::join_all;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::task::JoinSet;
use tonic::transport::Channel;

/// As [`SPLIT`], and no timer gives anybody up, or sends a prompt another way, because a machine
/// is slow.
pub const PATIENT: [&str; 2] = ["--local-prefill-tokens-max=0", "--handoff-timeout-ms=60000"];

/// What a router of these tests is started with: every prompt through the prefill pool.
pub const SPLIT: [&str; 2] = ["--local-prefill-tokens-max=0", "--handoff-timeout-ms=2000"];

/// For everything that a request held to be back, once the request is over. What leaks does not
/// come back; what waits for a timer of a minute is found.
pub const RELEASED_WITHIN: Duration = Duration::from_secs(10);

/// A case and its right answer.
pub type Known = (Case, Vec<Output>);

/// Random requests with the oracle's answers; even ones are greedy, odd ones drawn.
pub fn known(model: &Arc<Model>, seed: u64, count: usize, tokens: u32) -> Arc<Vec<Known>> {
    let mut random = StdRng::seed_from_u64(seed);
    let mut oracle = Oracle::new(model, KvDtype::F32);
    let case = |index: usize, random: &mut StdRng| {
        let length = random.random_range(17..220);
        Case {
            prompt: (0..length).map(|_| random.random_range(6..300)).collect(),
            sampling: SamplingParams {
                temperature: if index.is_multiple_of(2) { 0.0 } else { 0.9 },
                seed: random.random(),
                n: if index % 5 == 4 { 2 } else { 1 },
                max_tokens: tokens,
                ignore_eos: true,
                ..SamplingParams::default()
            },
        }
    };
    let cases: Vec<Case> = (0..count).map(|index| case(index, &mut random)).collect();
    let answered = cases.into_iter().map(|case| {
        let right = oracle.run(&case);
        (case, right)
    });
    Arc::new(answered.collect())
}

/// A greedy request that goes on to its last token, and its right answer.
pub fn greedy(oracle: &mut Oracle, prompt: Vec<u32>, tokens: u32) -> Known {
    let case = Case {
        prompt,
        sampling: SamplingParams {
            temperature: 0.0,
            max_tokens: tokens,
            ignore_eos: true,
            ..SamplingParams::default()
        },
    };
    let right = oracle.run(&case);
    (case, right)
}

/// The stream of a request that nothing disturbs.
pub async fn whole(router: &RouterProcess, request: &v1::GenerateRequest, n: u32) -> Transcript {
    let mut seen = Transcript::new(n);
    let mut client = router.grpc();
    let mut stream = client.generate(request.clone()).await.unwrap().into_inner();
    while let Some(event) = stream.message().await.unwrap() {
        seen.take(event);
    }
    seen
}

/// Ready to stop the engines of these workers at once.
pub struct Brakes<'a>(Vec<(&'a Worker, Brake)>);

impl<'a> Brakes<'a> {
    pub async fn of(workers: &'a [Worker]) -> Self {
        let brakes = workers.iter().map(async |worker| {
            let brake = worker.brake().await;
            (worker, brake)
        });
        Self(join_all(brakes).await)
    }

    /// Which of the workers has a request, with its engine held in the middle of it. The others
    /// go on. `None` if none has one any more.
    pub async fn pull(self) -> Option<(usize, Held)> {
        let pulled = self.0.into_iter().map(async |(worker, brake)| {
            let held = brake.pull().await;
            (worker.load().await.requests_running > 0, held)
        });
        let mut busy = None;
        for (at, (has_one, held)) in join_all(pulled).await.into_iter().enumerate() {
            match has_one && busy.is_none() {
                true => busy = Some((at, held)),
                false => held.release().await,
            }
        }
        busy
    }
}

/// A stream that is in its middle for certain: its worker's engine stands still.
struct Midway {
    seen: Transcript,
    stream: tonic::Streaming<v1::GenerateEvent>,
    /// Which of the workers has it.
    at: usize,
    held: Held,
}

impl Midway {
    /// Runs a request until so many tokens of it were seen. Nothing else may run on the workers.
    async fn start(
        router: &RouterProcess,
        request: &v1::GenerateRequest,
        tokens: usize,
        workers: &[Worker],
    ) -> Self {
        let n = request.sampling.as_ref().and_then(|sampling| sampling.n);
        for _ in 0..20 {
            let brakes = Brakes::of(workers).await;
            let mut seen = Transcript::new(n.unwrap_or(1));
            let stream = router.narrow().generate(request.clone()).await;
            let mut stream = stream.unwrap().into_inner();
            while seen.tokens() < tokens {
                seen.take(stream.message().await.unwrap().expect("it goes on"));
            }
            if let Some((at, held)) = brakes.pull().await {
                return Self {
                    seen,
                    stream,
                    at,
                    held,
                };
            }
            // The worker was done with it before anybody looked.
            drop(stream);
            for worker in workers {
                worker.wait_released(RELEASED_WITHIN).await;
            }
        }
        panic!("no worker is ever found with the request");
    }
}

/// Reads a stream to its end, which comes before a router gives up on a worker that stands still.
async fn read_on(stream: &mut tonic::Streaming<v1::GenerateEvent>, seen: &mut Transcript) {
    loop {
        let next = tokio::time::timeout(Duration::from_secs(45), stream.message());
        match next.await.expect("the stream goes on").unwrap() {
            Some(event) => seen.take(event),
            None => return,
        }
    }
}

/// Runs a request over gRPC. Whatever arrives before a failure must be right as well.
pub async fn ask(
    mut client: InferenceClient<Channel>,
    model: &str,
    (case, right): &Known,
) -> Result<(), Error> {
    let request = v1::GenerateRequest {
        model: model.to_owned(),
        ..client::request(case)
    };
    let mut stream = client
        .generate(request)
        .await
        .map_err(|status| from_status(&status))?
        .into_inner();
    let mut collector = Collector::new(case.sampling.n);
    let failed = loop {
        match stream.message().await {
            Ok(Some(event)) => collector.take(event),
            Ok(None) => break None,
            Err(status) => break Some(from_status(&status)),
        }
    };
    for (got, right) in collector.choices().iter().zip(right) {
        assert!(
            right.tokens.starts_with(&got.tokens),
            "a wrong token reached the client: {:?} is not the start of {:?}",
            got.tokens,
            right.tokens
        );
    }
    if let Some(error) = failed {
        return Err(error);
    }
    let answer = collector.finish();
    for (got, right) in answer.choices.iter().zip(right) {
        assert_eq!(got.tokens, right.tokens);
        assert_eq!(got.finish, right.finish);
    }
    Ok(())
}

/// Clients that ask one request after the other until they are told to stop.
struct Traffic {
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicUsize>,
    clients: JoinSet<Vec<Error>>,
}

impl Traffic {
    fn start(
        client: &InferenceClient<Channel>,
        model: &str,
        cases: &Arc<Vec<Known>>,
        width: usize,
    ) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let answered = Arc::new(AtomicUsize::new(0));
        let mut clients = JoinSet::new();
        for first in 0..width {
            let (client, model, cases) = (client.clone(), model.to_owned(), Arc::clone(cases));
            let (stop, answered) = (Arc::clone(&stop), Arc::clone(&answered));
            clients.spawn(async move {
                let mut failures = Vec::new();
                for index in (first..).step_by(width) {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    match ask(client.clone(), &model, &cases[index % cases.len()]).await {
                        Ok(()) => {
                            answered.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(error) => failures.push(error),
                    }
                }
                failures
            });
        }
        Self {
            stop,
            answered,
            clients,
        }
    }

    /// Waits until this many more requests were answered well.
    async fn wait_answered(&self, more: usize) {
        let wanted = self.answered.load(Ordering::Relaxed) + more;
        let waiting = async {
            while self.answered.load(Ordering::Relaxed) < wanted {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), waiting)
            .await
            .expect("requests are answered");
    }

    /// Lets every client finish its request; returns what failed.
    async fn stop(mut self) -> Vec<Error> {
        self.stop.store(true, Ordering::Relaxed);
        let mut failures = Vec::new();
        while let Some(ended) = self.clients.join_next().await {
            failures.extend(ended.expect("no wrong token"));
        }
        failures
    }
}
