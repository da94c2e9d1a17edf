//! The official Python client works unmodified.
//!
//! `openai_client.py` beside this file is the test; this half starts a cluster and
//! hands it the address.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use baton_tests::cluster::Setup;
use baton_tests::doors::OpenCluster;
use baton_tests::{models, process};
use tokio::process::Command;
use tokio::sync::OnceCell;

/// The environment that `scripts/test` makes; made here if it is missing. It has the official
/// clients of the API and of the metrics.
pub(crate) async fn python() -> PathBuf {
    static PYTHON: OnceCell<PathBuf> = OnceCell::const_new();
    let made = PYTHON.get_or_init(|| async {
        let target = process::baton_binary();
        let target = target.parent().and_then(Path::parent).expect("target");
        let venv = target.join("venv");
        let python = venv.join("bin/python");
        if !succeeds(Command::new(&python).args(["-c", "import openai, prometheus_client"])).await {
            let made = succeeds(Command::new("python3").args(["-m", "venv"]).arg(&venv)).await;
            assert!(
                made,
                "`python3 -m venv` failed: scripts/packages test installs it"
            );
            let mut install = Command::new(&python);
            install.args([
                "-m",
                "pip",
                "install",
                "--quiet",
                "openai",
                "prometheus_client",
            ]);
            assert!(succeeds(&mut install).await, "`pip install` failed");
        }
        python
    });
    made.await.clone()
}

async fn succeeds(command: &mut Command) -> bool {
    command
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .status()
        .await
        .is_ok_and(|status| status.success())
}

async fn run_script(open: &OpenCluster, part: &str) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("cluster/openai_client.py");
    let running = Command::new(python().await)
        .arg(script)
        .arg(part)
        .env("OPENAI_BASE_URL", format!("http://{}/v1", open.http))
        .env("OPENAI_API_KEY", "key-a")
        .env_remove("HTTP_PROXY")
        .env_remove("http_proxy")
        .env_remove("ALL_PROXY")
        .env_remove("all_proxy")
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(Duration::from_secs(120), running)
        .await
        .expect("the script ends")
        .expect("the script runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{}\n{}",
        text(&output.stdout),
        text(&output.stderr)
    );
    assert!(
        text(&output.stdout).ends_with("all passed\n"),
        "the script said nothing: {}",
        text(&output.stdout)
    );
}

async fn open(fixture: &str) -> OpenCluster {
    let mut router = Setup::default().router;
    router.api_keys.insert("key-a".into(), "a".into());
    let setup = Setup {
        router,
        ..Setup::default()
    };
    OpenCluster::start(&setup, &models::fixture(fixture)).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_python_client_gets_known_texts() {
    let open = open("chain-bytes").await;
    run_script(&open, "texts").await;
    open.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_python_client_gets_shapes_and_errors() {
    let open = open("rand").await;
    run_script(&open, "shapes").await;
    open.cluster.wait_released(Duration::from_secs(2)).await;
    open.stop().await;
}
