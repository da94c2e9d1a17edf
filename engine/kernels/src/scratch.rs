//! Working memory of the kernels, kept between calls so that a steady state allocates nothing.

use std::sync::atomic::AtomicU64;

use bytemuck::{Pod, Zeroable};

/// Buffers of one engine. Grows to what its largest step needs.
#[derive(Debug, Default)]
pub struct Scratch {
    pub(crate) activations: Activations,
    pub(crate) attention: AttentionScratch,
    /// Per token, the key of its best output.
    pub(crate) best: Vec<AtomicU64>,
}

impl Scratch {
    pub fn new() -> Scratch {
        Scratch::default()
    }
}

/// The inputs of a matrix product, laid out for its loops. See `quantize`.
#[derive(Debug, Default)]
pub(crate) struct Activations {
    pub codes: Buffer<i8>,
    pub scales: Buffer<f32>,
    pub scaled_sums: Buffer<f32>,
    pub sums: Buffer<i32>,
    pub floats: Buffer<f32>,
    /// Rows computed on the way.
    pub rows: Buffer<f32>,
    /// First token and size of each token tile.
    pub tiles: Vec<(usize, usize)>,
}

#[derive(Debug, Default)]
pub(crate) struct AttentionScratch {
    /// First row and number of rows of each row block.
    pub blocks: Vec<(usize, usize)>,
    /// Item and tile of each piece of work, where tiles are shared out.
    pub units: Vec<(usize, usize)>,
    /// Per thread: queries, scores and accumulators.
    pub floats: Buffer<f32>,
    /// Per unit and query: maximum, sum and accumulator.
    pub partials: Buffer<f32>,
}

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// A vector aligned to cache lines whose contents are only as old as the last `take`.
#[derive(Debug)]
pub(crate) struct Buffer<T> {
    lines: Vec<Line>,
    element: std::marker::PhantomData<T>,
}

impl<T> Default for Buffer<T> {
    fn default() -> Self {
        Buffer {
            lines: Vec::new(),
            element: std::marker::PhantomData,
        }
    }
}

impl<T: Pod> Buffer<T> {
    /// `len` elements with arbitrary contents.
    pub fn take(&mut self, len: usize) -> &mut [T] {
        let lines = (len * size_of::<T>()).div_ceil(64);
        if self.lines.len() < lines {
            self.lines.resize(lines, Line::zeroed());
        }
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..len]
    }

    /// The first `len` elements as last written. Panics where fewer were taken.
    pub fn get(&self, len: usize) -> &[T] {
        &bytemuck::cast_slice(&self.lines)[..len]
    }
}
