//! One transformer decoder, driven by a [`ModelConfig`], over a [`Backend`].
//!
//! [`DecoderExecutor`] runs step plans: `submit` checks a plan and lays its rows
//! out, each `poll` computes one layer, the last one the logits. Every row of a
//! step, prefill chunk or single decode token, goes through the same operations.
//!
//! ```text
//! x = embed(tokens)
//! per layer:
//!   q k v = rope(qk_norm(qkv(norm(x))));  store k, v;  x += post(o(attention(q)))
//!   x += post(down(act(gate(norm(x))) * up(norm(x))))
//! logits = soft_cap(head(norm(x)))            rows that want them, or which id has the highest
//! ```
//!
//! K and V are stored before the layer's attention, which therefore reads a chunk's
//! own positions as stored, like everyone else's. In the last layer only rows that
//! want logits go on behind the storing of K and V; for a prefill chunk that is one
//! row or none.
//!
//! Not here: what to compute (the scheduler), which blocks (the pool), sampling.

mod layout;

use std::sync::Arc;

use baton_kernels::Kernels;
use baton_proto::kv_layout::KvGroup;

use crate::backend::{
    AttentionShape, Backend, CpuBackend, HeadShape, Input, KvLayer, Output, Queries,
};
use crate::kv::KvMemory;
use crate::model::{LayerWeights, Model, ModelConfig, Weights};
use crate::step::{Error, Executor, StepEvent, StepId, StepOutput, StepPlan};
use crate::step_clock::{Calibrated, StepClock};
use crate::step_time::DeviceRates;
use crate::step_work::{ModelCost, StepWork};
use layout::StepRows;

pub use layout::Pools;

/// Runs plans of one model on one backend, one at a time.
pub struct DecoderExecutor<B: Backend> {
    config: ModelConfig,
    weights: Arc<Weights<B::Matrix, B::Vector, B::Rope>>,
    backend: B,
    cost: ModelCost,
    /// Where the foretelling of step times starts from.
    rates: DeviceRates,
    pools: Pools,
    kv_groups: Vec<KvGroup>,
    /// Per model layer.
    places: Vec<KvLayer>,
    buffers: Buffers<B::Buffer>,
    rows: StepRows,
    step: Option<Step>,
    steps: u64,
    /// The output of an earlier step, for its buffers.
    spare: StepOutput,
}

/// A step in flight.
struct Step {
    /// Layers done.
    layers: usize,
    /// Rows that `x` holds: all, then those that want logits.
    live: usize,
    work: StepWork,
}

/// Activations, sized once for the largest step.
struct Buffers<T> {
    /// The residual stream, and the same again for its last rows.
    x: T,
    x_last: T,
    /// What a layer's part adds, where it is normed first.
    y: T,
    qkv: T,
    qkv_last: T,
    attention: T,
    gate_up: T,
}

/// The executor of the CPU backend.
pub type CpuExecutor = DecoderExecutor<CpuBackend>;

impl CpuExecutor {
    /// An executor of `model` that stores K and V in `memory` and never computes more
    /// than `step_tokens_max` tokens in one step.
    ///
    /// # Errors
    /// [`Error::Device`] where the memory was laid out for another model.
    pub fn new(
        model: &Arc<Model>,
        memory: Arc<KvMemory>,
        kernels: Kernels,
        step_tokens_max: usize,
    ) -> Result<Self, Error> {
        let layout = memory.layout();
        let ours = model.kv_layout(layout.block_size, layout.dtype);
        if *layout != ours {
            return Err(Error::Device(format!(
                "the KV memory was laid out as {layout:?}, the model needs {ours:?}"
            )));
        }
        let pools = Pools {
            block_size: layout.block_size,
            position_bytes: layout.layer_bytes() / layout.block_size as usize,
            blocks: (0..layout.groups.len())
                .map(|group| memory.blocks(group))
                .collect(),
        };
        let rates = DeviceRates::assumed(kernels.threads());
        let executor = Self::with_backend(
            model.config().clone(),
            Arc::clone(model.weights()),
            CpuBackend::new(kernels, memory),
            pools,
            step_tokens_max,
        );
        Ok(Self { rates, ..executor })
    }
}

