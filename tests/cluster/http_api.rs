//! The HTTP front door over a real socket: what the public API promises of shapes,
//! streams, text, tenants and TLS.
//!
//! ```text
//! endpoints  models, tokenize, detokenize, health, metrics, request ids
//! framing    the rules of a stream, and that it says what the whole answer says
//! text       characters over tokens, spaces, stop strings
//! logprobs   both shapes of token log-probabilities
//! names      a hostile model name in every answer and in the metrics
//! not_finite  a damaged weight, and who notices
//! tenants    API keys and whose cache is whose
//! tls        both doors with certificates
//! ```

mod chats;
mod endpoints;
mod framing;
mod logprobs;
mod names;
mod not_finite;
mod tenants;
mod text;
mod tls;

use baton_tests::cluster::Setup;
use baton_tests::doors::OpenCluster;
use baton_tests::http::{Event, Http, Streamed};
use baton_tests::models;
use serde_json::{Value, json};

/// A split cluster of a fixture.
async fn split(fixture: &str) -> OpenCluster {
    OpenCluster::start(&Setup::default(), &models::fixture(fixture)).await
}

/// A body with more fields.
fn with(mut body: Value, more: Value) -> Value {
    let (Some(body_map), Value::Object(more)) = (body.as_object_mut(), more) else {
        panic!("two objects");
    };
    body_map.extend(more);
    body
}

/// A whole answer that must be one.
async fn whole(http: &Http, path: &str, body: &Value) -> Value {
    let reply = http.post(path, body).await;
    assert_eq!(
        reply.status,
        200,
        "{body}: {}",
        String::from_utf8_lossy(&reply.body)
    );
    reply.json()
}

/// The same request as a stream, checked.
async fn streamed(http: &Http, path: &str, body: &Value, include_usage: bool) -> Streamed {
    let mut body = with(body.clone(), json!({ "stream": true }));
    if include_usage {
        body = with(body, json!({ "stream_options": { "include_usage": true } }));
    }
    let events: Vec<Event> = http.stream(path, &body).await.collect().await;
    let chat = path.contains("chat");
    let prompts = match &body["prompt"] {
        Value::Array(list) if !list[0].is_number() => list.len(),
        _ => 1,
    };
    let choices = body["n"].as_u64().unwrap_or(1) as usize * prompts;
    Streamed::read(&events, chat, choices, include_usage)
}

/// A choice's text in a whole answer.
fn text_of(answer: &Value, chat: bool, choice: usize) -> String {
    let choice = &answer["choices"][choice];
    let text = if chat {
        &choice["message"]["content"]
    } else {
        &choice["text"]
    };
    text.as_str().expect("text").to_owned()
}
