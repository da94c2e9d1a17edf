//! TCP with TLS for the HTTP ports of a process, as axum wants a listener.
//!
//! Handshakes run beside the accepting loop, so that a client which never finishes
//! one holds up nobody. What a port trusts and shows is decided by whoever made the
//! rustls configuration.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::listener;

/// The protocols an HTTP port offers by ALPN, the preferred one first.
pub const HTTP_ALPN: &[&[u8]] = &[b"h2", b"http/1.1"];

/// Time for a whole handshake.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);
/// Handshakes at a time; further connections wait in the kernel's queue.
const HANDSHAKES_MAX: usize = 256;

/// Yields connections whose handshake is done.
pub struct TlsListener {
    ready: mpsc::Receiver<(TlsStream<TcpStream>, SocketAddr)>,
    address: SocketAddr,
    accepting: JoinHandle<()>,
}

impl TlsListener {
    /// Starts accepting from `listener`. Must be called inside a runtime.
    ///
    /// # Errors
    /// What the system says when asked for the listener's address.
    pub fn new(listener: TcpListener, config: Arc<ServerConfig>) -> io::Result<Self> {
        let address = listener.local_addr()?;
        let (tx, ready) = mpsc::channel(HANDSHAKES_MAX);
        Ok(Self {
            ready,
            address,
            accepting: tokio::spawn(accept(listener, TlsAcceptor::from(config), tx)),
        })
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
        let (stream, peer) = listener::accept(&listener).await;
        let (acceptor, ready) = (acceptor.clone(), ready.clone());
        handshakes.spawn(async move {
            let _slot = slot;
            let shaken = tokio::time::timeout(HANDSHAKE_MAX, acceptor.accept(stream)).await;
            match shaken {
                Ok(Ok(stream)) => drop(ready.send((stream, peer)).await),
                Ok(Err(error)) => tracing::debug!(%peer, %error, "tls handshake failed"),
                Err(_) => tracing::debug!(%peer, "tls handshake timed out"),
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_certificates::Authority;
    use crate::{AdminState, Readiness, Registry, WorkerMetrics, admin};
    use rustls::ClientConfig;
    use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
    use tokio_rustls::TlsConnector;
    use tokio_util::sync::CancellationToken;

    struct Port {
        address: SocketAddr,
        stop: CancellationToken,
        server: JoinHandle<io::Result<()>>,
    }

    impl Port {
        async fn open(tls: Arc<ServerConfig>) -> Self {
            let mut registry = Registry::default();
            WorkerMetrics::new(&mut registry).requests_running.set(3);
            let state = AdminState::new(Arc::new(registry), || Readiness::Ready);
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let stop = CancellationToken::new();
            let serving = admin::serve(listener, Some(tls), state, stop.clone());
            Self {
                address,
                stop,
                server: tokio::spawn(serving),
            }
        }

        async fn ask(&self, client: &Arc<ClientConfig>) -> io::Result<String> {
            let stream = TcpStream::connect(self.address).await?;
            let name = "localhost".try_into().unwrap();
            let connector = TlsConnector::from(Arc::clone(client));
            scrape(connector.connect(name, stream).await?).await
        }

        async fn close(self) {
            self.stop.cancel();
            self.server.await.unwrap().unwrap();
        }
    }

    async fn scrape(mut stream: impl AsyncRead + AsyncWrite + Unpin) -> io::Result<String> {
        let request = b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
        stream.write_all(request).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        Ok(answer)
    }

    #[tokio::test]
    async fn scrapes_go_over_tls_to_those_who_trust_the_authority_alone() {
        let (authority, stranger) = (Authority::new(), Authority::new());
        let identity = authority.sign("localhost");
        let port = Port::open(Authority::server(&identity, None)).await;
        // One that never finishes its handshake holds up nobody.
        let _silent = TcpStream::connect(port.address).await.unwrap();

        let answer = port.ask(&authority.client(None)).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert!(answer.contains("vllm:num_requests_running 3"));
        assert!(port.ask(&stranger.client(None)).await.is_err());
        let plain = scrape(TcpStream::connect(port.address).await.unwrap()).await;
        assert!(!plain.is_ok_and(|answer| answer.contains("HTTP")));
        port.close().await;
    }

    #[tokio::test]
    async fn an_authority_makes_client_certificates_mandatory() {
        let (authority, stranger) = (Authority::new(), Authority::new());
        let identity = authority.sign("localhost");
        let port = Port::open(Authority::server(&identity, Some(&authority))).await;

        let scraper = authority.sign("scraper");
        let answer = port.ask(&authority.client(Some(&scraper))).await.unwrap();
        assert!(answer.contains("vllm:num_requests_running 3"), "{answer}");
        assert!(port.ask(&authority.client(None)).await.is_err());
        let forged = stranger.sign("scraper");
        assert!(port.ask(&authority.client(Some(&forged))).await.is_err());
        port.close().await;
    }
}
