//! Paged attention and the writing of K and V.

use baton_kernels::{
    AttentionParams, AttentionRow, KV_GROUP, KV_TILE, KvDtype, KvShape, KvView, Scratch, reference,
};
use half::{bf16, f16};
use proptest::prelude::*;

use crate::{Random, all_kernels, assert_same_bits, describe};

const DTYPES: [KvDtype; 5] = [
    KvDtype::F32,
    KvDtype::F16,
    KvDtype::BF16,
    KvDtype::Int8,
    KvDtype::Int4,
];

#[derive(Debug, Clone)]
struct Case {
    block_size: u32,
    dtype: KvDtype,
    head_dim: usize,
    kv_heads: usize,
    group: usize,
    window: Option<u32>,
    soft_cap: Option<f32>,
    /// Per sequence: positions before the chunk, rows of the chunk.
    sequences: Vec<(usize, usize)>,
    seed: u64,
}

fn cases() -> impl Strategy<Value = Case> {
    let shape = (
        prop::sample::select(vec![16u32, 32, 64, 128]),
        prop::sample::select(DTYPES.to_vec()),
        prop::sample::select(vec![16usize, 48, 64, 80, 96, 128, 256]),
        1usize..4,
        prop::sample::select(vec![1usize, 2, 3, 4, 5, 7, 8, 9]),
    );
    let window = prop_oneof![Just(None), (1u32..600).prop_map(Some)];
    let soft_cap = prop_oneof![Just(None), Just(Some(2.5f32))];
    let sequences = prop::collection::vec((0usize..600, 1usize..12), 1..4);
    (shape, window, soft_cap, sequences, any::<u64>()).prop_map(
        |((block_size, dtype, head_dim, kv_heads, group), window, soft_cap, sequences, seed)| {
            Case {
                block_size,
                dtype,
                head_dim,
                kv_heads,
                group,
                window,
                soft_cap,
                sequences,
                seed,
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn every_isa_and_thread_count_gives_the_bits_of_the_reference(case in cases()) {
        check(&case);
    }
}

/// A pool whose memory is all NaN, so that whatever is read unwritten shows.
struct Pool {
    memory: Vec<u64>,
    shape: KvShape,
}

impl Pool {
    fn new(shape: KvShape) -> Pool {
        let bytes = shape.blocks as usize * shape.block_bytes();
        Pool {
            memory: vec![u64::MAX; bytes.div_ceil(8)],
            shape,
        }
    }

    fn view(&mut self) -> KvView {
        // SAFETY: the memory has the size asked for, and the test uses it from here on through the view only.
        unsafe { KvView::new(self.memory.as_mut_ptr().cast(), self.shape) }.unwrap()
    }
}

/// What a stored value may differ from the one given, or the exact value stored.
fn assert_stored(dtype: KvDtype, stored: &[f32], given: &[f32]) {
    let levels = match dtype {
        KvDtype::F32 => return assert_same_bits(stored, given, "f32"),
        KvDtype::F16 => {
            let rounded: Vec<f32> = given.iter().map(|x| f16::from_f32(*x).to_f32()).collect();
            return assert_same_bits(stored, &rounded, "f16");
        }
        KvDtype::BF16 => {
            let rounded: Vec<f32> = given.iter().map(|x| bf16::from_f32(*x).to_f32()).collect();
            return assert_same_bits(stored, &rounded, "bf16");
        }
        KvDtype::Int8 => 255.0,
        KvDtype::Int4 => 15.0,
    };
    for (stored, given) in stored.chunks(KV_GROUP).zip(given.chunks(KV_GROUP)) {
        let least = given.iter().copied().fold(f32::INFINITY, f32::min);
        let most = given.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        // Half a step, and at the ends of the range what f16 rounds the minimum and the scale by.
        let bound = (most - least) * (0.5 / levels + 1.0 / 2048.0) + least.abs() / 2048.0;
        for (stored, given) in stored.iter().zip(given) {
            let error = (stored - given).abs();
            assert!(
                error <= bound,
                "{given} is stored as {stored}, bound {bound}"
            );
        }
    }
}

fn check(case: &Case) {
    let mut random = Random::new(case.seed);
    let (size, dim) = (case.block_size as usize, case.head_dim);
    let (layers, layer) = (2, 1);
    let heads = case.kv_heads * case.group;
    // Blocks are dealt out at random, so that neighbours in a table are not neighbours in memory.
    let counts: Vec<usize> = case
        .sequences
        .iter()
        .map(|(before, rows)| (before + rows).div_ceil(size))
        .collect();
    let total: usize = counts.iter().sum();
    let mut free: Vec<u32> = (0..total as u32 + 1).collect();
    let mut pool = Pool::new(KvShape {
        blocks: total as u32 + 1,
        block_size: case.block_size,
        layers,
        kv_heads: case.kv_heads as u32,
        head_dim: dim as u32,
        dtype: case.dtype,
    });
    let view = pool.view();

    let writers = all_kernels();
    let width = case.kv_heads * dim;
    let mut tables = Vec::new();
    for ((before, rows), count) in case.sequences.iter().zip(&counts) {
        let mut table: Vec<u32> = (0..*count)
            .map(|_| free.swap_remove(random.below(free.len())))
            .collect();
        let first_seen = case
            .window
            .map_or(0, |w| (before + 1).saturating_sub(w as usize));
        let k = random.floats((before + rows) * width);
        let v = random.floats((before + rows) * width);
        // Positions no row sees stay NaN, and blocks wholly before the window are gone.
        let slots: Vec<(u32, u32)> = (first_seen..before + rows)
            .map(|p| (table[p / size], (p % size) as u32))
            .collect();
        let writer = &writers[random.below(writers.len())];
        writer.write_kv(
            &view,
            layer,
            &slots,
            &k[first_seen * width..],
            &v[first_seen * width..],
            width,
        );
        for (i, place) in slots.iter().enumerate() {
            for (head, (k, v)) in (first_seen + i..)
                .take(1)
                .flat_map(|p| {
                    let row = p * width..(p + 1) * width;
                    k[row.clone()].chunks(dim).zip(v[row].chunks(dim))
                })
                .enumerate()
            {
                let place = (place.0, place.1 as usize);
                for (is_k, given) in [(true, k), (false, v)] {
                    let slot = reference::Slot::new(&view, layer, place, head, is_k);
                    let stored: Vec<f32> = (0..dim).map(|d| slot.value(d)).collect();
                    assert_stored(case.dtype, &stored, given);
                }
            }
        }
        table[..first_seen / size].fill(u32::MAX);
        tables.push(table);
    }
    let rows: Vec<AttentionRow<'_>> = case
        .sequences
        .iter()
        .zip(&tables)
        .flat_map(|((before, rows), table)| {
            (*before..before + rows).map(move |p| AttentionRow {
                table,
                position: p as u32,
            })
        })
        .collect();
    // The query's rows are part of wider ones, as in a fused product.
    let stride = heads * dim + 24;
    let q = random.floats(rows.len() * stride);
    let params = AttentionParams {
        heads,
        kv_heads: case.kv_heads,
        head_dim: dim,
        q_row_stride: stride,
        scale: 1.0 / (dim as f32).sqrt(),
        window: case.window,
        soft_cap: case.soft_cap,
    };

    let mut expected = vec![0.0; rows.len() * heads * dim];
    for (t, row) in rows.iter().enumerate() {
        for head in 0..heads {
            let q = &q[t * stride + head * dim..][..dim];
            let out = &mut expected[(t * heads + head) * dim..][..dim];
            let kv_head = head / case.group;
            reference::attention_head(&view, layer, row, q, kv_head, &params, out);
            let exact = attention_f64(&view, layer, row, q, kv_head, &params);
            let tolerance = match case.dtype {
                // A tile has up to 256 weights, each rounded by at most half of a 16,256th of the largest, which counts
                // by its code times scale, at most 7. As all roundings are independent, four times their root mean
                // square.
                KvDtype::Int8 | KvDtype::Int4 => 4.0 * 16.0 * 7.0 / 16_256.0 / 12.0f64.sqrt(),
                // Weights sum to 1 and |v| is below 4; scores of size 10 lose about 10 epsilon before exp.
                _ => 4.0 * 64.0 * f64::from(f32::EPSILON),
            };
            for (d, (out, exact)) in out.iter().zip(exact).enumerate() {
                let error = (f64::from(*out) - exact).abs();
                assert!(
                    error < tolerance,
                    "row {t} head {head} d {d}: off by {error}"
                );
            }
        }
    }
    let mut scratch = Scratch::new();
    for kernels in all_kernels() {
        let mut out = vec![f32::NAN; expected.len()];
        kernels.attention(&view, layer, &rows, &q, &mut out, &params, &mut scratch);
        assert_same_bits(&out, &expected, &describe(&kernels));
        // Each row alone, as in decode.
        for (t, row) in rows.iter().enumerate().step_by(3) {
            let mut alone = vec![f32::NAN; heads * dim];
            kernels.attention(
                &view,
                layer,
                std::slice::from_ref(row),
                &q[t * stride..],
                &mut alone,
                &params,
                &mut scratch,
            );
            assert_same_bits(
                &alone,
                &expected[t * heads * dim..][..heads * dim],
                "a row alone",
            );
        }
    }
}

/// Attention over what is stored, in f64. The query counts as it is quantised.
fn attention_f64(
    view: &KvView,
    layer: usize,
    row: &AttentionRow<'_>,
    q: &[f32],
    kv_head: usize,
    params: &AttentionParams,
) -> Vec<f64> {
    let dim = params.head_dim;
    let size = view.shape().block_size as usize;
    let at = |is_k, p: usize, d| {
        let place = (row.table[p / size], p % size);
        f64::from(reference::Slot::new(view, layer, place, kv_head, is_k).value(d))
    };
    let q = reference::Query::new(view.shape().dtype, q, params.scale).values();
    let position = row.position as usize;
    let start = params
        .window
        .map_or(0, |w| (position + 1).saturating_sub(w as usize));
    let scores: Vec<f64> = (start..=position)
        .map(|p| {
            let dot: f64 = (0..dim).map(|d| f64::from(q[d]) * at(true, p, d)).sum();
            params
                .soft_cap
                .map_or(dot, |cap| f64::from(cap) * (dot / f64::from(cap)).tanh())
        })
        .collect();
    let m = scores.iter().fold(f64::NEG_INFINITY, |a, b| a.max(*b));
    let weights: Vec<f64> = scores.iter().map(|s| (s - m).exp()).collect();
    let sum: f64 = weights.iter().sum();
    (0..dim)
        .map(|d| {
            weights
                .iter()
                .zip(start..)
                .map(|(w, p)| w * at(false, p, d))
                .sum::<f64>()
                / sum
        })
        .collect()
}

/// Other threads and transfers read and write other slots of a block meanwhile.
#[test]
fn a_slot_is_written_without_touching_a_byte_of_another() {
    let mut random = Random::new(11);
    for dtype in DTYPES {
        for dim in [16usize, 48, 64, 80, 128] {
            let shape = KvShape {
                blocks: 1,
                block_size: 32,
                layers: 1,
                kv_heads: 2,
                head_dim: dim as u32,
                dtype,
            };
            let mut pool = Pool::new(shape);
            let view = pool.view();
            let bytes = || -> Vec<u8> {
                let first: *const u8 = pool.memory.as_ptr().cast();
                // SAFETY: inside the pool's memory, which nobody writes at this time.
                (0..shape.block_bytes())
                    .map(|at| unsafe { first.add(at).read() })
                    .collect()
            };
            let mut owner = vec![None; shape.block_bytes()];
            let mut contents: Option<Vec<u8>> = None;
            for kernels in all_kernels() {
                let mut random = Random::new(12);
                for slot in 0..shape.block_size {
                    // Twice with unlike values, so that every byte of the slot changes at least once.
                    for _ in 0..2 {
                        let before = bytes();
                        let [k, v] = [0; 2].map(|_| random.floats(2 * dim));
                        kernels.write_kv(&view, 0, &[(0, slot)], &k, &v, 2 * dim);
                        for (at, (old, new)) in before.iter().zip(bytes()).enumerate() {
                            if *old != new {
                                let owner = *owner[at].get_or_insert(slot);
                                assert_eq!(owner, slot, "{dtype:?} x{dim}, byte {at}");
                            }
                        }
                    }
                }
                let contents = contents.get_or_insert_with(bytes);
                assert_eq!(
                    *contents,
                    bytes(),
                    "{dtype:?} x{dim}, {}",
                    describe(&kernels)
                );
            }
            // Poison in one value stays in its slot, and shows.
            let mut k = random.floats(2 * dim);
            k[3] = f32::NAN;
            all_kernels()[0].write_kv(&view, 0, &[(0, 5)], &k, &k, 2 * dim);
            for is_k in [true, false] {
                let slot = |slot| reference::Slot::new(&view, 0, (0, slot), 0, is_k);
                assert!(slot(5).value(3).is_nan());
                assert!((0..dim).all(|d| slot(4).value(d).is_finite()));
                assert!((0..dim).all(|d| slot(6).value(d).is_finite()));
            }
        }
    }
}

/// Groups of one value, of values an f16 cannot tell apart, and of a single spike.
#[test]
fn groups_without_a_range_are_stored_as_they_are() {
    let dim = 64;
    for dtype in [KvDtype::Int8, KvDtype::Int4] {
        let shape = KvShape {
            blocks: 1,
            block_size: 16,
            layers: 1,
            kv_heads: 1,
            head_dim: dim as u32,
            dtype,
        };
        let mut pool = Pool::new(shape);
        let view = pool.view();
        let mut spike = vec![0.0; dim];
        spike[17] = -8.0;
        let rows = [vec![0.0; dim], vec![0.5; dim], vec![1e-9; dim], spike];
        for kernels in all_kernels() {
            for (slot, row) in rows.iter().enumerate() {
                kernels.write_kv(&view, 0, &[(0, slot as u32)], row, row, dim);
                for is_k in [true, false] {
                    let stored = reference::Slot::new(&view, 0, (0, slot), 0, is_k);
                    for (d, x) in row.iter().enumerate() {
                        let error = (stored.value(d) - x).abs();
                        assert!(error < 4e-3, "{dtype:?} row {slot} d {d}: {error}");
                    }
                }
            }
        }
    }
}

/// One long prompt: many items, row blocks that straddle tiles, and windows that start inside one.
#[test]
fn prefill_in_one_chunk_has_the_bits_of_prefill_in_several() {
    let mut random = Random::new(5);
    let (dim, kv_heads, group, tokens) = (64, 2, 3, KV_TILE + 77);
    let heads = kv_heads * group;
    for dtype in [KvDtype::F16, KvDtype::Int8, KvDtype::Int4] {
        let shape = KvShape {
            blocks: tokens.div_ceil(32) as u32,
            block_size: 32,
            layers: 1,
            kv_heads: kv_heads as u32,
            head_dim: dim as u32,
            dtype,
        };
        let mut pool = Pool::new(shape);
        let view = pool.view();
        let table: Vec<u32> = (0..shape.blocks).rev().collect();
        let stride = (heads + 2 * kv_heads) * dim;
        let qkv = random.floats(tokens * stride);
        let slots: Vec<(u32, u32)> = (0..tokens)
            .map(|p| (table[p / 32], (p % 32) as u32))
            .collect();
        let rows: Vec<AttentionRow<'_>> = (0..tokens as u32)
            .map(|position| AttentionRow {
                table: &table,
                position,
            })
            .collect();
        for window in [None, Some(200)] {
            let params = AttentionParams {
                heads,
                kv_heads,
                head_dim: dim,
                q_row_stride: stride,
                scale: 0.125,
                window,
                soft_cap: None,
            };
            let mut expected: Option<Vec<f32>> = None;
            for kernels in all_kernels() {
                let mut scratch = Scratch::new();
                kernels.write_kv(
                    &view,
                    0,
                    &slots,
                    &qkv[heads * dim..],
                    &qkv[(heads + kv_heads) * dim..],
                    stride,
                );
                for chunk in [tokens, 33] {
                    let mut out = vec![f32::NAN; tokens * heads * dim];
                    for first in (0..tokens).step_by(chunk) {
                        let count = chunk.min(tokens - first);
                        kernels.attention(
                            &view,
                            0,
                            &rows[first..first + count],
                            &qkv[first * stride..],
                            &mut out[first * heads * dim..(first + count) * heads * dim],
                            &params,
                            &mut scratch,
                        );
                    }
                    match &expected {
                        None => expected = Some(out),
                        Some(e) => assert_same_bits(
                            &out,
                            e,
                            &format!("{} chunk {chunk}", describe(&kernels)),
                        ),
                    }
                }
            }
        }
    }
}
