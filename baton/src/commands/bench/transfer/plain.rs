//! The most that a transfer over TCP could reach: parts gathered by `writev` and scattered
//! by `readv`, with no frame, digest, guard or answer but one byte at the end.

use std::io::{IoSlice, IoSliceMut, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use super::apart;
use super::arena::Arena;

/// Pieces one call takes (`UIO_MAXIOV`).
const PIECES_MAX: usize = 1024;

/// Two ends of one connection over the loopback interface.
pub struct Pair {
    near: TcpStream,
    far: TcpStream,
}

impl Pair {
    pub fn connect() -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").context("listen on loopback")?;
        let near = TcpStream::connect(listener.local_addr()?).context("connect on loopback")?;
        let (far, _) = listener.accept().context("accept on loopback")?;
        near.set_nodelay(true)?;
        far.set_nodelay(true)?;
        Ok(Self { near, far })
    }

    /// Moves every part.
    pub fn all(&mut self, from: &Arena, to: &mut Arena) -> anyhow::Result<()> {
        self.parts(from.parts(), to.parts_mut())
    }

    /// Moves the first part; from the write to the reader's answer. The reader waits
    /// already, as a lane does.
    pub fn one_part(&mut self, from: &Arena, to: &mut Arena) -> anyhow::Result<Duration> {
        let Self { near, far } = self;
        let (from, to) = (from.first_part(), to.first_part_mut());
        let ready = Barrier::new(2);
        std::thread::scope(|scope| {
            let reading = scope.spawn(|| {
                let apart = apart::far_end();
                ready.wait();
                apart?;
                far.read_exact(to)?;
                far.write_all(&[1])
            });
            ready.wait();
            // Long enough for the reader to be inside its read.
            std::thread::sleep(Duration::from_micros(200));
            let started = Instant::now();
            near.write_all(from).context("write")?;
            near.read_exact(&mut [0]).context("wait for the answer")?;
            let took = started.elapsed();
            let read = reading.join();
            ensure!(read.is_ok(), "the reading thread panicked");
            read.map_or(Ok(()), |read| read.context("read"))?;
            Ok(took)
        })
    }

    fn parts(&mut self, from: Vec<&[u8]>, to: Vec<&mut [u8]>) -> anyhow::Result<()> {
        let Self { near, far } = self;
        std::thread::scope(|scope| {
            let reading = scope.spawn(move || {
                apart::far_end()?;
                let mut buffers: Vec<IoSliceMut<'_>> =
                    to.into_iter().map(IoSliceMut::new).collect();
                let mut rest = &mut buffers[..];
                while !rest.is_empty() {
                    let pieces = rest.len().min(PIECES_MAX);
                    let got = far.read_vectored(&mut rest[..pieces])?;
                    if got == 0 {
                        return Err(std::io::ErrorKind::UnexpectedEof.into());
                    }
                    IoSliceMut::advance_slices(&mut rest, got);
                }
                far.write_all(&[1])
            });
            let mut slices: Vec<IoSlice<'_>> = from.into_iter().map(IoSlice::new).collect();
            let mut rest = &mut slices[..];
            while !rest.is_empty() {
                let pieces = rest.len().min(PIECES_MAX);
                let sent = near.write_vectored(&rest[..pieces]).context("writev")?;
                IoSlice::advance_slices(&mut rest, sent);
            }
            near.read_exact(&mut [0])
                .context("wait for the last byte")?;
            let read = reading.join();
            ensure!(read.is_ok(), "the reading thread panicked");
            read.map_or(Ok(()), |read| read.context("readv"))
        })
    }
}
