//! The arithmetic of a transformer decoder on CPU, and the engine's only home of SIMD.
//!
//! # Promise
//! A row's result has the same bits whatever the instruction set ([`Isa`]), the number of threads, the other rows of
//! the batch, or how a prompt is cut into chunks. Lanes are outputs, every output walks its inputs upwards with one
//! accumulator, and attention goes over positions in tiles of [`KV_TILE`] aligned to absolute positions that merge in
//! order. [`reference`] writes the same arithmetic down the plain way; the tests hold every kernel to its bits.
//!
//! # Use
//! ```text
//! let kernels = Kernels::new(Isa::detect(), threads)?;         one per engine, used by one thread at a time
//! let mut memory = WeightMemory::new();                        one per model
//! let qkv     = kernels.pack(&[q, k, v], &mut memory)?;        once per weight matrix, at load, in the order of use
//! let rope    = RopeTable::new(dims, base, max_positions, &factors, attn_factor)?;
//! let kv      = unsafe { KvView::new(base, KvShape { .. }) }?; once per KvGroup
//! let mut scratch = Scratch::new();                            one per engine, grows to its largest step
//!
//! let normed  = Input::Normed { x: &x, weight: &norm, eps };
//! kernels.product(&qkv, normed, tokens, bias, Output::Set(&mut qkv_out), &mut scratch);   [tokens, q | k | v]
//! kernels.head_norm(&mut qkv_out[..], row_stride, heads, head_dim, tokens, &q_norm, eps);
//! kernels.rope(&mut qkv_out[..], row_stride, heads, head_dim, &positions, &rope, pairing);
//! kernels.rope(&mut qkv_out[k_at..], row_stride, kv_heads, head_dim, &positions, &rope, pairing);
//! kernels.write_kv(&kv, layer, &slots, &qkv_out[k_at..], &qkv_out[v_at..], row_stride);
//! kernels.attention(&kv, layer, &rows, &qkv_out, &mut attn, &params, &mut scratch);
//! kernels.product(&o, Input::Rows(&attn), tokens, None, Output::Add(&mut x), &mut scratch);
//! kernels.product(&gate_up, ffn_normed, tokens, None, Output::Set(&mut gate_up_out), &mut scratch);
//! let gated   = Input::Gated { gate_up: &gate_up_out, act: Activation::Silu };
//! kernels.product(&down, gated, tokens, None, Output::Add(&mut x), &mut scratch);
//! kernels.soft_cap(&mut logits, cap);
//! ```
//!
//! Strided operands: `row_stride` is the distance in f32 between the same element of two tokens, so a slice that starts
//! at a column of a fused row works; it need not reach a full stride behind its last row.
//!
//! Wrong shapes are the caller's bug and panic with the two numbers; nothing a client or a file controls reaches a
//! kernel unchecked. Non-finite inputs give non-finite or arbitrary values in their own row only, never in another.
//!
//! This crate does not know models, files, block pools or sampling.
#![allow(unsafe_code)]

mod attention;
mod elementwise;
mod error;
mod format;
mod huge_pages;
mod isa;
mod kernels;
mod kv;
mod limits;
mod linear;
#[doc(hidden)]
pub mod math;
mod matrix;
mod memory;
mod pool;
mod quantize;
mod quantize_weights;
#[doc(hidden)]
pub mod reference;
mod rope;
mod scratch;
mod simd;
mod write_kv;

pub use attention::{AttentionParams, AttentionRow, KV_TILE};
pub use elementwise::Activation;
pub use error::Error;
pub use format::{WeightType, dequantize};
pub use huge_pages::HugePages;
pub use isa::Isa;
pub use kernels::Kernels;
pub use kv::{KV_GROUP, KV_SPAN, KvDtype, KvShape, KvView};
pub use limits::{ComputeLimits, LimitMeter, ReadLimit, read_rate_at};
pub use linear::{Input, Output};
pub use matrix::{MatrixSource, PackedMatrix};
pub use memory::WeightMemory;
pub use quantize_weights::quantize_weights;
pub use rope::{RopePairing, RopeTable};
pub use scratch::Scratch;
pub use write_kv::{KvConverter, KvSpans};
