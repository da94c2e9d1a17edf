//! Quantising weights: error bounds per group, the round trip, and what is refused.

use baton_kernels::{Error, Isa, WeightType, dequantize, quantize_weights};
use half::f16;

use super::Random;

const TYPES: [WeightType; 2] = [WeightType::Q8_0, WeightType::Q4_1];

/// Quantised on every instruction set, which must agree to the byte.
fn quantized(to: WeightType, values: &[f32]) -> Result<Vec<u8>, Error> {
    let mut results = Isa::available().map(|isa| {
        let mut bytes = vec![0xaa; values.len() / 32 * to.block_bytes()];
        quantize_weights(isa, to, values, &mut bytes).map(|()| bytes)
    });
    let first = results.next().unwrap();
    for other in results {
        assert_eq!(other, first, "{}", to.name());
    }
    first
}

fn restored(to: WeightType, bytes: &[u8]) -> Vec<f32> {
    let mut values = vec![f32::NAN; bytes.len() / to.block_bytes() * 32];
    dequantize(to, bytes, &mut values).unwrap();
    values
}

/// Groups of many shapes and sizes: normal, with an outlier, one-sided, flat, sparse, tiny and large.
fn groups() -> Vec<[f32; 32]> {
    let mut random = Random::new(7);
    let mut groups = Vec::new();
    for exponent in [-42, -30, -26, -20, -14, -6, 0, 5, 9] {
        let size = f32::powi(2.0, exponent);
        for shape in 0..8 {
            for _ in 0..40 {
                let mut group: [f32; 32] = std::array::from_fn(|_| random.float() * size);
                match shape {
                    0 | 1 => {}
                    2 => group[random.below(32)] *= 30.0,
                    3 => group = group.map(f32::abs),
                    4 => group = group.map(|x| x * 0.01 - size),
                    5 => group = [group[0]; 32],
                    6 => group = std::array::from_fn(|i| if i % 5 == 0 { group[i] } else { 0.0 }),
                    _ => group = std::array::from_fn(|i| group[i] * f32::powi(2.0, -(i as i32))),
                }
                groups.push(group);
            }
        }
    }
    groups.push([0.0; 32]);
    groups.push([-0.0; 32]);
    groups.push([f32::from_bits(1); 32]);
    groups.push(std::array::from_fn(|i| f32::MIN_POSITIVE * i as f32));
    groups
}

/// The gap between neighbouring f16 around `x`.
fn half_gap(x: f32) -> f32 {
    (x.abs() / 1024.0).max(f32::powi(2.0, -24))
}

#[test]
fn eight_bits_are_off_by_half_a_scale_at_most() {
    for group in groups() {
        let bytes = quantized(WeightType::Q8_0, &group).unwrap();
        let scale = f16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
        let largest = group.iter().fold(0.0f32, |max, x| max.max(x.abs()));
        assert!(
            scale <= largest / 127.0 + half_gap(largest / 127.0),
            "scale {scale:e} for {largest:e}"
        );
        // Scales below the least f16 leave zeros.
        let bound = (scale * 0.5 * 1.000_001).max(f32::powi(2.0, -25) * 127.5);
        for (x, y) in group.iter().zip(restored(WeightType::Q8_0, &bytes)) {
            assert!((x - y).abs() <= bound, "{x:e} became {y:e} of {group:?}");
        }
    }
}

#[test]
fn four_bits_are_never_worse_than_the_plain_choice() {
    let (mut searched, mut plain_total) = (0.0f64, 0.0f64);
    for group in groups() {
        let bytes = quantized(WeightType::Q4_1, &group).unwrap();
        let error = |values: &[f32]| -> f64 {
            group
                .iter()
                .zip(values)
                .map(|(x, y)| (f64::from(*x) - f64::from(*y)).powi(2))
                .sum()
        };
        let found = error(&restored(WeightType::Q4_1, &bytes));
        // The plain choice spans the group with 15 steps; f16 widens the span by at most its own gaps.
        let low = group.iter().copied().fold(f32::INFINITY, f32::min);
        let high = group.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let step = (high - low + half_gap(low)) / 15.0;
        let bound = 32.0 * f64::from((step + half_gap(step)) * 0.5).powi(2);
        assert!(
            found <= bound * 1.001,
            "{found:e} > {bound:e} for {group:?}"
        );

        let (scale, min) = (f16::from_f32((high - low) / 15.0), f16::from_f32(low));
        if scale.to_f32() > f32::powi(2.0, -14) {
            let (scale, min) = (scale.to_f32(), min.to_f32());
            let nearest = group.map(|x| ((x - min) / scale).round().clamp(0.0, 15.0) * scale + min);
            // In units of the step, so that groups of all sizes count alike.
            searched += found / f64::from(step).powi(2);
            plain_total += error(&nearest) / f64::from(step).powi(2);
        }
    }
    assert!(
        searched < 0.9 * plain_total,
        "the search left {searched} of {plain_total}"
    );
}

