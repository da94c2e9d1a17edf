//! The name of a prefix's KV: a keyed, chained hash per fixed 16-token span.
//!
//! `hash(i) = BLAKE3_key(hash(i−1) ‖ tokens of span i)`, whatever the physical
//! block size; the key is derived from everything else that decides the bytes of
//! a block or who may see them: tenant salt, numerics id, adapter. So two tenants
//! never share an entry, and a worker with other arithmetic never hits.
//!
//! A physical block of `block_size` tokens is named by the hash of its last span.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ids::{NumericsId, TokenId};
use crate::kv_layout::SPAN_TOKENS;

/// The chained hash of one span.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct BlockHash(pub [u8; 16]);

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in &self.0[..6] {
            write!(f, "{byte:02x}")?;
        }
        f.write_str("..")
    }
}

/// Makes the hashes of one (tenant, numerics id, adapter) domain.
#[derive(Clone)]
pub struct BlockHasher {
    key: [u8; 32],
}

impl fmt::Debug for BlockHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BlockHasher { key: .. }")
    }
}

impl BlockHasher {
    /// A hasher for `salt` (per tenant), the numerics id and an adapter name ("" for none).
    pub fn new(salt: &[u8], numerics: NumericsId, adapter: &str) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("baton.v1 block hash");
        for part in [salt, &numerics.0, adapter.as_bytes()] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        Self {
            key: *hasher.finalize().as_bytes(),
        }
    }

    /// The hash of the span `tokens` after the span named `parent`.
    pub fn next(&self, parent: Option<BlockHash>, tokens: &[TokenId]) -> BlockHash {
        debug_assert_eq!(tokens.len(), SPAN_TOKENS as usize);
        let mut bytes = [0_u8; 16 + 4 * SPAN_TOKENS as usize];
        if let Some(parent) = parent {
            bytes[..16].copy_from_slice(&parent.0);
        }
        for (slot, token) in bytes[16..].chunks_exact_mut(4).zip(tokens) {
            slot.copy_from_slice(&token.to_le_bytes());
        }
        let digest = blake3::keyed_hash(&self.key, &bytes);
        let mut hash = [0; 16];
        hash.copy_from_slice(&digest.as_bytes()[..16]);
        BlockHash(hash)
    }

    /// The hashes of every whole span of `tokens`, in order.
    pub fn spans(&self, tokens: &[TokenId]) -> Vec<BlockHash> {
        let mut parent = None;
        tokens
            .chunks_exact(SPAN_TOKENS as usize)
            .map(|span| {
                let hash = self.next(parent, span);
                parent = Some(hash);
                hash
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_is_named_by_its_whole_prefix_and_its_domain() {
        let numerics = NumericsId([7; 16]);
        let a = BlockHasher::new(b"tenant-a", numerics, "");
        let b = BlockHasher::new(b"tenant-b", numerics, "");
        let tokens: Vec<u32> = (0..48).collect();
        let mut other = tokens.clone();
        other[0] = 99;
        let (x, y) = (a.spans(&tokens), a.spans(&other));
        assert_eq!(x.len(), 3);
        assert!(x.iter().zip(&y).all(|(x, y)| x != y));
        assert_ne!(x, b.spans(&tokens));
        assert_eq!(x[..2], a.spans(&tokens[..47])[..]);
    }
}
