//! How gRPC servers and clients of the cluster are set up, so that every port has
//! the same windows, limits and TLS settings.
//!
//! Default HTTP/2 windows make bulk streams nearly nine times slower, and default
//! message limits (4 MiB) refuse long prompts; both are set here. What the TLS settings
//! mean, also for ports that speak no gRPC, is in [`tls`].

pub mod tls;

use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::service::RoutesBuilder;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Endpoint, Server};

use crate::error::{Error, ErrorKind};
use crate::worker_info::WorkerState;
pub use tls::TlsSettings;

const STREAM_WINDOW_BYTES: u32 = 8 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;
/// A router holds one connection to a worker and puts every request on it; the
/// default of 200 would leave the rest waiting without a word.
const STREAMS_PER_CONNECTION_MAX: u32 = 4096;
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(2);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(3);

/// A gRPC server with the cluster's windows and the given TLS.
///
/// # Errors
/// As [`TlsSettings::server`], or a certificate that cannot be parsed.
pub fn server(tls: &TlsSettings) -> Result<Server, Error> {
    let server = Server::builder()
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(1 << 20)
        .tcp_nodelay(true)
        .max_concurrent_streams(STREAMS_PER_CONNECTION_MAX)
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT));
    match tls.server()? {
        Some(config) => server
            .tls_config(config)
            .map_err(|error| Error::invalid("tls", format!("cannot use certificate: {error}"))),
        None => Ok(server),
    }
}

/// Serves `services` with reflection and `grpc.health.v1` until `shutdown`, then lets
/// open calls end.
///
/// `names` are the services whose health follows `state`; so does the server's own
/// (the empty name).
///
/// # Errors
/// As [`server`], or what the listener reports.
///
/// *Cancel safety*: dropping the future closes the port and every call at once.
pub async fn serve(
    listener: TcpListener,
    tls: &TlsSettings,
    services: RoutesBuilder,
    names: &'static [&'static str],
    mut state: watch::Receiver<WorkerState>,
    shutdown: CancellationToken,
) -> Result<(), Error> {
    let internal =
        |error: &dyn std::fmt::Display| Error::new(ErrorKind::Internal, error.to_string());
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(crate::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let (reporter, health) = tonic_health::server::health_reporter();
    let mut services = services;
    services.add_service(health);
    services.add_service(reflection().build_v1().map_err(|error| internal(&error))?);
    services.add_service(
        reflection()
            .build_v1alpha()
            .map_err(|error| internal(&error))?,
    );

    let closing = shutdown.clone();
    let follow_state = async move {
        let mut reporter = reporter;
        loop {
            let status = if *state.borrow_and_update() == WorkerState::Ready {
                tonic_health::ServingStatus::Serving
            } else {
                tonic_health::ServingStatus::NotServing
            };
            for name in names.iter().copied().chain([""]) {
                reporter.set_service_status(name, status).await;
            }
            tokio::select! {
                changed = state.changed() => if changed.is_err() { break },
                () = closing.cancelled() => break,
            }
        }
        closing.cancelled().await;
        // Ends the calls that watch, for which the server would wait.
        for name in names.iter().copied().chain([""]) {
            reporter.clear_service_status(name).await;
        }
        std::future::pending().await
    };
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    let serving = server(tls)?
        .add_routes(services.routes())
        .serve_with_incoming_shutdown(incoming, shutdown.cancelled_owned());
    tokio::select! {
        served = serving => served.map_err(|error| internal(&error)),
        () = follow_state => Ok(()),
    }
}

/// A lazily connecting channel to `address` (`host:port`).
///
/// # Errors
/// [`ErrorKind::Invalid`] for an address or certificate that cannot be parsed. An
/// unreachable peer shows at the first call, within the connect timeout of 1 s.
pub fn channel(address: &str, tls: &TlsSettings) -> Result<Channel, Error> {
    let scheme = if tls.is_enabled() { "https" } else { "http" };
    let endpoint = Endpoint::from_shared(format!("{scheme}://{address}"))
        .map_err(|error| Error::invalid("address", format!("`{address}`: {error}")))?
        .connect_timeout(Duration::from_secs(1))
        .tcp_nodelay(true)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT)
        .keep_alive_while_idle(true);
    let endpoint = match tls.client()? {
        Some(config) => endpoint
            .tls_config(config)
            .map_err(|error| Error::invalid("tls", format!("cannot use certificate: {error}")))?,
        None => endpoint,
    };
    Ok(endpoint.connect_lazy())
}

/// Binds a port and says where it is bound, with the real port where 0 was asked for.
///
/// # Errors
/// [`ErrorKind::Invalid`] naming `field` and the address.
pub async fn listen(field: &str, address: SocketAddr) -> Result<(TcpListener, SocketAddr), Error> {
    let refused = |error| bind_error(field, &address.to_string(), &error);
    let listener = TcpListener::bind(address).await.map_err(refused)?;
    let bound = listener.local_addr().map_err(refused)?;
    Ok((listener, bound))
}

/// The kind of a failure to bind a port, as an error of ours.
pub fn bind_error(field: &str, address: &str, error: &std::io::Error) -> Error {
    Error::new(
        ErrorKind::Invalid,
        format!("cannot listen on `{address}`: {error}"),
    )
    .with_field(field)
}
