//! An HTTP client that hides nothing: one connection a request, the status and the
//! headers as they came, and event streams read by a strict parser.
//!
//! A dropped [`EventStream`] closes its socket, as a client that goes away does.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, BodyDataStream};
use futures::StreamExt as _;
use http::{HeaderMap, Method, Request, Response, header};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;

/// The longest silence of a server that a test bears.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// Where requests go and what each carries.
#[derive(Clone)]
pub struct Http {
    address: SocketAddr,
    headers: Vec<(String, String)>,
    tls: Option<Arc<rustls::ClientConfig>>,
}

/// A whole answer.
#[derive(Clone, Debug)]
pub struct Reply {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Vec<u8>,
}

impl Reply {
    /// The body as JSON, which its content type must announce.
    ///
    /// # Panics
    /// If it is something else.
    pub fn json(&self) -> Value {
        let text = String::from_utf8_lossy(&self.body);
        assert_eq!(
            self.headers[header::CONTENT_TYPE],
            "application/json",
            "{text}"
        );
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    /// The error object of an answer with this status.
    ///
    /// # Panics
    /// If the answer is not an error of the public shape.
    pub fn error(&self, status: u16) -> Value {
        let text = String::from_utf8_lossy(&self.body);
        assert_eq!(self.status, status, "{text}");
        let body = self.json();
        let error = &body["error"];
        for field in ["message", "type", "code"] {
            let value = error[field].as_str().unwrap_or_default();
            assert!(!value.is_empty(), "`{field}` in {text}");
        }
        assert!(
            error["param"].is_null() || error["param"].is_string(),
            "{text}"
        );
        error.clone()
    }
}

/// A connection's task, ended with its owner.
struct Connection(JoinHandle<()>);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Http {
    /// A client of this address.
    pub fn new(address: SocketAddr) -> Self {
        Self {
            address,
            headers: Vec::new(),
            tls: None,
        }
    }

    /// Adds a header to every request.
    #[must_use]
    pub fn with_header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Speaks TLS, to `localhost`.
    #[must_use]
    pub fn with_tls(mut self, config: Arc<rustls::ClientConfig>) -> Self {
        self.tls = Some(config);
        self
    }

    /// GET.
    pub async fn get(&self, path: &str) -> Reply {
        self.whole(Method::GET, path, Vec::new()).await
    }

    /// POST of JSON.
    pub async fn post(&self, path: &str, body: &Value) -> Reply {
        self.post_bytes(path, body.to_string().into_bytes()).await
    }

    /// POST of whatever this is.
    pub async fn post_bytes(&self, path: &str, body: Vec<u8>) -> Reply {
        self.whole(Method::POST, path, body).await
    }

    /// POST of JSON that is answered by events.
    ///
    /// # Panics
    /// If the answer is no event stream, or one that a proxy would buffer.
    pub async fn stream(&self, path: &str, body: &Value) -> EventStream {
        let (response, connection) = self
            .send(Method::POST, path, body.to_string().into_bytes())
            .await
            .expect("an answer");
        if response.status() != 200 {
            let reply = read(response).await;
            panic!("{}: {}", reply.status, String::from_utf8_lossy(&reply.body));
        }
        let headers = response.headers().clone();
        assert_eq!(headers[header::CONTENT_TYPE], "text/event-stream");
        assert_eq!(headers[header::CACHE_CONTROL], "no-cache");
        assert_eq!(headers["x-accel-buffering"], "no");
        EventStream {
            headers,
            data: response.into_body().into_data_stream(),
            buffer: Vec::new(),
            done: false,
            _connection: connection,
        }
    }

    /// Sends a request and goes away without reading the answer, after `after`.
    pub async fn abandon(&self, path: &str, body: &Value, after: Duration) {
        let sending = self.send(Method::POST, path, body.to_string().into_bytes());
        // A timeout drops the connection's task and with it the socket.
        let answered = tokio::time::timeout(after, async {
            let (response, _connection) = sending.await?;
            read(response).await;
            Ok::<_, hyper::Error>(())
        });
        drop(answered.await);
    }

