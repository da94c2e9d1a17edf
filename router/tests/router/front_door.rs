//! The front door: refusals by name, keys, limits, deadlines, health, reflection.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use baton_membership::Role;
use baton_observability::Readiness;
use baton_proto::status::from_status;
use baton_proto::{ErrorKind, limits, v1};
use baton_router::{CallContext, Tenant};
use tonic::{Code, Request};

use crate::cluster::{Cluster, call, request, sampling, until};
use crate::workers::Act;

#[tokio::test]
async fn wrong_requests_are_refused_by_name_and_reach_no_worker() {
    let mut cluster = Cluster::start(|_| {}).await;
    let d = cluster.worker("d1", Role::Decode).await;
    let text = |text: &str| Some(v1::generate_request::Prompt::Text(text.into()));
    let ids = |ids: &[u32]| {
        let ids = ids.to_vec();
        Some(v1::generate_request::Prompt::TokenIds(v1::TokenIds { ids }))
    };
    let chat = |json: &str| {
        let messages = vec![v1::ChatMessage { json: json.into() }];
        Some(v1::generate_request::Prompt::Chat(v1::Chat {
            messages,
            ..v1::Chat::default()
        }))
    };
    let slo = |ttft_ms, itl_ms| Some(v1::Slo { ttft_ms, itl_ms });
    let with = |change: &dyn Fn(&mut v1::GenerateRequest)| {
        let mut request = request(10, 5);
        change(&mut request);
        request
    };
    let sampled = |change: fn(&mut v1::SamplingParams)| sampling(request(10, 5), change);
    for (request, kind, field) in [
        (
            with(&|r| r.model = "nope".into()),
            ErrorKind::NotFound,
            "model",
        ),
        (with(&|r| r.prompt = None), ErrorKind::Invalid, "prompt"),
        (with(&|r| r.prompt = text("")), ErrorKind::Invalid, "prompt"),
        (with(&|r| r.prompt = ids(&[])), ErrorKind::Invalid, "prompt"),
        (
            with(&|r| r.prompt = ids(&[1, 257])),
            ErrorKind::Invalid,
            "prompt",
        ),
        (
            with(&|r| r.prompt = chat("{}")),
            ErrorKind::Invalid,
            "messages[0].role",
        ),
        (
            with(&|r| r.prompt = chat("nonsense")),
            ErrorKind::Invalid,
            "messages[0]",
        ),
        (
            with(&|r| r.stop = vec![String::new()]),
            ErrorKind::Invalid,
            "stop",
        ),
        (with(&|r| r.priority = 101), ErrorKind::Invalid, "priority"),
        (
            with(&|r| r.slo = slo(None, Some(f64::NAN))),
            ErrorKind::Invalid,
            "slo.itl_ms",
        ),
        (
            with(&|r| r.slo = slo(Some(0.5), None)),
            ErrorKind::Invalid,
            "slo.ttft_ms",
        ),
        (
            with(&|r| r.adapter = "a".into()),
            ErrorKind::Unsupported,
            "adapter",
        ),
        (
            with(&|r| r.resume = Some(v1::Resume::default())),
            ErrorKind::Invalid,
            "resume.resume_token",
        ),
        (
            with(&|r| r.response_format = Some(v1::ResponseFormat::default())),
            ErrorKind::Unsupported,
            "response_format",
        ),
        (
            sampled(|s| s.temperature = Some(f32::NAN)),
            ErrorKind::Invalid,
            "temperature",
        ),
        (
            sampled(|s| s.max_tokens = Some(0)),
            ErrorKind::Invalid,
            "max_tokens",
        ),
        (sampled(|s| s.n = Some(17)), ErrorKind::Invalid, "n"),
        (
            sampled(|s| s.logprobs = Some(21)),
            ErrorKind::Invalid,
            "logprobs",
        ),
        (
            sampled(|s| s.min_tokens = Some(6)),
            ErrorKind::Invalid,
            "min_tokens",
        ),
        (
            sampled(|s| s.stop_token_ids = vec![257]),
            ErrorKind::Invalid,
            "stop_token_ids",
        ),
    ] {
        let outcome = cluster.run(request).await;
        let error = outcome.failed();
        assert_eq!(
            (error.kind, error.field.as_str()),
            (kind, field),
            "{error:?}"
        );
        assert!(outcome.accepted.is_none());
    }
    let unknown = with(&|r| r.model = "nope".into());
    let error = cluster.run(unknown).await.error.unwrap();
    assert_eq!(error.reason, "MODEL_NOT_FOUND");
    assert!(error.message.contains("nope") && error.message.contains("alphabet"));
    assert!(d.script.starts.lock().unwrap().is_empty());
    cluster.stop().await;
}

