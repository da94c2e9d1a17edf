//! SIGKILL of a decode worker at a stated token of a short answer: between the two halves of a
//! stop string, of a drawn answer, of two choices. Their engines are made slow, so that the
//! client's tokens can be counted before the next one.
//!
//! Seen to fail: with the tokens that the client has not given to the worker that takes over.

use std::time::Duration;

use baton_proto::kv_layout::KvDtype;
use baton_proto::sampling::SamplingParams;
use baton_proto::v1;
use baton_tests::client;
use baton_tests::models;
use baton_tests::oracle::{Case, Oracle};
use baton_tests::process::{Launcher, Pool, RouterProcess};
use baton_tests::transcript::Transcript;
use serde_json::json;

use super::place::Place;
use super::{PATIENT, whole};

const SOON: Duration = Duration::from_secs(20);
/// Before and after each system call of an engine: a token takes a few times as long.
const PAUSE: Duration = Duration::from_millis(20);
const PROMPT: u32 = 33;
const TOKENS: u32 = 40;
/// What the client has when the worker dies.
const SEEN: usize = 7;
/// A test that stood still for the time of an answer is too late; then it is tried again.
const TRIES: usize = 5;

/// A prefill worker, two decode workers and a router.
struct Cluster {
    launcher: Launcher,
    _prefill: baton_tests::process::Worker,
    decode: [Place; 2],
    router: RouterProcess,
    moved: f64,
}

impl Cluster {
    async fn start() -> Self {
        let launcher = Launcher::start().await;
        let prefill = launcher.worker(Pool::Prefill, "p0", "rand", &[]).await;
        let mut decode = ["d0", "d1"].map(|id| Place::new(Pool::Decode, id, &[]));
        for place in &mut decode {
            place.start(&launcher).await;
        }
        let router = launcher.router(&PATIENT).await;
        router.wait_workers("rand", (1, 2), SOON).await;
        Self {
            launcher,
            _prefill: prefill,
            decode,
            router,
            moved: 0.0,
        }
    }

    async fn handoffs(&self) -> Vec<u64> {
        let mut all = Vec::new();
        for place in &self.decode {
            all.push(place.worker().load().await.handoffs_total);
        }
        all
    }

    /// The stream of a request whose decode worker dies once the client has `from` tokens and
    /// no more than `to`; with what the client had then.
    async fn cut(
        &mut self,
        request: &v1::GenerateRequest,
        n: u32,
        (from, to): (usize, usize),
    ) -> (Transcript, Transcript) {
        for _ in 0..TRIES {
            let before = self.handoffs().await;
            let [d0, d1] = self.decode.each_ref().map(Place::worker);
            let slow = tokio::join!(d0.slow_engine(PAUSE), d1.slow_engine(PAUSE));
            let mut seen = Transcript::new(n);
            let mut client = self.router.grpc();
            let mut stream = client.generate(request.clone()).await.unwrap().into_inner();
            let begun = async {
                // A decode worker made the second one.
                let mut dying = None;
                while dying.is_none() || seen.tokens() < from {
                    seen.take(stream.message().await.unwrap().expect("it goes on"));
                    if dying.is_none() && seen.tokens() > n as usize {
                        let after = self.handoffs().await;
                        dying = (0..2).find(|at| after[*at] > before[*at]);
                        assert!(dying.is_some(), "nobody got the prompt");
                    }
                }
                dying.expect("it is known")
            };
            let begun = tokio::time::timeout(SOON, begun).await;
            let dying = begun.expect("it begins");
            let had = seen.clone();
            self.decode[dying].kill().await;
            drop(slow);
            let rest = async {
                while let Some(event) = stream.message().await.unwrap() {
                    seen.take(event);
                }
            };
            let rest = tokio::time::timeout(SOON, rest).await;
            rest.expect("it goes on at the other one");
            self.decode[dying].start(&self.launcher).await;
            self.router.wait_workers("rand", (1, 2), SOON).await;
            let moved = self.router.metric("baton_migrations_total{result=\"ok\"}");
            let before = std::mem::replace(&mut self.moved, moved.await);
            let moved = self.moved - before;
            if had.tokens() <= to && moved == 1.0 {
                return (seen, had);
            }
            println!("{} tokens were here, and {moved} moved", had.tokens());
        }
        panic!("{TRIES} times it was through before");
    }
}