    async fn whole(&self, method: Method, path: &str, body: Vec<u8>) -> Reply {
        let answer = async {
            let (response, _connection) = self.send(method, path, body).await.expect("an answer");
            read(response).await
        };
        tokio::time::timeout(SILENCE_MAX * 2, answer)
            .await
            .unwrap_or_else(|_| panic!("no whole answer to `{path}`"))
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
    ) -> Result<(Response<Body>, Connection), hyper::Error> {
        let stream = TcpStream::connect(self.address).await.expect("connect");
        stream.set_nodelay(true).expect("a TCP socket");
        let mut request = Request::builder()
            .method(&method)
            .uri(path)
            .header(header::HOST, self.address.to_string());
        if method == Method::POST {
            request = request.header(header::CONTENT_TYPE, "application/json");
        }
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        let request = request.body(Body::from(body)).expect("a request");
        match &self.tls {
            None => exchange(TokioIo::new(stream), request).await,
            Some(config) => {
                let name = ServerName::try_from("localhost").expect("a host name");
                let stream = TlsConnector::from(Arc::clone(config))
                    .connect(name, stream)
                    .await
                    .expect("TLS handshake");
                exchange(TokioIo::new(stream), request).await
            }
        }
    }
}

async fn exchange(
    io: impl hyper::rt::Read + hyper::rt::Write + Unpin + Send + 'static,
    request: Request<Body>,
) -> Result<(Response<Body>, Connection), hyper::Error> {
    let (mut sender, connection) = hyper::client::conn::http1::handshake(io).await?;
    let connection = Connection(tokio::spawn(async move { drop(connection.await) }));
    let response = sender.send_request(request).await?;
    Ok((response.map(Body::new), connection))
}

async fn read(response: Response<Body>) -> Reply {
    let (head, body) = response.into_parts();
    let body = axum::body::to_bytes(body, 64 << 20)
        .await
        .expect("a whole body");
    Reply {
        status: head.status.as_u16(),
        headers: head.headers,
        body: body.to_vec(),
    }
}

/// One event of a stream.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    Json(Value),
    Done,
}

/// Server-sent events as they arrive.
///
/// Stricter than the grammar asks for: an event is one `data: ` line with one JSON
/// object or `[DONE]`, then one empty line; other fields are not allowed.
pub struct EventStream {
    pub headers: HeaderMap,
    data: BodyDataStream,
    buffer: Vec<u8>,
    done: bool,
    _connection: Connection,
}

impl EventStream {
    /// The next event; `None` once the server closed the stream.
    ///
    /// # Panics
    /// If the framing is wrong, the server falls silent or the connection breaks.
    pub async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(end) = self.buffer.windows(2).position(|two| two == b"\n\n") {
                let event: Vec<u8> = self.buffer.drain(..end + 2).collect();
                let text = std::str::from_utf8(&event[..end]).expect("UTF-8");
                if text.starts_with(':') {
                    assert!(!text.contains('\n'), "{text:?}");
                    continue;
                }
                assert!(!self.done, "an event after [DONE]: {text:?}");
                let data = text
                    .strip_prefix("data: ")
                    .unwrap_or_else(|| panic!("not one data field: {text:?}"));
                assert!(!data.contains(['\n', '\r']), "several lines: {text:?}");
                if data == "[DONE]" {
                    self.done = true;
                    return Some(Event::Done);
                }
                let value: Value =
                    serde_json::from_str(data).unwrap_or_else(|error| panic!("{error}: {data:?}"));
                assert!(value.is_object(), "{data:?}");
                return Some(Event::Json(value));
            }
            let frame = tokio::time::timeout(SILENCE_MAX, self.data.next())
                .await
                .expect("the stream went silent");
            match frame {
                Some(bytes) => self.buffer.extend(bytes.expect("an unbroken stream")),
                None => {
                    assert!(self.buffer.is_empty(), "half an event at the end");
                    return None;
                }
            }
        }
    }

    /// Reads to the end.
    ///
    /// # Panics
    /// As [`EventStream::next`].
    pub async fn collect(mut self) -> Vec<Event> {
        let mut events = Vec::new();
        while let Some(event) = self.next().await {
            events.push(event);
        }
        events
    }
}

/// A streamed answer put together and checked against the rules of the public API.
#[derive(Clone, Debug, Default)]
pub struct Streamed {
    pub id: String,
    pub model: String,
    /// Per choice, its deltas with text in order.
    pub deltas: Vec<Vec<String>>,
    pub finishes: Vec<Option<String>>,
    /// Per choice, what `logprobs` said, chunk by chunk.
    pub logprobs: Vec<Vec<Value>>,
    pub usage: Option<Value>,
}

