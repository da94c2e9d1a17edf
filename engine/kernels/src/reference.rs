//! The arithmetic contract, written down the plain way.
//!
//! One output at a time, straight from the file's blocks and the KV pool's layout, without tiles, threads or SIMD. The
//! tests hold every kernel to these bits. Nothing in the engine calls it.

use half::{bf16, f16};

use crate::attention::codes::{QUERY_MAX, groups};
use crate::attention::weights::WEIGHT_MAX;
use crate::format::{DecodedBlock, WeightType, decode_block, read_floats};
use crate::kv::{GROUP_HEADER, KV_GROUP, KV_SPAN, KvDtype, KvShape, KvView};
use crate::math::{self, LANES, tree_max, tree_sum};
use crate::{Activation, AttentionParams, AttentionRow, KV_TILE, MatrixSource};

/// `exp` of one value; see [`math`].
pub fn exp(x: f32) -> f32 {
    let x = x.clamp(math::EXP_MIN, math::EXP_MAX);
    let shifted = x.mul_add(math::LOG2_E, math::ROUND_MAGIC);
    let n = shifted.to_bits() as i32 - math::ROUND_MAGIC.to_bits() as i32;
    let n_float = shifted - math::ROUND_MAGIC;
    let r = n_float.mul_add(-math::LN2_LOW, n_float.mul_add(-math::LN2_HIGH, x));
    let mut p = math::EXP_POLY[0];
    for c in &math::EXP_POLY[1..] {
        p = p.mul_add(r, *c);
    }
    let p = p.mul_add(r * r, r) + 1.0;
    let half = n >> 1;
    p * pow2(half) * pow2(n - half)
}

/// `2^x` of one value; see [`math`].
pub fn exp2(x: f32) -> f32 {
    let x = if math::EXP2_MIN > x {
        math::EXP2_MIN
    } else {
        x
    };
    let shifted = x + math::EXP2_MAGIC;
    let n = shifted - math::EXP2_MAGIC;
    let r = x - n;
    let p = math::EXP2_POLY.into_iter().reduce(|p, c| p.mul_add(r, c));
    p.map_or(x, |p| p * pow2(n as i32))
}

fn pow2(n: i32) -> f32 {
    f32::from_bits(((n + 127) << 23) as u32)
}

/// `tanh` of one value; see [`math`].
pub fn tanh(x: f32) -> f32 {
    let x = if -math::TANH_MAX > x {
        -math::TANH_MAX
    } else {
        x
    };
    let x = if math::TANH_MAX < x {
        math::TANH_MAX
    } else {
        x
    };
    let x2 = x * x;
    let mut p = math::TANH_P[0];
    for c in &math::TANH_P[1..] {
        p = p.mul_add(x2, *c);
    }
    let mut q = math::TANH_Q[0];
    for c in &math::TANH_Q[1..] {
        q = q.mul_add(x2, *c);
    }
    p * x / q
}

/// Activations of one row: codes and, per group of 32, the scale and the codes' sum.
#[derive(Debug, Default, PartialEq)]
pub struct QuantizedRow {
    pub codes: Vec<i8>,
    pub scales: Vec<f32>,
}

/// Quantises one row of a multiple of 32 values.
pub fn quantize(x: &[f32]) -> QuantizedRow {
    let mut row = QuantizedRow::default();
    for group in x.chunks_exact(32) {
        // On the bits, so that a NaN is the largest and makes the group's scale NaN.
        let largest = f32::from_bits(group.iter().map(|x| x.abs().to_bits()).max().unwrap_or(0));
        let scale = largest / 127.0;
        let inverse = 1.0 / scale;
        // Zero, or so small that its inverse is not a number to multiply by: the group counts as zero.
        let zero = inverse == f32::INFINITY;
        row.scales.push(if zero { 0.0 } else { scale });
        for x in group {
            row.codes.push(if zero {
                0
            } else {
                (x * inverse).round_ties_even() as i8
            });
        }
    }
    row
}

