//! Moves KV blocks from a prefill worker to a decode worker.
//!
//! This crate knows bytes and who may touch them, not models. It has two layers:
//! the *handoff* (pure state machines and their shells: [`receiver`], [`sender`]),
//! which owns grants, retries, deadlines and fencing, and the *transports*, which
//! only move bytes: [`sender::TransportKind::Loopback`] inside one process,
//! [`sender::TransportKind::SharedMemory`] between processes of one host whose sender keeps
//! its blocks in [`SharedMemory`], [`sender::TransportKind::Nixl`] where both ends were given
//! NIXL, and [`sender::TransportKind::Tcp`] between all others.
//!
//! ```text
//! decode worker (D)                              prefill worker (P)
//! Receiver::start(config, events)                Sender::start(config)
//! DataPort::bind(addr, config, receiver)
//! grant(blocks) -> ticket   --- control plane -> open(LaneTarget{ticket..}) -> Transfer
//!                           <== data lane ====== push(group, layer, blocks)..
//! Event Completed{payload}  <== data lane ====== commit(payload) -> Committed
//! revoke(ticket).await                           abort(reason); quiesced().await
//! ```
//!
//! A sender whose blocks are laid out otherwise describes them when it opens a ticket, and
//! its parts are re-laid out on arrival ([`receiver::relayout`]) or refused by name.
//!
//! Whatever happens on the way ends in the right bytes or in an error with a type, on both
//! sides and in time; `tests/conformance` says what that is tried against. With the feature
//! `test-support`, `mem` drives both ends in one thread, with seeded faults in virtual time.
//!
//! Between the two: tickets name grants, ordinals name blocks; the receiver's addresses and
//! block ids never travel. Lanes authenticate with a keyed BLAKE3 MAC over fresh nonces
//! of both ends. A plain lane is *not* encrypted and its frames carry checksums, not
//! MACs: run it on a network whose links are trusted, or on loopback (the default
//! bind). With [`DataPortConfig::tls`] and [`sender::SenderConfig::tls`] everything,
//! the hello included, goes inside TLS (rustls), with client certificates if the
//! port's configuration asks for them. An end that has TLS and one that has none
//! refuse each other during the hello, by name. TLS costs a copy and the cipher at
//! both ends; without it, bytes still go straight from block to block.

mod choice;
pub mod codec;
pub mod data_port;
pub mod environment;
pub mod error;
#[cfg(feature = "test-support")]
pub mod fault_proxy;
#[cfg(feature = "test-support")]
pub mod mem;
pub mod nixl;
pub mod part;
pub mod pool;
pub mod receiver;
pub mod region;
pub mod sender;
pub mod shared_memory;
pub mod streaming;
pub mod ticket;
mod transport;
mod wake;

pub use choice::{TransportChoice, WireChoice};
pub use data_port::{DataPort, DataPortConfig};
pub use environment::Environment;
pub use error::{Error, Refusal};
pub use nixl::{NixlError, NixlLender, NixlLibrary};
#[cfg(feature = "test-support")]
pub use region::Access;
pub use region::{MemoryRegion, RegionTable};
pub use shared_memory::{SharedMemory, region_of};
pub use ticket::{LaneKey, LayoutDigest, Opening, ProcessToken, SessionId, Ticket};
