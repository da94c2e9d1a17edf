//! Inputs of megabytes: refused in time that grows with their size and no faster, while
//! streams, health probes and short requests beside them go on.
//!
//! Sizes up to the limit of a body pass at every hop, in both directions; one above it is
//! refused by its size, over both doors, and harms nothing else on its connection.
//!
//! Seen to fail: while whole texts were made into tokens before they were measured, with long
//! bodies worked on by the threads that serve, with a bound that thinks tokens shorter than
//! they are, while gRPC's own word for a message over the limit was passed on, and with
//! messages over the limit between router and workers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use baton_proto::sampling::SamplingParams;
use baton_proto::status::ERROR_DOMAIN;
use baton_proto::v1::decode_worker_client::DecodeWorkerClient;
use baton_proto::v1::inference_client::InferenceClient;
use baton_proto::v1::prefill_worker_client::PrefillWorkerClient;
use baton_proto::{protocol, v1};
use baton_tests::client::Collector;
use baton_tests::cluster::Setup;
use baton_tests::doors::OpenCluster;
use baton_tests::http::{Event, Http, Streamed};
use baton_tests::models;
use baton_tests::pace::Stopwatch;
use baton_tests::process::{RouterProcess, up};
use futures::future::join_all;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::task::JoinHandle;
use tonic::codec::CompressionEncoding;
use tonic::transport::Endpoint;
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";
const MIB: usize = 1 << 20;
/// `<|assistant|>`, the longest token of the fixture: 13 bytes.
const ASSISTANT: u32 = 5;

fn message(content: &str) -> Value {
    json!({ "messages": [{ "role": "user", "content": content }], "max_tokens": 4 })
}

fn prompt(prompt: Value) -> Value {
    json!({ "prompt": prompt, "max_tokens": 4 })
}

/// Giants, each longer than any context: name, path, body, what `param` may be.
fn giants() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    let text: String = "All work and no play makes a dull day. ".repeat(8_000_000 / 39);
    let many: Vec<Value> = (0..100_000)
        .map(|index| json!({ "role": "user", "content": format!("{index}") }))
        .collect();
    let ids: Vec<u32> = (0..200_000).map(|index| 6 + index % 290).collect();
    let marks = "\u{301}".repeat(MIB);
    vec![
        ("8 MB as one message", CHAT, message(&text)),
        ("8 MB of text", COMPLETIONS, prompt(json!(text))),
        ("2 MB of one letter", CHAT, message(&"a".repeat(2 * MIB))),
        (
            "2 MB of one letter",
            COMPLETIONS,
            prompt(json!("a".repeat(2 * MIB))),
        ),
        ("2 MB of combining marks", CHAT, message(&marks)),
        ("2 MB of combining marks", COMPLETIONS, prompt(json!(marks))),
        (
            "100,000 messages",
            CHAT,
            json!({ "messages": many, "max_tokens": 4 }),
        ),
        ("200,000 token ids", COMPLETIONS, prompt(json!(ids))),
    ]
    .into_iter()
    .map(|(name, path, body)| (name, path, body.to_string().into_bytes()))
    .collect()
}

/// Sends a giant and checks its refusal.
async fn refused(http: &Http, (name, path, body): &(&'static str, &'static str, Vec<u8>)) -> Value {
    let reply = http.post_bytes(path, body.clone()).await;
    let error = reply.error(400);
    let message = error["message"].as_str().unwrap();
    assert!(message.len() < 1000, "{name}: {} bytes", message.len());
    let code = error["code"].as_str().unwrap();
    let many = error["param"] == "messages" && message.contains("100000");
    assert!(code == "context_length_exceeded" || many, "{name}: {error}");
    error
}

/// Does something every so often until it is told to stop; how long each took.
struct Probe {
    stop: Arc<AtomicBool>,
    task: JoinHandle<Vec<Duration>>,
}

