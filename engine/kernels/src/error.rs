//! What can go wrong before any arithmetic starts.
//!
//! Kernels themselves do not fail: shapes are the caller's invariant and a wrong one panics with its message.

use crate::Isa;

/// Why a matrix, a view or a pool could not be made. All are the caller's or the file's fault; retrying does not help.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Error {
    #[error("unknown instruction set `{name}`, expected `scalar`, `avx2` or `avx512`")]
    UnknownIsa { name: String },
    #[error("this processor lacks the instruction set `{isa}`")]
    IsaUnavailable { isa: Isa },
    #[error("`threads` must be at least 1")]
    NoThreads,
    #[error("cannot start a kernel thread: `{reason}`")]
    Thread { reason: String },
    #[error("cannot pin a thread to core `{core}`: `{reason}`")]
    Pin { core: usize, reason: String },
    #[error("a matrix needs at least one source, one row and one column")]
    EmptyMatrix,
    #[error("the sources of one matrix have `{first}` and `{other}` columns")]
    ColumnsDiffer { first: usize, other: usize },
    #[error("`{cols}` columns are not a multiple of the `{ty}` block of `{block}`")]
    ColumnsNotBlocks {
        ty: &'static str,
        cols: usize,
        block: usize,
    },
    #[error("`{ty}` weights need `{expected}` bytes, got `{actual}`")]
    ByteLength {
        ty: &'static str,
        expected: usize,
        actual: usize,
    },
    #[error("the matrix size overflows the address space")]
    TooLarge,
    #[error("the system refused `{bytes}` bytes of memory: `{reason}`")]
    Memory { bytes: usize, reason: String },
    #[error("`{ty}` weights are not made here, only Q8_0 and Q4_1")]
    NotMade { ty: &'static str },
    #[error("element {at} is not a finite number and cannot be quantised")]
    NotFinite { at: usize },
    #[error("element {at} is too large for a 16-bit scale and cannot be quantised")]
    WeightTooLarge { at: usize },
    #[error("a KV block of `{block_size}` positions is not a multiple of 16")]
    KvBlockSize { block_size: u32 },
    #[error("a head of `{head_dim}` dimensions is not a positive multiple of 16")]
    KvHeadDim { head_dim: u32 },
    #[error("a KV pool without layers or heads")]
    KvEmpty,
    #[error("the KV pool starts at an address not aligned to `{align}` bytes")]
    KvAlignment { align: usize },
    #[error("rope rotates `{dims}` dimensions, which is not an even positive number")]
    RopeDims { dims: usize },
    #[error("rope has `{expected}` frequencies but `{actual}` factors")]
    RopeFactors { expected: usize, actual: usize },
}

impl Error {
    pub(crate) fn memory(bytes: usize, error: &std::io::Error) -> Error {
        Error::Memory {
            bytes,
            reason: error.to_string(),
        }
    }
}
