//! Workers that refuse, die, hang or lie, and clients that go away or do not read.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use baton_membership::{Membership as _, Role};
use baton_proto::{Error, ErrorKind, v1};
use baton_router::{CallContext, Tenant};
use futures::StreamExt as _;

use crate::cluster::{Cluster, Outcome, alphabet, call, request, sampling, until};
use crate::workers::{Act, Worker};

fn full() -> Act {
    let error = Error::new(ErrorKind::Overloaded, "the pool is full");
    Act::Refuse(error.with_retry_after(Duration::from_millis(250)))
}

fn quiet(workers: &[&Worker]) -> bool {
    workers
        .iter()
        .all(|w| w.script.running.load(Ordering::Relaxed) == 0)
}

#[tokio::test]
async fn a_full_decode_worker_is_passed_over_and_two_full_ones_are_said() {
    let mut cluster = Cluster::start(|_| {}).await;
    let p = cluster.worker("p1", Role::Prefill).await;
    let d1 = cluster.worker("d1", Role::Decode).await;
    let d2 = cluster.worker("d2", Role::Decode).await;
    d1.script.set(full());
    for _ in 0..4 {
        let outcome = cluster.run(request(100, 5)).await;
        assert_eq!(outcome.text, [alphabet(0, 5)]);
        assert_eq!(outcome.timings().decode_worker, "d2");
    }
    d2.script.set(full());
    let before = p.script.prefills.lock().unwrap().len();
    let outcome = cluster.run(request(100, 5)).await;
    assert_eq!(outcome.failed().kind, ErrorKind::Overloaded);
    assert_eq!(
        outcome.failed().retry_after,
        Some(Duration::from_millis(250))
    );
    assert!(outcome.failed().message.contains("the pool is full"));
    // Nobody was made to compute for nothing.
    assert_eq!(p.script.prefills.lock().unwrap().len(), before);
    cluster.stop().await;
}

#[tokio::test]
async fn a_prefill_worker_that_fails_anywhere_costs_time_but_no_token() {
    let mut cluster = Cluster::start(|_| {}).await;
    let p1 = cluster.worker("p1", Role::Prefill).await;
    let p2 = cluster.worker("p2", Role::Prefill).await;
    let d = cluster.worker("d1", Role::Decode).await;
    for act in [
        full(),
        Act::BreakAfter(0),
        Act::BreakAfterFirst,
        Act::BreakAfterCommit,
    ] {
        p1.script.set(act.clone());
        p2.script.set(act.clone());
        for n in [1, 2] {
            let asked = sampling(request(100, 10), |s| s.n = Some(n));
            let asked = v1::GenerateRequest {
                use_cache: Some(false),
                ..asked
            };
            let outcome = cluster.run(asked).await;
            assert_eq!(outcome.error, None, "{act:?}");
            let wanted: Vec<String> = (0..n).map(|choice| alphabet(choice, 10)).collect();
            assert_eq!(outcome.text, wanted, "{act:?}");
            assert_eq!(outcome.usage().completion_tokens, 10 * n);
        }
    }
    assert!(cluster.metric("baton_token_conflicts_total") == 0.0);
    until("nothing is left", || quiet(&[&p1, &p2, &d])).await;
    cluster.stop().await;
}

#[tokio::test]
async fn a_second_prefill_worker_takes_over_under_a_new_ticket() {
    let mut cluster = Cluster::start(|_| {}).await;
    let p1 = cluster.worker("p1", Role::Prefill).await;
    let d = cluster.worker("d1", Role::Decode).await;
    p1.script.set(Act::BreakAfterFirst);
    let outcome = cluster.run(request(100, 10)).await;
    assert_eq!(
        (outcome.timings().path.as_str(), outcome.error),
        ("local", None)
    );
    let p2 = cluster.worker("p2", Role::Prefill).await;
    let mut took_over = false;
    for _ in 0..20 {
        let asked = v1::GenerateRequest {
            use_cache: Some(false),
            ..request(100, 10)
        };
        let outcome = cluster.run(asked).await;
        assert_eq!(outcome.text, [alphabet(0, 10)]);
        assert_eq!(outcome.timings().prefill_worker, "p2");
        let prefills = p2.script.prefills.lock().unwrap();
        let last = prefills.last().unwrap();
        took_over |= last.lane.as_ref().unwrap().attempt == 2;
        if last.lane.as_ref().unwrap().attempt == 2 {
            assert!(last.work.as_ref().unwrap().request_id.ends_with(".2"));
        }
    }
    assert!(took_over, "p1 was never first");
    until("nothing is left", || quiet(&[&p1, &p2, &d])).await;
    cluster.stop().await;
}

