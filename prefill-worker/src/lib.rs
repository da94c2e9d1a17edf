//! baton-prefill-worker
