//! Worlds whose prefill workers hold all KV heads and whose decode worker holds some of
//! them: every part is re-laid out on arrival.
//!
//! ```text
//! sent      | K head 0 | K head 1 | K head 2 | V head 0 | V head 1 | V head 2 |
//! kept                 | K head 1 | K head 2 |          | V head 1 | V head 2 |
//! ```

use std::sync::Arc;

use baton_kv_transfer::Opening;
use baton_kv_transfer::receiver::{OtherLayouts, Senders};
use baton_proto::kv_layout::{KvDtype, KvGroup, KvGroupKind, KvLayout, KvShard};
use baton_proto::{Error, NumericsId};

/// Seeds from here on are of such worlds.
pub const SEEDS: u64 = 1 << 32;

/// Both layouts.
#[derive(Clone)]
pub struct Relaid {
    pub sender: KvLayout,
    pub receiver: KvLayout,
}

impl Relaid {
    pub fn new(layers: u32, block_size: u32) -> Self {
        let sender = KvLayout {
            block_size,
            dtype: KvDtype::F16,
            scale_group: 0,
            kv_heads: 3,
            head_dim: 16,
            layers,
            groups: vec![KvGroup {
                kind: KvGroupKind::Full,
                layers: (0..layers).collect(),
            }],
            numerics: NumericsId([1; 16]),
            origin: None,
            shard: None,
        };
        let receiver = KvLayout {
            kv_heads: 2,
            shard: Some(KvShard {
                first_head: 1,
                model_heads: 3,
            }),
            ..sender.clone()
        };
        Self { sender, receiver }
    }

    pub fn opening(&self) -> Opening {
        Opening::towards(&self.sender, &self.receiver)
    }

    pub fn others(&self) -> OtherLayouts {
        OtherLayouts {
            own: self.receiver.clone(),
            converters: Arc::new(|_| Err(Error::invalid("kv_dtype", "nothing is converted here"))),
        }
    }

    /// Who may fill a grant of blocks up to `last`.
    pub fn senders(&self, last: u32) -> Senders {
        Senders::AnyLayout {
            tokens: (last + 1) * self.receiver.block_size,
            exact: true,
        }
    }

    /// What is kept of a part that is sent.
    pub fn kept(&self, sent: &[u8]) -> Vec<u8> {
        let head = self.sender.head_bytes();
        [&sent[head..3 * head], &sent[4 * head..]].concat()
    }
}
