//! Working memory of the kernels, kept between calls so that a steady state allocates nothing.

/// Buffers of one engine. Grows to what its largest step needs.
#[derive(Debug, Default)]
pub struct Scratch {}

impl Scratch {
    pub fn new() -> Scratch {
        Scratch::default()
    }
}
