//! The chain against naive spellings of the same rules, and the draw against chance.

use super::*;
use proptest::prelude::*;

fn params() -> SamplingParams {
    SamplingParams {
        max_tokens: 64,
        ..SamplingParams::default()
    }
}

/// One draw with index 0 of choice 0, no history.
fn draw(params: &SamplingParams, logits: &[f32]) -> Result<TokenId, Error> {
    draw_at(
        params,
        logits,
        &[],
        &[],
        Draw {
            choice: 0,
            index: 0,
        },
    )
}

fn draw_at(
    params: &SamplingParams,
    logits: &[f32],
    prompt: &[TokenId],
    output: &[TokenId],
    at: Draw,
) -> Result<TokenId, Error> {
    let rules = Rules::new(params, &[1], logits.len() as u32, prompt.len() as u32);
    let history = rules.replay(prompt, output);
    rules
        .draw(at, &history, logits, &mut Scratch::default())
        .map(|token| token.id)
}

fn naive_arg_max(logits: &[f32]) -> TokenId {
    let mut best = 0;
    for id in 0..logits.len() {
        if logits[id] > logits[best] {
            best = id;
        }
    }
    best as TokenId
}

/// The probabilities that remain, by definition, over a fully sorted vocabulary.
fn naive_distribution(params: &SamplingParams, logits: &[f32]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
    if params.top_k > 0 {
        order.truncate(params.top_k as usize);
    }
    let max = logits[order[0]];
    let weight = |id: &usize| {
        ((f64::from(logits[*id]) - f64::from(max)) / f64::from(params.temperature)).exp()
    };
    let total: f64 = order.iter().map(weight).sum();
    let mut sum = 0.0;
    let mut cut = order.len();
    for (at, id) in order.iter().enumerate() {
        sum += weight(id);
        if sum >= f64::from(params.top_p) * total - 1e-12 {
            cut = at + 1;
            break;
        }
    }
    order.truncate(cut);
    order.retain(|id| weight(id) >= f64::from(params.min_p));
    let total: f64 = order.iter().map(weight).sum();
    let mut distribution = vec![0.0; logits.len()];
    for id in &order {
        distribution[*id] = weight(id) / total;
    }
    distribution
}

fn check_draws_follow(params: &SamplingParams, logits: &[f32]) {
    let expected = naive_distribution(params, logits);
    let draws = 4000;
    let mut seen = vec![0_u32; logits.len()];
    for seed in 0..draws {
        let params = SamplingParams {
            seed,
            ..params.clone()
        };
        seen[draw(&params, logits).unwrap() as usize] += 1;
    }
    let mut chi_square = 0.0;
    let mut cells = 0;
    for (seen, probability) in seen.iter().zip(&expected) {
        let expected = probability * draws as f64;
        if expected == 0.0 {
            assert_eq!(*seen, 0, "a token outside the set was drawn");
        } else if expected >= 5.0 {
            chi_square += (f64::from(*seen) - expected).powi(2) / expected;
            cells += 1;
        }
    }
    // Mean + 5 standard deviations of chi-square with this many degrees of freedom;
    // the seeds are fixed, so this either always holds or never.
    let freedom = f64::from(cells);
    assert!(
        cells > 1 && chi_square < freedom + 5.0 * (2.0 * freedom).sqrt(),
        "{chi_square}/{cells}"
    );
}