#[tokio::test]
async fn the_context_is_a_sharp_edge() {
    let mut cluster = Cluster::start(|_| {}).await;
    let d = cluster.worker("d1", Role::Decode).await;
    let unlimited = |prompt| sampling(request(prompt, 1), |s| s.max_tokens = None);
    for (request, tokens) in [
        (request(4095, 1), 1),
        (request(4000, 96), 96),
        (unlimited(4000), 96),
        (unlimited(4095), 1),
    ] {
        assert_eq!(cluster.run(request).await.usage().completion_tokens, tokens);
    }
    for (request, prompt, asked) in [
        (request(4096, 1), "4096", "1 "),
        (request(4000, 97), "4000", "97"),
        (unlimited(4096), "4096", "1 "),
        (request(5000, 7), "5000", "7 "),
    ] {
        let outcome = cluster.run(request).await;
        let error = outcome.failed();
        assert_eq!(error.reason, "CONTEXT_LENGTH_EXCEEDED");
        assert_eq!(error.kind, ErrorKind::Invalid);
        for part in ["4096", prompt, asked] {
            assert!(error.message.contains(part), "{}", error.message);
        }
    }
    assert_eq!(d.script.starts.lock().unwrap().len(), 4);
    cluster.stop().await;
}

#[tokio::test]
async fn keys_open_the_door_and_name_the_tenant() {
    let mut cluster = Cluster::start(|c| {
        c.api_keys.insert("secret".into(), "acme".into());
        c.tenant_requests_max = 1;
    })
    .await;
    let d = cluster.worker("d1", Role::Decode).await;
    assert_eq!(
        cluster.run(request(10, 3)).await.failed().kind,
        ErrorKind::Unauthenticated
    );
    let with_key = |key: &str| {
        let mut wrapped = Request::new(request(10, 3));
        let value = format!("Bearer {key}").parse().unwrap();
        wrapped.metadata_mut().insert("authorization", value);
        wrapped
    };
    let status = cluster
        .client()
        .generate(with_key("wrong"))
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::Unauthenticated);
    assert!(!status.message().contains("secret"));
    let mut stream = cluster
        .client()
        .generate(with_key("secret"))
        .await
        .unwrap()
        .into_inner();
    while stream.message().await.unwrap().is_some() {}

    // One at a time.
    d.script.set(Act::Hang);
    let mut held = cluster
        .client()
        .generate(with_key("secret"))
        .await
        .unwrap()
        .into_inner();
    let waiting = tokio::spawn(async move { held.message().await });
    until("the first is in flight", || {
        cluster.metric("baton_requests_in_flight") == 1.0
    })
    .await;
    let mut second = cluster
        .client()
        .generate(with_key("secret"))
        .await
        .unwrap()
        .into_inner();
    let error = from_status(&second.message().await.unwrap_err());
    assert_eq!(error.reason, "TENANT_REQUESTS_FULL");
    assert!(error.retry_after.is_some());
    waiting.abort();
    cluster.stop().await;
}