fn case(salt: u32, sampling: SamplingParams) -> Case {
    let at = |at: u32| 6 + (at * 23 + salt * 41 + at * salt) % 290;
    Case {
        prompt: (0..PROMPT).map(at).collect(),
        sampling: SamplingParams {
            max_tokens: TOKENS,
            ignore_eos: true,
            ..sampling
        },
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forty_tokens_whose_worker_dies_after_seven_are_the_oracles_forty() {
    let mut oracle = Oracle::new(&models::fixture("rand"), KvDtype::F32);
    let mut cluster = Cluster::start().await;
    let greedy = SamplingParams {
        temperature: 0.0,
        ..SamplingParams::default()
    };
    let drawn = SamplingParams {
        temperature: 0.9,
        seed: 11,
        ..SamplingParams::default()
    };
    let two = SamplingParams {
        n: 2,
        ..drawn.clone()
    };
    for (salt, sampling) in (1..).zip([greedy, drawn, two]) {
        let n = sampling.n;
        let case = case(salt, sampling);
        let right = oracle.run(&case);
        let request = client::request(&case);
        let undisturbed = whole(&cluster.router, &request, n).await;
        let seven = SEEN * n as usize;
        let (seen, had) = cluster.cut(&request, n, (seven, 5 * seven)).await;
        println!("{} of {} tokens were here", had.tokens(), TOKENS * n);
        seen.assert_same(&undisturbed, &format!("{n} choices"));
        for (got, right) in seen.choices.iter().zip(&right) {
            assert_eq!(got.ids, right.tokens);
            assert_eq!(got.ids.len(), TOKENS as usize);
        }
        let usage = seen.completed.unwrap().usage.unwrap();
        assert_eq!(usage.prompt_tokens, PROMPT);
        assert_eq!(usage.completion_tokens, TOKENS * n);
    }
    // Nobody's grammar can be lost with a worker: answers of a stated form are not taken.
    let format = json!({ "type": "json_schema", "json_schema": { "name": "two", "schema": {} } });
    let body = json!({
        "model": "rand", "messages": [{ "role": "user", "content": "two" }],
        "response_format": format,
    });
    let http = cluster.router.http();
    let reply = http.post("/v1/chat/completions", &body).await;
    assert_eq!(reply.error(400)["param"], "response_format");
}

/// The text of the tokens before each token of a stream, and after the last.
async fn texts(router: &RouterProcess, request: &v1::GenerateRequest) -> Vec<usize> {
    use v1::generate_event::Event;
    let (mut ends, mut text) = (vec![0], 0);
    let mut client = router.grpc();
    let mut stream = client.generate(request.clone()).await.unwrap().into_inner();
    while let Some(event) = stream.message().await.unwrap() {
        if let Some(Event::Tokens(tokens)) = event.event {
            text += tokens.text.len();
            // Several at once: where each but the last ends is not known.
            ends.resize(ends.len() + tokens.ids.len() - 1, usize::MAX);
            ends.push(text);
        }
    }
    ends
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_string_matches_whose_halves_two_workers_made() {
    let mut cluster = Cluster::start().await;
    let case = case(
        9,
        SamplingParams {
            temperature: 0.9,
            seed: 12,
            ..SamplingParams::default()
        },
    );
    let request = client::request(&case);
    let text = whole(&cluster.router, &request, 1).await.choices[0]
        .text
        .clone();
    let ends = texts(&cluster.router, &request).await;
    // From after the fourth token or a little later to before the last few.
    let known = |at: &usize| ends[*at] != usize::MAX && text.is_char_boundary(ends[*at]);
    let first = (4..12).find(known).expect("a token that ends a character");
    let last = (30..38).rev().find(known).expect("another one");
    let stop = &text[ends[first]..ends[last]];
    assert_eq!(text.find(stop), Some(ends[first]), "it comes once");
    let request = v1::GenerateRequest {
        stop: vec![stop.to_owned(), format!("{}\u{2603}", &text[..8])],
        ..request
    };
    let undisturbed = whole(&cluster.router, &request, 1).await;
    let end = undisturbed.choices[0].end.clone().expect("an end");
    assert_eq!(end.2.as_deref(), Some(stop), "it is the stop string");
    assert_eq!(undisturbed.choices[0].text, text[..ends[first]]);

    let (seen, had) = cluster.cut(&request, 1, (first + 6, last - 4)).await;
    println!("{} of {last} tokens were here", had.tokens());
    // Half of it was made, and none of it was shown.
    assert_eq!(had.choices[0].text, text[..ends[first]]);
    assert!(had.choices[0].end.is_none());
    seen.assert_same(&undisturbed, "a stop string in two halves");
}
