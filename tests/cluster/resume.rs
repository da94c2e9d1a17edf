//! A client whose connection breaks goes on where it was: at any event of any stream,
//! in any of three ways to say what it has, the whole is the undisturbed stream.
//!
//! One router here, and real engines; that routers die is among [`crate::processes`].

use baton_proto::v1;
use baton_router::auth::ANONYMOUS;
use baton_router::{CallContext, Frontend, Tenant};
use baton_tests::cluster::Setup;
use baton_tests::doors::OpenCluster;
use baton_tests::http::Event;
use baton_tests::models;
use baton_tests::transcript::{Transcript, Way, demanding, with_stop};
use futures::StreamExt as _;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use serde_json::{Value, json};
use std::time::Duration;

fn choices(request: &v1::GenerateRequest) -> u32 {
    request.sampling.as_ref().and_then(|s| s.n).unwrap_or(1)
}

/// Reads until the end, or until this many tokens came; how many events that were.
async fn read(
    frontend: &Frontend,
    request: v1::GenerateRequest,
    seen: &mut Transcript,
    tokens: usize,
) -> usize {
    let call = CallContext::new(Tenant::new(ANONYMOUS));
    let mut stream = frontend.generate(request, call).await.expect("accepted");
    let mut events = 0;
    while let Some(event) = stream.next().await {
        seen.take(event.expect("no failure"));
        events += 1;
        if seen.tokens() >= tokens {
            break;
        }
    }
    events
}

