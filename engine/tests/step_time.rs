//! The prediction of step times against machines whose times are known, and against
//! observations that nobody should believe.

use std::time::Duration;

use baton_engine::step_time::{DeviceRates, StepTimeModel};
use baton_engine::step_work::StepWork;
use proptest::prelude::*;

const RATES: DeviceRates = DeviceRates {
    product_ops_per_second: 1e12,
    attention_ops_per_second: 300e9,
    bytes_per_second: 30e9,
};

/// A model of 135M parameters in 97 MB with 23 KiB of KV a token.
fn work(sequences: u64, tokens_each: u64, context: u64) -> StepWork {
    let tokens = sequences * tokens_each;
    let seen = sequences * tokens_each * (context + tokens_each / 2);
    StepWork {
        tokens,
        logits: sequences,
        sequences,
        weight_bytes: 97_000_000,
        product_ops: 213_000_000 * tokens + 56_000_000 * sequences,
        attention_ops: 4 * 576 * 30 * seen,
        kv_bytes: 23_040 * sequences * (context + 2 * tokens_each),
    }
}

/// A machine at some distance from its limits. `tokens_per_pass` is how many tokens one
/// pass over the weights serves while it is bound by memory.
#[derive(Clone, Copy, Debug)]
struct Machine {
    step_us: f64,
    read: f64,
    products: f64,
    attention: f64,
    kv: f64,
}

impl Machine {
    fn time(&self, work: &StepWork) -> Duration {
        let read = work.weight_bytes as f64 / (RATES.bytes_per_second * self.read);
        let compute = work.product_ops as f64 / (RATES.product_ops_per_second * self.products);
        let attention = work.attention_ops as f64
            / (RATES.attention_ops_per_second * self.attention)
            + work.kv_bytes as f64 / (RATES.bytes_per_second * self.kv);
        Duration::from_secs_f64(self.step_us * 1e-6 + read.max(compute) + attention)
    }
}

/// Sizes a worker meets: decode of 1 to 64 sequences and prefill chunks.
fn sweep() -> Vec<StepWork> {
    let decode = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
        .into_iter()
        .flat_map(|sequences| [16, 128, 700, 2048, 8000].map(|at| work(sequences, 1, at)));
    let prefill = [16, 64, 128, 256, 512, 2048]
        .into_iter()
        .flat_map(|tokens| [0, 512, 2048].map(|at| work(1, tokens, at)));
    decode.chain(prefill).collect()
}

fn error(model: &StepTimeModel, work: &StepWork, took: Duration) -> f64 {
    (model.predict(work).as_secs_f64() / took.as_secs_f64() - 1.0).abs()
}

/// Median and 95th percentile of the relative errors over the sweep.
fn errors(model: &StepTimeModel, machine: &Machine) -> (f64, f64) {
    let mut errors: Vec<f64> = sweep()
        .iter()
        .map(|work| error(model, work, machine.time(work)))
        .collect();
    errors.sort_by(f64::total_cmp);
    (errors[errors.len() / 2], errors[errors.len() * 95 / 100])
}

fn model() -> StepTimeModel {
    StepTimeModel::new(RATES).unwrap()
}

fn machine() -> impl Strategy<Value = Machine> {
    (10.0..500.0, 0.2..1.0, 0.1..0.8, 0.05..0.9, 0.1..1.0).prop_map(
        |(step_us, read, products, attention, kv)| Machine {
            step_us,
            read,
            products,
            attention,
            kv,
        },
    )
}

const FAIR: Machine = Machine {
    step_us: 150.0,
    read: 0.6,
    products: 0.5,
    attention: 0.3,
    kv: 0.5,
};

#[test]
fn before_any_step_half_of_the_limits_is_assumed() {
    let decode = model().predict(&work(1, 1, 128)).as_secs_f64();
    let least = 97e6 / 30e9;
    assert!((2.0 * least..3.0 * least).contains(&decode), "{decode}");
    let prefill = model().predict(&work(1, 2048, 0)).as_secs_f64();
    let least = 213e6 * 2048.0 / 1e12 + 4.0 * 576.0 * 30.0 * 2048.0 * 1024.0 / 300e9;
    assert!((2.0 * least..2.2 * least).contains(&prefill), "{prefill}");
    assert_eq!(model().predict(&StepWork::default()), Duration::ZERO);
    let deep = model().predict(&work(1, 1, 8000));
    assert!(deep > model().predict(&work(1, 1, 128)));
}

#[test]
fn rates_that_are_none_are_refused_by_field() {
    for (rates, field) in [
        (
            DeviceRates {
                bytes_per_second: 0.0,
                ..RATES
            },
            "bytes_per_second",
        ),
        (
            DeviceRates {
                product_ops_per_second: f64::NAN,
                ..RATES
            },
            "product_ops_per_second",
        ),
        (
            DeviceRates {
                attention_ops_per_second: f64::INFINITY,
                ..RATES
            },
            "attention_ops_per_second",
        ),
    ] {
        assert_eq!(StepTimeModel::new(rates).unwrap_err().field, field);
    }
    assert!(StepTimeModel::new(DeviceRates::assumed(0)).is_ok());
}

