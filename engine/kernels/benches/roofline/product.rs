//! Products with packed weights by format and tokens, and the output head.

use std::hint::black_box;

use baton_kernels::{Input, MatrixSource, Output, PackedMatrix, WeightType};

use crate::suite::{Suite, Work};

/// A step reads a whole model: enough copies of a matrix to leave every cache.
const MODEL_BYTES: usize = 64 << 20;

pub fn bench(suite: &mut Suite) {
    for ty in WeightType::ALL {
        for (rows, cols) in [(2048, 2048), (3072, 768)] {
            let matrices = matrices(suite, ty, rows, cols);
            for tokens in [1, 4, 32, 512] {
                let x = values(tokens * cols);
                let mut out = vec![0.0; tokens * rows];
                let mut next = matrices.iter().cycle();
                let name = format!("{rows}x{cols}/{tokens}");
                let work = work(ty, &matrices, tokens);
                suite.bench(
                    &format!("product/{}", ty.name()),
                    &name,
                    work,
                    |kernels, scratch| {
                        let matrix = next.next().expect("there is one");
                        let output = Output::Set(&mut out);
                        kernels.product(matrix, Input::Rows(&x), tokens, None, output, scratch);
                    },
                );
            }
        }
    }
}

/// All outputs, and only which is the best.
pub fn bench_head(suite: &mut Suite) {
    let (rows, cols) = (49_152, 768);
    for ty in [WeightType::Q8_0, WeightType::Q6K] {
        let matrices = matrices(suite, ty, rows, cols);
        for tokens in [1, 32] {
            let x = values(tokens * cols);
            let weight = vec![1.0; cols];
            let input = Input::Normed {
                x: &x,
                weight: &weight,
                eps: 1e-5,
            };
            let work = work(ty, &matrices, tokens);
            let group = format!("head/{}", ty.name());
            let mut out = vec![0.0; tokens * rows];
            let mut next = matrices.iter().cycle();
            suite.bench(
                &group,
                &format!("all/{tokens}"),
                work,
                |kernels, scratch| {
                    let matrix = next.next().expect("there is one");
                    kernels.product(matrix, input, tokens, None, Output::Set(&mut out), scratch);
                },
            );
            let mut best = Vec::new();
            let mut next = matrices.iter().cycle();
            suite.bench(
                &group,
                &format!("best/{tokens}"),
                work,
                |kernels, scratch| {
                    let matrix = next.next().expect("there is one");
                    let finite =
                        kernels.arg_max(matrix, input, tokens, None, rows, &mut best, scratch);
                    black_box(finite);
                },
            );
        }
    }
}

fn work(ty: WeightType, matrices: &[PackedMatrix], tokens: usize) -> Work {
    let matrix = &matrices[0];
    let ops = 2.0 * (matrix.rows() * matrix.cols() * tokens) as f64;
    Work {
        int8_ops: if ty.is_quantized() { ops } else { 0.0 },
        f32_ops: if ty.is_quantized() { 0.0 } else { ops },
        bytes: matrix.bytes() as f64,
        working_set: (matrix.bytes() * matrices.len()) as f64,
    }
}

fn matrices(suite: &mut Suite, ty: WeightType, rows: usize, cols: usize) -> Vec<PackedMatrix> {
    let len = ty.matrix_bytes(rows, cols).expect("whole blocks");
    // Small f16 numbers wherever a scale may lie, arbitrary codes elsewhere.
    let bytes: Vec<u8> = (0..len)
        .map(|i| match i % 2 {
            1 => 0x10 | (i >> 7) as u8 & 1,
            _ => (i * 37) as u8,
        })
        .collect();
    let source = MatrixSource {
        ty,
        rows,
        cols,
        bytes: &bytes,
    };
    let copies = MODEL_BYTES.div_ceil(len);
    (0..copies)
        .map(|_| {
            let packed = suite.kernels.pack(&[source], &mut suite.memory);
            packed.expect("a matrix in memory that is there")
        })
        .collect()
}

fn values(len: usize) -> Vec<f32> {
    (0..len).map(|i| (i % 17) as f32 - 8.0).collect()
}
