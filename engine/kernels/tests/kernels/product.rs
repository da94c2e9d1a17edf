//! Products that compute their input on the way, or add to their output, against the same in separate passes.

use baton_kernels::{
    Activation, Input, Kernels, MatrixSource, Output, PackedMatrix, Scratch, WeightType,
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
        for kernels in all_kernels() {
            let what = describe(&kernels);
            let mut normed = vec![0.0; tokens * cols];
            kernels.rms_norm(&x, &weight, EPS, tokens, &mut normed);
            let expected = set(&kernels, &w, Input::Rows(&normed), tokens, bias);
            let input = Input::Normed { x: &x, weight: &weight, eps: EPS };
            assert_same_bits(&set(&kernels, &w, input, tokens, bias), &expected, &what);

            let mut added = before.clone();
            let output = Output::Add(&mut added);
            kernels.product(&w, input, tokens, bias, output, &mut Scratch::new());
            let mut sum = before.clone();
            kernels.add_assign(&mut sum, &expected);
            assert_same_bits(&added, &sum, &what);

            for act in [Activation::Silu, Activation::GeluTanh] {
                let mut gated = vec![0.0; tokens * cols];
                kernels.gated_activation(act, &gate_up, tokens, &mut gated);
                let expected = set(&kernels, &w, Input::Rows(&gated), tokens, bias);
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
        for kernels in all_kernels() {
            let mut normed = vec![0.0; tokens * width];
            kernels.rms_norm(&y, &weight, EPS, tokens, &mut normed);
            let mut expected = x.clone();
            kernels.add_assign(&mut expected, &normed);
            let mut actual = x.clone();
            kernels.add_normed(&mut actual, &y, &weight, EPS, tokens);
            assert_same_bits(&actual, &expected, &describe(&kernels));
        }
    }
}
