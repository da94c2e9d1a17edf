//! A model whose name tries to break out of every place that shows it.

use std::path::Path;

use baton_proto::v1;
use baton_tests::cluster::Setup;
use baton_tests::doors::OpenCluster;
use baton_tests::models;
use serde_json::json;
use tokio::process::Command;

use super::{streamed, text_of, whole, with};
use crate::openai_client::python;

/// Ends a label, a line of metrics, a string of JSON and an element of a page.
const NAME: &str = "m\"} 1 \\ {a=\"b\",c='d'} </script><img src=x> %0a \\n \u{1f642}";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hostile_model_name_is_a_name_everywhere() {
    let model = models::fixture("rand");
    let open = OpenCluster::start_as(&Setup::default(), &model, NAME).await;
    let http = open.http();

    let listed = http.get("/v1/models").await.json();
    assert_eq!(listed["data"][0]["id"], NAME);
    let encoded: String = NAME.bytes().map(|byte| format!("%{byte:02X}")).collect();
    let one = http.get(&format!("/v1/models/{encoded}")).await.json();
    assert_eq!(one, listed["data"][0]);
    let cluster = http.get("/cluster").await.json();
    for worker in cluster["workers"].as_array().unwrap() {
        assert_eq!(worker["model"], NAME);
    }

    let body = json!({ "model": NAME, "prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0 });
    let answer = whole(&http, "/v1/completions", &body).await;
    assert_eq!(answer["model"], NAME);
    let stream = streamed(&http, "/v1/completions", &body, false).await;
    assert_eq!(
        (stream.model.as_str(), stream.text(0)),
        (NAME, text_of(&answer, false, 0))
    );
    let other = with(body, json!({ "model": "other" }));
    let error = http.post("/v1/completions", &other).await.error(404);
    assert!(error["message"].as_str().unwrap().contains(NAME), "{error}");
    let request = v1::GenerateRequest {
        model: "other".to_owned(),
        ..v1::GenerateRequest::default()
    };
    let mut events = open.grpc().generate(request).await.unwrap().into_inner();
    let status = events.message().await.unwrap_err();
    assert!(status.message().contains(NAME), "{status:?}");

    // The page reads names from the API; none is in it.
    let page = String::from_utf8(http.get("/").await.body).unwrap();
    assert!(!page.contains("src=x") && !page.contains("innerHTML"));
    // Another project's parser reads the metrics.
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("cluster/http_api/metrics_page.py");
    let metrics = http.get("/metrics").await.body;
    let folder = tempfile::tempdir().unwrap();
    let saved = folder.path().join("metrics");
    std::fs::write(&saved, metrics).unwrap();
    let mut reader = Command::new(python().await);
    let read = reader
        .arg(script)
        .arg(&saved)
        .arg(NAME)
        .output()
        .await
        .unwrap();
    let said = String::from_utf8_lossy(&read.stderr);
    assert!(read.status.success(), "{said}");
    open.stop().await;
}
