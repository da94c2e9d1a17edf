//! The kernels between the matrix products: norms, rotation, activation, residual sums.

use crate::rope::rotate_head;
use crate::{Kernels, RopePairing, RopeTable, reference};

/// What is applied to the gate of a gated feed-forward layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    Silu,
    /// The tanh form of GELU.
    GeluTanh,
}

impl Kernels {
    /// `out[t][i] = x[t][i] / rms(x[t]) * weight[i]`, rows of `weight.len()`. The weight already includes any `+ 1`.
    pub fn rms_norm(&self, x: &[f32], weight: &[f32], eps: f32, tokens: usize, out: &mut [f32]) {
        let width = weight.len();
        assert_eq!(
            (x.len(), out.len()),
            (tokens * width, tokens * width),
            "rms_norm: [tokens, width]"
        );
        for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
            reference::rms_norm(x, weight, eps, out);
        }
    }

    /// RMS normalisation of each head, in place (QK-norm). `x`: `[tokens, heads, head_dim]` with `row_stride`.
    #[allow(clippy::too_many_arguments)]
    pub fn head_norm(
        &self,
        x: &mut [f32],
        row_stride: usize,
        heads: usize,
        head_dim: usize,
        tokens: usize,
        weight: &[f32],
        eps: f32,
    ) {
        assert_eq!(weight.len(), head_dim, "head_norm: weight");
        for t in 0..tokens {
            for head in x[t * row_stride..][..heads * head_dim].chunks_exact_mut(head_dim) {
                let copy = head.to_vec();
                reference::rms_norm(&copy, weight, eps, head);
            }
        }
    }

    /// `x += y`.
    pub fn add_assign(&self, x: &mut [f32], y: &[f32]) {
        assert_eq!(x.len(), y.len(), "add_assign");
        for (x, y) in x.iter_mut().zip(y) {
            *x += y;
        }
    }

    /// `out[t][i] = act(gate) * up`, each row of `gate_up` being all gates, then all ups.
    pub fn gated_activation(
        &self,
        act: Activation,
        gate_up: &[f32],
        tokens: usize,
        out: &mut [f32],
    ) {
        assert_eq!(
            gate_up.len(),
            2 * out.len(),
            "gated_activation: gate_up is twice the output"
        );
        if tokens == 0 {
            return;
        }
        let width = out.len() / tokens;
        for (row, out) in gate_up
            .chunks_exact(2 * width)
            .zip(out.chunks_exact_mut(width))
        {
            let (gate, up) = row.split_at(width);
            for ((gate, up), out) in gate.iter().zip(up).zip(out) {
                *out = reference::activate(act, *gate) * up;
            }
        }
    }

    /// Rotates in place. `x`: `[tokens, heads, head_dim]` with `row_stride`; one position per token. Dimensions of a
    /// head behind `table.dims()` pass through.
    #[allow(clippy::too_many_arguments)]
    pub fn rope(
        &self,
        x: &mut [f32],
        row_stride: usize,
        heads: usize,
        head_dim: usize,
        positions: &[u32],
        table: &RopeTable,
        pairing: RopePairing,
    ) {
        assert!(
            table.dims() <= head_dim,
            "rope rotates `{}` of `{head_dim}` dimensions",
            table.dims()
        );
        for (t, position) in positions.iter().enumerate() {
            let (cos, sin) = table.at(*position);
            for head in x[t * row_stride..][..heads * head_dim].chunks_exact_mut(head_dim) {
                rotate_head(head, cos, sin, pairing);
            }
        }
    }

    /// `x = cap * tanh(x / cap)`.
    pub fn soft_cap(&self, x: &mut [f32], cap: f32) {
        for x in x {
            *x = reference::soft_cap(*x, cap);
        }
    }
}
