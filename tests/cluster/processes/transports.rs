//! What carries KV between processes of one host: their memory, unless either end forbids
//! it. The metric says which it was, and the tokens are the oracle's either way.

use std::time::Duration;

use baton_tests::models;
use baton_tests::pace::Stopwatch;
use baton_tests::process::{Launcher, Pool, Worker};

use super::{SPLIT, ask, known};

const SOON: Duration = Duration::from_secs(20);

/// KV bytes that a worker's metrics count, by transport; none for one that moved nothing.
async fn carried(worker: &Worker, direction: &str) -> Vec<(&'static str, u64)> {
    let text = worker.metrics().await;
    let bytes = |transport: &str| -> u64 {
        let labels = [
            format!("direction=\"{direction}\""),
            format!("transport=\"{transport}\""),
        ];
        let line = text.lines().find(|line| {
            line.starts_with("baton_kv_transfer_bytes_total{")
                && labels.iter().all(|label| line.contains(label))
        });
        let value = line.and_then(|line| line.rsplit_once(' '));
        value
            .and_then(|(_, value)| value.parse().ok())
            .unwrap_or_else(|| panic!("no bytes over {transport} in {text}"))
    };
    let all = ["loopback", "shared_memory", "tcp"];
    let all = all.into_iter().map(|one| (one, bytes(one)));
    all.filter(|(_, bytes)| *bytes > 0).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_is_shared_unless_forbidden_and_the_tokens_are_the_same() {
    let cases = known(&models::fixture("rand"), 0x5a5a, 8, 16);
    for (prefill, decode, expected) in [
        ("auto", "auto", Some("shared_memory")),
        ("shared-memory", "shared-memory", Some("shared_memory")),
        ("tcp", "auto", Some("tcp")),
        ("auto", "tcp", Some("tcp")),
        // Nothing that both may use: nothing is handed over, by neither.
        ("shared-memory", "tcp", None),
    ] {
        let what = format!("prefill {prefill}, decode {decode}");
        let launcher = Launcher::start().await;
        let flags = [prefill, decode].map(|one| format!("--kv-transport={one}"));
        let (of_prefill, of_decode) = ([&*flags[0]], [&*flags[1]]);
        let (prefill, decode) = tokio::join!(
            launcher.worker(Pool::Prefill, "p0", "rand", &of_prefill),
            launcher.worker(Pool::Decode, "d0", "rand", &of_decode),
        );
        let router = launcher.router(&SPLIT).await;
        router.wait_workers("rand", (1, 1), SOON).await;
        for one in cases.iter() {
            let answered = ask(router.grpc(), "rand", one).await;
            match (answered, expected) {
                (Ok(()), _) => {}
                (Err(error), None) => assert!(error.kind.is_retryable(), "{what}: {error:?}"),
                (Err(error), Some(_)) => panic!("{what}: {error:?}"),
            }
        }
        // Either end may count the last one a moment after its answer.
        for worker in [&decode, &prefill] {
            worker.wait_released(Duration::from_secs(3)).await;
        }
        let (sent, received) = (
            carried(&prefill, "send").await,
            carried(&decode, "recv").await,
        );
        assert_eq!(sent, received, "{what}");
        let by: Vec<&str> = sent.iter().map(|(transport, _)| *transport).collect();
        assert_eq!(by, Vec::from_iter(expected), "{what}");
        let handoffs = decode.load().await.handoffs_total;
        assert_eq!(handoffs > 0, expected.is_some(), "{what}");
    }
}

/// The lines of `/proc/PID/maps` that map lent memory.
fn lent(worker: &Worker) -> Vec<String> {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", worker.process.id()));
    let maps = maps.expect("the worker runs");
    let lent = maps.lines().filter(|line| line.contains("memfd:baton-kv"));
    lent.map(str::to_owned).collect()
}

/// Files that shared memory leaves where it has names.
fn named_segments() -> Vec<String> {
    let files = std::fs::read_dir("/dev/shm").into_iter().flatten();
    let names = files.filter_map(|file| file.ok()?.file_name().into_string().ok());
    names.filter(|name| name.contains("baton")).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_worker_leaves_no_segment_behind() {
    let cases = known(&models::fixture("rand"), 0x5a5b, 4, 16);
    let launcher = Launcher::start().await;
    let (mut prefill, decode) = tokio::join!(
        launcher.worker(Pool::Prefill, "p0", "rand", &[]),
        launcher.worker(Pool::Decode, "d0", "rand", &[]),
    );
    let router = launcher.router(&SPLIT).await;
    router.wait_workers("rand", (1, 1), SOON).await;
    for one in cases.iter() {
        ask(router.grpc(), "rand", one).await.unwrap();
    }
    // The decode worker maps the pool of the prefill worker, and cannot write to it.
    let mapped = lent(&decode);
    assert!(!mapped.is_empty());
    assert!(
        mapped.iter().all(|line| line.contains(" r--s ")),
        "{mapped:?}"
    );
    assert!(lent(&prefill).iter().any(|line| line.contains(" rw-s ")));
    assert_eq!(named_segments(), Vec::<String>::new());

    prefill.process.kill().await;
    let waited = Stopwatch::start();
    while !lent(&decode).is_empty() {
        let long = waited.elapsed() > SOON;
        assert!(!long, "the decode worker still holds {:?}", lent(&decode));
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    decode.wait_released(Duration::from_secs(3)).await;
    assert_eq!(named_segments(), Vec::<String>::new());

    // A prefill worker that comes after it shares memory again.
    let prefill = launcher.worker(Pool::Prefill, "p0", "rand", &[]).await;
    router.wait_workers("rand", (1, 1), SOON).await;
    for one in cases.iter() {
        ask(router.grpc(), "rand", one).await.unwrap();
    }
    prefill.wait_released(Duration::from_secs(3)).await;
    let sent = carried(&prefill, "send").await;
    assert!(matches!(sent[..], [("shared_memory", _)]), "{sent:?}");
}
