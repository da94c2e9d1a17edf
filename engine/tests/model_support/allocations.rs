//! An allocator that counts, per thread: what is held, the most ever held, and calls.
#![allow(dead_code, unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
    static CALLS: Cell<usize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    // Threads that are ending have no counters any more.
    let _ = HELD.try_with(|held| {
        held.set(held.get() + bytes);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(held.get())));
        if bytes > 0 {
            let _ = CALLS.try_with(|calls| calls.set(calls.get() + 1));
        }
    });
}

// SAFETY: forwards to the system's allocator; the counters do not touch memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The most bytes this thread held beyond what it held at the start of `work`.
pub fn peak_of<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let held = HELD.with(Cell::get);
    PEAK.with(|peak| peak.set(held));
    let value = work();
    (
        value,
        PEAK.with(Cell::get).saturating_sub(held).max(0) as usize,
    )
}

/// How often this thread allocated during `work`.
pub fn calls_of<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let calls = CALLS.with(Cell::get);
    let value = work();
    (value, CALLS.with(Cell::get) - calls)
}
