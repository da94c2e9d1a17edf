//! Workers that are killed and started again at once, under the same id, on the same control
//! port, with KV taken at another port: who comes after it is served by the new life, and the
//! old one is nobody's any more.
//!
//! Handoffs may take a minute here, so that no timer can hide a wait for the old life.
//!
//! Seen to fail: with a router that knows workers by their id alone.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use baton_tests::models;
use baton_tests::pace::{Stopwatch, crowded};
use baton_tests::process::{Launcher, Pool};
use futures::future::join_all;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use super::place::Place;
use super::{PATIENT, RELEASED_WITHIN, Traffic, ask, known};

const SOON: Duration = Duration::from_secs(20);
/// Deaths of each of the two; with two of each kind the tests of deaths have more.
const CYCLES_ALONE: usize = 10;
const CYCLES_OF_TWO: usize = 5;
const WIDTH: usize = 3;
/// From a life's readiness to the end of the first request after it.
const SERVES_WITHIN: Duration = crowded(Duration::from_secs(2));
const FORGOTTEN_WITHIN: Duration = crowded(Duration::from_millis(1_750));
/// Of the handoffs of one death.
const KNOCKS_MAX: usize = 30;
/// Far below what a handoff may take.
const NOBODY_WAITS: Duration = Duration::from_secs(30);

/// Who still knocks at the data port of a life that is over, and how long after its end.
struct Former {
    knocks: Arc<Mutex<Vec<Duration>>>,
    task: JoinHandle<()>,
}

impl Former {
    async fn listen(port: u16, died: Instant) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", port)).await;
        let listener = listener.expect("its life is over");
        let knocks = Arc::<Mutex<Vec<Duration>>>::default();
        let heard = Arc::clone(&knocks);
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                heard.lock().unwrap().push(died.elapsed());
                drop(stream);
            }
        });
        Self { knocks, task }
    }

    /// A handoff that was under way may look for its lane for as long as the receiver's lease
    /// lasted, to say that it is over; nothing that began later does.
    fn assert_forgotten(&self) {
        self.task.abort();
        let knocks = self.knocks.lock().unwrap();
        let late = knocks.iter().any(|after| *after > FORGOTTEN_WITHIN);
        assert!(!late, "somebody looks for a life that is over: {knocks:?}");
        assert!(knocks.len() < KNOCKS_MAX, "{knocks:?}");
    }
}

/// So many deaths of the first prefill worker and of the first decode worker each; how many
/// requests failed.
async fn cycles(count: usize, (prefill, decode): (u32, u32), seed: u64) -> usize {
    const NAMES: [[&str; 2]; 2] = [["p0", "p1"], ["d0", "d1"]];
    let cases = known(&models::fixture("rand"), seed, 24, 24);
    let launcher = Launcher::start().await;
    let of = |pool: Pool, names: [&'static str; 2], count: u32| {
        let names = names.into_iter().take(count as usize);
        names.map(move |id| Place::new(pool, id, &["--kv-transport=tcp"]))
    };
    let mut places: Vec<Place> = of(Pool::Prefill, NAMES[0], prefill)
        .chain(of(Pool::Decode, NAMES[1], decode))
        .collect();
    join_all(places.iter_mut().map(|place| place.start(&launcher))).await;
    let router = launcher.router(&PATIENT).await;
    router.wait_workers("rand", (prefill, decode), SOON).await;

    let traffic = Traffic::start(&router.grpc(), "rand", &cases, WIDTH);
    let mut former = Vec::new();
    for cycle in 0..count {
        for first in [0, prefill as usize] {
            traffic.wait_answered(2).await;
            let place = &mut places[first];
            place.kill().await;
            let died = Instant::now();
            let data = place.move_data();
            place.start(&launcher).await;
            let ready = Stopwatch::start();
            router
                .wait_workers("rand", (prefill, decode), SERVES_WITHIN)
                .await;
            if first > 0 {
                former.push(Former::listen(data, died).await);
            }
            ask(router.grpc(), "rand", &cases[cycle]).await.unwrap();
            let took = ready.elapsed();
            assert!(took < SERVES_WITHIN, "cycle {cycle}: {took:?}");
            while place.worker().load().await.handoffs_total == 0 {
                assert!(ready.elapsed() < NOBODY_WAITS, "cycle {cycle}: no work");
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    }
    let stopped = tokio::time::timeout(NOBODY_WAITS, traffic.stop()).await;
    let failures = stopped.expect("a request waits for a worker that is no more");
    for error in &failures {
        assert!(error.kind.is_retryable(), "{error:?}");
    }
    former.iter().for_each(Former::assert_forgotten);
    for place in &places {
        place.worker().wait_released(RELEASED_WITHIN).await;
    }
    for one in cases.iter() {
        ask(router.grpc(), "rand", one).await.unwrap();
    }
    failures.len()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_worker_of_each_kind_serves_at_once_in_its_next_life() {
    // What ran on the only decode worker when it died, and nothing else.
    let failures = cycles(CYCLES_ALONE, (1, 1), 0xb0_11).await;
    assert!(failures <= CYCLES_ALONE * WIDTH, "{failures}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_two_of_each_kind_no_life_that_ends_costs_a_request() {
    assert_eq!(cycles(CYCLES_OF_TWO, (2, 2), 0xb0_22).await, 0);
}
