//! Converted K and V have the bits that storing the values they stood for would have given.

use baton_kernels::{
    Error, Isa, Kernels, KvConverter, KvDtype, KvShape, KvSpans, KvView, reference,
};
use proptest::prelude::*;

use crate::Random;

const DTYPES: [KvDtype; 5] = [
    KvDtype::F32,
    KvDtype::F16,
    KvDtype::BF16,
    KvDtype::Int8,
    KvDtype::Int4,
];

#[derive(Debug, Clone)]
struct Case {
    from: KvDtype,
    to: KvDtype,
    /// Spans of a block at either end.
    blocks: (u32, u32),
    /// Heads at either end, of which the second's are some of the first's.
    heads: (u32, u32),
    head_dim: u32,
    scale: f32,
    seed: u64,
}

fn cases() -> impl Strategy<Value = Case> {
    let dtype = || prop::sample::select(DTYPES.to_vec());
    let spans = || prop::sample::select(vec![1u32, 2, 4, 8]);
    let dims = prop::sample::select(vec![16u32, 48, 64, 80, 96, 128]);
    let scale = prop::sample::select(vec![1e-4f32, 1.0, 300.0]);
    let heads = (1u32..4).prop_flat_map(|from| (Just(from), 1..=from));
    (
        dtype(),
        dtype(),
        (spans(), spans()),
        heads,
        dims,
        scale,
        any::<u64>(),
    )
        .prop_map(|(from, to, blocks, heads, head_dim, scale, seed)| Case {
            from,
            to,
            blocks,
            heads,
            head_dim,
            scale,
            seed,
        })
}

/// One layer of one block.
struct Layer {
    memory: Vec<u64>,
    shape: KvShape,
}

impl Layer {
    fn new(dtype: KvDtype, spans: u32, kv_heads: u32, head_dim: u32, byte: u8) -> Layer {
        let shape = KvShape {
            blocks: 1,
            block_size: 16 * spans,
            layers: 1,
            kv_heads,
            head_dim,
            dtype,
        };
        let words = shape.block_bytes() / 8;
        assert_eq!(words * 8, shape.block_bytes());
        Layer {
            memory: vec![u64::from_ne_bytes([byte; 8]); words],
            shape,
        }
    }

    fn view(&mut self) -> KvView {
        // SAFETY: the memory has the size asked for; the views made of it are used one after the other.
        unsafe { KvView::new(self.memory.as_mut_ptr().cast(), self.shape) }.unwrap()
    }

    fn bytes(&mut self) -> &mut [u8] {
        let len = self.memory.len() * 8;
        // SAFETY: the same allocation, as bytes.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_mut_ptr().cast(), len) }
    }
}

fn check(case: &Case) {
    let mut random = Random::new(case.seed);
    let (spans_from, spans_to) = case.blocks;
    let (heads_from, heads_to) = case.heads;
    let dim = case.head_dim as usize;
    let spans = 1 + random.below(spans_from.min(spans_to) as usize) as u32;
    let run = KvSpans {
        from_span: random.below((spans_from - spans + 1) as usize) as u32,
        to_span: random.below((spans_to - spans + 1) as usize) as u32,
        spans,
        from_head: random.below((heads_from - heads_to + 1) as usize) as u32,
        to_head: 0,
        heads: heads_to,
    };
    let kernels = Kernels::new(Isa::Scalar, 1).unwrap();
    let mut source = Layer::new(case.from, spans_from, heads_from, case.head_dim, 0);
    let slots: Vec<(u32, u32)> = (0..16 * spans_from).map(|slot| (0, slot)).collect();
    let stride = heads_from as usize * dim;
    let given = |random: &mut Random| -> Vec<f32> {
        let mut x = random.floats(slots.len() * stride);
        x.iter_mut().for_each(|x| *x *= case.scale);
        // A group of equal values, and one with an outlier.
        x[..dim].fill(case.scale);
        x[stride - 1] = 100.0 * case.scale;
        x
    };
    let (k, v) = (given(&mut random), given(&mut random));
    let view = source.view();
    kernels.write_kv(&view, 0, &slots, &k, &v, stride);

    // What the source's values are, stored by the target's own rule.
    let stride = heads_to as usize * dim;
    let stored = |is_k: bool| -> Vec<f32> {
        let mut rows = Vec::new();
        for position in 0..16 * run.spans {
            let slot = (16 * run.from_span + position) as usize;
            for head in 0..run.heads {
                let head = (run.from_head + head) as usize;
                let slot = reference::Slot::new(&view, 0, (0, slot), head, is_k);
                rows.extend((0..dim).map(|d| slot.value(d)));
            }
        }
        rows
    };
    let (k, v) = (stored(true), stored(false));
    let mut right = Layer::new(case.to, spans_to, heads_to, case.head_dim, 0xa5);
    let slots: Vec<(u32, u32)> = (0..16 * run.spans)
        .map(|position| (0, 16 * run.to_span + position))
        .collect();
    kernels.write_kv(&right.view(), 0, &slots, &k, &v, stride);

    for isa in Isa::available() {
        let converter = KvConverter::new(isa, source.shape, right.shape).unwrap();
        let mut target = Layer::new(case.to, spans_to, heads_to, case.head_dim, 0xa5);
        converter.convert(source.bytes(), target.bytes(), &run);
        // Nothing outside of the run either.
        assert!(target.memory == right.memory, "{isa} {case:?} {run:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn a_converted_slot_has_the_bits_of_a_stored_one(case in cases()) {
        check(&case);
    }
}

#[test]
fn values_beyond_f16_become_what_storing_them_makes_of_them() {
    for to in DTYPES {
        check(&Case {
            from: KvDtype::F32,
            to,
            blocks: (2, 1),
            heads: (2, 1),
            head_dim: 64,
            scale: 1e6,
            seed: 1,
        });
    }
}

#[test]
fn heads_of_another_size_are_refused() {
    let [from, to] = [64, 80].map(|dim| Layer::new(KvDtype::F16, 1, 1, dim, 0).shape);
    let error = KvConverter::new(Isa::Scalar, from, to).unwrap_err();
    assert!(matches!(error, Error::KvHeadDim { head_dim: 64 }));
}
