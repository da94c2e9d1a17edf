//! Relays that put TLS on a connection, take it off, or damage a byte of it.
//!
//! Sender, relay that takes TLS off, fault proxy, relay that puts it on again, port:
//! so the proxy's faults happen to frames inside TLS.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustls::{ClientConfig, ServerConfig};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, split};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// What data ports and senders call their protocol.
pub const ALPN: &[u8] = b"baton-kv";

/// A relay on a port of its own, served by a thread of its own: tests block theirs.
pub struct Tunnel {
    pub address: SocketAddr,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Tunnel {
    /// TLS comes in, plain bytes go out.
    pub fn terminate(config: &ServerConfig, upstream: SocketAddr) -> Self {
        let mut config = config.clone();
        config.alpn_protocols = vec![ALPN.to_vec()];
        let acceptor = TlsAcceptor::from(Arc::new(config));
        Self::start(move |stream| {
            let acceptor = acceptor.clone();
            async move {
                let inside = acceptor.accept(stream).await?;
                relay(inside, connect(upstream).await?).await
            }
        })
    }

    /// Plain bytes come in, TLS goes out.
    pub fn originate(config: &ClientConfig, upstream: SocketAddr) -> Self {
        let mut config = config.clone();
        config.alpn_protocols = vec![ALPN.to_vec()];
        let connector = TlsConnector::from(Arc::new(config));
        Self::start(move |stream| {
            let connector = connector.clone();
            async move {
                let name = upstream.ip().into();
                let outside = connector.connect(name, connect(upstream).await?).await?;
                relay(stream, outside).await
            }
        })
    }

    /// Bytes pass as they are, except that one bit of byte `damaged` of all that come
    /// in is wrong.
    pub fn damaging(damaged: u64, upstream: SocketAddr) -> Self {
        let passed = Arc::new(AtomicU64::new(0));
        Self::start(move |stream| {
            let passed = Arc::clone(&passed);
            async move {
                let outside = connect(upstream).await?;
                let ((mut near, mut near_out), (mut far, mut far_out)) =
                    (stream.into_split(), outside.into_split());
                let forth = async {
                    let mut bytes = [0; 4096];
                    loop {
                        let got = near.read(&mut bytes).await?;
                        if got == 0 {
                            return Ok(());
                        }
                        let from = passed.fetch_add(got as u64, Ordering::Relaxed);
                        if (from..from + got as u64).contains(&damaged) {
                            bytes[(damaged - from) as usize] ^= 0x10;
                        }
                        far_out.write_all(&bytes[..got]).await?;
                    }
                };
                tokio::select! {
                    done = forth => done,
                    done = tokio::io::copy(&mut far, &mut near_out) => done.map(drop),
                }
            }
        })
    }

    fn start<F>(serve: impl Fn(TcpStream) -> F + Send + 'static) -> Self
    where
        F: Future<Output = std::io::Result<()>> + Send + 'static,
    {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, mut stopped) = tokio::sync::oneshot::channel();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async {
                let listener = TcpListener::from_std(listener).unwrap();
                loop {
                    tokio::select! {
                        _ = &mut stopped => return,
                        accepted = listener.accept() => {
                            let (stream, _) = accepted.unwrap();
                            stream.set_nodelay(true).unwrap();
                            // Whatever ends a connection ends it at both ends.
                            tokio::spawn(serve(stream));
                        }
                    }
                }
            });
        });
        Self {
            address,
            stop: Some(stop),
            thread: Some(thread),
        }
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

async fn connect(upstream: SocketAddr) -> std::io::Result<TcpStream> {
    let stream = TcpStream::connect(upstream).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Copies in both directions until one of them ends.
async fn relay(
    near: impl AsyncRead + AsyncWrite,
    far: impl AsyncRead + AsyncWrite,
) -> std::io::Result<()> {
    let ((mut near, mut near_out), (mut far, mut far_out)) = (split(near), split(far));
    tokio::select! {
        done = tokio::io::copy(&mut near, &mut far_out) => {
            done?;
            far_out.shutdown().await
        }
        done = tokio::io::copy(&mut far, &mut near_out) => {
            done?;
            near_out.shutdown().await
        }
    }
}
