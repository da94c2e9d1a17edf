//! Reading and copying parts that are in no cache.
//!
//! **Ahead.** Parts of a few KiB lie anywhere, and the processor's own prefetching begins anew
//! with each page: a walk over 4 KiB parts waits for memory most of its time. [`Ahead`] asks
//! for what comes [`AHEAD_BYTES`] later while a piece is worked on, across the ends of
//! parts, which is half as fast again at 4 to 16 KiB. Steps are small there, so that the
//! asking is spread evenly ([`step`]); at 32 KiB and more the processor does better alone.
//!
//! **Past the caches.** What a lane places is read next by another core, after many more
//! bytes, and is long gone from this core's cache by then. A plain store first reads the
//! line that it overwrites, and pushes others out. A streaming one does neither, which saves
//! a third of the memory traffic of a copy; the library's `memcpy` does so for copies of
//! megabytes only, and parts are smaller. Streaming stores become visible in no order:
//! whoever made some calls [`fence`] before anybody is told of the bytes.
//!
//! Where the processor has neither, all is as without them.
#![allow(unsafe_code)]

use crate::part::{Crc32c, frame_crc};

/// What is copied and checksummed at once: it stays in the nearest cache.
pub(crate) const PIECE_BYTES: usize = 4 << 10;

/// Runs below this are asked for ahead.
const LONG_BYTES: usize = 32 << 10;

/// How far a reader of short runs goes at once.
const STEP_BYTES: usize = 512;

/// How far to read at once in a run of `len` bytes.
pub(crate) fn step(len: usize) -> usize {
    if len < LONG_BYTES { STEP_BYTES } else { len }
}

/// How far before the reader memory is asked for: more than it takes to come, far less than
/// a cache.
const AHEAD_BYTES: usize = 4 << 10;

/// Bytes in one cache, and in what moves between them.
const LINE_BYTES: usize = 64;

/// Walks runs of memory some way before their reader. Touches no bytes: a run that is not
/// there (any more) is no harm.
pub(crate) struct Ahead<I> {
    rest: I,
    run: Run,
}

/// Where a run of bytes lies.
#[derive(Clone, Copy)]
pub(crate) struct Run {
    base: *const u8,
    len: usize,
    is_short: bool,
}

impl Run {
    pub(crate) fn new(base: *const u8, len: usize) -> Self {
        Self {
            base,
            len,
            is_short: len < LONG_BYTES,
        }
    }
}

impl<I: Iterator<Item = Run>> Ahead<I> {
    /// Asks for the first bytes of `runs`.
    pub(crate) fn of(runs: I) -> Self {
        let mut ahead = Self {
            rest: runs,
            run: Run::new(std::ptr::null(), 0),
        };
        ahead.reader_takes(AHEAD_BYTES);
        ahead
    }

    /// The reader is about to take `bytes` more: asks for as many behind those asked for.
    pub(crate) fn reader_takes(&mut self, mut bytes: usize) {
        while bytes > 0 {
            if self.run.len == 0 {
                match self.rest.next() {
                    Some(next) => self.run = next,
                    None => return,
                }
                continue;
            }
            let step = bytes.min(self.run.len);
            if self.run.is_short {
                for at in (0..step).step_by(LINE_BYTES) {
                    prefetch(self.run.base.wrapping_add(at));
                }
            }
            self.run.base = self.run.base.wrapping_add(step);
            self.run.len -= step;
            bytes -= step;
        }
    }
}

/// Asks for one line, as far as the second cache: the first one's few slots are the reader's.
fn prefetch(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    x86_64::prefetch(at);
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Pieces of memory, read in order.
pub(crate) struct Slices<'a, I> {
    rest: std::slice::Iter<'a, &'a [u8]>,
    piece: &'a [u8],
    /// How far to go at once in this piece.
    step: usize,
    ahead: Ahead<I>,
}

impl<'a> Slices<'a, ()> {
    pub(crate) fn of(slices: &'a [&'a [u8]]) -> Slices<'a, impl Iterator<Item = Run>> {
        let run = |slice: &&[u8]| Run::new(slice.as_ptr(), slice.len());
        Slices {
            rest: slices.iter(),
            piece: &[],
            step: 0,
            ahead: Ahead::of(slices.iter().map(run)),
        }
    }
}

impl<I: Iterator<Item = Run>> Slices<'_, I> {
    /// Fills `buffer` with the next bytes, as far as there are any.
    pub(crate) fn fill(&mut self, mut buffer: &mut [u8]) {
        while !buffer.is_empty() {
            if self.piece.is_empty() {
                match self.rest.next() {
                    Some(next) => (self.piece, self.step) = (next, step(next.len())),
                    None => return,
                }
                continue;
            }
            let step = self.piece.len().min(buffer.len()).min(self.step);
            self.ahead.reader_takes(step);
            let (head, tail) = buffer.split_at_mut(step);
            head.copy_from_slice(&self.piece[..step]);
            self.piece = &self.piece[step..];
            buffer = tail;
        }
    }
}

/// What a piece is copied through: its checksum is of the bytes that go on from here, also
/// where the source belongs to somebody else. It lies on whole lines.
#[repr(align(64))]
pub(crate) struct Piece([u8; PIECE_BYTES]);

impl Piece {
    pub(crate) fn new() -> Self {
        Self([0; PIECE_BYTES])
    }

    /// Lets `fill` fill the first `len` bytes, `PIECE_BYTES` at most.
    pub(crate) fn filled(&mut self, len: usize, fill: impl FnOnce(&mut [u8])) -> &[u8] {
        let bytes = &mut self.0[..len];
        fill(bytes);
        bytes
    }
}

