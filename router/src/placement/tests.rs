//! Placement as tables: who is there, what is asked, who gets it.

use baton_proto::kv_layout::{KvDtype, KvGroup, KvGroupKind, KvLayout, KvOrigin};

use super::*;

fn card() -> ModelCard {
    ModelCard {
        name: "m".into(),
        revision: "m@1".into(),
        architecture: "llama".into(),
        vocab_size: 300,
        tokenizer_size: 300,
        context_max: 4096,
        parameters: 1,
        created: 0,
        weight_bytes: 1,
        layout: KvLayout {
            block_size: 16,
            dtype: KvDtype::F16,
            scale_group: 0,
            kv_heads: 1,
            head_dim: 8,
            layers: 1,
            groups: vec![KvGroup {
                kind: KvGroupKind::Full,
                layers: vec![0],
            }],
            numerics: NumericsId([1; 16]),
            origin: Some(KvOrigin {
                model: "m".to_owned(),
                weights: "w".to_owned(),
                rope: "r".to_owned(),
                arithmetic: "a".to_owned(),
            }),
            shard: None,
        },
        tokenizer_hash: String::new(),
    }
}

pub(super) fn key(id: &str) -> WorkerKey {
    WorkerKey::new(id.into(), Epoch(1))
}

/// A worker by its id (`p..`, `d..`, `m..`): requests, tokens waiting, cached tokens.
pub(super) fn worker(
    id: &str,
    requests: u32,
    tokens_waiting: u32,
    cached_tokens: u32,
) -> Candidate {
    Candidate {
        key: key(id),
        role: match id.as_bytes()[0] {
            b'p' => Role::Prefill,
            b'd' => Role::Decode,
            _ => Role::Mixed,
        },
        protocol: protocol::CURRENT,
        card: Arc::new(card()),
        requests,
        tokens_waiting,
        cached_tokens,
        standing: Default::default(),
    }
}

fn with_card(mut worker: Candidate, change: impl FnOnce(&mut ModelCard)) -> Candidate {
    change(Arc::make_mut(&mut worker.card));
    worker
}

fn query() -> PlaceQuery {
    PlaceQuery {
        split_allowed: true,
        ..PlaceQuery::default()
    }
}

/// For a request that has to be exact.
fn question(query: &PlaceQuery, prompt_tokens: u32) -> Question<'_> {
    Question {
        query,
        prompt_tokens,
        numerics: None,
        exact: true,
        cut: &[],
        tie: 0,
    }
}

fn ask(
    candidates: &[Candidate],
    query: &PlaceQuery,
    prompt_tokens: u32,
    tie: u64,
) -> Result<Placement, Error> {
    let question = Question {
        tie,
        ..question(query, prompt_tokens)
    };
    LeastTokens::default().place(candidates, &question)
}

/// As [`placed`], for a request that need not be exact.
fn placed_freely(candidates: &[Candidate], prompt_tokens: u32) -> Result<String, Error> {
    let query = query();
    let question = Question {
        exact: false,
        ..question(&query, prompt_tokens)
    };
    let placement = LeastTokens::default().place(candidates, &question)?;
    Ok(show(&placement))
}

/// A worker whose KV is stored as `dtype`, with what follows from that.
fn storing(id: &str, dtype: KvDtype) -> Candidate {
    with_card(worker(id, 0, 0, 0), |card| {
        card.layout.dtype = dtype;
        card.layout.scale_group = dtype.scale_group();
        card.layout.numerics = NumericsId::derive(&[dtype.name().as_bytes()]);
    })
}

fn placed(candidates: &[Candidate], query: &PlaceQuery, prompt_tokens: u32) -> String {
    show(&ask(candidates, query, prompt_tokens, 0).unwrap())
}

fn show(placement: &Placement) -> String {
    match &placement.prefill {
        Some(prefill) => format!("{} {}", prefill.id, placement.decode.id),
        None => format!("local {}", placement.decode.id),
    }
}

#[test]
fn the_least_loaded_pair_gets_the_request() {
    for (candidates, wanted) in [
        (vec![worker("p1", 0, 0, 0), worker("d1", 0, 0, 0)], "p1 d1"),
        (
            vec![
                worker("p1", 3, 500, 0),
                worker("p2", 1, 100, 0),
                worker("d1", 4, 0, 0),
                worker("d2", 3, 0, 0),
            ],
            "p2 d2",
        ),
        // A cached prefix outweighs a shorter queue of fewer tokens.
        (
            vec![
                worker("p1", 3, 500, 960),
                worker("p2", 1, 100, 0),
                worker("d1", 0, 0, 0),
            ],
            "p1 d1",
        ),
        // But not a load that costs more than it saves.
        (
            vec![
                worker("p1", 0, 0, 0),
                worker("d1", 9, 0, 320),
                worker("d2", 0, 0, 0),
            ],
            "p1 d2",
        ),
    ] {
        assert_eq!(placed(&candidates, &query(), 1000), wanted);
    }
}

