//! SIGHUP to every role: a terminal that is closed sends it to all of them at once, and what runs
//! ends as after SIGTERM.
//!
//! Seen to fail: while nothing listened to SIGHUP, which then ends a process.

use super::*;

/// Ends well after SIGHUP, and says why.
async fn drains(process: &mut Process) {
    ends(process).await;
    assert!(process.log().contains("draining"), "`{}`", process.name);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_role_drains_when_its_terminal_is_closed() {
    let launcher = Launcher::start().await;
    let flags = [GRACE, LEASE, "--kv-transport=tcp"];
    let (mut p0, mut d0) = tokio::join!(
        launcher.worker(Pool::Prefill, "p0", "rand", &flags),
        launcher.worker(Pool::Decode, "d0", "rand", &flags),
    );
    let mut router = launcher.router(&PATIENT).await;
    router.wait_workers("rand", (1, 1), SOON).await;
    let gate = Arc::<Gate>::default();
    let mut streams = Streams::start(&router, &long(4, 800), Some((1 << 10, Arc::clone(&gate))));
    streams.wait_begun().await;
    for process in [&p0.process, &d0.process, &router.process] {
        process.hang_up();
    }
    assert_eq!(streams.left(), 4, "nothing ran any more");
    gate.0.cancel();
    streams.finish().await;
    for process in [&mut router.process, &mut d0.process, &mut p0.process] {
        drains(process).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_whole_cluster_drains_when_its_terminal_is_closed() {
    let folder = tempfile::tempdir().unwrap();
    let flags = ["--drain-ms=60000", "--kv-tokens=16384"];
    let mut up = baton_tests::process::up("rand", &flags, folder.path()).await;
    let gate = Arc::<Gate>::default();
    let mut streams = Streams::start(&up, &long(4, 800), Some((1 << 10, Arc::clone(&gate))));
    streams.wait_begun().await;
    up.process.hang_up();
    assert_eq!(streams.left(), 4, "nothing ran any more");
    gate.0.cancel();
    streams.finish().await;
    drains(&mut up.process).await;
}
