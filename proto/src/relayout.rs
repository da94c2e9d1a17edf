//! How blocks of one layout become blocks of another: who may meet, and which bytes go
//! where. Pure.
//!
//! A sender ships *parts* (one layer of one block) as they lie in its own pool. A
//! receiver with another layout takes each part apart:
//!
//! ```text
//! sender, blocks of 32         part 0                     part 1
//!   K head 0 | span 0 | span 1 |            | span 2 | span 3 |
//!                 |        \                     |
//! receiver, blocks of 16   part 0     part 1     part 2  ...
//!   K head 0          | span 0 | | span 1 | | span 2 |
//! ```
//!
//! A span of 16 positions of one head is never cut: its bytes are copied as they are if
//! both ends store the same type, else its values are read and rounded anew, which is
//! the caller's part (this module knows no number formats).
//!
//! | differs | what happens | bits of K and V |
//! |---|---|---|
//! | nothing | parts go straight into blocks | kept |
//! | block size, range of heads | spans are copied | kept |
//! | type of K and V | spans are converted | other ones |
//! | anything else | refused by name | - |
//!
//! KV with other bits is of another hash domain, and a request that asks for exact
//! tokens does not take it ([`Relayout::check_exact`]).

use std::ops::Range;

use crate::error::Error;
use crate::ids::NumericsId;
use crate::kv_layout::{KvDtype, KvLayout, SPAN_TOKENS, mismatch};

/// How two layouts go together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fit {
    /// Blocks are interchangeable as they lie.
    Same,
    /// Spans move, their bits stay: the tokens are those of a transfer between equals.
    SameBits,
    /// K and V are no longer what this receiver would have computed.
    OtherBits,
}

/// The positions and heads that one part of the sender and one of the receiver share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvRun {
    /// First span inside the sender's block.
    pub from_span: u32,
    /// First span inside the receiver's block.
    pub to_span: u32,
    pub spans: u32,
    /// First head inside the sender's part.
    pub from_head: u32,
    /// First head inside the receiver's part.
    pub to_head: u32,
    pub heads: u32,
}

/// What of a sender's part belongs into one of the receiver's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overlap {
    /// The receiver's ordinal.
    pub ordinal: u32,
    pub run: KvRun,
}

/// Bytes that are copied as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRun {
    /// Offset in the sender's part.
    pub from: usize,
    /// Offset in the receiver's part.
    pub to: usize,
    pub len: usize,
}

/// What becomes of one sender's parts at one receiver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Relayout {
    from: KvLayout,
    to: KvLayout,
    fit: Fit,
    from_head: u32,
}

impl Relayout {
    /// Whether blocks laid out as `sender` can be taken by a pool laid out as `receiver`.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unavailable`] with reason `LAYOUT_MISMATCH`, naming the first
    /// field that stands in the way and both values; [`crate::ErrorKind::Invalid`] for a
    /// layout that contradicts itself.
    pub fn between(sender: &KvLayout, receiver: &KvLayout) -> Result<Self, Error> {
        sender.validate()?;
        receiver.validate()?;
        let differs = |field: &str, theirs: &str, ours: &str| {
            let message = format!("the sender has `{theirs}`, the receiver has `{ours}`");
            Err(mismatch(field, message))
        };
        let numbers = [
            ("layers", sender.layers, receiver.layers),
            ("head_dim", sender.head_dim, receiver.head_dim),
            ("kv_heads", sender.heads().1, receiver.heads().1),
        ];
        for (field, theirs, ours) in numbers {
            if theirs != ours {
                return differs(field, &theirs.to_string(), &ours.to_string());
            }
        }
        if sender.groups != receiver.groups {
            let [theirs, ours] = [sender, receiver].map(|layout| format!("{:?}", layout.groups));
            return differs("groups", &theirs, &ours);
        }
        let (theirs, _) = sender.heads();
        let (ours, _) = receiver.heads();
        if theirs.start > ours.start || theirs.end < ours.end {
            return differs("kv_heads", &format!("{theirs:?}"), &format!("{ours:?}"));
        }
        let same_bits = sender.numerics == receiver.numerics;
        if same_bits && sender.dtype != receiver.dtype {
            // One of them does not say the truth about its numerics id.
            return differs("kv_dtype", sender.dtype.name(), receiver.dtype.name());
        }
        if !same_bits {
            check_origin(sender, receiver)?;
        }
        let fit = if !same_bits {
            Fit::OtherBits
        } else if sender.block_size == receiver.block_size && theirs == ours {
            Fit::Same
        } else {
            Fit::SameBits
        };
        Ok(Self {
            from_head: ours.start - theirs.start,
            from: sender.clone(),
            to: receiver.clone(),
            fit,
        })
    }

    /// The sender's layout.
    pub fn sender(&self) -> &KvLayout {
        &self.from
    }

    /// The receiver's layout.
    pub fn receiver(&self) -> &KvLayout {
        &self.to
    }

    /// How the two go together.
    pub fn fit(&self) -> Fit {
        self.fit
    }

    /// Whether values are read and rounded anew, instead of bytes being copied.
    pub fn converts(&self) -> bool {
        self.from.dtype != self.to.dtype
    }

