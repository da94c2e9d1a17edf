//! Norms, rotation, activations and the functions behind them.

use baton_kernels::{
    Activation, Input, Kernels, MatrixSource, Output, PackedMatrix, RopePairing, RopeTable,
    Scratch, WeightType, reference,
};
use proptest::prelude::*;

use crate::{Random, all_kernels, assert_same_bits, describe};

/// Runs on every instruction set and thread count, and hands back the one result.
fn same_on_all(what: &str, run: impl Fn(&Kernels) -> Vec<f32>) -> Vec<f32> {
    let all = all_kernels();
    let first = run(&all[0]);
    for kernels in &all[1..] {
        assert_same_bits(
            &run(kernels),
            &first,
            &format!("{what} on {}", describe(kernels)),
        );
    }
    first
}

/// Picks one column of its input for each output, exactly: what a product computed of its input on the way.
fn picks(columns: &[usize], cols: usize) -> PackedMatrix {
    let mut weights = vec![0u8; columns.len() * cols * 4];
    for (row, column) in columns.iter().enumerate() {
        weights[(row * cols + column) * 4..][..4].copy_from_slice(&1.0f32.to_le_bytes());
    }
    PackedMatrix::pack(&[MatrixSource {
        ty: WeightType::F32,
        rows: columns.len(),
        cols,
        bytes: &weights,
    }])
    .expect("a matrix")
}

fn picked(kernels: &Kernels, matrix: &PackedMatrix, input: Input<'_>, tokens: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; tokens * matrix.rows()];
    let to = Output::Set(&mut out);
    kernels.product(matrix, input, tokens, None, to, &mut Scratch::new());
    out
}

fn assert_close(actual: f32, exact: f64, relative: f64, absolute: f64, what: &str) {
    let error = (f64::from(actual) - exact).abs();
    assert!(
        error <= exact.abs() * relative + absolute,
        "{what}: {actual:e}, exactly {exact:e}"
    );
}

const EPS: f64 = f32::EPSILON as f64;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn norm_matches(width in 1usize..700, tokens in 0usize..40, seed: u64) {
        let mut random = Random::new(seed);
        let (x, weight, eps) = (random.floats(tokens * width), random.floats(width), 1e-5);
        // A negative zero leaves what is added to it as it is.
        let out = same_on_all("add_normed", |kernels| {
            let mut out = vec![-0.0; tokens * width];
            kernels.add_normed(&mut out, &x, &weight, eps, tokens);
            out
        });
        for (x, out) in x.chunks_exact(width).zip(out.chunks_exact(width)) {
            let mut expected = vec![0.0; width];
            reference::rms_norm(x, &weight, eps, &mut expected);
            assert_same_bits(out, &expected, "add_normed against the reference");
            let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / width as f64;
            for ((x, w), out) in x.iter().zip(&weight).zip(out) {
                let exact = f64::from(*x) * f64::from(*w) / (mean + f64::from(eps)).sqrt();
                assert_close(*out, exact, (width as f64 / 16.0 + 8.0) * EPS, 0.0, "add_normed");
            }
        }
    }

    #[test]
    fn head_norm_touches_only_its_heads(
        heads in 1usize..9, vectors in 1usize..9, tokens in 1usize..40, gap in 0usize..40, seed: u64
    ) {
        let mut random = Random::new(seed);
        let dim = vectors * 16;
        let stride = heads * dim + gap;
        let (x, weight) = (random.floats(tokens * stride), random.floats(dim));
        let out = same_on_all("head_norm", |kernels| {
            let mut out = x.clone();
            kernels.head_norm(&mut out, stride, heads, dim, tokens, &weight, 1e-6);
            out
        });
        let mut expected = x.clone();
        for t in 0..tokens {
            for h in 0..heads {
                let at = t * stride + h * dim;
                reference::rms_norm(&x[at..at + dim], &weight, 1e-6, &mut expected[at..at + dim]);
            }
        }
        assert_same_bits(&out, &expected, "head_norm");
    }

    #[test]
    fn gated_activation_matches(width in 1usize..700, tokens in 0usize..20, gelu: bool, seed: u64) {
        let mut random = Random::new(seed);
        let act = if gelu { Activation::GeluTanh } else { Activation::Silu };
        let mut x = random.floats(tokens * 2 * width);
        x.iter_mut().for_each(|x| *x *= 8.0);
        // The first and last columns are where vectors begin and end.
        let mut columns: Vec<usize> = (0..14).map(|_| random.below(width)).collect();
        columns.extend([0, width - 1]);
        let matrix = picks(&columns, width);
        let input = Input::Gated { gate_up: &x, act };
        let out = same_on_all("gated", |kernels| picked(kernels, &matrix, input, tokens));
        for (row, out) in x.chunks_exact(2 * width).zip(out.chunks_exact(columns.len())) {
            for (column, out) in columns.iter().zip(out) {
                let (gate, up) = (row[*column], row[width + column]);
                // A sum of products has no negative zeros.
                assert_same_bits(&[*out], &[reference::activate(act, gate) * up + 0.0], "gated");
                let g = f64::from(gate);
                let active = match act {
                    Activation::Silu => g / (1.0 + (-g).exp()),
                    Activation::GeluTanh => {
                        // The tanh form, written so that f64 does not cancel.
                        let inner = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g * g * g);
                        g / (1.0 + (-2.0 * inner).exp())
                    }
                };
                // exp of a rounded argument of size up to 90 is off by that many epsilon.
                assert_close(*out, active * f64::from(up), 128.0 * EPS, 1e-30, "gated");
            }
        }
    }

    #[test]
    fn soft_cap_matches(len in 0usize..40_000, seed: u64) {
        let mut random = Random::new(seed);
        let x = random.floats(len);
        let capped = same_on_all("soft_cap", |kernels| {
            let mut x = x.clone();
            kernels.soft_cap(&mut x, 0.7);
            x
        });
        let expected: Vec<f32> = x.iter().map(|x| reference::soft_cap(*x, 0.7)).collect();
        assert_same_bits(&capped, &expected, "soft_cap");
    }

    #[test]
    fn rope_rotates_pairs_and_leaves_the_rest(
        heads in 1usize..5, half in 1usize..40, rest in 0usize..20, tokens in 1usize..40, gap in 0usize..9,
        halves: bool, seed: u64
    ) {
        let mut random = Random::new(seed);
        let (dims, dim) = (2 * half, 2 * half + rest);
        let stride = heads * dim + gap;
        let factors: Vec<f32> = (0..half).map(|i| 1.0 + i as f32 * 0.1).collect();
        let table = RopeTable::new(dims, 10_000.0, 300, &factors, 1.25).unwrap();
        let positions: Vec<u32> = (0..tokens).map(|_| random.below(300) as u32).collect();
        let pairing = if halves { RopePairing::Halves } else { RopePairing::Interleaved };
        let x = random.floats(tokens * stride);
        let out = same_on_all("rope", |kernels| {
            let mut x = x.clone();
            kernels.rope(&mut x, stride, heads, dim, &positions, &table, pairing);
            x
        });
        let mut exact: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
        for (t, position) in positions.iter().enumerate() {
            for h in 0..heads {
                for (i, factor) in factors.iter().enumerate() {
                    let at = t * stride + h * dim;
                    let (a, b) = if halves { (at + i, at + i + half) } else { (at + 2 * i, at + 2 * i + 1) };
                    let frequency = 10_000f64.powf(-2.0 * i as f64 / dims as f64) / f64::from(*factor);
                    let (sin, cos) = (f64::from(*position) * frequency).sin_cos();
                    let (x0, x1) = (exact[a], exact[b]);
                    exact[a] = 1.25 * (x0 * cos - x1 * sin);
                    exact[b] = 1.25 * (x0 * sin + x1 * cos);
                }
            }
        }
        for (out, exact) in out.iter().zip(exact) {
            assert_close(*out, exact, 0.0, 16.0 * EPS, "rope");
        }
    }
}

