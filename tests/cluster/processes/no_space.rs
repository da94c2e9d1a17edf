//! A worker whose pool cannot be had says so and ends, before anybody is told of it: it is
//! neither killed by a signal later nor listed.
//!
//! Seen to fail: with pools mapped whatever their size.

use std::path::Path;
use std::time::Duration;

use baton_tests::process::{Launcher, Pool, Process, baton_binary, fixture_path, wait_listed};

/// The most that can be asked for, and the bytes that it is.
const HUGE: &str = "--kv-tokens=268435456";
const HUGE_BYTES: u64 = 268_435_456 * 512;
/// Two GB, where 1.5 GB of addresses are all there is.
const LARGE: &str = "--kv-tokens=4194304";
const ADDRESSES_KIB: u32 = 1_500_000;

fn memory_of_this_machine() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").expect("Linux");
    let line = text.lines().find(|line| line.starts_with("MemTotal:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    kib.expect("its memory") * 1024
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_lacks_space_says_so_and_is_never_listed() {
    let launcher = Launcher::start().await;
    for (role, transport) in [
        ("prefill", "shared-memory"),
        ("prefill", "tcp"),
        ("decode", "auto"),
    ] {
        for (tokens, limit, said) in [
            (HUGE, String::new(), "this process can have"),
            (
                LARGE,
                format!("ulimit -v {ADDRESSES_KIB}; "),
                "Cannot allocate memory",
            ),
        ] {
            if limit.is_empty() && memory_of_this_machine() >= HUGE_BYTES {
                println!("this machine has the memory for anything that can be asked for");
                continue;
            }
            let command = format!(
                "{limit}exec {} {role} --etcd={} --worker-id=w --model={} --kv-dtype=f32 \
                 --kv-transport={transport} {tokens}",
                baton_binary().display(),
                launcher.etcd.url(),
                fixture_path("rand").display(),
            );
            let args = ["-c".to_owned(), command];
            let mut worker = Process::start("w", Path::new("sh"), &args, launcher.folder());
            // An exit code: no signal ended it.
            assert_eq!(worker.exit_code().await, 1, "{role} over {transport}");
            let log = worker.log();
            assert!(
                log.contains("kv pool") && log.contains(said),
                "{role}: {log}"
            );
            let listed = launcher.etcd.workers().await.expect("it answers");
            assert!(listed.is_empty(), "{listed:?}");
        }
    }
    // The place is as good as before.
    let flags = ["--kv-transport=shared-memory"];
    let worker = launcher.worker(Pool::Prefill, "w", "rand", &flags).await;
    worker.wait_released(Duration::from_secs(1)).await;
    wait_listed(&launcher.etcd.follow(), &["w"], Duration::from_secs(20)).await;
}
