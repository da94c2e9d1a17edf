//! Routers that die or stand still mid-stream, and clients that go on at another one.

use std::time::Duration;

use baton_proto::status::from_status;
use baton_proto::v1;
use baton_proto::v1::inference_client::InferenceClient;
use baton_tests::http::Event;
use baton_tests::process::{Launcher, Pool, RouterProcess};
use baton_tests::transcript::{Transcript, Way, demanding, with_stop};
use futures::future::join_all;
use serde_json::{Value, json};
use tonic::transport::Channel;

use super::{RELEASED_WITHIN, SPLIT};

const SOON: Duration = Duration::from_secs(20);
/// Long enough to be in the middle of it when the router dies.
const TOKENS: u32 = 2_000;

async fn whole(
    mut client: InferenceClient<Channel>,
    request: v1::GenerateRequest,
    seen: &mut Transcript,
) {
    let mut stream = client.generate(request).await.unwrap().into_inner();
    while let Some(event) = stream.message().await.unwrap() {
        seen.take(event);
    }
}

/// A router that shares the key.
async fn router(launcher: &Launcher) -> RouterProcess {
    let file = launcher.folder().join("resume-keys");
    std::fs::write(
        &file,
        "the first key, which has to be long enough\n\nanother one that is long enough too\n",
    )
    .unwrap();
    let key = format!("--resume-key-file={}", file.display());
    let router = launcher.router(&[SPLIT[0], SPLIT[1], &key]).await;
    router.wait_workers("rand", (1, 2), SOON).await;
    router
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_killed_mid_stream_costs_its_clients_nothing() {
    let launcher = Launcher::start().await;
    let workers = join_all([
        launcher.worker(Pool::Prefill, "p0", "rand", &[]),
        launcher.worker(Pool::Decode, "d0", "rand", &[]),
        launcher.worker(Pool::Decode, "d1", "rand", &[]),
    ])
    .await;
    let other = router(&launcher).await;
    let mut cases = demanding(TOKENS);
    cases.retain(|(name, _)| *name != "a seed of the router's");
    let mut text = Transcript::new(1);
    whole(other.grpc(), cases[1].1.clone(), &mut text).await;
    cases.push((
        "stop strings",
        with_stop(&cases[1].1, &text.choices[0].text),
    ));
    let ways = [Way::Ids, Way::Counts, Way::Bytes];
    for (round, (name, request)) in cases.into_iter().enumerate() {
        let n = request.sampling.as_ref().unwrap().n.unwrap_or(1);
        let mut right = Transcript::new(n);
        whole(other.grpc(), request.clone(), &mut right).await;
        let mut dying = router(&launcher).await;
        let mut seen = Transcript::new(n);
        let mut stream = dying
            .narrow()
            .generate(request.clone())
            .await
            .unwrap()
            .into_inner();
        while seen.tokens() < 40 + 97 * round {
            seen.take(stream.message().await.unwrap().expect("it goes on"));
        }
        dying.process.kill().await;
        // What was on its way is still read, then the stream breaks, with no last word.
        loop {
            match stream.message().await {
                Ok(Some(event)) => seen.take(event),
                Ok(None) => panic!("a broken stream looks whole"),
                Err(_) => break,
            }
        }
        let way = ways[round % 3];
        let resumed = v1::GenerateRequest {
            resume: Some(seen.resume(way)),
            ..request
        };
        whole(other.grpc(), resumed, &mut seen).await;
        seen.assert_same(&right, &format!("{name}, {way:?}"));
        for worker in &workers {
            worker.wait_released(RELEASED_WITHIN).await;
        }
    }
    assert_eq!(other.metric("baton_token_conflicts_total").await, 0.0);
}

/// Text and ends of an HTTP stream, as far as it came.
async fn read_http(
    router: &RouterProcess,
    path: &str,
    body: &Value,
    got: &mut [String],
    bytes: usize,
) -> (String, bool) {
    let mut stream = router.http().stream(path, body).await;
    let mut token = String::new();
    while got[0].len() < bytes {
        match stream.next().await {
            Some(Event::Json(chunk)) => {
                if let Some(extension) = chunk.get("baton") {
                    token = extension["resume_token"].as_str().unwrap().to_owned();
                }
                for choice in chunk["choices"].as_array().unwrap() {
                    let text = choice["delta"]["content"].as_str();
                    let text = text.or(choice["text"].as_str()).unwrap_or_default();
                    got[choice["index"].as_u64().unwrap() as usize].push_str(text);
                }
            }
            Some(Event::Done) => return (token, true),
            None => panic!("ended without [DONE] or an error"),
        }
    }
    (token, false)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http_clients_of_a_killed_router_go_on_at_another_one() {
    let launcher = Launcher::start().await;
    let workers = join_all([
        launcher.worker(Pool::Prefill, "p0", "rand", &[]),
        launcher.worker(Pool::Decode, "d0", "rand", &[]),
        launcher.worker(Pool::Decode, "d1", "rand", &[]),
    ])
    .await;
    let other = router(&launcher).await;
    let common = json!({
        "model": "rand", "max_tokens": TOKENS, "temperature": 0.9, "seed": 11,
        "ignore_eos": true, "stream": true,
    });
    let chat = json!([{ "role": "user", "content": "tell me a long story, and then another one" }]);
    for (path, key, value, n) in [
        ("/v1/chat/completions", "messages", chat, 1),
        (
            "/v1/completions",
            "prompt",
            json!("once upon a time there was"),
            2,
        ),
    ] {
        let mut body = common.clone();
        body[key] = value;
        body["n"] = json!(n);
        let mut right = vec![String::new(); n];
        assert!(
            read_http(&other, path, &body, &mut right, usize::MAX)
                .await
                .1
        );
        let mut dying = router(&launcher).await;
        let mut got = vec![String::new(); n];
        let (token, done) = read_http(&dying, path, &body, &mut got, right[0].len() / 5).await;
        assert!(!done);
        dying.process.kill().await;
        let choices = got.iter();
        let choices: Vec<Value> = choices
            .map(|text| json!({ "text_bytes_received": text.len() }))
            .collect();
        body["resume"] = json!({ "resume_token": token, "choices": choices });
        assert!(read_http(&other, path, &body, &mut got, usize::MAX).await.1);
        assert_eq!(got, right, "{path}");
        for worker in &workers {
            worker.wait_released(RELEASED_WITHIN).await;
        }
    }
}

/// A router that stands still still holds its workers' blocks: until its client goes on
/// elsewhere.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_routers_attempt_is_fenced_and_its_blocks_come_back() {
    let launcher = Launcher::start().await;
    let workers = join_all([
        launcher.worker(Pool::Prefill, "p0", "rand", &[]),
        launcher.worker(Pool::Decode, "d0", "rand", &[]),
        launcher.worker(Pool::Decode, "d1", "rand", &[]),
    ])
    .await;
    let (frozen, other) = (router(&launcher).await, router(&launcher).await);
    let (_, request) = demanding(3_500).remove(0);
    let mut right = Transcript::new(1);
    whole(other.grpc(), request.clone(), &mut right).await;
    let mut seen = Transcript::new(1);
    let mut stream = frozen
        .narrow()
        .generate(request.clone())
        .await
        .unwrap()
        .into_inner();
    while seen.tokens() < 10 {
        seen.take(stream.message().await.unwrap().expect("it goes on"));
    }
    frozen.process.freeze();
    let resumed = v1::GenerateRequest {
        resume: Some(seen.resume(Way::Ids)),
        ..request
    };
    whole(other.grpc(), resumed, &mut seen).await;
    seen.assert_same(&right, "resumed beside a frozen router");
    for worker in &workers {
        worker.wait_released(RELEASED_WITHIN).await;
    }
    frozen.process.thaw();
    // The older stream says that it is over, unless its router had all of it already.
    loop {
        match stream.message().await {
            Ok(Some(event)) => {
                if let Some(v1::generate_event::Event::Completed(_)) = event.event {
                    break;
                }
            }
            Ok(None) => panic!("ended without a word"),
            Err(status) => {
                let error = from_status(&status);
                assert_eq!(error.reason, "RESUMED_ELSEWHERE", "{error:?}");
                break;
            }
        }
    }
}
