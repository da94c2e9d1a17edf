//! A stream keeps the rules of the public API and says what the whole answer says.
//!
//! The rules are checked by [`Streamed::read`] and the parser below it, whose own tests
//! break each rule. Seen to fail: while a short answer did not wait for the prefill
//! worker's word on its cache, and while a prompt whose answer ends with its first
//! token could be computed a second time.
//!
//! [`Streamed::read`]: baton_tests::http::Streamed::read

use std::time::Duration;

use baton_proto::kv_layout::KvDtype;
use baton_proto::sampling::SamplingParams;
use baton_tests::http::Event;
use baton_tests::models;
use baton_tests::oracle::{Case, Oracle};
use serde_json::{Value, json};

use super::{split, streamed, text_of, whole, with};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_keep_the_rules_and_say_what_the_whole_answer_says() {
    let open = split("chain-bytes").await;
    let http = open.http();
    // What is asked, the finish reason, and the tokens made if the walk says so.
    let endings = [
        (json!({}), "stop", Some(7)),
        (json!({ "max_tokens": 1 }), "length", Some(1)),
        (json!({ "max_completion_tokens": 2 }), "length", Some(2)),
        (json!({ "max_tokens": 4 }), "length", Some(4)),
        (json!({ "stop": "daytues" }), "stop", None),
        (json!({ "stop": ["mondaytuesday!"] }), "stop", None),
    ];
    for (more, finish, made) in endings {
        for chat in [true, false] {
            if !chat && more.get("max_completion_tokens").is_some() {
                continue;
            }
            for n in [1, 2] {
                for include_usage in [true, false] {
                    let (path, prompt) = prompt_of(chat, "day 3");
                    let fixed = json!({ "model": "test", "temperature": 0, "n": n, "seed": 5 });
                    let body = with(with(prompt, fixed), more.clone());
                    let answer = whole(&http, path, &body).await;
                    let stream = streamed(&http, path, &body, include_usage).await;
                    assert_eq!(stream.model, "test");
                    assert_eq!(answer["model"], "test");
                    let prefix = if chat { "chatcmpl-" } else { "cmpl-" };
                    assert!(stream.id.starts_with(prefix), "{}", stream.id);
                    for choice in 0..n {
                        assert_eq!(
                            stream.text(choice),
                            text_of(&answer, chat, choice),
                            "{body}"
                        );
                        assert_eq!(stream.finishes[choice].as_deref(), Some(finish), "{body}");
                        assert_eq!(answer["choices"][choice]["finish_reason"], finish);
                        assert_eq!(answer["choices"][choice]["index"], choice);
                    }
                    if let Some(made) = made {
                        assert_eq!(answer["usage"]["completion_tokens"], made * n, "{body}");
                    }
                    if let Some(usage) = stream.usage {
                        assert_eq!(usage, answer["usage"], "{body}");
                    }
                    let usage = &answer["usage"];
                    let sum = usage["prompt_tokens"].as_u64().unwrap()
                        + usage["completion_tokens"].as_u64().unwrap();
                    assert_eq!(usage["total_tokens"], sum);
                }
            }
        }
    }
    open.stop().await;
}

fn prompt_of(chat: bool, text: &str) -> (&'static str, Value) {
    if chat {
        let messages = json!([{ "role": "user", "content": text }]);
        ("/v1/chat/completions", json!({ "messages": messages }))
    } else {
        ("/v1/completions", json!({ "prompt": text }))
    }
}

/// Several prompts in one call are choices in order, streamed as well.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_prompts_are_choices_in_order() {
    let open = split("chain-bytes").await;
    let http = open.http();
    let body = json!({ "prompt": ["3", "1", "2"], "temperature": 0 });
    let answer = whole(&http, "/v1/completions", &body).await;
    let stream = streamed(&http, "/v1/completions", &body, true).await;
    let right = ["mondaytuesday!", "A\u{1f642}B", "\u{1f643}\u{1f389}"];
    for (choice, text) in right.into_iter().enumerate() {
        assert_eq!(text_of(&answer, false, choice), text);
        assert_eq!(stream.text(choice), text);
    }
    assert_eq!(stream.usage, Some(answer["usage"].clone()));
    assert_eq!(answer["usage"]["prompt_tokens"], 3);
    open.stop().await;
}

/// The limits also hold for the token that the prefill worker draws.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_token_is_one_token_and_usage_is_the_oracles() {
    let open = split("rand").await;
    let http = open.http();
    let mut oracle = Oracle::new(&models::fixture("rand"), KvDtype::F32);
    let mut salt = 0;
    for max_tokens in [1, 2, 9] {
        for n in [1_u32, 3] {
            for temperature in [0.0_f32, 1.0] {
                salt += 1;
                let prompt: Vec<u32> = (0..40).map(|i| 6 + (i * 7 + salt * 31) % 290).collect();
                let right = oracle.run(&Case {
                    prompt: prompt.clone(),
                    sampling: SamplingParams {
                        temperature,
                        seed: 11,
                        n,
                        max_tokens,
                        ignore_eos: true,
                        logprobs: Some(0),
                        ..SamplingParams::default()
                    },
                });
                let body = json!({
                    "prompt": prompt, "temperature": temperature, "seed": 11, "n": n,
                    "max_tokens": max_tokens, "ignore_eos": true, "logprobs": 0,
                });
                let answer = whole(&http, "/v1/completions", &body).await;
                let usage = &answer["usage"];
                assert_eq!(usage["completion_tokens"], max_tokens * n);
                assert_eq!(usage["prompt_tokens"], 40);
                assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0, "fresh");
                let stream = streamed(&http, "/v1/completions", &body, true).await;
                let again = stream.usage.as_ref().unwrap();
                assert_eq!(again["completion_tokens"], usage["completion_tokens"]);
                // All but the block that holds the prompt's last token.
                assert_eq!(
                    again["prompt_tokens_details"]["cached_tokens"], 32,
                    "repeated: {body}"
                );
                for (choice, right) in right.iter().enumerate() {
                    let said = &answer["choices"][choice]["logprobs"]["token_logprobs"];
                    let said: Vec<f32> = serde_json::from_value(said.clone()).unwrap();
                    assert_eq!(said, right.logprobs, "the oracle's tokens");
                    assert_eq!(answer["choices"][choice]["finish_reason"], "length");
                    assert_eq!(stream.text(choice), text_of(&answer, false, choice));
                }
            }
        }
    }
    // An answer that ends on the prefill worker is not computed a second time.
    let counters = open.cluster.counters();
    assert_eq!(counters.local_prefills, 0, "{counters:?}");
    open.stop().await;
}

/// Each event leaves at once: text arrives while later tokens are being made.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn text_arrives_while_later_tokens_are_made() {
    let open = split("rand").await;
    let body = json!({
        "prompt": [50, 51, 52], "max_tokens": 4000, "ignore_eos": true, "temperature": 0, "stream": true,
    });
    let mut stream = open.http().stream("/v1/completions", &body).await;
    loop {
        let event = stream.next().await.expect("a stream that runs");
        let Event::Json(chunk) = event else {
            panic!("[DONE] before any text")
        };
        if chunk["choices"][0]["text"] != "" {
            break;
        }
    }
    let running: u32 = open
        .cluster
        .loads()
        .iter()
        .map(|load| load.requests_running)
        .sum();
    assert!(running > 0, "the answer was whole before its first text");
    drop(stream);
    open.cluster.wait_released(Duration::from_secs(1)).await;
    open.stop().await;
}
