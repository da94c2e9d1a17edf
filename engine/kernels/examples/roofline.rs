//! How close the kernels come to the limits of this machine, measured in the same run.
//!
//! `cargo run --release -p baton-kernels --example roofline [isa] [threads] [kernel] [line]`. Prints, per kernel and shape, the best of
//! several rounds as time, rate and share of a limit: bytes of weights or KV read against a plain read of memory that
//! size, or integer (float) operations against a loop of nothing but dot products (fused multiply-adds). It checks no
//! results; the tests do.
#![allow(unsafe_code)]

use std::time::{Duration, Instant};

use baton_kernels::{
    Activation, AttentionParams, AttentionRow, Isa, Kernels, KvDtype, KvShape, KvView, LimitMeter,
    MatrixSource, PackedMatrix, ReadLimit, Scratch, WeightType, read_rate_at,
};

/// Best time of a call over about this long.
const BUDGET: Duration = Duration::from_millis(150);

fn best(mut call: impl FnMut()) -> f64 {
    call();
    let start = Instant::now();
    let mut best = f64::MAX;
    while start.elapsed() < BUDGET {
        let t = now();
        call();
        best = best.min(now() - t);
    }
    best
}

/// Seconds of this thread's own processor time where `BATON_ROOFLINE_CPU_TIME` is set: for one thread on a machine that
/// others use too. Memory bandwidth and caches stay shared.
fn now() -> f64 {
    static CPU_TIME: std::sync::LazyLock<bool> =
        std::sync::LazyLock::new(|| std::env::var_os("BATON_ROOFLINE_CPU_TIME").is_some());
    static START: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);
    #[cfg(target_os = "linux")]
    if *CPU_TIME {
        unsafe extern "C" {
            fn clock_gettime(clock: i32, to: *mut [i64; 2]) -> i32;
        }
        const THREAD_CPU_TIME: i32 = 3;
        let mut time = [0; 2];
        // SAFETY: the array has the two words of a 64-bit `timespec`.
        assert_eq!(unsafe { clock_gettime(THREAD_CPU_TIME, &mut time) }, 0);
        return time[0] as f64 + time[1] as f64 * 1e-9;
    }
    START.elapsed().as_secs_f64()
}

fn weights(ty: WeightType, rows: usize, cols: usize) -> Vec<u8> {
    let bytes = ty.matrix_bytes(rows, cols).expect("whole blocks");
    // Small f16 numbers wherever a scale may lie, arbitrary codes elsewhere.
    (0..bytes)
        .map(|i| {
            if i % 2 == 1 {
                0x10 | (i >> 7) as u8 & 1
            } else {
                (i * 37) as u8
            }
        })
        .collect()
}

fn main() {
    let mut args = std::env::args().skip(1);
    let isa = args.next().map_or(Isa::detect(), |name| {
        Isa::from_name(&name).expect("an instruction set")
    });
    let threads = args
        .next()
        .map_or(2, |n| n.parse().expect("a number of threads"));
    let only = args.next();
    let only = only.as_deref();
    // Of attention, only lines that contain this, as `int4` or `decode`.
    let line = args.next().unwrap_or_default();
    let kernels = Kernels::new(isa, threads).expect("kernels");
    let meter = LimitMeter::new(isa, threads, &[], BUDGET).expect("a meter");
    let limits = meter.compute().expect("threads");
    let (int8, f32) = (
        limits.int8_ops_per_second / 1e9,
        limits.f32_ops_per_second / 1e9,
    );
    println!("{isa}, {threads} threads; peak {int8:.0} Gop/s int8, {f32:.0} Gop/s f32");
    let sizes = meter
        .read(&[1 << 20, 8 << 20, 32 << 20, 96 << 20, 256 << 20])
        .expect("threads");
    for limit in &sizes {
        let rate = limit.bytes_per_second / 1e9;
        println!("  read {:4} MiB: {rate:.1} GB/s", limit.bytes >> 20);
    }

    if only.is_none_or(|name| name == "linear") {
        linear(&kernels, int8, &sizes);
    }
    if only.is_none_or(|name| name == "attention") {
        attention(&kernels, int8, f32, &sizes, &line);
    }
    if only.is_none_or(|name| name == "elementwise") {
        elementwise(&kernels);
    }
}

/// GB/s at which a working set of `bytes` can be read.
fn limit(sizes: &[ReadLimit], bytes: usize) -> f64 {
    read_rate_at(sizes, bytes as f64) / 1e9
}

