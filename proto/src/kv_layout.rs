//! How the KV cache lies in memory, as data.
//!
//! One pool per [`KvGroup`]. A pool's bytes are
//! `[block][layer of the group][K|V][kv head][innermost]`, so that a block is
//! contiguous and a layer's slice of it too:
//!
//! ```text
//! block b   | layer 0                     | layer 1 ...
//!           | K             | V           |
//!           | head 0 | head1| head 0 |... |
//! K, V, head h : spans of 16 positions, one behind the other
//! ```
//!
//! Every block size is thus a plain concatenation of spans. Inside a span, floats lie as
//! `[head_dim][16 positions]` (K) and `[16 positions][head_dim]` (V); `int8` and `int4` as
//! an f16 scale and minimum per position and group of dimensions, then codes, in an order
//! that is the kernels' own (`baton_kernels::KvShape`).
//!
//! Two workers exchange blocks as they lie if their layouts agree field by field
//! ([`KvLayout::check_peer`]); [`crate::relayout`] says which others may meet and how.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind};
use crate::ids::NumericsId;

/// Positions in one span: the unit that block hashes cover and that K is transposed in.
pub const SPAN_TOKENS: u32 = 16;

/// Most dimensions that share a scale and a minimum in `int8` and `int4`.
pub const SCALE_GROUP: u32 = 64;

/// Element type of stored K and V.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvDtype {
    F32,
    F16,
    Bf16,
    /// 255 steps between the least and the largest value of a group.
    Int8,
    /// 15 steps.
    Int4,
}

impl KvDtype {
    /// Every type, widest first.
    pub const ALL: [Self; 5] = [Self::F32, Self::F16, Self::Bf16, Self::Int8, Self::Int4];

    /// The [`KvLayout::scale_group`] of a layout of this type.
    pub const fn scale_group(self) -> u32 {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 0,
            Self::Int8 | Self::Int4 => SCALE_GROUP,
        }
    }

    /// The name used in flags, logs and handshakes.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
        }
    }
}

impl fmt::Display for KvDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for KvDtype {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::ALL
            .into_iter()
            .find(|dtype| dtype.name() == text)
            .ok_or_else(|| {
                let names = Self::ALL.map(Self::name).join(", ");
                Error::invalid("kv_dtype", format!("`{text}` is not one of {names}"))
            })
    }
}

/// Which attention a group's layers use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum KvGroupKind {
    /// Every earlier position is attended to.
    Full,
    /// Position `p` attends to positions `> p - window`.
    SlidingWindow { window: u32 },
}

/// The layers that share one block table.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct KvGroup {
    pub kind: KvGroupKind,
    /// Model layers of this group, ascending.
    pub layers: Vec<u32>,
}

/// What K and V of a worker come from, apart from the type they are stored as. Two
/// workers that differ in nothing but that type hold the same values, each rounded its
/// own way; the texts are for comparing and for people.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct KvOrigin {
    /// Digest of the model's files.
    pub model: String,
    /// What the weights became at load.
    pub weights: String,
    /// How positions are rotated in.
    pub rope: String,
    /// Versions of the arithmetic and of the order inside a span.
    pub arithmetic: String,
}

/// The KV heads of one rank of a model that is split over several.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct KvShard {
    /// The model's head that this rank's first one is.
    pub first_head: u32,
    /// KV heads of the whole model.
    pub model_heads: u32,
}

/// The layout of a worker's KV pools.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct KvLayout {
    /// Positions in a block: 16, 32, 64 or 128.
    pub block_size: u32,
    pub dtype: KvDtype,
    /// Dimensions that share a scale and a minimum, at each position; the last group of
    /// a head may be smaller. 0 where elements are floats.
    pub scale_group: u32,
    /// Heads stored here: the model's, or one rank's part of them.
    pub kv_heads: u32,
    pub head_dim: u32,
    /// Layers of the whole model.
    pub layers: u32,
    pub groups: Vec<KvGroup>,
    /// What decides the bits inside a block.
    pub numerics: NumericsId,
    /// `None` from a worker that does not tell: it meets only its own numerics id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<KvOrigin>,
    /// `None`: all heads of the model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shard: Option<KvShard>,
}

impl KvLayout {
    /// The model's heads that are stored here, and how many the model has.
    pub fn heads(&self) -> (std::ops::Range<u32>, u32) {
        let (first, of) = match self.shard {
            Some(shard) => (shard.first_head, shard.model_heads),
            None => (0, self.kv_heads),
        };
        (first..first.saturating_add(self.kv_heads), of)
    }

