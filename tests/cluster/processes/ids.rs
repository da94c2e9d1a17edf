//! One request id, given by many clients, at two routers over the same workers: a name for logs,
//! by which nothing is found and nothing is mixed up.
//!
//! Seen to fail: with a router that adds nothing to the id.

use std::time::Duration;

use baton_proto::kv_layout::KvDtype;
use baton_proto::sampling::SamplingParams;
use baton_tests::http::{Event, Http, Streamed};
use baton_tests::models;
use baton_tests::oracle::{Case, Oracle};
use baton_tests::process::{Launcher, Pool, RouterProcess};
use futures::future::join_all;
use serde_json::{Value, json};

use super::{RELEASED_WITHIN, SPLIT};

const SOON: Duration = Duration::from_secs(20);
const TOKENS: u32 = 200;
const LEAVES_AT: usize = 20;
/// Between the request that leaves and the one that stays.
const APART: Duration = Duration::from_millis(100);
/// What a router may add to the part of an id that it keeps, and that part.
const ID_BYTES_MAX: usize = 100;
const KEPT_MAX: usize = 64;

fn prompt(salt: u32) -> Vec<u32> {
    (0..60)
        .map(|at| 6 + (at * 19 + salt * 37 + at * salt) % 290)
        .collect()
}

fn body(salt: u32) -> Value {
    json!({
        "model": "rand", "prompt": prompt(salt), "max_tokens": TOKENS, "temperature": 0,
        "ignore_eos": true, "logprobs": 0, "stream": true,
    })
}

/// The log-probabilities of the right tokens, which no other 200 tokens have.
fn right(oracle: &mut Oracle, salt: u32) -> Vec<f32> {
    let outputs = oracle.run(&Case {
        prompt: prompt(salt),
        sampling: SamplingParams {
            temperature: 0.0,
            max_tokens: TOKENS,
            ignore_eos: true,
            logprobs: Some(0),
            ..SamplingParams::default()
        },
    });
    outputs.into_iter().next().expect("one choice").logprobs
}

fn logprobs(streamed: &Streamed) -> Vec<f32> {
    let chunks = streamed.logprobs[0].iter();
    let lists = chunks.map(|chunk| chunk["token_logprobs"].clone());
    lists
        .flat_map(|list| serde_json::from_value::<Vec<f32>>(list).expect("numbers"))
        .collect()
}

/// Reads a stream to its end; its id as the header says it, and what came.
async fn stays(http: Http, salt: u32) -> (String, Vec<f32>) {
    let stream = http.stream("/v1/completions", &body(salt)).await;
    let id = stream.headers["x-request-id"].to_str().unwrap().to_owned();
    let streamed = Streamed::read(&stream.collect().await, false, 1, false);
    assert!(streamed.id.ends_with(&id), "{} and {id}", streamed.id);
    (id, logprobs(&streamed))
}

/// Goes away at its twentieth token.
async fn leaves(http: Http, salt: u32) -> String {
    let mut stream = http.stream("/v1/completions", &body(salt)).await;
    let id = stream.headers["x-request-id"].to_str().unwrap().to_owned();
    let mut seen = 0;
    while seen < LEAVES_AT {
        let Some(Event::Json(chunk)) = stream.next().await else {
            panic!("it ended by itself");
        };
        let tokens = &chunk["choices"][0]["logprobs"]["token_logprobs"];
        seen += tokens.as_array().map_or(0, Vec::len);
    }
    id
}

async fn two_routers() -> (
    Launcher,
    Vec<baton_tests::process::Worker>,
    [RouterProcess; 2],
) {
    let launcher = Launcher::start().await;
    let workers = join_all([
        launcher.worker(Pool::Prefill, "p0", "rand", &[]),
        launcher.worker(Pool::Prefill, "p1", "rand", &[]),
        launcher.worker(Pool::Decode, "d0", "rand", &[]),
        launcher.worker(Pool::Decode, "d1", "rand", &[]),
    ])
    .await;
    let routers = tokio::join!(launcher.router(&SPLIT), launcher.router(&SPLIT));
    for router in [&routers.0, &routers.1] {
        router.wait_workers("rand", (2, 2), SOON).await;
    }
    (launcher, workers, [routers.0, routers.1])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_of_one_id_share_nothing_at_one_router_or_at_two() {
    let mut oracle = Oracle::new(&models::fixture("rand"), KvDtype::F32);
    let (_launcher, workers, routers) = two_routers().await;
    // The id, and how what is kept of it begins.
    let long = "x".repeat(4096);
    let ids = [
        ("same", "same-"),
        ("", "req-"),
        (&long, &*"x".repeat(KEPT_MAX)),
        ("h\u{e9}llo \u{1f642}/", "h"),
    ];
    for (round, (given, begins)) in (0_u32..).zip(ids) {
        let salts: Vec<u32> = (0..4).map(|at| round * 10 + at).collect();
        let right: Vec<Vec<f32>> = salts.iter().map(|s| right(&mut oracle, *s)).collect();
        assert_ne!(right[1], right[3]);
        // At each router one that leaves and, a little later, one that stays.
        let all = routers.iter().zip(salts.chunks(2)).map(|(router, salts)| {
            let http = router.http().with_header("x-request-id", given);
            let (first, second) = (salts[0], salts[1]);
            async move {
                tokio::join!(leaves(http.clone(), first), async {
                    tokio::time::sleep(APART).await;
                    stays(http.clone(), second).await
                })
            }
        });
        let mut seen = Vec::new();
        for ((gone, (stayed, got)), right) in
            join_all(all).await.into_iter().zip([&right[1], &right[3]])
        {
            assert_eq!(got, *right, "{begins}: the oracle's tokens");
            seen.extend([gone, stayed]);
        }
        for id in &seen {
            assert!(id.starts_with(begins), "{id}");
            assert!(id.len() < ID_BYTES_MAX, "{id}");
            let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            assert!(id.chars().all(plain), "{id}");
        }
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), 4, "{seen:?}");
    }
    for worker in &workers {
        worker.wait_released(RELEASED_WITHIN).await;
    }
    for router in &routers {
        router.wait_metric("baton_requests_in_flight", 0.0).await;
        // There is no field of that name in a body.
        let body = json!({ "model": "rand", "prompt": [5, 6], "request_id": "same" });
        let reply = router.http().post("/v1/completions", &body).await;
        assert_eq!(reply.error(400)["param"], "request_id");
    }
}
