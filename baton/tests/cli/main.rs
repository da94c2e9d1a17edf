//! The binary as a person meets it: help that teaches, errors that name the flag, results
//! on standard output and everything else on standard error, and a cluster that starts,
//! answers the command it prints, drains and ends.
//!
//! What the cluster computes is not looked at here.

mod broken_models;
mod machine;
mod starved;
mod top;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// From start to ready, with a model this small: a second at most on an idle machine.
const READY_MAX: Duration = Duration::from_secs(15);
/// From SIGTERM to the end of a process that has nothing to wait for.
const ENDS_WITHIN: Duration = Duration::from_secs(20);

fn fixture(name: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
    folder.join(name).to_str().unwrap().to_owned()
}

/// The binary with nothing of this process's own settings.
fn baton(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("BATON_") {
            command.env_remove(name);
        }
    }
    command.args(args).stdin(Stdio::null());
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Runs a command that must succeed; its standard output.
fn succeeds(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {output:?}");
    text(&output.stdout)
}

/// Runs a command that must be refused; what it says, with nothing on standard output.
fn refused(command: &mut Command) -> String {
    let Output {
        status,
        stdout,
        stderr,
    } = command.output().unwrap();
    let said = text(&stderr);
    assert!(matches!(status.code(), Some(1 | 2)), "{status}: {said}");
    assert_eq!(text(&stdout), "", "{command:?}");
    assert!(said.starts_with("error: "), "{said}");
    assert!(!said.contains("panicked"), "{said}");
    said
}

fn assert_says(said: &str, words: &[&str]) {
    for word in words {
        assert!(said.contains(word), "no `{word}` in: {said}");
    }
}

struct File {
    _folder: tempfile::TempDir,
    path: PathBuf,
}

impl File {
    fn new(content: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("given.toml");
        std::fs::write(&path, content).unwrap();
        Self {
            _folder: folder,
            path,
        }
    }

    fn path(&self) -> &str {
        self.path.to_str().unwrap()
    }
}

#[test]
fn help_teaches_with_defaults_and_examples() {
    let top = succeeds(&mut baton(&["--help"]));
    assert_says(
        &top,
        &["Usage: baton", "  baton up\n", "curl http://", "--config"],
    );
    for name in [
        "up", "router", "prefill", "decode", "generate", "chat", "bench", "model",
    ] {
        assert_says(&top, &[&format!("\n  {name} ")]);
        let help = succeeds(&mut baton(&[name, "--help"]));
        assert_says(
            &help,
            &["Usage: baton", "Example", &format!("  baton {name}")],
        );
    }
    for name in ["up", "router", "prefill", "decode", "generate", "chat"] {
        let help = succeeds(&mut baton(&[name, "--help"]));
        assert_says(&help, &["[default: ", "[env: BATON_"]);
    }
    for (command, word) in [
        (["model", "fetch"], "smollm2-135m-instruct"),
        (["model", "list"], "--json"),
        (["model", "inspect"], "--json"),
        (["bench", "load"], "[default: "),
        (["bench", "interference"], "[default: "),
        (["bench", "engine"], "baton bench engine --predict"),
    ] {
        let help = succeeds(baton(&command).arg("--help"));
        assert_says(&help, &["Usage: baton", word]);
    }
}

/// What a model becomes at load shows in its formats and its identity, and may come from
/// the file of settings.
#[test]
fn weights_are_converted_by_flag_environment_and_file() {
    let rand = fixture("rand");
    let inspect = |args: &[&str], env: Option<&str>| -> serde_json::Value {
        let mut command = baton(&["model", "inspect", &rand, "--json", "--quiet"]);
        command.args(args);
        if let Some(value) = env {
            command.env("BATON_WEIGHTS", value);
        }
        serde_json::from_str(&succeeds(&mut command)).unwrap()
    };
    let kept = inspect(&[], None);
    assert_eq!(kept["weight_formats"], "BF16:39");
    let q4 = inspect(&["--weights", "q4"], None);
    assert_eq!(q4["weight_formats"], "BF16:9,Q4_1:30");
    assert_ne!(q4["numerics_id_f16"], kept["numerics_id_f16"]);
    let q8 = inspect(&[], Some("q8"));
    assert_eq!(q8["weight_formats"], "BF16:9,Q8_0:30");
    let file = File::new("[model.inspect]\nweights = \"q4\"\n");
    assert_eq!(inspect(&["--config", file.path()], None), q4);
}

