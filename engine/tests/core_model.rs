//! The engine with a real decoder: tight pools, chunks, forks and caches change no token.
//!
//! The oracle is the same engine with one request at a time, a large pool, no prefix
//! cache and the prompt in one chunk.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use baton_engine::api::{Command, Event, Load, RequestKey, Submission, Work};
use baton_engine::config::{EngineConfig, PoolSize, Role};
use baton_engine::engine::Engine;
use baton_engine::model::{LoadOptions, Model};
use baton_proto::kv_layout::KvDtype;
use baton_proto::sampling::{SampledToken, SamplingParams};

type Outputs = BTreeMap<(u64, u32), Vec<SampledToken>>;

fn model(name: &str) -> Arc<Model> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/fixtures")
        .join(name);
    Model::open(&path, &LoadOptions::default(), &mut |_, _| {}).unwrap()
}

fn oracle_config(dtype: KvDtype) -> EngineConfig {
    let mut config = EngineConfig::new(Role::Decode, "rand");
    config.kv_dtype = dtype;
    config.pool = PoolSize::Tokens(4096);
    config.prefix_cache = false;
    config.limits.chunk_tokens = 512;
    config.limits.step_tokens_max = 1024;
    config
}

/// Six requests that share a prefix and grow to four times their prompt.
fn submissions() -> Vec<Submission> {
    (1..=6_u64)
        .map(|key| {
            let token =
                |at: u64| ((at * at * 7 + at * 13 + key * u64::from(at > 34)) % 250 + 5) as u32;
            Submission {
                key: RequestKey(key),
                request_id: "r".into(),
                work: Work::Local,
                prompt: (0..41).map(token).collect(),
                forced: Vec::new(),
                sampling: SamplingParams {
                    temperature: if key % 2 == 0 { 0.0 } else { 0.8 },
                    n: if key % 3 == 0 { 2 } else { 1 },
                    seed: key,
                    max_tokens: 80,
                    ignore_eos: true,
                    logprobs: Some(2),
                    ..SamplingParams::default()
                },
                cache_salt: Vec::new(),
                priority: 0,
                use_cache: true,
                itl_target: None,
            }
        })
        .collect()
}

/// Runs submissions, `at_once` or one after the other, and returns their tokens.
fn serve(model: &Arc<Model>, config: EngineConfig, at_once: bool) -> (Outputs, Load) {
    let (events, heard) = channel();
    let sink = Box::new(move |event| drop(events.send(event)));
    let engine = Engine::start(Arc::clone(model), config, sink).unwrap();
    let mut outputs = Outputs::new();
    let mut wait = |count: usize| {
        let mut released = 0;
        while released < count {
            match heard
                .recv_timeout(Duration::from_secs(60))
                .expect("the engine goes on")
            {
                Event::Tokens(tokens) => {
                    for token in tokens {
                        let output = outputs.entry((token.key.0, token.choice)).or_default();
                        assert_eq!(output.len(), token.index as usize);
                        output.push(token.token);
                    }
                }
                Event::Released { .. } => released += 1,
                Event::Rejected { rejection, .. } => panic!("{rejection:?}"),
                Event::Failed { error, .. } => panic!("{error}"),
                _ => {}
            }
        }
    };
    let submissions = submissions();
    let count = submissions.len();
    for submission in submissions {
        engine.send(Command::Submit(Box::new(submission))).unwrap();
        if !at_once {
            wait(1);
        }
    }
    if at_once {
        wait(count);
    }
    let load = engine.load();
    engine.stop();
    (outputs, load)
}

#[test]
fn a_crowded_engine_gives_the_tokens_of_a_quiet_one() {
    for (name, dtype) in [
        ("rand", KvDtype::F16),
        ("rand", KvDtype::F32),
        ("rand-swa", KvDtype::Bf16),
    ] {
        let model = model(name);
        let (expected, quiet) = serve(&model, oracle_config(dtype), false);
        assert_eq!(
            (quiet.preemptions_total, quiet.prefix_hits_tokens_total),
            (0, 0)
        );
        for (block_size, chunk_tokens) in [(16, 16), (32, 64)] {
            let mut config = oracle_config(dtype);
            config.block_size = block_size;
            config.pool = PoolSize::Tokens(320);
            config.prefix_cache = true;
            config.limits.chunk_tokens = chunk_tokens;
            let (outputs, load) = serve(&model, config, true);
            // Window blocks are charged whole at admission, so with a window these few
            // blocks let fewer sequences in and nobody needs to be preempted.
            let windows = load.blocks.len() > 1;
            assert!(
                windows || load.preemptions_total > 0,
                "{name} {block_size}: {load:?}"
            );
            assert!(
                load.prefix_hits_tokens_total > 0,
                "{name} {block_size}: {load:?}"
            );
            assert!(
                outputs == expected,
                "{name} {dtype} {block_size} {chunk_tokens}"
            );
            assert_eq!((load.requests_running, load.requests_waiting), (0, 0));
            for counts in load.blocks {
                assert_eq!(counts.free + counts.cached, counts.total);
            }
        }
    }
}
