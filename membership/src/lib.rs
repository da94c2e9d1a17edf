//! baton-membership
