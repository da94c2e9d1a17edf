//! A client's deadline passes in each stage of a request: it hears so in time, and every
//! worker lets go.
//!
//! Seen to fail: with a router that keeps a request's deadline to its front door.

use std::time::{Duration, Instant};

use baton_proto::sampling::SamplingParams;
use baton_proto::v1;
use baton_tests::link::{Link, Pace};
use baton_tests::oracle::Case;
use baton_tests::pace::Stopwatch;
use baton_tests::process::{Launcher, Pool, RouterProcess, Worker, free_port};
use baton_tests::{client, models};
use tonic::{Code, Request, Status};

use super::probe::probe;
use crate::grpc_api::ending_at;

const SOON: Duration = Duration::from_secs(20);
const PATIENT: [&str; 2] = ["--local-prefill-tokens-max=0", "--handoff-timeout-ms=60000"];
const POOL_TOKENS: u32 = 2048;
const TIMEOUT: Duration = Duration::from_millis(400);
/// 50 ms are promised on an idle machine of four cores.
const LATE: Duration = Duration::from_millis(500);

fn request(prompt: u32, salt: u32) -> v1::GenerateRequest {
    let case = Case {
        prompt: (0..prompt)
            .map(|at| 6 + (at * 13 + salt * 31 + at * salt) % 290)
            .collect(),
        sampling: SamplingParams {
            temperature: 0.0,
            max_tokens: 2000 - prompt,
            ignore_eos: true,
            ..SamplingParams::default()
        },
    };
    v1::GenerateRequest {
        model: "rand".to_owned(),
        ..client::request(&case)
    }
}

/// How it ended, which was by its deadline and in time.
async fn late(router: &RouterProcess, request: v1::GenerateRequest, timeout: Duration) -> Status {
    let mut request = Request::new(request);
    let value = format!("{}u", timeout.as_micros());
    let metadata = request.metadata_mut();
    metadata.insert("grpc-timeout", value.parse().unwrap());
    let (watch, started) = (Stopwatch::start(), Instant::now());
    let status = ending_at(router.grpc, request).await;
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    assert!(started.elapsed() >= timeout, "{status}");
    let took = watch.elapsed();
    assert!(took < timeout + LATE, "{took:?} of {timeout:?}: {status}");
    status
}

/// Nothing is held, and nothing is computed.
async fn at_rest(workers: [&Worker; 2]) {
    let mut rows = Vec::new();
    for _ in 0..2 {
        for worker in workers {
            worker.wait_released(Duration::from_secs(1)).await;
            rows.push(worker.metric("baton_batch_tokens_sum").await);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(rows[..2], rows[2..], "somebody still computes");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deadline_passes_in_every_stage() {
    let launcher = Launcher::start().await;
    let port = free_port();
    let data = Link::to(([127, 0, 0, 1], port).into()).await;
    let pool = format!("--kv-tokens={POOL_TOKENS}");
    let flags = [
        pool.clone(),
        "--kv-transport=tcp".to_owned(),
        "--sequences-max=1".to_owned(),
        format!("--data-listen=127.0.0.1:{port}"),
        format!("--data-advertise={}", data.address()),
    ];
    let of_decode = flags.each_ref().map(String::as_str);
    let (prefill, decode) = tokio::join!(
        launcher.worker(Pool::Prefill, "p", "rand", &of_decode[..2]),
        launcher.worker(Pool::Decode, "d", "rand", &of_decode),
    );
    let both = [&prefill, &decode];
    let router = launcher.router(&PATIENT).await;
    router.wait_workers("rand", (1, 1), SOON).await;

    // In decode, half way of what a whole answer needs.
    let watch = Stopwatch::start();
    let stream = router.grpc().generate(request(40, 0)).await;
    let mut stream = stream.unwrap().into_inner();
    while stream.message().await.unwrap().is_some() {}
    let status = late(&router, request(40, 1), watch.elapsed() / 2).await;
    assert!(status.message().contains("while decoding"), "{status}");
    at_rest(both).await;

    // In prefill: how long that takes is found out.
    let mut timeout = Duration::from_millis(50);
    let mut tries = 2..10;
    loop {
        let salt = tries.next().expect("a deadline in the middle of a prefill");
        let status = late(&router, request(1500, salt), timeout).await;
        at_rest(both).await;
        let message = status.message();
        if message.contains("computing the prompt") {
            break;
        }
        let early = ["reserving", "asking", "queue"];
        if early.iter().any(|stage| message.contains(stage)) {
            timeout *= 2;
        } else {
            timeout /= 2;
        }
    }

    // In the transfer, and then in the queue behind one whose transfer stands still.
    data.set(Pace::Held);
    let status = late(&router, request(40, 14), TIMEOUT).await;
    assert!(status.message().contains("handing over"), "{status}");
    at_rest(both).await;
    let ahead = router.grpc().generate(request(40, 15)).await;
    let mut ahead = ahead.unwrap().into_inner();
    ahead.message().await.unwrap().expect("accepted");
    let status = late(&router, request(40, 16), TIMEOUT).await;
    assert!(
        status.message().contains("decode worker's queue"),
        "{status}"
    );
    drop(ahead);
    at_rest(both).await;
    data.set(Pace::Free);

    // On arrival: nobody is asked.
    let asked = async || {
        let of_prefill = prefill.metric("vllm:prompt_tokens_total").await;
        let of_decode = decode.metric("vllm:prompt_tokens_total").await;
        let of_router = router.metric("baton_prompt_tokens_total").await;
        [of_prefill, of_decode, of_router]
    };
    let before = asked().await;
    late(&router, request(40, 17), Duration::ZERO).await;
    assert_eq!(asked().await, before);
    probe(&router, &models::fixture("rand"), &both, POOL_TOKENS).await;
}
