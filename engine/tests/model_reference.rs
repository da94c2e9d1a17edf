//! Logits against an independent f32 reference, and their independence of neighbours,
//! chunks, block size, threads and instruction set.

#[path = "model_support/runner.rs"]
mod runner;

use baton_engine::model::config::{GateActivation, Pairing};
use baton_engine::model::{ModelConfig, WeightFormat};
use baton_engine::step::LogitsWanted;
use baton_kernels::Isa;
use baton_proto::kv_layout::KvDtype;
use runner::{Runner, Setup, argmax, fixture, open, open_as, real_model};
use serde_json::Value;

fn reference(model: &str) -> Value {
    let text = std::fs::read_to_string(fixture("reference_logits.json")).unwrap();
    let mut all: Value = serde_json::from_str(&text).unwrap();
    all[model].take()
}

fn ids(value: &Value) -> Vec<u32> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|id| id.as_u64().unwrap() as u32)
        .collect()
}

fn floats(value: &Value) -> Vec<f32> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|v| v.as_f64().unwrap() as f32)
        .collect()
}

/// Float weights and f32 KV: only the order of sums differs from the reference.
const EXACT_TOLERANCE: f32 = 1e-3;

/// Every prompt, whole and in chunks of 24 (which no block size divides): probes, top
/// logits, and eight greedy tokens.
fn check_exact(name: &str, path: &str) {
    let model = open(&fixture(path));
    let reference = reference(name);
    let probes = ids(&reference["probe_ids"]);
    let mut worst = 0.0_f32;
    for prompt in reference["prompts"].as_array().unwrap() {
        let tokens = ids(&prompt["ids"]);
        for chunk in [24, tokens.len()] {
            let mut runner = Runner::new(&model, Setup::default());
            let (mut sequence, mut logits) = runner.prefill(&tokens, chunk);
            let what = format!("{path}, {} tokens in chunks of {chunk}", tokens.len());
            for (id, expected) in probes.iter().zip(floats(&prompt["probes"])) {
                let difference = (logits[*id as usize] - expected).abs();
                worst = worst.max(difference);
                assert!(
                    difference < EXACT_TOLERANCE,
                    "{what}: logit {id} is off by {difference}"
                );
            }
            for top in prompt["top"].as_array().unwrap() {
                let (id, expected) = (top[0].as_u64().unwrap(), top[1].as_f64().unwrap() as f32);
                let difference = (logits[id as usize] - expected).abs();
                worst = worst.max(difference);
                assert!(
                    difference < EXACT_TOLERANCE,
                    "{what}: logit {id} is off by {difference}"
                );
            }
            for (step, (expected, gap)) in ids(&prompt["greedy"])
                .into_iter()
                .zip(floats(&prompt["gaps"]))
                .enumerate()
            {
                // A gap below the tolerance does not say which token comes first.
                if gap < 2.0 * EXACT_TOLERANCE {
                    break;
                }
                let token = argmax(&logits);
                assert_eq!(token, expected, "{what}: greedy token {step}");
                logits = runner.decode(&mut sequence, token);
            }
        }
        if let Some(every) = prompt.get("every_position") {
            let mut runner = Runner::new(&model, Setup::default());
            let mut sequence = runner.sequence();
            let row = runner.row(&mut sequence, &tokens, LogitsWanted::All);
            let logits = runner.run(vec![row]);
            let expected = floats(&every["probe0"]);
            assert_eq!(logits.len(), expected.len());
            for (position, (row, expected)) in logits.iter().zip(expected).enumerate() {
                let difference = (row[probes[0] as usize] - expected).abs();
                worst = worst.max(difference);
                assert!(
                    difference < EXACT_TOLERANCE,
                    "{path}, position {position}: {difference}"
                );
            }
        }
    }
    println!("{path}: largest difference {worst:e}");
}

#[test]
fn rand_folder_gives_the_reference_logits() {
    check_exact("rand", "rand");
}

#[test]
fn rand_gguf_gives_the_reference_logits() {
    check_exact("rand", "rand.gguf");
}

#[test]
fn rand_with_sliding_windows_gives_the_reference_logits() {
    check_exact("rand-swa", "rand-swa");
}

#[test]
fn qwen2_with_biases_no_configuration_mentions_gives_the_reference_logits() {
    check_exact("tiny-qwen2", "tiny-qwen2");
    check_exact("tiny-qwen2", "tiny-qwen2.gguf");
}

