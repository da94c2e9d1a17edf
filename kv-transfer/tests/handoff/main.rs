//! Two real ends of a handoff in one process, over every transport.
//!
//! Each scenario ends in one of two ways: `Completed` with equal bytes, or no
//! `Completed` at all.

mod faults;
mod fencing;
mod hostile;
mod lending;
mod moving;
mod pair;
mod probing;
mod relayout;
mod soak;
mod tls;
mod wire;
