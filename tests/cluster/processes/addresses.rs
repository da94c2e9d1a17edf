//! Host names, IPv6 and IPv4 in IPv6 form wherever an address goes: where processes listen, what
//! they advertise, and where clients, routers and workers connect.
//!
//! Seen to fail: while only an IP address could be listened at.

use std::net::TcpListener;
use std::time::Duration;

use baton_proto::v1::inference_client::InferenceClient;
use baton_tests::models;
use baton_tests::process::{Launcher, Pool, free_port};

use super::{SPLIT, ask, known};

const SOON: Duration = Duration::from_secs(20);

fn flags(own: &[String]) -> Vec<&str> {
    own.iter().map(String::as_str).collect()
}

/// One cluster whose every address has this host.
async fn serves_at(host: &str) {
    let launcher = Launcher::start().await;
    // etcd listens at 127.0.0.1.
    let etcd_host = if host == "[::1]" { "127.0.0.1" } else { host };
    let etcd = format!("{etcd_host}:{}", launcher.etcd.address().port());
    let etcd = format!("--etcd={etcd}");
    let at = |flag: &str, port: u16| format!("--{flag}={host}:{port}");
    let [control, admin, data, http, grpc] = [(); 5].map(|()| free_port());
    let of_decode = [
        etcd.clone(),
        at("listen", control),
        at("advertise", control),
        at("admin", admin),
        at("data-listen", data),
        at("data-advertise", data),
        "--kv-transport=tcp".to_owned(),
    ];
    let of_prefill = [etcd.clone(), at("listen", 0), at("admin", 0)];
    let of_router = [etcd, at("http", http), at("grpc", grpc)];
    let [of_decode, of_prefill] = [flags(&of_decode), flags(&of_prefill)];
    let (prefill, decode) = tokio::join!(
        launcher.worker(Pool::Prefill, "p0", "rand", &of_prefill),
        launcher.worker(Pool::Decode, "d0", "rand", &of_decode),
    );
    let mut of_router = flags(&of_router);
    of_router.extend(SPLIT);
    let router = launcher.router(&of_router).await;
    router.wait_workers("rand", (1, 1), SOON).await;

    let client = InferenceClient::connect(format!("http://{host}:{grpc}"));
    let client = client.await.expect("the router listens there");
    for one in known(&models::fixture("rand"), 0xadd, 2, 8).iter() {
        let answer = ask(client.clone(), "rand", one).await;
        answer.unwrap_or_else(|error| panic!("{host}: {error:?}"));
    }
    assert_eq!(router.http().get("/readyz").await.status, 200);
    // Over the data port, and not by the decode worker's own arithmetic.
    assert!(decode.load().await.handoffs_total >= 2, "{host}");
    drop(prefill);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_serves_at_a_host_name() {
    serves_at("localhost").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_serves_at_ipv6_addresses() {
    serves_at("[::ffff:127.0.0.1]").await;
    match TcpListener::bind("[::1]:0") {
        Ok(_) => serves_at("[::1]").await,
        Err(error) => println!("this machine has no `::1`: {error}"),
    }
}