#[test]
fn qwen3_with_its_own_head_size_gives_the_reference_logits() {
    check_exact("tiny-qwen3", "tiny-qwen3");
}

#[test]
fn llama_with_biases_and_scaled_rope_gives_the_reference_logits() {
    check_exact("tiny-llama-bias", "tiny-llama-bias");
}

/// Real, quantised models, against exact arithmetic. The engine rounds activations to
/// int8 codes, so it may be off by the tolerance the file states and the fixtures'
/// README justifies; so is the first place where the gap is small.
fn check_real(name: &str) {
    let Some(path) = real_model(&format!("{name}.gguf")) else {
        return;
    };
    let model = open(&path);
    let reference = reference(name);
    let tolerance = |key: &str| reference["tolerance"][key].as_f64().unwrap() as f32;
    let probes = ids(&reference["probe_ids"]);
    let (mut agreed, mut compared) = (0, 0);
    for prompt in reference["prompts"].as_array().unwrap() {
        let tokens = ids(&prompt["ids"]);
        let mut runner = Runner::new(&model, Setup::default());
        let (_, logits) = runner.prefill(&tokens, 128);
        let what = format!("{name}, {} {} tokens", prompt["kind"], tokens.len());
        // The peer (llama.cpp on this very file) is another int8 arithmetic: where its
        // own two best are as near as the roundings of both, either may come first.
        let peer = prompt["peer"]["top"].as_array().unwrap();
        let peer_logprob = |place: usize| peer[place][1].as_f64().unwrap() as f32;
        let same = argmax(&logits) == peer[0][0].as_u64().unwrap() as u32;
        compared += 1;
        agreed += u32::from(same);
        assert!(
            same || peer_logprob(0) - peer_logprob(1) < tolerance("top1_gap"),
            "{what}: the peer has another first place, by a clear gap"
        );
        let tops = prompt["top"].as_array().unwrap();
        let top = |place: usize| {
            (
                tops[place][0].as_u64().unwrap() as u32,
                tops[place][1].as_f64().unwrap() as f32,
            )
        };
        let figures = probes.iter().copied().zip(floats(&prompt["probes"]));
        let worst = figures
            .chain((0..tops.len()).map(top))
            .map(|(id, expected)| (logits[id as usize] - expected).abs())
            .fold(0.0, f32::max);
        let allowed = tolerance("named");
        println!("{what}: largest difference {worst}, {allowed} is allowed");
        assert!(
            worst < allowed,
            "{what}: off by {worst}, {allowed} is allowed"
        );
        if top(0).1 - top(1).1 >= tolerance("top1_gap") {
            assert_eq!(argmax(&logits), top(0).0, "{what}: first place");
        }
        if let Some(every) = prompt.get("every_position") {
            let mut runner = Runner::new(&model, Setup::default());
            let mut sequence = runner.sequence();
            let mut expected = ids(&every["argmax"]).into_iter();
            let mut same = 0;
            for part in tokens.chunks(50) {
                let row = runner.row(&mut sequence, part, LogitsWanted::All);
                for row in runner.run(vec![row]) {
                    same += u32::from(expected.next() == Some(argmax(&row)));
                }
            }
            let share = same as f32 / tokens.len() as f32;
            println!("{what}: {share} of the positions have the same first place");
            assert!(
                share >= tolerance("text_agreement"),
                "{what}: {share} have the same first place"
            );
        }
    }
    println!("{name}: {agreed} of {compared} first places are the peer's");
    assert!(agreed + 2 >= compared, "{name}: {agreed} of {compared}");
}

#[test]
fn smollm2_gives_the_reference_logits() {
    check_real("smollm2-135m-instruct");
}

#[test]
fn gemma3_gives_the_reference_logits() {
    check_real("gemma3-270m");
}

fn prompt(seed: u32, len: usize, vocab: u32) -> Vec<u32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            2 + (state >> 8) % (vocab - 2)
        })
        .collect()
}

