//! `baton top`, through a pipe and on a terminal.

use std::io::{Read as _, Write as _};
use std::process::{Command, Stdio};

use crate::{File, Up, assert_says, baton, refused, succeeds, text};

#[test]
fn top_shows_the_workers_as_text_and_as_json() {
    let up = Up::start(&["--log", "warn"]);
    let once = succeeds(&mut baton(&["top", "--once", "--url", &up.http]));
    assert_says(
        &once,
        &[&up.http, "ready", "requests 0 in flight", "KV BLOCKS"],
    );
    let rows: Vec<&str> = once.lines().skip(4).collect();
    assert_eq!(rows.len(), 2, "{once}");
    assert_says(rows[0], &["decode", "ready", "127.0.0.1:"]);
    assert_says(rows[1], &["prefill", "ready"]);
    assert!(!once.contains('\u{1b}'), "colours in a pipe: {once}");

    let json = succeeds(&mut baton(&["top", "--once", "--json", "--url", &up.http]));
    assert_eq!(json.lines().count(), 1);
    let view: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(view["router"]["ready"], true);
    let workers = view["workers"].as_array().unwrap();
    assert_eq!(workers.len(), 2);
    for worker in workers {
        assert_eq!(worker["state"], "ready");
        assert_eq!(worker["epoch"].as_str().unwrap().len(), 16);
        let blocks = &worker["blocks"];
        assert!(blocks["total"].as_u64().unwrap() > 0);
        assert_eq!(blocks["total"], blocks["free"]);
    }
}

#[test]
fn top_is_refused_in_plain_words() {
    let said = refused(&mut baton(&["top", "--url", "here"]));
    assert_says(&said, &["--url here", "http://HOST:PORT"]);
    let said = refused(&mut baton(&["top", "--url", "http://127.0.0.1:1"]));
    assert_says(&said, &["--url", "no router answers"]);
    let said = refused(&mut baton(&["top", "--tls-authority", "/nowhere/ca.pem"]));
    assert_says(&said, &["--tls-authority", "/nowhere/ca.pem"]);
    let said = refused(&mut baton(&["top", "--interval-ms", "5"]));
    assert_says(&said, &["--interval-ms", "100..=3600000"]);

    let keys = File::new("secret = \"team\"\n");
    let up = Up::start(&["--api-keys", keys.path()]);
    let ask = ["top", "--once", "--url", &up.http];
    let said = refused(&mut baton(&ask));
    assert_says(&said, &["--api-key"]);
    let seen = succeeds(baton(&ask).args(["--api-key", "secret"]));
    assert_says(&seen, &["decode"]);
}

/// A person looks and presses q; the terminal is theirs again, as it was.
#[test]
fn top_on_a_terminal_redraws_until_q() {
    let up = Up::start(&["--log", "warn"]);
    let program = env!("CARGO_BIN_EXE_baton");
    let typed = format!(
        "stty rows 20 cols 90; {program} top --interval-ms 100 --url {}; echo left $?; stty -a",
        up.http
    );
    let mut terminal = Command::new("script")
        .args(["-qec", &typed, "/dev/null"])
        .env_remove("NO_COLOR")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut shown = terminal.stdout.take().unwrap();
    let (mut seen, mut bytes) = (Vec::new(), [0; 4096]);
    // Three looks: the later ones have rates.
    while text(&seen).matches("WORKER").count() < 3 {
        let more = shown.read(&mut bytes).unwrap();
        assert_ne!(more, 0, "it ended: {}", text(&seen));
        seen.extend_from_slice(&bytes[..more]);
    }
    terminal.stdin.take().unwrap().write_all(b"q").unwrap();
    shown.read_to_end(&mut seen).unwrap();
    assert!(terminal.wait().unwrap().success());
    let seen = text(&seen);
    let (during, after) = seen.split_once("\u{1b}[?1049l").unwrap();
    assert_says(
        during,
        &["\u{1b}[?1049h", "decode", "prefill", "tokens/s 0 out"],
    );
    assert_says(after, &["left 0", " icanon", " echo"]);
    assert!(!after.contains("-icanon"), "{after}");
}
