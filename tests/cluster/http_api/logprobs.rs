//! Token log-probabilities in the shapes of chat and completions, streamed and not.

use baton_proto::kv_layout::KvDtype;
use baton_proto::sampling::SamplingParams;
use baton_tests::models;
use baton_tests::oracle::{Case, Oracle};
use serde_json::{Map, Value, json};

use super::{split, streamed, whole, with};

const MADE: usize = 12;

/// Lists of the same name, one after the other.
fn joined(chunks: &[Value], key: &str) -> Vec<Value> {
    chunks
        .iter()
        .flat_map(|chunk| chunk[key].as_array().expect("a list").clone())
        .collect()
}

fn floats(values: &[Value]) -> Vec<f32> {
    values
        .iter()
        .map(|value| value.as_f64().expect("a finite number") as f32)
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn completions_list_tokens_with_the_oracles_figures() {
    let open = split("rand").await;
    let prompt: Vec<u32> = (60..110).collect();
    let mut oracle = Oracle::new(&models::fixture("rand"), KvDtype::F32);
    let right = oracle.run(&Case {
        prompt: prompt.clone(),
        sampling: SamplingParams {
            temperature: 0.0,
            max_tokens: MADE as u32,
            ignore_eos: true,
            logprobs: Some(4),
            ..SamplingParams::default()
        },
    });
    let body = json!({
        "prompt": prompt, "max_tokens": MADE, "temperature": 0, "ignore_eos": true, "logprobs": 4,
    });
    let answer = whole(&open.http(), "/v1/completions", &body).await;
    let stream = streamed(&open.http(), "/v1/completions", &body, false).await;
    let whole_lists = std::slice::from_ref(&answer["choices"][0]["logprobs"]);
    for key in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        let list = joined(whole_lists, key);
        assert_eq!(list.len(), MADE, "{key}");
        assert_eq!(list, joined(&stream.logprobs[0], key), "{key}, streamed");
    }
    assert_eq!(
        floats(&joined(whole_lists, "token_logprobs")),
        right[0].logprobs
    );
    let offsets = joined(whole_lists, "text_offset");
    assert_eq!(offsets[0], 0);
    assert!(
        offsets
            .windows(2)
            .all(|two| two[0].as_u64() <= two[1].as_u64())
    );
    for (token, top) in joined(whole_lists, "tokens")
        .iter()
        .zip(joined(whole_lists, "top_logprobs"))
    {
        let top: &Map<String, Value> = top.as_object().expect("an object");
        // Ids that spell the same share a key.
        assert!((1..=4).contains(&top.len()), "{top:?}");
        let best = floats(&top.values().cloned().collect::<Vec<_>>());
        assert!(best.windows(2).all(|two| two[0] >= two[1]), "{top:?}");
        assert!(top.contains_key(token.as_str().unwrap()), "greedy is first");
    }
    let none = with(body, json!({ "logprobs": null }));
    let answer = whole(&open.http(), "/v1/completions", &none).await;
    assert!(answer["choices"][0]["logprobs"].is_null());
    open.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chats_list_tokens_with_bytes_that_spell_the_text() {
    let open = split("chain-bytes").await;
    let body = json!({
        "messages": [{ "role": "user", "content": "0" }], "temperature": 0,
        "logprobs": true, "top_logprobs": 2, "n": 2,
    });
    let answer = whole(&open.http(), "/v1/chat/completions", &body).await;
    let stream = streamed(&open.http(), "/v1/chat/completions", &body, false).await;
    for choice in 0..2 {
        let one = &answer["choices"][choice];
        let content = one["logprobs"]["content"].as_array().unwrap();
        assert_eq!(*content, joined(&stream.logprobs[choice], "content"));
        let bytes: Vec<u8> = content
            .iter()
            .flat_map(|entry| serde_json::from_value::<Vec<u8>>(entry["bytes"].clone()).unwrap())
            .collect();
        let text = one["message"]["content"].as_str().unwrap();
        // The end token is listed with its own spelling and is not part of the text.
        assert!(bytes.starts_with(text.as_bytes()), "{content:?}");
        for entry in content {
            assert!(entry["token"].is_string());
            let top = entry["top_logprobs"].as_array().unwrap();
            assert_eq!(top.len(), 2);
            assert_eq!(top[0]["token"], entry["token"], "greedy is first");
            assert_eq!(top[0]["logprob"], entry["logprob"]);
        }
    }
    // Without alternatives asked for, the lists are empty.
    let bare = json!({ "messages": body["messages"], "logprobs": true, "max_tokens": 2 });
    let answer = whole(&open.http(), "/v1/chat/completions", &bare).await;
    let content = answer["choices"][0]["logprobs"]["content"]
        .as_array()
        .unwrap();
    assert!(
        content
            .iter()
            .all(|entry| entry["top_logprobs"] == json!([]))
    );
    open.stop().await;
}

/// Masks make impossible tokens; JSON has no word for minus infinity.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn masked_tokens_leave_the_json_strict() {
    let open = split("rand").await;
    let bias: Map<String, Value> = (0..300)
        .filter(|id| ![9, 10, 11].contains(id))
        .map(|id| (id.to_string(), json!(-100)))
        .collect();
    for more in [json!({ "logit_bias": bias }), json!({ "top_k": 1 })] {
        let body = json!({ "prompt": [20, 21, 22], "max_tokens": 6, "logprobs": 5 });
        let body = with(body, more);
        let answer = whole(&open.http(), "/v1/completions", &body).await;
        let lists = std::slice::from_ref(&answer["choices"][0]["logprobs"]);
        assert!(
            floats(&joined(lists, "token_logprobs"))
                .iter()
                .all(|logprob| logprob.is_finite())
        );
        streamed(&open.http(), "/v1/completions", &body, true).await;
    }
    open.stop().await;
}