/// The largest difference of a prompt's figures from the reference, under a configuration
/// with one thing wrong.
fn difference_with(path: &str, name: &str, change: impl Fn(&mut ModelConfig)) -> f32 {
    let model = open(&fixture(path));
    let mut config = model.config().clone();
    change(&mut config);
    let reference = reference(name);
    let probes = ids(&reference["probe_ids"]);
    let prompt = &reference["prompts"][4];
    let mut runner = Runner::with_config(&model, config);
    let (_, logits) = runner.prefill(&ids(&prompt["ids"]), 64);
    let expected = floats(&prompt["probes"]);
    probes
        .iter()
        .zip(expected)
        .map(|(id, value)| (logits[*id as usize] - value).abs())
        .fold(0.0, f32::max)
}

#[test]
fn the_reference_notices_each_part_of_the_graph_that_is_wrong() {
    type Change = fn(&mut ModelConfig);
    let cases: [(&str, &str, &str, Change); 9] = [
        ("rand.gguf", "rand", "pairing", |c| {
            c.rope_pairing = Pairing::Halves
        }),
        ("rand", "rand", "pairing", |c| {
            c.rope_pairing = Pairing::Interleaved
        }),
        ("rand", "rand", "attention scale", |c| {
            c.attention_scale *= 1.05
        }),
        ("rand", "rand", "epsilon", |c| c.norm_eps = 1e-2),
        ("rand-swa", "rand-swa", "window", |c| {
            for layer in &mut c.layers {
                layer.window = layer.window.map(|window| window + 1);
            }
        }),
        ("rand-swa", "rand-swa", "local rope base", |c| {
            c.layers[0].rope = 0
        }),
        ("rand-swa", "rand-swa", "embedding scale", |c| {
            c.embedding_scale = 1.0
        }),
        ("rand-swa", "rand-swa", "activation", |c| {
            c.activation = GateActivation::Silu
        }),
        ("rand-swa", "rand-swa", "soft cap", |c| {
            c.attention_soft_cap = Some(30.0)
        }),
    ];
    for (path, name, part, change) in cases {
        assert!(
            difference_with(path, name, |_| ()) < EXACT_TOLERANCE,
            "{path}"
        );
        let difference = difference_with(path, name, change);
        println!("{path} with a wrong {part}: off by {difference}");
        assert!(
            difference > 3.0 * EXACT_TOLERANCE,
            "{path}, {part}: only {difference}"
        );
    }
}

/// Pairs of rotated dimensions lie apart in one container and side by side in the other;
/// a wrong pairing drifts off slowly, so the continuation is long.
fn check_containers(folder: &str, file: &str) {
    let (folder, file) = (open(&fixture(folder)), open(&fixture(file)));
    for len in [5, 23, 77, 200] {
        let tokens = prompt(len as u32, len, folder.vocab_size() as u32);
        let mut runners = [&folder, &file].map(|model| Runner::new(model, Setup::default()));
        let [(mut a, mut logits), (mut b, mut other)] =
            runners.each_mut().map(|runner| runner.prefill(&tokens, 64));
        for step in 0..200 {
            let worst = logits
                .iter()
                .zip(&other)
                .map(|(a, b)| (a - b).abs())
                .fold(0.0, f32::max);
            assert!(
                worst < EXACT_TOLERANCE,
                "{len} tokens, step {step}: {worst}"
            );
            let token = argmax(&logits);
            logits = runners[0].decode(&mut a, token);
            other = runners[1].decode(&mut b, token);
        }
    }
}

#[test]
fn folder_and_gguf_of_one_model_agree_over_long_continuations() {
    check_containers("rand", "rand.gguf");
    check_containers("tiny-qwen2", "tiny-qwen2.gguf");
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|value| value.to_bits()).collect()
}

