//! One data frame on its way into granted blocks.
//!
//! A lane reads a frame in as many non-blocking reads as it takes. Each read runs
//! under the ticket's write guard, which is taken anew every time: the moment the
//! ticket is fenced or another lane took over, the guard is refused and the rest
//! of the frame goes to scratch. Checksums are computed under the same guard, while
//! the bytes are still in cache.
#![allow(unsafe_code)]

use std::io::{self, IoSliceMut};
use std::ops::Range;
use std::sync::Arc;

use baton_proto::kv_layout::ByteExtent;

use super::relayout::Staged;
use super::state::LaneSerial;
use super::table::Entry;
use crate::codec::Header;
use crate::part::{Crc32c, frame_crc};
use crate::region::{self, RegionTable};
use crate::streaming::{self, PIECE_BYTES, Piece};

/// Size of the buffer that unwanted bytes are read into.
pub(crate) const SCRATCH_BYTES: usize = 256 << 10;

/// Bytes that are copied aside at once, so that their checksum finds them in a near cache.
const ASIDE_BYTES: usize = 16 << 10;

struct Slot {
    extent: ByteExtent,
    /// False for a part that was received before: its block must not change any more.
    wanted: bool,
}

/// Where a frame was heading when its header came.
pub(crate) struct Destination {
    pub(crate) entry: Arc<Entry>,
    pub(crate) lane: LaneSerial,
    pub(crate) numbers: Range<usize>,
}

/// One data frame while its payload is being read.
pub(crate) struct Incoming {
    regions: Arc<RegionTable>,
    pub(crate) header: Header,
    /// `None` once nothing of the frame may go into blocks (any more).
    destination: Option<Destination>,
    slots: Vec<Slot>,
    slot: usize,
    /// Bytes read of the current slot.
    offset: usize,
    /// Where the payload goes if its parts have to be re-laid out.
    staged: Option<Staged>,
    /// Bytes of the payload still to be read.
    remaining: usize,
    crc: Crc32c,
    crcs: Vec<u32>,
    pub(crate) scratched: u64,
}

/// What one read brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Brought {
    pub(crate) payload: usize,
    /// Bytes that went into the buffer behind the payload.
    pub(crate) extra: usize,
}

/// A frame that arrived whole and only ever had the right to write.
pub(crate) struct Arrived {
    pub(crate) destination: Destination,
    pub(crate) crcs: Vec<u32>,
    pub(crate) intact: bool,
    /// The payload, if it did not go into blocks.
    pub(crate) staged: Option<Staged>,
}

impl Incoming {
    /// A frame whose payload nobody wants.
    pub(crate) fn unwanted(regions: Arc<RegionTable>, header: Header) -> Self {
        Self {
            regions,
            header,
            destination: None,
            slots: Vec::new(),
            slot: 0,
            offset: 0,
            staged: None,
            remaining: header.payload_len as usize,
            crc: Crc32c::new(),
            crcs: Vec::new(),
            scratched: 0,
        }
    }

    /// A frame for the parts `destination.numbers`, whose lengths sum to its payload.
    /// `parts` gives each part's extent and whether it is still wanted.
    pub(crate) fn placed(
        regions: Arc<RegionTable>,
        header: Header,
        destination: Destination,
        parts: impl Iterator<Item = (ByteExtent, bool)>,
    ) -> Self {
        let slots: Vec<Slot> = parts
            .map(|(extent, wanted)| Slot { extent, wanted })
            .collect();
        Self {
            crcs: Vec::with_capacity(slots.len()),
            destination: Some(destination),
            slots,
            ..Self::unwanted(regions, header)
        }
    }

    /// The same frame, whose parts are read into `staged` first.
    pub(crate) fn aside(self, staged: Staged) -> Self {
        Self {
            staged: Some(staged),
            ..self
        }
    }

    pub(crate) fn is_whole(&self) -> bool {
        self.remaining == 0
    }

