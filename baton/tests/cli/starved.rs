//! A process that the system denies something: it goes on, and recovers by itself.

use std::fs::OpenOptions;
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, Rlimit, prlimit};

use crate::{ENDS_WITHIN, Up, shell};

/// The status of one request; 0 if there was no answer within so many seconds.
fn ask(up: &Up, seconds: u32) -> u32 {
    let body = r#"{"model":"rand","prompt":"the river","max_tokens":4}"#;
    let answer = Command::new("curl")
        .args(["-s", "-o", "/dev/null", "-d", body])
        .args(["--max-time", &seconds.to_string()])
        .args(["-w", "%{http_code}", "-H", "content-type: application/json"])
        .arg(format!("{}/v1/completions", up.http))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    String::from_utf8(answer.stdout).unwrap().parse().unwrap()
}

#[test]
fn a_full_disk_for_logs_costs_nothing_but_the_lines() {
    let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    let up = Up::logging_to(Stdio::from(full), &["--log", "debug"]);
    assert_eq!(ask(&up, 20), 200);
    assert_eq!(ask(&up, 20), 200);
    up.terminate();
    up.ends(ENDS_WITHIN);
}

#[test]
fn without_free_descriptors_it_waits_for_some() {
    let up = Up::start(&["--log", "warn"]);
    assert_eq!(ask(&up, 20), 200);
    let pid = Pid::from_child(&up.child);
    let folder = format!("/proc/{}/fd", pid.as_raw_nonzero());
    let taken = std::fs::read_dir(&folder).unwrap().map(|entry| {
        let name = entry.unwrap().file_name().into_string().unwrap();
        name.parse::<u64>().unwrap()
    });
    let taken: Vec<u64> = taken.collect();
    // One descriptor is left, whatever else the process was given at its start.
    let free = (0..).find(|number| !taken.contains(number)).unwrap();
    let limit = Rlimit {
        current: Some(free + 1),
        maximum: Some(free + 1),
    };
    prlimit(Some(pid), Resource::Nofile, limit).unwrap();

    let address = up.http.trim_start_matches("http://").to_owned();
    let crowd: Vec<TcpStream> = (0..100)
        .map(|_| TcpStream::connect(&address).unwrap())
        .collect();
    assert_eq!(ask(&up, 2), 0, "there was a descriptor left");
    drop(crowd);
    let free = Instant::now();
    while ask(&up, 5) != 200 {
        assert!(
            free.elapsed() < Duration::from_secs(60),
            "it does not recover"
        );
    }
    let ready = format!(
        "curl -s -o /dev/null -w '%{{http_code}}' {}/readyz",
        up.http
    );
    assert_eq!(shell(&ready), "200");
    up.terminate();
    let log = up.ends(ENDS_WITHIN);
    assert!(log.contains("no connection can be accepted"), "{log}");
}
