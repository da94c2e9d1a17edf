//! Re-laid-out blocks are what the receiver would have written itself, and whatever
//! cannot be is refused by name.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::NumericsId;
use crate::error::ErrorKind;
use crate::kv_layout::{KvDtype, KvGroup, KvGroupKind, KvOrigin, KvShard};

fn layout(block_size: u32, dtype: KvDtype) -> KvLayout {
    let group = |kind, layers: &[u32]| KvGroup {
        kind,
        layers: layers.to_vec(),
    };
    KvLayout {
        block_size,
        dtype,
        scale_group: dtype.scale_group(),
        kv_heads: 4,
        head_dim: 16,
        layers: 3,
        groups: vec![
            group(KvGroupKind::Full, &[0, 2]),
            group(KvGroupKind::SlidingWindow { window: 30 }, &[1]),
        ],
        numerics: NumericsId::derive(&[dtype.name().as_bytes()]),
        origin: Some(KvOrigin {
            model: "abc".to_owned(),
            weights: "F32:9".to_owned(),
            rope: "halves 10000/16".to_owned(),
            arithmetic: "1".to_owned(),
        }),
        shard: None,
    }
}

fn shard(layout: KvLayout, heads: Range<u32>) -> KvLayout {
    KvLayout {
        kv_heads: heads.end - heads.start,
        shard: Some(KvShard {
            first_head: heads.start,
            model_heads: layout.kv_heads,
        }),
        ..layout
    }
}

/// The part of block `ordinal` as a pool of `layout` holds it: every span says in each
/// of its bytes which one it is, counted from the start of the text.
fn part(layout: &KvLayout, ordinal: u32) -> Vec<u8> {
    let spans = layout.block_size / SPAN_TOKENS;
    let mut bytes = Vec::new();
    for kv in 0..2u32 {
        for head in layout.heads().0 {
            for span in ordinal * spans..(ordinal + 1) * spans {
                let name = blake3::hash(&[kv as u8, head as u8, span as u8]);
                let name = name.as_bytes().iter().copied().cycle();
                bytes.extend(name.take(layout.span_bytes()));
            }
        }
    }
    assert_eq!(bytes.len(), layout.layer_bytes());
    bytes
}

/// What a receiver that wants `wanted` holds after every part was sent, by ordinal;
/// bytes that nobody sent are 0.
fn received(
    relayout: &Relayout,
    group: usize,
    wanted: &Range<u32>,
    tokens: u32,
) -> BTreeMap<u32, Vec<u8>> {
    let (from, to) = (relayout.sender(), relayout.receiver());
    let mut blocks: BTreeMap<u32, Vec<u8>> = wanted
        .clone()
        .map(|ordinal| (ordinal, vec![0; to.layer_bytes()]))
        .collect();
    for ordinal in relayout.sent_ordinals(group, wanted, tokens) {
        let sent = part(from, ordinal);
        for overlap in relayout.overlaps(ordinal) {
            let Some(block) = blocks.get_mut(&overlap.ordinal) else {
                continue;
            };
            for copy in relayout.copies(overlap.run) {
                block[copy.to..copy.to + copy.len]
                    .copy_from_slice(&sent[copy.from..copy.from + copy.len]);
            }
        }
    }
    blocks
}