#[test]
fn short_uncached_parts_and_missing_prefill_workers_go_local() {
    let (p, d) = (worker("p1", 0, 0, 0), worker("d1", 0, 0, 0));
    for (candidates, tokens, wanted) in [
        (vec![p.clone(), d.clone()], 64, "local d1"),
        (vec![p.clone(), d.clone()], 65, "p1 d1"),
        (vec![p.clone(), worker("d1", 0, 0, 960)], 1000, "local d1"),
        (vec![d.clone()], 1000, "local d1"),
        (vec![worker("m1", 0, 0, 0)], 1000, "local m1"),
    ] {
        assert_eq!(placed(&candidates, &query(), tokens), wanted);
    }
    let local_only = PlaceQuery::default();
    assert_eq!(placed(&[p, d], &local_only, 1000), "local d1");
}

#[test]
fn equals_share_the_work() {
    let candidates: Vec<Candidate> = ["p1", "p2", "d1", "d2"]
        .map(|id| worker(id, 0, 0, 0))
        .to_vec();
    let mut seen: Vec<String> = (0..16)
        .map(|tie| show(&ask(&candidates, &query(), 1000, tie).unwrap()))
        .collect();
    seen.sort();
    seen.dedup();
    let decoders = ["d1", "d2"].map(|d| seen.iter().any(|pair| pair.ends_with(d)));
    let prefillers = ["p1", "p2"].map(|p| seen.iter().any(|pair| pair.starts_with(p)));
    assert_eq!((decoders, prefillers), ([true; 2], [true; 2]), "{seen:?}");
}

#[test]
fn excluded_workers_are_not_asked_again() {
    let candidates: Vec<Candidate> = ["p1", "p2", "d1", "d2"]
        .map(|id| worker(id, 0, 0, 0))
        .to_vec();
    let excluding = PlaceQuery {
        exclude_decode: vec![key("d1")],
        exclude_prefill: vec![key("p2")],
        ..query()
    };
    assert_eq!(placed(&candidates, &excluding, 1000), "p1 d2");
    // Another life of an excluded worker is another worker.
    let mut reborn = worker("d1", 0, 0, 0);
    reborn.key = WorkerKey::new("d1".into(), Epoch(2));
    let only = [worker("p1", 0, 0, 0), reborn];
    assert_eq!(placed(&only, &excluding, 1000), "p1 d1");
}

#[test]
fn a_kept_decode_worker_stays_even_when_it_left_the_list() {
    let keeping = |id: &str| PlaceQuery {
        keep_decode: Some(key(id)),
        exclude_prefill: vec![key("p1")],
        ..query()
    };
    let all: Vec<Candidate> = ["p1", "p2", "d1", "d2"]
        .map(|id| worker(id, 0, 0, 0))
        .to_vec();
    assert_eq!(placed(&all, &keeping("d2"), 1000), "p2 d2");
    assert_eq!(placed(&all[..1], &keeping("d2"), 1000), "local d2");
    let other = with_card(worker("p2", 0, 0, 0), |card| card.layout.head_dim = 32);
    assert_eq!(
        placed(&[other, all[3].clone()], &keeping("d2"), 1000),
        "local d2"
    );
}

#[test]
fn nobody_to_decode_is_said() {
    let error = ask(&[worker("p1", 0, 0, 0)], &query(), 10, 0).unwrap_err();
    assert_eq!(
        (error.kind, error.reason.as_str()),
        (ErrorKind::Unavailable, "NO_DECODE_WORKER")
    );
    assert!(error.retry_after.is_some());
}

