//! Targets on the time to the first token, with workers that say how they get on.

use std::time::Duration;

use baton_membership::Role;
use baton_proto::{ErrorKind, v1};

use crate::cluster::{Cluster, alphabet, request};
use crate::workers::Worker;

/// A worker with 2,000 tokens to compute, a thousand a second.
fn two_seconds(worker: &Worker) {
    *worker.script.load.lock().unwrap() = v1::Load {
        prefill_tokens_waiting: 2000,
        prefill_tokens_per_second: 1000.0,
        ..v1::Load::default()
    };
}

fn with_target(ttft_ms: Option<f64>) -> v1::GenerateRequest {
    v1::GenerateRequest {
        slo: Some(v1::Slo {
            ttft_ms,
            itl_ms: None,
        }),
        use_cache: Some(false),
        ..request(100, 5)
    }
}

/// Until the router has the worker's word, its requests are let in.
async fn refused(cluster: &Cluster, request: v1::GenerateRequest) -> baton_proto::Error {
    for _ in 0..200 {
        if let Some(error) = cluster.run(request.clone()).await.error {
            return error;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("every request was let in");
}

#[tokio::test]
async fn what_would_come_too_late_is_refused_at_once_and_told_when_to_come_back() {
    let mut cluster = Cluster::start(|_| {}).await;
    let p = cluster.worker("p1", Role::Prefill).await;
    let d = cluster.worker("d1", Role::Decode).await;
    two_seconds(&p);
    let error = refused(&cluster, with_target(Some(1000.0))).await;
    assert_eq!(error.kind, ErrorKind::Overloaded);
    assert_eq!(error.reason, "TTFT_TARGET");
    assert!(error.message.contains("the target is 1000 ms"), "{error}");
    // 2.1 s and a tenth of it, less the second that it would wait.
    let wait = error.retry_after.expect("when to come back").as_millis();
    assert!((1250..1400).contains(&wait), "{wait}");
    // Nobody was asked for anything.
    let before = d.script.starts.lock().unwrap().len();
    refused(&cluster, with_target(Some(1000.0))).await;
    assert_eq!(d.script.starts.lock().unwrap().len(), before);

    // Who would wait as long as it takes is served, as is who asks for nothing.
    for target in [Some(10_000.0), None] {
        let outcome = cluster.run(with_target(target)).await;
        assert_eq!(outcome.text, [alphabet(0, 5)]);
    }
    assert!(cluster.metric("baton_ttft_over_forecast_ratio_count") >= 2.0);
    let shed = "baton_requests_total{code=\"RESOURCE_EXHAUSTED\",reason=\"shed_queue\"}";
    assert_eq!(cluster.metric(shed), 2.0);
    cluster.stop().await;
}

#[tokio::test]
async fn a_routers_target_is_that_of_requests_without_one() {
    let mut cluster = Cluster::start(|config| config.ttft_target_ms = Some(1000)).await;
    let p = cluster.worker("p1", Role::Prefill).await;
    let _d = cluster.worker("d1", Role::Decode).await;
    two_seconds(&p);
    let error = refused(&cluster, with_target(None)).await;
    assert_eq!(error.reason, "TTFT_TARGET");
    let outcome = cluster.run(with_target(Some(10_000.0))).await;
    assert_eq!(outcome.error, None);
    cluster.stop().await;
}

/// Requests that a decode worker has not taken yet have their prefill time booked: many at
/// once are not all foretold an empty queue.
#[tokio::test]
async fn a_crowd_is_not_promised_the_same_second() {
    let mut cluster = Cluster::start(|_| {}).await;
    let p = cluster.worker("p1", Role::Prefill).await;
    let d = cluster.worker("d1", Role::Decode).await;
    d.script
        .set(crate::workers::Act::Slowly(Duration::from_millis(20)));
    p.script
        .set(crate::workers::Act::Slowly(Duration::from_millis(300)));
    p.script.load.lock().unwrap().prefill_tokens_per_second = 1000.0;
    // The first word of it is waited for.
    until_foretold(&cluster).await;
    let crowd = (0..30).map(|_| cluster.run(with_target(Some(1000.0))));
    let outcomes = futures::future::join_all(crowd).await;
    let served = outcomes.iter().filter(|o| o.error.is_none()).count();
    // A hundred tokens each: about nine in a second, with a margin; more of them on a machine
    // where they do not come together.
    assert!((3..=20).contains(&served), "{served} of 30 were let in");
    for error in outcomes.iter().filter_map(|o| o.error.as_ref()) {
        assert_eq!(error.reason, "TTFT_TARGET");
    }
    cluster.stop().await;
}

async fn until_foretold(cluster: &Cluster) {
    let error = refused(cluster, with_target(Some(50.0))).await;
    assert_eq!(error.reason, "TTFT_TARGET");
}