proptest! {
    #[test]
    fn what_arrives_is_what_the_receiver_would_have_written(
        (from, to) in (0u32..4, 0u32..4),
        tokens in 1u32..700,
        hit in 0u32..40,
        group in 0usize..2,
        (first, count) in (0u32..3, 1u32..3),
    ) {
        let sender = layout(16 << from, KvDtype::F16);
        let receiver = shard(layout(16 << to, KvDtype::F16), first..(first + count).min(4));
        let relayout = Relayout::between(&sender, &receiver).unwrap();
        let first = receiver.first_needed_ordinal(group, tokens).max(hit);
        let wanted = first..receiver.blocks_for(tokens).max(first);
        let sent = relayout.sent_ordinals(group, &wanted, tokens);
        let held = sender.first_needed_ordinal(group, tokens)..sender.blocks_for(tokens);
        prop_assert!(sent.is_empty() || held.start <= sent.start && sent.end <= held.end);
        // From where on the text attends to the past, or where the first block starts.
        let needed = match receiver.groups[group].kind {
            KvGroupKind::Full => 0,
            KvGroupKind::SlidingWindow { window } => (tokens + 1).saturating_sub(window),
        };
        let first_span = needed.max(wanted.start * receiver.block_size) / SPAN_TOKENS;
        let spans = receiver.block_size / SPAN_TOKENS;
        for (ordinal, block) in received(&relayout, group, &wanted, tokens) {
            let right = part(&receiver, ordinal);
            let span_bytes = receiver.span_bytes();
            for (at, (got, right)) in block.chunks(span_bytes).zip(right.chunks(span_bytes)).enumerate() {
                let span = ordinal * spans + at as u32 % spans;
                if span >= first_span && span < tokens.div_ceil(SPAN_TOKENS) {
                    prop_assert_eq!(got, right, "span {} of ordinal {}", span, ordinal);
                } else {
                    // Past the end, or behind the window: another part of the same block, or nothing.
                    prop_assert!(got == right || got.iter().all(|byte| *byte == 0));
                }
            }
        }
    }

    #[test]
    fn what_a_stranger_describes_is_refused_or_stays_inside_both_parts(
        block_size in prop_oneof![Just(16u32), Just(32), Just(128), any::<u32>()],
        dtype in 0usize..5,
        kv_heads in prop_oneof![1u32..8, any::<u32>()],
        head_dim in prop_oneof![Just(16u32), any::<u32>()],
        rank in proptest::option::of((any::<u32>(), prop_oneof![Just(4u32), any::<u32>()])),
        first_head in prop_oneof![0u32..4, any::<u32>()],
        ordinal in any::<u32>(),
    ) {
        let ours = shard(layout(32, KvDtype::F16), 1..3);
        let theirs = KvLayout {
            block_size,
            kv_heads,
            head_dim,
            shard: rank.map(|(first, model_heads)| KvShard {
                first_head: first.min(first_head),
                model_heads,
            }),
            ..layout(16, KvDtype::ALL[dtype])
        };
        let text = theirs.to_json();
        let Ok(theirs) = KvLayout::from_json(text.as_bytes()) else {
            return Ok(());
        };
        let Ok(relayout) = Relayout::between(&theirs, &ours) else {
            return Ok(());
        };
        let (sent, kept) = (theirs.layer_bytes(), ours.layer_bytes());
        for overlap in relayout.overlaps(ordinal) {
            let run = overlap.run;
            prop_assert!(run.from_head + run.heads <= theirs.kv_heads);
            prop_assert!(run.to_head + run.heads <= ours.kv_heads);
            if !relayout.converts() {
                for copy in relayout.copies(run) {
                    prop_assert!(copy.from + copy.len <= sent && copy.to + copy.len <= kept);
                }
            }
        }
    }

    #[test]
    fn untrusted_ordinals_do_not_overflow(
        (from, to) in (0u32..4, 0u32..4),
        wanted in any::<(u32, u32)>(),
        tokens in any::<u32>(),
        ordinal in any::<u32>(),
    ) {
        let [sender, receiver] = [from, to].map(|size| layout(16 << size, KvDtype::F16));
        let relayout = Relayout::between(&sender, &receiver).unwrap();
        let tokens = tokens.min(u32::MAX - 1);
        let sent = relayout.sent_ordinals(0, &(wanted.0.min(wanted.1)..wanted.0.max(wanted.1)), tokens);
        prop_assert!(sent.end <= sender.blocks_for(tokens));
        for overlap in relayout.overlaps(ordinal) {
            prop_assert!(overlap.run.to_span + overlap.run.spans <= receiver.block_size / SPAN_TOKENS);
            prop_assert!(overlap.run.from_span + overlap.run.spans <= sender.block_size / SPAN_TOKENS);
        }
    }
}

#[test]
fn equal_layouts_fit_as_they_are_and_bits_survive_another_block_size() {
    let fit = |sender: &KvLayout, receiver: &KvLayout| {
        let relayout = Relayout::between(sender, receiver).unwrap();
        (relayout.fit(), relayout.check_exact().is_ok())
    };
    let ours = layout(16, KvDtype::F16);
    assert_eq!(fit(&ours, &ours), (Fit::Same, true));
    for size in [32, 64, 128] {
        let other = layout(size, KvDtype::F16);
        assert_eq!(fit(&other, &ours), (Fit::SameBits, true));
        assert_eq!(fit(&ours, &other), (Fit::SameBits, true));
    }
    assert_eq!(
        fit(&ours, &shard(ours.clone(), 1..3)),
        (Fit::SameBits, true)
    );
    for from in KvDtype::ALL {
        for to in KvDtype::ALL {
            let (fit, exact) = fit(&layout(16, from), &layout(32, to));
            assert_eq!(fit == Fit::OtherBits, from != to);
            assert_eq!(exact, from == to);
        }
    }
}

#[test]
fn exact_requests_are_told_the_field_and_both_values() {
    let relayout = Relayout::between(&layout(16, KvDtype::F16), &layout(16, KvDtype::Int8));
    let error = relayout.unwrap().check_exact().unwrap_err();
    assert_eq!(
        (error.field.as_str(), error.reason.as_str()),
        ("kv_dtype", "LAYOUT_MISMATCH")
    );
    for word in ["`f16`", "`int8`", "exact"] {
        assert!(error.message.contains(word), "{}", error.message);
    }
}

