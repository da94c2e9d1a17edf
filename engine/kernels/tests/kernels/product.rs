//! Products that compute their input on the way, or add to their output, against the plain statement of the parts.

use baton_kernels::{
    Activation, Input, Kernels, MatrixSource, Output, PackedMatrix, Scratch, WeightType, reference,
};
use proptest::prelude::*;

use crate::linear::random_weights;
use crate::{Random, all_kernels, assert_same_bits, describe};

const EPS: f32 = 1e-5;

/// A matrix of two segments, so that both kinds of inputs (codes and floats) may be asked for at once.
fn matrix(random: &mut Random, types: [WeightType; 2], rows: usize, cols: usize) -> PackedMatrix {
    let bytes = types.map(|ty| random_weights(random, ty, rows, cols));
    let sources: Vec<MatrixSource<'_>> = types
        .iter()
        .zip(&bytes)
        .map(|(ty, bytes)| MatrixSource {
            ty: *ty,
            rows,
            cols,
            bytes,
        })
        .collect();
    PackedMatrix::pack(&sources).unwrap()
}

fn set(
    kernels: &Kernels,
    w: &PackedMatrix,
    input: Input<'_>,
    tokens: usize,
    bias: Option<&[f32]>,
) -> Vec<f32> {
    let mut out = vec![f32::NAN; tokens * w.rows()];
    let output = Output::Set(&mut out);
    kernels.product(w, input, tokens, bias, output, &mut Scratch::new());
    out
}

/// Rows of `weight.len()`, normed.
fn norms(x: &[f32], weight: &[f32]) -> Vec<f32> {
    let mut out = vec![0.0; x.len()];
    let rows = x.chunks_exact(weight.len());
    for (x, out) in rows.zip(out.chunks_exact_mut(weight.len())) {
        reference::rms_norm(x, weight, EPS, out);
    }
    out
}

/// `act(gate) * up` of rows of `cols` gates and as many ups.
fn gates(act: Activation, gate_up: &[f32], cols: usize) -> Vec<f32> {
    let rows = gate_up.chunks_exact(2 * cols);
    rows.flat_map(|row| {
        let (gate, up) = row.split_at(cols);
        let pairs = gate.iter().zip(up);
        pairs.map(|(gate, up)| reference::activate(act, *gate) * up)
    })
    .collect()
}

fn sums(x: &[f32], y: &[f32]) -> Vec<f32> {
    x.iter().zip(y).map(|(x, y)| x + y).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn an_input_computed_on_the_way_has_the_bits_of_one_computed_before(
        first in prop::sample::select(&WeightType::ALL[..]),
        second in prop::sample::select(&WeightType::ALL[..]),
        rows in 1usize..50,
        blocks in 1usize..3,
        tokens in 1usize..30,
        bias: bool,
        seed: u64,
    ) {
        let mut random = Random::new(seed);
        let cols = blocks * 256;
        let w = matrix(&mut random, [first, second], rows, cols);
        let x = random.floats(tokens * cols);
        let weight = random.floats(cols);
        let gate_up = random.floats(tokens * 2 * cols);
        let bias = bias.then(|| random.floats(2 * rows));
        let bias = bias.as_deref();
        let before = random.floats(tokens * 2 * rows);
        let normed = norms(&x, &weight);
        let activations = [Activation::Silu, Activation::GeluTanh];
        let gated = activations.map(|act| gates(act, &gate_up, cols));
        for kernels in all_kernels() {
            let what = describe(&kernels);
            let expected = set(&kernels, &w, Input::Rows(&normed), tokens, bias);
            let input = Input::Normed { x: &x, weight: &weight, eps: EPS };
            assert_same_bits(&set(&kernels, &w, input, tokens, bias), &expected, &what);

            let mut added = before.clone();
            let output = Output::Add(&mut added);
            kernels.product(&w, input, tokens, bias, output, &mut Scratch::new());
            assert_same_bits(&added, &sums(&before, &expected), &what);

            for (act, gated) in activations.into_iter().zip(&gated) {
                let expected = set(&kernels, &w, Input::Rows(gated), tokens, bias);
                let input = Input::Gated { gate_up: &gate_up, act };
                assert_same_bits(&set(&kernels, &w, input, tokens, bias), &expected, &what);
            }
        }
    }

    #[test]
    fn a_normed_sum_has_the_bits_of_norm_and_sum(
        width in 1usize..700,
        tokens in 0usize..40,
        seed: u64,
    ) {
        let mut random = Random::new(seed);
        let (x, y) = (random.floats(tokens * width), random.floats(tokens * width));
        let weight = random.floats(width);
        let expected = sums(&x, &norms(&y, &weight));
        for kernels in all_kernels() {
            let mut actual = x.clone();
            kernels.add_normed(&mut actual, &y, &weight, EPS, tokens);
            assert_same_bits(&actual, &expected, &describe(&kernels));
        }
    }
}
