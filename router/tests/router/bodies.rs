//! A fuzz target: HTTP bodies of every kind at every path, through the routes that serve.
//!
//! Whatever is posted: an answer with a known status and a JSON body, no panic, no
//! request left behind. Longer than `cargo test` runs it, on stable:
//!
//! ```text
//! BOLERO_RANDOM_ITERATIONS=1000000000 BOLERO_RANDOM_TEST_TIME_MS=200000 \
//!     cargo test -p baton-router --test router bodies -- --nocapture
//! ```
//!
//! (200 s on one shared core: 8,858 bodies, 986 of them served.)

use std::sync::Mutex;

use axum::body::{Body, to_bytes};
use axum::http::Request;
use baton_membership::Role;
use baton_observability::{AdminState, Readiness};
use bolero::{TypeGenerator, produce};
use tower::ServiceExt as _;

use crate::cluster::Cluster;

const PATHS: [&str; 4] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/tokenize",
    "/detokenize",
];

/// Names that some body has, and one that none has.
const FIELDS: [&str; 28] = [
    "model",
    "messages",
    "prompt",
    "stream",
    "stream_options",
    "n",
    "stop",
    "seed",
    "logprobs",
    "top_logprobs",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "logit_bias",
    "stop_token_ids",
    "ignore_eos",
    "response_format",
    "tools",
    "echo",
    "best_of",
    "suffix",
    "tokens",
    "user",
    "unheard_of",
];

/// Values of every kind, right for some field.
const VALUES: [&str; 28] = [
    "null",
    "true",
    "false",
    "0",
    "1",
    "2",
    "-1",
    "129",
    "4294967296",
    "18446744073709551616",
    "-9223372036854775808",
    "1e400",
    "0.5",
    "1e-320",
    "\"\"",
    "\"alphabet\"",
    "\"a b c\"",
    "\"\\u0000\\ud83d\\ude00\"",
    "\"\\ud800\"",
    "[]",
    "[\"a\",\"b\"]",
    "[0,1,2,4294967295]",
    "[[0,1],[2]]",
    "[{\"role\":\"user\",\"content\":\"a b\"}]",
    "[{\"role\":7}]",
    "{}",
    "{\"1\":1e9,\"-1\":0}",
    "{\"include_usage\":true}",
];

#[derive(Clone, Debug, TypeGenerator)]
struct Post {
    path: u8,
    /// A body that would be served, before the fields below replace or add to it.
    sound: bool,
    fields: [(u8, u8); 3],
    count: u8,
    /// Bytes that are overwritten, where `damage` is small.
    damage: u8,
    at: u8,
    byte: u8,
}

impl Post {
    fn path(&self) -> &'static str {
        PATHS[usize::from(self.path) % PATHS.len()]
    }

    fn body(&self) -> Vec<u8> {
        let mut fields: Vec<(&str, &str)> = Vec::new();
        if self.sound {
            fields.push(("model", "\"alphabet\""));
            fields.push(match self.path() {
                "/v1/chat/completions" => ("messages", "[{\"role\":\"user\",\"content\":\"a b\"}]"),
                "/detokenize" => ("tokens", "[0,1]"),
                _ => ("prompt", "\"a b\""),
            });
        }
        for (name, value) in &self.fields[..usize::from(self.count) % 4] {
            let name = FIELDS[usize::from(*name) % FIELDS.len()];
            // A name twice is one of the cases.
            if self.damage != 255 {
                fields.retain(|(other, _)| *other != name);
            }
            fields.push((name, VALUES[usize::from(*value) % VALUES.len()]));
        }
        let fields: Vec<String> = fields
            .iter()
            .map(|(name, value)| format!("\"{name}\":{value}"))
            .collect();
        let mut body = format!("{{{}}}", fields.join(",")).into_bytes();
        if self.damage < 48 {
            let at = usize::from(self.at) % body.len();
            body[at] = self.byte;
            if self.damage < 8 {
                body.truncate(at);
            }
        }
        body
    }
}

#[test]
fn bodies() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (cluster, _worker, routes) = runtime.block_on(async {
        let mut cluster = Cluster::start(|config| config.request_timeout_ms = 2000).await;
        let worker = cluster.worker("d", Role::Decode).await;
        let admin = AdminState::new(cluster.frontend.registry(), || Readiness::Ready);
        let routes = baton_router::http::routes(cluster.frontend.clone(), admin);
        (cluster, worker, routes)
    });
    let state = Mutex::new((routes, std::collections::BTreeMap::<u16, u64>::new()));
    let runtime_of = Mutex::new(&runtime);
    bolero::check!()
        .with_iterations(200)
        .with_generator(produce::<Post>())
        .for_each(|post: &Post| {
            let mut state = state.lock().unwrap_or_else(|poison| poison.into_inner());
            let request = Request::post(post.path())
                .header("content-type", "application/json")
                .body(Body::from(post.body()))
                .unwrap();
            let routes = state.0.clone();
            let runtime = runtime_of
                .lock()
                .unwrap_or_else(|poison| poison.into_inner());
            let (status, kind, body) = runtime.block_on(async {
                let response = routes.oneshot(request).await.unwrap();
                let kind = response.headers()["content-type"]
                    .to_str()
                    .unwrap()
                    .to_owned();
                let status = response.status().as_u16();
                let body = to_bytes(response.into_body(), 1 << 20).await.unwrap();
                (status, kind, body)
            });
            let said = String::from_utf8(body.to_vec()).unwrap();
            assert!(matches!(status, 200 | 400 | 404 | 413), "{status}: {said}");
            if kind.starts_with("text/event-stream") {
                assert!(said.trim_end().ends_with("data: [DONE]") || said.contains("\"error\""));
            } else {
                let json: serde_json::Value = serde_json::from_str(&said).unwrap();
                if status != 200 {
                    assert!(json["error"]["message"].is_string(), "{said}");
                }
            }
            *state.1.entry(status).or_default() += 1;
        });
    let counts = state.into_inner().unwrap().1;
    println!("bodies: {counts:?}");
    assert!(counts[&200] > 0 && counts[&400] > 0, "{counts:?}");
    runtime.block_on(cluster.stop());
}
