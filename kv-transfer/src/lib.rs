//! baton-kv-transfer
