//! The HTTP front door, in the shape of the OpenAI API.
//!
//! It only translates: JSON to the messages of `baton.v1` and back. What a request
//! means, and every check of its values, is the [`Frontend`]'s.
//!
//! ```text
//! wire      the JSON bodies clients send, unknown fields refused by name
//! number    whole numbers of those bodies
//! request   wire -> GenerateRequest
//! answer    events -> one JSON answer
//! stream    events -> server-sent events
//! logprobs  token log-probabilities in both shapes
//! fault     errors -> status and error object
//! page      the live page at `/`
//! ```

mod answer;
mod fault;
mod logprobs;
mod number;
mod page;
mod request;
mod stream;
mod wire;

use std::future::Future;
use std::time::Duration;

use axum::Router as Routes;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, HeaderValue, Method, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use baton_observability::PlainListener;
use baton_observability::tls_listener::{HTTP_ALPN, TlsListener};
use baton_observability::{AdminState, admin};
use baton_proto::{Error, ErrorKind, limits, v1};
use futures::StreamExt as _;
use serde::de::DeserializeOwned;
use serde_json::json;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::frontend::{CallContext, Frontend, GenerateStream};
use crate::view::ClusterView;
use fault::Fault;
use request::Call;

/// A body up to this is parsed where it arrives: well below a millisecond.
const PARSED_AT_ONCE_MAX: usize = 64 << 10;
/// How much of a body over the limit is read before its client is answered.
const DISCARD_BYTES_MAX: usize = 4 * limits::BODY_BYTES_MAX;
/// And for how long.
const DISCARD_TIME: Duration = Duration::from_secs(5);

/// Serves the HTTP front door until `shutdown`, then lets open answers end.
///
/// # Errors
/// [`ErrorKind::Invalid`] for TLS files that cannot be used or an address beyond
/// loopback without API keys; [`ErrorKind::Internal`] if serving breaks.
// Written out, because callers need the future to be `Send` and to borrow nothing.
#[allow(clippy::manual_async_fn)]
pub fn serve(
    frontend: Frontend,
    listener: TcpListener,
    admin: AdminState,
    shutdown: CancellationToken,
) -> impl Future<Output = Result<(), Error>> + Send + 'static {
    async move {
        let internal = |error: std::io::Error| Error::new(ErrorKind::Internal, error.to_string());
        let address = listener.local_addr().map_err(internal)?;
        let config = frontend.config();
        config.check_exposure("http", address)?;
        let tls = config.tls.rustls_server(HTTP_ALPN)?;
        let routes = routes(frontend, admin);
        let stop = shutdown.cancelled_owned();
        match tls {
            None => {
                axum::serve(PlainListener::new(listener), routes)
                    .with_graceful_shutdown(stop)
                    .await
            }
            Some(tls) => {
                let listener = TlsListener::new(listener, tls).map_err(internal)?;
                axum::serve(listener, routes)
                    .with_graceful_shutdown(stop)
                    .await
            }
        }
        .map_err(internal)
    }
}

/// Every path of the front door.
pub fn routes(frontend: Frontend, admin: AdminState) -> Routes {
    Routes::new()
        .route("/", get(page::page))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(completions))
        .route("/v1/models", get(models))
        .route("/cluster", get(cluster))
        .route("/v1/models/{*name}", get(model))
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .fallback(unknown_path)
        .method_not_allowed_fallback(wrong_method)
        .with_state(frontend)
        .merge(admin::routes(admin))
}

async fn unknown_path(uri: Uri) -> Fault {
    let path: String = uri.path().chars().take(100).collect();
    Fault(
        Error::new(ErrorKind::NotFound, format!("no such path `{path}`"))
            .with_reason("unknown_path"),
    )
}

async fn wrong_method(method: Method, uri: Uri) -> Response {
    let path: String = uri.path().chars().take(100).collect();
    let message = format!("`{method}` is not allowed on `{path}`");
    let mut response =
        Fault(Error::invalid("", message).with_reason("method_not_allowed")).into_response();
    *response.status_mut() = axum::http::StatusCode::METHOD_NOT_ALLOWED;
    response
}

