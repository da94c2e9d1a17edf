//! Clients go away while the link that their request needs is slow, or says nothing.
//!
//! Seen to fail: with a decode worker that keeps a cancelled request's blocks, with a prefill
//! worker that keeps them for five seconds, and with the data link free in the second test
//! (the decode worker decodes for nobody).

use std::time::Duration;

use baton_proto::sampling::SamplingParams;
use baton_proto::v1;
use baton_tests::client;
use baton_tests::link::{Link, Pace};
use baton_tests::models;
use baton_tests::oracle::Case;
use baton_tests::process::{Launcher, Pool, RouterProcess, Worker, free_port};
use futures::future::join_all;

use super::PATIENT;
use super::probe::probe;

const SOON: Duration = Duration::from_secs(20);
/// From a client's going to the last block. Every timer that could help takes a minute.
const RELEASED_WITHIN: Duration = Duration::from_secs(2);
/// From a worker's death.
const RELEASED_AFTER_DEATH: Duration = Duration::from_secs(2);

/// Small enough that what 200 requests leak is missed.
const POOL: &str = "--kv-tokens=1024";
const POOL_TOKENS: u32 = 1024;
/// From a stream's first token: the transfer of five seconds is in its middle.
const UNDER_WAY: Duration = Duration::from_millis(300);
const ROUNDS_EACH: u32 = 4;
const LEAVING: u32 = 200;
const LEAVING_AT_ONCE: u32 = 5;
/// What a decode worker says of a lane that said nothing for too long.
const LANE_BROKE: &str = "the data lane broke";

fn prompt(length: u32, salt: u32) -> Vec<u32> {
    (0..length)
        .map(|at| 6 + (at * 7 + salt * 31 + at * salt) % 290)
        .collect()
}

const MADE: &str = "vllm:generation_tokens_total";

/// Tokens that a worker made.
async fn made(worker: &Worker) -> f64 {
    worker.metric(MADE).await
}

fn request(length: u32, salt: u32) -> v1::GenerateRequest {
    let case = Case {
        prompt: prompt(length, salt),
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

/// How a client's leaving reaches the prefill worker, whose transfer is under way.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Sender {
    /// It is told.
    Told,
    /// It dies before the transfer's end.
    Dies,
    /// Nobody can tell it: it sends to the end, and commits.
    Unreached,
}

/// The bytes come slowly, the client leaves, and then the sender may die, or send on: nobody
/// waits for a word that will not come, and a word that comes too late changes nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_leave_a_slow_handoff_leave_no_block_behind() {
    let launcher = Launcher::start().await;
    let port = free_port();
    let link = Link::to(([127, 0, 0, 1], port).into()).await;
    let listen = format!("--data-listen=127.0.0.1:{port}");
    let advertise = format!("--data-advertise={}", link.address());
    let flags = ["--kv-transport=tcp", POOL, &listen, &advertise];
    let decode = launcher.worker(Pool::Decode, "d", "rand", &flags).await;
    let control_port = free_port();
    let control = Link::to(([127, 0, 0, 1], control_port).into()).await;
    let sender = async |id: &str| {
        let listen = format!("--listen=127.0.0.1:{control_port}");
        let advertise = format!("--advertise={}", control.address());
        let flags = ["--kv-transport=tcp", POOL, &listen, &advertise];
        launcher.worker(Pool::Prefill, id, "rand", &flags).await
    };
    let mut prefill = sender("p0").await;
    let router = launcher.router(&PATIENT).await;
    router.wait_workers("rand", (1, 1), SOON).await;

    let whole = router.grpc().generate(request(640, 0)).await;
    let mut whole = whole.unwrap().into_inner();
    while whole.message().await.unwrap().is_some() {}
    // What it made is counted a moment later.
    decode.settled(MADE).await;
    let bytes = decode.tcp_bytes().await as u64;
    assert!(bytes > 100_000, "{bytes}");
    let slow = Pace::Bytes(bytes / 5);
    link.set(slow);

    let all = [Sender::Told, Sender::Dies, Sender::Unreached];
    for round in 1..=3 * ROUNDS_EACH {
        let sends = all[round as usize % 3];
        let (before, made) = (decode.load().await.handoffs_total, made(&decode).await);
        let leaves = until_first_token(&router, request(640, round)).await;
        tokio::time::sleep(UNDER_WAY).await;
        if sends == Sender::Unreached {
            control.set(Pace::Held);
        }
        drop(leaves);
        match sends {
            Sender::Told => {
                decode.wait_released(RELEASED_WITHIN).await;
                prefill.wait_released(RELEASED_WITHIN).await;
            }
            Sender::Dies => {
                tokio::time::sleep(UNDER_WAY / 2).await;
                prefill.process.kill().await;
                decode.wait_released(RELEASED_AFTER_DEATH).await;
                prefill = sender(&format!("p{round}")).await;
                router.wait_workers("rand", (1, 1), SOON).await;
            }
            Sender::Unreached => {
                decode.wait_released(RELEASED_WITHIN).await;
                // All that is left of the transfer comes now, after the blocks were given back.
                link.set(Pace::Free);
                prefill.wait_released(RELEASED_WITHIN).await;
                control.set(Pace::Free);
                link.set(slow);
                router.wait_workers("rand", (1, 1), SOON).await;
            }
        }
        let load = decode.load().await;
        assert_eq!(load.handoffs_total, before, "{sends:?}: it was not slow");
        assert_eq!(
            self::made(&decode).await,
            made,
            "{sends:?}: decoded for nobody"
        );
    }
    link.set(Pace::Free);
    probe(
        &router,
        &models::fixture("rand"),
        &[&prefill, &decode],
        POOL_TOKENS,
    )
    .await;
    for worker in [&prefill, &decode] {
        assert!(!worker.process.log().contains("panicked"));
    }
}

