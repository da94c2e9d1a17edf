//! Pools of other block sizes and types of KV. What keeps its bits gives the
//! oracle's tokens, exact or not; what does not serves requests that need not be exact,
//! is refused by name for the others, and is never found by a prefix.

use std::time::Duration;

use baton::cluster::Cluster;
use baton_engine::model::Model;
use baton_proto::kv_layout::KvDtype;
use baton_proto::sampling::SamplingParams;
use baton_proto::{ErrorKind, v1};
use baton_tests::client::{self, Answer};
use baton_tests::cluster::{Setup, TestCluster};
use baton_tests::models;
use baton_tests::oracle::{Case, Oracle};
use baton_tests::pace::Stopwatch;
use baton_tests::process::{Launcher, Pool};
use futures::future::join_all;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use std::sync::Arc;

use crate::processes::{self, PATIENT};

/// The ends of spans and blocks of all sizes, and their neighbours.
const LENGTHS: [usize; 13] = [1, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 129];

const PATIENCE: Duration = Duration::from_secs(5);

/// Blocks and type of KV of one pool.
type End = (u32, KvDtype);

/// One worker a pool, everything through the prefill pool.
async fn start(model: &Arc<Model>, prefill: End, decode: End) -> TestCluster {
    let mut plan = Setup::default().plan("test");
    for worker in &mut plan.prefill {
        (worker.engine.block_size, worker.engine.kv_dtype) = prefill;
    }
    for worker in &mut plan.decode {
        (worker.engine.block_size, worker.engine.kv_dtype) = decode;
    }
    let cluster = Cluster::start(plan, Arc::clone(model)).await;
    TestCluster {
        cluster: cluster.expect("the cluster starts"),
    }
}

fn cases(seed: u64) -> Vec<Case> {
    let mut random = StdRng::seed_from_u64(seed);
    let case = |(index, length): (usize, usize)| Case {
        prompt: (0..length).map(|_| random.random_range(6..300)).collect(),
        sampling: SamplingParams {
            temperature: if index % 2 == 0 { 0.0 } else { 0.9 },
            seed: index as u64,
            n: if index % 4 == 3 { 2 } else { 1 },
            max_tokens: 20,
            ignore_eos: true,
            ..SamplingParams::default()
        },
    };
    LENGTHS.into_iter().enumerate().map(case).collect()
}

fn request(case: &Case, exact: bool) -> v1::GenerateRequest {
    v1::GenerateRequest {
        exact: Some(exact),
        ..client::request(case)
    }
}

