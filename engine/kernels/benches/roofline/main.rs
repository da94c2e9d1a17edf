//! How close each kernel comes to the limits of this machine, measured in the same run.
//!
//! ```text
//! cargo bench -p baton-kernels                         all of it, a few minutes
//! cargo bench -p baton-kernels -- product/Q4_0         what the name contains
//! BATON_BENCH_THREADS=1 BATON_BENCH_ISA=avx2 cargo bench -p baton-kernels
//! ```
//!
//! Each line has the time of a call, and under it, where a benchmark usually has its throughput, the rate and its share
//! of whichever limit binds: operations against a loop of nothing but dot products or multiply-adds, bytes against a
//! plain read of a working set of that size. The limits are measured first, by the same threads. A machine that others
//! use gives shares, not rates; for one thread there, `BATON_BENCH_CPU_TIME=1` counts its own processor time.
//!
//! Results are not checked here; the tests do that. There is no bench of the softmax: it is a part of attention's tiles
//! and never runs on its own.
#![allow(unsafe_code)]

mod attention;
mod product;
mod rows;
mod suite;

use suite::Suite;

fn main() {
    let mut suite = Suite::new();
    product::bench(&mut suite);
    product::bench_head(&mut suite);
    attention::bench(&mut suite);
    rows::bench(&mut suite);
    suite.finish();
}
