//! Accepting for the HTTP ports of a process.
//!
//! A process that has no descriptor left cannot accept, and cannot say so to whoever waits. It
//! looks again soon: axum's own listeners wait a whole second after every failure, so that a
//! crowd which has gone again would be worked off at one connection a second.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};

/// Time for others to close their connections.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// TCP without TLS, as axum wants a listener; small answers leave at once.
pub struct PlainListener(TcpListener);

impl PlainListener {
    /// Accepts from `listener`.
    pub fn new(listener: TcpListener) -> Self {
        Self(listener)
    }
}

impl axum::serve::Listener for PlainListener {
    type Io = TcpStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        accept(&self.0).await
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.0.local_addr()
    }
}

/// The next connection, however long the system cannot give one. Cancel safe.
pub(crate) async fn accept(listener: &TcpListener) -> (TcpStream, SocketAddr) {
    let mut told = false;
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                drop(stream.set_nodelay(true));
                return (stream, peer);
            }
            Err(error) => {
                if !std::mem::replace(&mut told, true) {
                    tracing::warn!(%error, "no connection can be accepted");
                }
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        }
    }
}