fn tokens(answer: &Answer) -> Vec<&[u32]> {
    let choices = answer.choices.iter();
    choices.map(|choice| choice.tokens.as_slice()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_do_not_depend_on_the_block_sizes_of_the_two_pools() {
    for fixture in ["rand", "rand-swa"] {
        let model = models::fixture(fixture);
        let mut oracle = Oracle::new(&model, KvDtype::F16);
        let cases = cases(17);
        let right: Vec<_> = cases.iter().map(|case| oracle.run(case)).collect();
        for (prefill, decode) in [(16, 16), (32, 16), (16, 32), (16, 64), (128, 16)] {
            let cluster = start(&model, (prefill, KvDtype::F16), (decode, KvDtype::F16)).await;
            let frontend = cluster.frontend();
            let check = |case: usize, answer: &Answer| {
                let right = right[case].iter().map(|output| output.tokens.as_slice());
                let right: Vec<&[u32]> = right.collect();
                let length = cases[case].prompt.len();
                let what = format!("{fixture} {prefill}/{decode}, prompt of {length}");
                assert_eq!(tokens(answer), right, "{what}");
            };
            // Alone, then all at once; the second time a part is in the prefix caches.
            for (index, case) in cases.iter().enumerate() {
                let answer = client::run(&frontend, request(case, true)).await;
                check(index, &answer.unwrap());
            }
            let all = cases
                .iter()
                .map(|case| client::run(&frontend, request(case, true)));
            for (index, answer) in join_all(all).await.into_iter().enumerate() {
                check(index, &answer.unwrap());
            }
            cluster.wait_released(PATIENCE).await;
            let counters = cluster.counters();
            assert_eq!(counters.handoffs, 2 * LENGTHS.len() as u64);
            assert_eq!(counters.local_prefills, 0);
            assert!(counters.prefix_hits_tokens > 0);
            cluster.stop().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn converted_kv_serves_requests_that_need_not_be_exact_and_no_others() {
    let model = models::fixture("rand");
    for (prefill, decode) in [
        ((16, KvDtype::F16), (16, KvDtype::Int8)),
        ((32, KvDtype::F32), (16, KvDtype::F16)),
        ((16, KvDtype::Bf16), (64, KvDtype::Int4)),
    ] {
        let cluster = start(&model, prefill, decode).await;
        let frontend = cluster.frontend();
        let mut oracle = Oracle::new(&model, prefill.1);
        let mut agree = 0;
        let cases = cases(18);
        for _ in 0..2 {
            for case in &cases {
                let answer = client::run(&frontend, request(case, false)).await.unwrap();
                let right = oracle.run(case);
                for (choice, right) in answer.choices.iter().zip(&right) {
                    assert_eq!(choice.tokens.len(), 20);
                    // The prefill worker's own draw.
                    assert_eq!(choice.tokens[0], right.tokens[0]);
                    agree += usize::from(choice.tokens[1] == right.tokens[1]);
                }
            }
        }
        // The decode worker's first draw sees the converted prompt. Garbage would agree
        // with one draw in 300.
        assert!(agree > cases.len(), "{prefill:?} {decode:?}: {agree}");
        cluster.wait_released(PATIENCE).await;
        let counters = cluster.counters();
        assert_eq!(counters.handoffs, 2 * LENGTHS.len() as u64);
        // Nothing of it can be found, by whomever.
        let decoder = cluster.cluster.decode_workers()[0].load();
        assert_eq!(decoder.prefix_hits_tokens_total, 0);
        assert!(decoder.blocks.iter().all(|blocks| blocks.cached == 0));

        let error = client::run(&frontend, request(&cases[12], true))
            .await
            .unwrap_err();
        assert_eq!(error.kind, ErrorKind::Unavailable);
        assert_eq!(
            (error.field.as_str(), error.reason.as_str()),
            ("kv_dtype", "LAYOUT_MISMATCH")
        );
        for word in [prefill.1.name(), decode.1.name(), "exact"] {
            assert!(error.message.contains(word), "{}", error.message);
        }
        assert_eq!(cluster.counters().handoffs, counters.handoffs);
        cluster.stop().await;
    }
}

/// Over TCP, with workers that are processes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_of_other_block_sizes_and_types_hand_over() {
    let model = models::fixture("rand");
    let known = processes::known(&model, 0x1a10, 8, 20);
    let launcher = Launcher::start().await;
    let p = launcher.worker(Pool::Prefill, "p32", "rand", &["--block-size=32"]);
    let d = launcher.worker(Pool::Decode, "d16", "rand", &[]);
    let (prefill, same_bits) = tokio::join!(p, d);
    let router = launcher.router(&PATIENT).await;
    router.wait_workers("rand", (1, 1), PATIENCE * 4).await;
    for one in known.iter() {
        processes::ask(router.grpc(), "rand", one).await.unwrap();
    }
    let load = same_bits.load().await;
    assert_eq!((load.handoffs_total, load.local_prefills_total), (8, 0));
    assert!(load.blocks.iter().any(|blocks| blocks.cached > 0));

    // The only decode worker stores another type from here on.
    let mut same_bits = same_bits;
    same_bits.process.terminate();
    assert_eq!(same_bits.process.exit_code().await, 0);
    let waited = Stopwatch::start();
    while router.http().get("/readyz").await.status != 503 {
        assert!(waited.elapsed() < PATIENCE * 4, "it does not see it go");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let flags = ["--kv-dtype=int8"];
    let other_bits = launcher.worker(Pool::Decode, "d8", "rand", &flags).await;
    router.wait_workers("rand", (1, 1), PATIENCE * 4).await;
    for (case, right) in known.iter() {
        let request = |exact| v1::GenerateRequest {
            model: "rand".to_owned(),
            ..request(case, exact)
        };
        let mut stream = router
            .grpc()
            .generate(request(false))
            .await
            .unwrap()
            .into_inner();
        let mut collector = client::Collector::new(case.sampling.n);
        while let Some(event) = stream.message().await.unwrap() {
            collector.take(event);
        }
        for (choice, right) in collector.finish().choices.iter().zip(right) {
            assert_eq!(choice.tokens.len(), 20);
            assert_eq!(choice.tokens[0], right.tokens[0]);
        }
        let refused = router.grpc().generate(request(true)).await;
        let status = match refused {
            Err(status) => status,
            Ok(stream) => {
                let mut stream = stream.into_inner();
                loop {
                    match stream.message().await {
                        Ok(Some(_)) => {}
                        Ok(None) => panic!("an exact request was served with other bits"),
                        Err(status) => break status,
                    }
                }
            }
        };
        let error = baton_proto::status::from_status(&status);
        assert_eq!(error.reason, "LAYOUT_MISMATCH");
        assert_eq!(error.field, "kv_dtype");
    }
    let load = other_bits.load().await;
    assert_eq!((load.handoffs_total, load.local_prefills_total), (8, 0));
    assert!(load.blocks.iter().all(|blocks| blocks.cached == 0));
    for worker in [&prefill, &other_bits] {
        worker.wait_released(PATIENCE).await;
    }
}
