//! Any server with `/v1/completions`: one HTTP/1.1 connection a request, answers as
//! server-sent events. Plain HTTP only.

use std::future::poll_fn;
use std::pin::Pin;

use anyhow::{Context as _, bail};
use bytes::Bytes;
use http::{Request, StatusCode, Uri, header};
use hyper::body::{Body as _, Incoming};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::net::TcpStream;

use super::super::answers::Answer;
use super::super::flags::TargetArgs;
use super::super::sample::{Arrival, Clock, Failure, Sample};
use super::super::workload::Job;
use super::OnArrival;
use super::sse;

/// What is read of an answer that is no stream.
const BODY_BYTES_MAX: usize = 4 << 20;
/// How much of an answer in no known shape is shown.
const ANSWER_CHARS_SHOWN: usize = 300;

pub struct Client {
    host: String,
    port: u16,
    /// What stands before `/v1`, without a slash at its end.
    prefix: String,
    bearer: Option<String>,
    overlay: serde_json::Map<String, Value>,
}

/// The parts of a stream's chunk that are looked at.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Chunk {
    choices: Vec<Choice>,
    usage: Option<Usage>,
    error: Option<Value>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Choice {
    text: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Usage {
    completion_tokens: u32,
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct PromptDetails {
    cached_tokens: Option<u32>,
}

impl Client {
    /// Asks the server for its models and picks one.
    ///
    /// # Errors
    /// A URL that cannot be used, a server that does not answer, or no model.
    pub async fn connect(args: &TargetArgs) -> anyhow::Result<(Self, String)> {
        let client = Self::parse(args)?;
        if let Some(name) = &args.model_name {
            return Ok((client, name.clone()));
        }
        let (status, body) = client
            .get("/v1/models")
            .await
            .with_context(|| format!("`--url {}`: no server answers there", args.url))?;
        let name = serde_json::from_slice::<Value>(&body)
            .ok()
            .and_then(|list| Some(list["data"][0]["id"].as_str()?.to_owned()));
        match name {
            Some(name) if status.is_success() => Ok((client, name)),
            _ => bail!(
                "`--url {}`: `/v1/models` answered {status} and names no model; give `--model-name`",
                args.url
            ),
        }
    }

    fn parse(args: &TargetArgs) -> anyhow::Result<Self> {
        let url = &args.url;
        let uri: Uri = url
            .parse()
            .with_context(|| format!("`--url {url}`: no URL"))?;
        if uri.scheme_str() != Some("http") {
            bail!("`--url {url}`: only http:// is driven");
        }
        let host = uri
            .host()
            .with_context(|| format!("`--url {url}`: names no host"))?;
        let overlay = match &args.body {
            None => serde_json::Map::new(),
            Some(text) => serde_json::from_str(text)
                .with_context(|| format!("`--body {text}`: no JSON object"))?,
        };
        Ok(Self {
            host: host.to_owned(),
            port: uri.port_u16().unwrap_or(80),
            prefix: uri.path().trim_end_matches('/').to_owned(),
            bearer: args.api_key.as_ref().map(|key| format!("Bearer {key}")),
            overlay,
        })
    }

    fn body(&self, model: &str, job: &Job) -> String {
        let mut body = json!({
            "model": model,
            "prompt": job.prompt,
            "max_tokens": job.output_tokens,
            "temperature": job.drawn.map_or(0.0, |drawn| drawn.temperature),
            "ignore_eos": true,
            "stream": true,
            "stream_options": { "include_usage": true },
        });
        if let Value::Object(body) = &mut body {
            if let Some(drawn) = job.drawn {
                body.insert("seed".to_owned(), drawn.seed.into());
            }
            for (key, value) in &self.overlay {
                if value.is_null() {
                    body.remove(key);
                } else {
                    body.insert(key.clone(), value.clone());
                }
            }
        }
        body.to_string()
    }

    fn request(&self, method: &str, path: &str, body: String) -> anyhow::Result<Request<String>> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.prefix))
            .header(header::HOST, format!("{}:{}", self.host, self.port))
            .header(header::CONTENT_TYPE, "application/json");
        if let Some(bearer) = &self.bearer {
            request = request.header(header::AUTHORIZATION, bearer);
        }
        request.body(body).context("build the request")
    }

    /// Sends over a connection of its own, which lives as long as the answer's body.
    async fn send(&self, request: Request<String>) -> anyhow::Result<http::Response<Incoming>> {
        // An IPv6 address stands in brackets in a URL.
        let host = self.host.trim_start_matches('[').trim_end_matches(']');
        let stream = TcpStream::connect((host, self.port))
            .await
            .with_context(|| format!("connect to {}:{}", self.host, self.port))?;
        stream.set_nodelay(true)?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .context("start HTTP")?;
        // Ends by itself once sender and body are gone; what breaks it shows in the body.
        tokio::spawn(async move { drop(connection.await) });
        sender.send_request(request).await.context("send")
    }

    async fn get(&self, path: &str) -> anyhow::Result<(StatusCode, Vec<u8>)> {
        let response = self.send(self.request("GET", path, String::new())?).await?;
        let status = response.status();
        Ok((status, read_all(response.into_body()).await?))
    }

    /// Sends one request and follows its events.
    ///
    /// # Errors
    /// The server's refusal, or how the stream broke.
    pub async fn follow(
        &self,
        model: &str,
        job: &Job,
        clock: Clock,
        sample: &mut Sample,
        on_arrival: OnArrival<'_>,
    ) -> Result<(), Failure> {
        let connection = |error: anyhow::Error| Failure::new("CONNECTION", format!("{error:#}"));
        let request = self
            .request("POST", "/v1/completions", self.body(model, job))
            .map_err(connection)?;
        sample.sent = clock.now();
        let response = self.send(request).await.map_err(connection)?;
        let status = response.status();
        let mut body = response.into_body();
        if !status.is_success() {
            let answer = read_all(body).await.unwrap_or_default();
            return Err(refusal(status, &answer));
        }
        let mut events = sse::Events::default();
        let mut end = None;
        while end.is_none() {
            let Some(bytes) = next_bytes(&mut body).await.map_err(connection)? else {
                break;
            };
            let at = clock.now();
            let mut take = |data: &[u8]| {
                if end.is_none() {
                    end = read_event(data, at, sample, on_arrival);
                }
            };
            events
                .push(&bytes, &mut take)
                .map_err(|error| Failure::new("CONNECTION", error.to_string()))?;
        }
        end.unwrap_or_else(|| Err(Failure::new("CUT", "the stream ended before `[DONE]`")))
    }
}

