//! Weights converted while a model loads: what comes out, how far it is from the model as
//! it was, and that nobody takes one for the other.

#[path = "model_support/allocations.rs"]
mod allocations;
#[path = "model_support/runner.rs"]
mod runner;

use std::path::Path;

use allocations::peak_of;
use baton_engine::model::{Error, LoadOptions, Model, WeightFormat};
use baton_proto::kv_layout::KvDtype;
use runner::{Runner, Setup, fixture, open_as, real_model};

/// RAND as it is published and as a GGUF file. Its heads of 8 dimensions are stored as 16,
/// so padding is covered too.
const RANDS: [&str; 2] = ["rand", "rand.gguf"];

fn prompt() -> Vec<u32> {
    (2..70).collect()
}

fn logits(path: &Path, weights: WeightFormat) -> Vec<f32> {
    let model = open_as(path, weights);
    Runner::new(&model, Setup::default())
        .prefill(&prompt(), 32)
        .1
}

/// Root mean square of the difference over that of `expected`, mean taken off.
fn relative_error(actual: &[f32], expected: &[f32]) -> f64 {
    let mean = expected.iter().map(|x| f64::from(*x)).sum::<f64>() / expected.len() as f64;
    let of = |x: f64| x * x;
    let difference: f64 = actual
        .iter()
        .zip(expected)
        .map(|(a, e)| of(f64::from(*a) - f64::from(*e)))
        .sum();
    let spread: f64 = expected.iter().map(|e| of(f64::from(*e) - mean)).sum();
    (difference / spread).sqrt()
}

#[test]
fn matrices_become_what_was_asked_for_and_vectors_stay() {
    for name in RANDS {
        let model = |weights| open_as(&fixture(name), weights);
        let kept = model(WeightFormat::Keep);
        let (matrices, vectors) = (4 * 7 + 2, 4 * 2 + 1);
        let of = |weights: WeightFormat, wanted: &[&str]| -> usize {
            model(weights)
                .formats()
                .split(',')
                .filter_map(|part| part.split_once(':'))
                .filter(|(ty, _)| wanted.contains(ty))
                .map(|(_, count)| count.parse::<usize>().unwrap())
                .sum()
        };
        let floats = ["F32", "F16", "BF16"];
        assert_eq!(of(WeightFormat::Keep, &floats), matrices + vectors);
        for (weights, ty) in [(WeightFormat::Q8, "Q8_0"), (WeightFormat::Q4, "Q4_1")] {
            assert_eq!(of(weights, &[ty]), matrices, "{name} as {weights}");
            assert_eq!(of(weights, &floats), vectors, "{name} as {weights}");
        }
        assert!(of(WeightFormat::F32, &["F32"]) >= matrices, "{name}");
        let bytes = |weights| model(weights).weight_bytes();
        assert!(bytes(WeightFormat::Q4) < bytes(WeightFormat::Q8));
        assert!(bytes(WeightFormat::Q8) < bytes(WeightFormat::Keep));
        assert_eq!(
            kept.parameters(),
            model(WeightFormat::Q4).parameters(),
            "a format changes no count"
        );
    }
}

/// Weights in groups of 32 are rounded by about 0.5 % of their size at 8 bits and 8 % at 4,
/// int8 activations by 0.6 %, and every layer adds its own. Over one token that is all; over
/// a prompt RAND's attention, which is made to react to small changes, multiplies it.
#[test]
fn logits_stay_near_those_of_the_float_weights() {
    for name in RANDS {
        let path = fixture(name);
        let float = logits(&path, WeightFormat::F32);
        let error = |weights| relative_error(&logits(&path, weights), &float);
        let (kept, q8, q4) = (
            error(WeightFormat::Keep),
            error(WeightFormat::Q8),
            error(WeightFormat::Q4),
        );
        // BF16 widened is the same model: both multiply f32 in one order.
        assert_eq!(kept, 0.0, "{name}");
        assert!(0.0 < q8 && q8 < 0.15, "{name}: q8 {q8}");
        assert!(2.0 * q8 < q4 && q4 < 0.9, "{name}: q4 {q4}");

        let of_tokens = |weights| -> Vec<f32> {
            let model = open_as(&path, weights);
            let mut runner = Runner::new(&model, Setup::default());
            (2..18)
                .flat_map(|token| runner.prefill(&[token], 1).1)
                .collect()
        };
        let float = of_tokens(WeightFormat::F32);
        let error = |weights| relative_error(&of_tokens(weights), &float);
        let (q8, q4) = (error(WeightFormat::Q8), error(WeightFormat::Q4));
        assert!(0.0 < q8 && q8 < 0.03, "{name}: one token, q8 {q8}");
        assert!(2.0 * q8 < q4 && q4 < 0.3, "{name}: one token, q4 {q4}");
    }
}

#[test]
fn two_loads_give_the_same_bits() {
    for weights in WeightFormat::ALL {
        let path = fixture("rand");
        let bits = || -> Vec<u32> {
            logits(&path, weights)
                .iter()
                .map(|value| value.to_bits())
                .collect()
        };
        assert_eq!(bits(), bits(), "{weights}");
    }
}