#[test]
fn exp_is_close_everywhere_and_saturates() {
    let mut x = -103.0f32;
    while x < 88.7 {
        // Below the normal range one unit in the last place is 1.4e-45.
        assert_close(
            reference::exp(x),
            f64::from(x).exp(),
            2.0 * EPS,
            1.5e-45,
            &format!("exp({x})"),
        );
        x += 0.0137;
    }
    assert_eq!(reference::exp(0.0), 1.0);
    assert_eq!(reference::exp(f32::NEG_INFINITY), 0.0);
    assert_eq!(reference::exp(-1e30), 0.0);
    assert_eq!(reference::exp(f32::INFINITY), f32::INFINITY);
    assert!(reference::exp(f32::NAN).is_nan());
}

#[test]
fn tanh_is_close_everywhere_and_never_beyond_one_by_more_than_rounding() {
    let mut x = -12.0f32;
    while x < 12.0 {
        assert_close(
            reference::tanh(x),
            f64::from(x).tanh(),
            8.0 * EPS,
            0.0,
            &format!("tanh({x})"),
        );
        x += 0.00137;
    }
    assert_eq!(reference::tanh(0.0), 0.0);
}

#[test]
fn extremes_go_through_the_activations_alike() {
    let values = [
        0.0,
        -0.0,
        1e-45,
        -1e-38,
        100.0,
        -100.0,
        3e38,
        -3e38,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
    ];
    // Each value has a row of its own, in a vector and behind the last whole one, so that it reaches one output only.
    let width = 17;
    for act in [Activation::Silu, Activation::GeluTanh] {
        for column in [3, 16] {
            let mut gate_up = vec![0.0; values.len() * 2 * width];
            for (row, value) in gate_up.chunks_exact_mut(2 * width).zip(values) {
                row[column] = value;
                row[width..].fill(1.0);
            }
            let matrix = picks(&[column], width);
            let input = Input::Gated {
                gate_up: &gate_up,
                act,
            };
            let out = same_on_all("extremes", |kernels| {
                picked(kernels, &matrix, input, values.len())
            });
            let expected: Vec<f32> = values
                .iter()
                .map(|x| reference::activate(act, *x) + 0.0)
                .collect();
            assert_same_bits(&out, &expected, "extremes");
            assert_eq!(out[4], 100.0);
            assert_eq!(out[5], 0.0);
        }
    }
}
