//! [`Backend`] on the CPU: host memory and the kernels.
//!
//! It adds nothing to the arithmetic; it slices buffers to the rows of a call and
//! keeps the working memory, so that a step in the steady state allocates nothing.

use std::sync::Arc;

use baton_kernels::{
    AttentionParams, AttentionRow, Kernels, KvView, PackedMatrix, RopeTable, Scratch,
};
use baton_proto::TokenId;

use super::{AttentionShape, Backend, HeadShape, Input, KvLayer, KvSlot, Output, Queries};
use crate::kv::KvMemory;
use crate::model::config::Pairing;
use crate::step_work::MatrixCost;

/// Rows of f32 in host memory.
#[derive(Debug)]
pub struct Rows {
    values: Vec<f32>,
    width: usize,
}

impl Rows {
    fn get(&self, rows: usize) -> &[f32] {
        &self.values[..rows * self.width]
    }

    fn get_mut(&mut self, rows: usize) -> &mut [f32] {
        &mut self.values[..rows * self.width]
    }
}

/// The CPU's kernels over one engine's KV memory.
pub struct CpuBackend {
    kernels: Kernels,
    scratch: Scratch,
    memory: Arc<KvMemory>,
    /// Empty between calls; only its capacity is kept.
    attention_rows: Vec<AttentionRow<'static>>,
    /// As `attention_rows`.
    slots: Vec<(u32, u32)>,
}

impl CpuBackend {
    /// A backend that stores K and V in `memory`.
    pub fn new(kernels: Kernels, memory: Arc<KvMemory>) -> Self {
        Self {
            kernels,
            scratch: Scratch::new(),
            memory,
            attention_rows: Vec::new(),
            slots: Vec::new(),
        }
    }

    fn view(&self, group: usize) -> KvView {
        self.memory.view(group)
    }
}

impl<'a> Input<'a, CpuBackend> {
    fn of_rows(self, rows: usize) -> baton_kernels::Input<'a> {
        match self {
            Input::Rows(x) => baton_kernels::Input::Rows(x.get(rows)),
            Input::Normed { x, weight, eps } => baton_kernels::Input::Normed {
                x: x.get(rows),
                weight,
                eps,
            },
            Input::Gated {
                gate_up,
                activation,
            } => baton_kernels::Input::Gated {
                gate_up: gate_up.get(rows),
                act: activation.into(),
            },
        }
    }
}

/// An empty vector of another lifetime in the same memory.
fn reuse<'a>(rows: Vec<AttentionRow<'_>>) -> Vec<AttentionRow<'a>> {
    let mut rows = rows;
    rows.clear();
    // Collecting in place: no element is ever mapped, the allocation stays.
    rows.into_iter()
        .map(|_| AttentionRow {
            table: &[],
            position: 0,
        })
        .collect()
}

impl Backend for CpuBackend {
    type Matrix = PackedMatrix;
    type Vector = Vec<f32>;
    type Rope = RopeTable;
    type Buffer = Rows;

    fn allocate(&self, rows: usize, width: usize) -> Rows {
        Rows {
            values: vec![0.0; rows * width],
            width,
        }
    }

    fn embed(&mut self, table: &PackedMatrix, tokens: &[TokenId], scale: f32, out: &mut Rows) {
        let width = out.width;
        for (token, row) in tokens.iter().zip(out.values.chunks_exact_mut(width)) {
            table.dequantize_row(*token as usize, row);
            if scale != 1.0 {
                for value in row {
                    *value *= scale;
                }
            }
        }
    }

    fn linear(
        &mut self,
        matrix: &PackedMatrix,
        bias: Option<&Vec<f32>>,
        input: Input<'_, Self>,
        rows: usize,
        output: Output<'_, Self>,
    ) {
        let output = match output {
            Output::Set(out) => baton_kernels::Output::Set(out.get_mut(rows)),
            Output::Add(out) => baton_kernels::Output::Add(out.get_mut(rows)),
        };
        self.kernels.product(
            matrix,
            input.of_rows(rows),
            rows,
            bias.map(Vec::as_slice),
            output,
            &mut self.scratch,
        );
    }

    fn add_normed(&mut self, x: &mut Rows, y: &Rows, weight: &Vec<f32>, eps: f32, rows: usize) {
        self.kernels
            .add_normed(x.get_mut(rows), y.get(rows), weight, eps, rows);
    }

