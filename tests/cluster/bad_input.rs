//! Whatever a client sends gets a clear answer, and nobody beside it notices.
//!
//! Each table is fired while a neighbour streams on the same workers; the neighbour's
//! tokens must be the oracle's. Seen to fail: while the context's
//! message counted the prompt as empty, and while a body over the limit was answered
//! before its client had sent it.

use std::time::Duration;

use baton_proto::kv_layout::KvDtype;
use baton_proto::sampling::SamplingParams;
use baton_proto::status::from_status;
use baton_proto::v1::decode_worker_client::DecodeWorkerClient;
use baton_proto::v1::prefill_worker_client::PrefillWorkerClient;
use baton_proto::{ErrorKind, protocol, v1};
use baton_tests::client::{self, Answer};
use baton_tests::cluster::Setup;
use baton_tests::doors::OpenCluster;
use baton_tests::models;
use baton_tests::oracle::{Case, Oracle, Output};
use baton_tests::pace::Stopwatch;
use serde_json::{Map, Value, json};
use tokio::task::JoinHandle;

/// A stream that runs beside the bad requests.
struct Neighbour {
    answer: JoinHandle<Answer>,
    right: Vec<Output>,
}

impl Neighbour {
    fn start(open: &OpenCluster, fixture: &str) -> Self {
        let case = Case {
            prompt: (20..70).collect(),
            sampling: SamplingParams {
                temperature: 0.8,
                seed: 4,
                max_tokens: 1500,
                ignore_eos: true,
                ..SamplingParams::default()
            },
        };
        let right = Oracle::new(&models::fixture(fixture), KvDtype::F32).run(&case);
        let frontend = open.cluster.frontend();
        let answer = tokio::spawn(async move {
            client::run(&frontend, client::request(&case))
                .await
                .expect("the neighbour is undisturbed")
        });
        Self { answer, right }
    }

    async fn check(self) {
        let answer = self.answer.await.expect("the neighbour runs");
        assert_eq!(answer.choices[0].tokens, self.right[0].tokens);
    }
}

async fn open(fixture: &str) -> OpenCluster {
    OpenCluster::start(&Setup::default(), &models::fixture(fixture)).await
}

