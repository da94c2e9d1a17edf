//! Source blocks while a lane reads them.
//!
//! A lane borrows the bytes of a frame for one checksum or one non-blocking write
//! at a time, under the transfer's read guard. Once the transfer has ended the
//! guard is refused: the rest of a frame that is half written goes out as zeros,
//! which its checksum exposes, so that the lane stays in step for other transfers.
#![allow(unsafe_code)]

use std::sync::Arc;

use baton_proto::kv_layout::ByteExtent;

use super::transfer::{ReadGuard, TransferShared};
use super::wire::Made;
use crate::part::{Crc32c, crc32c};
use crate::region;
use crate::streaming::{self, Ahead, Run};

static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// The payload of one data frame.
pub(crate) struct Source {
    transfer: Arc<TransferShared>,
    extents: Vec<ByteExtent>,
    len: usize,
    /// The bytes that travel, if those are not the blocks' own.
    made: Option<Made>,
}

impl Source {
    /// A payload of extents that were pushed to `transfer` (and checked by `push`).
    pub(crate) fn new(transfer: Arc<TransferShared>, extents: Vec<ByteExtent>) -> Self {
        let len = match transfer.form() {
            Some(form) => form.part_bytes() as usize * extents.len(),
            None => extents.iter().map(|extent| extent.len as usize).sum(),
        };
        Self {
            transfer,
            extents,
            len,
            made: None,
        }
    }

    /// Where the payload lies, if it travels as it is stored.
    pub(crate) fn extents(&self) -> &[ByteExtent] {
        debug_assert!(self.transfer.form().is_none());
        &self.extents
    }

    /// The right to have it read by somebody else; none once the transfer has ended.
    pub(crate) fn lend(&self) -> Option<ReadGuard> {
        TransferShared::guard(&self.transfer)
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Whether the transfer has ended, so that nobody wants these bytes any more.
    pub(crate) fn is_ended(&self) -> bool {
        self.transfer.is_ended()
    }

    /// Pieces of memory the payload lies in.
    pub(crate) fn pieces(&self) -> usize {
        self.extents.len()
    }

    /// The bytes from `from` on, until the borrow ends.
    pub(crate) fn borrow(&self, from: usize) -> Borrowed<'_> {
        Borrowed {
            source: self,
            from,
            guard: TransferShared::guard(&self.transfer),
        }
    }

    /// Calls `with` with the pieces of the bytes from `from` on.
    pub(crate) fn with_slices<T>(&self, from: usize, with: impl FnOnce(&[&[u8]]) -> T) -> T {
        let borrowed = self.borrow(from);
        let mut slices = Vec::with_capacity(self.extents.len());
        borrowed.slices(usize::MAX, &mut slices);
        with(&slices)
    }

    /// CRC-32C of every part as it travels, which is decided here: a part that has another
    /// form on the wire is made now. `None` once the transfer has ended.
    pub(crate) fn checksums(&mut self) -> Option<Vec<u32>> {
        let borrowed = self.borrow(0);
        borrowed.guard.as_ref()?;
        let mut slices = Vec::with_capacity(self.extents.len());
        borrowed.stored(0, usize::MAX, &mut slices);
        if let Some(form) = self.transfer.form() {
            let made = form.make(&slices);
            drop(borrowed);
            let parts = made.bytes().chunks_exact(form.part_bytes() as usize);
            let crcs = parts.map(crc32c).collect();
            self.made = Some(made);
            return Some(crcs);
        }
        let runs = slices
            .iter()
            .map(|slice| Run::new(slice.as_ptr(), slice.len()));
        let mut ahead = Ahead::of(runs);
        let mut checksum = |slice: &[u8]| {
            let mut crc = Crc32c::new();
            for piece in slice.chunks(streaming::step(slice.len())) {
                ahead.reader_takes(piece.len());
                crc.update(piece);
            }
            crc.value()
        };
        Some(slices.iter().map(|slice| checksum(slice)).collect())
    }
}

/// Source bytes under a read guard, or zeros of the same length.
pub(crate) struct Borrowed<'a> {
    source: &'a Source,
    from: usize,
    guard: Option<ReadGuard>,
}

