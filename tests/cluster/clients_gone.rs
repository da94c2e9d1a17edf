//! A client that goes away takes its work with it, wherever it goes: before the first
//! token, in the handoff, in decode, with several choices.
//!
//! Afterwards the leak probe: requests that together need 95 % of each pool are
//! admitted at once and equal the oracle. Seen to fail: with the streams of clients
//! that left kept open.

use std::time::Duration;

use baton_proto::kv_layout::KvDtype;
use baton_proto::sampling::SamplingParams;
use baton_proto::v1;
use baton_tests::client::{self, Collector};
use baton_tests::cluster::{Setup, TestCluster};
use baton_tests::doors::OpenCluster;
use baton_tests::models;
use baton_tests::oracle::{Case, Oracle};
use futures::StreamExt as _;
use futures::future::join_all;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use serde_json::json;

const RELEASED_WITHIN: Duration = Duration::from_secs(1);

/// Where a client goes away.
#[derive(Clone, Copy, Debug)]
enum Moment {
    /// After a time, wherever the request is then.
    After(Duration),
    /// With the acceptance: before the first token.
    Accepted,
    /// With the first token: in the handoff.
    FirstToken,
    /// Some tokens later: in decode.
    Tokens(usize),
}

fn greedy(prompt: Vec<u32>, n: u32, max_tokens: u32) -> Case {
    Case {
        prompt,
        sampling: SamplingParams {
            temperature: 0.0,
            n,
            max_tokens,
            ignore_eos: true,
            ..SamplingParams::default()
        },
    }
}

/// Runs a request until its moment and drops it.
async fn leave(cluster: &TestCluster, case: &Case, moment: Moment) {
    let frontend = cluster.frontend();
    let n = case.sampling.n;
    let reading = async {
        let call = baton_router::CallContext::new(baton_router::Tenant::new("default"));
        let mut stream = frontend
            .generate(client::request(case), call)
            .await
            .expect("admitted");
        let mut collector = Collector::new(n);
        while let Some(event) = stream.next().await {
            let event = event.expect("no failure");
            let accepted = matches!(event.event, Some(v1::generate_event::Event::Accepted(_)));
            collector.take(event);
            let gone = match moment {
                Moment::After(_) => false,
                Moment::Accepted => accepted,
                Moment::FirstToken => collector.tokens() > 0,
                Moment::Tokens(tokens) => collector.tokens() >= tokens,
            };
            if gone {
                return;
            }
        }
        panic!("the request ended by itself: {moment:?}");
    };
    match moment {
        Moment::After(time) => drop(tokio::time::timeout(time, reading).await),
        _ => reading.await,
    }
}

/// Fills 95 % of each pool with requests that run at once, and checks their tokens.
pub(crate) async fn leak_probe(cluster: &TestCluster, oracle: &mut Oracle, kv_tokens: u32) {
    // Prompts of 250 tokens and 6 made: 16 blocks of 16 each.
    let requests = kv_tokens * 95 / 100 / 256;
    let cases: Vec<Case> = (0..requests)
        .map(|request| {
            let prompt = (0..250)
                .map(|i| 6 + (i * 17 + request * 101) % 290)
                .collect();
            greedy(prompt, 1, 6)
        })
        .collect();
    let right: Vec<_> = cases.iter().map(|case| oracle.run(case)).collect();
    let frontend = cluster.frontend();
    let answers = cases
        .iter()
        .map(|case| client::run(&frontend, client::request(case)));
    for (answer, right) in join_all(answers).await.into_iter().zip(right) {
        let answer = answer.expect("a whole pool is there again");
        assert_eq!(answer.choices[0].tokens, right[0].tokens);
    }
    cluster.wait_released(RELEASED_WITHIN).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn work_stops_and_blocks_are_free_within_a_second() {
    let setup = Setup {
        prefill_kv_tokens: 4096,
        decode_kv_tokens: 4096,
        // The probe must not stand on promises of growth.
        growth_blocks: 1,
        ..Setup::default()
    };
    let model = models::fixture("rand");
    let mut oracle = Oracle::new(&model, KvDtype::F32);
    let cluster = setup.start(&model).await;
    let mut random = StdRng::seed_from_u64(0x90e);
    for round in 0..50 {
        let mut cases = Vec::new();
        for moment in [
            Moment::After(Duration::from_millis(random.random_range(0..20))),
            Moment::Accepted,
            Moment::FirstToken,
            Moment::Tokens(random.random_range(2..8)),
            Moment::Tokens(16),
        ] {
            let n = if matches!(moment, Moment::Tokens(16)) {
                4
            } else {
                1
            };
            let length = random.random_range(33..400);
            let prompt = (0..length).map(|_| random.random_range(6..300)).collect();
            cases.push((greedy(prompt, n, 1000), moment));
        }
        let all = cases
            .iter()
            .map(|(case, moment)| leave(&cluster, case, *moment));
        join_all(all).await;
        cluster.wait_released(RELEASED_WITHIN).await;
        if round % 10 == 9 {
            leak_probe(&cluster, &mut oracle, 4096).await;
        }
    }
    let counters = cluster.counters();
    assert!(counters.handoffs > 50, "{counters:?}");
    cluster.stop().await;
}

/// The same over HTTP, where only the closing of the socket tells: whole answers, a
/// long prompt, and four choices.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closed_sockets_stop_the_work_behind_them() {
    let setup = Setup {
        prefill_kv_tokens: 8192,
        decode_kv_tokens: 16384,
        ..Setup::default()
    };
    let model = models::fixture("rand");
    let open = OpenCluster::start(&setup, &model).await;
    let http = open.http();
    for round in 0..15_u32 {
        let prompt = |length: u32| -> Vec<u32> {
            (0..length)
                .map(|i| 6 + (i * 7 + round * 31) % 290)
                .collect()
        };
        let long = json!({ "prompt": prompt(4000), "max_tokens": 1 });
        let whole = json!({ "prompt": prompt(20), "max_tokens": 2000, "ignore_eos": true });
        let four = json!({
            "prompt": prompt(40), "max_tokens": 2000, "ignore_eos": true, "n": 4, "stream": true,
        });
        let streaming = async {
            let mut stream = http.stream("/v1/completions", &four).await;
            for _ in 0..3 {
                stream.next().await.expect("it runs");
            }
        };
        tokio::join!(
            http.abandon("/v1/completions", &long, Duration::from_millis(100)),
            http.abandon("/v1/completions", &whole, Duration::from_millis(200)),
            streaming,
        );
        open.cluster.wait_released(RELEASED_WITHIN).await;
    }
    let mut oracle = Oracle::new(&model, KvDtype::F32);
    leak_probe(&open.cluster, &mut oracle, 8192).await;
    open.stop().await;
}
