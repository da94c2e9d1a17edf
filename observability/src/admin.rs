//! The HTTP endpoint of a process: `/livez`, `/readyz`, `/metrics`.
//!
//! Liveness says that the process answers, nothing more, so that an overloaded or
//! partitioned process is not killed for it. Readiness says whether new work is
//! welcome. A router mounts [`routes`] on its front door; a worker serves them on
//! a port of their own with [`serve`].

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prometheus_client::registry::Registry;
use rustls::ServerConfig;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::exposition::{CONTENT_TYPE, metrics_text_merged};
use crate::listener::PlainListener;
use crate::tls_listener::TlsListener;

/// Whether new work is welcome.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Readiness {
    Ready,
    /// Why not, for people: `starting`, `draining`, `no decode worker`.
    NotReady(String),
}

impl Readiness {
    /// Not ready, for `reason`.
    pub fn not_ready(reason: impl Into<String>) -> Self {
        Self::NotReady(reason.into())
    }
}

/// What the endpoint serves. Cheap to clone.
#[derive(Clone)]
pub struct AdminState {
    registries: Arc<[Arc<Registry>]>,
    readiness: Arc<dyn Fn() -> Readiness + Send + Sync>,
    before_scrape: Arc<dyn Fn() + Send + Sync>,
    detail: Arc<dyn Fn() -> Option<String> + Send + Sync>,
    alive: Arc<dyn Fn() -> bool + Send + Sync>,
}

impl AdminState {
    /// Serves one registry; `readiness` is asked at each probe and must not block.
    pub fn new(
        registry: Arc<Registry>,
        readiness: impl Fn() -> Readiness + Send + Sync + 'static,
    ) -> Self {
        Self {
            registries: Arc::new([registry]),
            readiness: Arc::new(readiness),
            before_scrape: Arc::new(|| {}),
            detail: Arc::new(|| None),
            alive: Arc::new(|| true),
        }
    }

    /// Serves one registry and the latest value of a watch channel.
    pub fn watching(registry: Arc<Registry>, readiness: watch::Receiver<Readiness>) -> Self {
        Self::new(registry, move || readiness.borrow().clone())
    }

    /// Serves several registries as one (a process with several roles).
    pub fn with_registries(mut self, registries: Vec<Arc<Registry>>) -> Self {
        self.registries = registries.into();
        self
    }

    /// Called before each scrape, to refresh gauges that are read from elsewhere. Must not block.
    pub fn before_scrape(mut self, refresh: impl Fn() + Send + Sync + 'static) -> Self {
        self.before_scrape = Arc::new(refresh);
        self
    }

    /// Asked at each probe for a line that people should read beside the readiness.
    /// Must not block.
    pub fn with_detail(
        mut self,
        detail: impl Fn() -> Option<String> + Send + Sync + 'static,
    ) -> Self {
        self.detail = Arc::new(detail);
        self
    }

    /// Asked at each liveness probe: false where starting the process again would help.
    /// Must not block.
    pub fn alive_while(mut self, alive: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        self.alive = Arc::new(alive);
        self
    }

    /// Whether new work is welcome now.
    pub fn readiness(&self) -> Readiness {
        (self.readiness)()
    }

    /// What `/metrics` answers now.
    pub fn metrics_text(&self) -> String {
        (self.before_scrape)();
        let registries: Vec<&Registry> = self.registries.iter().map(Arc::as_ref).collect();
        metrics_text_merged(&registries)
    }
}

/// The three routes, to be served alone or merged into another router.
pub fn routes(state: AdminState) -> Router {
    Router::new()
        .route("/livez", get(live))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .with_state(state)
}

async fn live(State(state): State<AdminState>) -> Response {
    if (state.alive)() {
        return "ok\n".into_response();
    }
    let reason = "the engine does not move\n";
    (StatusCode::SERVICE_UNAVAILABLE, reason).into_response()
}

async fn ready(State(state): State<AdminState>) -> Response {
    let detail = (state.detail)();
    let detail = detail.map(|line| format!("{line}\n")).unwrap_or_default();
    match state.readiness() {
        Readiness::Ready => format!("ready\n{detail}").into_response(),
        Readiness::NotReady(reason) => (
            StatusCode::SERVICE_UNAVAILABLE,
            format!("not ready: {reason}\n{detail}"),
        )
            .into_response(),
    }
}

async fn metrics(State(state): State<AdminState>) -> Response {
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], state.metrics_text()).into_response()
}

/// Serves the routes, over TLS if `tls` is set, until `shutdown` is cancelled and open
/// answers are sent.
///
/// # Errors
/// Whatever the listener reports; a failed connection is not an error.
///
/// *Cancel safety*: dropping the future closes the port at once.
pub async fn serve(
    listener: TcpListener,
    tls: Option<Arc<ServerConfig>>,
    state: AdminState,
    shutdown: CancellationToken,
) -> std::io::Result<()> {
    let (routes, stop) = (routes(state), shutdown.cancelled_owned());
    match tls {
        None => {
            axum::serve(PlainListener::new(listener), routes)
                .with_graceful_shutdown(stop)
                .await
        }
        Some(tls) => {
            axum::serve(TlsListener::new(listener, tls)?, routes)
                .with_graceful_shutdown(stop)
                .await
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::WorkerMetrics;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    async fn ask(address: std::net::SocketAddr, path: &str) -> String {
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    #[tokio::test]
    async fn answers_probes_and_scrapes_and_stops_when_told() {
        let mut registry = Registry::default();
        let metrics = WorkerMetrics::new(&mut registry);
        let (tx, rx) = watch::channel(Readiness::not_ready("starting"));
        let running = metrics.requests_running.clone();
        let state = AdminState::watching(Arc::new(registry), rx).before_scrape(move || {
            running.set(3);
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shutdown = CancellationToken::new();
        let server = tokio::spawn(serve(listener, None, state, shutdown.clone()));

        assert!(ask(address, "/livez").await.starts_with("HTTP/1.1 200"));
        let answer = ask(address, "/readyz").await;
        assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("not ready: starting"));
        tx.send(Readiness::Ready).unwrap();
        assert!(ask(address, "/readyz").await.starts_with("HTTP/1.1 200"));
        let answer = ask(address, "/metrics").await;
        assert!(answer.contains("content-type: application/openmetrics-text; version=1.0.0"));
        assert!(answer.contains("vllm:num_requests_running 3"));
        assert!(ask(address, "/nothing").await.starts_with("HTTP/1.1 404"));

        shutdown.cancel();
        server.await.unwrap().unwrap();
    }
}
