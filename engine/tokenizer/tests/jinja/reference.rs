//! The Python process that renders with Jinja2.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread;

use serde_json::{Value, json};

/// `target/` of the workspace.
fn target() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target")
}

/// What `scripts/reference` brought: `None` after saying that the test is skipped.
///
/// # Panics
/// If the reference is required and missing.
pub(crate) fn folder(test: &str) -> Option<PathBuf> {
    let folder = target().join("reference");
    if folder.join("complete").exists() {
        return Some(folder);
    }
    let why = "run scripts/reference, which installs Jinja2 and public templates";
    assert!(
        std::env::var_os("BATON_REQUIRE_REFERENCE").is_none(),
        "{test}: the reference is missing: {why}"
    );
    println!("{test}: skipped: {why}");
    None
}

/// One process that answers requests in their order.
pub(crate) struct Reference {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Reference {
    pub(crate) fn start(folder: &Path) -> Self {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/jinja/reference.py");
        let mut child = Command::new(folder.join("venv/bin/python"))
            .args(["-W", "ignore", script])
            .env("PYTHONIOENCODING", "utf-8")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, output }
    }

    /// Answers to all requests. They are written from a thread, so that neither pipe fills.
    pub(crate) fn ask(&mut self, requests: &[Value]) -> Vec<Value> {
        let mut input = self.child.stdin.take().unwrap();
        let mut lines = String::new();
        for request in requests {
            lines.push_str(&request.to_string());
            lines.push('\n');
        }
        let input = thread::scope(|scope| {
            let writer = scope.spawn(move || {
                input.write_all(lines.as_bytes()).unwrap();
                input.flush().unwrap();
                input
            });
            let answers: Vec<Value> = requests
                .iter()
                .map(|request| {
                    let mut line = String::new();
                    self.output.read_line(&mut line).unwrap();
                    assert!(!line.is_empty(), "the reference ended at {request}");
                    serde_json::from_str(&line).unwrap()
                })
                .collect();
            (writer.join().unwrap(), answers)
        });
        self.child.stdin = Some(input.0);
        input.1
    }

    /// What Jinja2 and Python's types have, by area.
    pub(crate) fn names(&mut self) -> Value {
        self.ask(&[json!({"names": true})]).remove(0)
    }
}

impl Drop for Reference {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        // It ends with its input.
        let _ = self.child.wait();
    }
}