#[test]
fn draws_follow_the_distribution_that_the_limits_leave() {
    let logits: Vec<f32> = (0..40).map(|id| ((id * 37 % 40) as f32) * 0.15).collect();
    for (temperature, top_k, top_p, min_p) in [
        (1.0, 0, 1.0, 0.0),
        (0.7, 0, 1.0, 0.0),
        (1.5, 8, 1.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (1.0, 0, 1.0, 0.2),
        (2.0, 20, 0.9, 0.05),
    ] {
        check_draws_follow(
            &SamplingParams {
                temperature,
                top_k,
                top_p,
                min_p,
                ..params()
            },
            &logits,
        );
    }
}

#[test]
fn a_draw_depends_on_seed_choice_and_position_alone() {
    let logits: Vec<f32> = (0..100).map(|id| (id % 7) as f32 * 0.1).collect();
    let params = SamplingParams {
        seed: 42,
        ..params()
    };
    let at = |choice, index| draw_at(&params, &logits, &[], &[], Draw { choice, index }).unwrap();
    let first: Vec<_> = (0..20).map(|index| at(0, index)).collect();
    assert_eq!(first, (0..20).map(|index| at(0, index)).collect::<Vec<_>>());
    assert_ne!(first, (0..20).map(|index| at(1, index)).collect::<Vec<_>>());
    // The position is absolute: prompt and output index add up.
    let shifted = draw_at(
        &params,
        &logits,
        &[3, 4],
        &[],
        Draw {
            choice: 0,
            index: 5,
        },
    )
    .unwrap();
    assert_eq!(shifted, first[7]);
}

#[test]
fn biases_of_100_force_and_ban() {
    let logits: Vec<f32> = (0..50).map(|id| id as f32).collect();
    for temperature in [0.0, 1.0, 100.0] {
        let with = |logit_bias| SamplingParams {
            temperature,
            logit_bias,
            ..params()
        };
        for seed in 0..20 {
            let seeded = |p: SamplingParams| SamplingParams { seed, ..p };
            assert_eq!(draw(&seeded(with(vec![(3, 100.0)])), &logits), Ok(3));
            let banned = (10..50).map(|id| (id, -100.0)).collect();
            assert!(draw(&seeded(with(banned)), &logits).unwrap() < 10);
        }
        let all = (0..50).map(|id| (id, -100.0)).collect();
        assert_eq!(draw(&with(all), &logits), Err(Error::NothingAllowed));
    }
}

#[test]
fn end_tokens_are_masked_until_min_tokens_were_made() {
    let mut logits = vec![0.0; 10];
    (logits[1], logits[7], logits[4]) = (9.0, 8.0, 1.0);
    let params = SamplingParams {
        temperature: 0.0,
        min_tokens: 2,
        stop_token_ids: vec![7],
        ..params()
    };
    let at = |params: &SamplingParams, index| {
        draw_at(params, &logits, &[5; 50], &[], Draw { choice: 0, index }).unwrap()
    };
    assert_eq!((at(&params, 0), at(&params, 1), at(&params, 2)), (4, 4, 1));
    let ignoring = SamplingParams {
        ignore_eos: true,
        ..params
    };
    assert_eq!(
        at(&ignoring, 0),
        1,
        "an ignored end token is an ordinary one"
    );
    let rules = Rules::new(&ignoring, &[1], 10, 50);
    assert_eq!(rules.end_after(1, 5), None);
    assert_eq!(rules.end_after(7, 1), None);
    assert_eq!(rules.end_after(7, 2), Some(FinishReason::Stop));
    assert_eq!(rules.end_after(3, 63), Some(FinishReason::Length));
}

#[test]
fn ids_the_tokenizer_does_not_know_are_never_chosen() {
    let logits = [0.0, 1.0, 2.0, 50.0, 60.0];
    for temperature in [0.0, 5.0] {
        let params = SamplingParams {
            temperature,
            logprobs: Some(5),
            ..params()
        };
        let rules = Rules::new(&params, &[], 3, 1);
        let history = rules.replay(&[0], &[]);
        for index in 0..30 {
            let token = rules
                .draw(
                    Draw { choice: 0, index },
                    &history,
                    &logits,
                    &mut Scratch::default(),
                )
                .unwrap();
            assert!(token.id < 3);
            assert_eq!(token.logprob.unwrap().top.len(), 3);
        }
    }
}

#[test]
fn logits_that_are_not_finite_fail_by_their_place_in_the_output() {
    let at = Draw {
        choice: 2,
        index: 7,
    };
    let greedy = SamplingParams {
        temperature: 0.0,
        ..params()
    };
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for id in [0, 17, 39] {
            let mut logits = vec![1.0; 40];
            logits[id] = bad;
            let error = Error::NotFinite {
                draw: at,
                position: 5 + 7,
                id: id as u32,
                count: 1,
                vocab_size: 40,
            };
            let text = error.to_string();
            for place in [
                "token `7`",
                "choice `2`",
                "position `12`",
                &format!("`{id}`"),
            ] {
                assert!(text.contains(place), "{text}");
            }
            for params in [&params(), &greedy] {
                assert_eq!(draw_at(params, &logits, &[3; 5], &[4; 7], at), Err(error));
            }
        }
    }
    // A penalty makes no infinity of the greatest numbers.
    let penalised = SamplingParams {
        repetition_penalty: 0.01,
        ..params()
    };
    let drawn = |logits: &[f32]| draw_at(&penalised, logits, &[3; 5], &[4; 7], at);
    let mut logits = vec![0.0; 40];
    (logits[3], logits[4]) = (f32::MAX, 1e37);
    assert!([3, 4].contains(&drawn(&logits).unwrap()));
    let penalised = SamplingParams {
        repetition_penalty: 100.0,
        ..params()
    };
    let drawn = |logits: &[f32]| draw_at(&penalised, logits, &[3; 5], &[4; 7], at);
    assert!(drawn(&[-1e37; 40]).is_ok());
    let huge = vec![f32::MAX; 40];
    assert!(draw(&params(), &huge).is_ok());
}

