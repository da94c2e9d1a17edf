//! Parts in another, smaller form on the wire: for links that are slower than the rounding.
//!
//! A transfer that has a [`WireForm`] describes itself to the receiver as a sender that
//! stores its blocks in that form ([`crate::Opening::Other`]), and makes every part over while a
//! frame is gathered. From there on nothing is special: checksums, digests, windows and
//! counts are of the bytes that travel, and the receiver re-lays out what arrives as it
//! would from such a sender. So what it keeps is of another hash domain, and a grant for
//! exact tokens refuses it.
//!
//! ```text
//! block in the pool --(read guard)--> part in the form --> checksum, frame, socket
//! ```
//! A part that is sent again is made again, with the same bits. What the bits are is the
//! worker's arithmetic ([`Convert`]), as on arrival.

use std::fmt;
use std::sync::Arc;

use baton_proto::kv_layout::{KvLayout, SPAN_TOKENS};
use baton_proto::relayout::{KvRun, Relayout};

use crate::codec::PAYLOAD_BYTES_MAX;
use crate::error::Error;
use crate::receiver::Convert;
use crate::ticket::Opening;

/// Where a made part begins is a multiple of this, whatever the form's elements are.
const ALIGNMENT: usize = 64;

/// What parts become on the wire.
#[derive(Clone)]
pub struct WireForm {
    layout: KvLayout,
    stored_bytes: usize,
    part_bytes: u32,
    run: KvRun,
    converter: Arc<dyn Convert>,
}

impl fmt::Debug for WireForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WireForm")
            .field("stored_bytes", &self.stored_bytes)
            .field("part_bytes", &self.part_bytes)
            .finish_non_exhaustive()
    }
}

impl WireForm {
    /// The form that is laid out as `relayout`'s receiver, for pools laid out as its sender,
    /// made by `converter`.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the two differ in more than the type of K and V, or a part of
    /// the form does not fit into a frame.
    pub fn new(relayout: &Relayout, converter: Arc<dyn Convert>) -> Result<Self, Error> {
        let (own, form) = (relayout.sender(), relayout.receiver());
        if own.block_size != form.block_size || own.heads() != form.heads() {
            return Err(Error::Invalid(
                "a form on the wire has the blocks and heads of the pool".to_owned(),
            ));
        }
        let part_bytes = form.layer_bytes();
        if part_bytes > PAYLOAD_BYTES_MAX {
            return Err(Error::Invalid(format!(
                "one layer of a block has `{part_bytes}` bytes on the wire, a frame at most {PAYLOAD_BYTES_MAX}"
            )));
        }
        Ok(Self {
            layout: form.clone(),
            stored_bytes: own.layer_bytes(),
            part_bytes: part_bytes as u32,
            run: KvRun {
                from_span: 0,
                to_span: 0,
                spans: own.block_size / SPAN_TOKENS,
                from_head: 0,
                to_head: 0,
                heads: own.kv_heads,
            },
            converter,
        })
    }

    /// What the receiver is told of the sender's layout.
    pub fn opening(&self) -> Opening {
        Opening::Other(self.layout.to_json().into())
    }

    /// How the parts that travel would lie in a pool.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Bytes of a part that travels.
    pub fn part_bytes(&self) -> u32 {
        self.part_bytes
    }

    /// Bytes of a part as it is stored.
    pub(super) fn stored_bytes(&self) -> usize {
        self.stored_bytes
    }

    /// Makes one part over. On the caller's thread.
    ///
    /// # Panics
    /// As [`Convert::convert`] does: if a length is not a part's, or `part` does not lie as
    /// the form's elements have to.
    pub fn make_part(&self, stored: &[u8], part: &mut [u8]) {
        self.converter.convert(stored, part, self.run);
    }

    /// Makes `stored`, whole parts, over.
    pub(super) fn make(&self, stored: &[&[u8]]) -> Made {
        let len = stored.len() * self.part_bytes as usize;
        let mut bytes = vec![0; len + ALIGNMENT];
        let start = bytes.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        let parts = bytes[start..].chunks_exact_mut(self.part_bytes as usize);
        for (stored, part) in stored.iter().zip(parts) {
            self.make_part(stored, part);
        }
        Made { bytes, start, len }
    }
}

/// Parts of one frame as they travel.
pub(super) struct Made {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Made {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[self.start..][..self.len]
    }
}
