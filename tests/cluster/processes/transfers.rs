//! SIGKILL of a prefill worker while its KV is under way, at stated shares of the bytes, beside
//! other requests: another one computes the prompt, the half-filled blocks are used again, and
//! nobody else notices.
//!
//! Handoffs may take a minute here, so that no timer can help.
//! Seen to fail: with a router that tries nothing twice.

use std::time::Duration;

use baton_proto::kv_layout::KvDtype;
use baton_proto::v1;
use baton_tests::client::{self, Collector};
use baton_tests::cluster::held;
use baton_tests::link::{Link, Pace};
use baton_tests::models;
use baton_tests::oracle::{Oracle, Output};
use baton_tests::pace::Stopwatch;
use baton_tests::process::{Launcher, Pool, RouterProcess, free_port};

use super::asked::Asked;
use super::place::Place;
use super::probe::probe;
use super::{Known, PATIENT, ask, greedy};

const SOON: Duration = Duration::from_secs(20);
/// From the death to the request's end: a small part of what the timers would take.
const ANSWERED_WITHIN: Duration = Duration::from_secs(15);
const POOL_TOKENS: u32 = 2048;
const POOL: &str = "--kv-tokens=2048";
const SHARES: [u64; 4] = [25, 50, 75, 99];
const OTHERS: u32 = 10;
/// Deaths for a share until one is half-way; the first one is but for a machine that stands still.
const TRIES: u32 = 8;

fn known(oracle: &mut Oracle, length: u32, salt: u32, tokens: u32) -> Known {
    let at = |at: u32| 6 + (at * 13 + salt * 43 + at * salt) % 290;
    greedy(oracle, (0..length).map(at).collect(), tokens)
}

/// Ten requests, one after the other.
fn others(router: &RouterProcess, cases: Vec<Known>) -> tokio::task::JoinHandle<()> {
    let client = router.grpc();
    tokio::spawn(async move {
        for case in &cases {
            ask(client.clone(), "rand", case).await.expect("untouched");
        }
    })
}

/// A stream that began, to its end.
async fn rest(mut stream: tonic::Streaming<v1::GenerateEvent>, right: &[Output]) {
    let mut collector = Collector::new(1);
    while let Some(event) = stream.message().await.expect("no failure") {
        collector.take(event);
    }
    assert_eq!(collector.finish().choices[0].tokens, right[0].tokens);
}

async fn begin(router: &RouterProcess, (case, _): &Known) -> tonic::Streaming<v1::GenerateEvent> {
    let request = v1::GenerateRequest {
        model: "rand".to_owned(),
        ..client::request(case)
    };
    let stream = router.grpc().generate(request).await;
    stream.expect("taken").into_inner()
}

