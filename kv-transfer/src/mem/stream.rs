//! Bytes on their way between two ends in memory.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::link::{Direction, Link, Moment};
use crate::codec::{HEADER_BYTES, Header};
use crate::wake::lock;

struct Piece {
    at: Instant,
    bytes: Vec<u8>,
    taken: usize,
}

/// How a pipe ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// After everything that is under way.
    Closed,
    Reset,
}

/// One direction of one connection.
#[derive(Default)]
pub(super) struct Pipe {
    under_way: VecDeque<Piece>,
    /// Bytes under way or held.
    bytes: usize,
    /// The writer's frame that is not whole yet.
    frame: Vec<u8>,
    /// Frames that arrive after so many others.
    late: Vec<(u32, Vec<u8>)>,
    /// Bytes that a fault holds back; `None` if none does.
    held: Option<Vec<Vec<u8>>>,
    /// When the link has taken everything before.
    free_at: Option<Instant>,
    arrives_at: Option<Instant>,
    end: Option<End>,
    /// Nobody reads any more.
    unread: bool,
    /// What is written goes nowhere, and the writer is not told.
    lost: bool,
}

impl Pipe {
    /// Queues bytes that keep the link busy for `busy` and fly for `flight`.
    pub(super) fn queue(&mut self, bytes: Vec<u8>, now: Instant, busy: Duration, flight: Duration) {
        if self.end.is_some() || self.unread || self.lost {
            return;
        }
        self.bytes += bytes.len();
        if let Some(held) = &mut self.held {
            held.push(bytes);
            return;
        }
        let free_at = self.free_at.map_or(now, |at| at.max(now)) + busy;
        let at = self
            .arrives_at
            .map_or(free_at + flight, |at| at.max(free_at + flight));
        self.free_at = Some(free_at);
        self.arrives_at = Some(at);
        self.under_way.push_back(Piece {
            at,
            bytes,
            taken: 0,
        });
    }

    pub(super) fn hold(&mut self) {
        self.held.get_or_insert_default();
    }

    pub(super) fn is_held(&self) -> bool {
        self.held.is_some() && self.end.is_none() && !self.unread
    }

    /// What was held back, to be queued anew.
    pub(super) fn release(&mut self) -> Vec<Vec<u8>> {
        let pieces = self.held.take().unwrap_or_default();
        self.bytes -= pieces.iter().map(Vec::len).sum::<usize>();
        pieces
    }

    pub(super) fn keep_for(&mut self, frames: u32, bytes: Vec<u8>) {
        // The frame itself counts as well.
        self.late.push((frames, bytes));
    }

    /// One more frame: which of those kept are due behind it.
    pub(super) fn take_due(&mut self) -> Vec<Vec<u8>> {
        self.late.iter_mut().for_each(|(after, _)| *after -= 1);
        let due = self.late.extract_if(.., |(after, _)| *after == 0);
        due.map(|(_, bytes)| bytes).collect()
    }

    pub(super) fn lose(&mut self) {
        self.under_way.clear();
        self.held = None;
        self.bytes = 0;
        self.lost = true;
    }

    /// The connection ends behind what is under way.
    pub(super) fn end(&mut self) {
        if self.lost {
            return;
        }
        self.end.get_or_insert(End::Closed);
    }

    /// The connection ends now.
    pub(super) fn reset(&mut self) {
        self.under_way.clear();
        self.held = None;
        self.bytes = 0;
        self.end = Some(End::Reset);
    }

    /// When the first bytes under way arrive.
    pub(super) fn arrival(&self) -> Option<Instant> {
        self.under_way.front().map(|piece| piece.at)
    }
}

/// One end of a connection in memory.
pub(crate) struct MemStream {
    link: Link,
    input: Arc<Mutex<Pipe>>,
    output: Arc<Mutex<Pipe>>,
    /// Which way this end writes.
    direction: Direction,
}