impl Probe {
    fn start(http: Http, path: &'static str) -> Self {
        let stop = Arc::<AtomicBool>::default();
        let told = Arc::clone(&stop);
        let task = tokio::spawn(async move {
            let mut took = Vec::new();
            while !told.load(Ordering::Relaxed) {
                let begun = Instant::now();
                assert_eq!(http.get(path).await.status, 200, "{path}");
                took.push(begun.elapsed());
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            took
        });
        Self { stop, task }
    }

    /// The 99th of a hundred.
    async fn stop(self) -> Duration {
        self.stop.store(true, Ordering::Relaxed);
        let mut took = self.task.await.expect("every probe is answered");
        took.sort_unstable();
        took[(took.len() * 99 / 100).min(took.len() - 1)]
    }
}

/// A stream of token events and the longest pause between two.
async fn read_stream(router: &RouterProcess, tokens: u32) -> (Streamed, Duration) {
    let body = json!({ "prompt": (30..90).collect::<Vec<u32>>(), "max_tokens": tokens,
        "ignore_eos": true, "temperature": 0, "stream": true });
    let mut stream = router.http().stream(COMPLETIONS, &body).await;
    let (mut events, mut longest, mut last): (Vec<Event>, _, _) =
        (Vec::new(), Duration::ZERO, None::<Instant>);
    while let Some(event) = stream.next().await {
        let now = Instant::now();
        if let Some(last) = last.replace(now) {
            longest = longest.max(now - last);
        }
        events.push(event);
    }
    (Streamed::read(&events, false, 1, false), longest)
}

/// Twenty giants at once: nobody beside them stands still.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twenty_giants_at_once_hold_nobody_up() {
    let folder = tempfile::tempdir().unwrap();
    let router = up("rand", &[], folder.path()).await;
    let giants = giants();
    for giant in &giants {
        let watch = Stopwatch::start();
        let error = refused(&router.http(), giant).await;
        let took = watch.elapsed();
        println!("{took:?}: {}", giant.0);
        // Less than a second on an idle machine; minutes where time grows faster than size.
        assert!(took < Duration::from_secs(20), "{}: {took:?}", giant.0);
        // Found by its length, not by making its tokens.
        let said = error["message"].as_str().unwrap();
        let text = !giant.0.starts_with(['1', '2']) || giant.0.contains("MB");
        assert_eq!(text, said.contains("at least"), "{}: {said}", giant.0);
    }
    let (alone, usual) = read_stream(&router, 500).await;

    let live = Probe::start(router.http(), "/livez");
    let ready = Probe::start(router.http(), "/readyz");
    let (http, stream) = (router.http(), read_stream(&router, 500));
    let all = join_all((0..20).map(|index| refused(&http, &giants[index % giants.len()])));
    let watch = Stopwatch::start();
    let ((streamed, longest), _) = tokio::join!(stream, all);
    let took = watch.elapsed();
    let (live, ready) = (live.stop().await, ready.stop().await);
    println!("all in {took:?}; longest gap {longest:?}, alone {usual:?}; {live:?}, {ready:?}");
    assert_eq!(streamed.text(0), alone.text(0));
    // 200 ms and three times the usual gap are promised on four idle cores. Who waits for giants
    // waits for most of the time that all of them take.
    let slow = Duration::from_secs(1) + took / 4;
    for probe in [live, ready] {
        assert!(probe < slow, "health took {probe:?} of {took:?}");
    }
    let most = 3 * usual + slow;
    assert!(longest < most, "a gap of {longest:?}, alone {usual:?}");
}

/// A text that may just fit is encoded and counted; the bound errs on that side alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_text_that_may_fit_is_counted() {
    let open = open().await;
    let said = async |text: String| {
        let reply = open.http().post(COMPLETIONS, &prompt(json!(text))).await;
        let error = reply.error(400);
        assert_eq!(error["code"], "context_length_exceeded", "{error}");
        error["message"].as_str().unwrap().to_owned()
    };
    // No token of this model is longer than 13 bytes.
    assert!(said("x".repeat(13 * 4097)).await.contains("at least 4097"));
    // This one makes a token of each letter; twice the context is as far as it is followed.
    assert!(said("x".repeat(13 * 4096)).await.contains("at least 8193"));
    assert!(said("x".repeat(5_000)).await.contains("has 5001"));
    let whole = json!({ "prompt": "<|assistant|>".repeat(4000), "max_tokens": 4 });
    let answer = open.http().post(COMPLETIONS, &whole).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.json()["usage"]["prompt_tokens"], 4001);
    open.stop().await;
}

