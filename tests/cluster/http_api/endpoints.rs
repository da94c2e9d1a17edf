//! Everything beside completions, and the request id.

use baton_proto::kv_layout::KvDtype;
use baton_proto::sampling::SamplingParams;
use baton_tests::oracle::{Case, Oracle};
use baton_tests::{models, process};
use serde_json::{Value, json};

use super::{split, whole, with};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn models_tokens_and_health_are_served() {
    let open = split("rand").await;
    let http = open.http();

    let models = http.get("/v1/models").await.json();
    assert_eq!(models["object"], "list");
    assert_eq!(models["data"].as_array().unwrap().len(), 1);
    let model = &models["data"][0];
    assert_eq!(model["id"], "test");
    assert_eq!(model["object"], "model");
    assert_eq!(model["owned_by"], "baton");
    assert_eq!(model["max_model_len"], 4096);
    // When the model was written, whoever asks and however often.
    let written = process::fixture_path("rand").join("config.json");
    let written = written.metadata().unwrap().modified().unwrap();
    let written = written.duration_since(std::time::UNIX_EPOCH).unwrap();
    assert_eq!(model["created"], written.as_secs());
    assert_eq!(http.get("/v1/models/test").await.json(), *model);
    let error = http.get("/v1/models/nope").await.error(404);
    assert_eq!(error["code"], "model_not_found");

    let text = "h\u{e9}llo <|user|> \u{1f642}";
    let body = json!({ "model": "test", "prompt": text });
    let tokens = whole(&http, "/tokenize", &body).await;
    let ids = tokens["tokens"].as_array().unwrap();
    assert_eq!(ids[0], 0, "the start token");
    assert_eq!(tokens["count"], ids.len());
    let bare = with(body, json!({ "add_special_tokens": false }));
    let bare = whole(&http, "/tokenize", &bare).await;
    assert_eq!(bare["tokens"].as_array().unwrap()[..], ids[1..]);
    let back = whole(&http, "/detokenize", &json!({ "tokens": bare["tokens"] })).await;
    assert_eq!(back["prompt"], text);
    let chat = json!({ "messages": [{ "role": "user", "content": "hi" }] });
    let chat = whole(&http, "/tokenize", &chat).await;
    let rendered = whole(&http, "/detokenize", &json!({ "tokens": chat["tokens"] })).await;
    assert_eq!(rendered["prompt"], "<|bos|><|user|>hi<|assistant|>");
    let error = http
        .post("/detokenize", &json!({ "tokens": [300] }))
        .await
        .error(400);
    assert!(error["message"].as_str().unwrap().contains("300"));

    assert_eq!(http.get("/livez").await.status, 200);
    assert_eq!(http.get("/readyz").await.status, 200);
    let body = json!({ "prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": true });
    whole(&http, "/v1/completions", &body).await;
    let metrics = http.get("/metrics").await;
    assert_eq!(metrics.status, 200);
    let metrics = String::from_utf8(metrics.body).unwrap();
    assert!(metrics.ends_with("# EOF\n"), "OpenMetrics has an end");
    let sample = |name: &str, labels: &[&str]| {
        let line = metrics
            .lines()
            .find(|line| line.starts_with(name) && labels.iter().all(|l| line.contains(l)));
        let value = line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
        value.unwrap_or_else(|| panic!("no {name} {labels:?} in {metrics}"))
    };
    assert!(sample("baton_requests_total", &["code=\"OK\""]) >= 1.0);
    assert!(sample("baton_generation_tokens_total", &[]) >= 2.0);
    assert!(sample("vllm:prompt_tokens_total", &["role=\"prefill\""]) >= 3.0);
    assert!(sample("vllm:generation_tokens_total", &["role=\"decode\""]) >= 1.0);
    for role in ["worker_role=\"prefill\"", "worker_role=\"decode\""] {
        let ready = sample("baton_pool_members", &[role, "state=\"ready\""]);
        assert_eq!(ready, 1.0, "{role}");
    }

    assert_eq!(http.get("/").await.status, 200);
    let error = http.get("/v1/nothing").await.error(404);
    assert_eq!(error["code"], "unknown_path");
    let error = http.get("/v1/completions").await.error(405);
    assert_eq!(error["code"], "method_not_allowed");
    open.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_id_is_echoed_clean_and_made_unique() {
    let open = split("rand").await;
    let body = json!({ "prompt": [5, 6, 7], "max_tokens": 2 });
    let echoed = |given: String| {
        let http = open.http().with_header("x-request-id", &given);
        let body = &body;
        async move {
            let reply = http.post("/v1/completions", body).await;
            assert_eq!(reply.status, 200, "{given:?}");
            let echo = reply.headers["x-request-id"].to_str().unwrap().to_owned();
            assert!(reply.json()["id"].as_str().unwrap().ends_with(&echo));
            echo
        }
    };
    let first = echoed("trace-1.a_b".into()).await;
    let second = echoed("trace-1.a_b".into()).await;
    assert!(first.starts_with("trace-1.a_b-") && second.starts_with("trace-1.a_b-"));
    assert_ne!(first, second);
    assert!(echoed(String::new()).await.starts_with("req-"));
    assert!(echoed("h\u{e9} / x".into()).await.starts_with("h"));
    let long = echoed("x".repeat(4096)).await;
    assert!(long.starts_with(&"x".repeat(64)) && long.len() < 100);
    open.stop().await;
}

/// Two requests with one id keep apart: each gets its own output, and one that goes
/// away does not take the other with it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_requests_with_one_id_share_nothing() {
    let open = split("rand").await;
    let http = open.http().with_header("x-request-id", "same");
    let mut oracle = Oracle::new(&models::fixture("rand"), KvDtype::F32);
    let prompt: Vec<u32> = (50..90).collect();
    let right = oracle.run(&Case {
        prompt: prompt.clone(),
        sampling: SamplingParams {
            temperature: 0.0,
            max_tokens: 120,
            ignore_eos: true,
            logprobs: Some(0),
            ..SamplingParams::default()
        },
    });
    let body = |prompt: &[u32], stream: bool| json!({ "prompt": prompt, "max_tokens": 120, "temperature": 0, "ignore_eos": true, "logprobs": 0, "stream": stream });
    let other: Vec<u32> = (120..160).collect();
    let mut leaving = http.stream("/v1/completions", &body(&other, true)).await;
    let staying = {
        let (http, body) = (http.clone(), body(&prompt, false));
        tokio::spawn(async move { whole(&http, "/v1/completions", &body).await })
    };
    for _ in 0..5 {
        leaving.next().await.expect("a stream that runs");
    }
    drop(leaving);
    let answer: Value = staying.await.unwrap();
    assert_eq!(answer["usage"]["completion_tokens"], right[0].tokens.len());
    let said = &answer["choices"][0]["logprobs"]["token_logprobs"];
    let said: Vec<f32> = serde_json::from_value(said.clone()).unwrap();
    assert_eq!(said, right[0].logprobs, "the oracle's tokens");
    open.cluster
        .wait_released(std::time::Duration::from_secs(2))
        .await;
    open.stop().await;
}
