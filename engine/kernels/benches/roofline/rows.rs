//! What works on rows between the products: their limit is what they read and write.

use baton_kernels::{
    Activation, Input, KvDtype, MatrixSource, PackedMatrix, RopePairing, RopeTable, WeightType,
};

use crate::attention::pool;
use crate::suite::{Suite, Work};

const WIDTH: usize = 2048;
const HEAD_DIM: usize = 64;
const HEADS: usize = WIDTH / HEAD_DIM;

pub fn bench(suite: &mut Suite) {
    for tokens in [1, 512] {
        inputs(suite, tokens);
        in_place(suite, tokens);
        for dtype in [
            KvDtype::F32,
            KvDtype::F16,
            KvDtype::BF16,
            KvDtype::Int8,
            KvDtype::Int4,
        ] {
            write_kv(suite, dtype, tokens);
        }
    }
}

/// What a product does before it multiplies: norm or gate, quantise, lay out.
fn inputs(suite: &mut Suite, tokens: usize) {
    let zeros = vec![
        0;
        WeightType::Q8_0
            .matrix_bytes(16, WIDTH)
            .expect("whole blocks")
    ];
    let source = MatrixSource {
        ty: WeightType::Q8_0,
        rows: 16,
        cols: WIDTH,
        bytes: &zeros,
    };
    let matrix = PackedMatrix::pack(&[source]).expect("a small matrix");
    let x: Vec<f32> = (0..2 * tokens * WIDTH)
        .map(|i| (i % 17) as f32 - 8.0)
        .collect();
    let weight = vec![1.0; WIDTH];
    let rows = &x[..tokens * WIDTH];
    let inputs = [
        ("quantise", Input::Rows(rows)),
        (
            "norm and quantise",
            Input::Normed {
                x: rows,
                weight: &weight,
                eps: 1e-5,
            },
        ),
        (
            "gate and quantise",
            Input::Gated {
                gate_up: &x,
                act: Activation::Silu,
            },
        ),
    ];
    for (name, input) in inputs {
        let read = if name.starts_with("gate") { 8 } else { 4 };
        // A code per value; a scale and three sums per 32 of them.
        let written = tokens * WIDTH + tokens * WIDTH / 32 * 16;
        let work = Work::of_bytes(read * tokens * WIDTH + written);
        suite.bench(
            "input",
            &format!("{name}/{tokens}"),
            work,
            |kernels, scratch| {
                kernels.prepare(&matrix, input, tokens, scratch);
            },
        );
    }
}

fn in_place(suite: &mut Suite, tokens: usize) {
    let y: Vec<f32> = (0..tokens * WIDTH).map(|i| (i % 17) as f32 - 8.0).collect();
    let mut x = y.clone();
    let bytes = tokens * WIDTH * 4;
    let weight = vec![1e-3; WIDTH];
    let (both, alone) = (Work::of_bytes(3 * bytes), Work::of_bytes(2 * bytes));
    suite.bench(
        "rows",
        &format!("add normed/{tokens}"),
        both,
        |kernels, _| {
            kernels.add_normed(&mut x, &y, &weight, 1e-5, tokens);
        },
    );
    let weight = vec![1.0; HEAD_DIM];
    let mut x = y.clone();
    suite.bench(
        "rows",
        &format!("head norm/{tokens}"),
        alone,
        |kernels, _| {
            kernels.head_norm(&mut x, WIDTH, HEADS, HEAD_DIM, tokens, &weight, 1e-5);
        },
    );
    let table = RopeTable::new(HEAD_DIM, 10_000.0, 1024, &[], 1.0).expect("a table");
    let positions: Vec<u32> = (0..tokens as u32).collect();
    let mut x = y.clone();
    suite.bench("rows", &format!("rope/{tokens}"), alone, |kernels, _| {
        let pairing = RopePairing::Halves;
        kernels.rope(&mut x, WIDTH, HEADS, HEAD_DIM, &positions, &table, pairing);
    });
    let mut x = y;
    suite.bench(
        "rows",
        &format!("soft cap/{tokens}"),
        alone,
        |kernels, _| {
            kernels.soft_cap(&mut x, 30.0);
        },
    );
}

fn write_kv(suite: &mut Suite, dtype: KvDtype, tokens: usize) {
    let kv_heads = 8;
    let pool = pool(dtype, kv_heads, HEAD_DIM, 32, 1);
    let view = pool.view();
    let shape = view.shape();
    let block = shape.block_size as usize;
    let slots: Vec<(u32, u32)> = (0..tokens)
        .map(|t| ((t / block) as u32, (t % block) as u32))
        .collect();
    let stride = kv_heads * HEAD_DIM;
    let k: Vec<f32> = (0..tokens * stride)
        .map(|i| (i % 17) as f32 - 8.0)
        .collect();
    let stored = shape.layer_bytes() / block;
    let work = Work::of_bytes(tokens * (2 * stride * 4 + stored));
    let name = format!("{}/{tokens}", format!("{dtype:?}").to_lowercase());
    suite.bench("write kv", &name, work, |kernels, _| {
        kernels.write_kv(&view, 0, &slots, &k, &k, stride);
    });
}
