//! Workers that share memory die again and again in the middle of handoffs: no segment outlives
//! them, none grows in number or size, and every start works and serves.
//!
//! Seen to fail: with a decode worker that leaves the pools of dead peers mapped.

use std::collections::BTreeMap;
use std::time::Duration;

use baton_proto::kv_layout::KvDtype;
use baton_proto::sampling::SamplingParams;
use baton_tests::models;
use baton_tests::oracle::{Case, Oracle};
use baton_tests::pace::Stopwatch;
use baton_tests::process::{Launcher, Pool, RouterProcess, Worker};

use super::asked::Asked;
use super::place::Place;
use super::{PATIENT, ask, known};

const SOON: Duration = Duration::from_secs(20);
const ROUNDS: u32 = 12;
/// Prompts of a round; the first one is caught but for a machine that stands still.
const TRIES: u32 = 10;
const FLAGS: [&str; 1] = ["--kv-transport=shared-memory"];
/// Long enough to be caught while it is computed.
const PROMPT: u32 = 2000;

/// Segments that these processes hold, mapped or open: by inode, with their bytes.
fn segments(processes: &[u32]) -> BTreeMap<u64, u64> {
    let mut found = BTreeMap::new();
    for process in processes {
        let maps = std::fs::read_to_string(format!("/proc/{process}/maps")).expect("it runs");
        for line in maps.lines().filter(|line| line.contains("memfd:baton")) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let (from, to) = fields[0].split_once('-').expect("a range");
            let at = |text: &str| u64::from_str_radix(text, 16).expect("an address");
            let inode = fields[4].parse().expect("an inode");
            found.insert(inode, at(to) - at(from));
        }
        let open = std::fs::read_dir(format!("/proc/{process}/fd")).expect("it runs");
        for file in open.filter_map(Result::ok) {
            let to = std::fs::read_link(file.path()).unwrap_or_default();
            if !to.to_string_lossy().contains("memfd:baton") {
                continue;
            }
            // It may be closed by now.
            if let Ok(metadata) = std::fs::metadata(file.path()) {
                use std::os::unix::fs::MetadataExt as _;
                found.insert(metadata.ino(), metadata.len());
            }
        }
    }
    found
}

/// Files with a name in the place where shared memory has them.
fn named() -> Vec<String> {
    let files = std::fs::read_dir("/dev/shm").into_iter().flatten();
    let names = files.filter_map(|file| file.ok()?.file_name().into_string().ok());
    names.filter(|name| name.contains("baton")).collect()
}

fn case(salt: u32) -> Case {
    let at = |at: u32| 6 + (at * 7 + salt * 47 + at * salt) % 290;
    Case {
        prompt: (0..PROMPT).map(at).collect(),
        sampling: SamplingParams {
            temperature: 0.0,
            max_tokens: 4,
            ignore_eos: true,
            ..SamplingParams::default()
        },
    }
}

/// A request whose prompt is computed, and not yet half of it, with the handoffs before it. A machine that stood still may be
/// through with it at the next look; then another one is asked.
async fn caught(
    router: &RouterProcess,
    [prefill, decode]: [&Worker; 2],
    round: u32,
) -> (Case, Asked, u64) {
    for again in 0..TRIES {
        let handed = decode.load().await.handoffs_total;
        let case = case(round * TRIES + again);
        let mut asked = Asked::new(router, &case).await;
        let waited = Stopwatch::start();
        while !asked.has_token().await {
            let left = prefill.load().await.prefill_tokens_waiting;
            if (1..PROMPT / 2).contains(&left) {
                return (case, asked, handed);
            }
            assert!(waited.elapsed() < SOON, "nothing is computed");
        }
        asked.rest().await.expect("no failure");
    }
    panic!("round {round}: {TRIES} prompts were computed unseen");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twelve_deaths_in_the_middle_of_a_handoff_leave_one_segment_and_no_more() {
    let model = models::fixture("rand");
    let cases = known(&model, 0x5e6, 4, 16);
    let launcher = Launcher::start().await;
    let mut prefill = Place::new(Pool::Prefill, "p0", &FLAGS);
    let mut decode = Place::new(Pool::Decode, "d0", &FLAGS);
    tokio::join!(prefill.start(&launcher), decode.start(&launcher));
    let router = launcher.router(&PATIENT).await;
    let mut usual = None;
    let mut half_way = 0;
    for round in 0..ROUNDS {
        router.wait_workers("rand", (1, 1), SOON).await;
        let handed = decode.worker().load().await.handoffs_total;
        for one in cases.iter() {
            ask(router.grpc(), "rand", one).await.unwrap();
        }
        // Through the pool of the prefill worker that lives now, by shared memory alone.
        let now = decode.worker().load().await.handoffs_total;
        assert!(now > handed, "round {round}: nothing is handed over");
        let ids = [&prefill, &decode].map(|place| place.worker().process.id());
        let held: Vec<u64> = segments(&ids).into_values().collect();
        assert_eq!(held.len(), 1, "round {round}: {held:?}");
        assert_eq!(*usual.get_or_insert_with(|| held.clone()), held);
        assert_eq!(named(), Vec::<String>::new());

        let workers = [prefill.worker(), decode.worker()];
        let (case, asked, before) = caught(&router, workers, round).await;
        if round.is_multiple_of(2) {
            prefill.kill().await;
            half_way += u32::from(decode.worker().load().await.handoffs_total == before);
            // The decode worker computes it, and has the segment no more.
            let answer = asked.rest().await.unwrap();
            let right = Oracle::new(&model, KvDtype::F32).run(&case);
            assert_eq!(answer.choices[0].tokens, right[0].tokens);
            let waited = Stopwatch::start();
            while !segments(&[decode.worker().process.id()]).is_empty() {
                assert!(waited.elapsed() < SOON, "a dead worker's segment is kept");
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            prefill.start(&launcher).await;
        } else {
            decode.kill().await;
            decode.start(&launcher).await;
            // It waited for a decode worker, or was told that it had lost it.
            match asked.rest().await {
                Ok(answer) => {
                    let right = Oracle::new(&model, KvDtype::F32).run(&case);
                    assert_eq!(answer.choices[0].tokens, right[0].tokens);
                }
                Err(status) => {
                    let error = baton_proto::status::from_status(&status);
                    assert!(error.kind.is_retryable(), "{error:?}");
                }
            }
        }
    }
    println!(
        "{half_way} of {} prefill workers died before their commit",
        ROUNDS / 2
    );
    assert!(half_way > 0, "no death was in the middle");
    router.wait_workers("rand", (1, 1), SOON).await;
    for place in [&prefill, &decode] {
        place.worker().wait_released(Duration::from_secs(2)).await;
    }
}
