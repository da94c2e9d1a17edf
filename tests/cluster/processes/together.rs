//! Joining, sharing, leaving, coming back.

use std::time::Duration;

use baton_proto::v1;
use baton_tests::models;
use baton_tests::process::{Launcher, Pool, wait_listed};
use futures::future::join_all;

use super::{PATIENT, RELEASED_WITHIN, Traffic, ask, known};

const SOON: Duration = Duration::from_secs(20);
/// A record that goes within [`SOON`] was taken back.
const LEASE: [&str; 1] = ["--etcd-ttl-s=60"];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn four_workers_share_the_load_and_leave_without_a_failed_request() {
    let cases = known(&models::fixture("rand"), 0x10ad, 32, 24);
    let launcher = Launcher::start().await;
    let view = launcher.etcd.follow();
    let started = join_all([
        launcher.worker(Pool::Prefill, "p0", "rand", &LEASE),
        launcher.worker(Pool::Prefill, "p1", "rand", &LEASE),
        launcher.worker(Pool::Decode, "d0", "rand", &LEASE),
        launcher.worker(Pool::Decode, "d1", "rand", &LEASE),
    ]);
    let mut workers = started.await;
    let mut router = launcher.router(&PATIENT).await;
    wait_listed(&view, &["d0", "d1", "p0", "p1"], SOON).await;
    router.wait_workers("rand", (2, 2), SOON).await;

    // Everybody works; the workers are four processes.
    let client = router.grpc();
    for batch in cases.chunks(8) {
        for answer in join_all(batch.iter().map(|one| ask(client.clone(), "rand", one))).await {
            answer.unwrap();
        }
    }
    for worker in &workers {
        worker.wait_released(RELEASED_WITHIN).await;
        let load = worker.load().await;
        let name = &worker.process.name;
        assert!(load.handoffs_total > 3, "`{name}`: {load:?}");
        assert_eq!(load.local_prefills_total, 0, "`{name}`");
    }

    // SIGTERM under load: of a prefill worker, then of a decode worker.
    let traffic = Traffic::start(&client, "rand", &cases, 6);
    for (leaving, left) in [("p1", &["d0", "d1", "p0"][..]), ("d1", &["d0", "p0"])] {
        traffic.wait_answered(6).await;
        let index = workers
            .iter()
            .position(|worker| worker.process.name == leaving)
            .unwrap();
        let mut worker = workers.remove(index);
        worker.process.terminate();
        assert_eq!(worker.process.exit_code().await, 0, "`{leaving}`");
        wait_listed(&view, left, SOON).await;
        traffic.wait_answered(6).await;
    }
    let failures = traffic.stop().await;
    assert!(failures.is_empty(), "{failures:?}");

    // A router that is started again finds its workers, on the same ports.
    let (http, grpc) = (router.http, router.grpc);
    router.process.terminate();
    assert_eq!(router.process.exit_code().await, 0, "router");
    let ports = [format!("--http={http}"), format!("--grpc={grpc}")];
    let flags = [PATIENT[0], PATIENT[1], &ports[0], &ports[1]];
    let router = launcher.router(&flags).await;
    router.wait_workers("rand", (1, 1), SOON).await;
    for one in cases.iter().take(4) {
        ask(router.grpc(), "rand", one).await.unwrap();
    }
    // The connection of before was to the same address, and works again.
    ask(client, "rand", &cases[0]).await.unwrap();
    for worker in &workers {
        worker.wait_released(RELEASED_WITHIN).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_models_behind_one_router_answer_by_name() {
    let launcher = Launcher::start().await;
    let started = join_all([
        launcher.worker(Pool::Prefill, "p-rand", "rand", &LEASE),
        launcher.worker(Pool::Decode, "d-rand", "rand", &LEASE),
        launcher.worker(Pool::Prefill, "p-qwen", "tiny-qwen3", &LEASE),
        launcher.worker(Pool::Decode, "d-qwen", "tiny-qwen3", &LEASE),
    ]);
    let workers = started.await;
    let router = launcher.router(&PATIENT).await;
    router.wait_workers("rand", (1, 1), SOON).await;
    router.wait_workers("tiny-qwen3", (1, 1), SOON).await;

    let rand = known(&models::fixture("rand"), 1, 6, 12);
    let qwen = known(&models::fixture("tiny-qwen3"), 2, 6, 12);
    assert_ne!(rand[0].1[0].tokens, qwen[0].1[0].tokens);
    let client = router.grpc();
    let asked = rand.iter().zip(qwen.iter()).flat_map(|(rand, qwen)| {
        [
            ask(client.clone(), "rand", rand),
            ask(client.clone(), "tiny-qwen3", qwen),
        ]
    });
    for answer in join_all(asked).await {
        answer.unwrap();
    }
    for worker in &workers {
        worker.wait_released(RELEASED_WITHIN).await;
        let load = worker.load().await;
        assert_eq!(load.handoffs_total, 6, "{}: {load:?}", worker.process.name);
    }
    let listed = router.http().get("/v1/models").await.json();
    let names: Vec<&str> = listed["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|model| model["id"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["rand", "tiny-qwen3"]);
    // With two models, a request has to say which.
    let error = ask(client.clone(), "", &rand[0]).await.unwrap_err();
    assert_eq!(error.field, "model", "{error:?}");
    let request = v1::TokenizeRequest {
        model: "tiny-qwen3".into(),
        input: Some(v1::tokenize_request::Input::Text("a".into())),
        ..v1::TokenizeRequest::default()
    };
    let mut client = client;
    assert!(
        !client
            .tokenize(request)
            .await
            .unwrap()
            .into_inner()
            .ids
            .is_empty()
    );
}
