//! A request's target on the gap between tokens: it reaches the engine, changes no
//! token, and is refused by name and range where it makes no sense.

use std::time::Duration;

use baton_proto::kv_layout::KvDtype;
use baton_proto::sampling::SamplingParams;
use baton_proto::v1;
use baton_tests::client::{self, Collector};
use baton_tests::cluster::Setup;
use baton_tests::doors::OpenCluster;
use baton_tests::models;
use baton_tests::oracle::{Case, Oracle};
use baton_tests::pace::Stopwatch;
use serde_json::json;
use tonic::Code;
use tonic_types::StatusExt as _;

/// The target that a decode worker's engine plans for now, in seconds.
async fn target_in_force(open: &OpenCluster) -> f64 {
    let metrics = open.http().get("/metrics").await;
    let text = String::from_utf8(metrics.body).expect("text");
    let value = text
        .lines()
        .find(|line| line.starts_with("baton_itl_target_seconds") && line.contains("decode"))
        .and_then(|line| line.rsplit(' ').next()?.parse().ok());
    value.expect("a decode worker tells its target")
}

fn with_slo(mut request: v1::GenerateRequest, itl_ms: f64) -> v1::GenerateRequest {
    request.slo = Some(v1::Slo {
        itl_ms: Some(itl_ms),
        ttft_ms: None,
    });
    request
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_target_reaches_the_engine_for_as_long_as_its_request_runs() {
    let open = OpenCluster::start(&Setup::default(), &models::fixture("rand")).await;
    let case = |seed, max_tokens| Case {
        prompt: (20..70).collect(),
        sampling: SamplingParams {
            seed,
            max_tokens,
            ignore_eos: true,
            ..SamplingParams::default()
        },
    };
    let mut oracle = Oracle::new(&models::fixture("rand"), KvDtype::F32);
    assert_eq!(target_in_force(&open).await, 0.0);

    let (bound, free) = (case(3, 1500), case(4, 300));
    let request = with_slo(client::request(&bound), 7.5);
    let mut stream = open.grpc().generate(request).await.unwrap().into_inner();
    let mut collector = Collector::new(1);
    // Looked for while it runs, from the first token on.
    let mut in_force = 0.0;
    while in_force == 0.0 {
        collector.take(stream.message().await.unwrap().expect("more to come"));
        if collector.tokens() > 0 {
            in_force = target_in_force(&open).await;
        }
    }
    assert_eq!(in_force, 0.0075);
    // One without a target runs or waits beside it; both come out as ever.
    let frontend = open.cluster.frontend();
    let other = client::run(&frontend, client::request(&free));
    let rest = async {
        while let Some(event) = stream.message().await.unwrap() {
            collector.take(event);
        }
    };
    let (other, ()) = tokio::join!(other, rest);
    let answer = collector.finish();
    assert_eq!(answer.choices[0].tokens, oracle.run(&bound)[0].tokens);
    assert_eq!(
        other.unwrap().choices[0].tokens,
        oracle.run(&free)[0].tokens
    );

    open.cluster.wait_released(Duration::from_secs(1)).await;
    let waited = Stopwatch::start();
    while target_in_force(&open).await != 0.0 {
        assert!(waited.elapsed() < Duration::from_secs(10));
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    open.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_target_that_makes_no_sense_is_refused_by_name_and_range() {
    let open = OpenCluster::start(&Setup::default(), &models::fixture("rand")).await;
    let case = Case {
        prompt: vec![5, 6, 7],
        sampling: SamplingParams {
            max_tokens: 2,
            ..SamplingParams::default()
        },
    };
    for itl_ms in [0.0, -3.0, f64::NAN, f64::INFINITY, 1e12] {
        let request = with_slo(client::request(&case), itl_ms);
        let mut stream = open.grpc().generate(request).await.unwrap().into_inner();
        let status = stream.message().await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{itl_ms}");
        assert!(status.message().contains("0.1..=60000"), "{status}");
        let details = status.get_error_details();
        let fields = &details.bad_request().expect("a field").field_violations;
        assert_eq!(fields[0].field, "slo.itl_ms");
    }
    let completion = |slo| json!({ "prompt": [5, 6, 7], "max_tokens": 2, "slo": slo });
    for itl_ms in [json!(0), json!(-3), json!(1e12)] {
        let body = completion(json!({ "itl_ms": itl_ms }));
        let error = open.http().post("/v1/completions", &body).await.error(400);
        assert_eq!(error["param"], "slo.itl_ms");
        let message = error["message"].as_str().expect("a message");
        assert!(message.contains("0.1..=60000"), "{message}");
    }
    // JSON has no NaN: what stands for one is no number, as is a number beyond all.
    for (slo, status) in [
        (json!({ "itl_ms": "NaN" }), 400),
        (json!({ "itl_seconds": 1 }), 400),
        (json!({ "ttft_ms": 0 }), 400),
        (json!({ "ttft_ms": 600_001 }), 400),
        (json!({ "ttft_ms": 600_000 }), 200),
        (json!({ "itl_ms": null }), 200),
        (json!({}), 200),
        (json!({ "itl_ms": 0.1 }), 200),
        (json!({ "itl_ms": 60_000 }), 200),
    ] {
        let body = completion(slo);
        let reply = open.http().post("/v1/completions", &body).await;
        assert_eq!(reply.status, status, "{body}");
    }
    let huge = br#"{"prompt":[5],"max_tokens":2,"slo":{"itl_ms":1e999}}"#;
    let reply = open
        .http()
        .post_bytes("/v1/completions", huge.to_vec())
        .await;
    assert_eq!(reply.status, 400);
    let chat = json!({
        "messages": [{ "role": "user", "content": "hi" }], "max_tokens": 2, "slo": { "itl_ms": 0 },
    });
    let error = open.http().post("/v1/chat/completions", &chat).await;
    assert_eq!(error.error(400)["param"], "slo.itl_ms");
    open.cluster.wait_released(Duration::from_secs(1)).await;
    open.stop().await;
}