async fn open() -> OpenCluster {
    OpenCluster::start(&Setup::default(), &models::fixture("rand")).await
}

/// A text of this many bytes less what stands around it.
fn text(mib: f64) -> String {
    "z".repeat((mib * MIB as f64) as usize - 256)
}

fn reason(status: &Status) -> String {
    let details = status.get_error_details();
    let info = details.error_info();
    let info = info.unwrap_or_else(|| panic!("no ErrorInfo: {status}"));
    assert_eq!(info.domain, ERROR_DOMAIN);
    info.reason.clone()
}

/// Up to the limit a size is no reason to refuse, above it the only one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sizes_pass_up_to_the_limit_over_http() {
    let open = open().await;
    for (mib, path, stream) in [
        (3.9, COMPLETIONS, false),
        (4.0, COMPLETIONS, true),
        (4.1, COMPLETIONS, false),
        (4.1, CHAT, true),
        (16.0, COMPLETIONS, true),
        (16.0, CHAT, false),
    ] {
        let mut body = match path {
            CHAT => message(&text(mib)),
            _ => prompt(json!(text(mib))),
        };
        body["stream"] = json!(stream);
        let error = open.http().post(path, &body).await.error(400);
        assert_eq!(error["code"], "context_length_exceeded", "{mib} {path}");
    }
    // The longest token, so that few of them make a long answer.
    let tokens = json!({ "tokens": vec![ASSISTANT; 5 * MIB / 13] });
    let answer = open.http().post("/detokenize", &tokens).await;
    assert!(answer.body.len() > 4 * MIB);
    let text = answer.json()["prompt"].as_str().unwrap().to_owned();
    assert_eq!(text.len(), 5 * MIB / 13 * 13);

    // One connection: what is too large, then something else.
    let body = prompt(json!("z".repeat(16 * MIB))).to_string();
    let head = |method: &str, path: &str, length: usize| {
        format!("{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n")
    };
    let stream = tokio::net::TcpStream::connect(open.http).await.unwrap();
    let (mut from, mut to) = stream.into_split();
    let length = body.len();
    let sending = async move {
        to.write_all(head("POST", COMPLETIONS, length).as_bytes())
            .await
            .unwrap();
        to.write_all(body.as_bytes()).await.unwrap();
        to.write_all(head("GET", "/livez", 0).as_bytes())
            .await
            .unwrap();
        to
    };
    let reading = async {
        let mut seen = Vec::new();
        loop {
            let count = from.read_buf(&mut seen).await.unwrap();
            let said = String::from_utf8_lossy(&seen).into_owned();
            if count == 0 || said.contains("HTTP/1.1 200") {
                return said;
            }
        }
    };
    let (said, _to) = tokio::join!(reading, sending);
    assert!(said.starts_with("HTTP/1.1 413"), "{said}");
    assert!(said.contains("HTTP/1.1 200"), "{said}");
    for number in [length, 16 * MIB] {
        assert!(said.contains(&number.to_string()), "{number}: {said}");
    }
    open.cluster.wait_released(Duration::from_secs(1)).await;
    open.stop().await;
}

