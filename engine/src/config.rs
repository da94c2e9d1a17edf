//! How one engine is set up. Plain data; the binary's typed configuration fills it.

use std::time::Duration;

use baton_proto::kv_layout::{KvDtype, KvGroup, KvGroupKind, KvLayout};
use baton_proto::name::check_name;

use crate::kv::PoolSharing;

/// What an engine is for. It decides the scheduling policy and the accepted work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Accepts `Prefill`: chunks, shortest remaining prompt first with ageing.
    Prefill,
    /// Accepts `Local` and `Receive`: continuous batching with preemption.
    Decode,
}

/// How large the KV pools are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolSize {
    /// Room for this many tokens in the full-attention groups.
    Tokens(u32),
    /// At most this many bytes over all groups.
    Bytes(u64),
}

/// The settings of one engine.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    pub role: Role,
    /// The name clients ask for.
    pub model_name: String,
    /// Positions in a KV block: 16, 32, 64 or 128.
    pub block_size: u32,
    pub kv_dtype: KvDtype,
    pub pool: PoolSize,
    /// Who can read the pools' memory. Default private.
    pub pool_sharing: PoolSharing,
    /// Longest prompt plus output; never above the model's own. `None` takes the model's.
    pub context_max: Option<u32>,
    pub limits: Limits,
    /// Whether finished blocks stay for later requests with the same prefix.
    pub prefix_cache: bool,
    /// Cores the engine's threads are pinned to; empty leaves them to the system.
    pub cores: Vec<usize>,
    /// Threads of the kernels, the engine's own included. At least 1.
    pub threads: usize,
    /// Instruction set of the kernels; `None` takes the best there is. All give the
    /// same bits, so this is for tests and measurements.
    pub isa: Option<baton_kernels::Isa>,
}

/// The bounds the scheduler works within.
#[derive(Clone, Debug, PartialEq)]
pub struct Limits {
    /// Prompt tokens computed in one step, over all sequences.
    pub chunk_tokens: u32,
    /// Tokens computed in one step, decode rows included; at least `sequences_max + 1`.
    pub step_tokens_max: u32,
    /// Sequences that hold blocks at a time. A request counts once per choice.
    pub sequences_max: u32,
    /// Requests that wait for their first block. One more is refused as overloaded.
    pub queue_requests_max: u32,
    /// Prompt tokens of all waiting requests. More is refused as overloaded, except
    /// that one request may always wait.
    pub queue_tokens_max: u32,
    /// Blocks each choice of a reservation is promised beyond its prompt.
    pub growth_blocks: u32,
    /// Longest gap between two tokens of a stream that a decode engine plans its steps
    /// for; requests may ask for less. `None` fills every step as far as it goes.
    pub itl_target: Option<Duration>,
    /// Prompt tokens by which a waiting prefill's rank improves per second of waiting.
    pub ageing_tokens_per_second: u32,
    /// Commands that may wait for the engine before submissions are refused.
    pub commands_max: usize,
    /// The hint given with an overload.
    pub retry_after: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            // A few hundred tokens amortise the weights of small models on a core;
            // more only lengthens the gap other streams see.
            chunk_tokens: 256,
            step_tokens_max: 512,
            sequences_max: 64,
            queue_requests_max: 256,
            queue_tokens_max: 1 << 20,
            growth_blocks: 4,
            itl_target: None,
            ageing_tokens_per_second: 1024,
            commands_max: 1024,
            retry_after: Duration::from_secs(1),
        }
    }
}

impl EngineConfig {
    /// Sensible settings for `role`: 16-token f16 blocks, 32 Ki tokens of pool.
    pub fn new(role: Role, model_name: impl Into<String>) -> Self {
        Self {
            role,
            model_name: model_name.into(),
            block_size: 16,
            kv_dtype: KvDtype::F16,
            pool: PoolSize::Tokens(32 * 1024),
            pool_sharing: PoolSharing::Private,
            context_max: None,
            limits: Limits::default(),
            prefix_cache: true,
            cores: Vec::new(),
            threads: 1,
            isa: None,
        }
    }

    /// Checks what can be checked without a model.
    ///
    /// # Errors
    /// [`baton_proto::ErrorKind::Invalid`] naming the field, the value and what is allowed.
    pub fn validate(&self) -> Result<(), baton_proto::Error> {
        let refuse =
            |field: &str, message: String| Err(baton_proto::Error::invalid(field, message));
        check_name("model_name", &self.model_name)?;
        if !matches!(self.block_size, 16 | 32 | 64 | 128) {
            return refuse(
                "block_size",
                format!("{} is not one of 16, 32, 64, 128", self.block_size),
            );
        }
        if matches!(self.pool, PoolSize::Tokens(0) | PoolSize::Bytes(0)) {
            return refuse(
                "pool",
                "0 is not allowed, the least is one block".to_owned(),
            );
        }
        if self.context_max == Some(0) {
            return refuse("context_max", "0 is not allowed, the least is 1".to_owned());
        }
        if self.threads == 0 {
            return refuse("threads", "0 is not allowed, the least is 1".to_owned());
        }
        if self.role == Role::Prefill && self.limits.itl_target.is_some() {
            return refuse(
                "itl_target_ms",
                "a prefill engine makes no streams to keep within it".to_owned(),
            );
        }
        self.limits.validate()
    }