/// One output of a matrix product, before the bias.
pub fn dot(ty: WeightType, weights: &[u8], x: &[f32], quantized: &QuantizedRow) -> f32 {
    let mut acc = 0.0f32;
    if !ty.is_quantized() {
        let mut w = vec![0.0; x.len()];
        read_floats(ty, weights, &mut w);
        for (w, x) in w.iter().zip(x) {
            acc = w.mul_add(*x, acc);
        }
        return acc;
    }
    let mut block = DecodedBlock::default();
    let group = ty.group();
    let mut col = 0;
    for bytes in weights.chunks_exact(ty.block_bytes()) {
        decode_block(ty, bytes, &mut block);
        for g in 0..ty.block_elements() / group {
            let mut dot = 0i32;
            let mut sum = 0i32;
            for i in 0..group {
                let x = i32::from(quantized.codes[col + i]);
                dot += ty.integer(block.codes[g * group + i]) * x;
                sum += x;
            }
            let scale = quantized.scales[col / 32];
            acc = (block.scales[g] * scale).mul_add(dot as f32, acc);
            if ty.is_affine() {
                acc = block.mins[g].mul_add(scale * sum as f32, acc);
            }
            col += group;
        }
    }
    acc
}

/// [`Kernels::linear`](crate::Kernels::linear) on the sources themselves.
pub fn linear(
    sources: &[MatrixSource<'_>],
    x: &[f32],
    tokens: usize,
    bias: Option<&[f32]>,
    out: &mut [f32],
) {
    let cols = sources[0].cols;
    let rows: usize = sources.iter().map(|s| s.rows).sum();
    for t in 0..tokens {
        let x = &x[t * cols..][..cols];
        let quantized = quantize(x);
        let mut row = 0;
        for source in sources {
            for weights in source.bytes.chunks_exact(source.bytes.len() / source.rows) {
                let acc = dot(source.ty, weights, x, &quantized);
                out[t * rows + row] = bias.map_or(acc, |b| acc + b[row]);
                row += 1;
            }
        }
    }
}

/// RMS normalisation of one row.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let mut lanes = [0.0f32; LANES];
    for (k, x) in x.iter().enumerate() {
        lanes[k % LANES] = x.mul_add(*x, lanes[k % LANES]);
    }
    let mean = tree_sum(&lanes) / x.len() as f32;
    let scale = 1.0 / (mean + eps).sqrt();
    for ((x, w), out) in x.iter().zip(weight).zip(out) {
        *out = x * scale * w;
    }
}

/// The gate's activation.
pub fn activate(act: Activation, x: f32) -> f32 {
    match act {
        Activation::Silu => x / (1.0 + exp(-x)),
        Activation::GeluTanh => {
            let inner = x * (x * x).mul_add(math::GELU_CUBIC, math::GELU_LINEAR);
            x / (1.0 + exp(-inner))
        }
    }
}

/// Soft cap of one score or logit.
pub fn soft_cap(x: f32, cap: f32) -> f32 {
    tanh(x / cap) * cap
}

/// K or V of one head at one slot.
#[derive(Clone, Copy)]
pub struct Slot<'a> {
    shape: &'a KvShape,
    is_k: bool,
    /// The span it lies in, and its number there.
    span: *const u8,
    index: usize,
}

impl<'a> Slot<'a> {
    /// Panics where an index is out of range.
    pub fn new(
        kv: &'a KvView,
        layer: usize,
        (block, slot): (u32, usize),
        kv_head: usize,
        is_k: bool,
    ) -> Slot<'a> {
        let head = if is_k {
            kv.k(block, layer, kv_head)
        } else {
            kv.v(block, layer, kv_head)
        };
        let shape = kv.shape();
        assert!(slot < shape.block_size as usize);
        // SAFETY: the span is inside this head of the block.
        let span = unsafe { head.add(slot / KV_SPAN * shape.span_bytes()) };
        Slot {
            shape,
            is_k,
            span,
            index: slot % KV_SPAN,
        }
    }

    /// The value a float is stored as, or a code stands for.
    pub fn value(&self, d: usize) -> f32 {
        let dim = self.shape.head_dim as usize;
        let at = if self.is_k {
            d * KV_SPAN + self.index
        } else {
            self.index * dim + d
        };
        // SAFETY: inside the span, which `KvView::new` was promised.
        unsafe {
            match self.shape.dtype {
                KvDtype::F32 => self.span.cast::<f32>().add(at).read(),
                KvDtype::F16 => self.span.cast::<f16>().add(at).read().to_f32(),
                KvDtype::BF16 => self.span.cast::<bf16>().add(at).read().to_f32(),
                KvDtype::Int8 | KvDtype::Int4 => {
                    let (scale, minimum) = self.group(d / KV_GROUP);
                    scale.mul_add(self.code(d) as f32, minimum)
                }
            }
        }
    }

    /// Scale and minimum of a group.
    pub fn group(&self, group: usize) -> (f32, f32) {
        let header = group * GROUP_HEADER / 2 + self.index;
        // SAFETY: inside the span.
        unsafe {
            let at = self.span.cast::<f16>().add(header);
            (at.read().to_f32(), at.add(KV_SPAN).read().to_f32())
        }
    }

    /// The code of one dimension.
    pub fn code(&self, d: usize) -> u32 {
        let dim = self.shape.head_dim as usize;
        let nibbles = self.shape.dtype == KvDtype::Int4;
        // A step is four dimensions of all slots (K), or 16 dimensions of four slots (V).
        let (step, byte) = if self.is_k {
            (d / 4, self.index * 4 + d % 4)
        } else {
            let steps = dim
                .div_ceil(16)
                .next_multiple_of(if nibbles { 2 } else { 1 });
            (self.index / 4 * steps + d / 16, d % 16 * 4 + self.index % 4)
        };
        let line = if nibbles { step / 2 } else { step };
        let at = dim.div_ceil(KV_GROUP) * GROUP_HEADER + line * 64 + byte;
        // SAFETY: inside the span.
        let byte = unsafe { self.span.add(at).read() };
        u32::from(match (nibbles, step % 2) {
            (false, _) => byte,
            (true, 0) => byte & 15,
            (true, _) => byte >> 4,
        })
    }
}