/// The failure that an error object tells of, under its own name where it has one.
fn told(error: &Value, unnamed: &str) -> Failure {
    let text = |key: &str| error[key].as_str();
    Failure::new(
        text("code").or_else(|| text("type")).unwrap_or(unnamed),
        text("message").map_or_else(|| error.to_string(), str::to_owned),
    )
}

/// An answer that is no stream.
fn refusal(status: StatusCode, answer: &[u8]) -> Failure {
    let unnamed = format!("HTTP_{}", status.as_u16());
    match serde_json::from_slice::<Value>(answer) {
        Ok(body) if body["error"].is_object() => told(&body["error"], &unnamed),
        _ => Failure::new(
            unnamed,
            String::from_utf8_lossy(answer)
                .chars()
                .take(ANSWER_CHARS_SHOWN)
                .collect::<String>(),
        ),
    }
}

/// Takes one event's data; `Some` when it ends the stream.
fn read_event(
    data: &[u8],
    at: std::time::Duration,
    sample: &mut Sample,
    on_arrival: OnArrival<'_>,
) -> Option<Result<(), Failure>> {
    if data == b"[DONE]" {
        return Some(Ok(()));
    }
    let chunk: Chunk = match serde_json::from_slice(data) {
        Ok(chunk) => chunk,
        Err(error) => return Some(Err(Failure::new("BAD_EVENT", error.to_string()))),
    };
    if let Some(error) = chunk.error {
        return Some(Err(told(&error, "STREAM_ERROR")));
    }
    // The last event of a choice may carry its reason and no text.
    let texts = chunk
        .choices
        .iter()
        .filter_map(|choice| choice.text.as_deref());
    let text: String = texts.collect();
    if !text.is_empty() {
        match &mut sample.answer {
            Answer::Text(received) => received.push_str(&text),
            nothing => *nothing = Answer::Text(text),
        }
        let arrival = Arrival { at, tokens: 1 };
        sample.arrivals.push(arrival);
        on_arrival(arrival);
    }
    if let Some(usage) = chunk.usage {
        sample.reported_tokens = Some(usage.completion_tokens);
        sample.cached_tokens = usage
            .prompt_tokens_details
            .and_then(|details| details.cached_tokens)
            .unwrap_or(0);
    }
    None
}

