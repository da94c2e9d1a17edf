//! Paged attention and the writing of K and V.

use baton_kernels::{
    AttentionParams, AttentionRow, KV_TILE, KvDtype, KvShape, KvView, Scratch, reference,
};
use half::{bf16, f16};
use proptest::prelude::*;

use crate::{Random, all_kernels, assert_same_bits, describe};

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
        prop::sample::select(vec![KvDtype::F32, KvDtype::F16, KvDtype::BF16]),
        prop::sample::select(vec![16usize, 48, 64, 80, 128]),
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

fn round(dtype: KvDtype, x: f32) -> f32 {
    match dtype {
        KvDtype::F32 => x,
        KvDtype::F16 => f16::from_f32(x).to_f32(),
        KvDtype::BF16 => bf16::from_f32(x).to_f32(),
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

    let width = case.kv_heads * dim;
    let mut tables = Vec::new();
    let mut stored = Vec::new();
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
        let writer = &all_kernels()[random.below(2)];
        writer.write_kv(
            &view,
            layer,
            &slots,
            &k[first_seen * width..],
            &v[first_seen * width..],
            width,
        );
        table[..first_seen / size].fill(u32::MAX);
        tables.push(table);
        stored.push((k, v));
    }
    let rows: Vec<(usize, AttentionRow<'_>)> = case
        .sequences
        .iter()
        .enumerate()
        .flat_map(|(s, (before, rows))| (*before..before + rows).map(move |p| (s, p)))
        .map(|(s, p)| {
            (
                s,
                AttentionRow {
                    table: &tables[s],
                    position: p as u32,
                },
            )
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
    for (t, (s, row)) in rows.iter().enumerate() {
        for head in 0..heads {
            let q = &q[t * stride + head * dim..][..dim];
            let out = &mut expected[(t * heads + head) * dim..][..dim];
            let kv_head = head / case.group;
            reference::attention_head(&view, layer, row, q, kv_head, &params, out);
            let (k, v) = &stored[*s];
            let exact = attention_f64(case, row.position as usize, q, k, v, kv_head, &params);
            for (d, (out, exact)) in out.iter().zip(exact).enumerate() {
                // Weights sum to 1 and |v| is below 4; scores of size 10 lose about 10 epsilon before exp.
                let error = (f64::from(*out) - exact).abs();
                assert!(
                    error < 4.0 * 64.0 * f64::from(f32::EPSILON),
                    "row {t} head {head} d {d}: off by {error}"
                );
            }
        }
    }
    let rows: Vec<AttentionRow<'_>> = rows.into_iter().map(|(_, row)| row).collect();
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

fn attention_f64(
    case: &Case,
    position: usize,
    q: &[f32],
    k: &[f32],
    v: &[f32],
    kv_head: usize,
    params: &AttentionParams,
) -> Vec<f64> {
    let dim = case.head_dim;
    let at = |x: &[f32], p: usize, d: usize| {
        f64::from(round(
            case.dtype,
            x[p * case.kv_heads * dim + kv_head * dim + d],
        ))
    };
    let start = params
        .window
        .map_or(0, |w| (position + 1).saturating_sub(w as usize));
    let scores: Vec<f64> = (start..=position)
        .map(|p| {
            let dot: f64 = (0..dim).map(|d| f64::from(q[d]) * at(k, p, d)).sum();
            let s = dot * f64::from(params.scale);
            params
                .soft_cap
                .map_or(s, |cap| f64::from(cap) * (s / f64::from(cap)).tanh())
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
                .map(|(w, p)| w * at(v, p, d))
                .sum::<f64>()
                / sum
        })
        .collect()
}

/// One long prompt: many items, row blocks that straddle tiles, and windows that start inside one.
#[test]
fn prefill_in_one_chunk_has_the_bits_of_prefill_in_several() {
    let mut random = Random::new(5);
    let (dim, kv_heads, group, tokens) = (64, 2, 3, KV_TILE + 77);
    let heads = kv_heads * group;
    let shape = KvShape {
        blocks: tokens.div_ceil(32) as u32,
        block_size: 32,
        layers: 1,
        kv_heads: kv_heads as u32,
        head_dim: dim as u32,
        dtype: KvDtype::F16,
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
                    Some(e) => {
                        assert_same_bits(&out, e, &format!("{} chunk {chunk}", describe(&kernels)))
                    }
                }
            }
        }
    }
}
