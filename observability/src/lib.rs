//! baton-observability