#[test]
fn what_a_format_can_say_survives_unchanged() {
    let mut random = Random::new(11);
    for to in TYPES {
        for _ in 0..200 {
            let scale = f16::from_f32(random.float().abs() + 0.01).to_f32();
            let min = f16::from_f32(random.float()).to_f32();
            let mut exact: Vec<f32> = (0..32)
                .map(|_| match to {
                    WeightType::Q8_0 => scale * (random.below(255) as f32 - 127.0),
                    _ => scale * random.below(16) as f32 + min,
                })
                .collect();
            // Both ends are there, else a finer scale would do as well.
            exact[3] = if to == WeightType::Q8_0 {
                scale * 127.0
            } else {
                min
            };
            exact[20] = if to == WeightType::Q8_0 {
                scale * -127.0
            } else {
                scale * 15.0 + min
            };
            let bytes = quantized(to, &exact).unwrap();
            let back = restored(to, &bytes);
            for (x, y) in exact.iter().zip(&back) {
                // A minimum plus a product is rounded once; the range's ends may so be off by that rounding.
                assert!(
                    (x - y).abs() <= 1e-6 * (scale * 15.0 + min.abs()),
                    "{to:?}: {x} became {y}"
                );
            }
            assert_eq!(quantized(to, &back).unwrap(), bytes, "{to:?} a second time");
        }
    }
}

#[test]
fn a_weight_that_no_scale_reaches_is_refused_by_its_place() {
    for to in TYPES {
        for (value, not_finite) in [
            (f32::NAN, true),
            (-f32::NAN, true),
            (f32::INFINITY, true),
            (f32::NEG_INFINITY, true),
            (f32::MAX, false),
            (-f32::MAX, false),
            (1e9, false),
            (-1e9, false),
        ] {
            for at in [0, 31, 32, 77] {
                let mut values = Random::new(3).floats(96);
                values[at] = value;
                let error = quantized(to, &values).unwrap_err();
                let expected = if not_finite {
                    Error::NotFinite { at }
                } else {
                    Error::WeightTooLarge { at }
                };
                assert_eq!(error, expected, "{value} to {}", to.name());
            }
        }
        let mut values = [f32::MAX; 32];
        values[5] = -f32::MAX;
        assert_eq!(
            quantized(to, &values).unwrap_err(),
            Error::WeightTooLarge { at: 0 }
        );
        // The largest that a scale does reach.
        quantized(to, &[65_504.0; 32]).unwrap();
    }
}

#[test]
fn wrong_types_and_lengths_are_refused_by_name() {
    let values = [0.5; 64];
    let mut out = vec![0; 68];
    let quantize = |to, values: &[f32], out: &mut [u8]| {
        quantize_weights(Isa::Scalar, to, values, out).map_err(|error| error.to_string())
    };
    for to in WeightType::ALL {
        if !TYPES.contains(&to) {
            let said = quantize(to, &values, &mut out).unwrap_err();
            assert!(
                said.contains(to.name()) && said.contains("Q8_0 and Q4_1"),
                "{said}"
            );
        }
    }
    let said = quantize(WeightType::Q8_0, &values[..63], &mut out).unwrap_err();
    assert!(said.contains("63"), "{said}");
    let said = quantize(WeightType::Q8_0, &values, &mut out[..67]).unwrap_err();
    assert!(said.contains("67") && said.contains("68"), "{said}");
    quantize(WeightType::Q8_0, &[], &mut []).unwrap();
}