async fn chat(
    State(frontend): State<Frontend>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Fault> {
    let call = context(&frontend, &headers)?;
    let chat = read(&frontend, &headers, body, Call::from_chat).await?;
    run(&frontend, chat, call).await
}

async fn completions(
    State(frontend): State<Frontend>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Fault> {
    let call = context(&frontend, &headers)?;
    let completion = read(&frontend, &headers, body, Call::from_completion).await?;
    run(&frontend, completion, call).await
}

/// Starts every prompt of a call before anything is answered: one that is refused
/// refuses the whole, and dropping the others cancels them.
async fn run(frontend: &Frontend, call: Call, context: CallContext) -> Result<Response, Fault> {
    let mut streams: Vec<GenerateStream> = Vec::with_capacity(call.requests.len());
    let model = call.requests[0].model.clone();
    for request in call.requests {
        streams.push(frontend.generate(request, context.clone()).await?);
    }
    let request_id = streams
        .first()
        .map(|stream| stream.request_id().to_string());
    let tokenizer = frontend.tokenizer(&model)?;
    let shape = call.shape;
    let mut response = if shape.stream {
        stream::respond(streams, shape, tokenizer)
    } else {
        answer::collect(streams, &shape, &tokenizer).await?
    };
    if let Some(id) = request_id.and_then(|id| HeaderValue::from_str(&id).ok()) {
        response.headers_mut().insert("x-request-id", id);
    }
    Ok(response)
}

async fn models(State(frontend): State<Frontend>, headers: HeaderMap) -> Result<Response, Fault> {
    context(&frontend, &headers)?;
    let data: Vec<_> = frontend.models().iter().map(model_object).collect();
    Ok(axum::Json(json!({ "object": "list", "data": data })).into_response())
}

async fn model(
    State(frontend): State<Frontend>,
    Path(name): Path<String>,
    headers: HeaderMap,
) -> Result<Response, Fault> {
    context(&frontend, &headers)?;
    let models = frontend.models();
    let found = models.iter().find(|model| model.name == name);
    let found = found.ok_or_else(|| {
        let shown: String = name.chars().take(100).collect();
        let message = format!("no model `{shown}` is served");
        Error::new(ErrorKind::NotFound, message)
            .with_reason("MODEL_NOT_FOUND")
            .with_field("model")
    })?;
    Ok(axum::Json(model_object(found)).into_response())
}

fn model_object(model: &v1::Model) -> serde_json::Value {
    json!({
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "baton",
        "revision": model.revision,
        "architecture": model.architecture,
        "max_model_len": model.context_max,
        "prefill_workers": model.prefill_workers,
        "decode_workers": model.decode_workers,
        "has_chat_template": model.has_chat_template,
    })
}

async fn cluster(State(frontend): State<Frontend>, headers: HeaderMap) -> Result<Response, Fault> {
    context(&frontend, &headers)?;
    Ok(axum::Json(ClusterView::of(&frontend)).into_response())
}

async fn tokenize(
    State(frontend): State<Frontend>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Fault> {
    context(&frontend, &headers)?;
    let asked = read(&frontend, &headers, body, request::tokenize).await?;
    let answer = frontend.tokenize(asked).await?;
    Ok(axum::Json(json!({
        "tokens": answer.ids,
        "count": answer.ids.len(),
        "max_model_len": answer.context_max,
    }))
    .into_response())
}

async fn detokenize(
    State(frontend): State<Frontend>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Fault> {
    context(&frontend, &headers)?;
    let translate = |body: wire::Detokenize| {
        Ok(v1::DetokenizeRequest {
            model: body.model.unwrap_or_default(),
            ids: body.tokens,
        })
    };
    let asked = read(&frontend, &headers, body, translate).await?;
    let answer = frontend.detokenize(asked).await?;
    Ok(axum::Json(json!({ "prompt": answer.text })).into_response())
}

/// Who is calling, and under which id.
fn context(frontend: &Frontend, headers: &HeaderMap) -> Result<CallContext, Fault> {
    let bearer = headers
        .get(header::AUTHORIZATION)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.strip_prefix("Bearer "));
    let mut call = CallContext::new(frontend.authenticate(bearer)?);
    if let Some(id) = headers.get("x-request-id") {
        call.request_id = String::from_utf8_lossy(id.as_bytes()).into_owned();
    }
    Ok(call)
}

/// Reads on without keeping anything, for a while. A connection closed under a client
/// that still sends is reset, and the refusal on its way to the client lost with it.
async fn discard(mut frames: axum::body::BodyDataStream, mut seen: usize) {
    let reading = async {
        while let Some(Ok(frame)) = frames.next().await {
            seen += frame.len();
            if seen > DISCARD_BYTES_MAX {
                return;
            }
        }
    };
    drop(tokio::time::timeout(DISCARD_TIME, reading).await);
}

/// The body as JSON, translated; what is wrong is named by its path.
async fn read<T, R>(
    frontend: &Frontend,
    headers: &HeaderMap,
    body: Body,
    translate: fn(T) -> Result<R, Error>,
) -> Result<R, Fault>
where
    T: DeserializeOwned + 'static,
    R: Send + 'static,
{
    let too_large = |length: Option<u64>| {
        let size = length.map_or_else(String::new, |length| format!(" of {length} bytes"));
        let limit = limits::BODY_BYTES_MAX;
        let message = format!("the body{size} is over the limit of {limit} bytes");
        Fault(Error::new(ErrorKind::TooLarge, message).with_reason("body_too_large"))
    };
    let announced = headers
        .get(header::CONTENT_LENGTH)
        .and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    if announced.is_some_and(|length| length > limits::BODY_BYTES_MAX as u64) {
        // Who asks first has sent nothing, and is not made to.
        if !headers.contains_key(header::EXPECT) {
            discard(body.into_data_stream(), 0).await;
        }
        return Err(too_large(announced));
    }
    let mut bytes = Vec::new();
    let mut frames = body.into_data_stream();
    while let Some(frame) = frames.next().await {
        let frame = frame.map_err(|error| {
            Error::invalid("", format!("the body broke off: {error}")).with_reason("invalid_body")
        })?;
        if bytes.len() + frame.len() > limits::BODY_BYTES_MAX {
            discard(frames, bytes.len() + frame.len()).await;
            return Err(too_large(None));
        }
        bytes.extend_from_slice(&frame);
    }
    let length = bytes.len();
    let parse = move || translate(parse(&bytes)?);
    if length <= PARSED_AT_ONCE_MAX {
        return Ok(parse()?);
    }
    Ok(frontend.giants().work(length, parse).await??)
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Error> {
    let mut parser = serde_json::Deserializer::from_slice(bytes);
    let value: T = serde_path_to_error::deserialize(&mut parser).map_err(|error| {
        let path = error.path().to_string();
        let field = if path == "." { String::new() } else { path };
        let mut message = error.into_inner().to_string();
        if let Some(allowed) = number::allowed(&field) {
            message.push_str(&format!(" (allowed: {allowed})"));
        }
        Error::invalid(field, message).with_reason("invalid_json")
    })?;
    parser.end().map_err(|error| {
        Error::invalid("", format!("after the JSON object: {error}")).with_reason("invalid_json")
    })?;
    Ok(value)
}