#[test]
fn what_cannot_be_re_laid_out_names_the_field_and_both_values() {
    type Change = fn(&mut KvLayout);
    type ChangeOrigin = fn(&mut KvOrigin);
    let origin = |layout: &mut KvLayout, change: ChangeOrigin| {
        // As a real worker's would, the numerics id follows.
        layout.numerics = NumericsId([9; 16]);
        change(layout.origin.as_mut().unwrap());
    };
    let cases: [(&str, Change, &str, &str); 6] = [
        (
            "layers",
            |layout| {
                layout.layers = 4;
                layout.groups[0].layers.push(3);
            },
            "`4`",
            "`3`",
        ),
        ("head_dim", |layout| layout.head_dim = 32, "`32`", "`16`"),
        ("kv_heads", |layout| layout.kv_heads = 2, "`2`", "`4`"),
        (
            "kv_heads",
            |layout| *layout = shard(layout.clone(), 0..2),
            "`0..2`",
            "`0..4`",
        ),
        (
            "groups",
            |layout| layout.groups[1].kind = KvGroupKind::SlidingWindow { window: 31 },
            "window: 31",
            "window: 30",
        ),
        (
            "numerics_id",
            |layout| {
                layout.numerics = NumericsId([9; 16]);
                layout.origin = None;
            },
            "09090909",
            "",
        ),
    ];
    let refused =
        |sender: &KvLayout| Relayout::between(sender, &layout(16, KvDtype::F16)).unwrap_err();
    for (field, change, theirs, ours) in cases {
        let mut sender = layout(16, KvDtype::F16);
        change(&mut sender);
        let error = refused(&sender);
        assert_eq!(
            (error.kind, error.field.as_str()),
            (ErrorKind::Unavailable, field)
        );
        assert_eq!(error.reason, "LAYOUT_MISMATCH");
        assert!(error.message.contains(theirs) && error.message.contains(ours));
    }
    let origins: [(&str, ChangeOrigin); 4] = [
        ("model", |origin| origin.model = "def".to_owned()),
        ("weights", |origin| origin.weights = "Q8_0:9".to_owned()),
        ("rope", |origin| origin.rope = "halves 500000/16".to_owned()),
        ("arithmetic", |origin| origin.arithmetic = "2".to_owned()),
    ];
    for (field, change) in origins {
        let mut sender = layout(16, KvDtype::F16);
        origin(&mut sender, change);
        assert_eq!(refused(&sender).field, field);
    }
    // An id that covers two types of K and V is a lie.
    let mut sender = layout(16, KvDtype::Int8);
    sender.numerics = layout(16, KvDtype::F16).numerics;
    assert_eq!(refused(&sender).field, "kv_dtype");
    // Half of a pair that contradicts itself.
    let mut sender = layout(16, KvDtype::F16);
    sender.block_size = 24;
    assert_eq!(refused(&sender).field, "block_size");
}

#[test]
fn layouts_of_older_workers_are_read() {
    let mut text = serde_json::to_value(layout(16, KvDtype::F16)).unwrap();
    text.as_object_mut().unwrap().remove("origin");
    let old: KvLayout = serde_json::from_value(text).unwrap();
    assert_eq!((old.origin, old.shard), (None, None));
    // And what has none is written as they write it.
    let plain = KvLayout {
        origin: None,
        ..layout(16, KvDtype::F16)
    };
    let text = serde_json::to_string(&plain).unwrap();
    assert!(!text.contains("origin") && !text.contains("shard"));
}

#[test]
fn int8_on_the_wire_is_taken_by_every_pool_of_the_same_values_and_for_exact_tokens_by_none() {
    for own in KvDtype::ALL {
        let own = layout(32, own);
        let Some(form) = int8_on_wire(&own) else {
            assert!(matches!(own.dtype, KvDtype::Int8 | KvDtype::Int4));
            continue;
        };
        assert!(form.layer_bytes() < own.layer_bytes());
        for theirs in KvDtype::ALL.map(|dtype| layout(16, dtype)) {
            let relayout = Relayout::between(&form, &theirs).unwrap();
            assert_eq!(relayout.fit(), Fit::OtherBits);
            assert!(relayout.check_exact().is_err());
            let native = Relayout::between(&own, &theirs).unwrap();
            for tokens in [1, 31, 32, 100] {
                let sent = |relayout: &Relayout| relayout.sent_ordinals(1, &(0..9), tokens);
                assert_eq!(sent(&relayout), sent(&native));
            }
        }
        let same = Relayout::between(&form, &own).unwrap();
        assert_eq!(same.check_exact().unwrap_err().field, "kv_dtype");
        assert_ne!(form.numerics, own.numerics);
    }
    let silent = KvLayout {
        origin: None,
        ..layout(16, KvDtype::F16)
    };
    assert_eq!(int8_on_wire(&silent), None);
}
