//! Clients go away while the link that their request needs is slow, or says nothing.

use std::time::Duration;

use baton_proto::sampling::SamplingParams;
use baton_proto::v1;
use baton_tests::client;
use baton_tests::link::{Link, Pace};
use baton_tests::models;
use baton_tests::oracle::Case;
use baton_tests::process::{Launcher, Pool, RouterProcess, free_port};

use super::{ask, known};

const SOON: Duration = Duration::from_secs(20);
/// From a client's going to the last block.
const RELEASED_WITHIN: Duration = Duration::from_secs(1);
/// From a worker's death.
const RELEASED_AFTER_DEATH: Duration = Duration::from_secs(2);
/// No timer may hide what is looked for.
const PATIENT: [&str; 2] = ["--local-prefill-tokens-max=0", "--handoff-timeout-ms=60000"];

fn request(length: u32, salt: u32) -> v1::GenerateRequest {
    let case = Case {
        prompt: (0..length)
            .map(|at| 6 + (at * 7 + salt * 31) % 290)
            .collect(),
        sampling: SamplingParams {
            temperature: 0.0,
            max_tokens: 8,
            ignore_eos: true,
            ..SamplingParams::default()
        },
    };
    v1::GenerateRequest {
        model: "rand".to_owned(),
        ..client::request(&case)
    }
}

/// Runs a request until its first token is here, and keeps it.
async fn until_first_token(
    router: &RouterProcess,
    request: v1::GenerateRequest,
) -> tonic::Streaming<v1::GenerateEvent> {
    let stream = router.grpc().generate(request).await;
    let mut stream = stream.expect("taken").into_inner();
    while let Some(event) = stream.message().await.expect("no failure") {
        if matches!(event.event, Some(v1::generate_event::Event::Tokens(_))) {
            return stream;
        }
    }
    panic!("it ended without a token");
}

/// The bytes come slowly, the client leaves, and then perhaps the sender dies: nobody waits for
/// a word that will not come.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_leave_a_slow_handoff_leave_no_block_behind() {
    let launcher = Launcher::start().await;
    let port = free_port();
    let link = Link::to(([127, 0, 0, 1], port).into()).await;
    let listen = format!("--data-listen=127.0.0.1:{port}");
    let advertise = format!("--data-advertise={}", link.address());
    let decode = launcher
        .worker(
            Pool::Decode,
            "d",
            "rand",
            &["--kv-transport=tcp", &listen, &advertise],
        )
        .await;
    let sender = async |id: &str| {
        launcher
            .worker(Pool::Prefill, id, "rand", &["--kv-transport=tcp"])
            .await
    };
    let mut prefill = sender("p0").await;
    let router = launcher.router(&PATIENT).await;
    router.wait_workers("rand", (1, 1), SOON).await;

    let whole = router.grpc().generate(request(640, 0)).await;
    let mut whole = whole.unwrap().into_inner();
    while whole.message().await.unwrap().is_some() {}
    let bytes = decode.tcp_bytes().await as u64;
    assert!(bytes > 100_000, "{bytes}");
    link.set(Pace::Bytes(bytes / 5));

    for round in 1..=6 {
        let (before, dies) = (decode.load().await.handoffs_total, round % 2 == 0);
        let leaves = until_first_token(&router, request(640, round)).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        drop(leaves);
        if dies {
            tokio::time::sleep(Duration::from_millis(500)).await;
            prefill.process.kill().await;
            decode.wait_released(RELEASED_AFTER_DEATH).await;
            prefill = sender(&format!("p{round}")).await;
            router.wait_workers("rand", (1, 1), SOON).await;
        } else {
            decode.wait_released(RELEASED_WITHIN).await;
            prefill.wait_released(RELEASED_WITHIN).await;
        }
        assert_eq!(
            decode.load().await.handoffs_total,
            before,
            "it was not slow"
        );
    }
    link.set(Pace::Free);
    for case in known(&models::fixture("rand"), 0x1142, 4, 12).iter() {
        ask(router.grpc(), "rand", case).await.unwrap();
    }
}

/// The router cannot reach the decode worker, and the client leaves: the prefill worker's blocks
/// do not wait for that link.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_decode_worker_that_nobody_can_tell_holds_no_prefill_blocks() {
    let launcher = Launcher::start().await;
    let port = free_port();
    let link = Link::to(([127, 0, 0, 1], port).into()).await;
    let listen = format!("--listen=127.0.0.1:{port}");
    let advertise = format!("--advertise={}", link.address());
    let decode = launcher
        .worker(Pool::Decode, "d", "rand", &[&listen, &advertise])
        .await;
    let prefill = launcher.worker(Pool::Prefill, "p", "rand", &[]).await;
    let router = launcher.router(&PATIENT).await;
    router.wait_workers("rand", (1, 1), SOON).await;
    for round in 0..40 {
        let leaves = until_first_token(&router, request(33, round)).await;
        link.set(Pace::Held);
        tokio::time::sleep(Duration::from_millis(50)).await;
        drop(leaves);
        prefill.wait_released(RELEASED_WITHIN).await;
        link.set(Pace::Free);
        decode.wait_released(RELEASED_WITHIN).await;
    }
    for case in known(&models::fixture("rand"), 0x1143, 4, 12).iter() {
        ask(router.grpc(), "rand", case).await.unwrap();
    }
}