#[test]
fn log_probabilities_are_those_of_the_raw_distribution() {
    let logits: Vec<f32> = (0..30).map(|id| ((id * 11 % 30) as f32) * 0.3).collect();
    let params = SamplingParams {
        temperature: 0.3,
        logit_bias: vec![(2, 100.0)],
        frequency_penalty: 1.0,
        logprobs: Some(4),
        ..params()
    };
    let rules = Rules::new(&params, &[1], 30, 1);
    let history = rules.replay(&[0], &[2, 2]);
    let token = rules
        .draw(
            Draw {
                choice: 0,
                index: 2,
            },
            &history,
            &logits,
            &mut Scratch::default(),
        )
        .unwrap();
    let sum: f64 = logits.iter().map(|x| f64::from(*x).exp()).sum();
    let naive = |id: u32| (f64::from(logits[id as usize]) - sum.ln()) as f32;
    let logprob = token.logprob.unwrap();
    assert_eq!(token.id, 2);
    assert!((logprob.logprob - naive(2)).abs() < 1e-6);
    assert_eq!(logprob.top.len(), 4);
    assert_eq!(logprob.top[0].0, naive_arg_max(&logits));
    for pair in logprob.top.windows(2) {
        assert!(pair[0].1 >= pair[1].1);
    }
    for (id, value) in logprob.top {
        assert!(value.is_finite() && (value - naive(id)).abs() < 1e-6);
    }
}

#[test]
fn a_vocabulary_of_262144_is_drawn_from_without_sorting_it() {
    let logits: Vec<f32> = (0..262_144_u32)
        .map(|id| (id.wrapping_mul(2_654_435_761) >> 8) as f32 * 1e-6)
        .collect();
    let wide = SamplingParams {
        top_p: 0.999,
        temperature: 100.0,
        ..params()
    };
    let narrow = SamplingParams {
        top_p: 0.5,
        temperature: 0.01,
        ..params()
    };
    for params in [wide, narrow] {
        let expected = naive_distribution(&params, &logits);
        for seed in 0..3 {
            let id = draw(
                &SamplingParams {
                    seed,
                    ..params.clone()
                },
                &logits,
            )
            .unwrap();
            assert!(expected[id as usize] > 0.0);
        }
    }
    let greedy = SamplingParams {
        temperature: 0.0,
        ..params()
    };
    assert_eq!(draw(&greedy, &logits), Ok(naive_arg_max(&logits)));
}

