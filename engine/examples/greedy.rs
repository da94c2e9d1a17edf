//! Loads a model, generates greedily from token ids given as numbers, and prints how
//! fast prefill and decode were.
//!
//! ```text
//! cargo run --release -p baton-engine --example greedy -- MODEL [--threads N] [--new N] [ID ...]
//! ```
//!
//! With no ids, 512 made-up ones are used.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_engine::decoder::CpuExecutor;
use baton_engine::kv::KvMemory;
use baton_engine::model::{LoadOptions, Model};
use baton_engine::step::{
    Executor, LogitsWanted, PlanRow, RowInput, StepEvent, StepOutput, StepPlan,
};
use baton_kernels::{Isa, Kernels};
use baton_proto::kv_layout::KvDtype;

const BLOCK_SIZE: u32 = 16;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut path = None;
    let (mut threads, mut new, mut isa) = (2, 64, Isa::detect());
    let mut ids: Vec<u32> = Vec::new();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or(format!("{argument} needs a value"));
        match argument.as_str() {
            "--threads" => threads = value()?.parse()?,
            "--new" => new = value()?.parse()?,
            "--isa" => isa = Isa::from_name(&value()?)?,
            _ if path.is_none() => path = Some(PathBuf::from(argument)),
            _ => ids.push(argument.parse()?),
        }
    }
    let path = path.ok_or("usage: greedy MODEL [--threads N] [--new N] [--isa NAME] [ID ...]")?;

    let start = Instant::now();
    let model = Model::open(&path, &LoadOptions::default(), &mut |_, _| {})?;
    println!("{model:?}");
    println!(
        "loaded in {:.2} s, {} MB a step",
        start.elapsed().as_secs_f64(),
        model.weight_bytes() / 1_000_000
    );
    if ids.is_empty() {
        let vocab = model.vocab_size() as u32;
        ids = (0..512)
            .map(|i: u32| (i.wrapping_mul(7919) + 1000) % vocab)
            .collect();
    }

    let total = ids.len() as u32 + new as u32;
    let layout = model.kv_layout(BLOCK_SIZE, KvDtype::F16);
    let groups = layout.groups.len();
    let blocks = layout.blocks_for(total);
    let memory = KvMemory::allocate(layout, &vec![blocks; groups])?;
    let kernels = Kernels::new(isa, threads)?;
    let mut executor = CpuExecutor::new(&model, Arc::clone(&memory), kernels, ids.len())?;
    let tables: Vec<Vec<u32>> = vec![(0..blocks).collect(); groups];
    let step = |tokens: Vec<u32>, position: u32| StepPlan {
        rows: vec![PlanRow {
            input: RowInput::Tokens(tokens),
            position,
            tables: tables.clone(),
            logits: LogitsWanted::Last,
            adapter: None,
        }],
    };

    // Once without a clock, so that pages and scratch are there.
    run(&mut executor, &step(ids.clone(), 0))?;
    let (mut output, prefill) = run(&mut executor, &step(ids.clone(), 0))?;
    println!(
        "prefill of {}: {:.1} ms, {:.0} tok/s, {:.0} GFLOP/s",
        ids.len(),
        prefill.as_secs_f64() * 1e3,
        ids.len() as f64 / prefill.as_secs_f64(),
        output.work.ops() as f64 / prefill.as_secs_f64() / 1e9,
    );
    let mut tokens = Vec::new();
    let mut times: Vec<Duration> = Vec::new();
    let mut bytes = 0;
    for position in (ids.len() as u32..).take(new) {
        let logits = &output.logits;
        let token = (0..logits.len())
            .max_by(|a, b| logits[*a].total_cmp(&logits[*b]))
            .unwrap_or(0);
        tokens.push(token as u32);
        executor.recycle(output);
        let (next, time) = run(&mut executor, &step(vec![token as u32], position))?;
        bytes += next.work.bytes();
        times.push(time);
        output = next;
    }
    println!("tokens {tokens:?}");
    let sum: f64 = times.iter().map(Duration::as_secs_f64).sum();
    times.sort_unstable();
    if let Some(median) = times.get(times.len() / 2) {
        println!(
            "decode: {:.1} tok/s ({:.2} ms median), {:.1} GB/s",
            times.len() as f64 / sum,
            median.as_secs_f64() * 1e3,
            bytes as f64 / sum / 1e9,
        );
    }
    Ok(())
}

fn run(
    executor: &mut CpuExecutor,
    plan: &StepPlan,
) -> Result<(StepOutput, Duration), baton_engine::step::Error> {
    let start = Instant::now();
    executor.submit(plan)?;
    loop {
        if let StepEvent::Done(output) = executor.poll()? {
            return Ok((output, start.elapsed()));
        }
    }
}
