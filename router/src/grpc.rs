//! The gRPC front door: `baton.v1.Inference`, health and reflection.
//!
//! It reads metadata (`authorization`, `x-request-id`, `grpc-timeout`) and turns
//! errors into statuses. tonic enforces a deadline only until a handler answers,
//! so the stream's deadline is the request's own, enforced by its driver.

use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use baton_observability::Readiness;
use baton_proto::status::to_status;
use baton_proto::v1::inference_server::{Inference, InferenceServer};
use baton_proto::{Error, ErrorKind, FILE_DESCRIPTOR_SET, limits, transport, v1};
use futures::{Stream, StreamExt as _};
use tokio::net::TcpListener;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::metadata::MetadataMap;
use tonic::service::Routes;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::frontend::{CallContext, Frontend};
use crate::shell::Router;

/// How old the health service's answer may be.
const HEALTH_INTERVAL: Duration = Duration::from_millis(200);
/// What streams get to close after the last request was ended.
const CLOSE_TIME: Duration = Duration::from_secs(1);

struct Door {
    frontend: Frontend,
}

fn call_context(frontend: &Frontend, metadata: &MetadataMap) -> Result<CallContext, Error> {
    let received = Instant::now();
    let text = |name: &str| metadata.get(name).and_then(|value| value.to_str().ok());
    let bearer = text("authorization").and_then(|value| {
        let (scheme, token) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then_some(token)
    });
    let deadline = match text("grpc-timeout") {
        None => None,
        Some(given) => {
            let timeout = parse_timeout(given).ok_or_else(|| {
                let message = format!("`{given}` is not up to 8 digits and one of H M S m u n");
                Error::invalid("grpc-timeout", message)
            })?;
            Some(received + timeout)
        }
    };
    Ok(CallContext {
        tenant: frontend.authenticate(bearer)?,
        request_id: text("x-request-id").unwrap_or_default().to_owned(),
        deadline,
        received,
    })
}

/// The value of `grpc-timeout`: at most eight digits and a unit.
fn parse_timeout(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let value: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(value * 3600),
        "M" => Duration::from_secs(value * 60),
        "S" => Duration::from_secs(value),
        "m" => Duration::from_millis(value),
        "u" => Duration::from_micros(value),
        "n" => Duration::from_nanos(value),
        _ => return None,
    })
}

/// Says by itself what tonic would say in other words and without details.
///
/// A deadline: tonic's timer, which a handler that still reads its request can lose to,
/// ends the call as `CANCELLED`. Both timers start with the call, this one first, and tonic
/// looks at its own last. A message over the limit: tonic calls that `OUT_OF_RANGE`.
#[derive(Clone)]
struct OurWords<S>(S);

/// tonic's refusal of a message by its size as one of ours.
fn too_large(response: http::Response<tonic::body::Body>) -> http::Response<tonic::body::Body> {
    match Status::from_header_map(response.headers()) {
        // No handler of this door answers so.
        Some(status) if status.code() == tonic::Code::OutOfRange => {
            let error = Error::new(ErrorKind::TooLarge, status.message());
            to_status(&error.with_reason("BODY_TOO_LARGE")).into_http()
        }
        _ => response,
    }
}

impl<S, B> tower::Service<http::Request<B>> for OurWords<S>
where
    S: tower::Service<http::Request<B>, Response = http::Response<tonic::body::Body>>,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        let given = request.headers().get("grpc-timeout");
        let timeout = given.and_then(|value| parse_timeout(value.to_str().ok()?));
        let due = timeout.map(tokio::time::sleep);
        let answer = self.0.call(request);
        Box::pin(async move {
            let Some(due) = due else {
                return answer.await.map(too_large);
            };
            tokio::select! {
                biased;
                answered = answer => answered.map(too_large),
                () = due => {
                    let message = "the request's deadline passed before it was read";
                    Ok(to_status(&Error::new(ErrorKind::Deadline, message)).into_http())
                }
            }
        })
    }
}

type EventStream = Pin<Box<dyn Stream<Item = Result<v1::GenerateEvent, Status>> + Send>>;

#[tonic::async_trait]
impl Inference for Door {
    type GenerateStream = EventStream;

    async fn generate(
        &self,
        request: Request<v1::GenerateRequest>,
    ) -> Result<Response<EventStream>, Status> {
        let call = call_context(&self.frontend, request.metadata()).map_err(|e| to_status(&e))?;
        let frontend = self.frontend.clone();
        let request = request.into_inner();
        // Answered at once: a status in the trailers carries a refusal as well, and
        // tonic's own timer does not cut in.
        let events = async_stream::try_stream! {
            let mut stream = frontend
                .generate(request, call)
                .await
                .map_err(|error| to_status(&error))?;
            while let Some(event) = stream.next().await {
                yield event.map_err(|error| to_status(&error))?;
            }
        };
        Ok(Response::new(Box::pin(events)))
    }

    async fn list_models(
        &self,
        request: Request<v1::ListModelsRequest>,
    ) -> Result<Response<v1::ListModelsResponse>, Status> {
        call_context(&self.frontend, request.metadata()).map_err(|e| to_status(&e))?;
        let models = self.frontend.models();
        Ok(Response::new(v1::ListModelsResponse { models }))
    }

