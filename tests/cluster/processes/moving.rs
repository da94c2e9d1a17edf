//! SIGKILL of the decode worker in the middle of a stream: everything a client sees is
//! what it sees of an undisturbed stream, over both doors.

use std::time::Duration;

use baton_proto::v1;
use baton_tests::http::{Event, Streamed};
use baton_tests::process::{Launcher, Pool, RouterProcess, Worker};
use baton_tests::transcript::{Transcript, demanding, with_stop};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use serde_json::{Value, json};

use super::{SPLIT, whole};

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

    /// Kills the decode worker that has a request; which one it was.
    async fn kill_the_busy_one(&mut self) -> usize {
        for index in 0..self.decode.len() {
            if self.decode[index].load().await.requests_running > 0 {
                self.decode[index].process.kill().await;
                return index;
            }
        }
        panic!("no decode worker has the request any more");
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
        assert_eq!(self.router.metric(moved).await, count);
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
            let mut seen = Transcript::new(n);
            let mut client = pair.router.grpc();
            let mut stream = client.generate(request.clone()).await.unwrap().into_inner();
            let mut died = None;
            while let Some(event) = stream.message().await.unwrap() {
                seen.take(event);
                if died.is_none() && seen.tokens() >= at {
                    died = Some(pair.kill_the_busy_one().await);
                }
            }
            seen.assert_same(&right, &format!("{name}, killed at {at}"));
            moved += 1.0;
            pair.assert_migrations(moved).await;
            pair.replace(died.expect("killed")).await;
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
        let mut stream = pair.router.http().stream(path, &body).await;
        let (mut events, mut died) = (Vec::new(), None);
        while let Some(event) = stream.next().await {
            events.push(event);
            if died.is_none() && events.len() >= 90 {
                died = Some(pair.kill_the_busy_one().await);
            }
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
        pair.replace(died.expect("killed")).await;
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
    let ask = async |exact: bool| {
        let request = v1::GenerateRequest {
            exact: Some(exact),
            ..request.clone()
        };
        let mut client = router.grpc();
        let mut stream = client.generate(request).await.unwrap().into_inner();
        let mut seen = Transcript::new(1);
        while seen.tokens() < 20 {
            seen.take(stream.message().await.unwrap().unwrap());
        }
        (stream, seen)
    };
    let (mut strict, mut strict_seen) = ask(true).await;
    let (mut lenient, mut lenient_seen) = ask(false).await;
    // KV in other numbers: the same model and revision, another numerics id.
    let _other = launcher
        .worker(Pool::Decode, "d1", "rand", &["--kv-dtype=f16"])
        .await;
    router.wait_workers("rand", (0, 2), SOON).await;
    exact.process.kill().await;
    let error = loop {
        match strict.message().await {
            Ok(Some(event)) => strict_seen.take(event),
            Ok(None) => panic!("it ended well"),
            Err(status) => break baton_proto::status::from_status(&status),
        }
    };
    assert_eq!(error.reason, "LAYOUT_MISMATCH", "{error:?}");
    assert_eq!(error.field, "numerics_id");
    assert!(strict_seen.completed.is_none());
    let got = &strict_seen.choices[0].ids;
    assert_eq!(right.choices[0].ids[..got.len()], got[..]);
    while let Some(event) = lenient.message().await.unwrap() {
        lenient_seen.take(event);
    }
    assert_eq!(lenient_seen.tokens(), TOKENS as usize);
}