impl MemStream {
    pub(super) fn pair(
        link: Link,
        forth: Arc<Mutex<Pipe>>,
        back: Arc<Mutex<Pipe>>,
    ) -> (Self, Self) {
        let sender = Self {
            link: link.clone(),
            input: Arc::clone(&back),
            output: Arc::clone(&forth),
            direction: Direction::Forth,
        };
        let receiver = Self {
            link,
            input: forth,
            output: back,
            direction: Direction::Back,
        };
        (sender, receiver)
    }

    /// Reads what has arrived of the first piece, or a part of that.
    pub(crate) fn read(&mut self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let room: usize = buffers.iter().map(|buffer| buffer.len()).sum();
        if room == 0 {
            return Ok(0);
        }
        if self.direction == Direction::Back {
            self.link.probe(Moment::Reading);
        }
        let now = self.link.environment.now();
        let dark = self.link.is_dark();
        let mut pipe = lock(&self.input);
        if pipe.end == Some(End::Reset) && !dark {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        let arrived = !dark && pipe.arrival().is_some_and(|at| at <= now);
        if !arrived {
            let over = pipe.under_way.is_empty() && pipe.end == Some(End::Closed) && !dark;
            return if over {
                Ok(0)
            } else {
                Err(io::ErrorKind::WouldBlock.into())
            };
        }
        let Some(piece) = pipe.under_way.front_mut() else {
            return Err(io::ErrorKind::WouldBlock.into());
        };
        let mut copied = 0;
        for buffer in buffers {
            let rest = &piece.bytes[piece.taken..];
            let step = rest.len().min(buffer.len());
            buffer[..step].copy_from_slice(&rest[..step]);
            piece.taken += step;
            copied += step;
        }
        if piece.taken == piece.bytes.len() {
            pipe.under_way.pop_front();
        }
        pipe.bytes -= copied;
        Ok(copied)
    }

    /// Takes bytes as far as there is room, sometimes less.
    pub(crate) fn send(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        if self.direction == Direction::Forth {
            self.link.probe(Moment::Sending);
        }
        let offered: usize = slices.iter().map(|slice| slice.len()).sum();
        let buffer = self.link.buffer();
        let most = if self.link.draw(3) == 0 {
            self.link.draw(offered)
        } else {
            offered
        };
        let dark = self.link.is_dark();
        let mut frames = Vec::new();
        let mut taken = 0;
        {
            let mut pipe = lock(&self.output);
            if pipe.end.is_some() || (pipe.unread && !dark && !pipe.lost) {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            let room = buffer.saturating_sub(pipe.bytes);
            if room == 0 {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let most = most.clamp(1, room).min(offered);
            for slice in slices {
                let step = slice.len().min(most - taken);
                pipe.frame.extend_from_slice(&slice[..step]);
                taken += step;
            }
            while let Some(len) = whole(&pipe.frame) {
                let rest = pipe.frame.split_off(len);
                frames.push(std::mem::replace(&mut pipe.frame, rest));
            }
        }
        for frame in frames {
            self.link.frame(self.direction, &self.output, frame);
        }
        Ok(taken)
    }
}

/// Length of the frame that `bytes` begin with, once it is whole.
fn whole(bytes: &[u8]) -> Option<usize> {
    let header = bytes.first_chunk::<HEADER_BYTES>()?;
    // Both ends write frames; anything else goes on as it comes.
    let len = Header::decode(header).map_or(HEADER_BYTES, |header| {
        HEADER_BYTES + header.payload_len as usize
    });
    (bytes.len() >= len).then_some(len)
}

impl Drop for MemStream {
    fn drop(&mut self) {
        // A frame that is half written leaves as far as it is written.
        let half = std::mem::take(&mut lock(&self.output).frame);
        if !half.is_empty() {
            self.link.frame(self.direction, &self.output, half);
        }
        lock(&self.output).end();
        let mut input = lock(&self.input);
        input.unread = true;
        input.under_way.clear();
        input.bytes = 0;
    }
}