/// A short completion with other fields.
fn completion(more: &Value) -> Value {
    let mut body = json!({ "prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0 });
    let more = more.as_object().expect("an object").clone();
    body.as_object_mut().expect("an object").extend(more);
    body
}

/// Expects 400 that names `param` and answers fast.
async fn refused(open: &OpenCluster, path: &str, body: &Value, param: &str) -> Value {
    let started = Stopwatch::start();
    let reply = open.http().post(path, body).await;
    let took = started.elapsed();
    let shown: String = body.to_string().chars().take(200).collect();
    assert_eq!(
        reply.status,
        400,
        "{shown}: {:?}",
        String::from_utf8_lossy(&reply.body)
    );
    let error = reply.error(400);
    assert_eq!(error["type"], "invalid_request_error", "{shown}");
    assert_eq!(error["param"], param, "{shown}: {error}");
    let message = error["message"].as_str().unwrap();
    assert!(message.len() < 1000, "{shown}: {} bytes", message.len());
    // 50 ms are promised on an idle machine.
    assert!(took < Duration::from_secs(2), "{shown}: {took:?}");
    error
}

async fn accepted(open: &OpenCluster, path: &str, body: &Value) -> Value {
    let reply = open.http().post(path, body).await;
    let text = String::from_utf8_lossy(&reply.body).into_owned();
    assert_eq!(reply.status, 200, "{body}: {text}");
    reply.json()
}

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

/// A prompt without tokens, with a start token and without one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn empty_prompts_are_refused_or_start_from_the_start_token() {
    for (fixture, has_start) in [("rand", true), ("chain-bytes", false)] {
        let open = open(fixture).await;
        let neighbour = (fixture == "rand").then(|| Neighbour::start(&open, fixture));
        for prompt in [json!(""), json!([""])] {
            let body = json!({ "prompt": prompt, "max_tokens": 2 });
            if has_start {
                let answer = accepted(&open, COMPLETIONS, &body).await;
                assert_eq!(answer["usage"]["prompt_tokens"], 1, "{body}");
            } else {
                refused(&open, COMPLETIONS, &body, "prompt").await;
            }
        }
        for (prompt, param) in [
            (json!([]), "prompt"),
            (json!([[]]), "prompt[0]"),
            (json!([[5], []]), "prompt[1]"),
            (Value::Null, "prompt"),
        ] {
            let body = json!({ "prompt": prompt, "max_tokens": 2 });
            refused(&open, COMPLETIONS, &body, param).await;
        }
        refused(&open, COMPLETIONS, &json!({ "max_tokens": 2 }), "prompt").await;
        let mixed = json!({ "prompt": ["a", ""], "max_tokens": 2 });
        if has_start {
            accepted(&open, COMPLETIONS, &mixed).await;
        } else {
            refused(&open, COMPLETIONS, &mixed, "prompt").await;
        }
        refused(&open, CHAT, &json!({ "messages": [] }), "messages").await;
        for (role, content) in [("user", ""), ("user", "   "), ("system", "be brief")] {
            let messages = json!([{ "role": role, "content": content }]);
            let body = json!({ "messages": messages, "max_tokens": 2 });
            if has_start || !content.is_empty() {
                accepted(&open, CHAT, &body).await;
            } else {
                refused(&open, CHAT, &body, "messages").await;
            }
        }
        if let Some(neighbour) = neighbour {
            neighbour.check().await;
        }
        open.cluster.wait_released(Duration::from_secs(1)).await;
        open.stop().await;
    }
}

/// Around the context's edge. Asking for more than is left is always refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompts_fit_the_context_to_the_last_token() {
    let setup = Setup {
        prefill_kv_tokens: 256,
        decode_kv_tokens: 256,
        context_max: Some(64),
        ..Setup::default()
    };
    let open = OpenCluster::start(&setup, &models::fixture("rand")).await;
    for length in [1_u64, 47, 48, 62, 63, 64, 65, 500] {
        let asked = [
            Value::Null,
            json!(1),
            json!(2),
            json!(16),
            json!(17),
            json!(1000),
        ];
        for max_tokens in asked {
            let prompt: Vec<u64> = (0..length).map(|i| 6 + i % 290).collect();
            let body = json!({
                "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": true, "temperature": 0,
            });
            let tokens = max_tokens
                .as_u64()
                .unwrap_or_else(|| 64_u64.saturating_sub(length).max(1));
            if length + tokens <= 64 {
                let answer = accepted(&open, COMPLETIONS, &body).await;
                assert_eq!(
                    answer["usage"]["completion_tokens"], tokens,
                    "{length} {max_tokens}"
                );
                assert_eq!(answer["choices"][0]["finish_reason"], "length");
                continue;
            }
            let reply = open.http().post(COMPLETIONS, &body).await;
            let error = reply.error(400);
            assert_eq!(
                error["code"], "context_length_exceeded",
                "{length} {max_tokens}"
            );
            let message = error["message"].as_str().unwrap();
            for number in [64, length, tokens] {
                assert!(message.contains(&number.to_string()), "{number}: {message}");
            }
        }
    }
    open.cluster.wait_released(Duration::from_secs(1)).await;
    open.stop().await;
}

/// A bias or a stop token outside the vocabulary, or a bias out of its range.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn token_ids_outside_the_vocabulary_are_refused() {
    let open = open("chain-wide").await;
    for key in [
        "300",
        "319",
        "320",
        "4294967295",
        "4294967296",
        "-1",
        "abc",
        "1.5",
    ] {
        let bias: Map<String, Value> = [(key.to_owned(), json!(1))].into_iter().collect();
        let body = completion(&json!({ "logit_bias": bias }));
        refused(&open, COMPLETIONS, &body, "logit_bias").await;
    }
    for value in [json!(101), json!(-101)] {
        let body = completion(&json!({ "logit_bias": { "9": value } }));
        refused(&open, COMPLETIONS, &body, "logit_bias").await;
    }
    for value in [json!("5"), Value::Null, json!([])] {
        let body = completion(&json!({ "logit_bias": { "9": value } }));
        refused(&open, COMPLETIONS, &body, "logit_bias.9").await;
    }
    let body = completion(&json!({ "stop_token_ids": [320] }));
    refused(&open, COMPLETIONS, &body, "stop_token_ids").await;
    let body = completion(&json!({ "stop_token_ids": [-1] }));
    refused(&open, COMPLETIONS, &body, "stop_token_ids[0]").await;
    open.stop().await;

    let open = self::open("rand").await;
    let neighbour = Neighbour::start(&open, "rand");
    let all: Map<String, Value> = (0..300).map(|id| (id.to_string(), json!(0))).collect();
    let plain = accepted(&open, COMPLETIONS, &completion(&json!({}))).await;
    for bias in [json!({}), json!(all)] {
        let body = completion(&json!({ "logit_bias": bias }));
        let answer = accepted(&open, COMPLETIONS, &body).await;
        assert_eq!(answer["choices"][0]["text"], plain["choices"][0]["text"]);
    }
    let nine = accepted(&open, "/detokenize", &json!({ "tokens": [9, 9, 9] })).await;
    let body = completion(&json!({ "logit_bias": { "9": 100 } }));
    let answer = accepted(&open, COMPLETIONS, &body).await;
    assert_eq!(answer["choices"][0]["text"], nine["prompt"]);
    let body = completion(&json!({ "logit_bias": { "300": 1 } }));
    refused(&open, COMPLETIONS, &body, "logit_bias").await;
    neighbour.check().await;
    open.stop().await;
}

