//! Counts the operations and bytes a step needs, for MFU and MBU.
//!
//! Needed, not spent: each weight matrix is read once per step, each sequence's
//! visible K and V once per layer, whatever the kernels really do.

use baton_proto::kv_layout::KvGroup;

use crate::backend::Backend;
use crate::model::{ModelConfig, Weights};

use super::layout::{Pools, StepRows, oldest_seen};

/// What a step needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Cost {
    pub flops: u64,
    pub bytes: u64,
}

pub(super) fn of<B: Backend>(
    config: &ModelConfig,
    weights: &Weights<B::Matrix, B::Vector, B::Rope>,
    backend: &B,
    rows: &StepRows,
    kv_groups: &[KvGroup],
    pools: &Pools,
) -> Cost {
    let mut cost = Cost::default();
    let (all, wanted) = (rows.len() as u64, rows.wanted().len() as u64);
    let mut product = |matrix: &B::Matrix, rows: u64| {
        if rows > 0 {
            let (outputs, inputs) = backend.matrix_shape(matrix);
            cost.flops += 2 * outputs as u64 * inputs as u64 * rows;
            cost.bytes += backend.matrix_bytes(matrix);
        }
    };
    let last = weights.layers.len() - 1;
    for (index, layer) in weights.layers.iter().enumerate() {
        // In the last layer only the wanted rows go on behind the storing of K and V.
        let live = if index == last { wanted } else { all };
        product(&layer.qkv, all);
        product(&layer.attention_output, live);
        product(&layer.gate_up, live);
        product(&layer.down, live);
    }
    product(weights.head(), wanted);

    let row_bytes = 2 * (config.kv_width() * pools.element_bytes) as u64;
    let score_flops = 4 * config.q_width() as u64;
    for (index, group) in kv_groups.iter().enumerate() {
        let layers = group.layers.len() as u64;
        let holds_last = group.layers.last() == Some(&(last as u32));
        let seen = |only_wanted: bool| -> u64 {
            rows.queries(index, only_wanted)
                .iter()
                .map(|query| u64::from(query.position + 1 - oldest_seen(group, query.position)))
                .sum()
        };
        cost.flops += score_flops * seen(false) * (layers - u64::from(holds_last));
        if holds_last {
            cost.flops += score_flops * seen(true);
        }
        let read: u64 = rows
            .spans()
            .map(|(first, last)| u64::from(last + 1 - oldest_seen(group, first)))
            .sum();
        cost.bytes += row_bytes * layers * (read + all);
    }
    cost
}
