//! Attention by KV format: prefill, bound by arithmetic, and decode, bound by reading K and V.

use baton_kernels::{AttentionParams, AttentionRow, HugePages, KvDtype, KvShape, KvView};

use crate::suite::{Suite, Work};

const BLOCK_SIZE: usize = 32;
/// K and V that decode walks, layer after layer, so that they come from memory as in a step.
const DECODE_BYTES: usize = 128 << 20;

/// Sequences at one depth in decode, or the last rows of one sequence in prefill.
#[derive(Clone, Copy)]
struct Call {
    sequences: usize,
    rows: usize,
    depth: usize,
}

pub fn bench(suite: &mut Suite) {
    let decode = |sequences, depth| Call {
        sequences,
        rows: 1,
        depth,
    };
    let prefill = |rows, depth| Call {
        sequences: 1,
        rows,
        depth,
    };
    let calls = [
        decode(1, 2048),
        decode(16, 512),
        decode(16, 2048),
        prefill(512, 512),
        prefill(256, 2048),
    ];
    for dtype in [
        KvDtype::F32,
        KvDtype::F16,
        KvDtype::BF16,
        KvDtype::Int8,
        KvDtype::Int4,
    ] {
        for (heads, kv_heads, head_dim) in [(9, 3, 64), (32, 8, 64), (4, 1, 256)] {
            for call in calls {
                let params = AttentionParams {
                    heads,
                    kv_heads,
                    head_dim,
                    q_row_stride: heads * head_dim,
                    scale: 0.125,
                    window: None,
                    soft_cap: None,
                };
                one(suite, dtype, &params, call);
            }
        }
    }
}

fn one(suite: &mut Suite, dtype: KvDtype, params: &AttentionParams, call: Call) {
    let Call {
        sequences,
        rows,
        depth,
    } = call;
    let (heads, kv_heads, head_dim) = (params.heads, params.kv_heads, params.head_dim);
    let per_sequence = depth.div_ceil(BLOCK_SIZE);
    let blocks = sequences * per_sequence;
    let layer_bytes = shape(dtype, kv_heads, head_dim, blocks, 1).block_bytes() * blocks;
    let layers = if rows > 1 {
        1
    } else {
        (DECODE_BYTES / layer_bytes).clamp(4, 512)
    };
    let pool = pool(dtype, kv_heads, head_dim, blocks, layers);
    let view = pool.view();
    // Blocks of sequences that grew beside each other.
    let tables: Vec<Vec<u32>> = (0..sequences)
        .map(|s| {
            (0..per_sequence)
                .map(|i| (i * sequences + s) as u32)
                .collect()
        })
        .collect();
    let queries: Vec<AttentionRow<'_>> = tables
        .iter()
        .flat_map(|table| {
            (depth - rows..depth).map(move |p| AttentionRow {
                table,
                position: p as u32,
            })
        })
        .collect();
    let width = heads * head_dim;
    let q: Vec<f32> = (0..queries.len() * width)
        .map(|i| (i % 13) as f32 * 0.01)
        .collect();
    let mut out = vec![0.0; q.len()];
    let seen: usize = queries.iter().map(|row| row.position as usize + 1).sum();
    // A score and a sum; over codes the sum's weights have two planes of codes, which doubles it.
    let half = 2.0 * (seen * width) as f64;
    let codes = matches!(dtype, KvDtype::Int8 | KvDtype::Int4);
    let work = Work {
        int8_ops: if codes { 3.0 * half } else { 0.0 },
        f32_ops: if codes { 0.0 } else { 2.0 * half },
        bytes: layer_bytes as f64,
        working_set: (layers * layer_bytes) as f64,
    };
    let name = format!(
        "{heads}:{kv_heads} x{head_dim}/{} {} at {depth}",
        if rows > 1 { "prefill" } else { "decode" },
        sequences * rows,
    );
    let group = format!("attention/{}", format!("{dtype:?}").to_lowercase());
    let mut layer = 0;
    suite.bench(&group, &name, work, |kernels, scratch| {
        kernels.attention(&view, layer, &queries, &q, &mut out, params, scratch);
        layer = (layer + 1) % layers;
    });
}

fn shape(
    dtype: KvDtype,
    kv_heads: usize,
    head_dim: usize,
    blocks: usize,
    layers: usize,
) -> KvShape {
    KvShape {
        blocks: blocks as u32,
        block_size: BLOCK_SIZE as u32,
        layers: layers as u32,
        kv_heads: kv_heads as u32,
        head_dim: head_dim as u32,
        dtype,
    }
}

/// K and V on huge pages, as an engine has them.
pub struct Pool {
    memory: HugePages,
    shape: KvShape,
}

impl Pool {
    pub fn view(&self) -> KvView {
        // SAFETY: the memory has the size of the shape, lives as long as `self`, and is used through views only.
        unsafe { KvView::new(self.memory.start().as_ptr(), self.shape) }.expect("a valid shape")
    }
}

/// A pool filled with small finite floats and scales.
pub fn pool(
    dtype: KvDtype,
    kv_heads: usize,
    head_dim: usize,
    blocks: usize,
    layers: usize,
) -> Pool {
    const SMALL: u64 = 0x2c00_2800_2c00_2400;
    let shape = shape(dtype, kv_heads, head_dim, blocks, layers);
    let bytes = blocks * shape.block_bytes();
    let memory = HugePages::map(bytes.next_multiple_of(8)).expect("memory");
    let words = memory.start().as_ptr().cast::<u64>();
    for i in 0..bytes.div_ceil(8) {
        // SAFETY: the mapping has room for these words, is aligned to pages, and nobody else uses it yet.
        unsafe { words.add(i).write(SMALL) };
    }
    Pool { memory, shape }
}
