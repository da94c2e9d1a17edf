//! Matrix products.

use baton_kernels::{
    Error, Isa, Kernels, MatrixSource, PackedMatrix, Scratch, WeightType, dequantize, reference,
};
use half::{bf16, f16};
use proptest::prelude::*;

use crate::{Random, all_kernels, assert_same_bits, describe};

/// Random blocks with scales of sensible size.
pub(crate) fn random_weights(
    random: &mut Random,
    ty: WeightType,
    rows: usize,
    cols: usize,
) -> Vec<u8> {
    let mut bytes = vec![0u8; ty.matrix_bytes(rows, cols).unwrap()];
    for block in bytes.chunks_exact_mut(ty.block_bytes()) {
        block.fill_with(|| random.bits() as u8);
        let scale = random.float();
        match ty {
            WeightType::F32 => {
                block.copy_from_slice(&scale.to_le_bytes());
                continue;
            }
            WeightType::BF16 => {
                block.copy_from_slice(&bf16::from_f32(scale).to_le_bytes());
                continue;
            }
            // Powers of two from 2^-9 to 2^-2.
            WeightType::MXFP4 => block[0] = 119 + block[0] % 8,
            _ => {}
        }
        for at in factors(ty) {
            block[*at..at + 2].copy_from_slice(&f16::from_f32(random.float() * 0.1).to_le_bytes());
        }
    }
    bytes
}

/// Where a block has f16 numbers.
fn factors(ty: WeightType) -> &'static [usize] {
    match ty {
        WeightType::F32 | WeightType::BF16 | WeightType::MXFP4 => &[],
        WeightType::F16
        | WeightType::Q4_0
        | WeightType::Q5_0
        | WeightType::Q8_0
        | WeightType::IQ4NL
        | WeightType::IQ4XS => &[0],
        WeightType::Q4_1 | WeightType::Q5_1 | WeightType::Q4K | WeightType::Q5K => &[0, 2],
        WeightType::Q2K => &[80, 82],
        WeightType::Q3K => &[108],
        WeightType::Q6K => &[208],
    }
}

#[derive(Debug, Clone)]
struct Case {
    sources: Vec<(WeightType, usize)>,
    cols: usize,
    tokens: usize,
    bias: bool,
    seed: u64,
}

