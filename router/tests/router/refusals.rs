//! Workers whose tokenizer or address cannot be used: they are refused once, say why
//! wherever somebody looks, and keep nobody from the others.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::Duration;

use baton_membership::{Membership as _, Registration, Role};
use baton_observability::Readiness;
use baton_proto::ErrorKind;
use baton_router::view::{ClusterView, WorkerView};

use crate::cluster::{Cluster, alphabet, request, until};
use crate::workers::{Worker, tokenizer_json, tokenizer_json_with};

/// Longer than the pauses between tries that a passing trouble gets.
const TRIES: Duration = Duration::from_millis(700);

async fn list(cluster: &Cluster, worker: &Worker) -> Registration {
    let record = worker.record.clone();
    cluster.membership.register(record).await.unwrap()
}

fn seen(cluster: &Cluster, id: &str) -> Option<WorkerView> {
    let view = ClusterView::of(&cluster.frontend);
    view.workers.into_iter().find(|worker| worker.id == id)
}

async fn is_refused(cluster: &Cluster, id: &str) -> String {
    until("the worker is refused", || {
        seen(cluster, id).is_some_and(|worker| worker.state == "refused")
    })
    .await;
    seen(cluster, id).unwrap().reason
}

fn start(cluster: &Cluster, id: &str, tokenizer: Vec<u8>) -> Worker {
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let (role, lane) = (Role::Decode, &cluster.lane);
    Worker::start_with(id, role, "alphabet", lane, any, tokenizer)
}

#[tokio::test]
async fn a_worker_whose_tokenizer_cannot_be_used_is_refused_once() {
    let mut cluster = Cluster::start(|_| {}).await;
    let broken = start(
        &cluster,
        "broken",
        tokenizer_json_with(|spec| spec.bos = Some(999)),
    );
    let _listed = list(&cluster, &broken).await;
    let reason = is_refused(&cluster, "broken").await;
    assert!(
        reason.contains("bos id 999 is outside the vocabulary"),
        "{reason}"
    );
    match cluster.frontend.readiness() {
        Readiness::NotReady(said) => {
            assert!(
                said.contains("`broken`") && said.contains(&reason),
                "{said}"
            );
        }
        Readiness::Ready => panic!("ready without a worker"),
    }
    let outcome = cluster.run(request(3, 3)).await;
    let error = outcome.failed();
    assert_eq!(
        (error.kind, error.reason.as_str()),
        (ErrorKind::Unavailable, "MODEL_REFUSED")
    );
    assert!(error.message.contains(&reason), "{error:?}");
    let refused = "baton_pool_members{worker_role=\"decode\",state=\"refused\"}";
    assert_eq!(cluster.metric(refused), 1.0);

    // It is not asked again, and the next one is served by.
    tokio::time::sleep(TRIES).await;
    assert_eq!(broken.script.tokenizer_asked.load(Ordering::Relaxed), 1);
    let _sound = cluster.worker("sound", Role::Decode).await;
    assert_eq!(cluster.frontend.readiness(), Readiness::Ready);
    let outcome = cluster.run(request(3, 3)).await;
    assert_eq!(outcome.text, [alphabet(0, 3)]);
    assert_eq!(broken.script.starts.lock().unwrap().len(), 0);
    assert_eq!(seen(&cluster, "broken").unwrap().state, "refused");
    cluster.stop().await;
}

#[tokio::test]
async fn a_router_that_has_only_refused_workers_stops_at_once() {
    let cluster = Cluster::start(|_| {}).await;
    let broken = start(&cluster, "broken", b"no specification".to_vec());
    let _listed = list(&cluster, &broken).await;
    let reason = is_refused(&cluster, "broken").await;
    assert!(reason.contains("tokenizer_spec"), "{reason}");
    cluster.shut_down().await;
}

#[tokio::test]
async fn a_worker_that_sends_another_tokenizer_than_its_card_names_is_refused() {
    let cluster = Cluster::start(|_| {}).await;
    let mut other = start(&cluster, "other", tokenizer_json());
    other.record.card.tokenizer_hash = "0".repeat(64);
    let _listed = list(&cluster, &other).await;
    let reason = is_refused(&cluster, "other").await;
    assert!(reason.contains("names tokenizer `0000"), "{reason}");
    cluster.shut_down().await;
}

#[tokio::test]
async fn a_worker_without_an_address_is_refused_and_seen() {
    let cluster = Cluster::start(|_| {}).await;
    let mut lost = start(&cluster, "lost", tokenizer_json());
    lost.record.control = "not an address:7".to_owned();
    let _listed = list(&cluster, &lost).await;
    let reason = is_refused(&cluster, "lost").await;
    assert!(reason.contains("its address cannot be used"), "{reason}");
    cluster.shut_down().await;
}
