//! Every kernel, on every instruction set this machine has, with one and several threads, against the plain statement
//! of the arithmetic (`reference`, bit for bit) and against f64 (with a tolerance derived from the rounding).

#![allow(unsafe_code)]

mod arg_max;
mod attention;
mod convert;
mod elementwise;
mod formats;
mod linear;
mod product;
mod quantize_weights;

use baton_kernels::{Isa, Kernels};

/// One object per instruction set and thread count: results of all must agree.
fn all_kernels() -> Vec<Kernels> {
    let mut all = Vec::new();
    for isa in Isa::available() {
        for threads in [1, 2, 3] {
            all.push(Kernels::new(isa, threads).expect("the instruction set is available"));
        }
    }
    all
}

/// A small seeded generator (xorshift64*), so that a failing case is its seed.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.bits() >> 33) as usize % n
    }

    /// Roughly normal, of unit scale.
    fn float(&mut self) -> f32 {
        let sum: f32 = (0..4)
            .map(|_| (self.bits() >> 40) as f32 / (1 << 24) as f32 - 0.5)
            .sum();
        sum * 1.7
    }

    fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.float()).collect()
    }
}

/// Equality of bits, with the first difference in the message. Any NaN equals any other.
fn assert_same_bits(actual: &[f32], expected: &[f32], what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    for (i, (a, e)) in actual.iter().zip(expected).enumerate() {
        assert!(
            a.to_bits() == e.to_bits() || (a.is_nan() && e.is_nan()),
            "{what}: element {i} is {a:e} ({:08x}), expected {e:e} ({:08x})",
            a.to_bits(),
            e.to_bits()
        );
    }
}

fn describe(kernels: &Kernels) -> String {
    format!("{} with {} threads", kernels.isa(), kernels.threads())
}

#[test]
fn kernels_move_between_threads() {
    fn moves<T: Send>() {}
    moves::<Kernels>();
    moves::<baton_kernels::Scratch>();
}