#[tokio::test]
async fn a_stream_outlives_its_decode_worker() {
    let mut cluster = Cluster::start(|_| {}).await;
    let _p = cluster.worker("p1", Role::Prefill).await;
    let mut d1 = cluster.worker("d1", Role::Decode).await;
    d1.script.set(Act::HoldAfter(9));
    let context = CallContext::new(Tenant::new("default"));
    let asked = v1::GenerateRequest {
        stop: vec!["vwx".into()],
        ..request(100, 40)
    };
    let mut stream = cluster.frontend.generate(asked, context).await.unwrap();
    let mut outcome = Outcome::default();
    while outcome.ids.first().map_or(0, Vec::len) < 7 {
        outcome.take(stream.next().await.unwrap().unwrap());
    }
    let d2 = cluster.worker("d2", Role::Decode).await;
    d1.kill();
    while let Some(event) = stream.next().await {
        outcome.take(event.unwrap());
    }
    // Begun on one, ended on the other, the stop string found all the same.
    assert_eq!(outcome.text, [alphabet(0, 21)]);
    assert_eq!(outcome.usage().completion_tokens, 24);
    assert_eq!(outcome.timings().decode_worker, "d2");
    let work = d2.script.starts.lock().unwrap()[0].work.clone().unwrap();
    assert!(work.forced[0].ids.len() >= 7);
    let sent: Vec<u32> = outcome.ids[0][..work.forced[0].ids.len()].to_vec();
    assert_eq!(work.forced[0].ids, sent);
    assert_eq!(cluster.metric("baton_migrations_total{result=\"ok\"}"), 1.0);
    cluster.stop().await;
}

#[tokio::test]
async fn choices_outlive_their_decode_worker_each_at_its_own_length() {
    let mut cluster = Cluster::start(|_| {}).await;
    let _p = cluster.worker("p1", Role::Prefill).await;
    let d1 = cluster.worker("d1", Role::Decode).await;
    d1.script.set(Act::BreakAfter(9));
    let _d2 = cluster.worker("d2", Role::Decode).await;
    for _ in 0..8 {
        let asked = v1::GenerateRequest {
            use_cache: Some(false),
            ..sampling(request(100, 12), |s| s.n = Some(2))
        };
        let outcome = cluster.run(asked).await;
        assert_eq!(
            outcome.text,
            [alphabet(0, 12), alphabet(1, 12)],
            "{:?}",
            outcome.error
        );
    }
    assert!(cluster.metric("baton_migrations_total{result=\"ok\"}") > 0.0);
    cluster.stop().await;
}

#[tokio::test]
async fn the_only_decode_worker_dying_ends_the_stream_with_its_name() {
    // As long as the stream waits for another worker.
    let mut cluster = Cluster::start(|c| c.stream_gap_ms = 1_000).await;
    let mut d = cluster.worker("d1", Role::Decode).await;
    d.script.set(Act::Slowly(Duration::from_millis(10)));
    let context = CallContext::new(Tenant::new("default"));
    let mut stream = cluster
        .frontend
        .generate(request(10, 1000), context)
        .await
        .unwrap();
    let mut outcome = Outcome::default();
    while outcome.ids.first().is_none_or(Vec::is_empty) {
        outcome.take(stream.next().await.unwrap().unwrap());
    }
    let begun = Instant::now();
    d.kill();
    while let Some(event) = stream.next().await {
        match event {
            Ok(event) => outcome.take(event),
            Err(error) => outcome.error = Some(error),
        }
    }
    // No timer of the router would end it as soon.
    assert!(begun.elapsed() < Duration::from_secs(8));
    assert_eq!(outcome.failed().kind, ErrorKind::Unavailable);
    assert!(
        outcome.failed().message.contains("`d1`"),
        "{:?}",
        outcome.error
    );
    assert!(outcome.completed.is_none());
    cluster.stop().await;
}

