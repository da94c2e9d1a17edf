//! baton-decode-worker
