//! Requests that go well: both paths, choices, stop strings, usage, timings.

use std::sync::atomic::Ordering;
use std::time::Duration;

use baton_membership::Role;
use baton_proto::v1;

use crate::cluster::{Cluster, alphabet, request, sampling, until};
use crate::workers::Act;

#[tokio::test]
async fn a_long_prompt_goes_through_both_pools() {
    let mut cluster = Cluster::start(|_| {}).await;
    let p = cluster.worker("p1", Role::Prefill).await;
    let d = cluster.worker("d1", Role::Decode).await;
    // Slow enough that P's word on its cache is heard before the end.
    d.script.set(Act::Slowly(Duration::from_millis(30)));
    let outcome = cluster.run(request(100, 30)).await;
    assert_eq!(outcome.error, None);
    assert_eq!(outcome.text, [alphabet(0, 30)]);
    assert_eq!(outcome.finished[0].reason(), v1::FinishReason::Length);
    assert_eq!(outcome.finished[0].output_tokens, 30);
    let accepted = outcome.accepted.clone().unwrap();
    assert_eq!(
        (accepted.model.as_str(), accepted.prompt_tokens),
        ("alphabet", 100)
    );
    assert_eq!(
        outcome.usage(),
        v1::Usage {
            prompt_tokens: 100,
            completion_tokens: 30,
            cached_tokens: 16
        }
    );
    let t = outcome.timings();
    let phases = t.admit_us
        + t.tokenize_us
        + t.route_us
        + t.reserve_us
        + t.prefill_queue_us
        + t.prefill_us
        + t.first_token_return_us
        + t.send_us;
    assert_eq!(phases, t.ttft_us);
    assert!(t.ttft_us > 0 && t.total_us >= t.ttft_us && t.reserve_us > 0);
    assert_eq!(
        (
            t.path.as_str(),
            t.prefill_worker.as_str(),
            t.decode_worker.as_str()
        ),
        ("disagg", "p1", "d1")
    );

    // What the workers were told.
    let start = d.script.starts.lock().unwrap()[0].clone();
    let prefill = p.script.prefills.lock().unwrap()[0].clone();
    assert_eq!(
        (start.attempt, start.path()),
        (1, v1::decode_start::Path::Receive)
    );
    for work in [start.work.unwrap(), prefill.work.unwrap()] {
        assert_eq!(work.request_id, accepted.request_id);
        assert_eq!(work.sampling.unwrap().seed, Some(accepted.seed));
        assert!(work.exact && work.use_cache && work.cache_salt.len() == 32);
        assert!(work.deadline_ms.unwrap() <= 600_000);
    }
    assert_eq!(prefill.lane.unwrap().attempt, 1);
    assert!(!d.script.timeouts.lock().unwrap().is_empty());

    assert_eq!(
        cluster.metric("baton_requests_total{code=\"OK\",reason=\"ok\"}"),
        1.0
    );
    assert_eq!(
        cluster.metric("baton_time_to_first_token_seconds_count{path=\"disagg\"}"),
        1.0
    );
    assert_eq!(
        cluster.metric("baton_inter_token_latency_seconds_count{path=\"disagg\"}"),
        29.0
    );
    assert_eq!(
        cluster.metric("baton_ttft_phase_seconds_count{phase=\"send\"}"),
        1.0
    );
    assert_eq!(cluster.metric("baton_generation_tokens_total"), 30.0);
    assert_eq!(cluster.metric("baton_prompt_tokens_total"), 100.0);
    cluster.stop().await;
    assert_eq!(d.script.cancelled.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn a_short_prompt_and_a_repeated_one_stay_on_the_decode_worker() {
    let mut cluster = Cluster::start(|_| {}).await;
    let p = cluster.worker("p1", Role::Prefill).await;
    let d = cluster.worker("d1", Role::Decode).await;
    let outcome = cluster.run(request(10, 5)).await;
    assert_eq!(outcome.text, [alphabet(0, 5)]);
    assert_eq!(outcome.timings().path, "local");
    assert!(p.script.prefills.lock().unwrap().is_empty());
    // 200 tokens go to P the first time; then D has all but a few of them.
    for path in ["disagg", "local"] {
        let outcome = cluster.run(request(200, 5)).await;
        assert_eq!(
            (outcome.timings().path.as_str(), outcome.error),
            (path, None)
        );
    }
    let uncached = v1::GenerateRequest {
        use_cache: Some(false),
        ..request(200, 5)
    };
    assert_eq!(cluster.run(uncached).await.timings().path, "disagg");
    assert_eq!(d.script.starts.lock().unwrap().len(), 4);
    cluster.stop().await;
}

#[tokio::test]
async fn without_a_prefill_worker_everything_is_local() {
    let mut cluster = Cluster::start(|_| {}).await;
    let _d = cluster.worker("d1", Role::Decode).await;
    let outcome = cluster.run(request(1000, 3)).await;
    assert_eq!(outcome.text, [alphabet(0, 3)]);
    assert_eq!(outcome.timings().path, "local");
    assert_eq!(outcome.timings().prefill_worker, "");
    cluster.stop().await;
}

#[tokio::test]
async fn several_choices_come_side_by_side() {
    let mut cluster = Cluster::start(|_| {}).await;
    let _p = cluster.worker("p1", Role::Prefill).await;
    let _d = cluster.worker("d1", Role::Decode).await;
    let three = sampling(request(100, 12), |s| {
        s.n = Some(3);
        s.logprobs = Some(0);
        s.seed = Some(7);
    });
    let outcome = cluster.run(three).await;
    assert_eq!(outcome.text, [0, 1, 2].map(|choice| alphabet(choice, 12)));
    assert_eq!(outcome.usage().completion_tokens, 36);
    assert_eq!(outcome.finished.len(), 3);
    assert_eq!(outcome.accepted.unwrap().seed, 7);
    cluster.stop().await;
}

#[tokio::test]
async fn one_token_needs_no_handoff() {
    let mut cluster = Cluster::start(|_| {}).await;
    let _p = cluster.worker("p1", Role::Prefill).await;
    let d = cluster.worker("d1", Role::Decode).await;
    for n in [1, 3] {
        let outcome = cluster
            .run(sampling(request(100, 1), |s| s.n = Some(n)))
            .await;
        assert_eq!(outcome.error, None);
        assert_eq!(outcome.usage().completion_tokens, n);
        assert!(
            outcome
                .finished
                .iter()
                .all(|f| f.reason() == v1::FinishReason::Length)
        );
    }
    // The reservations are given back at once.
    until("no call is left", || {
        d.script.running.load(Ordering::Relaxed) == 0
    })
    .await;
    cluster.stop().await;
}

#[tokio::test]
async fn a_stop_string_over_token_borders_ends_text_usage_and_work() {
    let mut cluster = Cluster::start(|_| {}).await;
    let _p = cluster.worker("p1", Role::Prefill).await;
    let d = cluster.worker("d1", Role::Decode).await;
    d.script.set(Act::Slowly(Duration::from_millis(5)));
    let stopping = v1::GenerateRequest {
        stop: vec!["zzz".into(), "fgh".into()],
        ..request(100, 1000)
    };
    let outcome = cluster.run(stopping.clone()).await;
    assert_eq!(outcome.text, ["abcde"]);
    let finished = &outcome.finished[0];
    assert_eq!(finished.reason(), v1::FinishReason::Stop);
    assert_eq!(finished.stop_string.as_deref(), Some("fgh"));
    assert_eq!(
        (finished.output_tokens, outcome.usage().completion_tokens),
        (8, 8)
    );
    assert_eq!(outcome.ids[0].len(), 8);
    until("the worker was told", || {
        *d.script.cancelled_choices.lock().unwrap() == [0]
    })
    .await;
    until("the work ended", || {
        d.script.running.load(Ordering::Relaxed) == 0
    })
    .await;

    let included = v1::GenerateRequest {
        include_stop_in_output: true,
        ..stopping.clone()
    };
    assert_eq!(cluster.run(included).await.text, ["abcdefgh"]);
    let late = sampling(stopping, |s| s.min_tokens = Some(20));
    let outcome = cluster.run(late).await;
    assert_eq!(outcome.text[0], format!("{}abcde", alphabet(0, 26)));
    cluster.stop().await;
}

#[tokio::test]
async fn a_stop_string_in_the_first_token_ends_before_the_handoff() {
    let mut cluster = Cluster::start(|_| {}).await;
    let _p = cluster.worker("p1", Role::Prefill).await;
    let d = cluster.worker("d1", Role::Decode).await;
    let stopping = v1::GenerateRequest {
        stop: vec!["a".into()],
        ..request(100, 1000)
    };
    let outcome = cluster.run(stopping).await;
    assert_eq!(outcome.text, [""]);
    assert_eq!(outcome.usage().completion_tokens, 1);
    until("the work ended", || {
        d.script.running.load(Ordering::Relaxed) == 0
    })
    .await;
    cluster.stop().await;
}

#[tokio::test]
async fn equal_request_ids_share_nothing() {
    let mut cluster = Cluster::start(|_| {}).await;
    let _p = cluster.worker("p1", Role::Prefill).await;
    let d = cluster.worker("d1", Role::Decode).await;
    let named = |prompt| v1::GenerateRequest {
        request_id: "same id/\u{e9}".into(),
        ..request(prompt, 20)
    };
    let (a, b) = tokio::join!(cluster.run(named(100)), cluster.run(named(150)));
    for outcome in [&a, &b] {
        assert_eq!(outcome.text, [alphabet(0, 20)]);
        let id = &outcome.accepted.as_ref().unwrap().request_id;
        assert!(id.starts_with("same-id---"), "{id}");
    }
    assert_ne!(
        a.accepted.unwrap().request_id,
        b.accepted.unwrap().request_id
    );
    assert_eq!(d.script.starts.lock().unwrap().len(), 2);
    cluster.stop().await;
}

#[tokio::test]
async fn two_models_live_behind_one_router() {
    let mut cluster = Cluster::start(|_| {}).await;
    let _p = cluster.worker("p1", Role::Prefill).await;
    let a = cluster.worker("d1", Role::Decode).await;
    let b = cluster.worker_of("d2", Role::Decode, "other").await;
    let models = cluster.frontend.models();
    let names: Vec<&str> = models.iter().map(|model| model.name.as_str()).collect();
    assert_eq!(names, ["alphabet", "other"]);
    assert_eq!(
        (models[0].prefill_workers, models[1].prefill_workers),
        (1, 0)
    );
    for (name, worker) in [("alphabet", "d1"), ("other", "d2"), ("other@1", "d2")] {
        let named = v1::GenerateRequest {
            model: name.into(),
            ..request(100, 3)
        };
        let outcome = cluster.run(named).await;
        assert_eq!(outcome.timings().decode_worker, worker);
    }
    assert_eq!(a.script.starts.lock().unwrap().len(), 1);
    assert_eq!(b.script.starts.lock().unwrap().len(), 2);
    let unnamed = v1::GenerateRequest {
        model: String::new(),
        ..request(10, 1)
    };
    let outcome = cluster.run(unnamed).await;
    assert_eq!(outcome.failed().field, "model");
    assert!(outcome.failed().message.contains("alphabet, other"));
    cluster.stop().await;
}

#[tokio::test]
async fn load_is_shared_between_equal_workers() {
    let mut cluster = Cluster::start(|_| {}).await;
    let p = [
        cluster.worker("p1", Role::Prefill).await,
        cluster.worker("p2", Role::Prefill).await,
    ];
    let d = [
        cluster.worker("d1", Role::Decode).await,
        cluster.worker("d2", Role::Decode).await,
    ];
    // Long enough for all of them to be there together.
    for worker in &p {
        worker.script.set(Act::Slowly(Duration::from_millis(500)));
    }
    for worker in &d {
        worker.script.set(Act::Slowly(Duration::from_millis(20)));
    }
    let prompts: Vec<_> = (0..16)
        .map(|i| {
            let mut request = request(0, 20);
            let letter = char::from(b'A' + i);
            request.prompt = Some(v1::generate_request::Prompt::Text(
                letter.to_string().repeat(100),
            ));
            cluster.run(request)
        })
        .collect();
    for outcome in futures::future::join_all(prompts).await {
        assert_eq!(outcome.text, [alphabet(0, 20)]);
    }
    for worker in &p {
        assert!(worker.script.prefills.lock().unwrap().len() >= 4);
    }
    for worker in &d {
        assert!(worker.script.starts.lock().unwrap().len() >= 4);
    }
    cluster.stop().await;
}
