//! A pool of blocks that knows which are free, and notices every lane that touches one
//! that is.
#![allow(unsafe_code)]

use std::cell::UnsafeCell;
use std::sync::{Arc, Condvar, Mutex};

use baton_kv_transfer::{MemoryRegion, SharedMemory, region_of};
use baton_proto::kv_layout::ByteExtent;
use rand::rngs::StdRng;
use rand::{Rng, RngCore};

/// What free blocks are filled with.
const FREE: u8 = 0xDD;

enum Memory {
    Own(Box<[UnsafeCell<u8>]>),
    Shared(Arc<SharedMemory>),
}

// SAFETY: the pool's owner touches bytes only of blocks that no lane may touch.
unsafe impl Sync for Memory {}

impl Memory {
    fn base(&self) -> *mut u8 {
        match self {
            Self::Own(bytes) => bytes.as_ptr().cast_mut().cast(),
            Self::Shared(memory) => memory.base().as_ptr(),
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Own(bytes) => bytes.len(),
            Self::Shared(memory) => memory.len(),
        }
    }
}

/// Holds a lane in the middle of a write, under its guard.
#[derive(Default)]
struct Gate {
    /// Writes until it closes; `None` if it does not.
    after: Mutex<Option<u64>>,
    holding: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    fn pass(&self) {
        let mut after = self.after.lock().unwrap();
        let closes = *after == Some(0);
        *after = after.and_then(|after| after.checked_sub(1));
        drop(after);
        if closes {
            let mut holding = self.holding.lock().unwrap();
            *holding = true;
            while *holding {
                holding = self.opened.wait(holding).unwrap();
            }
        }
    }
}

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
    gate: Arc<Gate>,
    pub layers: u32,
    pub part_bytes: u32,
}

impl Pool {
    /// A pool in which everything is free.
    pub fn new(blocks: usize, layers: u32, part_bytes: u32) -> Self {
        let bytes = vec![FREE; blocks * layers as usize * part_bytes as usize];
        let bytes = Box::into_raw(bytes.into_boxed_slice());
        // SAFETY: `UnsafeCell<u8>` has the layout of `u8`, and the box was just given up.
        let memory = Memory::Own(unsafe { Box::from_raw(bytes as *mut [UnsafeCell<u8>]) });
        Self::of(memory, blocks, layers, part_bytes)
    }

    /// The same, in memory that other processes can be lent.
    pub fn shared(blocks: usize, layers: u32, part_bytes: u32) -> Self {
        let len = blocks * layers as usize * part_bytes as usize;
        let memory = SharedMemory::new(len).unwrap();
        // SAFETY: fresh, this long, and known to nobody else.
        unsafe { std::ptr::write_bytes(memory.base().as_ptr(), FREE, len) };
        Self::of(Memory::Shared(Arc::new(memory)), blocks, layers, part_bytes)
    }

    fn of(memory: Memory, blocks: usize, layers: u32, part_bytes: u32) -> Self {
        Self {
            memory: Arc::new(memory),
            gate: Arc::default(),
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
        // SAFETY: `keep` owns the bytes; the owner keeps the promises of `new`, and the
        // suite is there to find out whether the lanes do.
        let region = unsafe {
            match &*self.memory {
                Memory::Own(_) => MemoryRegion::new(self.memory.base(), self.memory.len(), keep),
                Memory::Shared(memory) => region_of(memory),
            }
        };
        let gate = Arc::clone(&self.gate);
        let books = Arc::clone(&self.books);
        let block_bytes = u64::from(self.layers) * u64::from(self.part_bytes);
        region.watched(move |access| {
            let first = access.offset / block_bytes;
            let last = (access.offset + u64::from(access.len).max(1) - 1) / block_bytes;
            if access.write {
                gate.pass();
            }
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
        let (offset, len) = (extent.offset as usize, extent.len as usize);
        assert!(offset + len <= self.memory.len());
        // SAFETY: in bounds; the bytes allow writing, and the owner asks only for parts
        // that no lane may touch, on one thread.
        with(unsafe { std::slice::from_raw_parts_mut(self.memory.base().add(offset), len) })
    }

    /// Times that lanes were about to write these blocks.
    pub fn writes(&self, blocks: &[u32]) -> u64 {
        let books = self.books.lock().unwrap();
        blocks
            .iter()
            .map(|block| books.writes[*block as usize])
            .sum()
    }

    /// Holds the lane that makes the next write but `after`, under its guard.
    pub fn hold_write(&self, after: u64) {
        *self.gate.after.lock().unwrap() = Some(after);
    }

    /// Whether a lane is held.
    pub fn is_holding(&self) -> bool {
        *self.gate.holding.lock().unwrap()
    }

    /// Lets the lane go on, and none be held any more.
    pub fn release(&self) {
        *self.gate.after.lock().unwrap() = None;
        *self.gate.holding.lock().unwrap() = false;
        self.gate.opened.notify_all();
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
