//! A pool of blocks that knows which are free, and notices every lane that touches one
//! that is.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::sync::{Arc, Mutex};

use baton_kv_transfer::MemoryRegion;
use baton_proto::kv_layout::ByteExtent;
use rand::rngs::StdRng;
use rand::{Rng, RngCore};

/// What free blocks are filled with.
const FREE: u8 = 0xDD;

struct Memory(Box<[UnsafeCell<u8>]>);

// SAFETY: the pool's owner touches bytes only of blocks that no lane may touch.
unsafe impl Sync for Memory {}

#[derive(Default)]
struct Books {
    free: Vec<bool>,
    /// Times that lanes were about to write each block.
    writes: Vec<u64>,
    trespasses: Vec<String>,
}

/// Blocks of `layers` parts of `part_bytes` each. Cheap to clone.
#[derive(Clone)]
pub struct Pool {
    memory: Arc<Memory>,
    books: Arc<Mutex<Books>>,
    pub layers: u32,
    pub part_bytes: u32,
}

impl Pool {
    /// A pool in which everything is free.
    pub fn new(blocks: usize, layers: u32, part_bytes: u32) -> Self {
        let bytes = vec![FREE; blocks * layers as usize * part_bytes as usize];
        let bytes = Box::into_raw(bytes.into_boxed_slice());
        // SAFETY: `UnsafeCell<u8>` has the layout of `u8`, and the box was just given up.
        let memory = Memory(unsafe { Box::from_raw(bytes as *mut [UnsafeCell<u8>]) });
        Self {
            memory: Arc::new(memory),
            books: Arc::new(Mutex::new(Books {
                free: vec![true; blocks],
                writes: vec![0; blocks],
                trespasses: Vec::new(),
            })),
            layers,
            part_bytes,
        }
    }

    /// The pool as lanes see it.
    pub fn region(&self) -> MemoryRegion {
        let keep = Arc::clone(&self.memory);
        let len = self.memory.0.len();
        let base = self.memory.0.as_ptr().cast_mut().cast();
        // SAFETY: `keep` owns the bytes; the owner keeps the promises of `new`, and the
        // suite is there to find out whether the lanes do.
        let region = unsafe { MemoryRegion::new(base, len, keep) };
        let books = Arc::clone(&self.books);
        let block_bytes = u64::from(self.layers) * u64::from(self.part_bytes);
        region.watched(move |access| {
            let first = access.offset / block_bytes;
            let last = (access.offset + u64::from(access.len).max(1) - 1) / block_bytes;
            let mut books = books.lock().unwrap();
            for block in first..=last {
                books.writes[block as usize] += u64::from(access.write);
                if books.free[block as usize] {
                    let what = if access.write { "written" } else { "read" };
                    let text = format!("block {block} was {what} by a lane although it was free");
                    books.trespasses.push(text);
                }
            }
        })
    }

    /// Takes `count` free blocks, whichever.
    pub fn take(&self, count: usize, rng: &mut StdRng) -> Vec<u32> {
        let mut books = self.books.lock().unwrap();
        let mut free: Vec<u32> = (0..books.free.len() as u32).collect();
        free.retain(|block| books.free[*block as usize]);
        assert!(free.len() >= count, "the pool is too small for the test");
        let taken: Vec<u32> = (0..count)
            .map(|_| free.remove(rng.random_range(0..free.len())))
            .collect();
        taken
            .iter()
            .for_each(|block| books.free[*block as usize] = false);
        taken
    }

    /// Takes these free blocks.
    pub fn take_these(&self, blocks: &[u32]) {
        let mut books = self.books.lock().unwrap();
        for block in blocks {
            assert!(std::mem::replace(&mut books.free[*block as usize], false));
        }
    }

    /// Gives blocks back. No lane may touch them from here on.
    pub fn give(&self, blocks: &[u32]) {
        for block in blocks {
            for layer in 0..self.layers {
                self.part(*block, layer, |part| part.fill(FREE));
            }
            let was =
                std::mem::replace(&mut self.books.lock().unwrap().free[*block as usize], true);
            assert!(!was, "block {block} was given back twice");
        }
    }

    /// Fills blocks with fresh bytes, which it returns by block and layer.
    pub fn fill(&self, blocks: &[u32], rng: &mut StdRng) -> Vec<Vec<Vec<u8>>> {
        let fill = |block: &u32, layer: u32, rng: &mut StdRng| {
            self.part(*block, layer, |part| {
                // A generator per part would take longer than everything else.
                let mut state = rng.next_u64();
                for chunk in part.chunks_mut(8) {
                    state = state.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(31) ^ 0x5bd1;
                    chunk.copy_from_slice(&state.to_le_bytes()[..chunk.len()]);
                }
                part.to_vec()
            })
        };
        blocks
            .iter()
            .map(|block| {
                (0..self.layers)
                    .map(|layer| fill(block, layer, rng))
                    .collect()
            })
            .collect()
    }

    /// Fills blocks with these bytes.
    pub fn write(&self, blocks: &[u32], content: &[Vec<Vec<u8>>]) {
        for (block, layers) in blocks.iter().zip(content) {
            for (layer, bytes) in (0..).zip(layers) {
                self.part(*block, layer, |part| part.copy_from_slice(bytes));
            }
        }
    }

    /// Where a part lies.
    pub fn extent(&self, block: u32, layer: u32) -> ByteExtent {
        let index = u64::from(block) * u64::from(self.layers) + u64::from(layer);
        ByteExtent {
            offset: index * u64::from(self.part_bytes),
            len: self.part_bytes,
            region: 0,
        }
    }

    /// A part's bytes. No lane may be touching them.
    pub fn bytes(&self, block: u32, layer: u32) -> Vec<u8> {
        self.part(block, layer, |part| part.to_vec())
    }

    fn part<T>(&self, block: u32, layer: u32, with: impl FnOnce(&mut [u8]) -> T) -> T {
        let extent = self.extent(block, layer);
        let cells = &self.memory.0[extent.offset as usize..][..extent.len as usize];
        let base: *mut u8 = cells.as_ptr().cast_mut().cast();
        // SAFETY: the cells allow writing, and the owner asks only for parts that no lane
        // may touch, on one thread.
        with(unsafe { std::slice::from_raw_parts_mut(base, cells.len()) })
    }

    /// Times that lanes were about to write these blocks.
    pub fn writes(&self, blocks: &[u32]) -> u64 {
        let books = self.books.lock().unwrap();
        blocks
            .iter()
            .map(|block| books.writes[*block as usize])
            .sum()
    }

    /// Blocks that are not free.
    pub fn used(&self) -> usize {
        let books = self.books.lock().unwrap();
        books.free.iter().filter(|free| !**free).count()
    }

    /// What lanes did that they must not, free blocks that changed included.
    pub fn trespasses(&self) -> Vec<String> {
        let books = self.books.lock().unwrap();
        let mut found = books.trespasses.clone();
        for (block, _) in books.free.iter().enumerate().filter(|(_, free)| **free) {
            let changed = |layer| {
                self.part(block as u32, layer, |part| {
                    part.iter().any(|byte| *byte != FREE)
                })
            };
            if (0..self.layers).any(changed) {
                found.push(format!("block {block} changed while it was free"));
            }
        }
        found
    }
}
