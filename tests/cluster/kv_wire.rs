//! `--kv-wire int8`: KV travels over TCP in fewer bytes for requests that need not
//! be exact, and leaves nothing behind that others could find; for those that do it travels
//! as it is stored, and gives the oracle's tokens.

use std::sync::Arc;
use std::time::Duration;

use baton_engine::model::Model;
use baton_proto::kv_layout::KvDtype;
use baton_proto::sampling::SamplingParams;
use baton_proto::v1;
use baton_tests::client::{self, Answer};
use baton_tests::models;
use baton_tests::oracle::{Case, Oracle};
use baton_tests::process::{Launcher, Pool, RouterProcess};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use crate::processes::PATIENT;

const PATIENCE: Duration = Duration::from_secs(20);
const TOKENS: u32 = 12;

fn cases() -> Vec<Case> {
    let mut random = StdRng::seed_from_u64(0x8b17);
    let lengths = [1, 15, 16, 17, 64, 65, 129, 200];
    let case = |length| Case {
        prompt: (0..length).map(|_| random.random_range(6..300)).collect(),
        sampling: SamplingParams {
            temperature: 0.0,
            max_tokens: TOKENS,
            ignore_eos: true,
            ..SamplingParams::default()
        },
    };
    lengths.into_iter().map(case).collect()
}

async fn ask(router: &RouterProcess, case: &Case, exact: bool) -> Answer {
    let request = v1::GenerateRequest {
        model: "rand".to_owned(),
        exact: Some(exact),
        ..client::request(case)
    };
    let stream = router.grpc().generate(request).await;
    let mut stream = stream.expect("taken").into_inner();
    let mut collector = client::Collector::new(case.sampling.n);
    while let Some(event) = stream.message().await.expect("an answer") {
        collector.take(event);
    }
    collector.finish()
}

fn right(model: &Arc<Model>, cases: &[Case]) -> Vec<Vec<u32>> {
    let mut oracle = Oracle::new(model, KvDtype::F16);
    let tokens = |case| oracle.run(case)[0].tokens.clone();
    cases.iter().map(tokens).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn int8_on_the_wire_saves_bytes_and_exact_requests_do_not_see_it() {
    let model = models::fixture("rand");
    let cases = cases();
    let right = right(&model, &cases);
    let launcher = Launcher::start().await;
    let flags = ["--kv-dtype=f16", "--kv-transport=tcp"];
    let [one, two] = flags;
    let wire = [one, two, "--kv-wire=int8"];
    let (prefill, decode) = tokio::join!(
        launcher.worker(Pool::Prefill, "p", "rand", &wire),
        launcher.worker(Pool::Decode, "d", "rand", &flags),
    );
    let router = launcher.router(&PATIENT).await;
    router.wait_workers("rand", (1, 1), PATIENCE).await;

    let mut agree = 0;
    for (case, right) in cases.iter().zip(&right) {
        let tokens = ask(&router, case, false).await.choices[0].tokens.clone();
        assert_eq!(tokens.len(), TOKENS as usize);
        // The prefill worker's own draw; the next ones see rounded values.
        assert_eq!(tokens[0], right[0]);
        agree += tokens.iter().zip(right).filter(|(a, b)| a == b).count();
    }
    // Garbage would agree with the first tokens and one in 300 others.
    assert!(agree > cases.len() * TOKENS as usize / 2, "{agree}");
    let load = decode.load().await;
    assert_eq!((load.handoffs_total, load.local_prefills_total), (8, 0));
    assert!(load.blocks.iter().all(|blocks| blocks.cached == 0));
    // Either end may count the last handoff a moment after its answer.
    for worker in [&prefill, &decode] {
        worker.wait_released(PATIENCE).await;
    }
    let reduced = prefill.tcp_bytes().await;
    assert_eq!(decode.tcp_bytes().await, reduced);

    for (case, right) in cases.iter().zip(&right) {
        assert_eq!(&ask(&router, case, true).await.choices[0].tokens, right);
    }
    let load = decode.load().await;
    assert_eq!((load.handoffs_total, load.local_prefills_total), (16, 0));
    assert!(load.blocks.iter().any(|blocks| blocks.cached > 0));
    for worker in [&prefill, &decode] {
        worker.wait_released(PATIENCE).await;
    }
    let native = prefill.tcp_bytes().await - reduced;
    // The pool's heads have 16 values: a scale and a minimum (4 bytes) and 16 codes, where
    // f16 has 32 bytes.
    assert_eq!(reduced / native, 20.0 / 32.0, "{reduced} of {native}");
}
