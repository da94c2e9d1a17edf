//! `baton simulate` as a person meets it: a line of counts, the same words for the same
//! seed, and errors that name the flag.
#![cfg(feature = "simulate")]

use std::process::{Command, Output};

fn simulate(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("BATON_") {
            command.env_remove(name);
        }
    }
    command.arg("simulate").args(args).output().unwrap()
}

fn succeeds(args: &[&str]) -> String {
    let output = simulate(args);
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn several_seeds_end_with_a_line_of_counts() {
    let said = succeeds(&["--seeds", "4", "--from", "20"]);
    assert!(
        said.starts_with("seeds: 4, broken: 0, requests: "),
        "{said}"
    );
    assert_eq!(said.lines().count(), 1, "{said}");
    let said = succeeds(&["--seeds", "2", "--json"]);
    let report: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!(report["seeds"], 2);
    assert_eq!(report["broken"], serde_json::json!([]));
}

#[test]
fn a_seed_tells_the_same_each_time() {
    let trace = || {
        let said = succeeds(&["--seed", "31", "--trace"]);
        let (trace, counts) = said.trim_end().rsplit_once('\n').unwrap();
        assert!(counts.starts_with("seeds: 1, broken: 0, "), "{counts}");
        trace.to_owned()
    };
    let first = trace();
    assert!(first.starts_with("seed 31 ("), "{first}");
    assert!(first.contains("r0  "), "{first}");
    assert_eq!(first, trace());
}

#[test]
fn flags_that_mean_nothing_are_refused() {
    for (args, word) in [
        (&["--seeds", "0"][..], "--seeds 0"),
        (&["--jobs", "0"], "--jobs 0"),
        (&["--seed", "1", "--seeds", "2"], "--seed"),
        (&["--json", "--trace"], "--trace"),
    ] {
        let output = simulate(args);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(
            !output.status.success() && output.stdout.is_empty(),
            "{args:?}"
        );
        assert!(said.starts_with("error: ") && said.contains(word), "{said}");
    }
}
