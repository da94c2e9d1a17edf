//! Norms, rotation, activations, residual sums and the functions behind them.

use baton_kernels::{Activation, Kernels, RopePairing, RopeTable, reference};
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
    fn rms_norm_matches(width in 1usize..700, tokens in 0usize..40, seed: u64) {
        let mut random = Random::new(seed);
        let (x, weight, eps) = (random.floats(tokens * width), random.floats(width), 1e-5);
        let out = same_on_all("rms_norm", |kernels| {
            let mut out = vec![f32::NAN; tokens * width];
            kernels.rms_norm(&x, &weight, eps, tokens, &mut out);
            out
        });
        for (x, out) in x.chunks_exact(width).zip(out.chunks_exact(width)) {
            let mut expected = vec![0.0; width];
            reference::rms_norm(x, &weight, eps, &mut expected);
            assert_same_bits(out, &expected, "rms_norm against the reference");
            let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / width as f64;
            for ((x, w), out) in x.iter().zip(&weight).zip(out) {
                let exact = f64::from(*x) * f64::from(*w) / (mean + f64::from(eps)).sqrt();
                assert_close(*out, exact, (width as f64 / 16.0 + 8.0) * EPS, 0.0, "rms_norm");
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
        let out = same_on_all("gated_activation", |kernels| {
            let mut out = vec![f32::NAN; tokens * width];
            kernels.gated_activation(act, &x, tokens, &mut out);
            out
        });
        for (row, out) in x.chunks_exact(2 * width).zip(out.chunks_exact(width)) {
            for i in 0..width {
                let (gate, up) = (row[i], row[width + i]);
                assert_same_bits(&[out[i]], &[reference::activate(act, gate) * up], "gated_activation");
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
                assert_close(out[i], active * f64::from(up), 128.0 * EPS, 1e-30, "gated_activation");
            }
        }
    }

    #[test]
    fn add_and_soft_cap_match(len in 0usize..40_000, seed: u64) {
        let mut random = Random::new(seed);
        let (x, y) = (random.floats(len), random.floats(len));
        let sum = same_on_all("add_assign", |kernels| {
            let mut x = x.clone();
            kernels.add_assign(&mut x, &y);
            x
        });
        let expected: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x + y).collect();
        assert_same_bits(&sum, &expected, "add_assign");
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
    for act in [Activation::Silu, Activation::GeluTanh] {
        let gate_up: Vec<f32> = values
            .iter()
            .copied()
            .chain(values.iter().map(|_| 1.0))
            .collect();
        let out = same_on_all("extremes", |kernels| {
            let mut out = vec![7.0; values.len()];
            kernels.gated_activation(act, &gate_up, 1, &mut out);
            out
        });
        let expected: Vec<f32> = values
            .iter()
            .map(|x| reference::activate(act, *x))
            .collect();
        assert_same_bits(&out, &expected, "extremes");
        assert_eq!(out[4], 100.0);
        assert_eq!(out[5], 0.0);
    }
}
