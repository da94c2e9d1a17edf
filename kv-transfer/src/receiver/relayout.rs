//! Parts of a sender whose blocks are laid out otherwise: told apart, checked as they
//! were sent, then put where they belong.
//!
//! ```text
//! OpenAs{layout} -> plan, or refused by name        once per layout and lane
//! Data           -> bytes of the frame, aside       no block is touched
//!    whole       -> checksums of the sent bytes
//!    intact      -> per block: write guard, copy or convert, guard back
//! ```
//! What differs and how it is bridged is the pure plan's ([`baton_proto::relayout`]); the
//! arithmetic of another type is the worker's ([`Convert`]). The bytes that stand aside
//! are one frame's per lane. Where layouts are equal nothing of this file runs.
#![allow(unsafe_code)]

use std::fmt;
use std::sync::Arc;

use baton_proto::ErrorKind;
use baton_proto::kv_layout::{ByteExtent, KvLayout};
use baton_proto::relayout::{Fit, KvRun, Relayout};

use super::state::LaneSerial;
use super::table::Entry;
use crate::codec::PAYLOAD_BYTES_MAX;
use crate::region::{self, RegionTable};

/// Reads K and V of one type and writes them as another.
pub trait Convert: Send + Sync {
    /// Writes the slots of `run` in `target`, one layer of a block here, from `source`, one
    /// layer of a sender's block. Runs on a lane's thread, under the write guard.
    fn convert(&self, source: &[u8], target: &mut [u8], run: KvRun);
}

/// Makes the converter of one pair of layouts, or says why there is none.
pub type Converters =
    Arc<dyn Fn(&Relayout) -> Result<Box<dyn Convert>, baton_proto::Error> + Send + Sync>;

/// What a receiver needs to take parts of other layouts.
#[derive(Clone)]
pub struct OtherLayouts {
    /// The receiver's own layout.
    pub own: KvLayout,
    pub converters: Converters,
}

impl fmt::Debug for OtherLayouts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OtherLayouts")
            .field("own", &self.own)
            .finish_non_exhaustive()
    }
}

/// How the parts of one sender's layout become blocks here.
pub struct Plan {
    pub(crate) relayout: Relayout,
    /// Where types differ.
    converter: Option<Box<dyn Convert>>,
}

impl fmt::Debug for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Plan").field(&self.relayout).finish()
    }
}

impl Plan {
    /// The plan for a sender that described its layout as `text`.
    ///
    /// # Errors
    /// As [`Relayout::between`], and whatever the worker says that makes converters.
    pub fn new(text: &[u8], here: &OtherLayouts) -> Result<Self, baton_proto::Error> {
        let sender = KvLayout::from_json(text)?;
        let relayout = Relayout::between(&sender, &here.own)?;
        if relayout.sent_bytes() > PAYLOAD_BYTES_MAX {
            return Err(baton_proto::Error::new(
                ErrorKind::Unavailable,
                format!(
                    "one layer of the sender's blocks has {} bytes, a frame at most {PAYLOAD_BYTES_MAX}",
                    relayout.sent_bytes()
                ),
            )
            .with_field("block_size")
            .with_reason("LAYOUT_MISMATCH"));
        }
        let converter = match relayout.converts() {
            true => Some((here.converters)(&relayout)?),
            false => None,
        };
        Ok(Self {
            relayout,
            converter,
        })
    }

    /// Whether what arrives has the bits that this receiver's worker would have computed.
    pub fn keeps_bits(&self) -> bool {
        self.relayout.fit() != Fit::OtherBits
    }

    fn write(&self, source: &[u8], target: &mut [u8], run: KvRun) {
        match &self.converter {
            Some(converter) => converter.convert(source, target, run),
            None => {
                for copy in self.relayout.copies(run) {
                    target[copy.to..copy.to + copy.len]
                        .copy_from_slice(&source[copy.from..copy.from + copy.len]);
                }
            }
        }
    }
}

/// Where a part, or a piece of it, belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    pub extent: ByteExtent,
    pub run: KvRun,
}

/// The payload of one frame, aside until it is checked.
pub(crate) struct Staged {
    plan: Arc<Plan>,
    bytes: Vec<u8>,
    /// Bytes of `bytes` that have arrived.
    pub(crate) filled: usize,
    /// Where each part goes; nowhere if it was received before.
    parts: Vec<Vec<Target>>,
}

impl Staged {
    /// Room for `len` bytes of `parts`, in `buffer`, whose own bytes are of no interest.
    pub(crate) fn new(
        plan: Arc<Plan>,
        mut buffer: Vec<u8>,
        len: usize,
        parts: Vec<Vec<Target>>,
    ) -> Self {
        buffer.resize(len, 0);
        Self {
            plan,
            bytes: buffer,
            filled: 0,
            parts,
        }
    }

    /// Where the bytes that have not arrived go.
    pub(crate) fn rest(&mut self) -> &mut [u8] {
        &mut self.bytes[self.filled..]
    }

    /// The bytes from `start` on that have arrived.
    pub(crate) fn arrived(&self, start: usize) -> &[u8] {
        &self.bytes[start..self.filled]
    }

    /// The buffer, for the next frame.
    pub(crate) fn into_buffer(self) -> Vec<u8> {
        self.bytes
    }

    /// Puts every part where it belongs. False if `lane` lost the right to write before
    /// the last one: then the frame does not count.
    pub(crate) fn write(
        &self,
        regions: &RegionTable,
        entry: &Arc<Entry>,
        lane: LaneSerial,
    ) -> bool {
        let parts = self.bytes.chunks_exact(self.plan.relayout.sent_bytes());
        for (part, targets) in parts.zip(&self.parts) {
            for target in targets {
                // Anew for each block: who revokes waits for one at most.
                let Some(guard) = Entry::guard(entry, lane) else {
                    return false;
                };
                // SAFETY: `guard` is the ticket's write guard and outlives the only slice
                // made under it; `grant` checked the extent.
                let block = unsafe { region::write(regions, target.extent, 0) };
                self.plan.write(part, block, target.run);
                drop(guard);
            }
        }
        true
    }
}
