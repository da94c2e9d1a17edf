//! The operations a decoder is written over.
//!
//! A backend owns one device: its buffers are opaque to the decoder, its matrices
//! and vectors come in the form its weights were loaded in. The set is as small as
//! one transformer decoder needs. Each operation's result for a row must not depend
//! on the other rows of the call; everything the engine promises about batching and
//! chunking rests on it.
//!
//! Shapes are the decoder's duty: buffers are allocated once for the largest step,
//! and `rows` says how many of a buffer's rows a call concerns. Operations do not
//! fail; a device that can fail reports it when the step is waited for.

mod cpu;

use baton_proto::TokenId;

use crate::model::config::{GateActivation, Pairing};
use crate::step_work::MatrixCost;

pub use cpu::CpuBackend;

/// How queries, keys and values stand in one fused row: all query heads, then all
/// key heads, then all value heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadShape {
    pub heads: usize,
    pub kv_heads: usize,
    /// Dimensions of a head as stored.
    pub head_dim: usize,
    /// Dimensions a head's norm covers: the model's own head size.
    pub norm_dim: usize,
}

impl HeadShape {
    /// Width of a fused row.
    pub fn qkv_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Column of the first key, which is also the width of the queries.
    pub fn k_at(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Column of the first value.
    pub fn v_at(&self) -> usize {
        (self.heads + self.kv_heads) * self.head_dim
    }
}

/// One layer's place in the KV pools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayer {
    pub group: usize,
    /// Index within the group, not within the model.
    pub index: usize,
}

/// Where one row's K and V go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvSlot {
    pub block: u32,
    /// Position within the block.
    pub slot: u32,
}

/// One query: its position, and its sequence's block table as a range of
/// [`Queries::tables`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Query {
    pub position: u32,
    pub table_start: u32,
    pub table_len: u32,
}

/// The queries of one attention call and the block tables they read through.
#[derive(Clone, Copy, Debug)]
pub struct Queries<'a> {
    /// Consecutive positions of one sequence follow each other.
    pub rows: &'a [Query],
    /// Tables of all sequences, one behind the other.
    pub tables: &'a [u32],
}

/// What is the same for all queries of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    pub heads: HeadShape,
    pub scale: f32,
    /// Position `p` sees positions `> p - window`.
    pub window: Option<u32>,
    pub soft_cap: Option<f32>,
}

/// What a product reads: `[rows][inputs]`, as it stands or computed on the way.
pub enum Input<'a, B: Backend + ?Sized> {
    Rows(&'a B::Buffer),
    /// `x[t] / rms(x[t]) * weight`.
    Normed {
        x: &'a B::Buffer,
        weight: &'a B::Vector,
        eps: f32,
    },
    /// `act(gate) * up`, each row being all gates, then all ups.
    Gated {
        gate_up: &'a B::Buffer,
        activation: GateActivation,
    },
}

/// What becomes of a product: `[rows][outputs]`.
pub enum Output<'a, B: Backend + ?Sized> {
    Set(&'a mut B::Buffer),
    Add(&'a mut B::Buffer),
}

/// One device's operations.
pub trait Backend: Send {
    type Matrix;
    type Vector;
    /// A table of rotation angles.
    type Rope;
    /// Rows of f32 on the device.
    type Buffer: Send;

    /// A buffer of `rows` rows. Called when an executor is made, never in a step.
    fn allocate(&self, rows: usize, width: usize) -> Self::Buffer;

    /// `out[t] = table[tokens[t]] * scale`.
    fn embed(
        &mut self,
        table: &Self::Matrix,
        tokens: &[TokenId],
        scale: f32,
        out: &mut Self::Buffer,
    );

    /// `y[t] = matrix * input[t] + bias`, then `out = y` or `out += y`.
    fn linear(
        &mut self,
        matrix: &Self::Matrix,
        bias: Option<&Self::Vector>,
        input: Input<'_, Self>,
        rows: usize,
        output: Output<'_, Self>,
    );

    /// `x[t] += y[t] / rms(y[t]) * weight`.
    fn add_normed(
        &mut self,
        x: &mut Self::Buffer,
        y: &Self::Buffer,
        weight: &Self::Vector,
        eps: f32,
        rows: usize,
    );

    /// RMS-normalises every query head by `q_weight` and every key head by `k_weight`.
    fn qk_norm(
        &mut self,
        shape: &HeadShape,
        q_weight: &Self::Vector,
        k_weight: &Self::Vector,
        eps: f32,
        rows: usize,
        qkv: &mut Self::Buffer,
    );

    /// Rotates queries and keys by their positions, then stores keys and values.
    #[allow(clippy::too_many_arguments)]
    fn rope_write_kv(
        &mut self,
        layer: KvLayer,
        shape: &HeadShape,
        rope: &Self::Rope,
        pairing: Pairing,
        positions: &[u32],
        slots: &[KvSlot],
        qkv: &mut Self::Buffer,
    );

    /// `out[t]` = attention of the query heads of `qkv[t]` over the stored K and V.
    fn attention(
        &mut self,
        layer: KvLayer,
        shape: &AttentionShape,
        queries: Queries<'_>,
        qkv: &Self::Buffer,
        out: &mut Self::Buffer,
    );

    /// `out[i] = x[rows[i]]`.
    fn gather_rows(&mut self, x: &Self::Buffer, rows: &[u32], out: &mut Self::Buffer);

    /// `out[t] = soft_cap(matrix * input[t])`, read back to the host. `out: [rows][vocab]`.
    fn logits(
        &mut self,
        matrix: &Self::Matrix,
        input: Input<'_, Self>,
        rows: usize,
        soft_cap: Option<f32>,
        out: &mut [f32],
    );

    /// The lowest id of the highest of the first `known` values of each row that
    /// [`logits`](Self::logits) would give, none where `known` is 0; `out` is replaced.
    /// Where one of those values is not finite, it returns false instead.
    fn best(
        &mut self,
        matrix: &Self::Matrix,
        input: Input<'_, Self>,
        rows: usize,
        soft_cap: Option<f32>,
        known: u32,
        out: &mut Vec<Option<TokenId>>,
    ) -> bool;

    /// Copies whole blocks within a group's pool: (from, to), all in range.
    fn copy_blocks(&mut self, group: usize, pairs: &[(u32, u32)]);

    /// What the matrix costs a step.
    fn matrix_cost(&self, matrix: &Self::Matrix) -> MatrixCost;
}
