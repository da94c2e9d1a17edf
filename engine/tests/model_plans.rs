//! The executor's contract: wrong plans are refused before anything is computed, a step
//! can be dropped, copied blocks are whole copies, and costs are counted.

#[path = "model_support/allocations.rs"]
mod allocations;
#[path = "model_support/runner.rs"]
mod runner;

use allocations::calls_of;
use baton_engine::step::{
    BLOCK_NONE, Error, Executor, LogitsWanted, PlanRow, RowInput, StepEvent, StepPlan,
};
use runner::{Runner, Setup, fixture, open};

fn small(path: &str) -> Runner {
    let model = open(&fixture(path));
    let setup = Setup {
        tokens: 64,
        step_tokens_max: 40,
        ..Setup::default()
    };
    Runner::new(&model, setup)
}

/// A row that is right for RAND: one group of full attention.
fn row() -> PlanRow {
    PlanRow {
        input: RowInput::Tokens(vec![5; 20]),
        position: 0,
        tables: vec![vec![0, 1]],
        logits: LogitsWanted::Last,
        adapter: None,
    }
}

#[test]
fn wrong_plans_are_refused_by_row_and_field() {
    let mut runner = small("rand");
    let blocks = runner.memory.blocks(0);
    let cases: Vec<(PlanRow, &str, &str)> = vec![
        (
            PlanRow {
                input: RowInput::OutputOf { row: 0 },
                ..row()
            },
            "input",
            "pipeline",
        ),
        (
            PlanRow {
                input: RowInput::Tokens(vec![]),
                ..row()
            },
            "input",
            "no tokens",
        ),
        (
            PlanRow {
                input: RowInput::Tokens(vec![300]),
                ..row()
            },
            "input",
            "300",
        ),
        (
            PlanRow {
                input: RowInput::Tokens(vec![5; 41]),
                tables: vec![vec![0; 3]],
                ..row()
            },
            "input",
            "40 tokens",
        ),
        (
            PlanRow {
                position: 4077,
                tables: vec![vec![0; 300]],
                ..row()
            },
            "position",
            "4096",
        ),
        (
            PlanRow {
                position: u32::MAX,
                ..row()
            },
            "position",
            "4096",
        ),
        (
            PlanRow {
                tables: vec![],
                ..row()
            },
            "tables",
            "0 tables",
        ),
        (
            PlanRow {
                tables: vec![vec![0]],
                ..row()
            },
            "tables",
            "needs 2",
        ),
        (
            PlanRow {
                tables: vec![vec![0, blocks]],
                ..row()
            },
            "tables",
            "is not below",
        ),
        (
            PlanRow {
                tables: vec![vec![BLOCK_NONE, 1]],
                ..row()
            },
            "tables",
            "is not below",
        ),
        (
            PlanRow {
                adapter: Some(3),
                ..row()
            },
            "adapter",
            "not offered",
        ),
    ];
    for (wrong, field, detail) in cases {
        let plan = StepPlan {
            rows: vec![row(), wrong],
        };
        match runner.executor.submit(&plan) {
            Err(Error::InvalidPlan {
                row: 1,
                field: named,
                message,
            }) => {
                assert_eq!(named, field, "{message}");
                assert!(message.contains(detail), "no `{detail}` in: {message}");
            }
            other => panic!("{field}: {other:?}"),
        }
        assert!(matches!(runner.executor.poll(), Err(Error::NoStep)));
    }
    assert!(runner.executor.submit(&StepPlan { rows: vec![] }).is_err());
    assert_eq!(runner.run(vec![row()]).len(), 1);
}

#[test]
fn a_window_needs_no_blocks_behind_it() {
    let mut runner = small("rand-swa");
    let mut sequence = runner.sequence();
    for _ in 0..3 {
        let part = runner.row(&mut sequence, &[7; 16], LogitsWanted::None);
        assert!(runner.run(vec![part]).is_empty());
    }
    let mut next = runner.row(&mut sequence, &[7], LogitsWanted::Last);
    // Position 48 sees 17..=48: the first block has left the window of 32.
    assert_eq!(next.tables[1][0], BLOCK_NONE);
    assert_ne!(next.tables[0][0], BLOCK_NONE);
    assert!(
        runner.run(vec![next.clone()])[0]
            .iter()
            .all(|value| value.is_finite())
    );
    next.tables[1][1] = BLOCK_NONE;
    assert!(
        runner
            .executor
            .submit(&StepPlan { rows: vec![next] })
            .is_err()
    );
}

#[test]
fn a_dropped_step_leaves_the_next_one_as_it_would_have_been() {
    let mut runner = small("rand");
    let expected = runner.run(vec![row()]);
    runner
        .executor
        .submit(&StepPlan {
            rows: vec![row(), row()],
        })
        .unwrap();
    assert!(matches!(
        runner.executor.poll(),
        Ok(StepEvent::LayerDone { layer: 0 })
    ));
    runner.executor.abort();
    assert!(matches!(runner.executor.poll(), Err(Error::NoStep)));
    assert_eq!(runner.run(vec![row()]), expected);
}