impl Streamed {
    /// Puts a stream together.
    ///
    /// # Panics
    /// If a rule is broken: one id, time and model; the role first; the finish
    /// reason a key of every choice, set once, in a chunk without text and with
    /// nothing after it; usage only when asked for, last and without choices;
    /// then `[DONE]` and the end.
    pub fn read(events: &[Event], chat: bool, choices: usize, include_usage: bool) -> Self {
        let mut streamed = Self {
            deltas: vec![Vec::new(); choices],
            finishes: vec![None; choices],
            logprobs: vec![Vec::new(); choices],
            ..Self::default()
        };
        let mut roles = vec![false; choices];
        let mut created = None;
        let (last, chunks) = events.split_last().expect("events");
        assert_eq!(*last, Event::Done, "the last event");
        for event in chunks {
            let Event::Json(chunk) = event else {
                panic!("[DONE] twice")
            };
            let object = if chat {
                "chat.completion.chunk"
            } else {
                "text_completion"
            };
            assert_eq!(chunk["object"], object, "{chunk}");
            let id = chunk["id"].as_str().expect("an id");
            if streamed.id.is_empty() {
                streamed.id = id.to_owned();
                streamed.model = chunk["model"].as_str().expect("a model").to_owned();
                created = chunk["created"].as_u64();
                assert!(created.is_some(), "{chunk}");
            }
            assert_eq!(streamed.id, id);
            assert_eq!(chunk["model"], streamed.model.as_str());
            assert_eq!(chunk["created"].as_u64(), created);
            assert!(streamed.usage.is_none(), "a chunk after usage: {chunk}");
            let list = chunk["choices"].as_array().expect("choices");
            match chunk.get("usage") {
                None => assert!(!include_usage, "no usage key: {chunk}"),
                Some(usage) => {
                    assert!(include_usage, "usage was not asked for: {chunk}");
                    if !usage.is_null() {
                        assert!(list.is_empty(), "{chunk}");
                        streamed.usage = Some(usage.clone());
                    }
                }
            }
            if streamed.usage.is_none() {
                assert!(!list.is_empty(), "{chunk}");
            }
            for choice in list {
                streamed.take(choice, chat, &mut roles);
            }
        }
        assert_eq!(streamed.usage.is_some(), include_usage, "usage");
        assert!(
            streamed.finishes.iter().all(Option::is_some),
            "a choice without an end: {:?}",
            streamed.finishes
        );
        streamed
    }

    fn take(&mut self, choice: &Value, chat: bool, roles: &mut [bool]) {
        let index = usize::try_from(choice["index"].as_u64().expect("an index")).expect("small");
        assert!(
            self.finishes[index].is_none(),
            "after the end of its choice: {choice}"
        );
        let text = if chat {
            let delta = choice["delta"].as_object().expect("a delta");
            match delta.get("role") {
                Some(role) => {
                    assert!(!roles[index], "the role twice: {choice}");
                    assert_eq!(role, "assistant");
                    roles[index] = true;
                }
                None => assert!(roles[index], "a delta before the role: {choice}"),
            }
            delta
                .get("content")
                .and_then(Value::as_str)
                .unwrap_or_default()
        } else {
            choice["text"].as_str().expect("text")
        };
        let finish = choice
            .get("finish_reason")
            .expect("the key is always there");
        if let Some(reason) = finish.as_str() {
            assert_eq!(text, "", "text in the last chunk: {choice}");
            self.finishes[index] = Some(reason.to_owned());
        } else {
            assert!(finish.is_null(), "{choice}");
        }
        if !text.is_empty() {
            self.deltas[index].push(text.to_owned());
        }
        if !choice["logprobs"].is_null() {
            self.logprobs[index].push(choice["logprobs"].clone());
        }
    }

    /// A choice's text.
    pub fn text(&self, choice: usize) -> String {
        self.deltas[choice].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn chunk(delta: &Value, finish: Option<&str>) -> Value {
        json!({
            "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 5, "model": "test",
            "choices": [{ "index": 0, "delta": delta, "logprobs": null, "finish_reason": finish }],
        })
    }

    /// Role, text, end.
    fn good() -> Vec<Value> {
        vec![
            chunk(&json!({ "role": "assistant", "content": "" }), None),
            chunk(&json!({ "content": "hi" }), None),
            chunk(&json!({}), Some("stop")),
        ]
    }

    fn breaks_a_rule(chunks: Vec<Value>, done: bool) -> bool {
        let mut events: Vec<Event> = chunks.into_iter().map(Event::Json).collect();
        if done {
            events.push(Event::Done);
        }
        std::panic::catch_unwind(|| Streamed::read(&events, true, 1, false)).is_err()
    }

    #[test]
    fn every_broken_rule_is_found() {
        assert!(!breaks_a_rule(good(), true));
        assert!(breaks_a_rule(good(), false), "no [DONE]");
        assert!(breaks_a_rule(good()[1..].to_vec(), true), "no role");
        assert!(breaks_a_rule(good()[..2].to_vec(), true), "no end");

        let mut mixed = good();
        mixed[2]["choices"][0]["delta"] = json!({ "content": "!" });
        assert!(breaks_a_rule(mixed, true), "text in the last chunk");

        let mut late = good();
        late.push(chunk(&json!({ "content": "!" }), None));
        assert!(breaks_a_rule(late, true), "text after the end");

        let mut keyless = good();
        let choice = keyless[1]["choices"][0].as_object_mut();
        choice.expect("an object").remove("finish_reason");
        assert!(breaks_a_rule(keyless, true), "no finish_reason key");

        let mut unasked = good();
        unasked.push(json!({
            "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 5, "model": "test",
            "choices": [], "usage": { "total_tokens": 3 },
        }));
        assert!(breaks_a_rule(unasked, true), "usage unasked");

        let mut other_id = good();
        other_id[1]["id"] = json!("chatcmpl-2");
        assert!(breaks_a_rule(other_id, true), "two ids");
    }
}