fn cases() -> impl Strategy<Value = Case> {
    let source = (prop::sample::select(&WeightType::ALL[..]), 1usize..70);
    let sources = prop::collection::vec(source, 1..4);
    (sources, 1usize..9, 1usize..31, any::<bool>(), any::<u64>()).prop_map(
        |(sources, blocks, tokens, bias, seed)| {
            let block = sources
                .iter()
                .map(|(ty, _)| ty.block_elements())
                .max()
                .unwrap_or(1);
            // Float-only matrices take any number of columns; K types few blocks, so that cases stay small.
            let cols = match block {
                1 => blocks * 13 + tokens,
                32 => blocks * 32,
                _ => (blocks % 3 + 1) * 256,
            };
            Case {
                sources,
                cols,
                tokens,
                bias,
                seed,
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn every_isa_and_thread_count_gives_the_bits_of_the_reference(case in cases()) {
        check(&case);
    }
}

fn check(case: &Case) {
    let mut random = Random::new(case.seed);
    let bytes: Vec<Vec<u8>> = case
        .sources
        .iter()
        .map(|(ty, rows)| random_weights(&mut random, *ty, *rows, case.cols))
        .collect();
    let sources: Vec<MatrixSource<'_>> = case
        .sources
        .iter()
        .zip(&bytes)
        .map(|((ty, rows), bytes)| MatrixSource {
            ty: *ty,
            rows: *rows,
            cols: case.cols,
            bytes,
        })
        .collect();
    let matrix = PackedMatrix::pack(&sources).unwrap();
    let rows = matrix.rows();
    let mut x = random.floats(case.tokens * case.cols);
    // Some groups of nothing, of one value, and of tiny values.
    for x in x.chunks_mut(32) {
        match random.below(12) {
            0 => x.fill(0.0),
            1 => x.fill(-1.5),
            2 => x.iter_mut().for_each(|x| *x *= 1e-38),
            _ => {}
        }
    }
    let bias = case.bias.then(|| random.floats(rows));
    let mut expected = vec![0.0; case.tokens * rows];
    reference::linear(&sources, &x, case.tokens, bias.as_deref(), &mut expected);
    assert_close_to_f64(&sources, &x, bias.as_deref(), &expected);

    let mut scratch = Scratch::new();
    for kernels in all_kernels() {
        let mut out = vec![f32::NAN; case.tokens * rows];
        kernels.linear(
            &matrix,
            &x,
            case.tokens,
            bias.as_deref(),
            &mut out,
            &mut scratch,
        );
        assert_same_bits(&out, &expected, &describe(&kernels));
    }
}

/// The error of a group is at most half an activation step per weight, plus the rounding of about as many f32
/// operations as there are terms.
fn assert_close_to_f64(
    sources: &[MatrixSource<'_>],
    x: &[f32],
    bias: Option<&[f32]>,
    actual: &[f32],
) {
    let cols = sources[0].cols;
    let rows: usize = sources.iter().map(|s| s.rows).sum();
    let mut row = 0;
    for source in sources {
        let mut weights = vec![0.0; source.rows * cols];
        dequantize(source.ty, source.bytes, &mut weights).unwrap();
        for w in weights.chunks_exact(cols) {
            for (t, x) in x.chunks_exact(cols).enumerate() {
                let bias = bias.map_or(0.0, |b| f64::from(b[row]));
                let (mut sum, mut size, mut step) = (bias, bias.abs(), 0.0);
                for (w, x) in w.chunks(32).zip(x.chunks(32)) {
                    let largest = x.iter().fold(0.0f32, |a, x| a.max(x.abs()));
                    for (w, x) in w.iter().zip(x) {
                        let (w, x) = (f64::from(*w), f64::from(*x));
                        sum += w * x;
                        size += (w * x).abs();
                        step += w.abs() * f64::from(largest) / 254.0;
                    }
                }
                if !source.ty.is_quantized() {
                    step = 0.0;
                }
                // For affine types codes and minimum cancel, so the rounding is relative to their own sizes: 16 times
                // the result's is enough for the scales drawn here.
                let tolerance =
                    step * 1.001 + size * cols as f64 * 16.0 * f64::from(f32::EPSILON) + 1e-30;
                let error = (f64::from(actual[t * rows + row]) - sum).abs();
                assert!(
                    error <= tolerance,
                    "{} row {row} token {t}: off by {error}, at most {tolerance}",
                    source.ty.name()
                );
            }
            row += 1;
        }
    }
}

/// Large enough for every thread to get work and for several chunks per thread.
#[test]
fn a_row_alone_has_the_bits_it_has_in_a_batch() {
    let mut random = Random::new(7);
    for ty in [
        WeightType::Q4_1,
        WeightType::Q8_0,
        WeightType::Q2K,
        WeightType::Q6K,
        WeightType::IQ4XS,
        WeightType::F16,
    ] {
        let (rows, cols, tokens) = (1000, 1536, 29);
        let bytes = random_weights(&mut random, ty, rows, cols);
        let matrix = PackedMatrix::pack(&[MatrixSource {
            ty,
            rows,
            cols,
            bytes: &bytes,
        }])
        .unwrap();
        let x = random.floats(tokens * cols);
        let mut scratch = Scratch::new();
        let mut batch = vec![0.0; tokens * rows];
        let mut alone = vec![0.0; tokens * rows];
        let kernels = Kernels::new(Isa::detect(), 2).unwrap();
        kernels.linear(&matrix, &x, tokens, None, &mut batch, &mut scratch);
        for (x, out) in x.chunks_exact(cols).zip(alone.chunks_exact_mut(rows)) {
            kernels.linear(&matrix, x, 1, None, out, &mut scratch);
        }
        assert_same_bits(&alone, &batch, ty.name());
        for kernels in all_kernels().iter().filter(|k| k.isa() != Isa::Scalar) {
            let mut out = vec![0.0; tokens * rows];
            kernels.linear(&matrix, &x, tokens, None, &mut out, &mut scratch);
            assert_same_bits(
                &out,
                &batch,
                &format!("{} {}", ty.name(), describe(kernels)),
            );
        }
    }
}

/// Largest codes against largest activations: where an 8- or 16-bit intermediate would saturate.
#[test]
fn extreme_codes_do_not_saturate() {
    for ty in WeightType::ALL.into_iter().filter(|ty| ty.is_quantized()) {
        for fill in [0x00u8, 0x7f, 0x80, 0xff] {
            let (rows, cols) = (17, 256);
            let mut bytes = vec![fill; ty.matrix_bytes(rows, cols).unwrap()];
            for block in bytes.chunks_exact_mut(ty.block_bytes()) {
                if ty == WeightType::MXFP4 {
                    block[0] = 127;
                }
                for at in factors(ty) {
                    block[*at..at + 2].copy_from_slice(&f16::ONE.to_le_bytes());
                }
            }
            let source = [MatrixSource {
                ty,
                rows,
                cols,
                bytes: &bytes,
            }];
            let matrix = PackedMatrix::pack(&source).unwrap();
            for x in [vec![1.0f32; cols], vec![-1.0; cols]] {
                let mut expected = vec![0.0; rows];
                reference::linear(&source, &x, 1, None, &mut expected);
                for kernels in all_kernels() {
                    let mut out = vec![0.0; rows];
                    kernels.linear(&matrix, &x, 1, None, &mut out, &mut Scratch::new());
                    assert_same_bits(
                        &out,
                        &expected,
                        &format!("{} {fill:#x} {}", ty.name(), describe(&kernels)),
                    );
                }
            }
        }
    }
}

#[test]
fn a_row_that_is_not_finite_leaves_its_neighbours_alone() {
    let mut random = Random::new(3);
    let (ty, rows, cols) = (WeightType::Q4_1, 64, 64);
    let bytes = random_weights(&mut random, ty, rows, cols);
    let matrix = PackedMatrix::pack(&[MatrixSource {
        ty,
        rows,
        cols,
        bytes: &bytes,
    }])
    .unwrap();
    let clean = random.floats(5 * cols);
    let mut dirty = clean.clone();
    dirty[2 * cols + 7] = f32::NAN;
    for kernels in all_kernels() {
        let run = |x: &[f32]| {
            let mut out = vec![0.0; 5 * rows];
            kernels.linear(&matrix, x, 5, None, &mut out, &mut Scratch::new());
            out
        };
        let (clean, dirty) = (run(&clean), run(&dirty));
        assert_same_bits(&dirty[..2 * rows], &clean[..2 * rows], "rows before");
        assert_same_bits(&dirty[3 * rows..], &clean[3 * rows..], "rows after");
        assert!(
            dirty[2 * rows..3 * rows].iter().all(|x| x.is_nan()),
            "a NaN must show"
        );
    }
}

#[test]
fn packed_rows_dequantise_to_the_values_of_the_file() {
    let mut random = Random::new(11);
    for ty in WeightType::ALL {
        let (rows, cols) = (37, 512);
        let bytes = random_weights(&mut random, ty, rows, cols);
        let mut expected = vec![0.0; rows * cols];
        dequantize(ty, &bytes, &mut expected).unwrap();
        let other = random_weights(&mut random, WeightType::F32, 5, cols);
        let matrix = PackedMatrix::pack(&[
            MatrixSource {
                ty: WeightType::F32,
                rows: 5,
                cols,
                bytes: &other,
            },
            MatrixSource {
                ty,
                rows,
                cols,
                bytes: &bytes,
            },
        ])
        .unwrap();
        let mut row = vec![0.0; cols];
        for (r, expected) in expected.chunks_exact(cols).enumerate() {
            matrix.dequantize_row(5 + r, &mut row);
            assert_same_bits(&row, expected, ty.name());
        }
    }
}

#[test]
fn refuses_sources_that_do_not_fit() {
    let pack = |ty, rows, cols, bytes: usize| {
        PackedMatrix::pack(&[MatrixSource {
            ty,
            rows,
            cols,
            bytes: &vec![0; bytes],
        }])
        .err()
    };
    assert_eq!(PackedMatrix::pack(&[]).err(), Some(Error::EmptyMatrix));
    assert_eq!(pack(WeightType::F32, 0, 4, 0), Some(Error::EmptyMatrix));
    assert_eq!(
        pack(WeightType::Q4K, 1, 32, 18),
        Some(Error::ColumnsNotBlocks {
            ty: "Q4_K",
            cols: 32,
            block: 256
        })
    );
    assert_eq!(
        pack(WeightType::Q8_0, 2, 32, 67),
        Some(Error::ByteLength {
            ty: "Q8_0",
            expected: 68,
            actual: 67
        })
    );
    assert_eq!(
        pack(WeightType::F32, usize::MAX, 1 << 20, 0),
        Some(Error::TooLarge)
    );
    let (a, b) = ([0; 16], [0; 32]);
    let sources = [
        MatrixSource {
            ty: WeightType::F32,
            rows: 1,
            cols: 4,
            bytes: &a,
        },
        MatrixSource {
            ty: WeightType::F32,
            rows: 1,
            cols: 8,
            bytes: &b,
        },
    ];
    assert_eq!(
        PackedMatrix::pack(&sources).err(),
        Some(Error::ColumnsDiffer { first: 4, other: 8 })
    );
}