/// A query as scores read it: its values, or scale, scaled sum and codes of each group.
pub struct Query {
    values: Vec<f32>,
    score_scale: f32,
    groups: Vec<(f32, f32, Vec<i8>)>,
}

/// Codes of one group of a query, one per value. Returns the scale and the scaled sum.
fn quantize_query(q: &[f32], score_scale: f32, codes: &mut [i8]) -> (f32, f32) {
    // On the bits, so that a NaN is the largest and makes the scale NaN.
    let largest = f32::from_bits(q.iter().map(|q| q.abs().to_bits()).max().unwrap_or(0));
    let scale = largest / QUERY_MAX;
    let inverse = 1.0 / scale;
    if inverse == f32::INFINITY {
        codes.fill(0);
        return (0.0, 0.0);
    }
    let mut sum = 0;
    for (code, q) in codes.iter_mut().zip(q) {
        // Rounds to nearest, ties to even; the integer stands in the low bits.
        *code = (q * inverse + math::ROUND_MAGIC).to_bits() as i8;
        sum += i32::from(*code);
    }
    let scale = scale * score_scale;
    (scale, scale * sum as f32)
}

impl Query {
    pub fn new(dtype: KvDtype, q: &[f32], score_scale: f32) -> Query {
        let mut groups_of = Vec::new();
        if matches!(dtype, KvDtype::Int8 | KvDtype::Int4) {
            for dims in groups(q.len()) {
                let mut codes = vec![0; dims.len()];
                let (scale, sum) = quantize_query(&q[dims], score_scale, &mut codes);
                groups_of.push((scale, sum, codes));
            }
        }
        Query {
            values: q.to_vec(),
            score_scale,
            groups: groups_of,
        }
    }

    /// What each value counts as, times the scale of scores.
    pub fn values(&self) -> Vec<f32> {
        if self.groups.is_empty() {
            return self.values.iter().map(|q| q * self.score_scale).collect();
        }
        let values = |(scale, _, codes): &(f32, f32, Vec<i8>)| -> Vec<f32> {
            codes.iter().map(|code| scale * f32::from(*code)).collect()
        };
        self.groups.iter().flat_map(values).collect()
    }

    fn score(&self, k: Slot<'_>) -> f32 {
        let mut s = 0.0f32;
        if self.groups.is_empty() {
            for (d, q) in self.values.iter().enumerate() {
                s = q.mul_add(k.value(d), s);
            }
            return s * self.score_scale;
        }
        let mut d = 0;
        for (g, (scale, sum, codes)) in self.groups.iter().enumerate() {
            let mut dot = 0i32;
            for code in codes {
                dot += i32::from(*code) * k.code(d) as i32;
                d += 1;
            }
            let (k_scale, k_minimum) = k.group(g);
            s = (k_scale * scale).mul_add(dot as f32, s);
            s = k_minimum.mul_add(*sum, s);
        }
        s
    }
}

