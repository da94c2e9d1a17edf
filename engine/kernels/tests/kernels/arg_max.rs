//! The best output alone, against a search through all outputs.

use baton_kernels::{Input, Kernels, MatrixSource, PackedMatrix, Scratch, WeightType};
use proptest::prelude::*;

use crate::linear::random_weights;
use crate::{Random, all_kernels, describe};

/// What the outputs themselves say; nothing where one is not finite.
fn searched(
    kernels: &Kernels,
    w: &PackedMatrix,
    input: Input<'_>,
    tokens: usize,
    soft_cap: Option<f32>,
    known: usize,
) -> Option<Vec<Option<u32>>> {
    let mut out = vec![0.0; tokens * w.rows()];
    let output = baton_kernels::Output::Set(&mut out);
    kernels.product(w, input, tokens, None, output, &mut Scratch::new());
    if let Some(cap) = soft_cap {
        kernels.soft_cap(&mut out, cap);
    }
    if out.iter().any(|x| !x.is_finite()) {
        return None;
    }
    let best = |row: &[f32]| {
        let known = &row[..known.min(row.len())];
        let first_best = |best: Option<usize>, i: usize| match best {
            Some(best) if known[best] >= known[i] => Some(best),
            _ => Some(i),
        };
        (0..known.len()).fold(None, first_best).map(|i| i as u32)
    };
    Some(out.chunks_exact(w.rows()).map(best).collect())
}

fn check(
    kernels: &Kernels,
    w: &PackedMatrix,
    x: &[f32],
    tokens: usize,
    soft_cap: Option<f32>,
    known: usize,
) {
    let weight = vec![1.0; w.cols()];
    let normed = Input::Normed {
        x,
        weight: &weight,
        eps: 1e-5,
    };
    let mut scratch = Scratch::new();
    let mut out = vec![Some(7); 3];
    for input in [Input::Rows(x), normed] {
        let finite = kernels.arg_max(w, input, tokens, soft_cap, known, &mut out, &mut scratch);
        let expected = searched(kernels, w, input, tokens, soft_cap, known);
        assert_eq!(
            finite.then_some(&out),
            expected.as_ref(),
            "{}",
            describe(kernels)
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn is_the_first_of_the_highest_outputs(
        types in prop::array::uniform2(prop::sample::select(&WeightType::ALL[..])),
        rows in prop::array::uniform2(1usize..900),
        tokens in 1usize..30,
        known in 0usize..2000,
        soft_cap in prop::sample::select(vec![None, Some(30.0), Some(1e-3)]),
        dirty in prop::sample::select(vec![None, None, Some(f32::NAN), Some(f32::INFINITY)]),
        seed in any::<u64>(),
    ) {
        let mut random = Random::new(seed);
        let cols = 256;
        let mut bytes: Vec<Vec<u8>> = types
            .iter()
            .zip(rows)
            .map(|(ty, rows)| random_weights(&mut random, *ty, rows, cols))
            .collect();
        // Rows that are copies of others give outputs that are equal; so does a cap that all outputs reach.
        for (bytes, rows) in bytes.iter_mut().zip(rows) {
            let row = bytes.len() / rows;
            for _ in 0..rows / 2 {
                let (from, to) = (random.below(rows), random.below(rows));
                bytes.copy_within(from * row..(from + 1) * row, to * row);
            }
        }
        let sources: Vec<MatrixSource<'_>> = types
            .iter()
            .zip(rows)
            .zip(&bytes)
            .map(|((ty, rows), bytes)| MatrixSource { ty: *ty, rows, cols, bytes })
            .collect();
        let matrix = PackedMatrix::pack(&sources).unwrap();
        let mut x = random.floats(tokens * cols);
        // A token of nothing: all its outputs are zeros, of whatever sign.
        let token = random.below(tokens);
        x[token * cols..(token + 1) * cols].fill(0.0);
        if let Some(dirty) = dirty {
            let at = random.below(x.len());
            x[at] = dirty;
        }
        for kernels in all_kernels() {
            check(&kernels, &matrix, &x, tokens, soft_cap, known);
        }
    }
}
