//! Text over token borders: characters of several tokens come whole, SentencePiece's
//! spaces stay, stop strings are found wherever they begin and end.
//!
//! The CHAIN fixtures spell known texts, `walks.json` says which. The prompt ends just
//! before the first character, so on the split path the prefill worker makes its first
//! byte and the decode worker the rest.

use baton_engine::model::Model;
use baton_proto::v1;
use baton_tests::client::Collector;
use baton_tests::cluster::Setup;
use baton_tests::doors::OpenCluster;
use baton_tests::{models, process};
use serde_json::{Value, json};
use std::sync::Arc;

use super::{split, streamed, text_of, whole, with};

/// One walk of a fixture.
struct Walk {
    name: String,
    start: String,
    start_id: u32,
    ids: usize,
    text: String,
    text_without_lead: String,
    /// Goes round for ever.
    endless: bool,
}

fn walks(fixture: &str) -> Vec<Walk> {
    let path = process::fixture_path(fixture).join("walks.json");
    let all: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    all.as_object()
        .unwrap()
        .iter()
        .map(|(name, walk)| Walk {
            name: name.clone(),
            start: text(&walk["start"]),
            start_id: walk["start_id"].as_u64().unwrap() as u32,
            ids: walk["ids"].as_array().unwrap().len(),
            text: text(&walk["text"]),
            text_without_lead: text(&walk["text_without_lead"]),
            endless: walk["note"].as_str().unwrap().contains("for ever"),
        })
        .collect()
}

/// Joined deltas = whole text = `right`, for 1 and 2 choices.
async fn assert_text(open: &OpenCluster, path: &str, body: &Value, right: &str, name: &str) {
    let http = open.http();
    let chat = path.contains("chat");
    for n in [1, 2] {
        let body = with(body.clone(), json!({ "n": n, "temperature": 0 }));
        let answer = whole(&http, path, &body).await;
        let stream = streamed(&http, path, &body, false).await;
        for choice in 0..n {
            assert_eq!(text_of(&answer, chat, choice), right, "{name}: {body}");
            assert_eq!(stream.text(choice), right, "{name}: {body}, streamed");
            if !right.contains('\u{fffd}') {
                let broken = stream.deltas[choice]
                    .iter()
                    .find(|d| d.contains('\u{fffd}'));
                assert_eq!(broken, None, "{name}");
            }
        }
    }
}

/// A stop string that spells out a special token, over both doors: the real model's end of
/// turn, which is not to end it by itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_string_that_is_a_special_token_ends_the_text_at_it() {
    const END: &str = "<|im_end|>";
    let model = models::real("smollm2-135m-instruct");
    let open = OpenCluster::start(&Setup::default(), &model).await;
    let http = open.http();
    let messages = json!([{ "role": "user", "content": "Say hi." }]);
    let body = json!({ "messages": messages, "temperature": 0, "max_tokens": 60 });
    let plain = whole(&http, "/v1/chat/completions", &body).await;
    let right = text_of(&plain, true, 0);
    assert_eq!(plain["choices"][0]["finish_reason"], "stop", "{plain}");
    let on = with(body.clone(), json!({ "ignore_eos": true }));
    let longer = whole(&http, "/v1/chat/completions", &on).await;
    assert_eq!(longer["choices"][0]["finish_reason"], "length");
    let tokens = &plain["usage"]["completion_tokens"];
    for (stop, keep, ended) in [
        (json!(END), false, right.clone()),
        (json!(["never", END]), true, format!("{right}{END}")),
    ] {
        let body = with(
            on.clone(),
            json!({ "stop": stop, "include_stop_str_in_output": keep }),
        );
        assert_text(&open, "/v1/chat/completions", &body, &ended, END).await;
        let answer = whole(&http, "/v1/chat/completions", &body).await;
        assert_eq!(answer["choices"][0]["finish_reason"], "stop");
        assert_eq!(
            answer["usage"]["completion_tokens"], *tokens,
            "the end token counts"
        );
        let listed = with(body, json!({ "logprobs": true }));
        let answer = whole(&http, "/v1/chat/completions", &listed).await;
        let content = answer["choices"][0]["logprobs"]["content"]
            .as_array()
            .unwrap();
        let of = |entry: &Value| serde_json::from_value::<Vec<u8>>(entry["bytes"].clone()).unwrap();
        let bytes: Vec<u8> = content.iter().flat_map(of).collect();
        assert_eq!(bytes, ended.as_bytes());
    }
    // Before `min_tokens` it is not looked for.
    let late = json!({ "stop": END, "min_tokens": tokens.as_u64().unwrap() + 1 });
    let answer = whole(&http, "/v1/chat/completions", &with(on.clone(), late)).await;
    assert!(text_of(&answer, true, 0).len() > right.len());

    let rendered = whole(&http, "/tokenize", &json!({ "messages": messages })).await;
    let request = v1::GenerateRequest {
        prompt: Some(v1::generate_request::Prompt::TokenIds(v1::TokenIds {
            ids: serde_json::from_value(rendered["tokens"].clone()).unwrap(),
        })),
        sampling: Some(v1::SamplingParams {
            temperature: Some(0.0),
            max_tokens: Some(60),
            ignore_eos: Some(true),
            ..v1::SamplingParams::default()
        }),
        stop: vec![END.to_owned()],
        ..v1::GenerateRequest::default()
    };
    let mut stream = open.grpc().generate(request).await.unwrap().into_inner();
    let mut stopped_by = None;
    let mut collector = Collector::new(1);
    while let Some(event) = stream.message().await.unwrap() {
        if let Some(v1::generate_event::Event::Finished(finished)) = &event.event {
            assert_eq!(finished.reason(), v1::FinishReason::Stop);
            stopped_by.clone_from(&finished.stop_string);
        }
        collector.take(event);
    }
    assert_eq!(collector.finish().texts[0], right);
    assert_eq!(stopped_by.as_deref(), Some(END));
    open.stop().await;
}

