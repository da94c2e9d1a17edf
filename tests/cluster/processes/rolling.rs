//! A rolling restart: every worker and every router, one after the other, under load.
//!
//! Clients know both routers. One whose router goes takes what it has to the other one.
//! Every answer is the oracle's, none is given up, and nothing but the going of a router
//! is ever seen.
//!
//! Seen to fail: with a router that does not hear that a worker leaves.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use baton_proto::status::from_status;
use baton_proto::v1::inference_client::InferenceClient;
use baton_proto::{Error, ErrorKind, v1};
use baton_tests::process::{Launcher, Pool, RouterProcess, Worker};
use baton_tests::transcript::{Transcript, Way};
use baton_tests::{client, models};
use tokio::task::JoinSet;
use tonic::transport::Channel;

use super::{Known, RELEASED_WITHIN, SPLIT, known};

const SOON: Duration = Duration::from_secs(20);
const CLIENTS: usize = 6;
/// Connections that one request may lose: each router goes once, and a client may run into
/// a closed door, or one that is not ready, while its router is away.
const BREAKS_MAX: usize = 6;
/// How a router's going shows: its own word, a connection that breaks or is refused, and
/// the word of one that has just started. A worker's going does not show.
const GONE: [&str; 6] = [
    "DRAINING",
    "UNAVAILABLE",
    "CANCELLED",
    "NO_WORKERS",
    "MODEL_STARTING",
    "NO_DECODE_WORKER",
];

/// What all clients see.
#[derive(Default)]
struct Seen {
    broken: AtomicUsize,
    /// Between two messages with tokens of one stream. Told, not judged.
    longest_gap_ms: AtomicU64,
}