    /// Calls `read` once with buffers for the rest of the payload, followed by `extra`
    /// (for the next header) if the whole rest fits before it. `read` must not block
    /// and returns how many bytes it filled, in order.
    pub(crate) fn read(
        &mut self,
        scratch: &mut [u8],
        extra: &mut [u8],
        read: impl FnOnce(&mut [IoSliceMut<'_>]) -> io::Result<usize>,
    ) -> io::Result<Brought> {
        if self.staged.is_some() {
            return self.read_aside(extra, read);
        }
        let guard = match &self.destination {
            Some(destination) => Entry::guard(&destination.entry, destination.lane),
            None => None,
        };
        if guard.is_none() {
            self.destination = None;
            return self.read_scratch(scratch, extra, read);
        }
        let mut buffers = Vec::with_capacity(self.slots.len() - self.slot + 1);
        let mut spare = &mut scratch[..];
        let mut offered = 0;
        for (index, slot) in self.slots.iter().enumerate().skip(self.slot) {
            let from = if index == self.slot { self.offset } else { 0 };
            let len = slot.extent.len as usize - from;
            if slot.wanted {
                // SAFETY: `guard` is the ticket's write guard and lives past the last use of
                // the slice; each slot is visited once; `grant` checked the extent.
                let bytes = unsafe { region::write(&self.regions, slot.extent, from) };
                buffers.push(IoSliceMut::new(bytes));
            } else {
                let Some((bytes, rest)) = std::mem::take(&mut spare).split_at_mut_checked(len)
                else {
                    break;
                };
                spare = rest;
                buffers.push(IoSliceMut::new(bytes));
            }
            offered += len;
        }
        if buffers.is_empty() {
            // A duplicate part larger than the scratch buffer: its bytes are not needed,
            // nor is the rest of the frame's checksum. Sending it again is harmless.
            drop(guard);
            self.destination = None;
            return self.read_scratch(scratch, extra, read);
        }
        if offered == self.remaining && !extra.is_empty() {
            buffers.push(IoSliceMut::new(extra));
        }
        let got = read(&mut buffers)?;
        drop(buffers);
        let payload = got.min(offered);
        self.digest(scratch, payload);
        drop(guard);
        Ok(Brought {
            payload,
            extra: got - payload,
        })
    }

    /// Takes the whole payload at once, out of memory: `fill` fills a buffer with the next
    /// bytes. Each piece is checksummed while it is in the nearest cache. Without the right
    /// to write, nothing is copied.
    pub(crate) fn take(&mut self, mut fill: impl FnMut(&mut [u8])) {
        if self.staged.is_some() {
            return self.take_aside(fill);
        }
        let guard = match &self.destination {
            Some(destination) => Entry::guard(&destination.entry, destination.lane),
            None => None,
        };
        if guard.is_none() {
            self.destination = None;
            self.scratched += self.remaining as u64;
            self.remaining = 0;
            return;
        }
        let mut piece = Piece::new();
        for slot in &self.slots {
            let len = slot.extent.len as usize;
            let mut crc = Crc32c::new();
            if slot.wanted {
                // SAFETY: `guard` is the ticket's write guard and lives past the last use of
                // the slice; each slot is visited once; `grant` checked the extent.
                let bytes = unsafe { region::write(&self.regions, slot.extent, 0) };
                for bytes in bytes.chunks_mut(PIECE_BYTES) {
                    let piece = piece.filled(bytes.len(), &mut fill);
                    crc.update(piece);
                    streaming::copy(piece, bytes);
                }
            } else {
                let mut left = len;
                while left > 0 {
                    let piece = piece.filled(left.min(PIECE_BYTES), &mut fill);
                    crc.update(piece);
                    left -= piece.len();
                }
                self.scratched += len as u64;
            }
            self.crcs.push(crc.value());
        }
        streaming::fence();
        drop(guard);
        self.remaining = 0;
    }

    /// Takes `payload` fresh bytes into the checksums. Runs under the write guard.
    fn digest(&mut self, scratch: &[u8], payload: usize) {
        let mut left = payload;
        let mut spare = scratch;
        while left > 0 {
            let slot = &self.slots[self.slot];
            let open = slot.extent.len as usize - self.offset;
            let fresh = open.min(left);
            if slot.wanted {
                // SAFETY: the caller still holds the write guard and no `&mut` of `read`
                // is left; `grant` checked the extent.
                let bytes = unsafe { region::read(&self.regions, slot.extent, self.offset) };
                self.crc.update(&bytes[..fresh]);
            } else {
                self.crc.update(&spare[..fresh]);
                spare = &spare[open..];
                self.scratched += fresh as u64;
            }
            left -= fresh;
            self.advance(fresh, fresh == open);
        }
        self.remaining -= payload;
    }

    /// The checksum has taken `fresh` more bytes of the current slot, maybe its last.
    fn advance(&mut self, fresh: usize, last: bool) {
        self.offset += fresh;
        if last {
            self.crcs
                .push(std::mem::replace(&mut self.crc, Crc32c::new()).value());
            self.slot += 1;
            self.offset = 0;
        }
    }

    /// As [`Incoming::read`], away from any block.
    fn read_aside(
        &mut self,
        extra: &mut [u8],
        read: impl FnOnce(&mut [IoSliceMut<'_>]) -> io::Result<usize>,
    ) -> io::Result<Brought> {
        let Some(mut staged) = self.staged.take() else {
            return Ok(Brought {
                payload: 0,
                extra: 0,
            });
        };
        let start = staged.filled;
        let mut buffers = vec![IoSliceMut::new(staged.rest())];
        if !extra.is_empty() {
            buffers.push(IoSliceMut::new(extra));
        }
        let got = read(&mut buffers);
        drop(buffers);
        let payload = got.as_ref().map_or(0, |got| (*got).min(self.remaining));
        staged.filled += payload;
        let mut fresh = staged.arrived(start);
        while !fresh.is_empty() {
            let open = self.slots[self.slot].extent.len as usize - self.offset;
            let (now, later) = fresh.split_at(open.min(fresh.len()));
            self.crc.update(now);
            self.advance(now.len(), now.len() == open);
            fresh = later;
        }
        self.remaining -= payload;
        self.staged = Some(staged);
        got.map(|got| Brought {
            payload,
            extra: got - payload,
        })
    }

    /// As [`Incoming::take`], away from any block.
    fn take_aside(&mut self, mut fill: impl FnMut(&mut [u8])) {
        while self.remaining > 0 {
            let piece = self.read_aside(&mut [], |buffers| {
                let room = buffers.first_mut().map_or(&mut [][..], |buffer| buffer);
                let piece = room.len().min(ASIDE_BYTES);
                fill(&mut room[..piece]);
                Ok(piece)
            });
            debug_assert!(piece.is_ok_and(|piece| piece.payload > 0));
        }
    }

    fn read_scratch(
        &mut self,
        scratch: &mut [u8],
        extra: &mut [u8],
        read: impl FnOnce(&mut [IoSliceMut<'_>]) -> io::Result<usize>,
    ) -> io::Result<Brought> {
        let offered = self.remaining.min(scratch.len());
        let whole = offered == self.remaining;
        let mut buffers = vec![IoSliceMut::new(&mut scratch[..offered])];
        if whole && !extra.is_empty() {
            buffers.push(IoSliceMut::new(extra));
        }
        let got = read(&mut buffers)?;
        let payload = got.min(offered);
        self.remaining -= payload;
        self.scratched += payload as u64;
        Ok(Brought {
            payload,
            extra: got - payload,
        })
    }

    /// What to report once the frame is whole; `None` if it ended in scratch.
    pub(crate) fn arrived(self) -> Option<Arrived> {
        let destination = self.destination?;
        let intact = frame_crc(self.crcs.iter().copied()) == self.header.payload_crc;
        Some(Arrived {
            destination,
            crcs: self.crcs,
            intact,
            staged: self.staged,
        })
    }
}