    /// As one worker describes its layout to another.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("numbers, texts and lists have a form in JSON")
    }

    /// The layout that [`KvLayout::to_json`] wrote, checked.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] naming the field, or `layout` where the text itself is
    /// wrong.
    pub fn from_json(text: &[u8]) -> Result<Self, Error> {
        let layout: Self = serde_json::from_slice(text)
            .map_err(|error| Error::invalid("layout", error.to_string()))?;
        layout.validate()?;
        Ok(layout)
    }

    /// Bytes of one kv head's K (or V) for 16 positions.
    pub fn span_bytes(&self) -> usize {
        let (positions, dim) = (SPAN_TOKENS as usize, self.head_dim as usize);
        // An f16 scale and minimum per position and group.
        let scales = || positions * dim.div_ceil(self.scale_group.max(1) as usize) * 4;
        match self.dtype {
            KvDtype::F32 => positions * dim * 4,
            KvDtype::F16 | KvDtype::Bf16 => positions * dim * 2,
            KvDtype::Int8 => scales() + positions * dim,
            // Lines of 32 dimensions, of which the last may be half empty.
            KvDtype::Int4 => scales() + positions * dim.next_multiple_of(32) / 2,
        }
    }

    /// Bytes of one kv head's K (or V) in one block.
    pub fn head_bytes(&self) -> usize {
        self.block_size as usize / SPAN_TOKENS as usize * self.span_bytes()
    }

    /// Bytes of one layer's K and V in one block: the unit of a data frame.
    pub fn layer_bytes(&self) -> usize {
        2 * self.kv_heads as usize * self.head_bytes()
    }

    /// Bytes of one block of group `group`.
    ///
    /// # Panics
    /// If `group` is not an index into [`KvLayout::groups`].
    pub fn block_bytes(&self, group: usize) -> usize {
        self.groups[group].layers.len() * self.layer_bytes()
    }

    /// Bytes one token takes over all groups, were no window freed.
    pub fn token_bytes(&self) -> usize {
        self.layers as usize * self.layer_bytes() / self.block_size as usize
    }

    /// Blocks that hold `tokens` positions.
    pub fn blocks_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.block_size)
    }

    /// First ordinal of group `group` that a token at `position` (and later ones)
    /// still needs: 0 for full attention, the window's first block otherwise.
    pub fn first_needed_ordinal(&self, group: usize, position: u32) -> u32 {
        match self.groups[group].kind {
            KvGroupKind::Full => 0,
            KvGroupKind::SlidingWindow { window } => {
                (position + 1).saturating_sub(window) / self.block_size
            }
        }
    }

    /// Whether blocks of `peer` can be read as ours, bit for bit.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] with reason `LAYOUT_MISMATCH`, naming the first
    /// field that differs and both values.
    pub fn check_peer(&self, peer: &Self) -> Result<(), Error> {
        let heads = |layout: &Self| {
            let (heads, of) = layout.heads();
            format!("{}..{} of {of}", heads.start, heads.end)
        };
        let fields: [(&str, String, String); 8] = [
            (
                "block_size",
                self.block_size.to_string(),
                peer.block_size.to_string(),
            ),
            ("kv_dtype", self.dtype.to_string(), peer.dtype.to_string()),
            (
                "scale_group",
                self.scale_group.to_string(),
                peer.scale_group.to_string(),
            ),
            ("layers", self.layers.to_string(), peer.layers.to_string()),
            ("kv_heads", heads(self), heads(peer)),
            (
                "head_dim",
                self.head_dim.to_string(),
                peer.head_dim.to_string(),
            ),
            (
                "groups",
                format!("{:?}", self.groups),
                format!("{:?}", peer.groups),
            ),
            (
                "numerics_id",
                self.numerics.to_string(),
                peer.numerics.to_string(),
            ),
        ];
        for (field, ours, theirs) in fields {
            if ours != theirs {
                let message = format!("this worker has `{ours}`, the peer has `{theirs}`");
                return Err(mismatch(field, message));
            }
        }
        Ok(())
    }

    /// Whether the layout is usable at all (nonzero sizes, a known block size and group
    /// of scales, every layer in exactly one group).
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] naming the field.
    pub fn validate(&self) -> Result<(), Error> {
        if !matches!(self.block_size, 16 | 32 | 64 | 128) {
            return Err(Error::invalid(
                "block_size",
                format!("{} is not one of 16, 32, 64, 128", self.block_size),
            ));
        }
        if self.scale_group != self.dtype.scale_group() {
            return Err(Error::invalid(
                "scale_group",
                format!(
                    "{} is not {}, which {} has",
                    self.scale_group,
                    self.dtype.scale_group(),
                    self.dtype
                ),
            ));
        }
        for (field, value) in [
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("layers", self.layers),
        ] {
            if value == 0 || value > 65_536 {
                return Err(Error::invalid(
                    field,
                    format!("{value} is not in 1..=65536"),
                ));
            }
        }
        let (heads, of) = self.heads();
        if heads.end > of || of > 65_536 {
            return Err(Error::invalid(
                "shard",
                format!("heads {}..{} are not within {of}", heads.start, heads.end),
            ));
        }
        let mut seen = vec![false; self.layers as usize];
        for layer in self.groups.iter().flat_map(|group| &group.layers) {
            match seen.get_mut(*layer as usize) {
                Some(slot) if !*slot => *slot = true,
                _ => {
                    return Err(Error::invalid(
                        "groups",
                        format!(
                            "layer {layer} is listed twice or is not below {}",
                            self.layers
                        ),
                    ));
                }
            }
        }
        if let Some(missing) = seen.iter().position(|seen| !seen) {
            return Err(Error::invalid(
                "groups",
                format!("layer {missing} is in no group"),
            ));
        }
        Ok(())
    }
}