/// The decode worker has not got the prompt yet, the router cannot reach it any more, and the
/// clients leave: the prefill worker's blocks do not wait for that link.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_decode_worker_that_nobody_can_tell_holds_no_prefill_blocks() {
    let launcher = Launcher::start().await;
    let [port, data_port] = [free_port(), free_port()];
    let link = Link::to(([127, 0, 0, 1], port).into()).await;
    let data = Link::to(([127, 0, 0, 1], data_port).into()).await;
    let flags = [
        "--kv-transport=tcp".to_owned(),
        POOL.to_owned(),
        format!("--listen=127.0.0.1:{port}"),
        format!("--advertise={}", link.address()),
        format!("--data-listen=127.0.0.1:{data_port}"),
        format!("--data-advertise={}", data.address()),
    ];
    let flags = flags.each_ref().map(String::as_str);
    let decode = launcher.worker(Pool::Decode, "d", "rand", &flags).await;
    let prefill = launcher.worker(Pool::Prefill, "p", "rand", &[POOL]).await;
    let router = launcher.router(&PATIENT).await;
    router.wait_workers("rand", (1, 1), SOON).await;
    let whole = router.grpc().generate(request(33, 0)).await;
    let mut whole = whole.unwrap().into_inner();
    while whole.message().await.unwrap().is_some() {}
    // What it made is counted a moment later.
    decode.settled(MADE).await;

    let mut undisturbed = 0;
    for round in 0..LEAVING / LEAVING_AT_ONCE {
        let (before, made) = (decode.load().await.handoffs_total, made(&decode).await);
        let broke = decode.process.log().matches(LANE_BROKE).count();
        data.set(Pace::Held);
        let salt = 1 + round * LEAVING_AT_ONCE;
        let leaving = (salt..salt + LEAVING_AT_ONCE)
            .map(|salt| until_first_token(&router, request(33, salt)));
        let leaving = join_all(leaving).await;
        link.set(Pace::Held);
        tokio::time::sleep(Duration::from_millis(50)).await;
        drop(leaving);
        prefill.wait_released(RELEASED_WITHIN).await;
        link.set(Pace::Free);
        decode.wait_released(RELEASED_WITHIN).await;
        data.set(Pace::Free);
        assert_eq!(decode.load().await.handoffs_total, before);
        // A lane that stood still for a second counts as lost: then it computes prompts itself.
        if decode.process.log().matches(LANE_BROKE).count() == broke {
            assert_eq!(self::made(&decode).await, made, "it decoded for nobody");
            undisturbed += 1;
        }
    }
    assert!(undisturbed > 0);
    probe(
        &router,
        &models::fixture("rand"),
        &[&prefill, &decode],
        POOL_TOKENS,
    )
    .await;
}