/// Copies each of `from` over that of `to`, of the same length, as lanes do that read
/// memory, and returns the checksum that a frame of them has: one thread's share of a
/// transfer with digests, for whoever wants to know what that can be.
pub fn copy_checked(from: &[&[u8]], to: &mut [&mut [u8]]) -> u32 {
    let mut slices = Slices::of(from);
    let mut piece = Piece::new();
    let crcs = to.iter_mut().map(|to| {
        let mut crc = Crc32c::new();
        for to in to.chunks_mut(PIECE_BYTES) {
            let piece = piece.filled(to.len(), |piece| slices.fill(piece));
            crc.update(piece);
            copy(piece, to);
        }
        crc.value()
    });
    let crc = frame_crc(crcs);
    fence();
    crc
}

/// Copies `from` over `to`, which have one length.
pub(crate) fn copy(from: &[u8], to: &mut [u8]) {
    assert_eq!(from.len(), to.len());
    #[cfg(target_arch = "x86_64")]
    x86_64::copy(from, to);
    #[cfg(not(target_arch = "x86_64"))]
    to.copy_from_slice(from);
}

/// Puts every [`copy`] of this thread before what it does next.
pub(crate) fn fence() {
    #[cfg(target_arch = "x86_64")]
    x86_64::fence();
}

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use std::arch::x86_64::{
        __m128i, _MM_HINT_T1, _mm_loadu_si128, _mm_prefetch, _mm_sfence, _mm_stream_si128,
    };

    use super::LINE_BYTES;

    /// What one store takes: it has to be aligned to this.
    const STORE_BYTES: usize = size_of::<__m128i>();

    pub(super) fn copy(from: &[u8], to: &mut [u8]) {
        // A line that is not whole would cost more than a plain store.
        let head = to.as_ptr().align_offset(LINE_BYTES).min(to.len());
        let (to_head, to) = to.split_at_mut(head);
        let (from_head, from) = from.split_at(head);
        to_head.copy_from_slice(from_head);
        let (to_lines, to_tail) = to.as_chunks_mut::<LINE_BYTES>();
        let (from_lines, from_tail) = from.as_chunks::<LINE_BYTES>();
        for (to, from) in to_lines.iter_mut().zip(from_lines) {
            let (to, from) = (to.as_mut_ptr(), from.as_ptr());
            for at in (0..LINE_BYTES).step_by(STORE_BYTES) {
                // SAFETY: both chunks have `LINE_BYTES`; `to` is aligned to them, as the
                // head ended there; every processor of this architecture has SSE2.
                unsafe {
                    let bytes = _mm_loadu_si128(from.add(at).cast());
                    _mm_stream_si128(to.add(at).cast(), bytes);
                }
            }
        }
        to_tail.copy_from_slice(from_tail);
    }

    pub(super) fn prefetch(at: *const u8) {
        // SAFETY: a hint, which no address makes fault; every processor of this architecture
        // has SSE.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) };
    }

    pub(super) fn fence() {
        // SAFETY: every processor of this architecture has SSE.
        unsafe { _mm_sfence() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::part::crc32c;

    #[test]
    fn copies_across_uneven_pieces() {
        let mut out = [0u8; 7];
        let (first, second) = out.split_at_mut(4);
        let pieces: [&[u8]; 4] = [&[1, 2], &[], &[3], &[4, 5, 6]];
        let mut slices = Slices::of(&pieces);
        slices.fill(first);
        slices.fill(second);
        assert_eq!(out, [1, 2, 3, 4, 5, 6, 0]);
    }

    #[test]
    fn a_checked_copy_is_one_and_says_what_its_frame_would() {
        let bytes: Vec<u8> = (0..2 * LONG_BYTES)
            .map(|at| (at * 31 % 251) as u8)
            .collect();
        let lens = [5, PIECE_BYTES + 1, 300, LONG_BYTES];
        let mut rest = &bytes[..];
        let from: Vec<&[u8]> = lens
            .iter()
            .map(|len| rest.split_off(..*len).unwrap_or_default())
            .collect();
        let mut copies: Vec<Vec<u8>> = lens.iter().map(|len| vec![0; *len]).collect();
        let mut to: Vec<&mut [u8]> = copies.iter_mut().map(|copy| &mut copy[..]).collect();
        let crc = copy_checked(&from, &mut to);
        assert_eq!(crc, frame_crc(from.iter().map(|from| crc32c(from))));
        assert_eq!(copies, from);
    }

    #[test]
    fn the_walk_ahead_ends_with_the_runs_whatever_is_taken() {
        let bytes = [0u8; 3 * AHEAD_BYTES];
        let lens = [1, 0, AHEAD_BYTES - 2, 700, AHEAD_BYTES];
        let mut asked = 0;
        let runs = lens.iter().map(|len| {
            asked += len;
            Run::new(bytes.as_ptr(), *len)
        });
        let mut ahead = Ahead::of(runs);
        for taken in [STEP_BYTES, 0, 1, usize::MAX, STEP_BYTES] {
            ahead.reader_takes(taken);
        }

        assert_eq!(asked, lens.iter().sum::<usize>());
    }

    #[test]
    fn every_byte_is_copied_at_any_alignment_and_no_other_is_touched() {
        let from: Vec<u8> = (0..400u32).map(|at| (at * 7 + 1) as u8).collect();
        for start in [0, 1, 15, 16, 17, 63, 64, 65] {
            for len in [0, 1, 16, 63, 64, 65, 127, 128, 200, 300] {
                let mut to = vec![0u8; 400];
                copy(&from[3..][..len], &mut to[start..][..len]);
                fence();
                let mut expected = vec![0u8; 400];
                expected[start..][..len].copy_from_slice(&from[3..][..len]);
                assert_eq!(to, expected, "{len} bytes at {start}");
            }
        }
    }
}