    async fn tokenize(
        &self,
        request: Request<v1::TokenizeRequest>,
    ) -> Result<Response<v1::TokenizeResponse>, Status> {
        call_context(&self.frontend, request.metadata()).map_err(|e| to_status(&e))?;
        let response = self.frontend.tokenize(request.into_inner()).await;
        response.map(Response::new).map_err(|e| to_status(&e))
    }

    async fn detokenize(
        &self,
        request: Request<v1::DetokenizeRequest>,
    ) -> Result<Response<v1::DetokenizeResponse>, Status> {
        call_context(&self.frontend, request.metadata()).map_err(|e| to_status(&e))?;
        let response = self.frontend.detokenize(request.into_inner()).await;
        response.map(Response::new).map_err(|e| to_status(&e))
    }
}

/// What the health service knows; the first is the server as a whole.
const HEALTH_OF: [&str; 2] = ["", "baton.v1.Inference"];

/// Keeps the health service in step with readiness until the door closes. Never returns.
async fn report_health(frontend: Frontend, reporter: HealthReporter, close: CancellationToken) {
    let mut timer = tokio::time::interval(HEALTH_INTERVAL);
    while close.run_until_cancelled(timer.tick()).await.is_some() {
        let status = match frontend.readiness() {
            Readiness::Ready => ServingStatus::Serving,
            Readiness::NotReady(_) => ServingStatus::NotServing,
        };
        for service in HEALTH_OF {
            reporter.set_service_status(service, status).await;
        }
    }
    // Ends the calls that watch, for which the door would wait.
    let mut reporter = reporter;
    for service in HEALTH_OF {
        reporter.clear_service_status(service).await;
    }
    std::future::pending().await
}

fn routes(frontend: &Frontend) -> Result<(Routes, HealthReporter), Error> {
    let internal = |error: tonic_reflection::server::Error| {
        Error::new(ErrorKind::Internal, format!("build reflection: {error}"))
    };
    let descriptors = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let (reporter, health) = tonic_health::server::health_reporter();
    let inference = InferenceServer::new(Door {
        frontend: frontend.clone(),
    })
    .max_decoding_message_size(limits::BODY_BYTES_MAX)
    .max_encoding_message_size(limits::INTERNAL_MESSAGE_BYTES_MAX)
    .accept_compressed(tonic::codec::CompressionEncoding::Gzip);
    let routes = Routes::new(inference)
        .add_service(health)
        .add_service(descriptors().build_v1().map_err(internal)?)
        .add_service(descriptors().build_v1alpha().map_err(internal)?);
    Ok((routes, reporter))
}

impl Router {
    /// Serves the gRPC front door on `listener` until `shutdown`. Running streams
    /// then get [`crate::RouterConfig::drain_ms`], and are ended with `UNAVAILABLE`; until
    /// they have ended, whoever comes is refused with `DRAINING`.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] for TLS files that cannot be used, or when an address
    /// beyond loopback has no API keys; [`ErrorKind::Internal`] if serving breaks.
    pub async fn serve_grpc(
        &self,
        listener: TcpListener,
        shutdown: CancellationToken,
    ) -> Result<(), Error> {
        let frontend = self.frontend();
        let config = frontend.config();
        let address: SocketAddr = listener
            .local_addr()
            .map_err(|error| Error::new(ErrorKind::Internal, error.to_string()))?;
        config.check_exposure("grpc", address)?;
        let (routes, reporter) = routes(&frontend)?;
        let close = CancellationToken::new();
        let server = transport::server(&config.tls)?
            .layer(tower::layer::layer_fn(OurWords))
            .add_routes(routes)
            .serve_with_incoming_shutdown(
                TcpIncoming::from(listener).with_nodelay(Some(true)),
                close.clone().cancelled_owned(),
            );
        let overdue = async {
            shutdown.cancelled().await;
            // A client that reads slowly has until then as well.
            let over = self.drain() + CLOSE_TIME;
            drop(tokio::time::timeout_at(over, self.see_out()).await);
            close.cancel();
            tokio::time::sleep_until(over).await;
        };
        tracing::info!(%address, "gRPC front door open");
        tokio::select! {
            served = server => served.map_err(|error| {
                Error::new(ErrorKind::Internal, format!("serve gRPC on `{address}`: {error}"))
            }),
            () = overdue => Ok(()),
            () = report_health(frontend.clone(), reporter, close.clone()) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_read_as_the_protocol_writes_them() {
        assert_eq!(parse_timeout("200m"), Some(Duration::from_millis(200)));
        assert_eq!(parse_timeout("0n"), Some(Duration::ZERO));
        assert_eq!(
            parse_timeout("99999999H"),
            Some(Duration::from_secs(359_999_996_400))
        );
        for wrong in ["", "m", "5", "123456789m", "-1m", "1.5S", "1\u{e9}"] {
            assert_eq!(parse_timeout(wrong), None, "{wrong}");
        }
    }
}
