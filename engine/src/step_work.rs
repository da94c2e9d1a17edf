//! What a step asks of the device, counted from its rows.
//!
//! One count serves MFU and MBU, the prediction of a step's time and the benches.
//! It is what the model needs, not what kernels spend: each weight matrix is read
//! once a step, each sequence's visible K and V once a layer.
//!
//! ```text
//! ModelCost   what one row costs in this model; made once from its configuration and weights
//!   + Row ..  the rows of a step, each added to what was there
//! StepWork    operations and bytes of the step
//! ```
//!
//! Plain numbers: no clock, no device. How long work takes is [`crate::step_time`]'s part.

use baton_kernels::PackedMatrix;
use baton_proto::kv_layout::{KvGroup, KvGroupKind, KvLayout};

use crate::model::{Model, ModelConfig, Weights};

/// A run of consecutive positions of one sequence in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Row {
    /// Absolute position of the first token.
    pub position: u32,
    /// Tokens computed: 1 for decode, a chunk for prefill.
    pub tokens: u32,
    /// How many of them, the last ones, want logits.
    pub logits: u32,
}

impl Row {
    /// One token at `position`, whose successor is drawn.
    pub const fn decode(position: u32) -> Self {
        Self {
            position,
            tokens: 1,
            logits: 1,
        }
    }

    /// `tokens` of a prompt from `position` on; `is_last` if a token is drawn after them.
    pub const fn prefill(position: u32, tokens: u32, is_last: bool) -> Self {
        Self {
            position,
            tokens,
            logits: is_last as u32,
        }
    }
}

/// What a step asks of the device. The default is an empty step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepWork {
    /// Tokens computed.
    pub tokens: u64,
    /// Tokens whose logits are wanted.
    pub logits: u64,
    /// Runs of positions: sequences, as a step holds one row of each.
    pub sequences: u64,
    /// Bytes of the weight matrices that any token goes through, each once.
    pub weight_bytes: u64,
    /// Operations of matrix products, a multiply-add counting 2.
    pub product_ops: u64,
    /// Operations of attention: a product for the score and one for the sum per query
    /// head, dimension and visible position.
    pub attention_ops: u64,
    /// Bytes of K and V: each sequence's visible positions once a layer, and what is stored.
    pub kv_bytes: u64,
}

impl StepWork {
    /// All operations: what MFU is about.
    pub fn ops(&self) -> u64 {
        self.product_ops.saturating_add(self.attention_ops)
    }

    /// All bytes: what MBU is about.
    pub fn bytes(&self) -> u64 {
        self.weight_bytes.saturating_add(self.kv_bytes)
    }
}

/// Bytes and shape of one weight matrix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MatrixCost {
    /// Bytes one pass reads.
    pub bytes: u64,
    pub outputs: u64,
    pub inputs: u64,
    /// Outputs whose products are of integers; the others' are of floats.
    pub integer_outputs: u64,
}

impl MatrixCost {
    /// The cost of a matrix as the CPU's kernels hold it.
    pub fn of(matrix: &PackedMatrix) -> Self {
        Self {
            bytes: matrix.bytes() as u64,
            outputs: matrix.rows() as u64,
            inputs: matrix.cols() as u64,
            integer_outputs: matrix.integer_rows() as u64,
        }
    }
}

/// Matrices that the same rows go through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Products {
    bytes: u64,
    ops_per_row: u64,
    integer_ops_per_row: u64,
}

impl Products {
    fn add(&mut self, matrix: MatrixCost) {
        self.bytes += matrix.bytes;
        self.ops_per_row += 2 * matrix.outputs * matrix.inputs;
        self.integer_ops_per_row += 2 * matrix.integer_outputs * matrix.inputs;
    }
}

/// The layers of one KV group.
#[derive(Clone, Debug, PartialEq, Eq)]
struct GroupCost {
    /// Positions a query sees at most; more than there are where attention is full.
    window: u64,
    layers: u64,
    /// Whether the model's last layer is one of them; its queries are those of the
    /// rows that want logits.
    holds_last: bool,
}

/// What a row costs in one model with one KV layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelCost {
    /// What every row goes through.
    body: Products,
    /// What only rows that want logits go through: the last layer behind the storing
    /// of K and V, and the output head.
    tail: Products,
    groups: Vec<GroupCost>,
    /// Per query, layer and visible position.
    attention_ops: u64,
    /// K and V of one position in one layer.
    position_bytes: u64,
}

impl ModelCost {
    /// The cost of a loaded model whose K and V are stored as `layout` says.
    pub fn of_model(model: &Model, layout: &KvLayout) -> Self {
        let position_bytes = layout.layer_bytes() / layout.block_size.max(1) as usize;
        let (config, weights) = (model.config(), model.weights());
        Self::new(config, weights, position_bytes as u64, MatrixCost::of)
    }

    /// As [`of_model`](Self::of_model), over any backend's matrices. `position_bytes`:
    /// K and V of one position in one layer.
    pub fn new<M, V, R>(
        config: &ModelConfig,
        weights: &Weights<M, V, R>,
        position_bytes: u64,
        measure: impl Fn(&M) -> MatrixCost,
    ) -> Self {
        let (mut body, mut tail) = (Products::default(), Products::default());
        for (index, layer) in weights.layers.iter().enumerate() {
            body.add(measure(&layer.qkv));
            let is_last = index + 1 == weights.layers.len();
            let behind = if is_last { &mut tail } else { &mut body };
            behind.add(measure(&layer.attention_output));
            behind.add(measure(&layer.gate_up));
            behind.add(measure(&layer.down));
        }
        tail.add(measure(weights.head()));
        let last = weights.layers.len() as u32;
        let group = |group: KvGroup| GroupCost {
            window: match group.kind {
                KvGroupKind::Full => u64::MAX,
                KvGroupKind::SlidingWindow { window } => window.into(),
            },
            layers: group.layers.len() as u64,
            holds_last: group.layers.last().is_some_and(|layer| layer + 1 == last),
        };
        Self {
            body,
            tail,
            groups: config.kv_groups().into_iter().map(group).collect(),
            attention_ops: 4 * config.q_width() as u64,
            position_bytes,
        }
    }