#[tokio::test]
async fn hanging_workers_are_left_within_their_time() {
    let mut cluster = Cluster::start(|c| c.answer_timeout_ms = 1_000).await;
    let p = cluster.worker("p1", Role::Prefill).await;
    let d1 = cluster.worker("d1", Role::Decode).await;
    p.script.set(Act::Hang);
    let begun = Instant::now();
    let outcome = cluster.run(request(100, 5)).await;
    assert_eq!(outcome.text, [alphabet(0, 5)], "{:?}", outcome.error);
    assert_eq!(outcome.timings().path, "local");
    assert!(begun.elapsed() < Duration::from_secs(10));
    d1.script.set(Act::Hang);
    let outcome = cluster.run(request(100, 5)).await;
    assert_eq!(outcome.failed().reason, "RESERVE_TIMEOUT");
    assert!(outcome.failed().message.contains("`d1`"));
    until("nothing is left", || quiet(&[&p, &d1])).await;
    cluster.stop().await;
}

#[tokio::test]
async fn a_worker_that_falls_silent_is_lost_and_its_requests_move() {
    // A socket that takes connections and never speaks: a stopped process.
    let mut cluster = Cluster::start(|c| {
        c.worker_silence_ms = 400;
        c.worker_lost_ms = 1_000;
    })
    .await;
    let d = cluster.worker("d1", Role::Decode).await;
    let mute = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut record = d.record.clone();
    record.id = "d0".into();
    record.control = mute.local_addr().unwrap().to_string();
    let _listed = cluster.membership.register(record).await.unwrap();
    for _ in 0..4 {
        let outcome = cluster.run(request(10, 3)).await;
        assert_eq!(outcome.timings().decode_worker, "d1");
    }
    until("it is counted as lost", || {
        cluster.metric("baton_pool_members{worker_role=\"decode\",state=\"lost\"}") == 1.0
    })
    .await;
    cluster.stop().await;
}