#[test]
fn a_copied_block_serves_like_the_original() {
    let mut runner = small("rand");
    runner.run(vec![row()]);
    let decode = |tables: Vec<u32>| PlanRow {
        input: RowInput::Tokens(vec![9]),
        position: 20,
        tables: vec![tables],
        logits: LogitsWanted::Last,
        adapter: None,
    };
    runner.executor.copy_blocks(0, &[(0, 7), (1, 8)]).unwrap();
    let copied = runner.run(vec![decode(vec![7, 8])]);
    assert_eq!(runner.run(vec![decode(vec![0, 1])]), copied);
    let blocks = runner.memory.blocks(0);
    assert!(runner.executor.copy_blocks(0, &[(0, blocks)]).is_err());
    assert!(runner.executor.copy_blocks(1, &[(0, 0)]).is_err());
}

#[test]
fn all_positions_logits_equal_those_of_single_steps() {
    let mut runner = small("rand-swa");
    let tokens: Vec<u32> = (10..49).collect();
    let mut sequence = runner.sequence();
    let all = runner.row(&mut sequence, &tokens, LogitsWanted::All);
    let all = runner.run(vec![all]);
    let mut single = runner.sequence();
    for (token, expected) in tokens.iter().zip(&all) {
        assert_eq!(&runner.decode(&mut single, *token), expected);
    }
}

/// The ids that a step of such rows gives alone, if it does.
fn best_alone(runner: &mut Runner, rows: Vec<PlanRow>) -> Vec<Option<u32>> {
    runner.executor.submit(&StepPlan { rows }).unwrap();
    loop {
        if let StepEvent::Done(output) = runner.executor.poll().unwrap() {
            assert_eq!(output.best.is_empty(), !output.logits.is_empty());
            let best = output.best.clone();
            runner.executor.recycle(output);
            return best;
        }
    }
}

#[test]
fn best_ids_alone_are_those_of_the_logits() {
    let mut runner = small("rand");
    let rows = |logits: [LogitsWanted; 2]| {
        let row = |block: u32, tokens: &[u32], logits| PlanRow {
            input: RowInput::Tokens(tokens.to_vec()),
            tables: vec![vec![block]],
            logits,
            ..row()
        };
        vec![row(0, &[9, 4, 7], logits[0]), row(1, &[11; 5], logits[1])]
    };
    let logits = runner.run(rows([LogitsWanted::Last; 2]));
    for known in [0, 1, 100, 300] {
        let expected = |row: &Vec<f32>| {
            let known = &row[..known as usize];
            let better = |best: usize, id| if known[id] > known[best] { id } else { best };
            (0..known.len()).reduce(better).map(|id| id as u32)
        };
        let expected: Vec<Option<u32>> = logits.iter().map(expected).collect();
        let best = LogitsWanted::Best { known };
        assert_eq!(
            best_alone(&mut runner, rows([best; 2])),
            expected,
            "{known}"
        );
        // Rows that want different things all get their logits.
        assert_eq!(
            runner.run(rows([best, LogitsWanted::Last])),
            logits,
            "{known}"
        );
    }
}

#[test]
fn costs_count_what_a_step_needs() {
    let mut runner = small("rand");
    let cost = |runner: &mut Runner, rows: Vec<PlanRow>| {
        runner.executor.submit(&StepPlan { rows }).unwrap();
        loop {
            if let StepEvent::Done(output) = runner.executor.poll().unwrap() {
                break (output.work.ops(), output.work.bytes());
            }
        }
    };
    let one = |position: u32| PlanRow {
        input: RowInput::Tokens(vec![5]),
        position,
        tables: vec![vec![0, 1]],
        ..row()
    };
    let (flops, bytes) = cost(&mut runner, vec![one(0)]);
    // Two operations per weight that is multiplied: all but the embedding and the norms
    // (heads of 8 are stored as 16, so attention counts a little more).
    let weights = runner.model.parameters() - 300 * 64;
    assert!(
        flops > 2 * weights * 99 / 100 && flops < 3 * weights,
        "{flops} for {weights}"
    );
    assert!(bytes >= runner.model.weight_bytes());
    let (two_flops, two_bytes) = cost(&mut runner, vec![one(0), one(0)]);
    assert_eq!(two_flops, 2 * flops);
    // Weights are read once.
    assert!(
        two_bytes < bytes + bytes / 10,
        "{two_bytes} for two, {bytes} for one"
    );
    let (later, _) = cost(&mut runner, vec![one(19)]);
    // 19 more positions, 4 layers, 8 heads of 16, a product each for score and sum.
    assert_eq!(later - flops, 19 * 4 * 8 * 16 * 4);
}

#[test]
fn a_step_in_the_steady_state_allocates_nothing() {
    let mut runner = small("rand-swa");
    let mut sequence = runner.sequence();
    let prompt = runner.row(&mut sequence, &[7; 20], LogitsWanted::Last);
    let decode = runner.row(&mut sequence, &[8], LogitsWanted::Last);
    let plan = StepPlan {
        rows: vec![decode, prompt],
    };
    let mut step = || {
        runner.executor.submit(&plan).unwrap();
        loop {
            if let StepEvent::Done(output) = runner.executor.poll().unwrap() {
                runner.executor.recycle(output);
                break;
            }
        }
    };
    step();
    let ((), calls) = calls_of(step);
    assert_eq!(calls, 0);
}