#[test]
fn a_wrong_value_is_refused_with_its_flag_and_what_is_allowed() {
    let rand = fixture("rand");
    for (flag, value, allowed) in [
        ("--block-size", "24", "16, 32, 64, 128"),
        ("--kv-dtype", "f8", "f32, f16, bf16, int8, int4"),
        ("--weights", "q5", "keep, f32, q8, q4"),
        ("--kv-tokens", "0", "16..=268435456"),
        ("--chunk-tokens", "0", "1..="),
        ("--decode-workers", "0", "1..=64"),
        ("--http", "banana", "127.0.0.1:8000"),
        ("--grpc", "localhost", "HOST:PORT"),
        ("--http", "0.0.0.0:0", "api_keys"),
        ("--log-format", "xml", "json, compact, auto"),
        ("--log", "baton=loud", "target=level"),
    ] {
        let said = refused(&mut baton(&["up", "--model", &rand, flag, value]));
        assert_says(&said, &[value, allowed]);
        let named = said.contains(flag) || flag == "--log";
        assert!(named, "no `{flag}` in: {said}");
    }
    for (flag, value, allowed) in [
        ("--temperature", "nan", "0..="),
        ("--temperature", "-1", "0..="),
        ("--top-p", "7", "at most 1"),
        ("--max-tokens", "0", "1..="),
    ] {
        let said = refused(&mut baton(&[
            "generate", "--model", &rand, flag, value, "x",
        ]));
        assert_says(&said.to_lowercase(), &[flag, value, allowed]);
    }
    let said = refused(&mut baton(&["up", "--tls-key", "key.pem"]));
    assert_says(&said, &["--tls-key", "--tls-certificate"]);
    let said = refused(&mut baton(&["router"]));
    assert_says(&said, &["--etcd"]);
    let said = refused(baton(&["model", "list"]).env("BATON_JSON", "maybe"));
    assert_says(&said, &["--json", "maybe", "true"]);
}

#[test]
fn a_model_that_is_not_there_or_not_one_is_refused_by_name() {
    let said = refused(&mut baton(&["up", "--model", "nope"]));
    assert_says(
        &said,
        &["--model nope", "smollm2-135m-instruct", "hf:owner/repo"],
    );
    let file = File::new("not a model");
    let said = refused(&mut baton(&["model", "inspect", file.path()]));
    assert_says(&said, &[file.path(), "GGUF"]);
    let said = refused(&mut baton(&["generate", "--model", "/proc", "x"]));
    assert_says(&said, &["/proc", "config.json"]);
}

#[test]
fn a_config_file_is_refused_by_file_and_key() {
    let unknown = File::new("[up]\nkv-toekns = 4096\n");
    let said = refused(&mut baton(&["--config", unknown.path(), "up"]));
    assert_says(&said, &[unknown.path(), "`kv-toekns`", "kv-tokens"]);
    let value = File::new("[up]\nblock-size = 24\n");
    let said = refused(&mut baton(&["--config", value.path(), "up"]));
    assert_says(&said, &["--block-size", "24", "16, 32, 64, 128"]);
    let table = File::new("[uq]\nblock-size = 16\n");
    let said = refused(&mut baton(&["--config", table.path(), "up"]));
    assert_says(&said, &[table.path(), "`uq`", "[up]"]);
    let syntax = File::new("[up]\nblock-size = [\n");
    let said = refused(&mut baton(&["--config", syntax.path(), "up"]));
    assert_says(&said, &[syntax.path(), "line 2"]);
    let said = refused(&mut baton(&["--config", "/no/such.toml", "up"]));
    assert_says(&said, &["--config /no/such.toml", "No such file"]);
    assert_eq!(said.matches("No such file").count(), 1, "{said}");
}

