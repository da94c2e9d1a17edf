//! Which protections of a receiver are on.
//!
//! In production all of them are, and nothing can switch one off: the type has no
//! fields. With the feature `test-support` a test can, to show that the conformance
//! suite would notice.

/// The fence and the digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protections {
    /// Bytes of a lane that lost the right to write go to scratch.
    #[cfg(feature = "test-support")]
    pub fence: bool,
    /// Frame checksums and the root digest count.
    #[cfg(feature = "test-support")]
    pub digest: bool,
}

impl Protections {
    /// Everything on.
    pub const ALL: Self = Self {
        #[cfg(feature = "test-support")]
        fence: true,
        #[cfg(feature = "test-support")]
        digest: true,
    };

    pub(crate) const fn fence(self) -> bool {
        #[cfg(feature = "test-support")]
        return self.fence;
        #[cfg(not(feature = "test-support"))]
        return true;
    }

    pub(crate) const fn digest(self) -> bool {
        #[cfg(feature = "test-support")]
        return self.digest;
        #[cfg(not(feature = "test-support"))]
        return true;
    }
}