impl<B: Backend> DecoderExecutor<B> {
    /// An executor over any backend; `pools` describes the KV pools it stores to, one
    /// per group of [`ModelConfig::kv_groups`].
    pub fn with_backend(
        config: ModelConfig,
        weights: Arc<Weights<B::Matrix, B::Vector, B::Rope>>,
        backend: B,
        pools: Pools,
        step_tokens_max: usize,
    ) -> Self {
        let groups = config.kv_groups();
        let mut places = vec![KvLayer { group: 0, index: 0 }; config.layers.len()];
        for (group, layers) in groups.iter().enumerate() {
            for (index, layer) in layers.layers.iter().enumerate() {
                places[*layer as usize] = KvLayer { group, index };
            }
        }
        let rows = step_tokens_max;
        let allocate = |width| backend.allocate(rows, width);
        let buffers = Buffers {
            x: allocate(config.hidden),
            x_last: allocate(config.hidden),
            y: allocate(config.hidden),
            qkv: allocate(config.qkv_width()),
            qkv_last: allocate(config.qkv_width()),
            attention: allocate(config.q_width()),
            gate_up: allocate(2 * config.ffn),
        };
        let position_bytes = pools.position_bytes as u64;
        let cost = ModelCost::new(&config, &weights, position_bytes, |matrix| {
            backend.matrix_cost(matrix)
        });
        Self {
            cost,
            rates: DeviceRates::assumed(1),
            rows: StepRows::new(step_tokens_max, groups.len()),
            config,
            weights,
            backend,
            pools,
            kv_groups: groups,
            places,
            buffers,
            step: None,
            steps: 0,
            spare: StepOutput::default(),
        }
    }

    /// The same with measured limits to foretell its steps from.
    pub fn with_rates(self, rates: DeviceRates) -> Self {
        Self { rates, ..self }
    }

    /// What rows cost in this executor's model.
    pub fn cost(&self) -> &ModelCost {
        &self.cost
    }

    /// Computes layer `index` for the `live` rows of the step; returns how many rows
    /// go on to the next.
    fn layer(&mut self, index: usize, mut live: usize) -> usize {
        let weights = Arc::clone(&self.weights);
        let layer = &weights.layers[index];
        let is_last = index + 1 == self.config.layers.len();

        self.qkv(layer, index, &weights.ropes, live);
        let wanted = self.rows.wanted();
        let compacts = is_last && wanted.len() < live;
        if compacts {
            live = wanted.len();
            let buffers = &mut self.buffers;
            self.backend
                .gather_rows(&buffers.x, wanted, &mut buffers.x_last);
            self.backend
                .gather_rows(&buffers.qkv, wanted, &mut buffers.qkv_last);
            std::mem::swap(&mut buffers.x, &mut buffers.x_last);
            std::mem::swap(&mut buffers.qkv, &mut buffers.qkv_last);
        }
        if live > 0 {
            self.attention(layer, index, compacts, live);
            self.feed_forward(layer, live);
        }
        live
    }

    /// Queries, keys and values of every row; keys and values are stored.
    fn qkv(
        &mut self,
        layer: &LayerWeights<B::Matrix, B::Vector>,
        index: usize,
        ropes: &[B::Rope],
        rows: usize,
    ) {
        let (config, buffers, backend) = (&self.config, &mut self.buffers, &mut self.backend);
        let shape = head_shape(config);
        let place = self.places[index];
        let eps = config.norm_eps;
        let input = Input::Normed {
            x: &buffers.x,
            weight: &layer.attention_norm,
            eps,
        };
        let output = Output::Set(&mut buffers.qkv);
        backend.linear(&layer.qkv, layer.qkv_bias.as_ref(), input, rows, output);
        if let (Some(q), Some(k)) = (&layer.q_norm, &layer.k_norm) {
            backend.qk_norm(&shape, q, k, eps, rows, &mut buffers.qkv);
        }
        backend.rope_write_kv(
            place,
            &shape,
            &ropes[config.layers[index].rope],
            config.rope_pairing,
            self.rows.positions(),
            self.rows.slots(place.group),
            &mut buffers.qkv,
        );
    }

    /// What attention adds to the residual stream.
    fn attention(
        &mut self,
        layer: &LayerWeights<B::Matrix, B::Vector>,
        index: usize,
        only_wanted: bool,
        rows: usize,
    ) {
        let (config, buffers, backend) = (&self.config, &mut self.buffers, &mut self.backend);
        let place = self.places[index];
        let shape = AttentionShape {
            heads: head_shape(config),
            scale: config.attention_scale,
            window: config.layers[index].window,
            soft_cap: config.attention_soft_cap,
        };
        let queries = Queries {
            rows: self.rows.queries(place.group, only_wanted),
            tables: self.rows.tables(place.group),
        };
        backend.attention(place, &shape, queries, &buffers.qkv, &mut buffers.attention);
        let (matrix, bias) = (&layer.attention_output, &layer.attention_output_bias);
        let input = Input::Rows(&buffers.attention);
        let Some(norm) = &layer.post_attention_norm else {
            let output = Output::Add(&mut buffers.x);
            backend.linear(matrix, bias.as_ref(), input, rows, output);
            return;
        };
        let output = Output::Set(&mut buffers.y);
        backend.linear(matrix, bias.as_ref(), input, rows, output);
        backend.add_normed(&mut buffers.x, &buffers.y, norm, config.norm_eps, rows);
    }