async fn next_bytes(body: &mut Incoming) -> anyhow::Result<Option<Bytes>> {
    loop {
        let frame = poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx)).await;
        match frame.transpose().context("read the answer")? {
            None => return Ok(None),
            // Trailers carry nothing of ours.
            Some(frame) => {
                if let Ok(bytes) = frame.into_data() {
                    return Ok(Some(bytes));
                }
            }
        }
    }
}

async fn read_all(mut body: Incoming) -> anyhow::Result<Vec<u8>> {
    let mut all = Vec::new();
    while let Some(bytes) = next_bytes(&mut body).await? {
        if all.len() + bytes.len() > BODY_BYTES_MAX {
            bail!("the answer is longer than {BODY_BYTES_MAX} bytes");
        }
        all.extend_from_slice(&bytes);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn read(data: &str, sample: &mut Sample) -> Option<Result<(), Failure>> {
        read_event(
            data.as_bytes(),
            Duration::from_millis(5),
            sample,
            &mut |_| {},
        )
    }

    #[test]
    fn only_events_with_text_count_and_the_servers_count_is_kept() {
        let mut sample = Sample::default();
        for data in [
            r#"{"choices":[{"text":"a","finish_reason":null}],"usage":null}"#,
            r#"{"choices":[{"text":"","finish_reason":"length"}]}"#,
            r#"{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":16}}}"#,
        ] {
            assert_eq!(read(data, &mut sample), None, "{data}");
        }
        assert_eq!(sample.arrivals.len(), 1);
        assert_eq!(sample.reported_tokens, Some(2));
        assert_eq!(sample.cached_tokens, 16);
        assert_eq!(read("[DONE]", &mut sample), Some(Ok(())));
    }

    #[test]
    fn an_error_event_fails_the_request_under_its_own_name() {
        let mut sample = Sample::default();
        let data =
            r#"{"error":{"message":"no room","type":"rate_limit_error","code":"OVERLOADED"}}"#;
        let expect = Failure::new("OVERLOADED", "no room");
        assert_eq!(read(data, &mut sample), Some(Err(expect)));
        let reason = |data: &str| {
            read(data, &mut Sample::default())
                .unwrap()
                .unwrap_err()
                .reason
        };
        assert_eq!(
            reason(r#"{"error":{"code":500,"type":"server_error"}}"#),
            "server_error"
        );
        assert_eq!(reason(r#"{"error":"odd"}"#), "STREAM_ERROR");
        assert_eq!(reason("{"), "BAD_EVENT");
    }

    #[test]
    fn a_refusal_is_named_by_the_server_or_else_by_its_status() {
        let refused = |answer: &str| refusal(StatusCode::SERVICE_UNAVAILABLE, answer.as_bytes());
        let told = refused(r#"{"error":{"message":"no room","code":"OVERLOADED"}}"#);
        assert_eq!(told, Failure::new("OVERLOADED", "no room"));
        let plain = refused("<html>");
        assert_eq!(plain, Failure::new("HTTP_503", "<html>"));
    }
}
