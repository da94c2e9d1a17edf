//! The gRPC front door as its protocol promises it: order of the stream, deadlines,
//! cancellation, error details, limits, reflection and health.
//!
//! Seen to fail: the deadline test while tonic's own timer could end a call first, as
//! CANCELLED and without details.
//!
//! Deadlines that pass in each stage of a request are in `processes/deadlines.rs`.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use baton_proto::kv_layout::KvDtype;
use baton_proto::sampling::SamplingParams;
use baton_proto::status::ERROR_DOMAIN;
use baton_proto::v1;
use baton_proto::v1::inference_client::InferenceClient;
use baton_router::RouterConfig;
use baton_tests::client::{self, Collector};
use baton_tests::cluster::Setup;
use baton_tests::doors::OpenCluster;
use baton_tests::models;
use baton_tests::oracle::{Case, Oracle};
use baton_tests::pace::Stopwatch;
use futures::StreamExt as _;
use hyper_util::rt::TokioExecutor;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tonic::{Code, Request, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use tonic_reflection::pb::v1::{ServerReflectionRequest, ServerReflectionResponse};
use tonic_types::StatusExt as _;

use crate::clients_gone::leak_probe;

async fn open(setup: Setup) -> OpenCluster {
    OpenCluster::start(&setup, &models::fixture("rand")).await
}

/// A request that would run for a long time.
fn long(prompt_tokens: u32, n: u32) -> v1::GenerateRequest {
    client::request(&Case {
        prompt: (0..prompt_tokens).map(|i| 6 + (i * 13) % 290).collect(),
        sampling: SamplingParams {
            temperature: 0.0,
            n,
            max_tokens: 3000,
            ignore_eos: true,
            ..SamplingParams::default()
        },
    })
}

async fn ending(open: &OpenCluster, request: Request<v1::GenerateRequest>) -> Status {
    let ended = ended_at(open.grpc, request).await;
    ended.expect("it does not end well")
}

/// Reads to the end; the status it ended with, unless it ended well, by the server's word:
/// tonic's own channel would read the timeout as well, and end the call by itself.
pub(crate) async fn ended_at(
    grpc: SocketAddr,
    request: Request<v1::GenerateRequest>,
) -> Option<Status> {
    let transport = hyper_util::client::legacy::Client::builder(TokioExecutor::new())
        .http2_only(true)
        .build_http::<tonic::body::Body>();
    let origin = format!("http://{grpc}").parse().unwrap();
    let mut client = InferenceClient::with_origin(transport, origin);
    let mut stream = match client.generate(request).await {
        Ok(response) => response.into_inner(),
        Err(status) => return Some(status),
    };
    loop {
        match stream.message().await {
            Ok(Some(_)) => {}
            Ok(None) => return None,
            Err(status) => return Some(status),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_stream_is_in_order_and_equals_the_oracle() {
    let open = open(Setup::default()).await;
    let mut oracle = Oracle::new(&models::fixture("rand"), KvDtype::F32);
    for (n, temperature) in [(1, 0.0), (3, 0.9)] {
        let case = Case {
            prompt: (30..95).collect(),
            sampling: SamplingParams {
                temperature,
                seed: 77,
                n,
                max_tokens: 20,
                ignore_eos: true,
                ..SamplingParams::default()
            },
        };
        let right = oracle.run(&case);
        let request = client::request(&case);
        let mut stream = open.grpc().generate(request).await.unwrap().into_inner();
        let mut collector = Collector::new(n);
        let mut accepted = None;
        while let Some(event) = stream.message().await.unwrap() {
            if let Some(v1::generate_event::Event::Accepted(one)) = &event.event {
                accepted = Some(one.clone());
            }
            collector.take(event);
        }
        let answer = collector.finish();
        for (got, right) in answer.choices.iter().zip(&right) {
            assert_eq!(got.tokens, right.tokens);
            assert_eq!(got.finish, right.finish);
        }
        let accepted = accepted.unwrap();
        assert_eq!(accepted.prompt_tokens, 65);
        assert_eq!(accepted.seed, 77);
        assert_eq!(accepted.model, "test");
        assert_eq!(answer.usage.completion_tokens, 20 * n);
        let timings = answer.timings;
        assert_eq!(timings.path, "disagg");
        let parts = timings.admit_us
            + timings.tokenize_us
            + timings.route_us
            + timings.reserve_us
            + timings.prefill_queue_us
            + timings.prefill_us
            + timings.first_token_return_us
            + timings.send_us;
        assert!(
            parts.abs_diff(timings.ttft_us) <= 8,
            "the phases sum to the time to first token: {timings:?}"
        );
    }
    open.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deadline_ends_the_call_in_time_and_frees_the_workers() {
    let open = open(Setup::default()).await;
    // In decode; in prefill (a long prompt); passed on arrival.
    for (timeout, request) in [
        (Duration::from_millis(200), long(40, 1)),
        (Duration::from_millis(200), long(40, 4)),
        (Duration::from_millis(15), long(1000, 1)),
        (Duration::ZERO, long(40, 1)),
    ] {
        let mut request = Request::new(request);
        request.metadata_mut().insert(
            "grpc-timeout",
            format!("{}u", timeout.as_micros()).parse().unwrap(),
        );
        let (watch, started) = (Stopwatch::start(), Instant::now());
        let status = ending(&open, request).await;
        let (took, wall) = (watch.elapsed(), started.elapsed());
        assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
        assert!(wall >= timeout, "{wall:?}");
        // 50 ms are promised on an idle machine of four cores; an answer takes longer than this.
        assert!(took < timeout + Duration::from_secs(2), "{took:?}");
        open.cluster.wait_released(Duration::from_secs(1)).await;
    }
    let mut request = Request::new(long(40, 1));
    let wrong = "1.5S".parse().unwrap();
    request.metadata_mut().insert("grpc-timeout", wrong);
    let status = ending(&open, request).await;
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    open.stop().await;
}

/// Calls dropped at random moments leave nothing behind, and the next one is right.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_calls_leave_nothing_behind() {
    let open = open(Setup::default()).await;
    let mut random = StdRng::seed_from_u64(0xca11);
    let calls: Vec<(Duration, v1::GenerateRequest)> = (0..500)
        .map(|_| {
            let after = Duration::from_millis(random.random_range(0..300));
            let prompt = random.random_range(1..300);
            (
                after,
                long(prompt, *[1, 1, 4].get(random.random_range(0..3)).unwrap()),
            )
        })
        .collect();
    for batch in calls.chunks(50) {
        // A server takes more resets than a few from one connection for an attack.
        let clients: Vec<_> = (0..5).map(|_| open.grpc()).collect();
        let all = batch.iter().enumerate().map(|(call, (after, request))| {
            let mut client = clients[call % clients.len()].clone();
            async move {
                let reading = async {
                    let mut stream = client.generate(request.clone()).await?.into_inner();
                    while stream.message().await?.is_some() {}
                    Ok::<(), Status>(())
                };
                drop(tokio::time::timeout(*after, reading).await);
            }
        });
        futures::future::join_all(all).await;
        // The connections are whole: only their calls were cancelled.
        for mut client in clients {
            client.list_models(v1::ListModelsRequest {}).await.unwrap();
        }
    }
    open.cluster.wait_released(Duration::from_secs(1)).await;
    let metrics = open.cluster.frontend().metrics_text();
    let in_flight = metrics
        .lines()
        .find(|line| line.starts_with("baton_requests_in_flight"))
        .unwrap();
    assert!(in_flight.ends_with(" 0"), "{in_flight}");
    let mut oracle = Oracle::new(&models::fixture("rand"), KvDtype::F32);
    leak_probe(&open.cluster, &mut oracle, 16 * 1024).await;
    open.stop().await;
}

fn violations(status: &Status) -> Vec<String> {
    let details = status.get_error_details();
    let violations = details.bad_request().map(|bad| &bad.field_violations);
    violations
        .into_iter()
        .flatten()
        .map(|violation| violation.field.clone())
        .collect()
}

fn reason(status: &Status) -> String {
    let details = status.get_error_details();
    let info = details.error_info().expect("ErrorInfo");
    assert_eq!(info.domain, ERROR_DOMAIN);
    info.reason.clone()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_carry_their_details() {
    let setup = Setup {
        router: RouterConfig {
            tenant_requests_max: 1,
            ..Setup::default().router
        },
        ..Setup::default()
    };
    let open = open(setup).await;
    let mut unknown = long(3, 1);
    unknown.model = "nope".into();
    let status = ending(&open, Request::new(unknown)).await;
    assert_eq!(
        (status.code(), reason(&status)),
        (Code::NotFound, "MODEL_NOT_FOUND".into())
    );

    let mut nan = long(3, 1);
    nan.sampling.as_mut().unwrap().temperature = Some(f32::NAN);
    let status = ending(&open, Request::new(nan)).await;
    assert_eq!(status.code(), Code::InvalidArgument);
    assert_eq!(violations(&status), ["temperature"]);

    let mut priority = long(3, 1);
    priority.priority = 101;
    let status = ending(&open, Request::new(priority)).await;
    assert_eq!(status.code(), Code::InvalidArgument);
    assert_eq!(violations(&status), ["priority"]);

    let mut adapted = long(3, 1);
    adapted.adapter = "a".into();
    let status = ending(&open, Request::new(adapted)).await;
    assert_eq!(
        (status.code(), reason(&status)),
        (Code::Unimplemented, "UNSUPPORTED".into())
    );
    assert_eq!(violations(&status), ["adapter"]);

    let status = ending(&open, Request::new(long(4090, 1))).await;
    assert_eq!(status.code(), Code::InvalidArgument);
    assert_eq!(reason(&status), "CONTEXT_LENGTH_EXCEEDED");
    for number in ["4096", "4090", "3000"] {
        assert!(status.message().contains(number), "{status}");
    }

    // One request of the tenant runs; the next is told when to come back.
    let mut running = open.grpc().generate(long(3, 1)).await.unwrap().into_inner();
    running.message().await.unwrap();
    let status = ending(&open, Request::new(long(3, 1))).await;
    assert_eq!(status.code(), Code::ResourceExhausted);
    let retry = status.get_error_details().retry_info().cloned();
    let delay = retry.and_then(|info| info.retry_delay).expect("RetryInfo");
    assert!(delay > Duration::ZERO);
    drop(running);
    open.cluster.wait_released(Duration::from_secs(1)).await;
    open.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_are_asked_for_here_too() {
    let mut setup = Setup::default();
    setup.router.api_keys.insert("key-a".into(), "a".into());
    let open = open(setup).await;
    let mut short = long(3, 1);
    short.sampling.as_mut().unwrap().max_tokens = Some(2);
    let status = ending(&open, Request::new(short.clone())).await;
    assert_eq!(status.code(), Code::Unauthenticated);
    assert_eq!(reason(&status), "API_KEY_MISSING");
    let with_key = |key: &str| {
        let mut request = Request::new(short.clone());
        let value = format!("Bearer {key}").parse().unwrap();
        request.metadata_mut().insert("authorization", value);
        request
    };
    let status = ending(&open, with_key("key-b")).await;
    assert_eq!(reason(&status), "API_KEY_INVALID");
    let mut stream = open
        .grpc()
        .generate(with_key("key-a"))
        .await
        .unwrap()
        .into_inner();
    let mut collector = Collector::new(1);
    while let Some(event) = stream.message().await.unwrap() {
        collector.take(event);
    }
    assert_eq!(collector.finish().usage.completion_tokens, 2);
    open.stop().await;
}

/// A message over the limit is refused by its size; other calls of the connection go on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_over_the_limit_harms_only_itself() {
    let open = open(Setup::default()).await;
    let mut client = open.grpc();
    let mut neighbour = client.generate(long(20, 1)).await.unwrap().into_inner();
    neighbour.message().await.unwrap();
    let of_size = |mib: f64| {
        let mut request = long(1, 1);
        let text = "x".repeat((mib * 1048576.0) as usize);
        request.prompt = Some(v1::generate_request::Prompt::Text(text));
        request
    };
    // Below the limit of 16 MiB it is read, and is too long for the context.
    for mib in [3.9, 4.1, 15.9] {
        let status = client.generate(of_size(mib)).await;
        let status = match status {
            Ok(stream) => stream.into_inner().message().await.unwrap_err(),
            Err(status) => status,
        };
        assert_eq!(status.code(), Code::InvalidArgument, "{mib}: {status}");
        assert_eq!(reason(&status), "CONTEXT_LENGTH_EXCEEDED", "{mib}");
    }
    let status = client.generate(of_size(16.1)).await.unwrap_err();
    assert!(
        matches!(status.code(), Code::OutOfRange | Code::ResourceExhausted),
        "{status}"
    );
    assert!(status.message().contains("16777216"), "{status}");
    for _ in 0..20 {
        neighbour.message().await.unwrap().expect("it runs on");
    }
    drop(neighbour);
    open.cluster.wait_released(Duration::from_secs(1)).await;
    open.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reflection_and_health_answer() {
    let open = open(Setup::default()).await;
    let ask = |request| ServerReflectionRequest {
        host: String::new(),
        message_request: Some(request),
    };
    let asked = vec![
        ask(MessageRequest::ListServices(String::new())),
        ask(MessageRequest::FileContainingSymbol(
            "baton.v1.Inference".into(),
        )),
    ];
    let mut reflection = ServerReflectionClient::new(open.channel());
    let answers: Vec<ServerReflectionResponse> = reflection
        .server_reflection_info(futures::stream::iter(asked))
        .await
        .unwrap()
        .into_inner()
        .map(Result::unwrap)
        .collect()
        .await;
    let Some(MessageResponse::ListServicesResponse(list)) = &answers[0].message_response else {
        panic!("{answers:?}");
    };
    let names: Vec<&str> = list.service.iter().map(|s| s.name.as_str()).collect();
    for name in ["baton.v1.Inference", "grpc.health.v1.Health"] {
        assert!(names.contains(&name), "{names:?}");
    }
    assert!(
        matches!(&answers[1].message_response, Some(MessageResponse::FileDescriptorResponse(files)) if !files.file_descriptor_proto.is_empty()),
        "{:?}",
        answers[1]
    );

    let mut health = HealthClient::new(open.channel());
    for service in ["", "baton.v1.Inference"] {
        let request = HealthCheckRequest {
            service: service.into(),
        };
        let answer = health.check(request).await.unwrap().into_inner();
        assert_eq!(answer.status(), ServingStatus::Serving, "{service:?}");
    }
    let unknown = HealthCheckRequest {
        service: "nope".into(),
    };
    assert_eq!(
        health.check(unknown).await.unwrap_err().code(),
        Code::NotFound
    );
    open.stop().await;
}
