//! SIGKILL of workers: under load, and at the worst moment of a request.

use std::time::Duration;

use baton_proto::v1;
use baton_tests::client::{self, Collector};
use baton_tests::http::Event;
use baton_tests::models;
use baton_tests::oracle::{Case, Oracle};
use baton_tests::pace::{Stopwatch, crowded};
use baton_tests::process::{Launcher, Pool};
use futures::future::join_all;
use serde_json::json;

use super::place::Place;
use super::{Brakes, RELEASED_WITHIN, SPLIT, Traffic, ask, known};

const SOON: Duration = Duration::from_secs(20);
const BACK_WITHIN: Duration = crowded(Duration::from_secs(2));
/// Nobody is back because a lease has ended.
const LEASE: [&str; 1] = ["--etcd-ttl-s=60"];

/// Requests go on beside deaths: they complete elsewhere or fail with a typed error,
/// and a worker that comes back on its old ports serves within two seconds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deaths_under_load_show_no_wrong_token() {
    let cases = known(&models::fixture("rand"), 0xdead, 32, 40);
    let launcher = Launcher::start().await;
    let mut places = [
        Place::new(Pool::Prefill, "p0", &LEASE),
        Place::new(Pool::Prefill, "p1", &LEASE),
        Place::new(Pool::Decode, "d0", &LEASE),
        Place::new(Pool::Decode, "d1", &LEASE),
    ];
    join_all(places.iter_mut().map(|place| place.start(&launcher))).await;
    let router = launcher.router(&SPLIT).await;
    router.wait_workers("rand", (2, 2), SOON).await;

    let traffic = Traffic::start(&router.grpc(), "rand", &cases, 6);
    for round in 0..6 {
        // p0, d0, p1, d1, p0, d0
        let place = &mut places[[0, 2, 1, 3][round % 4]];
        traffic.wait_answered(4).await;
        place.kill().await;
        // The others serve on.
        traffic.wait_answered(4).await;
        place.start(&launcher).await;
        let back = Stopwatch::start();
        router.wait_workers("rand", (2, 2), BACK_WITHIN).await;
        // It gets work at once, and nothing goes to its life of before.
        while place.worker().load().await.handoffs_total == 0 {
            assert!(back.elapsed() < SOON, "round {round}: no work");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    let failures = traffic.stop().await;
    for error in &failures {
        assert!(error.kind.is_retryable(), "{error:?}");
    }
    println!("{} requests failed with a typed error", failures.len());
    for place in &places {
        place.worker().wait_released(RELEASED_WITHIN).await;
    }
    for one in cases.iter() {
        ask(router.grpc(), "rand", one).await.unwrap();
    }
}

/// When the stream is to lose its prefill worker.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Moment {
    /// The decode worker has taken the request; the prompt is being computed, and not done: the
    /// engine stands still.
    Accepted,
    /// The client sees index 0: right after the prefill worker's first token, about
    /// at its commit.
    FirstToken,
    /// A little later: after the commit.
    After(Duration),
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefill_worker_dead_at_the_first_token_repeats_and_loses_nothing() {
    let model = models::fixture("rand");
    let mut oracle = Oracle::new(&model, baton_proto::kv_layout::KvDtype::F32);
    let launcher = Launcher::start().await;
    let mut prefill = Place::new(Pool::Prefill, "p0", &[]);
    let mut decode = Place::new(Pool::Decode, "d0", &[]);
    tokio::join!(prefill.start(&launcher), decode.start(&launcher));
    let router = launcher.router(&SPLIT).await;
    let mut local = 0;
    for round in 0..12_u32 {
        let moment = match round % 3 {
            0 => Moment::FirstToken,
            1 => Moment::Accepted,
            _ => Moment::After(Duration::from_millis(u64::from(round))),
        };
        router.wait_workers("rand", (1, 1), SOON).await;
        let length = 40 + round * 130;
        let case = Case {
            prompt: (0..length)
                .map(|i| 6 + (i * 11 + round * 57) % 290)
                .collect(),
            sampling: baton_proto::sampling::SamplingParams {
                temperature: if round.is_multiple_of(2) { 0.0 } else { 0.9 },
                seed: 99,
                n: 1 + round % 2,
                max_tokens: 48,
                ignore_eos: true,
                ..Default::default()
            },
        };
        let right = oracle.run(&case);
        let held = match moment {
            Moment::Accepted => Some(prefill.worker().hold_engine().await),
            Moment::FirstToken | Moment::After(_) => None,
        };
        let request = client::request(&case);
        let mut stream = router.grpc().generate(request).await.unwrap().into_inner();
        let mut collector = Collector::new(case.sampling.n);
        let mut killed = false;
        // The collector refuses an index that comes twice or is left out.
        while let Some(event) = stream.message().await.unwrap() {
            let accepted = matches!(event.event, Some(v1::generate_event::Event::Accepted(_)));
            collector.take(event);
            let now = match moment {
                Moment::Accepted => accepted,
                Moment::FirstToken | Moment::After(_) => collector.tokens() > 0,
            };
            if now && !killed {
                if let Moment::After(time) = moment {
                    tokio::time::sleep(time).await;
                }
                prefill.kill().await;
                killed = true;
            }
        }
        assert!(killed, "{moment:?}");
        drop(held);
        let answer = collector.finish();
        for (got, right) in answer.choices.iter().zip(&right) {
            assert_eq!(got.tokens, right.tokens, "{moment:?}, {length} tokens");
        }
        let computed_by_decode = answer.timings.path == "local";
        assert!(computed_by_decode || moment != Moment::Accepted);
        local += u32::from(computed_by_decode);
        decode.worker().wait_released(RELEASED_WITHIN).await;
        prefill.start(&launcher).await;
    }
    println!("{local} of 12 requests were computed by the decode worker in the end");
}

/// With nobody left, a stream says so: one error object, then its end. Nothing makes it
/// look whole.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_loses_its_only_decode_worker_ends_with_an_error() {
    let launcher = Launcher::start().await;
    let mut prefill = Place::new(Pool::Prefill, "p0", &[]);
    let mut decode = Place::new(Pool::Decode, "d0", &[]);
    tokio::join!(prefill.start(&launcher), decode.start(&launcher));
    // The second request may have no token when the worker dies; here it shall not wait for
    // another one.
    let router = [SPLIT[0], SPLIT[1], "--pool-timeout-ms=0"];
    let router = launcher.router(&router).await;
    router.wait_workers("rand", (1, 1), SOON).await;
    let body = |stream: bool| {
        json!({
            "model": "rand", "prompt": [50, 51, 52], "max_tokens": 4000, "ignore_eos": true,
            "stream": stream,
        })
    };
    let (mut stream, held) = loop {
        let brakes = Brakes::of(std::slice::from_ref(decode.worker())).await;
        let mut stream = router.http().stream("/v1/completions", &body(true)).await;
        for _ in 0..5 {
            stream.next().await.expect("it runs");
        }
        if let Some((_, held)) = brakes.pull().await {
            break (stream, held);
        }
        // It was over before anybody looked.
    };
    let whole = {
        let (http, body) = (router.http(), body(false));
        tokio::spawn(async move { http.post("/v1/completions", &body).await })
    };
    router.wait_metric("baton_requests_in_flight", 2.0).await;
    decode.kill().await;
    drop(held);
    let mut error = None;
    while let Some(event) = stream.next().await {
        let Event::Json(chunk) = event else {
            panic!("[DONE] after a failure")
        };
        assert!(error.is_none(), "something after the error: {chunk}");
        if chunk.get("error").is_some() {
            error = Some(chunk["error"].clone());
        } else {
            assert!(chunk["choices"][0]["finish_reason"].is_null(), "{chunk}");
        }
    }
    let error = error.expect("an error object");
    assert_eq!(error["type"], "server_error", "{error}");
    assert!(error["message"].is_string() && error["code"].is_string());
    let reply = whole.await.expect("an answer");
    assert_eq!(reply.error(503)["type"], "server_error");
}