impl Borrowed<'_> {
    /// Whether these are the source's bytes.
    pub(crate) fn is_granted(&self) -> bool {
        self.guard.is_some()
    }

    /// Appends the pieces, until `slices` holds `pieces_max`.
    pub(crate) fn slices<'b>(&'b self, pieces_max: usize, slices: &mut Vec<&'b [u8]>) {
        let skip = self.from;
        if self.guard.is_none() {
            let mut left = self.source.len - skip;
            while left > 0 && slices.len() < pieces_max {
                let piece = left.min(ZEROS.len());
                slices.push(&ZEROS[..piece]);
                left -= piece;
            }
            return;
        }
        if self.source.transfer.form().is_none() {
            return self.stored(skip, pieces_max, slices);
        }
        // Before they are made, nothing travels.
        if let Some(made) = &self.source.made
            && slices.len() < pieces_max
        {
            slices.push(&made.bytes()[skip..]);
        }
    }

    /// Appends pieces of the blocks from `skip` on, until `slices` holds `pieces_max`.
    /// The guard is held.
    fn stored<'b>(&'b self, mut skip: usize, pieces_max: usize, slices: &mut Vec<&'b [u8]>) {
        debug_assert!(self.guard.is_some());
        for extent in &self.source.extents {
            let len = extent.len as usize;
            if skip >= len {
                skip -= len;
                continue;
            }
            if slices.len() >= pieces_max {
                return;
            }
            // SAFETY: `self.guard` is the transfer's read guard and lives as long as
            // `'b`; `push` checked the extent against these regions.
            slices.push(unsafe { region::read(self.source.transfer.regions(), *extent, skip) });
            skip = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::time::{Duration, Instant};

    use baton_proto::{Attempt, Epoch, RequestId};

    use super::*;
    use crate::region::MemoryRegion;
    use crate::sender::{LaneTarget, SenderConfig};
    use crate::ticket::{LaneKey, LayoutDigest, ProcessToken, Ticket};
    use crate::wake::Bell;

    fn transfer(memory: &'static [u8]) -> Arc<TransferShared> {
        // SAFETY: static bytes, which this sender only reads.
        let region =
            unsafe { MemoryRegion::new(memory.as_ptr().cast_mut(), memory.len(), Arc::new(())) };
        let target = LaneTarget {
            data_address: None,
            server_name: None,
            process_token: ProcessToken(1),
            lane_key: LaneKey([0; 32]),
            ticket: Ticket(1),
            epoch: Epoch(1),
            attempt: Attempt(1),
            request_id: RequestId::from("r"),
            deadline: Duration::from_secs(9),
        };
        Arc::new(TransferShared::new(
            &Arc::new(SenderConfig::new(vec![region])),
            target,
            LayoutDigest([0; 32]).into(),
            Bell::new().unwrap(),
            Arc::new(AtomicUsize::new(0)),
            Instant::now(),
        ))
    }

    fn extent(offset: u64, len: u32) -> ByteExtent {
        ByteExtent {
            offset,
            len,
            region: 0,
        }
    }

    #[test]
    fn blocks_of_an_ended_transfer_are_not_read_but_keep_their_length() {
        let shared = transfer(b"0123456789");
        let mut source = Source::new(Arc::clone(&shared), vec![extent(4, 4), extent(0, 2)]);
        assert_eq!(source.with_slices(2, |slices| slices.concat()), b"6701");
        assert_eq!(source.checksums().map(|crcs| crcs.len()), Some(2));
        shared.update(|inner| inner.state.abort("enough"));
        assert_eq!(source.with_slices(2, |slices| slices.concat()), [0; 4]);
        assert_eq!(source.checksums(), None);
    }

    #[test]
    fn an_ended_transfer_is_not_quiet_while_a_borrow_lives() {
        let shared = transfer(b"0123456789");
        let source = Source::new(Arc::clone(&shared), vec![extent(0, 10)]);
        let borrowed = source.borrow(0);
        shared.update(|inner| inner.state.abort("enough"));
        assert!(!shared.is_quiet());
        drop(borrowed);
        assert!(shared.is_quiet());
    }
}