async fn assert_grpc_text(open: &OpenCluster, ids: Vec<u32>, max_tokens: u32, right: &str) {
    let request = v1::GenerateRequest {
        prompt: Some(v1::generate_request::Prompt::TokenIds(v1::TokenIds { ids })),
        sampling: Some(v1::SamplingParams {
            temperature: Some(0.0),
            max_tokens: Some(max_tokens),
            ..v1::SamplingParams::default()
        }),
        ..v1::GenerateRequest::default()
    };
    let mut stream = open.grpc().generate(request).await.unwrap().into_inner();
    let mut collector = Collector::new(1);
    while let Some(event) = stream.message().await.unwrap() {
        collector.take(event);
    }
    assert_eq!(collector.finish().texts[0], right);
}

async fn every_walk(fixture: &str, local_prefill_tokens_max: u32) {
    let setup = Setup {
        local_prefill_tokens_max,
        ..Setup::default()
    };
    let model: Arc<Model> = models::fixture(fixture);
    let open = OpenCluster::start(&setup, &model).await;
    let before = open.cluster.counters();
    // Some text in front, so that a leading space is one.
    let lead = model_ids(&open, "say ").await;
    for walk in walks(fixture) {
        let name = format!("{fixture} `{}`", walk.name);
        let max_tokens = if walk.endless { walk.ids } else { walk.ids + 9 };
        let limit = json!({ "max_tokens": max_tokens });
        let ids = |lead: &[u32]| [lead, &[walk.start_id]].concat();
        let by_ids = with(json!({ "prompt": ids(&lead) }), limit.clone());
        assert_text(&open, "/v1/completions", &by_ids, &walk.text, &name).await;
        let alone = with(json!({ "prompt": ids(&[]) }), limit.clone());
        assert_text(
            &open,
            "/v1/completions",
            &alone,
            &walk.text_without_lead,
            &name,
        )
        .await;
        assert_grpc_text(&open, ids(&lead), max_tokens as u32, &walk.text).await;
        if walk.start.len() == 1 {
            let by_text = with(
                json!({ "prompt": format!("say {}", walk.start) }),
                limit.clone(),
            );
            assert_text(&open, "/v1/completions", &by_text, &walk.text, &name).await;
            let messages = json!([{ "role": "user", "content": format!("say {}", walk.start) }]);
            let chat = with(json!({ "messages": messages }), limit);
            assert_text(&open, "/v1/chat/completions", &chat, &walk.text, &name).await;
        }
    }
    let after = open.cluster.counters();
    if local_prefill_tokens_max == 0 {
        assert!(after.handoffs > before.handoffs, "{fixture}: no handoff");
    } else {
        assert_eq!(after.handoffs, before.handoffs, "{fixture}");
    }
    open.stop().await;
}

async fn model_ids(open: &OpenCluster, text: &str) -> Vec<u32> {
    let body = json!({ "prompt": text });
    let answer = whole(&open.http(), "/tokenize", &body).await;
    serde_json::from_value(answer["tokens"].clone()).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn characters_of_several_tokens_stream_whole_on_the_split_path() {
    every_walk("chain-bytes", 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn characters_of_several_tokens_stream_whole_on_the_local_path() {
    every_walk("chain-bytes", u32::MAX).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentencepiece_spaces_stay_on_both_paths() {
    every_walk("chain-spaces", 0).await;
    every_walk("chain-spaces", u32::MAX).await;
}

/// `mo|nda|y|tue|sd|ay!`: matches begin, end and lie across its pieces.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stop_strings_end_the_text_before_the_earliest_match() {
    let open = split("chain-bytes").await;
    let whole_text = "mondaytuesday!";
    let table = [
        (json!("daytues"), "mon", "mondaytues"),
        (json!("a"), "mond", "monda"),
        (json!("day!"), "mondaytues", whole_text),
        (json!(["yt", "tues"]), "monda", "mondayt"),
        (json!(whole_text), "", whole_text),
        (json!("xyz"), whole_text, whole_text),
        (json!("!!"), whole_text, whole_text),
        (json!(["xyz", "sday", "ues", "!"]), "mondayt", "mondaytues"),
        (json!([]), whole_text, whole_text),
        (Value::Null, whole_text, whole_text),
    ];
    for (stop, right, included) in table {
        for chat in [true, false] {
            let (path, prompt) = if chat {
                let messages = json!([{ "role": "user", "content": "3" }]);
                ("/v1/chat/completions", json!({ "messages": messages }))
            } else {
                ("/v1/completions", json!({ "prompt": "3" }))
            };
            let body = with(prompt, json!({ "stop": stop, "temperature": 0 }));
            assert_text(&open, path, &body, right, "stop").await;
            let body = with(body, json!({ "include_stop_str_in_output": true }));
            assert_text(&open, path, &body, included, "stop included").await;
            let answer = whole(&open.http(), path, &body).await;
            assert_eq!(answer["choices"][0]["finish_reason"], "stop");
        }
    }
    open.cluster
        .wait_released(std::time::Duration::from_secs(1))
        .await;
    open.stop().await;
}