    /// Whether a request that asks for exact tokens may use this pair.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unavailable`] with reason `LAYOUT_MISMATCH`, naming the field
    /// and both values.
    pub fn check_exact(&self) -> Result<(), Error> {
        if self.fit != Fit::OtherBits {
            return Ok(());
        }
        let (field, theirs, ours) = if self.converts() {
            let names = [&self.from, &self.to].map(|layout| layout.dtype.name().to_owned());
            let [theirs, ours] = names;
            ("kv_dtype", theirs, ours)
        } else {
            let ids = [&self.from, &self.to].map(|layout| layout.numerics.to_string());
            let [theirs, ours] = ids;
            ("numerics_id", theirs, ours)
        };
        let message = format!(
            "the sender has `{theirs}`, the receiver has `{ours}`, and the request asks for exact tokens"
        );
        Err(mismatch(field, message))
    }

    /// The sender's ordinals of `group` that hold the positions of the receiver's
    /// ordinals `wanted`, for a prompt of `tokens`: none past the prompt's end, and none
    /// that has left a window and that the sender may hold no more.
    ///
    /// # Panics
    /// If `group` is not an index into the groups.
    pub fn sent_ordinals(&self, group: usize, wanted: &Range<u32>, tokens: u32) -> Range<u32> {
        let [from, to] = [&self.from, &self.to].map(|layout| u64::from(layout.block_size));
        let end = (u64::from(wanted.end) * to).min(u64::from(tokens));
        let first = u64::from(wanted.start) * to / from;
        let held = self.from.first_needed_ordinal(group, tokens);
        // Both are below `tokens`, or the range is empty.
        let end = end.div_ceil(from) as u32;
        let first = u32::try_from(first).unwrap_or(u32::MAX).max(held);
        first.min(end)..end
    }

    /// Bytes of one part as it is sent.
    pub fn sent_bytes(&self) -> usize {
        self.from.layer_bytes()
    }

    /// Where the spans of the sender's block `ordinal` go, by the receiver's ordinals,
    /// ascending.
    pub fn overlaps(&self, ordinal: u32) -> impl Iterator<Item = Overlap> + use<> {
        let [from, to] =
            [&self.from, &self.to].map(|layout| u64::from(layout.block_size / SPAN_TOKENS));
        let (heads, from_head) = (self.to.kv_heads, self.from_head);
        let start = u64::from(ordinal) * from;
        let end = start + from;
        (start / to..end.div_ceil(to)).map_while(move |theirs| {
            let first = start.max(theirs * to);
            let last = end.min((theirs + 1) * to);
            Some(Overlap {
                ordinal: u32::try_from(theirs).ok()?,
                run: KvRun {
                    from_span: (first - start) as u32,
                    to_span: (first - theirs * to) as u32,
                    spans: (last - first) as u32,
                    from_head,
                    to_head: 0,
                    heads,
                },
            })
        })
    }

    /// The bytes of `run`, for layouts of one type. Ascending and disjoint.
    pub fn copies(&self, run: KvRun) -> impl Iterator<Item = CopyRun> + '_ {
        debug_assert!(!self.converts());
        let span = self.to.span_bytes();
        let len = run.spans as usize * span;
        (0..2).flat_map(move |part| {
            (0..run.heads).map(move |head| {
                let at = |layout: &KvLayout, first: u32, first_span: u32| {
                    let head = part * layout.kv_heads + first + head;
                    head as usize * layout.head_bytes() + first_span as usize * span
                };
                CopyRun {
                    from: at(&self.from, run.from_head, run.from_span),
                    to: at(&self.to, run.to_head, run.to_span),
                    len,
                }
            })
        })
    }
}

/// A pool of `own`'s blocks and heads that stores `int8`: what its parts may be on a slow
/// wire, for half the bytes of f16. Its bits are those of no pool, so its numerics id is its
/// own. `None` where nothing would be gained (the pool stores no more), and for a worker
/// that does not tell where its values come from, which meets no other bits.
pub fn int8_on_wire(own: &KvLayout) -> Option<KvLayout> {
    let dtype = KvDtype::Int8;
    let form = KvLayout {
        dtype,
        scale_group: dtype.scale_group(),
        numerics: NumericsId::derive(&[b"on the wire", dtype.name().as_bytes(), &own.numerics.0]),
        ..own.clone()
    };
    (own.origin.is_some() && form.layer_bytes() < own.layer_bytes()).then_some(form)
}

/// Whether two numerics ids differ by the type of K and V alone.
fn check_origin(sender: &KvLayout, receiver: &KvLayout) -> Result<(), Error> {
    let differs = |field: &str, theirs: &str, ours: &str| {
        let message = format!("the sender has `{theirs}`, the receiver has `{ours}`");
        Err(mismatch(field, message))
    };
    let (Some(theirs), Some(ours)) = (&sender.origin, &receiver.origin) else {
        let ids = [sender, receiver].map(|layout| layout.numerics.to_string());
        return differs("numerics_id", &ids[0], &ids[1]);
    };
    for (field, theirs, ours) in [
        ("rope", &theirs.rope, &ours.rope),
        ("model", &theirs.model, &ours.model),
        ("weights", &theirs.weights, &ours.weights),
        ("arithmetic", &theirs.arithmetic, &ours.arithmetic),
    ] {
        if theirs != ours {
            return differs(field, theirs, ours);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