#[test]
fn a_flag_wins_over_the_environment_and_that_over_the_file() {
    // `model list --json` shows the folder each setting leads to only for models that
    // are there, so a file of the right name stands for one.
    let folders: Vec<tempfile::TempDir> = (0..3)
        .map(|_| {
            let folder = tempfile::tempdir().unwrap();
            std::fs::write(folder.path().join("gemma3-270m.gguf"), b"").unwrap();
            folder
        })
        .collect();
    let at = |which: usize| folders[which].path().to_str().unwrap();
    let file = File::new(&format!(
        "[model.list]\njson = true\ncache-dir = \"{}\"\n",
        at(0)
    ));
    let listed = |command: &mut Command| -> String {
        let list: serde_json::Value = serde_json::from_str(&succeeds(command)).unwrap();
        list[1]["path"].as_str().unwrap().to_owned()
    };
    let mut command = baton(&["--config", file.path(), "model", "list"]);
    assert!(listed(&mut command).starts_with(at(0)));
    command.env("BATON_CACHE_DIR", at(1));
    assert!(listed(&mut command).starts_with(at(1)));
    command.args(["--cache-dir", at(2)]);
    assert!(listed(&mut command).starts_with(at(2)));
}

#[test]
fn models_are_listed_and_inspected_as_json_and_as_text() {
    let list = succeeds(&mut baton(&["model", "list", "--json"]));
    let list: serde_json::Value = serde_json::from_str(&list).unwrap();
    assert_eq!(list[0]["name"], "smollm2-135m-instruct");
    assert!(list[0]["bytes"].as_u64().unwrap() > 1 << 20);
    let table = succeeds(&mut baton(&["model", "list"]));
    assert_eq!(table.lines().count(), list.as_array().unwrap().len());

    let rand = fixture("rand");
    let report = succeeds(&mut baton(&["model", "inspect", &rand, "--json"]));
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["name"], "rand");
    assert_eq!(report["vocab_size"], 300);
    assert_eq!(report["config"]["layers"].as_array().unwrap().len(), 4);
    let facts = succeeds(&mut baton(&["model", "inspect", &rand]));
    assert_says(
        &facts,
        &[
            "vocab_size               300\n",
            "rope                     halves 10000/8\n",
            "warnings                 []\n",
            "config:\n",
        ],
    );
}

/// A sweep of the tiny model that takes a moment.
const SWEEP: &str = "--batch 1,3 --context 16,40,5000 --prefill 20 --prefill-depth 0,16 \
     --rounds 2 --point-seconds 0.02 --threads 2 --block-size 16 --quiet";

fn bench_engine(args: &[&str]) -> Command {
    let mut command = baton(&["bench", "engine", "--model", &fixture("rand-swa")]);
    command.args(SWEEP.split_whitespace()).args(args);
    command
}

