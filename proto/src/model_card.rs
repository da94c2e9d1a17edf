//! What a worker says about the model it serves.

use serde::{Deserialize, Serialize};

use crate::ids::ModelRevision;
use crate::kv_layout::KvLayout;

/// The facts about a served model that routers and peers need.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelCard {
    /// The name clients ask for.
    pub name: String,
    /// Name plus content digest; pools are keyed by it.
    pub revision: ModelRevision,
    /// Architecture family, for people.
    pub architecture: String,
    /// Width of the output matrix; ids at or above the tokenizer's size are masked.
    pub vocab_size: u32,
    /// Token ids the tokenizer knows; never above `vocab_size`.
    pub tokenizer_size: u32,
    /// Longest prompt plus output, in tokens.
    pub context_max: u32,
    pub parameters: u64,
    /// When the model's file was written, in Unix seconds. 0 from older workers, and where it
    /// is not known.
    #[serde(default)]
    pub created: i64,
    /// Bytes of weights read for one decode step.
    pub weight_bytes: u64,
    pub layout: KvLayout,
    /// BLAKE3 of the tokenizer specification (its JSON), so that routers fetch it once.
    pub tokenizer_hash: String,
}