async fn whole(frontend: &Frontend, request: &v1::GenerateRequest) -> Transcript {
    let mut seen = Transcript::new(choices(request));
    read(frontend, request.clone(), &mut seen, usize::MAX).await;
    seen
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_broken_anywhere_go_on_as_if_nothing_had_happened() {
    let setup = Setup {
        decode_workers: 2,
        ..Setup::default()
    };
    let cluster = setup.start(&models::fixture("rand")).await;
    let frontend = cluster.frontend();
    let mut random = StdRng::seed_from_u64(0x5e5);
    let mut cases = demanding(60);
    // One of them ends by a stop string, with others half matched before.
    let drawn = cases[1].1.clone();
    let text = whole(&frontend, &drawn).await.choices[0].text.clone();
    cases.push(("stop strings", with_stop(&drawn, &text)));
    for (name, request) in &cases {
        let right = whole(&frontend, request).await;
        if *name == "stop strings" {
            assert!(right.choices[0].end.as_ref().unwrap().2.is_some());
        }
        let all = right.tokens();
        // Right after the acceptance, at the very end, and anywhere between.
        let mut cuts = vec![0, 1, all - 1, all];
        cuts.extend((0..4).map(|_| random.random_range(2..all)));
        for way in [Way::Ids, Way::Counts, Way::Bytes] {
            for cut in &cuts {
                // A request without a seed must get the one it had.
                let mut seen = Transcript::new(choices(request));
                read(&frontend, request.clone(), &mut seen, *cut).await;
                let undisturbed = if *name == "a seed of the router's" {
                    let mut seeded = request.clone();
                    let seed = seen.accepted.as_ref().unwrap().seed;
                    seeded.sampling.as_mut().unwrap().seed = Some(seed);
                    whole(&frontend, &seeded).await
                } else {
                    right.clone()
                };
                // Broken once more on the way.
                let again = seen.tokens() + random.random_range(1..12);
                let what = format!("{name}, {way:?}, cut at {cut} and {again}");
                for until in [again, usize::MAX] {
                    if seen.completed.is_some() {
                        break;
                    }
                    let resumed = v1::GenerateRequest {
                        resume: Some(seen.resume(way)),
                        ..request.clone()
                    };
                    read(&frontend, resumed, &mut seen, until).await;
                }
                seen.assert_same(&undisturbed, &what);
            }
        }
    }
    cluster.wait_released(Duration::from_secs(2)).await;
    cluster.stop().await;
}

/// What an HTTP client has of one choice.
#[derive(Clone, Debug, Default, PartialEq)]
struct Got {
    text: String,
    logprobs: Vec<Value>,
    finish: Option<String>,
}

/// Reads chunks until the end or until a choice has this much text; the token and
/// whether the stream is over.
async fn chunks(
    open: &OpenCluster,
    path: &str,
    body: &Value,
    got: &mut [Got],
    bytes: usize,
) -> (String, Option<Value>) {
    let chat = path.contains("chat");
    let mut stream = open.http().stream(path, body).await;
    let (mut token, mut usage) = (String::new(), None);
    while let Some(event) = stream.next().await {
        let Event::Json(chunk) = event else { break };
        assert!(chunk.get("error").is_none(), "{chunk}");
        if let Some(extension) = chunk.get("baton") {
            assert!(token.is_empty(), "the token twice");
            token = extension["resume_token"].as_str().unwrap().to_owned();
        }
        assert!(!token.is_empty(), "the first chunk brings it");
        for choice in chunk["choices"].as_array().unwrap() {
            let got = &mut got[choice["index"].as_u64().unwrap() as usize];
            let text = if chat {
                choice["delta"].get("content").unwrap_or(&Value::Null)
            } else {
                &choice["text"]
            };
            got.text.push_str(text.as_str().unwrap_or_default());
            if let Some(list) = choice["logprobs"].get("content") {
                got.logprobs.extend(list.as_array().unwrap().clone());
            }
            if let Some(tokens) = choice["logprobs"].get("tokens") {
                for (index, token) in tokens.as_array().unwrap().iter().enumerate() {
                    let at = |key: &str| choice["logprobs"][key][index].clone();
                    got.logprobs.push(json!([
                        token,
                        at("token_logprobs"),
                        at("top_logprobs"),
                        at("text_offset")
                    ]));
                }
            }
            got.finish = choice["finish_reason"].as_str().map(str::to_owned);
        }
        if !chunk["usage"].is_null() {
            usage = Some(chunk["usage"].clone());
        }
        if got.iter().any(|got| got.text.len() >= bytes) {
            break;
        }
    }
    (token, usage)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http_streams_go_on_at_their_byte() {
    let open = OpenCluster::start(&Setup::default(), &models::fixture("rand")).await;
    let common = json!({
        "max_tokens": 50, "temperature": 0.9, "seed": 5, "ignore_eos": true, "stream": true,
        "stream_options": { "include_usage": true },
    });
    let prompt: Vec<u32> = (60..110).collect();
    let chat = json!([{ "role": "user", "content": "tell me" }]);
    for (path, more, counted) in [
        ("/v1/chat/completions", json!({ "messages": chat }), false),
        (
            "/v1/completions",
            json!({ "prompt": prompt, "n": 2 }),
            false,
        ),
        (
            "/v1/chat/completions",
            json!({ "messages": chat, "logprobs": true, "top_logprobs": 2 }),
            true,
        ),
        (
            "/v1/completions",
            json!({ "prompt": prompt, "logprobs": 1 }),
            true,
        ),
        // Text is held back again and again, so that it goes before its tokens are listed.
        (
            "/v1/chat/completions",
            json!({ "messages": chat, "logprobs": true, "n": 2,
                "stop": ["\u{fffd}\u{fffd}~~", "\u{fffd}~~", "e~~", "\u{0}~~"] }),
            true,
        ),
    ] {
        let mut body = common.clone();
        for (key, value) in more.as_object().unwrap() {
            body[key] = value.clone();
        }
        let n = body["n"].as_u64().unwrap_or(1) as usize;
        let mut right = vec![Got::default(); n];
        let (_, usage) = chunks(&open, path, &body, &mut right, usize::MAX).await;
        let length = right[0].text.len();
        for bytes in [1, length / 4, length / 2, length - 1] {
            let mut got = vec![Got::default(); n];
            let (token, _) = chunks(&open, path, &body, &mut got, bytes).await;
            let choices = got.iter().map(|got| {
                let mut choice = json!({ "text_bytes_received": got.text.len() });
                if counted {
                    choice["tokens_received"] = json!(got.logprobs.len());
                }
                choice
            });
            let mut again = body.clone();
            let choices: Vec<Value> = choices.collect();
            again["resume"] = json!({ "resume_token": token, "choices": choices });
            let (next, resumed_usage) = chunks(&open, path, &again, &mut got, usize::MAX).await;
            assert_ne!(next, token, "a token of its own");
            assert_eq!(got, right, "{path} {more}, cut at {bytes}");
            let counts = |usage: &Option<Value>| {
                let usage = usage.as_ref().expect("usage");
                (
                    usage["prompt_tokens"].clone(),
                    usage["completion_tokens"].clone(),
                )
            };
            assert_eq!(counts(&resumed_usage), counts(&usage));
        }
    }
    open.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http_refuses_what_cannot_be_resumed_by_name() {
    let open = OpenCluster::start(&Setup::default(), &models::fixture("rand")).await;
    let base = json!({
        "prompt": [50, 51, 52], "max_tokens": 8, "temperature": 0, "stream": true,
    });
    let mut got = vec![Got::default()];
    let (token, _) = chunks(&open, "/v1/completions", &base, &mut got, usize::MAX).await;
    let resume = |token: &str| {
        json!({ "resume": {
            "resume_token": token, "choices": [{ "text_bytes_received": 1 }],
        } })
    };
    let mut tampered = token.clone().into_bytes();
    tampered[30] = if tampered[30] == b'0' { b'1' } else { b'0' };
    let tampered = String::from_utf8(tampered).unwrap();
    for (change, param, code) in [
        (resume("xyz"), "resume.resume_token", "resume_token_invalid"),
        (
            resume(&tampered),
            "resume.resume_token",
            "resume_token_invalid",
        ),
        (
            json!({ "prompt": [50, 51, 53] }),
            "prompt",
            "resume_prompt_changed",
        ),
        (
            json!({ "temperature": 0.5 }),
            "temperature",
            "resume_parameter_changed",
        ),
        (json!({ "stream": false }), "resume", "invalid_argument"),
        (
            json!({ "prompt": ["a", "b"] }),
            "resume",
            "invalid_argument",
        ),
        (
            json!({ "logprobs": 1 }),
            "resume.choices[0].tokens_received",
            "invalid_argument",
        ),
        (
            json!({ "resume": { "resume_token": token, "choices": [] } }),
            "resume.choices",
            "resume_mismatch",
        ),
    ] {
        let mut body = base.clone();
        body["resume"] = resume(&token)["resume"].clone();
        for (key, value) in change.as_object().unwrap() {
            body[key] = value.clone();
        }
        let error = open.http().post("/v1/completions", &body).await.error(400);
        assert_eq!(error["param"], param, "{change}: {error}");
        if code != "invalid_argument" {
            assert_eq!(error["code"], code, "{change}: {error}");
        }
    }
    // What shows on the way only ends the stream with an error, and with nothing after it.
    let mut body = base.clone();
    body["resume"] = json!({
        "resume_token": token, "choices": [{ "text_bytes_received": 10_000 }],
    });
    let mut events = open
        .http()
        .stream("/v1/completions", &body)
        .await
        .collect()
        .await;
    let Some(Event::Json(last)) = events.pop() else {
        panic!("an error is the last word")
    };
    assert_eq!(last["error"]["code"], "resume_mismatch", "{last}");
    assert!(!events.contains(&Event::Done));
    open.stop().await;
}