#[test]
fn equal_observations_give_equal_models() {
    let (mut a, mut b) = (model(), model());
    for work in sweep() {
        a.observe(&work, FAIR.time(&work));
        b.observe(&work, FAIR.time(&work));
    }
    assert_eq!(a.coefficients(), b.coefficients());
    assert_eq!(a.steps_observed(), sweep().len() as u64);
}

#[test]
fn decode_does_not_wash_out_what_was_learned_of_prefill() {
    let mut model = model();
    let chunk = work(1, 512, 0);
    for _ in 0..20 {
        model.observe(&chunk, FAIR.time(&chunk));
    }
    for step in 0..20_000_u64 {
        let decode = work(4, 1, 100 + step % 300);
        model.observe(&decode, FAIR.time(&decode));
    }
    assert!(error(&model, &chunk, FAIR.time(&chunk)) < 0.05);
    let decode = work(4, 1, 250);
    assert!(error(&model, &decode, FAIR.time(&decode)) < 0.05);
}

#[test]
fn a_machine_that_becomes_slower_is_followed() {
    let mut model = model();
    let decode = work(4, 1, 300);
    for _ in 0..500 {
        model.observe(&decode, FAIR.time(&decode));
    }
    let slower = FAIR.time(&decode) * 3;
    for _ in 0..300 {
        model.observe(&decode, slower);
    }
    assert!(error(&model, &decode, slower) < 0.05);
}

#[test]
fn an_interrupted_step_now_and_then_moves_little() {
    let mut model = model();
    for round in 0..20 {
        for (at, work) in sweep().iter().enumerate() {
            let took = FAIR.time(work);
            // One in nine steps takes five times as long.
            let interrupted = (at + round) % 9 == 0;
            model.observe(work, if interrupted { took * 5 } else { took });
        }
    }
    let (median, p95) = errors(&model, &FAIR);
    assert!(median < 0.12 && p95 < 0.35, "{median} {p95}");
}

#[test]
fn slow_builds_are_learned_from_few_steps() {
    let slow = Machine {
        step_us: 20_000.0,
        read: 0.005,
        products: 0.004,
        attention: 0.002,
        kv: 0.004,
    };
    let mut model = model();
    for work in sweep().iter().step_by(4) {
        model.observe(work, slow.time(work));
    }
    let (median, p95) = errors(&model, &slow);
    assert!(median < 0.2 && p95 < 0.5, "{median} {p95}");
}

/// Any work at all, sensible or not.
fn any_work() -> impl Strategy<Value = StepWork> {
    let number = || prop_oneof![Just(0), Just(1), 1..1_000_000_000_u64, Just(u64::MAX)];
    [
        number(),
        number(),
        number(),
        number(),
        number(),
        number(),
        number(),
    ]
    .prop_map(
        |[
            tokens,
            logits,
            sequences,
            weight_bytes,
            product_ops,
            attention_ops,
            kv_bytes,
        ]| {
            StepWork {
                tokens,
                logits,
                sequences,
                weight_bytes,
                product_ops,
                attention_ops,
                kv_bytes,
            }
        },
    )
}

fn any_time() -> impl Strategy<Value = Duration> {
    prop_oneof![
        Just(Duration::ZERO),
        Just(Duration::from_nanos(1)),
        (1..u64::MAX / 2).prop_map(Duration::from_nanos),
        Just(Duration::MAX),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Learned from every third size of a sweep, in an order of its own, judged on all.
    #[test]
    fn any_machine_is_learned(machine in machine(), seed in 1..1000_usize) {
        let mut model = model();
        let sweep = sweep();
        let training: Vec<&StepWork> = sweep.iter().step_by(3).collect();
        for step in 0..10 * training.len() {
            let work = training[(step * 7 + seed) % training.len()];
            model.observe(work, machine.time(work));
        }
        let (median, p95) = errors(&model, &machine);
        prop_assert!(median < 0.10 && p95 < 0.30, "{median} {p95} {:?}", model.coefficients());
    }

    #[test]
    fn hostile_observations_leave_predictions_finite_and_are_recovered_from(
        hostile in proptest::collection::vec((any_work(), any_time()), 1..60),
        probe in any_work(),
    ) {
        let mut model = model();
        for (work, took) in &hostile {
            model.observe(work, *took);
            for coefficient in model.coefficients() {
                prop_assert!(coefficient.is_finite() && coefficient >= 0.0);
            }
            prop_assert!(model.predict(&probe) <= Duration::from_secs(3600));
            prop_assert!((0.0..=1.0).contains(&model.deviation(&probe)));
        }
        for _ in 0..40 {
            for work in sweep() {
                model.observe(&work, FAIR.time(&work));
            }
        }
        let (median, _) = errors(&model, &FAIR);
        prop_assert!(median < 0.25, "{median} {:?}", model.coefficients());
    }
}