#[test]
fn the_engine_is_measured_against_the_machine() {
    let folder = tempfile::tempdir().unwrap();
    let [plot, output] = ["plot.svg", "engine.json"].map(|name| folder.path().join(name));
    let table = succeeds(
        bench_engine(&["--predict", "--plot", plot.to_str().unwrap()])
            .args(["--output", output.to_str().unwrap()]),
    );
    assert_says(
        &table,
        &[
            "limits of these threads",
            "prefill",
            "decode",
            "MBU",
            "target (",
        ],
    );
    let widest = table.lines().map(|line| line.chars().count()).max();
    assert!(widest <= Some(120), "{table}");

    let report: serde_json::Value =
        serde_json::from_slice(&std::fs::read(output).unwrap()).unwrap();
    assert_eq!(report["setup"]["threads"], 2);
    assert_eq!(report["setup"]["model"], "rand-swa");
    let limits = &report["limits"];
    assert!(limits["int8_ops_per_s"].as_f64() > Some(0.0));
    assert!(limits["read"][0]["bytes_per_s"].as_f64() > Some(0.0));
    let points = report["points"].as_array().unwrap();
    let described: Vec<(&str, u64, u64, u64)> = points
        .iter()
        .map(|point| {
            let number = |key: &str| point[key].as_u64().unwrap();
            let phase = point["phase"].as_str().unwrap();
            (
                phase,
                number("sequences"),
                number("tokens"),
                number("depth"),
            )
        })
        .collect();
    let expected = [
        ("prefill", 1, 20, 0),
        ("prefill", 1, 20, 16),
        ("decode", 1, 1, 16),
        ("decode", 1, 1, 40),
        ("decode", 3, 1, 16),
        ("decode", 3, 1, 40),
    ];
    assert_eq!(described, expected);
    for point in points {
        for key in ["step_ms", "tokens_per_s", "mfu", "mbu", "share_of_limit"] {
            let value = point[key].as_f64().unwrap();
            assert!(value.is_finite() && value > 0.0, "{key} of {point}");
        }
        assert!(point["steps"].as_u64() > Some(0));
    }
    // Three sequences read the weights once and their KV three times.
    assert_eq!(points[2]["weight_bytes"], points[4]["weight_bytes"]);
    let kv = |at: usize| points[at]["kv_bytes"].as_u64().unwrap();
    assert_eq!(3 * kv(2), kv(4));
    let skipped = report["skipped"].as_array().unwrap();
    assert_eq!(skipped.len(), 2);
    assert_says(skipped[0]["reason"].as_str().unwrap(), &["context"]);
    let prediction = &report["prediction"];
    assert_eq!(prediction["points"].as_array().unwrap().len(), 6);
    assert!(prediction["all"]["median"].as_f64().unwrap().is_finite());
    assert_eq!(prediction["unseen"]["points"], 3);

    let svg = std::fs::read_to_string(plot).unwrap();
    assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"));
    assert_eq!(svg.matches("<title>").count(), 6);
}

#[test]
fn an_engine_bench_that_cannot_be_is_refused_by_flag() {
    for (flags, words) in [
        (["--batch", "0"], ["--batch", "1..=4096"]),
        (["--prefill", "12x"], ["--prefill", "12x"]),
        (["--rounds", "0"], ["--rounds", "1..=10000"]),
        (["--threads", "0"], ["--threads", "1..=1024"]),
        (["--kv-pool", "4GB"], ["--kv-pool", "1MiB..=1024GiB"]),
        (["--point-seconds", "-1"], ["--point-seconds", "0..=3600"]),
        (["--isa", "mmx"], ["--isa", "mmx"]),
        (["--plot", "x.svg"], ["--plot", "--predict"]),
    ] {
        let said = refused(baton(&["bench", "engine"]).args(flags));
        assert_says(&said, &words);
    }
    let mut nothing = baton(&["bench", "engine", "--quiet", "--model", &fixture("rand")]);
    nothing.args(["--context", "100000", "--prefill", "100000"]);
    assert_says(&refused(&mut nothing), &["--context", "no point", "4096"]);
}

#[test]
fn a_reader_that_leaves_early_is_no_error() {
    let mut child = baton(&["model", "inspect", &fixture("rand")])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(text(&output.stderr), "");
    assert_eq!(output.status.code(), Some(141));
}

#[test]
fn generate_gives_the_same_text_for_the_same_seed() {
    let rand = fixture("rand");
    let run = |seed: &str| -> serde_json::Value {
        let mut command = baton(&["generate", "--model", &rand, "--json", "--max-tokens", "24"]);
        let report = succeeds(command.args(["--seed", seed, "the river"]));
        serde_json::from_str(&report).unwrap()
    };
    let (first, again, other) = (run("7"), run("7"), run("8"));
    assert_eq!(first["seed"], 7);
    assert_eq!(first["usage"]["completion_tokens"], 24);
    assert_eq!(first["text"], again["text"]);
    assert_ne!(first["text"], other["text"]);
}