/// Numbers out of their range are refused by name, none is clamped.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn numbers_out_of_range_are_refused_by_name() {
    let open = open("rand").await;
    let neighbour = Neighbour::start(&open, "rand");
    let wrong = [
        // The last ones of each are in range once they are rounded to 32 bits.
        (
            "temperature",
            json!([
                -1,
                -0.001,
                100.5,
                123_456,
                1e300,
                100.000_000_1,
                1e-50,
                -1e-50
            ]),
        ),
        (
            "top_p",
            json!([-1, 0, -0.0, 1.000_001, 1e-50, 1.000_000_01]),
        ),
        ("top_k", json!([-2, 1.5, 1e10, 4_294_967_296_u64])),
        ("min_p", json!([-0.1, 1.1, 1.000_000_01, 1e-50])),
        (
            "repetition_penalty",
            json!([0, -1, 1e-9, 1e9, 0.009_999_999_999, 100.000_000_1]),
        ),
        ("presence_penalty", json!([2.1, -2.1, 2.000_000_01])),
        ("frequency_penalty", json!([2.1, -2.1, -2.000_000_01])),
        ("priority", json!([101, -101, 0.5, 2_147_483_648_u32])),
        ("n", json!([0, -1, 17, 3_000_000])),
        ("logprobs", json!([21, 300, -1, 1_000_000_007])),
        (
            "max_tokens",
            json!([0, -1, "5", 1.5, 9_223_372_036_854_775_808_u64]),
        ),
        ("min_tokens", json!([4])),
        ("seed", json!(["1", 0.5, 1e30])),
        ("best_of", json!([1_000_000_000, 2])),
        ("echo", json!([true])),
        ("suffix", json!(["x"])),
        ("stop", json!([vec!["x"; 10_000], "", "y".repeat(2000), 5])),
        ("response_format", json!([{ "type": "json_object" }])),
    ];
    for (field, values) in &wrong {
        for value in values.as_array().unwrap() {
            let mut more = Map::new();
            more.insert((*field).to_owned(), value.clone());
            let body = completion(&Value::Object(more));
            refused(&open, COMPLETIONS, &body, field).await;
        }
    }
    for (more, field) in [
        (
            json!({ "logit_bias": { "9": 100.000_000_1 } }),
            "logit_bias",
        ),
        (json!({ "logit_bias": { "9": 1e-50 } }), "logit_bias"),
        (json!({ "slo": { "itl_ms": 1e300 } }), "slo.itl_ms"),
        (
            json!({ "slo": { "ttft_ms": 0.999_999_999_9 } }),
            "slo.ttft_ms",
        ),
    ] {
        refused(&open, COMPLETIONS, &completion(&more), field).await;
    }
    // The message says what is allowed, also where the value is no number of its kind.
    for (field, value, allowed) in [
        ("temperature", json!(100.000_000_1), "0..=100"),
        ("temperature", json!("hot"), "0..=100"),
        ("top_p", json!(2), "above 0 and at most 1"),
        ("n", json!(1.5), "1..=16"),
        ("n", json!(17), "1..=16"),
        ("seed", json!(0.5), "18446744073709551615"),
        ("priority", json!(1e10), "-100..=100"),
        ("max_tokens", json!(16.5), "from 1 to"),
    ] {
        let mut more = Map::new();
        more.insert(field.to_owned(), value.clone());
        let body = completion(&Value::Object(more));
        let error = open.http().post(COMPLETIONS, &body).await.error(400);
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(allowed), "{field} {value}: {message}");
    }
    // Numbers that are whole are, however they are written.
    let three = accepted(&open, COMPLETIONS, &completion(&json!({}))).await;
    for more in [
        json!({ "max_tokens": 3.0, "n": 1.0, "top_k": 0.0, "min_tokens": 0.0 }),
        json!({ "temperature": -0.0, "priority": -0.0, "stop_token_ids": [7.0] }),
        json!({ "seed": u64::MAX }),
        json!({ "seed": i64::MIN }),
    ] {
        let answer = accepted(&open, COMPLETIONS, &completion(&more)).await;
        assert_eq!(answer["choices"][0]["text"], three["choices"][0]["text"]);
    }
    // What JSON has no number for.
    for (text, field) in [
        (r#"{"prompt":[5],"temperature":1e400}"#, "temperature"),
        (r#"{"prompt":[5],"temperature":NaN}"#, "temperature"),
        (r#"{"prompt":[5],"seed":18446744073709551616}"#, "seed"),
    ] {
        let reply = open.http().post_bytes(COMPLETIONS, text.into()).await;
        let error = reply.error(400);
        let named = error["param"] == field || error["param"].is_null();
        assert!(named, "{text}: {error}");
    }
    let chat = |more: Value| {
        let mut body = json!({ "messages": [{ "role": "user", "content": "a" }], "max_tokens": 2 });
        let more = more.as_object().unwrap().clone();
        body.as_object_mut().unwrap().extend(more);
        body
    };
    for top in [json!(21), json!(-1), json!(1_000_000_007)] {
        let body = chat(json!({ "logprobs": true, "top_logprobs": top }));
        let reply = open.http().post(CHAT, &body).await;
        let param = reply.error(400)["param"].clone();
        assert!(param == "top_logprobs" || param == "logprobs", "{param}");
    }
    for prompt in [
        json!([300]),
        json!([320]),
        json!([-1]),
        json!([1.5]),
        json!([1_u64 << 40]),
    ] {
        let body = completion(&json!({ "prompt": prompt }));
        refused(&open, COMPLETIONS, &body, "prompt").await;
    }
    let many = completion(&json!({ "prompt": vec!["a"; 5000] }));
    refused(&open, COMPLETIONS, &many, "prompt").await;

    // What is in range has its meaning: these three are greedy.
    let greedy = accepted(&open, COMPLETIONS, &completion(&json!({}))).await;
    for more in [
        json!({ "top_k": 1 }),
        json!({ "min_p": 1 }),
        json!({ "top_p": 1e-9 }),
    ] {
        let mut body = completion(&more);
        body["temperature"] = json!(1.5);
        let answer = accepted(&open, COMPLETIONS, &body).await;
        assert_eq!(
            answer["choices"][0]["text"], greedy["choices"][0]["text"],
            "{more}"
        );
    }
    for more in [
        json!({ "top_k": 320 }),
        json!({ "top_k": 1_000_000_000 }),
        json!({ "temperature": 2.5 }),
        json!({ "presence_penalty": -2, "frequency_penalty": 2 }),
        json!({ "seed": -1 }),
        json!({ "seed": i64::MAX }),
        json!({ "n": 16 }),
        json!({ "best_of": 1 }),
    ] {
        accepted(&open, COMPLETIONS, &completion(&more)).await;
    }
    neighbour.check().await;
    open.cluster.wait_released(Duration::from_secs(1)).await;
    open.stop().await;
}

/// Names, nulls, types; also when a stream was asked for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_nulls_and_types_are_read_strictly() {
    let open = open("rand").await;
    let neighbour = Neighbour::start(&open, "rand");
    for stream in [false, true] {
        let long = "x".repeat(10_000);
        for model in ["nope", "TEST", "../../etc/passwd", &long] {
            let body = completion(&json!({ "model": model, "stream": stream }));
            let error = open.http().post(COMPLETIONS, &body).await.error(404);
            assert_eq!(error["code"], "model_not_found");
            assert_eq!(error["param"], "model");
            assert!(error["message"].as_str().unwrap().len() < 500);
        }
        for more in [json!({ "n": 0 }), json!({ "max_tokens": 5000 })] {
            let mut body = completion(&more);
            body["stream"] = json!(stream);
            open.http().post(COMPLETIONS, &body).await.error(400);
        }
    }
    // Absent means the only model; so does null.
    accepted(&open, COMPLETIONS, &completion(&json!({}))).await;
    accepted(&open, COMPLETIONS, &completion(&json!({ "model": null }))).await;

    let nulls: Map<String, Value> = [
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "n",
        "stop",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "logprobs",
        "min_tokens",
        "stop_token_ids",
        "ignore_eos",
        "stream",
        "stream_options",
        "echo",
        "suffix",
        "best_of",
        "user",
        "metadata",
        "response_format",
        "max_tokens",
    ]
    .into_iter()
    .map(|field| (field.to_owned(), Value::Null))
    .collect();
    let mut body = json!({ "prompt": vec![5; 4090] });
    body.as_object_mut().unwrap().extend(nulls);
    let answer = accepted(&open, COMPLETIONS, &body).await;
    assert!(answer["usage"]["completion_tokens"].as_u64().unwrap() <= 6);

    let chat = |more: Value| {
        let mut body = json!({ "messages": [{ "role": "user", "content": "a" }] });
        let more = more.as_object().unwrap().clone();
        body.as_object_mut().unwrap().extend(more);
        body
    };
    let body = chat(json!({ "max_completion_tokens": 7, "ignore_eos": true }));
    let answer = accepted(&open, CHAT, &body).await;
    assert_eq!(answer["usage"]["completion_tokens"], 7);
    let both = chat(json!({ "max_completion_tokens": 7, "max_tokens": 8 }));
    refused(&open, CHAT, &both, "max_completion_tokens").await;
    for (more, param) in [
        (json!({ "temperature": true }), "temperature"),
        (json!({ "max_tokens": "5" }), "max_tokens"),
        (json!({ "stream": "yes" }), "stream"),
        (json!({ "messages": "hi" }), "messages"),
        (json!({ "messages": [5] }), "messages[0]"),
        (json!({ "tools": [{}] }), "tools"),
        (json!({ "tempratur": 1 }), "tempratur"),
    ] {
        refused(&open, CHAT, &chat(more), param).await;
    }
    for stop in [
        json!(["a", "b", "c", "d", "e"]),
        json!([]),
        json!("x"),
        Value::Null,
    ] {
        accepted(&open, CHAT, &chat(json!({ "stop": stop, "max_tokens": 2 }))).await;
    }
    let noted = json!({ "user": "u", "metadata": { "a": "b" }, "store": false, "max_tokens": 1 });
    accepted(&open, CHAT, &chat(noted)).await;
    neighbour.check().await;
    open.stop().await;
}

/// Bodies that are no JSON, no UTF-8 or too large.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_that_cannot_be_read_are_refused() {
    let open = open("rand").await;
    let neighbour = Neighbour::start(&open, "rand");
    let deep = format!(
        "{{\"prompt\":{}5{}}}",
        "[".repeat(100_000),
        "]".repeat(100_000)
    );
    for body in [
        &b""[..],
        b"{",
        b"null",
        b"[]",
        b"\"text\"",
        b"{\"prompt\":\"a\"} {}",
        b"{\"prompt\":\"a\",\"prompt\":\"b\"}",
        b"{\"prompt\":\"\xff\xfe\"}",
        b"\xef\xbb\xbf{}",
        b"{\"prompt\":\"\\ud800\"}",
        deep.as_bytes(),
    ] {
        for path in [COMPLETIONS, CHAT, "/tokenize"] {
            let reply = open.http().post_bytes(path, body.to_vec()).await;
            let error = reply.error(400);
            assert!(error["message"].as_str().unwrap().len() < 1000);
        }
    }
    let big = [b"{\"prompt\":\"".as_slice(), &vec![b'a'; 17 << 20], b"\"}"].concat();
    let error = open.http().post_bytes(COMPLETIONS, big).await.error(413);
    assert!(error["message"].as_str().unwrap().contains("16777216"));
    neighbour.check().await;
    open.cluster.wait_released(Duration::from_secs(1)).await;
    open.stop().await;
}