    /// Blocks of each group's pool for `groups` under `self.pool`.
    ///
    /// A window group gets what `sequences_max` sequences can hold at a time, plus as
    /// much again for cached prefixes, but never more than a full group.
    pub fn pool_blocks(&self, layout: &KvLayout) -> Vec<u32> {
        let full =
            |tokens: u64| (tokens / u64::from(self.block_size)).clamp(1, u64::from(u32::MAX / 2));
        let sized = |full_blocks: u64| -> Vec<u32> {
            let blocks = |group: &KvGroup| match group.kind {
                KvGroupKind::Full => full_blocks as u32,
                KvGroupKind::SlidingWindow { window } => {
                    let held = window_blocks(window, self.limits.chunk_tokens, self.block_size);
                    let wanted = 2 * u64::from(held) * u64::from(self.limits.sequences_max);
                    wanted.min(full_blocks.max(u64::from(held))) as u32
                }
            };
            layout.groups.iter().map(blocks).collect()
        };
        match self.pool {
            PoolSize::Tokens(tokens) => sized(full(u64::from(tokens))),
            PoolSize::Bytes(bytes) => {
                let cost = |blocks: &[u32]| -> u64 {
                    (0..blocks.len())
                        .map(|group| u64::from(blocks[group]) * layout.block_bytes(group) as u64)
                        .sum()
                };
                // The cost grows with the size of the full groups, so bisection finds the largest that fits.
                let (mut low, mut high) = (1, u64::from(u32::MAX / 2));
                while low < high {
                    let middle = (low + high).div_ceil(2);
                    if cost(&sized(middle)) <= bytes {
                        low = middle;
                    } else {
                        high = middle - 1;
                    }
                }
                sized(low)
            }
        }
    }
}

impl Limits {
    fn validate(&self) -> Result<(), baton_proto::Error> {
        for (field, value) in [
            ("chunk_tokens", self.chunk_tokens),
            ("sequences_max", self.sequences_max),
            ("queue_requests_max", self.queue_requests_max),
        ] {
            if value == 0 || value > 1 << 20 {
                return Err(baton_proto::Error::invalid(
                    field,
                    format!("{value} is not in 1..=1048576"),
                ));
            }
        }
        if self.step_tokens_max <= self.sequences_max {
            return Err(baton_proto::Error::invalid(
                "step_tokens_max",
                format!(
                    "{} is not above sequences_max {}",
                    self.step_tokens_max, self.sequences_max
                ),
            ));
        }
        if let Some(target) = self.itl_target {
            let (ms, allowed) = (target.as_nanos() as f64 / 1e6, baton_proto::limits::ITL_MS);
            if !allowed.contains(&ms) {
                let (least, most) = (allowed.start(), allowed.end());
                return Err(baton_proto::Error::invalid(
                    "itl_target_ms",
                    format!("{ms} is not in {least}..={most}"),
                ));
            }
        }
        if self.commands_max == 0 {
            return Err(baton_proto::Error::invalid(
                "commands_max",
                "0 is not allowed, the least is 1",
            ));
        }
        Ok(())
    }
}

/// Blocks a sequence holds at most in a window group while it computes chunks of
/// `chunk` tokens: the run `(p - window, p + chunk)` and one more for its alignment.
pub fn window_blocks(window: u32, chunk: u32, block_size: u32) -> u32 {
    (u64::from(window) + u64::from(chunk))
        .div_ceil(u64::from(block_size))
        .min(u64::from(u32::MAX / 2)) as u32
        + 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_proto::NumericsId;

    fn layout() -> KvLayout {
        KvLayout {
            block_size: 16,
            dtype: KvDtype::F16,
            scale_group: 0,
            kv_heads: 1,
            head_dim: 16,
            layers: 4,
            groups: vec![
                KvGroup {
                    kind: KvGroupKind::Full,
                    layers: vec![0],
                },
                KvGroup {
                    kind: KvGroupKind::SlidingWindow { window: 32 },
                    layers: vec![1, 2, 3],
                },
            ],
            numerics: NumericsId([0; 16]),
            origin: None,
            shard: None,
        }
    }

    #[test]
    fn a_byte_budget_is_used_but_not_exceeded() {
        let mut config = EngineConfig::new(Role::Decode, "m");
        config.limits.sequences_max = 4;
        config.limits.chunk_tokens = 16;
        config.pool = PoolSize::Bytes(1 << 20);
        let layout = layout();
        let blocks = config.pool_blocks(&layout);
        let bytes: usize = (0..2)
            .map(|group| blocks[group] as usize * layout.block_bytes(group))
            .sum();
        assert!(
            bytes <= 1 << 20 && bytes + layout.block_bytes(0) + layout.block_bytes(1) > 1 << 20
        );
        assert_eq!(blocks[1], 2 * 4 * 4);
    }

    #[test]
    fn wrong_values_are_refused_by_name() {
        let field = |change: fn(&mut EngineConfig)| {
            let mut config = EngineConfig::new(Role::Decode, "m");
            change(&mut config);
            config.validate().unwrap_err().field
        };
        assert!(EngineConfig::new(Role::Prefill, "m").validate().is_ok());
        assert_eq!(field(|c| c.block_size = 24), "block_size");
        assert_eq!(field(|c| c.pool = PoolSize::Tokens(0)), "pool");
        assert_eq!(field(|c| c.threads = 0), "threads");
        assert_eq!(field(|c| c.limits.chunk_tokens = 0), "chunk_tokens");
        assert_eq!(field(|c| c.limits.step_tokens_max = 64), "step_tokens_max");
        assert_eq!(
            field(|c| c.limits.itl_target = Some(Duration::ZERO)),
            "itl_target_ms"
        );
    }
}
