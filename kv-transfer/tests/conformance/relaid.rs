//! Worlds whose prefill workers hold all KV heads and whose decode worker holds some of
//! them: every part is re-laid out on arrival.
//!
//! ```text
//! sent      | K head 0 | K head 1 | K head 2 | V head 0 | V head 1 | V head 2 |
//! kept                 | K head 1 | K head 2 |          | V head 1 | V head 2 |
//! ```
//! In worlds of odd seeds parts have another form on the wire as well: every second byte,
//! which the decode worker doubles.

use std::sync::Arc;

use baton_kv_transfer::Opening;
use baton_kv_transfer::receiver::{Convert, OtherLayouts, Senders};
use baton_kv_transfer::sender::WireForm;
use baton_proto::kv_layout::{KvDtype, KvGroup, KvGroupKind, KvLayout, KvOrigin, KvShard};
use baton_proto::relayout::{KvRun, Relayout};
use baton_proto::{Error, NumericsId};

/// Seeds from here on are of such worlds.
pub const SEEDS: u64 = 1 << 32;

/// Both layouts.
#[derive(Clone)]
pub struct Relaid {
    pub sender: KvLayout,
    pub receiver: KvLayout,
    /// What parts are on the wire.
    pub form: Option<WireForm>,
}

/// Every second byte of whole parts.
struct Halving;

impl Convert for Halving {
    fn convert(&self, source: &[u8], target: &mut [u8], _: KvRun) {
        for (byte, pair) in target.iter_mut().zip(source.chunks_exact(2)) {
            *byte = pair[0];
        }
    }
}

/// Every byte of a run twice.
struct Doubling(Relayout);

impl Convert for Doubling {
    fn convert(&self, source: &[u8], target: &mut [u8], run: KvRun) {
        let (from, to) = (self.0.sender(), self.0.receiver());
        for kv in 0..2 {
            for head in 0..run.heads {
                let at = |layout: &KvLayout, first: u32, span: u32| {
                    (kv * layout.kv_heads + first + head) as usize * layout.head_bytes()
                        + span as usize * layout.span_bytes()
                };
                let len = run.spans as usize * from.span_bytes();
                let source = &source[at(from, run.from_head, run.from_span)..][..len];
                let target = &mut target[at(to, run.to_head, run.to_span)..][..2 * len];
                for (pair, byte) in target.chunks_exact_mut(2).zip(source) {
                    pair.fill(*byte);
                }
            }
        }
    }
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
        Self {
            sender,
            receiver,
            form: None,
        }
    }

    /// The same workers with half the bytes between them.
    pub fn on_wire(self) -> Self {
        let layout = |layout: KvLayout, dtype: KvDtype| KvLayout {
            dtype,
            numerics: NumericsId::derive(&[dtype.name().as_bytes()]),
            origin: Some(KvOrigin {
                model: "m".to_owned(),
                weights: "w".to_owned(),
                rope: "r".to_owned(),
                arithmetic: "a".to_owned(),
            }),
            ..layout
        };
        let form = layout(self.sender.clone(), KvDtype::F16);
        let sender = layout(self.sender, KvDtype::F32);
        let relayout = Relayout::between(&sender, &form).unwrap();
        Self {
            form: Some(WireForm::new(&relayout, Arc::new(Halving)).unwrap()),
            receiver: layout(self.receiver, KvDtype::F32),
            sender,
        }
    }

    pub fn opening(&self) -> Opening {
        Opening::towards(&self.sender, &self.receiver)
    }

    pub fn others(&self) -> OtherLayouts {
        OtherLayouts {
            own: self.receiver.clone(),
            converters: Arc::new(|relayout| match relayout.sender().dtype {
                KvDtype::F16 => Ok(Box::new(Doubling(relayout.clone()))),
                _ => Err(Error::invalid("kv_dtype", "nothing else is converted here")),
            }),
        }
    }

    /// Who may fill a grant of blocks up to `last`.
    pub fn senders(&self, last: u32) -> Senders {
        Senders::AnyLayout {
            tokens: (last + 1) * self.receiver.block_size,
            exact: self.form.is_none(),
        }
    }

    /// What is kept of a part that is sent.
    pub fn kept(&self, sent: &[u8]) -> Vec<u8> {
        let head = self.sender.head_bytes();
        let mut kept = [&sent[head..3 * head], &sent[4 * head..]].concat();
        if self.form.is_some() {
            kept.chunks_exact_mut(2).for_each(|pair| pair[1] = pair[0]);
        }
        kept
    }
}