    /// Share of the matrix products' operations that are of integers, 0 to 1.
    pub fn integer_share(&self) -> f64 {
        let all = self.body.ops_per_row + self.tail.ops_per_row;
        let integer = self.body.integer_ops_per_row + self.tail.integer_ops_per_row;
        integer as f64 / all.max(1) as f64
    }

    /// Bytes of all weight matrices that a decode step reads.
    pub fn weight_bytes(&self) -> u64 {
        self.body.bytes + self.tail.bytes
    }

    /// The work of a step with these rows.
    pub fn step(&self, rows: impl IntoIterator<Item = Row>) -> StepWork {
        let mut work = StepWork::default();
        for row in rows {
            self.add(&mut work, row);
        }
        work
    }

    /// Adds one more row to a step. A row without tokens adds nothing; of a row that
    /// wants more logits than it has tokens all count.
    pub fn add(&self, work: &mut StepWork, row: Row) {
        if row.tokens == 0 {
            return;
        }
        let (tokens, logits) = (u64::from(row.tokens), u64::from(row.logits.min(row.tokens)));
        work.sequences += 1;
        if work.tokens == 0 {
            work.weight_bytes += self.body.bytes;
        }
        if work.logits == 0 && logits > 0 {
            work.weight_bytes += self.tail.bytes;
        }
        work.tokens += tokens;
        work.logits += logits;
        work.product_ops += tokens * self.body.ops_per_row + logits * self.tail.ops_per_row;
        let position = u64::from(row.position);
        for group in &self.groups {
            let last = u64::from(group.holds_last);
            let seen = group.seen(position, tokens) * (group.layers - last)
                + group.seen(position + tokens - logits, logits) * last;
            let ops = self.attention_ops.saturating_mul(seen);
            work.attention_ops = work.attention_ops.saturating_add(ops);
            let moved = (group.read(position, tokens) + tokens) * group.layers;
            let bytes = self.position_bytes.saturating_mul(moved);
            work.kv_bytes = work.kv_bytes.saturating_add(bytes);
        }
    }
}

impl GroupCost {
    /// Positions that `tokens` queries from `position` on see, added up.
    fn seen(&self, position: u64, tokens: u64) -> u64 {
        // A query at `p` sees `p + 1` positions, or its window's. The first `short`
        // queries see less than a window.
        let short = self.window.saturating_sub(position).min(tokens);
        short * position + short * (short + 1) / 2 + (tokens - short) * self.window
    }

    /// Distinct positions that `tokens` queries from `position` on see.
    fn read(&self, position: u64, tokens: u64) -> u64 {
        position + tokens - (position + 1).saturating_sub(self.window)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two full layers and two with a window of 4; the last of all has the window.
    fn model() -> ModelCost {
        ModelCost {
            body: Products {
                bytes: 1000,
                ops_per_row: 20,
                integer_ops_per_row: 20,
            },
            tail: Products {
                bytes: 300,
                ops_per_row: 6,
                integer_ops_per_row: 0,
            },
            groups: vec![
                GroupCost {
                    window: u64::MAX,
                    layers: 2,
                    holds_last: false,
                },
                GroupCost {
                    window: 4,
                    layers: 2,
                    holds_last: true,
                },
            ],
            attention_ops: 8,
            position_bytes: 16,
        }
    }

    #[test]
    fn weights_are_read_once_whatever_the_rows() {
        let one = model().step([Row::decode(9)]);
        let three = model().step([Row::decode(9); 3]);
        assert_eq!((one.weight_bytes, three.weight_bytes), (1300, 1300));
        assert_eq!((one.product_ops, three.product_ops), (26, 3 * 26));
        assert_eq!(three.kv_bytes, 3 * one.kv_bytes);
        assert_eq!((three.tokens, three.logits, three.sequences), (3, 3, 3));
    }

    #[test]
    fn a_chunk_without_logits_stops_behind_the_last_layers_keys_and_values() {
        let work = model().step([Row::prefill(0, 5, false)]);
        assert_eq!((work.weight_bytes, work.product_ops), (1000, 100));
        // Two full layers and one with a window: the last computes no attention.
        let (full, window) = (1 + 2 + 3 + 4 + 5, 1 + 2 + 3 + 4 + 4);
        assert_eq!(work.attention_ops, 8 * (2 * full + window));
        assert_eq!(model().step([]), StepWork::default());
    }

    #[test]
    fn a_prompt_cut_into_chunks_asks_for_the_same_attention() {
        let whole = model().step([Row::prefill(0, 23, false)]);
        let cut = [(0, 7), (7, 1), (8, 15)].map(|(at, tokens)| {
            let work = model().step([Row::prefill(at, tokens, false)]);
            (work.attention_ops, work.product_ops)
        });
        let sum = cut.iter().fold((0, 0), |(a, p), (x, y)| (a + x, p + y));
        assert_eq!(sum, (whole.attention_ops, whole.product_ops));
    }

    #[test]
    fn a_window_bounds_what_is_seen_and_read() {
        let [near, far] = [50, 5000].map(|position| model().step([Row::decode(position)]));
        // Two full layers see the difference, the windows do not.
        assert_eq!(far.attention_ops - near.attention_ops, 8 * 2 * 4950);
        assert_eq!(far.kv_bytes - near.kv_bytes, 16 * 2 * 4950);
    }
}