#[test]
fn workers_of_different_weights_are_told_apart() {
    for name in RANDS {
        let models = WeightFormat::ALL.map(|weights| open_as(&fixture(name), weights));
        for (a, model) in models.iter().enumerate() {
            for (b, other) in models.iter().enumerate() {
                let layout = |model: &Model| model.kv_layout(16, KvDtype::F16);
                let card = |model: &Model| model.card("rand", layout(model));
                let (ours, theirs) = (card(model), card(other));
                assert_eq!(ours.revision == theirs.revision, a == b, "{name} {a} {b}");
                assert_eq!(ours == theirs, a == b, "{name} {a} {b}");
                let handoff = ours.layout.check_peer(&theirs.layout);
                if a == b {
                    handoff.unwrap();
                } else {
                    assert_eq!(handoff.unwrap_err().field, "numerics_id");
                }
            }
        }
        let revision = models[3].card("rand", models[3].kv_layout(16, KvDtype::F16));
        assert!(revision.revision.as_str().ends_with("+q4"));
    }
}

/// A file that already has what is asked for is the same model with and without.
#[test]
fn a_format_that_changes_nothing_changes_no_name() {
    let Some(path) = real_model("smollm2-135m-instruct.gguf") else {
        return;
    };
    let card = |weights| {
        let model = open_as(&path, weights);
        model.card("smollm2", model.kv_layout(16, KvDtype::F16))
    };
    let kept = card(WeightFormat::Keep);
    assert_eq!(kept, card(WeightFormat::Q8));
    let q4 = card(WeightFormat::Q4);
    assert_ne!(kept.revision, q4.revision);
    assert_ne!(kept.layout.numerics, q4.layout.numerics);
    assert!(q4.weight_bytes < kept.weight_bytes);
}

#[test]
fn a_weight_that_is_no_number_is_refused_by_tensor_and_place() {
    let whole = std::fs::read(fixture("rand/model.safetensors")).unwrap();
    let length = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&whole[8..8 + length]).unwrap();
    let tensor = "model.layers.2.mlp.down_proj.weight";
    let start = header[tensor]["data_offsets"][0].as_u64().unwrap() as usize;
    let root = tempfile::tempdir().unwrap();
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(fixture("rand").join(file), root.path().join(file)).unwrap();
    }
    // BF16: NaN, infinity, the largest, the least above zero.
    for (bits, expected) in [
        (0x7fc0_u16, Some("element 321 is not a finite number")),
        (0xff80, Some("element 321 is not a finite number")),
        (0x7f7f, Some("element 321 is too large")),
        (0x0001, None),
    ] {
        let mut bytes = whole.clone();
        bytes[8 + length + start + 321 * 2..][..2].copy_from_slice(&bits.to_le_bytes());
        std::fs::write(root.path().join("model.safetensors"), bytes).unwrap();
        for weights in [WeightFormat::Q8, WeightFormat::Q4] {
            let options = LoadOptions {
                weights,
                ..LoadOptions::default()
            };
            match (Model::open(root.path(), &options, &mut |_, _| {}), expected) {
                (Ok(_), None) => {}
                (Err(error @ Error::Pack { .. }), Some(expected)) => {
                    let said = error.to_string();
                    assert!(said.contains(expected) && said.contains(tensor), "{said}");
                }
                (opened, expected) => panic!("{opened:?}, expected {expected:?}"),
            }
        }
    }
}

#[test]
fn progress_rises_to_the_end_while_weights_are_converted() {
    for weights in WeightFormat::ALL {
        let mut calls = Vec::new();
        let options = LoadOptions {
            weights,
            ..LoadOptions::default()
        };
        Model::open(&fixture("rand.gguf"), &options, &mut |done, total| {
            calls.push((done, total));
        })
        .unwrap();
        assert!(
            calls.len() >= 5 && calls.is_sorted(),
            "{weights}: {calls:?}"
        );
        let (done, total) = *calls.last().unwrap();
        assert!(
            done == total && total > 100_000,
            "{weights}: {done} of {total}"
        );
    }
}

/// Beside the model, at most the converted copy of one matrix is held. The packed weights
/// lie in mappings, which the allocator does not count.
#[test]
fn a_load_holds_no_second_copy_of_the_model() {
    let path = fixture("rand.gguf");
    let load = |weights| {
        let options = LoadOptions {
            context_max: Some(64),
            weights,
            ..LoadOptions::default()
        };
        let (model, peak) = peak_of(|| Model::open(&path, &options, &mut |_, _| {}));
        (model.unwrap().weight_bytes() as usize, peak)
    };
    let (bytes, kept) = load(WeightFormat::Keep);
    for weights in [WeightFormat::Q8, WeightFormat::Q4] {
        let (_, converted) = load(weights);
        assert!(
            converted < kept + bytes / 2,
            "{weights}: {converted} bytes, kept {kept}, the model has {bytes}"
        );
    }
}