/// One request, taken from router to router until it is whole; `seen_by_all` counts
/// how often.
async fn ask_any(
    routers: &[InferenceClient<Channel>; 2],
    first: usize,
    (case, right): &Known,
    seen_by_all: &Seen,
) -> Result<(), Error> {
    let mut seen = Transcript::new(case.sampling.n);
    let mut breaks = 0;
    let mut gap = None;
    loop {
        let mut client = routers[(first + breaks) % 2].clone();
        let mut request = client::request(case);
        if seen.accepted.is_some() {
            request.resume = Some(seen.resume(Way::Ids));
        }
        let ended = match client.generate(request).await {
            Ok(stream) => read(stream.into_inner(), &mut seen, &mut gap, seen_by_all).await,
            Err(status) => Err(from_status(&status)),
        };
        match ended {
            Ok(()) => break,
            Err(error) => {
                breaks += 1;
                seen_by_all.broken.fetch_add(1, Ordering::Relaxed);
                if !GONE.contains(&error.reason.as_str()) || breaks > BREAKS_MAX {
                    return Err(error);
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    }
    for (got, right) in seen.choices.iter().zip(right) {
        assert_eq!(got.ids, right.tokens, "after {breaks} breaks");
        let (_, tokens, _) = got.end.as_ref().expect("an end");
        assert_eq!(*tokens as usize, right.tokens.len());
    }
    Ok(())
}

async fn read(
    mut stream: tonic::Streaming<v1::GenerateEvent>,
    seen: &mut Transcript,
    gap: &mut Option<Instant>,
    seen_by_all: &Seen,
) -> Result<(), Error> {
    loop {
        match stream.message().await {
            Ok(Some(event)) => {
                let before = seen.tokens();
                seen.take(event);
                if seen.tokens() > before
                    && let Some(gap) = gap.replace(Instant::now())
                {
                    let ms = gap.elapsed().as_millis() as u64;
                    seen_by_all.longest_gap_ms.fetch_max(ms, Ordering::Relaxed);
                }
            }
            Ok(None) if seen.completed.is_some() => return Ok(()),
            Ok(None) => panic!("a stream that is not whole ended well"),
            // A connection that breaks has no code of its own.
            Err(status) if status.code() == tonic::Code::Unknown => {
                let error = Error::new(ErrorKind::Unavailable, status.to_string());
                return Err(error.with_reason("UNAVAILABLE"));
            }
            Err(status) => return Err(from_status(&status)),
        }
    }
}

/// Something that is started again where it was.
struct Place {
    pool: Pool,
    id: &'static str,
    worker: Worker,
}

async fn start(launcher: &Launcher, pool: Pool, id: &'static str) -> Place {
    let worker = launcher.worker(pool, id, "rand", &["--drain-grace-s=0"]);
    let worker = worker.await;
    Place { pool, id, worker }
}

async fn router(launcher: &Launcher, ports: Option<&RouterProcess>) -> RouterProcess {
    let file = launcher.folder().join("resume-keys");
    std::fs::write(&file, "a key that is long enough to be taken for one\n").unwrap();
    let mut flags = vec![
        SPLIT[0].to_owned(),
        SPLIT[1].to_owned(),
        format!("--resume-key-file={}", file.display()),
        "--drain-ms=100".to_owned(),
    ];
    if let Some(before) = ports {
        flags.push(format!("--http={}", before.http));
        flags.push(format!("--grpc={}", before.grpc));
    }
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    launcher.router(&flags).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rolling_restart_of_everything_costs_no_request_and_no_token() {
    let cases = known(&models::fixture("rand"), 0x2011, 18, 300);
    let launcher = Launcher::start().await;
    let (p0, p1, d0, d1) = tokio::join!(
        start(&launcher, Pool::Prefill, "p0"),
        start(&launcher, Pool::Prefill, "p1"),
        start(&launcher, Pool::Decode, "d0"),
        start(&launcher, Pool::Decode, "d1"),
    );
    let mut places = vec![p0, d0, p1, d1];
    let mut routers = [router(&launcher, None).await, router(&launcher, None).await];
    for router in &routers {
        router.wait_workers("rand", (2, 2), SOON).await;
    }

    let doors = Arc::new([routers[0].grpc(), routers[1].grpc()]);
    let (stop, answered) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
    let seen = Arc::<Seen>::default();
    let mut clients: JoinSet<Vec<Error>> = JoinSet::new();
    for number in 0..CLIENTS {
        let (doors, cases) = (Arc::clone(&doors), Arc::clone(&cases));
        let (stop, answered) = (Arc::clone(&stop), Arc::clone(&answered));
        let seen = Arc::clone(&seen);
        clients.spawn(async move {
            let mut failures = Vec::new();
            for index in (number..).step_by(CLIENTS) {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                let case = &cases[index % cases.len()];
                match ask_any(&doors, index % 2, case, &seen).await {
                    Ok(()) => {
                        answered.fetch_add(1, Ordering::Relaxed);
                    }
                    Err(error) => failures.push(error),
                }
            }
            failures
        });
    }
    let more = async |count: usize| {
        let wanted = answered.load(Ordering::Relaxed) + count;
        let waiting = async {
            while answered.load(Ordering::Relaxed) < wanted {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let waited = tokio::time::timeout(Duration::from_secs(30), waiting).await;
        waited.expect("requests are answered");
    };

    let mut moves = 0.0;
    for place in &mut places {
        more(CLIENTS).await;
        place.worker.process.terminate();
        assert_eq!(place.worker.process.exit_code().await, 0, "`{}`", place.id);
        *place = start(&launcher, place.pool, place.id).await;
        for router in &routers {
            router.wait_workers("rand", (2, 2), SOON).await;
        }
    }
    for router in &routers {
        let ok = "baton_migrations_total{result=\"ok\"}";
        moves += router.metric(ok).await;
        assert_eq!(router.metric("baton_token_conflicts_total").await, 0.0);
    }
    let breaks = seen.broken.load(Ordering::Relaxed);
    assert_eq!(breaks, 0, "clients saw workers go");
    for going in &mut routers {
        more(CLIENTS).await;
        going.process.terminate();
        assert_eq!(going.process.exit_code().await, 0, "router");
        let again = router(&launcher, Some(going)).await;
        again.wait_workers("rand", (2, 2), SOON).await;
        *going = again;
    }
    more(CLIENTS).await;
    stop.store(true, Ordering::Relaxed);

    let mut failures = Vec::new();
    while let Some(ended) = clients.join_next().await {
        failures.extend(ended.expect("no wrong token"));
    }
    let breaks = seen.broken.load(Ordering::Relaxed);
    let gap = seen.longest_gap_ms.load(Ordering::Relaxed);
    let answered = answered.load(Ordering::Relaxed);
    println!(
        "{answered} requests, {moves} moved, {breaks} taken to the other router, \
         longest gap {gap} ms"
    );
    assert!(failures.is_empty(), "{failures:?}");
    // Somebody comes to each router all the time, also while it is away. Whether a stream is moved
    // or ends before that is a matter of milliseconds here; `leaving` has streams that must be.
    assert!(breaks > 0);
    for router in &routers {
        assert_eq!(router.metric("baton_token_conflicts_total").await, 0.0);
    }
    for place in &places {
        place.worker.wait_released(RELEASED_WITHIN).await;
    }
}