/// A worker that died a moment ago is still among the candidates.
#[test]
fn that_others_do_not_fit_is_said_before_that_the_rest_was_tried() {
    let died = worker("d1", 0, 0, 0);
    let other = storing("d2", KvDtype::Int8);
    let query = PlaceQuery {
        exclude_decode: vec![key("d1")],
        ..query()
    };
    let ask = |candidates: &[Candidate]| {
        let question = Question {
            numerics: Some(died.card.layout.numerics),
            ..question(&query, 10)
        };
        LeastTokens::default()
            .place(candidates, &question)
            .unwrap_err()
            .reason
    };
    let tried = ask(std::slice::from_ref(&died));
    assert_eq!(tried, "DECODE_WORKERS_TRIED");
    assert_eq!(ask(&[died.clone(), other]), "LAYOUT_MISMATCH");
}

#[test]
fn no_prompt_goes_where_its_kv_would_not_come_through() {
    let all = ["p1", "p2", "d1", "d2"].map(|id| worker(id, 0, 0, 0));
    let place = |policy: &LeastTokens, query: &PlaceQuery, cut: &[(&str, &str)]| {
        let pair = |(prefill, decode): &(&str, &str)| Pair {
            prefill: key(prefill),
            decode: key(decode),
        };
        let mut cut: Vec<Pair> = cut.iter().map(pair).collect();
        cut.sort();
        let question = Question {
            cut: &cut,
            ..question(query, 1000)
        };
        policy.place(&all, &question).map(|placed| show(&placed))
    };
    let (policy, query) = (LeastTokens::default(), query());
    let everywhere = [("p1", "d1"), ("p2", "d1"), ("p1", "d2"), ("p2", "d2")];
    for (cut, right) in [
        (&everywhere[..0], "p1 d1"),
        (&everywhere[..1], "p2 d1"),
        (&everywhere[..2], "p1 d2"),
        (&everywhere[..3], "p2 d2"),
        (&everywhere[..], "local d1"),
    ] {
        assert_eq!(place(&policy, &query, cut).unwrap(), right, "{cut:?}");
    }
    // What has its blocks somewhere is computed there.
    let kept = PlaceQuery {
        keep_decode: Some(key("d1")),
        ..query.clone()
    };
    assert_eq!(place(&policy, &kept, &everywhere[..2]).unwrap(), "local d1");
    let refusing = LeastTokens {
        refuse_without_prefill: true,
        ..policy
    };
    let error = place(&refusing, &query, &everywhere).unwrap_err();
    assert_eq!(error.reason, "NO_PREFILL_WORKER");
    assert_eq!(place(&refusing, &kept, &everywhere).unwrap(), "local d1");
}

#[test]
fn long_prompts_may_be_refused_while_nobody_prefills() {
    let policy = LeastTokens {
        refuse_without_prefill: true,
        ..LeastTokens::default()
    };
    let both = [worker("p1", 0, 0, 0), worker("d1", 0, 0, 0)];
    let place = |candidates: &[Candidate], query: &PlaceQuery, prompt_tokens| {
        let placed = policy.place(candidates, &question(query, prompt_tokens));
        placed.map(|placement| placement.prefill.is_none())
    };
    assert_eq!(place(&both, &query(), 1000), Ok(false));
    assert_eq!(place(&both[1..], &query(), 64), Ok(true), "short enough");
    let error = place(&both[1..], &query(), 1000).unwrap_err();
    assert_eq!(
        (error.kind, error.reason.as_str()),
        (ErrorKind::Unavailable, "NO_PREFILL_WORKER")
    );
    assert!(error.retry_after.is_some());
    // What was begun is not given up, nor what a prefill worker failed.
    let kept = PlaceQuery {
        keep_decode: Some(key("d1")),
        ..query()
    };
    assert_eq!(place(&both[1..], &kept, 1000), Ok(true));
    let resumed = PlaceQuery {
        resumed_tokens: 1,
        ..query()
    };
    assert_eq!(place(&both[1..], &resumed, 1000), Ok(true));
    let tried = PlaceQuery {
        exclude_prefill: vec![key("p1")],
        ..query()
    };
    assert_eq!(place(&both, &tried, 1000), Ok(true));
}

#[test]
fn workers_that_do_not_fit_are_never_paired_and_the_field_is_named() {
    let p = with_card(worker("p1", 0, 0, 0), |card| card.layout.head_dim = 128);
    let d = worker("d1", 0, 0, 0);
    let error = ask(&[p.clone(), d.clone()], &query(), 1000, 0).unwrap_err();
    assert_eq!(
        (error.field.as_str(), error.reason.as_str()),
        ("head_dim", "LAYOUT_MISMATCH")
    );
    let own = d.card.layout.head_dim.to_string();
    for part in ["p1", "d1", "128", own.as_str()] {
        assert!(error.message.contains(part), "{}", error.message);
    }
    // Whatever the request asks for.
    let freely = placed_freely(&[p.clone(), d.clone()], 1000).unwrap_err();
    assert_eq!(freely, error);
    // A pair that fits is found beside one that does not, though it is busier.
    let candidates = [p, worker("p2", 9, 900, 0), d];
    assert_eq!(placed(&candidates, &query(), 1000), "p2 d1");
}