#[tokio::test]
async fn a_worker_reborn_at_its_address_serves_at_once() {
    let mut cluster = Cluster::start(|_| {}).await;
    let mut d = cluster.worker("d1", Role::Decode).await;
    let address: SocketAddr = d.address();
    for _ in 0..3 {
        assert_eq!(cluster.run(request(10, 3)).await.error, None);
        d.kill();
        cluster.ready_workers_are(0).await;
        let lane = cluster.lane.clone();
        let reborn = loop {
            // The kernel may hold the port for a moment.
            if std::net::TcpListener::bind(address).is_ok() {
                break Worker::start("d1", Role::Decode, "alphabet", &lane, address);
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        };
        cluster.list(&reborn).await;
        d = reborn;
    }
    let begun = Instant::now();
    assert_eq!(cluster.run(request(10, 3)).await.text, [alphabet(0, 3)]);
    // Sooner than any timer of the router.
    assert!(begun.elapsed() < Duration::from_secs(8));
    let epoch = d.script.starts.lock().unwrap()[0]
        .work
        .as_ref()
        .unwrap()
        .epoch;
    assert_eq!(epoch, d.record.epoch.0);
    cluster.stop().await;
}

#[tokio::test]
async fn a_worker_that_draws_other_tokens_is_an_internal_error() {
    let mut cluster = Cluster::start(|_| {}).await;
    let _p = cluster.worker("p1", Role::Prefill).await;
    let d = cluster.worker("d1", Role::Decode).await;
    d.script.set(Act::Lie);
    let outcome = cluster.run(request(100, 5)).await;
    assert_eq!(outcome.failed().kind, ErrorKind::Internal);
    assert!(outcome.completed.is_none());
    assert_eq!(cluster.metric("baton_token_conflicts_total"), 1.0);
    cluster.stop().await;
}

#[tokio::test]
async fn a_client_that_goes_stops_the_work_wherever_it_is() {
    let mut cluster = Cluster::start(|_| {}).await;
    let p = cluster.worker("p1", Role::Prefill).await;
    let d = cluster.worker("d1", Role::Decode).await;
    let slow = Act::Slowly(Duration::from_millis(20));
    let cases = [
        (Act::Well, Act::Hang, 0),
        (Act::Hang, Act::Well, 0),
        (Act::Well, slow, 3),
    ];
    for (ended, (act_p, act_d, tokens)) in cases.into_iter().enumerate() {
        p.script.set(act_p);
        d.script.set(act_d);
        let mut client = cluster.client();
        let asked = v1::GenerateRequest {
            use_cache: Some(false),
            ..request(100, 1000)
        };
        let task = tokio::spawn(async move {
            let mut stream = client.generate(asked).await.unwrap().into_inner();
            let mut outcome = Outcome::default();
            while tokens == 0 || outcome.ids.first().map_or(0, Vec::len) < tokens {
                outcome.take(stream.message().await.unwrap().unwrap());
            }
        });
        if tokens > 0 {
            task.await.unwrap();
        } else {
            until("it is where it should be", || {
                d.script.starts.lock().unwrap().len() > ended
                    && d.script.running.load(Ordering::Relaxed) == 1
            })
            .await;
            tokio::time::sleep(Duration::from_millis(100)).await;
            task.abort();
        }
        // They would go on for longer than this is waited for.
        until("both workers stopped", || quiet(&[&p, &d])).await;
        until("nothing is in flight", || {
            cluster.metric("baton_requests_in_flight") == 0.0
        })
        .await;
    }
    until("all three are counted", || {
        cluster.metric("baton_requests_total{code=\"CANCELLED\",reason=\"cancelled\"}") == 3.0
    })
    .await;
    until("releases were timed", || {
        cluster.metric("baton_client_cancel_to_release_seconds_count") >= 1.0
    })
    .await;
    // And the next request finds everything free.
    p.script.set(Act::Well);
    d.script.set(Act::Well);
    assert_eq!(cluster.run(request(100, 5)).await.text, [alphabet(0, 5)]);
    cluster.stop().await;
}

#[tokio::test]
async fn many_clients_leaving_at_any_time_leave_nothing_behind() {
    let mut cluster = Cluster::start(|_| {}).await;
    let p = cluster.worker("p1", Role::Prefill).await;
    let d = cluster.worker("d1", Role::Decode).await;
    d.script.set(Act::Slowly(Duration::from_millis(2)));
    let calls = (0..100_u64).map(|i| {
        let frontend = cluster.frontend.clone();
        async move {
            let wait = Duration::from_micros(i * 1500);
            let _ = tokio::time::timeout(wait, call(&frontend, request(100, 200))).await;
        }
    });
    futures::future::join_all(calls).await;
    until("both workers stopped", || quiet(&[&p, &d])).await;
    cluster.stop().await;
}

#[tokio::test]
async fn a_client_that_does_not_read_is_given_up_with_the_reason() {
    let mut cluster = Cluster::start(|c| {
        c.stream_buffer_events = 4;
        c.slow_client_timeout_ms = 300;
    })
    .await;
    let d = cluster.worker("d1", Role::Decode).await;
    let context = CallContext::new(Tenant::new("default"));
    let mut stream = cluster
        .frontend
        .generate(request(10, 4000), context)
        .await
        .unwrap();
    until("the work was ended", || quiet(&[&d])).await;
    until("nothing is in flight", || {
        cluster.metric("baton_requests_in_flight") == 0.0
    })
    .await;
    let mut last = None;
    let mut events = 0;
    while let Some(event) = stream.next().await {
        events += 1;
        last = event.err();
    }
    assert_eq!(last.unwrap().reason, "SLOW_CLIENT");
    assert!(events < 16, "{events} events were buffered");
    cluster.stop().await;
}
