//! The divisors of each scaling at its corners; whole models against reference logits are
//! in `tests/model_rope.rs`.

use super::*;

fn rope(base: f64, dims: usize, scaling: RopeScaling) -> RopeConfig {
    RopeConfig {
        base,
        dims,
        scaling,
        attention_factor: 1.0,
    }
}

#[test]
fn llama3_scaling_keeps_high_frequencies_and_divides_low_ones() {
    let rope = rope(
        500_000.0,
        128,
        RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 8192,
        },
    );
    let divisors = rope.divisors(8192);
    assert_eq!(divisors.len(), 64);
    assert_eq!(divisors[0], 1.0);
    assert_eq!(divisors[63], 8.0);
    assert!(divisors.windows(2).all(|pair| pair[0] <= pair[1]));
    assert!(divisors.iter().any(|d| *d > 1.0 && *d < 8.0));
}

#[test]
fn yarn_keeps_fast_frequencies_divides_slow_ones_and_blends_between() {
    let scaling = |truncate| RopeScaling::Yarn {
        factor: 4.0,
        original_context: 32_768,
        beta_fast: 32.0,
        beta_slow: 1.0,
        truncate,
    };
    let divisors = rope(1e6, 128, scaling(true)).divisors(131_072);
    // 128 ln(32768 / (32 * 2 pi)) / (2 ln 1e6) = 23.6, and 39.7 for one turn.
    assert!(divisors[..=23].iter().all(|d| *d == 1.0));
    assert!(divisors[24] > 1.0 && divisors[39] < 4.0);
    assert!(divisors[40..].iter().all(|d| *d == 4.0));
    let exact = rope(1e6, 128, scaling(false));
    assert_ne!(exact.divisors(131_072), divisors);
    assert_ne!(exact.text(1), rope(1e6, 128, scaling(true)).text(1));
}

#[test]
fn dynamic_scaling_starts_above_the_original_context_and_grows_with_the_context() {
    let rope = rope(
        10_000.0,
        64,
        RopeScaling::Dynamic {
            factor: 2.0,
            original_context: 2048,
        },
    );
    assert!(rope.divisors(2048).is_empty());
    assert_eq!(rope.text(100), rope.text(2048));
    assert_eq!(rope.text(100), "10000/64");
    let (longer, longest) = (rope.divisors(3000), rope.divisors(4096));
    assert_eq!((longer[0], longest[0]), (1.0, 1.0));
    // The slowest frequency is divided by `2 * 4096 / 2048 - 1`.
    assert!((longest[31] - 3.0).abs() < 1e-6);
    assert!(longer[31] < longest[31]);
    assert_ne!(rope.text(3000), rope.text(4096));
    assert_eq!(rope.context_limit(), Some(4096));
}

#[test]
fn longrope_takes_the_long_divisors_for_a_context_above_the_original() {
    let rope = rope(
        10_000.0,
        4,
        RopeScaling::LongRope {
            short: vec![1.0, 2.0],
            long: vec![3.0, 4.0],
            original_context: 4096,
        },
    );
    assert_eq!(rope.divisors(4096), [1.0, 2.0]);
    assert_eq!(rope.divisors(4097), [3.0, 4.0]);
    assert_ne!(rope.text(4096), rope.text(4097));
}