fn work(epoch: u64, revision: &str) -> v1::WorkRequest {
    v1::WorkRequest {
        protocol: Some(protocol::CURRENT.into()),
        request_id: format!("direct-{epoch}"),
        epoch,
        model_revision: revision.to_owned(),
        prompt: vec![5, 6, 7],
        sampling: Some((&SamplingParams::default()).into()),
        use_cache: true,
        exact: true,
        ..v1::WorkRequest::default()
    }
}

/// Workers answer only to their own life, revision and protocol.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_refuses_another_life_s_work() {
    let open = open("rand").await;
    let neighbour = Neighbour::start(&open, "rand");
    let connect = |address: std::net::SocketAddr| {
        tonic::transport::Endpoint::from_shared(format!("http://{address}"))
            .unwrap()
            .connect_lazy()
    };
    let describe = v1::DescribeRequest {
        protocol: Some(protocol::CURRENT.into()),
    };
    let cluster = &open.cluster.cluster;
    let mut decode =
        DecodeWorkerClient::new(connect(cluster.decode_workers()[0].control_address()));
    let mut prefill =
        PrefillWorkerClient::new(connect(cluster.prefill_workers()[0].control_address()));
    let decode_is = decode.describe(describe).await.unwrap().into_inner();
    let prefill_is = prefill.describe(describe).await.unwrap().into_inner();
    let card: Value = serde_json::from_str(&decode_is.model_card_json).unwrap();
    let revision = card["revision"].as_str().unwrap().to_owned();

    let mut old_protocol = work(decode_is.epoch, &revision);
    old_protocol.protocol.as_mut().unwrap().major += 1;
    let mut bad_token = work(decode_is.epoch, &revision);
    bad_token.prompt = vec![5, 300];
    let mut empty = work(decode_is.epoch, &revision);
    empty.prompt.clear();
    let mut nan = work(decode_is.epoch, &revision);
    nan.sampling.as_mut().unwrap().temperature = Some(f32::NAN);
    let mut long = work(decode_is.epoch, &revision);
    long.prompt = vec![5; 4096];
    for (work, kind, field) in [
        (
            work(decode_is.epoch ^ 1, &revision),
            ErrorKind::Fenced,
            "work.epoch",
        ),
        (
            work(decode_is.epoch, "another"),
            ErrorKind::Fenced,
            "work.model_revision",
        ),
        (old_protocol, ErrorKind::Unavailable, "protocol.major"),
        (bad_token, ErrorKind::Invalid, "work.prompt"),
        (empty, ErrorKind::Invalid, "work.prompt"),
        (nan, ErrorKind::Invalid, "temperature"),
        (long, ErrorKind::Invalid, "max_tokens"),
    ] {
        let start = v1::DecodeCommand {
            command: Some(v1::decode_command::Command::Start(v1::DecodeStart {
                work: Some(work),
                path: v1::decode_start::Path::Local.into(),
                attempt: 1,
            })),
        };
        let status = match decode.decode(futures::stream::iter([start])).await {
            Err(status) => status,
            Ok(events) => events.into_inner().message().await.unwrap_err(),
        };
        let error = from_status(&status);
        assert_eq!(
            (error.kind, error.field.as_str()),
            (kind, field),
            "{error:?}"
        );
    }
    // The prefill worker by the same rule.
    let request = v1::PrefillRequest {
        work: Some(work(prefill_is.epoch ^ 1, &revision)),
        lane: Some(v1::Lane::default()),
    };
    let status = match prefill.prefill(request).await {
        Err(status) => status,
        Ok(events) => events.into_inner().message().await.unwrap_err(),
    };
    assert_eq!(from_status(&status).kind, ErrorKind::Fenced, "{status}");
    neighbour.check().await;
    open.cluster.wait_released(Duration::from_secs(1)).await;
    open.stop().await;
}