/// A prompt and four decode steps alone, chunked, among 15 neighbours of other lengths,
/// on other block sizes, instruction sets and thread counts: the same bits.
fn check_independence(path: &str, weights: WeightFormat) {
    let model = open_as(&fixture(path), weights);
    let vocab = model.vocab_size() as u32;
    let tokens = prompt(1, 100, vocab);
    let continuation = prompt(2, 4, vocab);
    for dtype in KvDtype::ALL {
        let base = Setup {
            dtype,
            tokens: 4096,
            ..Setup::default()
        };
        let alone = |setup: Setup, chunk: usize| {
            let mut runner = Runner::new(&model, setup);
            let (mut sequence, first) = runner.prefill(&tokens, chunk);
            let mut all = vec![bits(&first)];
            for token in &continuation {
                all.push(bits(&runner.decode(&mut sequence, *token)));
            }
            all
        };
        let expected = alone(base, tokens.len());
        assert!(
            expected
                .iter()
                .flatten()
                .all(|bits| f32::from_bits(*bits).is_finite())
        );
        for chunk in [1, 16, 24, 64] {
            assert_eq!(
                alone(base, chunk),
                expected,
                "{path} {weights} {dtype}: chunks of {chunk}"
            );
        }
        for block_size in [32, 64, 128] {
            let setup = Setup { block_size, ..base };
            assert_eq!(
                alone(setup, 64),
                expected,
                "{path} {weights} {dtype}: blocks of {block_size}"
            );
        }
        for isa in Isa::available() {
            for threads in [1, 2, 3] {
                let setup = Setup {
                    isa,
                    threads,
                    ..base
                };
                assert_eq!(
                    alone(setup, 40),
                    expected,
                    "{path} {weights} {dtype}: {isa}, {threads} threads"
                );
            }
        }

        let mut runner = Runner::new(&model, base);
        let mut sequences: Vec<_> = (0..16).map(|_| runner.sequence()).collect();
        let rows = |runner: &mut Runner, sequences: &mut [runner::Sequence], chunk: usize| {
            let mut rows = Vec::new();
            for (number, sequence) in sequences.iter_mut().enumerate() {
                let all = if number == 7 {
                    tokens.clone()
                } else {
                    prompt(100 + number as u32, 40 + number, vocab)
                };
                let from = (sequence.computed as usize).min(all.len());
                let part = &all[from..all.len().min(from + chunk)];
                if !part.is_empty() {
                    rows.push((number, runner.row(sequence, part, LogitsWanted::Last)));
                }
            }
            rows
        };
        let mut got = Vec::new();
        loop {
            let step = rows(&mut runner, &mut sequences, 48);
            if step.is_empty() {
                break;
            }
            let numbers: Vec<usize> = step.iter().map(|(number, _)| *number).collect();
            let logits = runner.run(step.into_iter().map(|(_, row)| row).collect());
            if let Some(at) = numbers.iter().position(|number| *number == 7) {
                got = bits(&logits[at]);
            }
        }
        assert_eq!(
            got, expected[0],
            "{path} {weights} {dtype}: prompt among neighbours"
        );
        for (token, expected) in continuation.iter().zip(&expected[1..]) {
            let step: Vec<_> = sequences
                .iter_mut()
                .enumerate()
                .map(|(number, sequence)| {
                    let token = if number == 7 {
                        *token
                    } else {
                        3 + number as u32
                    };
                    runner.row(sequence, &[token], LogitsWanted::Last)
                })
                .collect();
            let logits = runner.run(step);
            assert_eq!(
                &bits(&logits[7]),
                expected,
                "{path} {weights} {dtype}: decode among neighbours"
            );
        }
    }
}

#[test]
fn a_row_does_not_depend_on_neighbours_chunks_blocks_threads_or_instruction_set() {
    check_independence("tiny-qwen3", WeightFormat::Keep);
    check_independence("rand", WeightFormat::Keep);
    check_independence("rand-swa", WeightFormat::Keep);
}

#[test]
fn nor_with_weights_in_fewer_bits() {
    for weights in [WeightFormat::Q8, WeightFormat::Q4] {
        check_independence("rand", weights);
    }
    check_independence("rand-swa", WeightFormat::Q4);
}

#[test]
fn chunks_do_not_change_windowed_layers_at_any_length_around_the_window() {
    let model = open(&fixture("rand-swa"));
    for len in [1, 31, 32, 33, 64, 100, 200] {
        let tokens = prompt(len as u32, len, model.vocab_size() as u32);
        let all = |chunk: usize| {
            let mut runner = Runner::new(&model, Setup::default());
            let (mut sequence, first) = runner.prefill(&tokens, chunk);
            let mut logits = vec![bits(&first)];
            let mut token = argmax(&first);
            for _ in 0..40 {
                let next = runner.decode(&mut sequence, token);
                token = argmax(&next);
                logits.push(bits(&next));
            }
            logits
        };
        let expected = all(len);
        assert!(
            expected
                .iter()
                .flatten()
                .all(|bits| f32::from_bits(*bits).is_finite())
        );
        for chunk in [16, 24, 64] {
            assert_eq!(all(chunk), expected, "{len} tokens in chunks of {chunk}");
        }
    }
}