    /// What the feed-forward part adds to the residual stream.
    fn feed_forward(&mut self, layer: &LayerWeights<B::Matrix, B::Vector>, rows: usize) {
        let (config, buffers, backend) = (&self.config, &mut self.buffers, &mut self.backend);
        let eps = config.norm_eps;
        let input = Input::Normed {
            x: &buffers.x,
            weight: &layer.ffn_norm,
            eps,
        };
        let output = Output::Set(&mut buffers.gate_up);
        backend.linear(
            &layer.gate_up,
            layer.gate_up_bias.as_ref(),
            input,
            rows,
            output,
        );
        let (matrix, bias) = (&layer.down, &layer.down_bias);
        let input = Input::Gated {
            gate_up: &buffers.gate_up,
            activation: config.activation,
        };
        let Some(norm) = &layer.post_ffn_norm else {
            let output = Output::Add(&mut buffers.x);
            backend.linear(matrix, bias.as_ref(), input, rows, output);
            return;
        };
        let output = Output::Set(&mut buffers.y);
        backend.linear(matrix, bias.as_ref(), input, rows, output);
        backend.add_normed(&mut buffers.x, &buffers.y, norm, eps, rows);
    }

    /// What the `live` rows, which by now are those that want logits, asked for.
    fn output(&mut self, live: usize, work: StepWork) -> StepOutput {
        let vocab_size = self.config.vocab;
        let cap = self.config.final_soft_cap;
        let head = self.weights.head();
        let mut output = std::mem::take(&mut self.spare);
        output.logits.clear();
        output.best.clear();
        (output.vocab_size, output.work) = (vocab_size, work);
        let (x, backend) = (&self.buffers.x, &mut self.backend);
        let input = || Input::Normed {
            x,
            weight: &self.weights.output_norm,
            eps: self.config.norm_eps,
        };
        // Rows of greedy choices never come to memory. Where one is not finite, all do,
        // so that the error can say where.
        if let Some(known) = self.rows.only_best()
            && backend.best(head, input(), live, cap, known, &mut output.best)
        {
            return output;
        }
        output.best.clear();
        output.logits.resize(live * vocab_size, 0.0);
        if live > 0 {
            backend.logits(head, input(), live, cap, &mut output.logits);
        }
        output
    }
}

fn head_shape(config: &ModelConfig) -> HeadShape {
    HeadShape {
        heads: config.heads,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim_stored(),
        norm_dim: config.head_dim,
    }
}

impl<B> Executor for DecoderExecutor<B>
where
    B: Backend,
    B::Matrix: Send + Sync,
    B::Vector: Send + Sync,
    B::Rope: Send + Sync,
{
    fn step_clock(&self) -> Option<Box<dyn StepClock>> {
        let clock = Calibrated::new(self.cost.clone(), self.rates).ok()?;
        Some(Box::new(clock))
    }

    fn submit(&mut self, plan: &StepPlan) -> Result<StepId, Error> {
        // A plan that replaces one in flight is the caller's way to drop it.
        self.step = None;
        self.rows
            .lay_out(plan, &self.config, &self.kv_groups, &self.pools)?;
        let work = self.cost.step(self.rows.runs());
        self.step = Some(Step {
            layers: 0,
            live: self.rows.len(),
            work,
        });
        self.steps += 1;
        Ok(StepId(self.steps))
    }

    fn poll(&mut self) -> Result<StepEvent, Error> {
        let Some(mut step) = self.step.take() else {
            return Err(Error::NoStep);
        };
        if step.layers == self.config.layers.len() {
            return Ok(StepEvent::Done(self.output(step.live, step.work)));
        }
        if step.layers == 0 {
            self.backend.embed(
                &self.weights.embedding,
                self.rows.tokens(),
                self.config.embedding_scale,
                &mut self.buffers.x,
            );
        }
        let layer = step.layers;
        step.live = self.layer(layer, step.live);
        step.layers += 1;
        self.step = Some(step);
        Ok(StepEvent::LayerDone {
            layer: layer as u32,
        })
    }

    fn abort(&mut self) {
        self.step = None;
    }

    fn recycle(&mut self, output: StepOutput) {
        if output.logits.capacity() >= self.spare.logits.capacity() {
            self.spare = output;
        }
    }

    fn copy_blocks(&mut self, group: usize, pairs: &[(u32, u32)]) -> Result<(), Error> {
        let blocks = self.pools.blocks.get(group).copied().unwrap_or(0);
        for (row, (from, to)) in pairs.iter().enumerate() {
            if *from >= blocks || *to >= blocks {
                return Err(Error::InvalidPlan {
                    row,
                    field: "copy_blocks",
                    message: format!("{from} to {to}, but group {group} has {blocks} blocks"),
                });
            }
        }
        self.backend.copy_blocks(group, pairs);
        Ok(())
    }
}