/// The same over gRPC, unary and streaming, beside a stream on the same connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sizes_pass_up_to_the_limit_over_grpc() {
    let open = open().await;
    let client = InferenceClient::new(open.channel())
        .max_decoding_message_size(64 * MIB)
        .max_encoding_message_size(64 * MIB);
    let generate = |text: String, tokens: u32| v1::GenerateRequest {
        prompt: Some(v1::generate_request::Prompt::Text(text)),
        sampling: Some(v1::SamplingParams {
            max_tokens: Some(tokens),
            ignore_eos: Some(true),
            ..v1::SamplingParams::default()
        }),
        ..v1::GenerateRequest::default()
    };
    let tokenize = |text: String| v1::TokenizeRequest {
        input: Some(v1::tokenize_request::Input::Text(text)),
        ..v1::TokenizeRequest::default()
    };
    let beside = generate("a".into(), 3_000);
    let mut neighbour = client.clone().generate(beside).await.unwrap().into_inner();
    let mut seen = Collector::new(1);
    seen.take(neighbour.message().await.unwrap().unwrap());

    for mib in [3.9, 4.0, 4.1, 16.0] {
        let refused = async {
            let mut events = client
                .clone()
                .generate(generate(text(mib), 4))
                .await?
                .into_inner();
            events.message().await
        };
        let status = refused.await.expect_err("too long");
        assert_eq!(status.code(), Code::InvalidArgument, "{mib}: {status}");
        assert_eq!(reason(&status), "CONTEXT_LENGTH_EXCEEDED");
    }
    // Unary calls: much to read, and much to answer.
    for mib in [3.9, 4.0, 4.1, 16.0] {
        let count = text(mib).len() / 13;
        let request = tokenize("<|assistant|>".repeat(count));
        let answer = client.clone().tokenize(request).await.unwrap();
        assert_eq!(answer.into_inner().ids.len(), count + 1, "{mib}");
    }
    let request = v1::DetokenizeRequest {
        ids: vec![ASSISTANT; 5 * MIB / 13],
        ..v1::DetokenizeRequest::default()
    };
    let answer = client.clone().detokenize(request).await.unwrap();
    assert_eq!(answer.into_inner().text.len(), 5 * MIB / 13 * 13);
    let long = "z".repeat(16 * MIB + 1);
    let streaming = client
        .clone()
        .generate(generate(long.clone(), 4))
        .await
        .map(drop);
    let unary = client
        .clone()
        .tokenize(tokenize(long.clone()))
        .await
        .map(drop);
    // Small on the wire.
    let mut packing = client.clone().send_compressed(CompressionEncoding::Gzip);
    let packed = packing.tokenize(tokenize(long)).await.map(drop);
    for (refused, names_size) in [(streaming, true), (unary, true), (packed, false)] {
        let status = refused.expect_err("too large");
        assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
        assert!(status.message().contains("16777216"), "{status}");
        if names_size {
            assert_eq!(reason(&status), "BODY_TOO_LARGE");
            assert!(status.message().contains("167772"), "{status}");
        }
    }
    while let Some(event) = neighbour.message().await.unwrap() {
        seen.take(event);
    }
    assert_eq!(seen.finish().usage.completion_tokens, 3_000);
    open.cluster.wait_released(Duration::from_secs(1)).await;
    open.stop().await;
}

