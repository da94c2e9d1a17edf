//! Which bytes of the staging area are in use: handed out in order, taken back in order.

use baton_proto::kv_layout::ByteExtent;

/// A run of the sender's memory and where it goes in the staging area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Offset in the staging area.
    pub(crate) to: usize,
    /// Address at the sender.
    pub(crate) from: u64,
    pub(crate) len: usize,
}

/// A ring of bytes. Positions count on for ever; their remainder is the offset.
pub(crate) struct Ring {
    size: usize,
    head: u64,
    tail: u64,
}

impl Ring {
    pub(crate) fn new(size: usize) -> Self {
        Self {
            size,
            head: 0,
            tail: 0,
        }
    }

    /// Takes the next `len` bytes; their position, or `None` if they are not free.
    pub(crate) fn take(&mut self, len: usize) -> Option<u64> {
        let used = (self.head - self.tail) as usize;
        if len > self.size - used {
            return None;
        }
        let at = self.head;
        self.head += len as u64;
        Some(at)
    }

    /// The oldest `len` bytes are free again.
    pub(crate) fn give(&mut self, len: usize) {
        self.tail += len as u64;
        debug_assert!(self.tail <= self.head, "more was given back than taken");
    }

    /// The offset of a position, and how many bytes follow it before the ring's end.
    pub(crate) fn offset(&self, at: u64) -> (usize, usize) {
        let offset = (at % self.size as u64) as usize;
        (offset, self.size - offset)
    }

    /// Where the bytes of `extents`, whose regions lie at `bases`, go from position `at` on.
    /// One that would pass the ring's end is two pieces.
    pub(crate) fn pieces(
        &self,
        mut at: u64,
        extents: &[ByteExtent],
        bases: &[(u64, u64)],
        pieces: &mut Vec<Piece>,
    ) {
        for extent in extents {
            let mut from = bases[usize::from(extent.region)].0 + extent.offset;
            let mut left = extent.len as usize;
            while left > 0 {
                let (to, room) = self.offset(at);
                let len = left.min(room);
                pieces.push(Piece { to, from, len });
                at += len as u64;
                from += len as u64;
                left -= len;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_part_at_the_end_is_cut_in_two() {
        let mut ring = Ring::new(10);
        assert_eq!(ring.take(8), Some(0));
        assert_eq!(ring.take(3), None);
        ring.give(5);
        let at = ring.take(5).unwrap();
        let extent = |offset, len| ByteExtent {
            offset,
            len,
            region: 1,
        };
        let mut pieces = Vec::new();
        let extents = [extent(0, 1), extent(7, 4)];
        ring.pieces(at, &extents, &[(0, 0), (100, 20)], &mut pieces);
        let piece = |to, from, len| Piece { to, from, len };
        assert_eq!(
            pieces,
            [piece(8, 100, 1), piece(9, 107, 1), piece(0, 108, 3)]
        );
    }

    proptest! {
        #[test]
        fn bytes_in_use_never_overlap(steps in proptest::collection::vec((1usize..40, any::<bool>()), 1..60)) {
            let mut ring = Ring::new(64);
            let mut live = std::collections::VecDeque::new();
            for (len, give) in steps {
                if give && let Some((_, len)) = live.pop_front() {
                    ring.give(len);
                }
                let used: usize = live.iter().map(|(_, len)| *len).sum();
                let taken = ring.take(len);
                prop_assert_eq!(taken.is_some(), used + len <= 64);
                if let Some(at) = taken {
                    let fresh: Vec<usize> = (at..at + len as u64).map(|at| ring.offset(at).0).collect();
                    for (at, len) in &live {
                        let old = (*at..*at + *len as u64).map(|at: u64| ring.offset(at).0);
                        prop_assert!(old.into_iter().all(|byte| !fresh.contains(&byte)));
                    }
                    live.push_back((at, len));
                }
            }
        }
    }
}