/// Which of two holds something for a request.
async fn holder(places: &[Place]) -> usize {
    let waited = Stopwatch::start();
    loop {
        for (index, place) in places.iter().enumerate() {
            if held(&place.worker().load().await) > 0 {
                return index;
            }
        }
        assert!(waited.elapsed() < SOON, "nobody has the request");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Which of two computes the prompt, once no more than `left` of it is to be computed. `None` if
/// nobody was seen to begin.
async fn computes(places: &[Place], asked: &mut Asked, left: u32) -> Option<usize> {
    let waited = Stopwatch::start();
    let mut begun = None;
    loop {
        for (index, place) in places.iter().enumerate() {
            let load = place.worker().load().await;
            if load.prefill_tokens_waiting > 0 {
                begun = Some(index);
            }
            if begun == Some(index) && load.prefill_tokens_waiting <= left {
                return begun;
            }
        }
        if begun.is_none() && asked.has_token().await {
            return None;
        }
        assert!(waited.elapsed() < SOON, "{left} are never left");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sender_that_dies_at_any_share_of_its_bytes_costs_no_request() {
    let model = models::fixture("rand");
    let mut oracle = Oracle::new(&model, KvDtype::F32);
    let launcher = Launcher::start().await;
    let (mut links, mut decode) = (Vec::new(), Vec::new());
    for id in ["d0", "d1"] {
        let data = free_port();
        let link = Link::to(([127, 0, 0, 1], data).into()).await;
        let advertise = format!("--data-advertise={}", link.address());
        let flags = ["--kv-transport=tcp", POOL, &advertise];
        let mut place = Place::at(Pool::Decode, id, free_port(), data, &flags);
        place.start(&launcher).await;
        links.push(link);
        decode.push(place);
    }
    let flags = ["--kv-transport=tcp", POOL];
    let mut prefill = ["p0", "p1"].map(|id| Place::new(Pool::Prefill, id, &flags));
    for place in &mut prefill {
        place.start(&launcher).await;
    }
    let router = launcher.router(&PATIENT).await;
    router.wait_workers("rand", (2, 2), SOON).await;

    // What 640 tokens are on the wire.
    let first = known(&mut oracle, 640, 0, 8);
    ask(router.grpc(), "rand", &first).await.unwrap();
    let bytes: u64 = links.iter().map(Link::carried).sum();
    assert!(bytes > 300_000, "{bytes}");

    for (round, share) in (1..).zip(SHARES) {
        let big = known(&mut oracle, 640, round, 8);
        let small = (0..OTHERS).map(|at| known(&mut oracle, 33, 100 * round + at, 4));
        let small = small.collect();
        for link in &links {
            link.set(Pace::Upto(bytes * share / 100));
        }
        let stream = begin(&router, &big).await;
        let waited = Stopwatch::start();
        let slow = loop {
            if let Some(spent) = links.iter().position(Link::is_spent) {
                break spent;
            }
            assert!(waited.elapsed() < SOON, "{share} % never came");
            tokio::time::sleep(Duration::from_millis(1)).await;
        };
        let dying = holder(&prefill).await;
        let before = decode[slow].worker().load().await.handoffs_total;
        links[1 - slow].set(Pace::Free);
        let others = others(&router, small);
        tokio::time::sleep(Duration::from_millis(50)).await;

        prefill[dying].kill().await;
        let died = Stopwatch::start();
        // What was on its way dies with its sender's host.
        links[slow].set(Pace::Closed);
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert_eq!(
            decode[slow].worker().load().await.handoffs_total,
            before,
            "{share} %: it was not under way"
        );
        links[slow].set(Pace::Free);
        rest(stream, &big.1).await;
        let took = died.elapsed();
        println!("{share} %: answered {took:?} after the death");
        assert!(took < ANSWERED_WITHIN, "{share} %: {took:?}");
        others.await.expect("ten right answers");
        for place in &decode {
            place.worker().wait_released(Duration::from_secs(2)).await;
        }
        prefill[dying].start(&launcher).await;
        router.wait_workers("rand", (2, 2), SOON).await;
    }
    let workers: Vec<_> = prefill.iter().chain(&decode).map(Place::worker).collect();
    probe(&router, &model, &workers, POOL_TOKENS).await;
}

/// Over the memory of the one that dies: what is computed of the prompt is what the other end
/// may read, and it still has it mapped.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lender_that_dies_at_any_share_of_its_prompt_costs_no_request() {
    const LENGTH: u32 = 1600;
    let model = models::fixture("rand");
    let mut oracle = Oracle::new(&model, KvDtype::F32);
    let launcher = Launcher::start().await;
    let flags = ["--kv-transport=shared-memory", POOL, "--chunk-tokens=16"];
    let mut prefill = ["p0", "p1"].map(|id| Place::new(Pool::Prefill, id, &flags));
    let mut decode = ["d0", "d1"].map(|id| Place::new(Pool::Decode, id, &flags[..2]));
    for place in prefill.iter_mut().chain(&mut decode) {
        place.start(&launcher).await;
    }
    let router = launcher.router(&PATIENT).await;
    router.wait_workers("rand", (2, 2), SOON).await;
    let mut rounds = 1..;
    for share in SHARES {
        // At 99 % it may have been all.
        let must = share < 99;
        let mut half_way = false;
        for _ in 0..TRIES {
            let round = rounds.next().expect("numbers do not end");
            let big = known(&mut oracle, LENGTH, round, 8);
            let small = (0..OTHERS).map(|at| known(&mut oracle, 33, 100 * round + at, 4));
            let small = small.collect();
            let handoffs = async || {
                let loads = decode.iter().map(|place| place.worker().load());
                let loads = futures::future::join_all(loads).await;
                loads.iter().map(|load| load.handoffs_total).sum::<u64>()
            };
            let before = handoffs().await;
            let mut asked = Asked::new(&router, &big.0).await;
            let left = LENGTH * (100 - share as u32) / 100;
            let Some(dying) = computes(&prefill, &mut asked, left).await else {
                asked.rest().await.expect("no failure");
                continue;
            };
            prefill[dying].kill().await;
            let died = Stopwatch::start();
            half_way = handoffs().await == before;
            let others = others(&router, small);
            let answer = asked.rest().await.expect("no failure");
            assert_eq!(answer.choices[0].tokens, big.1[0].tokens);
            let took = died.elapsed();
            println!("{share} %: answered {took:?} after the death, half-way: {half_way}");
            assert!(took < ANSWERED_WITHIN, "{share} %: {took:?}");
            others.await.expect("ten right answers");
            for place in &decode {
                place.worker().wait_released(Duration::from_secs(2)).await;
            }
            prefill[dying].start(&launcher).await;
            router.wait_workers("rand", (2, 2), SOON).await;
            if half_way || !must {
                break;
            }
        }
        assert!(half_way || !must, "{share} %: no death was half-way");
    }
    let workers: Vec<_> = prefill.iter().chain(&decode).map(Place::worker).collect();
    probe(&router, &model, &workers, POOL_TOKENS).await;
}
