//! The words and the wire every process of a Baton cluster agrees on.
//!
//! Plain types (ids, error kinds, sampling parameters, the KV layout, block
//! hashes, the tokenizer specification) have no dependency on any transport, so
//! the engine and its kernels can use them. The generated gRPC types and the
//! conversions between them and the plain types are behind the feature `wire`.

pub mod address;
pub mod block_hash;
pub mod cache_names;
pub mod error;
pub mod float_range;
pub mod ids;
pub mod kv_layout;
pub mod limits;
pub mod model_card;
pub mod name;
pub mod pace;
pub mod pool_memory;
pub mod protocol;
pub mod relayout;
pub mod sampling;
pub mod share;
pub mod tokenizer_spec;

#[cfg(feature = "wire")]
pub mod convert;
#[cfg(feature = "wire")]
pub mod environment;
#[cfg(feature = "wire")]
pub mod live_requests;
#[cfg(feature = "wire")]
pub mod slo;
#[cfg(feature = "wire")]
pub mod status;
#[cfg(feature = "wire")]
pub mod transport;
#[cfg(feature = "wire")]
pub mod watching;
#[cfg(feature = "wire")]
pub mod work;
#[cfg(feature = "wire")]
pub mod worker_info;

/// The generated messages and services of package `baton.v1`.
#[cfg(feature = "wire")]
#[allow(clippy::all, clippy::undocumented_unsafe_blocks, missing_docs)]
pub mod v1 {
    tonic::include_proto!("baton.v1");
}

/// The encoded `FileDescriptorSet` of package `baton.v1`, for server reflection.
#[cfg(feature = "wire")]
pub const FILE_DESCRIPTOR_SET: &[u8] =
    include_bytes!(concat!(env!("OUT_DIR"), "/baton_descriptor.bin"));

pub use error::{Error, ErrorKind};
pub use ids::{
    Attempt, BlockGeneration, Epoch, ModelRevision, NumericsId, RequestId, TokenId, WorkerId,
};