/// Sum of V by the weights of a tile's visible positions, which start at `first`.
fn weighted_sum(v: &[Slot<'_>], p: &[f32], first: usize, acc: &mut [f32]) {
    let dtype = v[0].shape.dtype;
    if !matches!(dtype, KvDtype::Int8 | KvDtype::Int4) {
        for (v, p) in v.iter().zip(p) {
            for (d, acc) in acc.iter_mut().enumerate() {
                *acc = p.mul_add(v.value(d), *acc);
            }
        }
        return;
    }
    for (g, dims) in groups(acc.len()).enumerate() {
        let mut minimums = [0.0f32; LANES];
        let mut largest = 0.0f32;
        for (j, (v, p)) in v.iter().zip(p).enumerate() {
            let (scale, minimum) = v.group(g);
            let lane = (first + j) % LANES;
            minimums[lane] = p.mul_add(minimum, minimums[lane]);
            largest = if scale > largest { scale } else { largest };
        }
        let inverse = WEIGHT_MAX / largest;
        let inverse = if inverse == f32::INFINITY {
            0.0
        } else {
            inverse
        };
        let codes: Vec<i64> = v
            .iter()
            .zip(p)
            .map(|(v, p)| f64::from(*p) * f64::from(v.group(g).0 * inverse))
            // One rounding of the exact product, ties to even.
            .map(|product| product.round_ties_even() as i64)
            .collect();
        for d in dims {
            let sum: i64 = v
                .iter()
                .zip(&codes)
                .map(|(v, c)| c * i64::from(v.code(d)))
                .sum();
            acc[d] = (largest / WEIGHT_MAX).mul_add(sum as f32, tree_sum(&minimums));
        }
    }
}

/// Attention of one query row and one head.
pub fn attention_head(
    kv: &KvView,
    layer: usize,
    row: &AttentionRow<'_>,
    q: &[f32],
    kv_head: usize,
    params: &AttentionParams,
    out: &mut [f32],
) {
    let shape = kv.shape();
    let (size, dim) = (shape.block_size as usize, shape.head_dim as usize);
    let slot = |j: usize, is_k| {
        let place = (row.table[j / size], j % size);
        Slot::new(kv, layer, place, kv_head, is_k)
    };
    let q = Query::new(shape.dtype, q, params.score_scale());
    let end = row.position as usize + 1;
    let start = params.window.map_or(0, |w| end.saturating_sub(w as usize));
    let (mut m, mut l, mut acc) = (0.0f32, 0.0f32, vec![0.0f32; dim]);
    for tile in start / KV_TILE..end.div_ceil(KV_TILE) {
        let visible = start.max(tile * KV_TILE)..end.min((tile + 1) * KV_TILE);
        let mut scores = Vec::new();
        let mut maxima = [f32::NEG_INFINITY; LANES];
        for j in visible.clone() {
            let mut s = q.score(slot(j, true));
            if let Some(cap) = params.soft_cap {
                s = soft_cap(s, cap) * math::LOG2_E;
            }
            maxima[j % LANES] = if s > maxima[j % LANES] {
                s
            } else {
                maxima[j % LANES]
            };
            scores.push(s);
        }
        let m_tile = tree_max(&maxima);
        let mut sums = [0.0f32; LANES];
        let mut p = Vec::new();
        for (j, s) in visible.clone().zip(scores) {
            p.push(exp2(s - m_tile));
            sums[j % LANES] += exp2(s - m_tile);
        }
        let v: Vec<Slot<'_>> = visible.clone().map(|j| slot(j, false)).collect();
        let mut acc_tile = vec![0.0f32; dim];
        weighted_sum(&v, &p, visible.start, &mut acc_tile);
        let l_tile = tree_sum(&sums);
        if visible.start == start {
            (m, l, acc) = (m_tile, l_tile, acc_tile);
            continue;
        }
        let m_new = if m > m_tile { m } else { m_tile };
        let (old, new) = (exp2(m - m_new), exp2(m_tile - m_new));
        l = l_tile.mul_add(new, l * old);
        for (acc, tile) in acc.iter_mut().zip(acc_tile) {
            *acc = tile.mul_add(new, *acc * old);
        }
        m = m_new;
    }
    let inverse = 1.0 / l;
    for (out, acc) in out.iter_mut().zip(acc) {
        *out = acc * inverse;
    }
}