proptest! {
    #[test]
    fn every_way_to_ask_for_greedy_is_greedy(
        logits in prop::collection::vec(-9.0_f32..9.0, 1..70),
        seed in any::<u64>(),
    ) {
        let expected = Ok(naive_arg_max(&logits));
        let zero = SamplingParams { temperature: 0.0, seed, ..params() };
        let one = SamplingParams { top_k: 1, seed, ..params() };
        let sure = SamplingParams { min_p: 1.0, seed, ..params() };
        // An unused bias takes the long way round.
        let long = SamplingParams { logit_bias: vec![(0, 0.0)], ..zero.clone() };
        for params in [zero, one, sure, long] {
            prop_assert_eq!(draw(&params, &logits), expected);
        }
    }

    #[test]
    fn limits_that_remove_nothing_change_nothing(
        logits in prop::collection::vec(-9.0_f32..9.0, 2..70),
        seed in any::<u64>(),
    ) {
        let plain = SamplingParams { seed, ..params() };
        let limited = SamplingParams { top_k: 1000, top_p: 1.0, ..plain.clone() };
        prop_assert_eq!(draw(&plain, &logits), draw(&limited, &logits));
        let limited = SamplingParams { min_p: 1e-12, ..plain.clone() };
        prop_assert_eq!(draw(&plain, &logits), draw(&limited, &logits));
    }

    #[test]
    fn penalties_equal_their_definition(
        logits in prop::collection::vec(-9.0_f32..9.0, 12),
        prompt in prop::collection::vec(0_u32..12, 1..20),
        output in prop::collection::vec(0_u32..12, 0..20),
        repetition in prop::sample::select(vec![1.0_f32, 1.5, 0.5]),
        presence in prop::sample::select(vec![0.0_f32, 1.5, -1.0]),
        frequency in prop::sample::select(vec![0.0_f32, 1.0, -0.5]),
    ) {
        let mut expected = logits.clone();
        for (id, logit) in expected.iter_mut().enumerate() {
            let id = id as u32;
            let count = output.iter().filter(|token| **token == id).count();
            if prompt.contains(&id) || count > 0 {
                *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
            }
            if count > 0 {
                *logit -= presence;
                *logit -= frequency * count as f32;
            }
        }
        let params = SamplingParams {
            temperature: 0.0,
            repetition_penalty: repetition,
            presence_penalty: presence,
            frequency_penalty: frequency,
            ..params()
        };
        let index = output.len() as u32;
        prop_assert_eq!(
            draw_at(&params, &logits, &prompt, &output, Draw { choice: 0, index }),
            Ok(naive_arg_max(&expected))
        );
        // Replaying all at once and pushing one by one remember the same.
        let rules = Rules::new(&params, &[], 12, prompt.len() as u32);
        let mut pushed = rules.replay(&prompt, &[]);
        output.iter().for_each(|token| pushed.push(*token));
        let token = rules.draw(Draw { choice: 0, index }, &pushed, &logits, &mut Scratch::default());
        prop_assert_eq!(token.map(|token| token.id), Ok(naive_arg_max(&expected)));
    }

    #[test]
    fn the_best_are_those_of_a_full_sort(
        logits in prop::collection::vec(prop::sample::select(vec![-1.0_f32, 0.5, 2.0, 3.0, 7.5]), 1..90),
        count in 1_usize..12,
    ) {
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        order.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b)));
        order.truncate(count);
        let mut kept = Vec::new();
        select::best(&logits, count, &mut kept);
        prop_assert_eq!(kept.iter().map(|candidate| candidate.id).collect::<Vec<_>>(), order);
    }
}

proptest! {
    #[test]
    fn what_takes_the_best_id_draws_the_best_id(
        logits in prop::collection::vec(-3_i8..3, 2..40),
        beyond in 0_usize..5,
        temperature in prop::sample::select(vec![0.0_f32, 0.0, 0.7]),
        bias in any::<bool>(),
        penalty in any::<bool>(),
        logprobs in any::<bool>(),
        min_tokens in 0_u32..2,
    ) {
        let logits: Vec<f32> = logits.into_iter().map(f32::from).collect();
        let known = logits.len().saturating_sub(beyond).max(1);
        let params = SamplingParams {
            temperature,
            logit_bias: if bias { vec![(0, 5.0)] } else { vec![] },
            frequency_penalty: if penalty { 1.0 } else { 0.0 },
            logprobs: logprobs.then_some(1),
            min_tokens,
            ..params()
        };
        let rules = Rules::new(&params, &[1], known as u32, 1);
        let history = rules.replay(&[1], &[]);
        let at = Draw { choice: 0, index: 0 };
        let asks_more = temperature > 0.0 || bias || penalty || logprobs || min_tokens > 0;
        let best_of = rules.takes_best_of(at, &history);
        prop_assert_eq!(best_of, (!asks_more).then_some(known as u32));
        if best_of.is_some() {
            let best = naive_arg_max(&logits[..known]);
            let drawn = rules.draw(at, &history, &logits, &mut Scratch::default());
            prop_assert_eq!(drawn, Rules::take_best(Some(best)));
        }
        prop_assert_eq!(Rules::take_best(None), Err(Error::NothingAllowed));
    }
}