/// Two layouts that do not go together.
pub(crate) fn mismatch(field: &str, message: String) -> Error {
    Error::new(ErrorKind::Unavailable, message)
        .with_field(field)
        .with_reason("LAYOUT_MISMATCH")
}

/// A run of bytes inside a KV pool. Plain numbers: whoever makes one from a live
/// pool keeps the pool alive while it is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ByteExtent {
    /// Byte offset from the start of the registered memory region.
    pub offset: u64,
    pub len: u32,
    /// Which registered region (one per KV group) the offset is in.
    pub region: u16,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout() -> KvLayout {
        KvLayout {
            block_size: 16,
            dtype: KvDtype::F16,
            scale_group: 0,
            kv_heads: 3,
            head_dim: 64,
            layers: 30,
            groups: vec![KvGroup {
                kind: KvGroupKind::Full,
                layers: (0..30).collect(),
            }],
            numerics: NumericsId([0; 16]),
            origin: None,
            shard: None,
        }
    }

    #[test]
    fn smollm2_takes_23040_bytes_a_token() {
        assert_eq!(layout().token_bytes(), 23_040);
        assert_eq!(layout().block_bytes(0), 16 * 23_040);
    }

    #[test]
    fn fewer_bits_take_fewer_bytes() {
        let with = |dtype: KvDtype, head_dim| KvLayout {
            dtype,
            scale_group: dtype.scale_group(),
            head_dim,
            ..layout()
        };
        // 64 or 32 bytes of codes and 4 of scale and minimum, for K and V of 3 heads in 30 layers.
        assert_eq!(with(KvDtype::Int8, 64).token_bytes(), 180 * 68);
        assert_eq!(with(KvDtype::Int4, 64).token_bytes(), 180 * 36);
        // Two groups; three lines of 32 dimensions.
        assert_eq!(with(KvDtype::Int8, 80).token_bytes(), 180 * 88);
        assert_eq!(with(KvDtype::Int4, 80).token_bytes(), 180 * 56);
    }

    #[test]
    fn every_type_is_found_by_its_name() {
        for dtype in KvDtype::ALL {
            assert_eq!(dtype.name().parse::<KvDtype>().unwrap(), dtype);
        }
        let error = "f8".parse::<KvDtype>().unwrap_err();
        assert_eq!(error.field, "kv_dtype");
        assert!(error.message.contains("f32, f16, bf16, int8, int4"));
    }

    #[test]
    fn another_group_of_scales_is_refused() {
        let ours = KvLayout {
            dtype: KvDtype::Int4,
            scale_group: 64,
            ..layout()
        };
        let theirs = KvLayout {
            scale_group: 32,
            ..ours.clone()
        };
        let error = ours.check_peer(&theirs).unwrap_err();
        assert_eq!(error.field, "scale_group");
        assert!(error.message.contains("64") && error.message.contains("32"));
        assert_eq!(theirs.validate().unwrap_err().field, "scale_group");
    }

    #[test]
    fn a_window_needs_only_its_own_blocks() {
        let mut layout = layout();
        layout.groups[0].kind = KvGroupKind::SlidingWindow { window: 32 };
        assert_eq!(layout.first_needed_ordinal(0, 31), 0);
        assert_eq!(layout.first_needed_ordinal(0, 46), 0);
        assert_eq!(layout.first_needed_ordinal(0, 47), 1);
    }

    #[test]
    fn a_mismatch_names_the_field_and_both_values() {
        let peer = KvLayout {
            dtype: KvDtype::F32,
            ..layout()
        };
        let error = layout().check_peer(&peer).unwrap_err();
        assert_eq!(error.field, "kv_dtype");
        assert!(error.message.contains("f16") && error.message.contains("f32"));
    }

    #[test]
    fn a_layer_in_no_group_is_refused() {
        let mut broken = layout();
        broken.groups[0].layers.pop();
        assert_eq!(broken.validate().unwrap_err().field, "groups");
    }
}
