//! Scaled and partial rotations against an independent reference, inside the original
//! context and past it, and what they mean for workers that share KV.

#[path = "model_support/gguf_edit.rs"]
mod gguf_edit;
#[path = "model_support/runner.rs"]
mod runner;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use baton_engine::model::{LoadOptions, Model};
use baton_engine::step::LogitsWanted;
use baton_proto::kv_layout::KvDtype;
use gguf_edit::GgufEdit;
use runner::{Runner, Setup, fixture};
use serde_json::{Map, Value, json};

/// Float weights and f32 KV: only the order of sums differs from the reference.
const TOLERANCE: f64 = 1e-3;

struct Reference {
    ids: Vec<u32>,
    probes: Vec<usize>,
    cases: Map<String, Value>,
}

fn reference() -> Reference {
    let text = std::fs::read_to_string(fixture("rope_reference.json")).unwrap();
    let mut cases: Map<String, Value> = serde_json::from_str(&text).unwrap();
    let prompt = cases.remove("prompt").unwrap();
    let numbers = |name: &str| {
        let list = prompt[name].as_array().unwrap().iter();
        list.map(|id| id.as_u64().unwrap()).collect::<Vec<_>>()
    };
    Reference {
        ids: numbers("ids").into_iter().map(|id| id as u32).collect(),
        probes: numbers("probe_ids")
            .into_iter()
            .map(|id| id as usize)
            .collect(),
        cases,
    }
}

/// Writes the model of a case into `root`.
fn write(case: &Value, root: &Path) -> PathBuf {
    let name = case["model"].as_str().unwrap();
    if name.ends_with(".gguf") {
        let mut edit = GgufEdit::new(&std::fs::read(fixture(name)).unwrap());
        for (key, value) in case["metadata"].as_object().unwrap() {
            edit = edit.set(&format!("llama.{key}"), value);
        }
        for (tensor, values) in case["vectors"].as_object().unwrap() {
            let values = values.as_array().unwrap().iter();
            let values: Vec<f32> = values.map(|v| v.as_f64().unwrap() as f32).collect();
            edit = edit.vector(tensor, &values);
        }
        let path = root.join(name);
        std::fs::write(&path, edit.bytes()).unwrap();
        return path;
    }
    for file in std::fs::read_dir(fixture(name)).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), root.join(file.file_name())).unwrap();
    }
    let path = root.join("config.json");
    let mut config: Map<String, Value> =
        serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    for (key, value) in case["config"].as_object().unwrap() {
        config.insert(key.clone(), value.clone());
    }
    std::fs::write(&path, Value::Object(config).to_string()).unwrap();
    root.to_owned()
}

/// Opens the model of a case for a context; 0 is the model's own.
fn open(case: &Value, context: u32) -> Arc<Model> {
    let root = tempfile::tempdir().unwrap();
    let path = write(case, root.path());
    let options = LoadOptions {
        context_max: (context > 0).then_some(context),
        ..LoadOptions::default()
    };
    Model::open(&path, &options, &mut |_, _| {}).unwrap_or_else(|error| panic!("{error}"))
}

fn log_probabilities(logits: &[f32]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f32::MIN, f32::max);
    let sum: f64 = logits.iter().map(|l| f64::from(l - max).exp()).sum();
    logits
        .iter()
        .map(|l| f64::from(l - max) - sum.ln())
        .collect()
}

/// The largest difference of a model from a case's figures.
fn difference(reference: &Reference, case: &Value, model: &Arc<Model>) -> f64 {
    let positions: Vec<usize> = case["positions"]
        .as_array()
        .unwrap()
        .iter()
        .map(|position| position.as_u64().unwrap() as usize)
        .collect();
    let mut runner = Runner::new(model, Setup::default());
    let mut sequence = runner.sequence();
    let mut rows = Vec::new();
    // In chunks that no block size divides.
    for part in reference.ids[..=positions[positions.len() - 1]].chunks(40) {
        let row = runner.row(&mut sequence, part, LogitsWanted::All);
        rows.extend(runner.run(vec![row]));
    }
    let mut worst = 0.0_f64;
    for (number, position) in positions.into_iter().enumerate() {
        let ours = log_probabilities(&rows[position]);
        let mut compare = |id: usize, expected: &Value| {
            worst = worst.max((ours[id] - expected.as_f64().unwrap()).abs());
        };
        let probes = case["probes"][number].as_array().unwrap();
        for (id, expected) in reference.probes.iter().zip(probes) {
            compare(*id, expected);
        }
        for top in case["top"][number].as_array().unwrap() {
            compare(top[0].as_u64().unwrap() as usize, &top[1]);
        }
    }
    worst
}

fn context(case: &Value) -> u32 {
    case["context"].as_u64().unwrap() as u32
}

#[test]
fn every_scaling_gives_the_reference_log_probabilities() {
    let reference = reference();
    assert!(reference.cases.len() >= 22);
    for (name, case) in &reference.cases {
        let model = open(case, context(case));
        let worst = difference(&reference, case, &model);
        println!("{name}: {} is off by {worst:e}", model.config().rope_text());
        assert!(worst < TOLERANCE, "{name}: off by {worst}");
    }
}

#[test]
fn the_reference_notices_a_scaling_that_is_left_out() {
    let reference = reference();
    for (name, case) in &reference.cases {
        let plain = match case["model"].as_str().unwrap() {
            model if model.ends_with(".gguf") => {
                json!({"model": model, "metadata": {}, "vectors": {}})
            }
            model => json!({"model": model, "config": {}}),
        };
        let worst = difference(&reference, case, &open(&plain, 0));
        // Within the original context dynamic scaling changes nothing.
        assert!(
            name == "dynamic-within" || worst > 10.0 * TOLERANCE,
            "{name}: only {worst}"
        );
    }
}

#[test]
fn workers_with_other_angles_never_share_kv() {
    let reference = reference();
    let numerics = |name: &str, context| {
        let model = open(&reference.cases[name], context);
        (model.numerics(KvDtype::F16), model.config().rope_text())
    };
    let short = numerics("longrope-long", 64);
    let long = numerics("longrope-long", 65);
    assert_ne!(short, long);
    assert_eq!(long, numerics("longrope-long", 0));
    let plain = numerics("dynamic-past", 0);
    assert_eq!(plain, numerics("dynamic-past", 32));
    assert_ne!(plain.0, numerics("dynamic-past", 65).0);
    assert_ne!(
        numerics("dynamic-past", 66).0,
        numerics("dynamic-past", 65).0
    );
}

#[test]
fn a_context_is_lengthened_only_as_far_as_the_scaling_stretches() {
    let reference = reference();
    let context = |name: &str, context| open(&reference.cases[name], context).context_max();
    assert_eq!(context("dynamic-past", 0), 64);
    assert_eq!(context("dynamic-past", 150), 150);
    assert_eq!(context("dynamic-past", 10_000), 256);
    assert_eq!(context("linear", 10_000), 2048);
    assert_eq!(context("yarn", 0), 2048);
}
