//! Routers say that they know of a worker that leaves, and the worker waits for it.

use std::time::Duration;

use baton_proto::v1;
use baton_proto::v1::decode_worker_client::DecodeWorkerClient;
use baton_proto::v1::prefill_worker_client::PrefillWorkerClient;
use baton_tests::process::{Launcher, Pool, Worker};
use tokio::time::timeout;
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
    for id in ["d0", "d1", "d2", "d3", "d4"] {
        decode.push(launcher.worker(Pool::Decode, id, "rand", &[]).await);
    }
    let routers = [launcher.router(&SPLIT).await, launcher.router(&SPLIT).await];
    for router in &routers {
        router.wait_workers("rand", (1, 5), SOON).await;
    }
    // A worker waits for a second at most, in which a crowded machine may do nothing; asked
    // again, it waits again.
    let mut client = PrefillWorkerClient::new(channel(&prefill).await);
    let all_know = async {
        loop {
            let told = client.drain(v1::DrainRequest {}).await.unwrap();
            let told = told.into_inner();
            assert_eq!(told.routers_acknowledged + told.routers_silent, 2);
            if told.routers_silent == 0 {
                return;
            }
        }
    };
    timeout(SOON, all_know).await.expect("both say so");
    // It is so by then, and not a moment later.
    for router in &routers {
        let draining = r#"baton_pool_members{worker_role="prefill",state="draining"}"#;
        assert_eq!(router.metric(draining).await, 1.0);
    }

    // Also of a worker that ends, which says in its log whom it waited for in vain: three are
    // tried, for the same reason.
    let mut waited_for_nobody = false;
    for mut leaving in decode.drain(..3) {
        leaving.process.terminate();
        assert_eq!(leaving.process.exit_code().await, 0);
        waited_for_nobody |= !leaving.process.log().contains("did not acknowledge");
        if waited_for_nobody {
            break;
        }
    }
    assert!(waited_for_nobody, "no router acknowledges");

    // A router that stands still is waited for, not for ever: by one that ends as by one that
    // does not, at once, before the connections to that router are given up.
    let mut asked = DecodeWorkerClient::new(channel(&decode[1]).await);
    routers[1].process.freeze();
    decode[0].process.terminate();
    let told = asked.drain(v1::DrainRequest {}).await.unwrap().into_inner();
    assert_eq!(told.routers_acknowledged + told.routers_silent, 2);
    assert!(told.routers_silent > 0, "{told:?}");
    assert_eq!(decode[0].process.exit_code().await, 0);
    let log = decode[0].process.log();
    assert!(log.contains("did not acknowledge"), "{log}");
    routers[1].process.thaw();
}