#[test]
fn generate_streams_text_to_output_and_the_rest_to_error() {
    let mut child = baton(&[
        "generate",
        "--model",
        &fixture("rand"),
        "--max-tokens",
        "8",
        "-",
    ])
    .stdin(Stdio::piped())
    .stdout(Stdio::piped())
    .stderr(Stdio::piped())
    .spawn()
    .unwrap();
    child.stdin.take().unwrap().write_all(b"the river").unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(output.stdout.ends_with(b"\n") && !text(&output.stdout).contains("tokens/s"));
    assert_says(&text(&output.stderr), &["8 new", "tokens/s", "seed"]);
}

#[test]
fn chat_answers_lines_from_a_pipe() {
    let mut child = baton(&["chat", "--model", &fixture("rand"), "--max-tokens", "6"])
        .args(["--temperature", "0"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = b"the river\n\n/clear\nthe river\n/nonsense\n/quit\nnever read\n";
    child.stdin.take().unwrap().write_all(lines).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let said = text(&output.stdout);
    // The conversation was forgotten in between, so that the greedy answers agree.
    let half = said.len() / 2;
    assert!(half > 1 && said[..half] == said[half..], "{said:?}");
    assert!(!said.contains("> "), "a prompt sign in a pipe: {said:?}");
    assert_says(&text(&output.stderr), &["/nonsense", "/clear"]);
}

#[test]
fn a_malformed_key_file_is_refused_without_its_content() {
    for content in [
        "s3cret = tenant\n",
        "\"s3cret\" = 5\n",
        "s3cret\n",
        "\"s3cret\" = \"\"\n",
    ] {
        let file = File::new(content);
        let said = refused(&mut baton(&["up", "--api-keys", file.path()]));
        assert_says(&said, &["--api-keys"]);
        assert!(!said.contains("s3cret"), "the key is in: {said}");
    }
    let said = refused(&mut baton(&["up", "--api-keys", "/no/such/keys"]));
    assert_says(&said, &["--api-keys", "/no/such/keys", "No such file"]);
}

#[test]
fn a_taken_port_is_refused_by_flag_and_address() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let rand = fixture("rand");
    for flag in ["--http", "--grpc"] {
        let mut command = baton(&["up", "--model", &rand]);
        for door in ["--http", "--grpc"] {
            command.args([
                door,
                if door == flag {
                    &address
                } else {
                    "127.0.0.1:0"
                },
            ]);
        }
        let said = refused(&mut command);
        assert_says(&said, &[flag, &address, "in use"]);
    }
}

/// A running `baton up`, killed when the test ends early.
struct Up {
    child: Child,
    /// Everything it printed until it was ready.
    printed: String,
    http: String,
    log: mpsc::Receiver<String>,
}

impl Up {
    fn start(args: &[&str]) -> Self {
        Self::logging_to(Stdio::piped(), args)
    }

    fn logging_to(log: Stdio, args: &[&str]) -> Self {
        let mut command = Self::command();
        command.args(["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]);
        command.args(args);
        Self::run(&mut command, log)
    }

    /// With its doors at these addresses.
    fn at(http: &str, grpc: &str, args: &[&str]) -> Self {
        let mut command = Self::command();
        command.args(["--http", http, "--grpc", grpc]).args(args);
        Self::run(&mut command, Stdio::piped())
    }

    /// By a line of a shell, whose arguments are the command.
    fn start_by(line: &str) -> Self {
        let mut command = Command::new("sh");
        command.args(["-c", line, "sh"]);
        let of = Self::command();
        command.arg(of.get_program()).args(of.get_args());
        command.args(["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]);
        for (name, _) in of.get_envs() {
            command.env_remove(name);
        }
        Self::run(&mut command, Stdio::piped())
    }

    fn command() -> Command {
        baton(&["up", "--model", &fixture("rand")])
    }

    fn run(command: &mut Command, log: Stdio) -> Self {
        let started = Instant::now();
        let command = command.stdout(Stdio::piped()).stderr(log);
        let mut child = command.spawn().unwrap();
        let (sender, log) = mpsc::channel();
        let stderr = child.stderr.take();
        std::thread::spawn(move || {
            let mut all = String::new();
            if let Some(mut stderr) = stderr {
                stderr.read_to_string(&mut all).unwrap();
            }
            sender.send(all)
        });
        let mut printed = String::new();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        while !printed.contains("Ctrl-C") {
            assert_ne!(
                stdout.read_line(&mut printed).unwrap(),
                0,
                "it ended: {printed}"
            );
        }
        let ready = started.elapsed();
        assert!(ready < READY_MAX, "ready after {ready:?}");
        let http = printed
            .lines()
            .find_map(|line| line.trim().strip_prefix("http  "))
            .unwrap()
            .to_owned();
        Self {
            child,
            printed,
            http,
            log,
        }
    }

    fn line(&self, starts_with: &str) -> &str {
        let mut lines = self.printed.lines().map(str::trim);
        lines.find(|line| line.starts_with(starts_with)).unwrap()
    }

    fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits for a clean end; what was logged.
    fn ends(mut self, patience: Duration) -> String {
        let started = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                let log = self.log.recv().unwrap();
                assert!(status.success(), "{status}: {log}");
                return log;
            }
            assert!(
                started.elapsed() < patience,
                "still there after {patience:?}"
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Runs a line of a shell; its standard output.
fn shell(line: &str) -> String {
    succeeds(Command::new("sh").args(["-c", line]).stdin(Stdio::null()))
}

#[test]
fn up_answers_the_command_it_prints_and_drains_on_sigterm() {
    let up = Up::start(&[]);
    let curl = up.line("curl ").to_owned();
    assert_says(&curl, &[&up.http, "/v1/chat/completions"]);
    let grpc = up.line("grpc  ").trim_start_matches("grpc  ").to_owned();
    assert_says(up.line("grpcurl "), &[&grpc, "baton.v1.Inference/Generate"]);
    assert!(std::net::TcpStream::connect(&grpc).is_ok());

    let answer = shell(&format!("{curl} -s -w '\\n%{{http_code}}'"));
    let (body, status) = answer.rsplit_once('\n').unwrap();
    assert_eq!(status, "200", "{body}");
    let body: serde_json::Value = serde_json::from_str(body).unwrap();
    assert_eq!(body["object"], "chat.completion");
    let ready = shell(&format!(
        "curl -s -o /dev/null -w '%{{http_code}}' {}/readyz",
        up.http
    ));
    assert_eq!(ready, "200");
    let page = shell(&format!("curl -s {}/", up.http));
    assert_says(&page, &["<title>Baton</title>"]);

    // Twice at once, as `timeout` sends it: one wish to stop, not two.
    up.terminate();
    up.terminate();
    let log = up.ends(ENDS_WITHIN);
    assert_says(&log, &["draining"]);
    for line in log.lines() {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        assert!(line["level"].is_string());
    }
}

#[test]
fn sigterm_lets_a_running_stream_finish() {
    let up = Up::start(&["--log", "warn", "--drain-ms", "60000"]);
    let body = r#"{"model":"rand","prompt":"the river","stream":true,"max_tokens":2000,
        "ignore_eos":true,"stream_options":{"include_usage":true}}"#;
    let mut curl = Command::new("curl")
        .args([
            "-sN",
            "--max-time",
            "60",
            "-H",
            "content-type: application/json",
            "-d",
            body,
        ])
        .arg(format!("{}/v1/completions", up.http))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut events = BufReader::new(curl.stdout.take().unwrap());
    let mut said = String::new();
    while said.matches("data: ").count() < 3 {
        assert_ne!(events.read_line(&mut said).unwrap(), 0, "{said}");
    }
    up.terminate();
    events.read_to_string(&mut said).unwrap();
    assert!(curl.wait().unwrap().success());
    assert!(said.trim_end().ends_with("data: [DONE]"), "cut off: {said}");
    assert_says(&said, &["\"completion_tokens\":2000"]);
    up.ends(ENDS_WITHIN);
}