#[tokio::test]
async fn a_deadline_holds_wherever_the_request_is() {
    let mut cluster = Cluster::start(|_| {}).await;
    let p = cluster.worker("p1", Role::Prefill).await;
    let d = cluster.worker("d1", Role::Decode).await;
    let slow = Act::Slowly(Duration::from_millis(20));
    for (stage, act_p, act_d) in [
        ("reserve", Act::Well, Act::Hang),
        ("prefill", Act::Hang, Act::Well),
        ("decode", Act::Well, slow),
    ] {
        p.script.set(act_p);
        d.script.set(act_d);
        let uncached = v1::GenerateRequest {
            use_cache: Some(false),
            ..request(100, 2000)
        };
        let mut wrapped = Request::new(uncached);
        wrapped.set_timeout(Duration::from_millis(1_000));
        // The timer of tonic's client would hide what the server does.
        let deadline = "1000m".parse().unwrap();
        wrapped.metadata_mut().insert("grpc-timeout", deadline);
        let begun = Instant::now();
        let mut stream = cluster
            .client()
            .generate(wrapped)
            .await
            .unwrap()
            .into_inner();
        let status = loop {
            match stream.message().await {
                Ok(Some(_)) => {}
                Ok(None) => panic!("{stage}: ended without an error"),
                Err(status) => break status,
            }
        };
        let took = begun.elapsed();
        assert_eq!(status.code(), Code::DeadlineExceeded, "{stage}: {status:?}");
        assert!(took >= Duration::from_millis(999), "{stage}: {took:?}");
        // Less than 50 ms later on an idle machine, and sooner than any other timer here.
        assert!(took < Duration::from_secs(5), "{stage}: {took:?}");
        until("both workers stopped", || {
            [&p, &d]
                .iter()
                .all(|w| w.script.running.load(Ordering::Relaxed) == 0)
        })
        .await;
    }
    // The workers were told what was left.
    let starts = d.script.starts.lock().unwrap().clone();
    let told = starts
        .iter()
        .filter_map(|start| start.work.as_ref()?.deadline_ms);
    assert!(told.clone().count() == 3 && told.clone().all(|ms| ms <= 1_000));
    // One that has passed on arrival is refused without work.
    let mut late = CallContext::new(Tenant::new("default"));
    late.deadline = Some(late.received);
    let late = cluster.frontend.generate(request(100, 10), late).await;
    assert_eq!(late.err().unwrap().kind, ErrorKind::Deadline);
    assert_eq!(d.script.starts.lock().unwrap().len(), 3);
    cluster.stop().await;
}

#[tokio::test]
async fn a_message_over_the_limit_names_size_and_limit_and_hurts_nobody() {
    let mut cluster = Cluster::start(|_| {}).await;
    let _d = cluster.worker("d1", Role::Decode).await;
    let mut client = cluster.client();
    // 4.1 MiB passes the door and is refused for what it is: too long a prompt.
    let long = request(4_300_000, 1);
    let mut stream = client.generate(long).await.unwrap().into_inner();
    let error = from_status(&stream.message().await.unwrap_err());
    assert_eq!(error.reason, "CONTEXT_LENGTH_EXCEEDED");
    let huge = request(limits::BODY_BYTES_MAX + 1, 1);
    let status = match client.generate(huge).await {
        Err(status) => status,
        Ok(response) => response.into_inner().message().await.unwrap_err(),
    };
    assert!(
        status
            .message()
            .contains(&limits::BODY_BYTES_MAX.to_string()),
        "{status:?}"
    );
    let mut stream = client.generate(request(10, 2)).await.unwrap().into_inner();
    while stream.message().await.unwrap().is_some() {}
    cluster.stop().await;
}

#[tokio::test]
async fn tokens_and_text_go_both_ways() {
    let mut cluster = Cluster::start(|_| {}).await;
    let _d = cluster.worker("d1", Role::Decode).await;
    let mut client = cluster.client();
    let request = v1::TokenizeRequest {
        input: Some(v1::tokenize_request::Input::Text("abc".into())),
        ..v1::TokenizeRequest::default()
    };
    let tokenized = client.tokenize(request).await.unwrap().into_inner();
    assert_eq!(
        (tokenized.ids.clone(), tokenized.context_max),
        (vec![97, 98, 99], 4096)
    );
    let request = v1::DetokenizeRequest {
        ids: tokenized.ids,
        ..v1::DetokenizeRequest::default()
    };
    let text = client.detokenize(request).await.unwrap().into_inner().text;
    assert_eq!(text, "abc");
    let wrong = v1::DetokenizeRequest {
        ids: vec![257],
        ..v1::DetokenizeRequest::default()
    };
    let error = from_status(&client.detokenize(wrong).await.unwrap_err());
    assert_eq!(error.field, "ids");
    let chat = v1::Chat {
        messages: vec![v1::ChatMessage {
            json: r#"{"role": "user", "content": "hi"}"#.into(),
        }],
        ..v1::Chat::default()
    };
    let request = v1::TokenizeRequest {
        input: Some(v1::tokenize_request::Input::Chat(chat)),
        ..v1::TokenizeRequest::default()
    };
    let ids = client.tokenize(request).await.unwrap().into_inner().ids;
    assert_eq!(ids.len(), "user:hi\n".len());
    let models = client.list_models(v1::ListModelsRequest {}).await.unwrap();
    let model = models.into_inner().models.remove(0);
    assert!(model.has_chat_template && model.decode_workers == 1);
    cluster.stop().await;
}

