//! Handoffs over NIXL: two real ends, UCX between them.
//!
//! `cargo test -p baton-kv-transfer --features nixl --test nixl`. The library is looked for
//! where `BATON_NIXL_LIBRARY` says, then in `target/venv-nixl`, where `scripts/test` puts it;
//! without one every test says that it was skipped, or fails if `BATON_REQUIRE_NIXL` is set.
//! UCX needs a way to read on this host: `UCX_TLS=tcp,cma UCX_NET_DEVICES=lo`, or no variable.
//! What processes that die, cancels, leases and stale tickets do here is in the conformance
//! suite (`--test conformance nixl::`).

#[path = "../nixl_library.rs"]
mod nixl_library;
#[path = "../handoff/pair.rs"]
#[allow(dead_code)]
mod pair;

mod hostile;
mod moving;
