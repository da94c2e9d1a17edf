//! Routers say that they know of a worker that leaves, and the worker waits for it.

use std::time::Duration;

use baton_proto::v1;
use baton_proto::v1::decode_worker_client::DecodeWorkerClient;
use baton_proto::v1::prefill_worker_client::PrefillWorkerClient;
use baton_tests::process::{Launcher, Pool, Worker};
use tonic::transport::{Channel, Endpoint};

use super::SPLIT;

const SOON: Duration = Duration::from_secs(20);

async fn channel(worker: &Worker) -> Channel {
    let address = format!("http://{}", worker.control);
    let endpoint = Endpoint::from_shared(address).expect("an address");
    endpoint.connect().await.expect("the worker is there")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_returns_when_every_router_sends_nothing_more() {
    let launcher = Launcher::start().await;
    let prefill = launcher.worker(Pool::Prefill, "p0", "rand", &[]).await;
    let mut decode = Vec::new();
    for id in ["d0", "d1", "d2"] {
        decode.push(launcher.worker(Pool::Decode, id, "rand", &[]).await);
    }
    let routers = [launcher.router(&SPLIT).await, launcher.router(&SPLIT).await];
    for router in &routers {
        router.wait_workers("rand", (1, 3), SOON).await;
    }
    let told = PrefillWorkerClient::new(channel(&prefill).await)
        .drain(v1::DrainRequest {})
        .await
        .unwrap()
        .into_inner();
    assert_eq!((told.routers_acknowledged, told.routers_silent), (2, 0));
    // It is so by then, and not a moment later.
    for router in &routers {
        let draining = r#"baton_pool_members{worker_role="prefill",state="draining"}"#;
        assert_eq!(router.metric(draining).await, 1.0);
    }

    // Also of a worker that ends, which says so in its log.
    decode[0].process.terminate();
    assert_eq!(decode[0].process.exit_code().await, 0);
    let log = decode[0].process.log();
    assert!(!log.contains("did not acknowledge"), "{log}");

    // A router that stands still is waited for, not for ever.
    routers[1].process.freeze();
    let told = DecodeWorkerClient::new(channel(&decode[1]).await)
        .drain(v1::DrainRequest {})
        .await
        .unwrap()
        .into_inner();
    assert_eq!((told.routers_acknowledged, told.routers_silent), (1, 1));
    decode[2].process.terminate();
    assert_eq!(decode[2].process.exit_code().await, 0);
    let log = decode[2].process.log();
    assert!(log.contains("did not acknowledge"), "{log}");
    routers[1].process.thaw();
}
