//! Membership against a real etcd.
