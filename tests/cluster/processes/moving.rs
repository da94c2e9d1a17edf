//! SIGKILL of the decode worker in the middle of a stream: everything a client sees is
//! what it sees of an undisturbed stream, over both doors.

use std::time::Duration;

use baton_proto::v1;
use baton_tests::http::{Event, Streamed};
use baton_tests::pace::Stopwatch;
use baton_tests::process::{Held, Launcher, Pool, RouterProcess, Worker};
use baton_tests::transcript::{Transcript, demanding, with_stop};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use serde_json::{Value, json};

use super::{Brakes, Midway, RELEASED_WITHIN, SPLIT, read_on, whole};

const SOON: Duration = Duration::from_secs(20);
const TOKENS: u32 = 1_500;

/// Two decode workers, one of which dies in each round and is started again.
struct Pair {
    launcher: Launcher,
    _prefill: Worker,
    decode: Vec<Worker>,
    router: RouterProcess,
    started: usize,
}

impl Pair {
    async fn start() -> Self {
        let launcher = Launcher::start().await;
        let (prefill, d0, d1) = tokio::join!(
            launcher.worker(Pool::Prefill, "p0", "rand", &[]),
            launcher.worker(Pool::Decode, "d0", "rand", &[]),
            launcher.worker(Pool::Decode, "d1", "rand", &[]),
        );
        let router = launcher.router(&SPLIT).await;
        router.wait_workers("rand", (1, 2), SOON).await;
        Self {
            launcher,
            _prefill: prefill,
            decode: vec![d0, d1],
            router,
            started: 2,
        }
    }

    /// Kills the decode worker whose engine is held.
    async fn kill(&mut self, at: usize, held: Held) {
        self.decode[at].process.kill().await;
        drop(held);
    }

    async fn replace(&mut self, index: usize) {
        let name = format!("d{}", self.started);
        self.started += 1;
        let new = self.launcher.worker(Pool::Decode, &name, "rand", &[]);
        self.decode[index] = new.await;
        self.router.wait_workers("rand", (1, 2), SOON).await;
    }