#[test]
fn a_worker_of_another_protocol_gets_nothing_and_is_named() {
    let mut foreign = worker("d1", 0, 0, 0);
    foreign.protocol.major += 1;
    let error = ask(&[foreign.clone()], &query(), 10, 0).unwrap_err();
    assert_eq!(
        (error.field.as_str(), error.reason.as_str()),
        ("protocol.major", "PROTOCOL_MISMATCH")
    );
    assert!(error.message.contains("d1"));
    assert_eq!(
        placed(&[foreign, worker("d2", 5, 0, 0)], &query(), 10),
        "local d2"
    );
}

#[test]
fn a_stream_that_began_goes_on_with_its_own_arithmetic() {
    let other = with_card(worker("d1", 0, 0, 0), |card| {
        card.layout.numerics = NumericsId([2; 16]);
    });
    let query = query();
    let question = Question {
        numerics: Some(NumericsId([1; 16])),
        ..question(&query, 10)
    };
    let policy = LeastTokens::default();
    let error = policy
        .place(std::slice::from_ref(&other), &question)
        .unwrap_err();
    assert_eq!(error.field, "numerics_id");
    let placement = policy
        .place(&[other, worker("d2", 9, 0, 0)], &question)
        .unwrap();
    assert_eq!(placement.decode, key("d2"));
}

#[test]
fn another_block_size_is_no_hindrance_between_workers_that_can_re_lay_out() {
    let p = with_card(worker("p1", 0, 0, 0), |card| card.layout.block_size = 64);
    let d = worker("d1", 0, 0, 0);
    assert_eq!(placed(&[p.clone(), d.clone()], &query(), 1000), "p1 d1");
    for old in [0, 1] {
        let mut pair = [p.clone(), d.clone()];
        pair[old].protocol.features &= !protocol::FEATURE_RELAYOUT;
        let error = ask(&pair, &query(), 1000, 0).unwrap_err();
        assert_eq!(error.field, "block_size");
        for part in ["64", "16"] {
            assert!(error.message.contains(part), "{}", error.message);
        }
    }
}

#[test]
fn kv_is_converted_only_for_requests_that_need_not_be_exact() {
    let (p, d) = (storing("p1", KvDtype::F16), storing("d1", KvDtype::Int8));
    let error = ask(&[p.clone(), d.clone()], &query(), 1000, 0).unwrap_err();
    assert_eq!(
        (error.field.as_str(), error.reason.as_str()),
        ("kv_dtype", "LAYOUT_MISMATCH")
    );
    for part in ["p1", "d1", "f16", "int8", "exact"] {
        assert!(error.message.contains(part), "{}", error.message);
    }
    assert_eq!(
        placed_freely(&[p.clone(), d.clone()], 1000).unwrap(),
        "p1 d1"
    );
    // A short prompt needs nobody's KV.
    assert_eq!(placed(&[p.clone(), d.clone()], &query(), 10), "local d1");
    // Workers that do not tell what their numbers come from are not believed.
    let silent = with_card(p, |card| card.layout.origin = None);
    let error = placed_freely(&[silent, d], 1000).unwrap_err();
    assert_eq!(error.field, "numerics_id");
}

#[test]
fn kv_that_keeps_its_bits_comes_before_kv_that_does_not() {
    let busy = |mut worker: Candidate| {
        worker.tokens_waiting = 100_000;
        worker
    };
    let (p1, d1) = (storing("p1", KvDtype::F16), storing("d1", KvDtype::Int8));
    let p2 = busy(storing("p2", KvDtype::Int8));
    let d2 = busy(storing("d2", KvDtype::F16));
    let placed = |candidates: &[&Candidate]| {
        let candidates: Vec<Candidate> = candidates.iter().copied().cloned().collect();
        placed_freely(&candidates, 1000).unwrap()
    };
    assert_eq!(placed(&[&p1, &p2, &d1]), "p2 d1");
    assert_eq!(placed(&[&p1, &d1, &d2]), "p1 d2");
    assert_eq!(placed(&[&p1, &d1]), "p1 d1");
}
