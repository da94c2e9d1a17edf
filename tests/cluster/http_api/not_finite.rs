//! A model with one damaged weight: the request that meets it fails by name, others go on.

use std::path::Path;

use baton_engine::model::{LoadOptions, Model};
use baton_tests::cluster::Setup;
use baton_tests::doors::OpenCluster;
use baton_tests::process;
use safetensors::SafeTensors;
use serde_json::{Value, json};

use super::{text_of, whole, with};

/// Its row of the embedding is no number.
const DAMAGED: u32 = 299;

/// A copy of `rand` with a NaN in it.
fn damaged(folder: &Path) -> std::sync::Arc<Model> {
    let source = process::fixture_path("rand");
    for entry in std::fs::read_dir(source).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
    }
    let path = folder.join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let row = {
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let embedding = tensors.tensor("model.embed_tokens.weight").unwrap();
        let row_bytes = embedding.shape()[1] * 2;
        let start = embedding.data().as_ptr() as usize - bytes.as_ptr() as usize;
        start + DAMAGED as usize * row_bytes
    };
    bytes[row..row + 2].copy_from_slice(&half::bf16::NAN.to_le_bytes());
    std::fs::write(&path, bytes).unwrap();
    Model::open(folder, &LoadOptions::default(), &mut |_, _| {}).unwrap()
}

async fn counted(open: &OpenCluster, role: &str) -> f64 {
    let page = String::from_utf8(open.http().get("/metrics").await.body).unwrap();
    let role = format!("role=\"{role}\"");
    let mut lines = page.lines();
    let line =
        lines.find(|l| l.starts_with("baton_not_finite_requests_total{") && l.contains(&role));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok())
        .expect(&role)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_weight_fails_the_requests_that_meet_it_alone() {
    let folder = tempfile::tempdir().unwrap();
    let model = damaged(folder.path());
    let open = OpenCluster::start(&Setup::default(), &model).await;
    let http = open.http();
    let sound = json!({ "prompt": (20..40).collect::<Vec<u32>>(), "max_tokens": 400,
        "temperature": 0, "ignore_eos": true, "logit_bias": { (DAMAGED.to_string()): -100 } });
    let right = text_of(&whole(&http, "/v1/completions", &sound).await, false, 0);
    let neighbour = {
        let (http, sound) = (http.clone(), sound.clone());
        tokio::spawn(async move { whole(&http, "/v1/completions", &sound).await })
    };
    let place = |error: &Value, token: u32, position: u32| {
        assert_eq!(error["code"], "logits_not_finite", "{error}");
        let message = error["message"].as_str().unwrap();
        let named = format!("output token `{token}` of choice `0` (position `{position}`");
        assert!(message.contains(&named), "{message}");
    };
    // In the prompt: the prefill worker finds it, and the decode worker that is asked next,
    // since the damage could be in the memory of one.
    let prompt = json!({ "prompt": [20, 21, 22, DAMAGED], "max_tokens": 9, "temperature": 0 });
    let error = http.post("/v1/completions", &prompt).await.error(500);
    place(&error, 0, 4);
    let both = async |open: &OpenCluster| {
        (
            counted(open, "prefill").await,
            counted(open, "decode").await,
        )
    };
    assert_eq!(both(&open).await, (1.0, 1.0));
    // Drawn itself: the token behind it cannot be.
    let drawn = with(
        sound,
        json!({ "logit_bias": { (DAMAGED.to_string()): 100 } }),
    );
    let error = http.post("/v1/completions", &drawn).await.error(500);
    place(&error, 1, 21);
    assert_eq!(both(&open).await, (1.0, 2.0));
    assert_eq!(text_of(&neighbour.await.unwrap(), false, 0), right);
    open.cluster
        .wait_released(std::time::Duration::from_secs(2))
        .await;
    open.stop().await;
}