fn linear(kernels: &Kernels, int8: f64, sizes: &[ReadLimit]) {
    let mut scratch = Scratch::new();
    for (ty, rows, cols) in [
        (WeightType::Q4_1, 960, 576),
        (WeightType::Q4_1, 576, 576),
        (WeightType::Q4_1, 3072, 576),
        (WeightType::Q4_1, 576, 1536),
        (WeightType::Q8_0, 49152, 576),
        (WeightType::Q8_0, 262_144, 640),
        (WeightType::Q5_0, 4096, 640),
        (WeightType::Q4K, 640, 2048),
        (WeightType::Q6K, 640, 2048),
        (WeightType::F16, 3072, 576),
    ] {
        let bytes = weights(ty, rows, cols);
        // Decode reads a whole model, so enough copies of small matrices to leave the L2 caches.
        let copies = ((24 << 20) / (rows * cols)).clamp(1, 30);
        let matrices: Vec<PackedMatrix> = (0..copies)
            .map(|_| {
                PackedMatrix::pack(&[MatrixSource {
                    ty,
                    rows,
                    cols,
                    bytes: &bytes,
                }])
                .expect("fits")
            })
            .collect();
        let total: usize = matrices.iter().map(PackedMatrix::bytes).sum();
        for tokens in [1usize, 2, 4, 8, 16, 512] {
            if tokens > 16 && rows > 10_000 {
                continue;
            }
            let x: Vec<f32> = (0..tokens * cols).map(|i| (i % 17) as f32 - 8.0).collect();
            let mut out = vec![0.0; tokens * rows];
            let copies = if tokens == 512 { 1 } else { copies };
            let seconds = best(|| {
                for matrix in &matrices[..copies] {
                    kernels.linear(matrix, &x, tokens, None, &mut out, &mut scratch);
                }
            }) / copies as f64;
            let rate = matrices[0].bytes() as f64 / seconds / 1e9;
            let ops = 2.0 * (rows * cols * tokens) as f64 / seconds / 1e9;
            println!(
                "linear {:5} {rows:6}x{cols:<5} tokens {tokens:3}: {:8.1} us {rate:6.1} GB/s ({:3.0} % of read) {ops:6.0} Gop/s ({:3.0} % of int8)",
                ty.name(),
                seconds * 1e6,
                100.0 * rate / limit(sizes, total),
                100.0 * ops / int8,
            );
        }
    }
}

/// Pool memory on huge pages, as an engine has it, filled with small finite floats and scales.
fn pool_memory(bytes: usize) -> Vec<u64> {
    let mut pool: Vec<u64> = Vec::with_capacity(bytes / 8);
    // SAFETY: the advice concerns whole pages inside the allocation and changes no contents.
    let _ = unsafe {
        let start = pool.as_mut_ptr().cast::<u8>();
        let skip = start.align_offset(4096);
        let len = bytes.saturating_sub(skip) & !4095;
        rustix::mm::madvise(
            start.add(skip).cast(),
            len,
            rustix::mm::Advice::LinuxHugepage,
        )
    };
    pool.resize(bytes / 8, 0x2c00_2800_2c00_2400);
    pool
}

/// A call of attention: sequences at one depth in decode, or the last rows of one sequence in prefill.
#[derive(Clone, Copy)]
struct Work {
    depth: usize,
    sequences: usize,
    rows: usize,
}

const fn decode(sequences: usize, depth: usize) -> Work {
    Work {
        depth,
        sequences,
        rows: 1,
    }
}

const fn prefill(rows: usize, depth: usize) -> Work {
    Work {
        depth,
        sequences: 1,
        rows,
    }
}