#[tokio::test]
async fn health_and_reflection_answer_and_follow_readiness() {
    use tonic_health::pb::health_check_response::ServingStatus;
    let mut cluster = Cluster::start(|c| c.pool_timeout_ms = Some(0)).await;
    assert!(matches!(
        cluster.frontend.readiness(),
        Readiness::NotReady(_)
    ));
    let outcome = call(&cluster.frontend, request(10, 1)).await;
    assert_eq!(outcome.failed().reason, "NO_WORKERS");
    let mut d = cluster.worker("d1", Role::Decode).await;
    let mut health = tonic_health::pb::health_client::HealthClient::new(cluster.channel());
    let mut status = async |service: &str, wanted: ServingStatus| {
        for _ in 0..1000 {
            let request = tonic_health::pb::HealthCheckRequest {
                service: service.into(),
            };
            let status = health.check(request).await.map(|r| r.into_inner().status());
            if status.is_ok_and(|status| status == wanted) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("`{service}` never became {wanted:?}");
    };
    status("", ServingStatus::Serving).await;
    status("baton.v1.Inference", ServingStatus::Serving).await;
    assert_eq!(cluster.frontend.readiness(), Readiness::Ready);
    d.kill();
    status("baton.v1.Inference", ServingStatus::NotServing).await;
    let outcome = call(&cluster.frontend, request(10, 1)).await;
    assert_eq!(outcome.failed().reason, "NO_DECODE_WORKER");

    use tonic_reflection::pb::v1::ServerReflectionRequest;
    use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
    use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
    use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
    let list = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let mut answers = ServerReflectionClient::new(cluster.channel())
        .server_reflection_info(tokio_stream::iter([list]))
        .await
        .unwrap()
        .into_inner();
    let answer = answers.message().await.unwrap().unwrap();
    let Some(MessageResponse::ListServicesResponse(services)) = answer.message_response else {
        panic!("{answer:?}");
    };
    let names: Vec<_> = services
        .service
        .iter()
        .map(|service| service.name.as_str())
        .collect();
    assert!(names.contains(&"baton.v1.Inference"), "{names:?}");
    cluster.stop().await;
}

#[tokio::test]
async fn a_draining_router_finishes_what_it_has_and_takes_nothing_new() {
    let mut cluster = Cluster::start(|c| c.drain_ms = 2_000).await;
    let d = cluster.worker("d1", Role::Decode).await;
    d.script.set(Act::Slowly(Duration::from_millis(10)));
    let frontend = cluster.frontend.clone();
    let short = tokio::spawn({
        let frontend = frontend.clone();
        async move { call(&frontend, request(10, 30)).await }
    });
    let long = tokio::spawn({
        let frontend = frontend.clone();
        async move { call(&frontend, request(10, 1000)).await }
    });
    until("both were begun", || {
        d.script.starts.lock().unwrap().len() == 2
    })
    .await;
    cluster.shut_down().await;
    assert_eq!(short.await.unwrap().usage().completion_tokens, 30);
    let long = long.await.unwrap();
    assert_eq!(long.failed().reason, "DRAINING");
    assert!(!long.ids[0].is_empty());
    let late = call(&frontend, request(10, 5)).await;
    assert_eq!(late.failed().reason, "DRAINING");
}