/// An answer over 4 MiB, in one piece over HTTP, is what the pieces over gRPC say.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_of_megabytes_arrive() {
    const CHOICES: u32 = 16;
    const TOKENS: u32 = 250;
    let open = open().await;
    let ids = json!({ "messages": [{ "role": "user", "content": "count" }] });
    let ids = open.http().post("/tokenize", &ids).await.json()["tokens"].clone();
    let mut body = message("count");
    let more = json!({ "n": CHOICES, "max_tokens": TOKENS, "logprobs": true, "top_logprobs": 20,
        "seed": 5, "temperature": 0.9, "ignore_eos": true });
    body.as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    let answer = open.http().post(CHAT, &body).await;
    assert_eq!(answer.status, 200);
    assert!(answer.body.len() > 4 * MIB, "{} bytes", answer.body.len());
    let answer = answer.json();

    let request = v1::GenerateRequest {
        prompt: Some(v1::generate_request::Prompt::TokenIds(v1::TokenIds {
            ids: serde_json::from_value(ids).unwrap(),
        })),
        sampling: Some(v1::SamplingParams {
            n: Some(CHOICES),
            max_tokens: Some(TOKENS),
            logprobs: Some(20),
            seed: Some(5),
            temperature: Some(0.9),
            ignore_eos: Some(true),
            ..v1::SamplingParams::default()
        }),
        ..v1::GenerateRequest::default()
    };
    let mut stream = open.grpc().generate(request).await.unwrap().into_inner();
    let mut seen = Collector::new(CHOICES);
    while let Some(event) = stream.message().await.unwrap() {
        seen.take(event);
    }
    let seen = seen.finish();
    for (index, choice) in answer["choices"].as_array().unwrap().iter().enumerate() {
        assert_eq!(choice["message"]["content"], seen.texts[index].as_str());
        let tokens = choice["logprobs"]["content"].as_array().unwrap();
        assert_eq!(tokens.len(), TOKENS as usize);
        for (token, right) in tokens.iter().zip(&seen.choices[index].logprobs) {
            assert_eq!(token["top_logprobs"].as_array().unwrap().len(), 20);
            assert!((token["logprob"].as_f64().unwrap() as f32 - right).abs() < 1e-5);
        }
    }
    open.cluster.wait_released(Duration::from_secs(1)).await;
    open.stop().await;
}

/// Between router and workers a size up to what the longest prompt needs is no reason to
/// refuse either: such a message is read, and judged by what it says.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_read_messages_of_megabytes() {
    let open = open().await;
    let cluster = &open.cluster.cluster;
    let channel = |address: std::net::SocketAddr| {
        Endpoint::from_shared(format!("http://{address}"))
            .unwrap()
            .connect_lazy()
    };
    let decode = channel(cluster.decode_workers()[0].control_address());
    let prefill = channel(cluster.prefill_workers()[0].control_address());
    let mut decode = DecodeWorkerClient::new(decode).max_encoding_message_size(128 * MIB);
    let mut prefill = PrefillWorkerClient::new(prefill).max_encoding_message_size(128 * MIB);
    let describe = v1::DescribeRequest {
        protocol: Some(protocol::CURRENT.into()),
    };
    let of_decode = decode.describe(describe).await.unwrap().into_inner();
    let of_prefill = prefill.describe(describe).await.unwrap().into_inner();
    let card: Value = serde_json::from_str(&of_decode.model_card_json).unwrap();
    let work = |epoch: u64, mib: f64| v1::WorkRequest {
        protocol: Some(protocol::CURRENT.into()),
        request_id: format!("direct-{mib}"),
        epoch,
        model_revision: card["revision"].as_str().unwrap().to_owned(),
        // Bytes cost next to nothing to pack, where numbers take a debug build seconds.
        cache_salt: vec![7; (mib * MIB as f64) as usize],
        sampling: Some((&SamplingParams::default()).into()),
        ..v1::WorkRequest::default()
    };
    for mib in [3.9, 4.1, 16.1, 60.0] {
        let start = v1::DecodeCommand {
            command: Some(v1::decode_command::Command::Start(v1::DecodeStart {
                work: Some(work(of_decode.epoch, mib)),
                path: v1::decode_start::Path::Local.into(),
                attempt: 1,
            })),
        };
        let status = match decode.decode(futures::stream::iter([start])).await {
            Err(status) => status,
            Ok(events) => events.into_inner().message().await.unwrap_err(),
        };
        assert_eq!(reason(&status), "INVALID_ARGUMENT", "{mib}: {status}");
        let request = v1::PrefillRequest {
            work: Some(work(of_prefill.epoch, mib)),
            lane: Some(v1::Lane::default()),
        };
        let status = match prefill.prefill(request).await {
            Err(status) => status,
            Ok(events) => events.into_inner().message().await.unwrap_err(),
        };
        assert_eq!(reason(&status), "INVALID_ARGUMENT", "{mib}: {status}");
    }
    open.stop().await;
}