/// All layers of a model in turn, so that K and V of decode come from memory as in a real step. The arithmetic's limit
/// counts a score and a sum at the f32 peak for floats; for codes a score at the int8 peak and a sum at half of it.
fn attention(kernels: &Kernels, int8: f64, f32: f64, sizes: &[ReadLimit], only: &str) {
    let mut scratch = Scratch::new();
    let works = [
        decode(1, 512),
        decode(1, 2048),
        decode(8, 256),
        decode(8, 2048),
        decode(16, 2048),
        decode(32, 512),
        prefill(256, 512),
        prefill(512, 512),
        prefill(256, 2048),
        prefill(512, 2048),
    ];
    let dtypes = [
        KvDtype::F32,
        KvDtype::F16,
        KvDtype::BF16,
        KvDtype::Int8,
        KvDtype::Int4,
    ];
    for (heads, kv_heads, head_dim) in [(9, 3, 64), (4, 1, 256), (32, 8, 64)] {
        for dtype in dtypes {
            for work in works {
                let Work {
                    depth,
                    sequences,
                    rows,
                } = work;
                let name = format!(
                    "attention {heads:2}/{kv_heads} x{head_dim:<3} {:4} depth {depth:4} {:7} {:3}",
                    format!("{dtype:?}").to_lowercase(),
                    if rows > 1 { "prefill" } else { "decode" },
                    sequences * rows,
                );
                if !name.contains(only) {
                    continue;
                }
                let block_size = 32;
                let per_sequence = depth.div_ceil(block_size);
                let mut shape = KvShape {
                    blocks: (sequences * per_sequence) as u32,
                    block_size: block_size as u32,
                    layers: 1,
                    kv_heads: kv_heads as u32,
                    head_dim: head_dim as u32,
                    dtype,
                };
                let layer_bytes = shape.blocks as usize * shape.block_bytes();
                let layers = if rows > 1 {
                    1
                } else {
                    ((128 << 20) / layer_bytes).clamp(4, 512)
                };
                shape.layers = layers as u32;
                let mut pool = pool_memory(layers * layer_bytes);
                // SAFETY: the pool has the size of the shape and is used through the view only.
                let view = unsafe { KvView::new(pool.as_mut_ptr().cast(), shape) }.expect("a view");
                // Blocks of sequences that grew beside each other.
                let tables: Vec<Vec<u32>> = (0..sequences)
                    .map(|s| {
                        (0..per_sequence)
                            .map(|i| (i * sequences + s) as u32)
                            .collect()
                    })
                    .collect();
                let queries: Vec<AttentionRow<'_>> = tables
                    .iter()
                    .flat_map(|table| {
                        (depth - rows..depth).map(move |p| AttentionRow {
                            table,
                            position: p as u32,
                        })
                    })
                    .collect();
                let q: Vec<f32> = (0..queries.len() * heads * head_dim)
                    .map(|i| (i % 13) as f32 * 0.01)
                    .collect();
                let mut out = vec![0.0; q.len()];
                let params = AttentionParams {
                    heads,
                    kv_heads,
                    head_dim,
                    q_row_stride: heads * head_dim,
                    scale: 0.125,
                    window: None,
                    soft_cap: None,
                };
                let slots: Vec<(u32, u32)> = tables
                    .iter()
                    .flat_map(|table| {
                        (depth - rows..depth)
                            .map(|p| (table[p / block_size], (p % block_size) as u32))
                    })
                    .collect();
                let k = vec![0.01f32; slots.len() * kv_heads * head_dim];
                let write =
                    best(|| kernels.write_kv(&view, 0, &slots, &k, &k, kv_heads * head_dim));
                let seconds = best(|| {
                    for layer in 0..layers {
                        kernels.attention(
                            &view,
                            layer,
                            &queries,
                            &q,
                            &mut out,
                            &params,
                            &mut scratch,
                        );
                    }
                }) / layers as f64;
                let seen: usize = queries.iter().map(|row| row.position as usize + 1).sum();
                let ops = 4.0 * (seen * heads * head_dim) as f64 / 1e9;
                let peak_seconds = match dtype {
                    KvDtype::F32 | KvDtype::F16 | KvDtype::BF16 => ops / f32,
                    KvDtype::Int8 | KvDtype::Int4 => ops / 2.0 / int8 + ops / int8,
                };
                let bytes = sequences * depth * shape.layer_bytes() / block_size;
                let rate = bytes as f64 / seconds / 1e9;
                println!(
                    "{name}: {:8.1} us {rate:5.1} GB/s ({:3.0} % of read) {:5.0} Gop/s ({:3.0} % of its peak), write {:.1} us",
                    seconds * 1e6,
                    100.0 * rate / limit(sizes, layers * layer_bytes),
                    ops / seconds,
                    100.0 * peak_seconds / seconds,
                    write * 1e6,
                );
            }
        }
    }
}

fn elementwise(kernels: &Kernels) {
    for tokens in [1usize, 512] {
        let (width, ffn) = (576, 1536);
        let x = vec![0.5f32; tokens * width];
        let mut out = x.clone();
        let weight = vec![1.0f32; width];
        let norm = best(|| kernels.rms_norm(&x, &weight, 1e-5, tokens, &mut out));
        let gate_up = vec![0.5f32; tokens * 2 * ffn];
        let mut gated = vec![0.0f32; tokens * ffn];
        let gate =
            best(|| kernels.gated_activation(Activation::Silu, &gate_up, tokens, &mut gated));
        let add = best(|| kernels.add_assign(&mut out, &x));
        println!(
            "elementwise tokens {tokens:3}: rms_norm {:.2} us, silu {:.2} us, add {:.2} us",
            norm * 1e6,
            gate * 1e6,
            add * 1e6
        );
    }
}