    fn qk_norm(
        &mut self,
        shape: &HeadShape,
        q_weight: &Vec<f32>,
        k_weight: &Vec<f32>,
        eps: f32,
        rows: usize,
        qkv: &mut Rows,
    ) {
        let stride = qkv.width;
        let (head_dim, norm_dim) = (shape.head_dim, shape.norm_dim);
        let parts = [
            (0, shape.heads, q_weight),
            (shape.k_at(), shape.kv_heads, k_weight),
        ];
        let values = qkv.get_mut(rows);
        for (at, heads, weight) in parts {
            if norm_dim == head_dim {
                let heads_of_rows = &mut values[at..];
                self.kernels
                    .head_norm(heads_of_rows, stride, heads, head_dim, rows, weight, eps);
                continue;
            }
            // A padded head is normalised over its own dimensions only: to the kernel,
            // each head is a row of one shorter head.
            for row in values.chunks_exact_mut(stride) {
                let row = &mut row[at..at + heads * head_dim];
                self.kernels
                    .head_norm(row, head_dim, 1, norm_dim, heads, weight, eps);
            }
        }
    }

    fn rope_write_kv(
        &mut self,
        layer: KvLayer,
        shape: &HeadShape,
        rope: &RopeTable,
        pairing: Pairing,
        positions: &[u32],
        slots: &[KvSlot],
        qkv: &mut Rows,
    ) {
        let stride = qkv.width;
        let pairing = pairing.into();
        let values = qkv.get_mut(positions.len());
        let (heads, kv_heads, head_dim) = (shape.heads, shape.kv_heads, shape.head_dim);
        self.kernels
            .rope(values, stride, heads, head_dim, positions, rope, pairing);
        let keys = &mut values[shape.k_at()..];
        self.kernels
            .rope(keys, stride, kv_heads, head_dim, positions, rope, pairing);
        self.slots.clear();
        self.slots
            .extend(slots.iter().map(|slot| (slot.block, slot.slot)));
        self.kernels.write_kv(
            &self.memory.view(layer.group),
            layer.index,
            &self.slots,
            &values[shape.k_at()..],
            &values[shape.v_at()..],
            stride,
        );
    }

    fn attention(
        &mut self,
        layer: KvLayer,
        shape: &AttentionShape,
        queries: Queries<'_>,
        qkv: &Rows,
        out: &mut Rows,
    ) {
        let count = queries.rows.len();
        let mut rows = reuse(std::mem::take(&mut self.attention_rows));
        rows.extend(queries.rows.iter().map(|query| AttentionRow {
            table: &queries.tables[query.table_start as usize..][..query.table_len as usize],
            position: query.position,
        }));
        let params = AttentionParams {
            heads: shape.heads.heads,
            kv_heads: shape.heads.kv_heads,
            head_dim: shape.heads.head_dim,
            q_row_stride: qkv.width,
            scale: shape.scale,
            window: shape.window,
            soft_cap: shape.soft_cap,
        };
        let view = self.view(layer.group);
        self.kernels.attention(
            &view,
            layer.index,
            &rows,
            qkv.get(count),
            out.get_mut(count),
            &params,
            &mut self.scratch,
        );
        self.attention_rows = reuse(rows);
    }

    fn gather_rows(&mut self, x: &Rows, rows: &[u32], out: &mut Rows) {
        let width = x.width;
        for (row, to) in rows.iter().zip(out.values.chunks_exact_mut(width)) {
            to.copy_from_slice(&x.values[*row as usize * width..][..width]);
        }
    }

    fn logits(
        &mut self,
        matrix: &PackedMatrix,
        input: Input<'_, Self>,
        rows: usize,
        soft_cap: Option<f32>,
        out: &mut [f32],
    ) {
        self.kernels.product(
            matrix,
            input.of_rows(rows),
            rows,
            None,
            baton_kernels::Output::Set(out),
            &mut self.scratch,
        );
        if let Some(cap) = soft_cap {
            self.kernels.soft_cap(out, cap);
        }
    }

    fn best(
        &mut self,
        matrix: &PackedMatrix,
        input: Input<'_, Self>,
        rows: usize,
        soft_cap: Option<f32>,
        known: u32,
        out: &mut Vec<Option<TokenId>>,
    ) -> bool {
        let (input, known) = (input.of_rows(rows), known as usize);
        self.kernels
            .arg_max(matrix, input, rows, soft_cap, known, out, &mut self.scratch)
    }

    #[allow(unsafe_code)]
    fn copy_blocks(&mut self, group: usize, pairs: &[(u32, u32)]) {
        let bytes = self.memory.layout().block_bytes(group);
        let blocks = self.memory.blocks(group);
        let base = self.memory.region(group).ptr;
        for (from, to) in pairs {
            assert!(
                *from < blocks && *to < blocks,
                "copy of block {from} to {to} of {blocks}"
            );
            if from == to {
                continue;
            }
            // SAFETY: both blocks lie in the region (asserted above) and are different,
            // so they do not overlap; the region lives as long as `self.memory`. That
            // nobody writes either block meanwhile is the block pool's part: the source
            // is shared and read-only, the target is held by one sequence alone.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    base.as_ptr().add(*from as usize * bytes),
                    base.as_ptr().add(*to as usize * bytes),
                    bytes,
                );
            }
        }
    }

    fn matrix_cost(&self, matrix: &PackedMatrix) -> MatrixCost {
        MatrixCost::of(matrix)
    }
}
