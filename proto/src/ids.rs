//! Newtypes for every identity that crosses a crate or a wire.
//!
//! Ids are compared for equality only; none carries an order or a clock.

use std::fmt;

use serde::{Deserialize, Serialize};

/// One entry of a model's vocabulary.
pub type TokenId = u32;

macro_rules! string_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub struct $name(pub String);

        impl $name {
            /// The id as it appears in logs, headers and records.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                Self(text.to_owned())
            }
        }

        impl From<String> for $name {
            fn from(text: String) -> Self {
                Self(text)
            }
        }
    };
}

string_id!(
    /// Names one client request on every hop. Made unique by the router; a
    /// client-given `x-request-id` is only its readable prefix, so two clients
    /// that send the same id never share state.
    RequestId
);
string_id!(
    /// Names one worker's place in a cluster. Survives restarts; the epoch does not.
    WorkerId
);
string_id!(
    /// A model at one content: its name plus a digest of its file. Pools are keyed by it.
    ModelRevision
);

/// One life of a worker process and its KV pool: random, compared for equality only.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Epoch(pub u64);

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Epoch({:016x})", self.0)
    }
}

/// One try to place a request's prefill. Higher attempts fence lower ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Attempt(pub u32);

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Bumped each time a KV block changes hands, so that a late writer is told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BlockGeneration(pub u32);

/// What two workers must share for their KV to be interchangeable bit for bit:
/// a hash of model file, weight format, arithmetic, KV dtype and kernel version.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NumericsId(pub [u8; 16]);

impl NumericsId {
    /// Derives an id from the parts that decide a model's arithmetic, in order.
    pub fn derive(parts: &[&[u8]]) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("baton.v1 numerics id");
        for part in parts {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        let mut id = [0; 16];
        hasher.finalize_xof().fill(&mut id);
        Self(id)
    }
}

impl fmt::Display for NumericsId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in self.0 {
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for NumericsId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NumericsId({self})")
    }
}
