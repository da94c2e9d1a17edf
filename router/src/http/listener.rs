//! TCP with TLS for the HTTP front door.
//!
//! Handshakes run beside the accepting loop, so that a client which never finishes
//! one holds up nobody.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use baton_proto::Error;
use baton_proto::transport::TlsSettings;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// Time for a whole handshake.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);
/// Handshakes at a time; further connections wait in the kernel's queue.
const HANDSHAKES_MAX: usize = 256;

/// The rustls side of a port's settings; `None` when TLS is off.
///
/// # Errors
/// [`baton_proto::ErrorKind::Invalid`] naming the setting and the file.
pub(crate) fn tls_config(tls: &TlsSettings) -> Result<Option<Arc<ServerConfig>>, Error> {
    // Checks which settings go together.
    if tls.server()?.is_none() {
        return Ok(None);
    }
    let (Some(certificate), Some(key)) = (&tls.certificate, &tls.key) else {
        return Ok(None);
    };
    let chain = certificates("tls.certificate", certificate)?;
    let key =
        PrivateKeyDer::from_pem_file(key).map_err(|error| unusable("tls.key", key, &error))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::invalid("tls", error.to_string()))?;
    let builder = match &tls.authority {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let mut roots = RootCertStore::empty();
            for authority in certificates("tls.authority", path)? {
                roots
                    .add(authority)
                    .map_err(|error| unusable("tls.authority", path, &error))?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                .build()
                .map_err(|error| unusable("tls.authority", path, &error))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let mut config = builder
        .with_single_cert(chain, key)
        .map_err(|error| unusable("tls.certificate", certificate, &error))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Some(Arc::new(config)))
}

fn certificates(field: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
    CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect)
        .map_err(|error| unusable(field, path, &error))
}

fn unusable(field: &str, path: &Path, error: &dyn std::fmt::Display) -> Error {
    Error::invalid(field, format!("cannot use `{}`: {error}", path.display()))
}

/// Yields connections whose handshake is done.
pub(crate) struct TlsListener {
    ready: mpsc::Receiver<(TlsStream<TcpStream>, SocketAddr)>,
    address: SocketAddr,
    accepting: JoinHandle<()>,
}

impl TlsListener {
    pub(crate) fn new(
        listener: TcpListener,
        config: Arc<ServerConfig>,
        address: SocketAddr,
    ) -> Self {
        let (tx, ready) = mpsc::channel(HANDSHAKES_MAX);
        Self {
            ready,
            address,
            accepting: tokio::spawn(accept(listener, TlsAcceptor::from(config), tx)),
        }
    }
}

impl Drop for TlsListener {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl axum::serve::Listener for TlsListener {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        match self.ready.recv().await {
            Some(connection) => connection,
            // The accepting task only ends with this listener.
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        Ok(self.address)
    }
}

async fn accept(
    listener: TcpListener,
    acceptor: TlsAcceptor,
    ready: mpsc::Sender<(TlsStream<TcpStream>, SocketAddr)>,
) {
    let slots = Arc::new(Semaphore::new(HANDSHAKES_MAX));
    let mut handshakes = tokio::task::JoinSet::new();
    loop {
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else {
            return;
        };
        while handshakes.try_join_next().is_some() {}
        let (stream, peer) = match listener.accept().await {
            Ok(connection) => connection,
            Err(error) => {
                // Out of descriptors, most likely: give others time to close theirs.
                tracing::warn!(%error, "accept");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let (acceptor, ready) = (acceptor.clone(), ready.clone());
        handshakes.spawn(async move {
            let _slot = slot;
            drop(stream.set_nodelay(true));
            let shaken = tokio::time::timeout(HANDSHAKE_MAX, acceptor.accept(stream)).await;
            match shaken {
                Ok(Ok(stream)) => drop(ready.send((stream, peer)).await),
                Ok(Err(error)) => tracing::debug!(%peer, %error, "tls handshake failed"),
                Err(_) => tracing::debug!(%peer, "tls handshake timed out"),
            }
        });
    }
}