    async fn assert_migrations(&self, count: f64) {
        let moved = "baton_migrations_total{result=\"ok\"}";
        self.router.wait_metric(moved, count).await;
        let conflicts = self.router.metric("baton_token_conflicts_total").await;
        assert_eq!(conflicts, 0.0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_whose_decode_worker_dies_is_the_undisturbed_stream() {
    let mut pair = Pair::start().await;
    let mut random = StdRng::seed_from_u64(0xd1e);
    let mut cases = demanding(TOKENS);
    cases.retain(|(name, _)| *name != "a seed of the router's");
    let text = whole(&pair.router, &cases[1].1, 1).await.choices[0]
        .text
        .clone();
    cases.push(("stop strings", with_stop(&cases[1].1, &text)));
    let mut moved = 0.0;
    for (name, request) in &cases {
        let n = request.sampling.as_ref().unwrap().n.unwrap_or(1);
        let right = whole(&pair.router, request, n).await;
        for _ in 0..2 {
            let at = random.random_range(1..300);
            let midway = Midway::start(&pair.router, request, at, &pair.decode).await;
            let (mut seen, mut stream, busy) = (midway.seen, midway.stream, midway.at);
            pair.kill(busy, midway.held).await;
            read_on(&mut stream, &mut seen).await;
            seen.assert_same(&right, &format!("{name}, killed at {at}"));
            moved += 1.0;
            pair.assert_migrations(moved).await;
            pair.replace(busy).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http_streams_outlive_their_decode_worker() {
    let mut pair = Pair::start().await;
    let common = json!({
        "model": "rand", "max_tokens": TOKENS, "temperature": 0.9, "seed": 3,
        "ignore_eos": true, "stream": true, "stream_options": { "include_usage": true },
    });
    let chat = json!([{ "role": "user", "content": "what goes on" }]);
    let mut moved = 0.0;
    for (path, more) in [
        (
            "/v1/chat/completions",
            json!({ "messages": chat, "logprobs": true, "top_logprobs": 2 }),
        ),
        ("/v1/completions", json!({ "prompt": "and then", "n": 2 })),
        (
            "/v1/completions",
            json!({ "prompt": "and then", "logprobs": 1, "frequency_penalty": 0.5 }),
        ),
    ] {
        let mut body = common.clone();
        for (key, value) in more.as_object().unwrap() {
            body[key] = value.clone();
        }
        let n = body["n"].as_u64().unwrap_or(1) as usize;
        let is_chat = path.contains("chat");
        let read = |events: &[Event]| Streamed::read(events, is_chat, n, true);
        let right = read(&pair.router.http().stream(path, &body).await.collect().await);
        let (mut stream, mut events, busy, held) = loop {
            let brakes = Brakes::of(&pair.decode).await;
            let mut stream = pair.router.http().stream(path, &body).await;
            let mut events = Vec::new();
            while events.len() < 90 {
                events.push(stream.next().await.expect("it goes on"));
            }
            if let Some((busy, held)) = brakes.pull().await {
                break (stream, events, busy, held);
            }
            // The worker was done with it before anybody looked.
        };
        pair.kill(busy, held).await;
        while let Some(event) = stream.next().await {
            events.push(event);
        }
        let got = read(&events);
        for choice in 0..n {
            assert_eq!(got.text(choice), right.text(choice), "{path} {more}");
            assert_eq!(
                entries(&got.logprobs[choice], is_chat),
                entries(&right.logprobs[choice], is_chat),
                "{path} {more}"
            );
        }
        assert_eq!(got.finishes, right.finishes);
        let tokens = |streamed: &Streamed| {
            let usage = streamed.usage.clone().unwrap();
            (
                usage["prompt_tokens"].clone(),
                usage["completion_tokens"].clone(),
            )
        };
        assert_eq!(tokens(&got), tokens(&right));
        moved += 1.0;
        pair.assert_migrations(moved).await;
        pair.replace(busy).await;
    }
}

/// Log-probabilities token by token, however they were cut into chunks.
fn entries(chunks: &[Value], chat: bool) -> Vec<Value> {
    let keys: &[&str] = if chat {
        &["content"]
    } else {
        &["tokens", "token_logprobs", "top_logprobs", "text_offset"]
    };
    let list = |key: &&str| {
        let lists = chunks.iter().map(|chunk| chunk[*key].as_array().unwrap());
        Value::Array(lists.flatten().cloned().collect())
    };
    keys.iter().map(list).collect()
}

/// Equal arithmetic is asked for unless a request says otherwise: where only other
/// arithmetic is left, the stream ends with that as its reason.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_only_other_arithmetic_left_an_exact_stream_ends_and_says_so() {
    let launcher = Launcher::start().await;
    let mut exact = launcher.worker(Pool::Decode, "d0", "rand", &[]).await;
    let router = launcher.router(&SPLIT).await;
    router.wait_workers("rand", (0, 1), SOON).await;
    let (_, request) = demanding(TOKENS).remove(0);
    let right = whole(&router, &request, 1).await;
    // KV in other numbers: the same model and revision, another numerics id. It stands still
    // until both streams are where they are to be.
    let flags = ["--kv-dtype=f16"];
    let other = launcher.worker(Pool::Decode, "d1", "rand", &flags).await;
    router.wait_workers("rand", (0, 2), SOON).await;
    other.process.freeze();
    router.wait_workers("rand", (0, 1), SOON).await;
    let ask = async |exact: bool| {
        let request = v1::GenerateRequest {
            exact: Some(exact),
            ..request.clone()
        };
        let stream = router.narrow().generate(request).await.unwrap();
        (stream.into_inner(), Transcript::new(1))
    };
    let (mut strict, mut lenient, held) = loop {
        let brake = exact.brake().await;
        let (mut strict, mut lenient) = tokio::join!(ask(true), ask(false));
        for (stream, seen) in [&mut strict, &mut lenient] {
            while seen.tokens() < 20 {
                seen.take(stream.message().await.unwrap().expect("it goes on"));
            }
        }
        let held = brake.pull().await;
        if exact.load().await.requests_running == 2 {
            break (strict, lenient, held);
        }
        held.release().await;
        // One of them was over before anybody looked.
        drop((strict, lenient));
        exact.wait_released(RELEASED_WITHIN).await;
    };
    other.process.thaw();
    let waited = Stopwatch::start();
    loop {
        let cluster = router.http().get("/cluster").await.json();
        let mut workers = cluster["workers"].as_array().expect("workers").iter();
        if workers.any(|worker| worker["id"] == "d1" && worker["state"] == "ready") {
            break;
        }
        assert!(waited.elapsed() < SOON, "`d1` is not back: {cluster}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    exact.process.kill().await;
    drop(held);
    let error = loop {
        match strict.0.message().await {
            Ok(Some(event)) => strict.1.take(event),
            Ok(None) => panic!("it ended well"),
            Err(status) => break baton_proto::status::from_status(&status),
        }
    };
    assert_eq!(error.reason, "LAYOUT_MISMATCH", "{error:?}");
    assert_eq!(error.field, "numerics_id");
    assert!(strict.1.completed.is_none());
    let got = &strict.1.choices[0].ids;
    assert_eq!(right.choices[0].ids[..got.len()], got[..]);
    read_on(&mut lenient.0, &mut lenient.1).await;
    assert_eq!(lenient.1.tokens(), TOKENS as usize);
}