/// Lanes to be tried are checked like those of work, and what cannot be reached is said.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_refuses_to_probe_a_lane_that_is_none() {
    let open = open("rand").await;
    let address = open.cluster.cluster.prefill_workers()[0].control_address();
    let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{address}"));
    let mut prefill = PrefillWorkerClient::new(endpoint.unwrap().connect_lazy());
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let nobody = closed.local_addr().unwrap().to_string();
    drop(closed);
    let lane = |data_address: &str, key: usize| v1::Lane {
        data_address: data_address.to_owned(),
        process_token: vec![1; 16],
        lane_key: vec![1; key],
        ticket: vec![1; 16],
        ..v1::Lane::default()
    };
    for (lane, kind, field, reason) in [
        (None, ErrorKind::Invalid, "lane", "INVALID_ARGUMENT"),
        (
            Some(lane(&nobody, 31)),
            ErrorKind::Invalid,
            "lane.lane_key",
            "INVALID_ARGUMENT",
        ),
        (
            Some(lane("no port", 32)),
            ErrorKind::Unavailable,
            "",
            "DATA_ADDRESS_UNREACHABLE",
        ),
        (
            Some(lane(&nobody, 32)),
            ErrorKind::Unavailable,
            "",
            "HANDOFF_UNREACHABLE",
        ),
    ] {
        let request = v1::ProbeLaneRequest { lane };
        let error = from_status(&prefill.probe_lane(request).await.unwrap_err());
        let got = (error.kind, error.field.as_str(), error.reason.as_str());
        assert_eq!(got, (kind, field, reason), "{error:?}");
    }
    open.stop().await;
}
