//! Token log-probabilities in the shapes of chat and completions, streamed and not.

use baton_proto::kv_layout::KvDtype;
use baton_proto::sampling::SamplingParams;
use baton_tests::cluster::Setup;
use baton_tests::doors::OpenCluster;
use baton_tests::http::Http;
use baton_tests::models;
use baton_tests::oracle::{Case, Oracle};
use serde_json::{Map, Value, json};

use super::{split, streamed, text_of, whole, with};

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

/// The bytes of all tokens are those of the text.
fn assert_bytes(text: &str, content: &[Value], body: &Value) {
    let of = |entry: &Value| serde_json::from_value::<Vec<u8>>(entry["bytes"].clone()).unwrap();
    let bytes: Vec<u8> = content.iter().flat_map(of).collect();
    assert_eq!(bytes, text.as_bytes(), "{body}: {content:?}");
}

/// Each token begins where its offset says, and is there if nothing was cut.
fn assert_offsets(text: &str, lists: &[Value], cut: bool, body: &Value) {
    let (tokens, offsets) = (joined(lists, "tokens"), joined(lists, "text_offset"));
    let characters: Vec<char> = text.chars().collect();
    let offsets: Vec<usize> = offsets
        .iter()
        .map(|o| o.as_u64().unwrap() as usize)
        .collect();
    assert!(offsets.is_sorted(), "{body}: {offsets:?}");
    for (index, (token, offset)) in tokens.iter().zip(&offsets).enumerate() {
        let token = token.as_str().unwrap();
        assert!(
            *offset <= characters.len(),
            "{body}: {offsets:?} in {text:?}"
        );
        let rest: String = characters[*offset..].iter().collect();
        // The blank in front of a whole text is taken away.
        let stripped = token.strip_prefix(' ').filter(|_| index == 0);
        let there = rest.starts_with(token) || stripped.is_some_and(|t| rest.starts_with(t));
        let hidden = token.starts_with("bytes:") || token.starts_with('<');
        assert!(
            there || cut || hidden,
            "{body}: `{token}` at {offset} of {text:?}"
        );
    }
}

/// The same call in both shapes, whole and as a stream.
async fn assert_lists(http: &Http, prompt: &str, more: &Value, cut: bool) -> String {
    let chat = json!({ "messages": [{ "role": "user", "content": prompt }],
        "logprobs": true, "top_logprobs": 2 });
    let body = with(chat, more.clone());
    let answer = whole(http, "/v1/chat/completions", &body).await;
    let stream = streamed(http, "/v1/chat/completions", &body, false).await;
    let choices = body["n"].as_u64().unwrap_or(1) as usize;
    for choice in 0..choices {
        let content = answer["choices"][choice]["logprobs"]["content"]
            .as_array()
            .unwrap();
        assert_eq!(
            *content,
            joined(&stream.logprobs[choice], "content"),
            "{body}"
        );
        assert_bytes(&text_of(&answer, true, choice), content, &body);
        assert_eq!(stream.text(choice), text_of(&answer, true, choice));
    }
    let body = with(json!({ "prompt": prompt, "logprobs": 2 }), more.clone());
    let answer = whole(http, "/v1/completions", &body).await;
    let stream = streamed(http, "/v1/completions", &body, false).await;
    for choice in 0..choices {
        let text = text_of(&answer, false, choice);
        let lists = std::slice::from_ref(&answer["choices"][choice]["logprobs"]);
        assert_offsets(&text, lists, cut, &body);
        for key in ["tokens", "text_offset"] {
            assert_eq!(
                joined(lists, key),
                joined(&stream.logprobs[choice], key),
                "{body}"
            );
        }
    }
    text_of(&answer, false, 0)
}

/// Every walk of the fixtures ends characters in other tokens than it begins them in, or
/// begins with a blank.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_are_listed_with_their_part_of_the_text() {
    for fixture in ["chain-bytes", "chain-spaces"] {
        let open = split(fixture).await;
        for start in (0..10).map(|digit| digit.to_string()) {
            let more = json!({ "temperature": 0, "max_tokens": 60 });
            let text = assert_lists(&open.http(), &start, &more, false).await;
            // Cut inside a token, behind one, and with the stop string kept.
            let characters: Vec<char> = text.chars().collect();
            for (from, length) in [(1, 1), (2, 3), (4, 5)] {
                let Some(stop) = characters.get(from..from + length) else {
                    continue;
                };
                let stop: String = stop.iter().collect();
                for keep in [false, true] {
                    let more = with(
                        more.clone(),
                        json!({ "stop": [stop, "never"], "n": 2,
                        "include_stop_str_in_output": keep }),
                    );
                    assert_lists(&open.http(), &start, &more, true).await;
                }
            }
            // Ended in the middle of a character.
            for most in 1..4 {
                let more = json!({ "temperature": 0, "max_tokens": most, "stop": "never" });
                assert_lists(&open.http(), &start, &more, true).await;
            }
        }
        open.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_real_models_emoji_are_listed_with_their_part_of_the_text() {
    let model = models::real("smollm2-135m-instruct");
    let open = OpenCluster::start(&Setup::default(), &model).await;
    let http = open.http();
    let mut split_characters = 0;
    for seed in 0..4 {
        let more = json!({ "seed": seed, "temperature": 1.3, "max_tokens": 40, "n": 2 });
        let prompt = "Emoji: \u{1f642}\u{1f469}\u{200d}\u{1f4bb}\u{1f980} \u{ac12} \u{1f642}\u{1f980}\u{1f9ed}";
        let text = assert_lists(&http, prompt, &more, false).await;
        split_characters += text.chars().filter(|c| *c > '\u{ffff}').count();
        let letters: Vec<char> = text.chars().collect();
        if letters.len() > 12 {
            let stop: String = letters[8..12].iter().collect();
            let more = with(more, json!({ "stop": stop }));
            assert_lists(&http, prompt, &more, true).await;
        }
    }
    assert!(
        split_characters > 0,
        "no character of several tokens was drawn"
    );
    open.stop().await;
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
        let text = one["message"]["content"].as_str().unwrap();
        assert_bytes(text, content, &body);
        // The end token is listed with its own spelling and is not part of the text.
        let last = content.last().unwrap();
        assert!(
            last["token"].as_str().unwrap().starts_with("<|eos"),
            "{last}"
        );
        assert_eq!(last["bytes"], json!([]));
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
