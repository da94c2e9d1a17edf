//! K and V of a peer's blocks as ours, where the two ends store other types.

use baton_kernels::{Isa, KvConverter, KvShape, KvSpans};
use baton_proto::kv_layout::{KvDtype, KvLayout};
use baton_proto::relayout::{KvRun, Relayout};

use super::Error;

/// The kernels' word for a type.
pub(super) fn kernel_dtype(dtype: KvDtype) -> baton_kernels::KvDtype {
    match dtype {
        KvDtype::F32 => baton_kernels::KvDtype::F32,
        KvDtype::F16 => baton_kernels::KvDtype::F16,
        KvDtype::Bf16 => baton_kernels::KvDtype::BF16,
        KvDtype::Int8 => baton_kernels::KvDtype::Int8,
        KvDtype::Int4 => baton_kernels::KvDtype::Int4,
    }
}

/// Rounds what a peer stored to the type of this engine's pools, as the engine's own
/// kernels would round such values.
#[derive(Clone, Copy, Debug)]
pub struct LayerConverter(KvConverter);

impl LayerConverter {
    /// The converter from a sender's layers to a receiver's.
    ///
    /// # Errors
    /// [`Error::Convert`] for heads of a size that the kernels do not take.
    pub fn new(relayout: &Relayout) -> Result<Self, Error> {
        let shape = |layout: &KvLayout| KvShape {
            blocks: 1,
            block_size: layout.block_size,
            layers: 1,
            kv_heads: layout.kv_heads,
            head_dim: layout.head_dim,
            dtype: kernel_dtype(layout.dtype),
        };
        let [from, to] = [relayout.sender(), relayout.receiver()].map(shape);
        KvConverter::new(Isa::detect(), from, to)
            .map(Self)
            .map_err(Error::Convert)
    }

    /// Writes the slots of `run` in `target`, one layer of one of our blocks, from `source`,
    /// one layer of one of the peer's. On the caller's thread.
    ///
    /// # Panics
    /// If a length is not a layer's, the run is not inside both, or `target` is not
    /// aligned as the pools are.
    pub fn convert(&self, source: &[u8], target: &mut [u8], run: KvRun) {
        let spans = KvSpans {
            from_span: run.from_span,
            to_span: run.to_span,
            spans: run.spans,
            from_head: run.from_head,
            to_head: run.to_head,
            heads: run.heads,
        };
        self.0.convert(source, target, &spans);
    }
}
