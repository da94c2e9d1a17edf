//! What of a model's KV layout decides whether two workers may meet, and the converter
//! that a worker gives its lanes.

use std::path::Path;
use std::sync::Arc;

use baton_engine::kv::LayerConverter;
use baton_engine::model::{LoadOptions, Model};
use baton_proto::kv_layout::KvDtype;
use baton_proto::relayout::{Fit, Relayout};

fn fixture(name: &str) -> Arc<Model> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/fixtures")
        .join(name);
    Model::open(&path, &LoadOptions::default(), &mut |_, _| {}).unwrap()
}

#[test]
fn workers_of_one_model_meet_whatever_their_blocks_and_types() {
    let model = fixture("rand");
    for from in KvDtype::ALL {
        for to in KvDtype::ALL {
            let (sender, receiver) = (model.kv_layout(32, from), model.kv_layout(16, to));
            let relayout = Relayout::between(&sender, &receiver).unwrap();
            let fit = if from == to {
                Fit::SameBits
            } else {
                Fit::OtherBits
            };
            assert_eq!(relayout.fit(), fit);
            // Every overlap of a converted block can be written.
            let converter = LayerConverter::new(&relayout).unwrap();
            let source = vec![0; sender.layer_bytes()];
            for overlap in relayout.overlaps(3) {
                let mut target = vec![0u32; receiver.layer_bytes().div_ceil(4)];
                let target: &mut [u8] = bytes_of(&mut target);
                converter.convert(&source, &mut target[..receiver.layer_bytes()], overlap.run);
            }
        }
    }
}

fn bytes_of(words: &mut [u32]) -> &mut [u8] {
    let len = std::mem::size_of_val(words);
    // SAFETY: the same allocation, as bytes.
    #[allow(unsafe_code)]
    unsafe {
        std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), len)
    }
}

#[test]
fn workers_of_other_models_never_meet() {
    let (ours, theirs) = (fixture("rand"), fixture("rand-swa"));
    let [ours, theirs] = [ours, theirs].map(|model| model.kv_layout(16, KvDtype::F16));
    let error = Relayout::between(&theirs, &ours).unwrap_err();
    assert_eq!(error.reason, "LAYOUT_MISMATCH");
    assert_eq!(error.field, "layers");
    // Were their shapes the same, their files would not be.
    let mut disguised = ours.clone();
    disguised.numerics = theirs.numerics;
    disguised.origin = theirs.origin;
    let error = Relayout::between(&disguised, &ours).unwrap_err();
    assert!(["rope", "model"].contains(&error.field.as_str()), "{error}");
}
