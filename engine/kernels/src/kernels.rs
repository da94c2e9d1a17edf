//! The object kernels are called on: the instruction set and the threads.

use std::ops::Range;

use crate::pool::Pool;
use crate::{Error, Isa};

/// Below this many elements a loop over memory is over before a helper has woken up.
const ELEMENTS_PER_THREAD_MIN: usize = 8192;

/// Everything a kernel needs to run. One per engine; may move between threads but is used by one at a time.
pub struct Kernels {
    isa: Isa,
    pool: Pool,
}

impl Kernels {
    /// `threads` counts the caller's own thread, which works too.
    ///
    /// # Errors
    /// [`Error::IsaUnavailable`], [`Error::NoThreads`], [`Error::Thread`].
    pub fn new(isa: Isa, threads: usize) -> Result<Kernels, Error> {
        Kernels::start(isa, threads, |_| None)
    }

    /// As [`new`](Self::new) with one thread per entry, each helper pinned to its core. The first core is the
    /// caller's; it is not pinned here, because that thread is not ours.
    ///
    /// # Errors
    /// As [`new`](Self::new), and [`Error::Pin`].
    pub fn with_cores(isa: Isa, cores: &[usize]) -> Result<Kernels, Error> {
        Kernels::start(isa, cores.len(), |helper| cores.get(helper + 1).copied())
    }

    fn start(
        isa: Isa,
        threads: usize,
        core: impl Fn(usize) -> Option<usize>,
    ) -> Result<Kernels, Error> {
        if !isa.is_available() {
            return Err(Error::IsaUnavailable { isa });
        }
        if threads == 0 {
            return Err(Error::NoThreads);
        }
        Ok(Kernels {
            isa,
            pool: Pool::new(threads - 1, core)?,
        })
    }

    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Threads that work on a call, the caller's included.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Runs `work` on ranges that together are `0..items`, on all threads, or on all of it here where
    /// `items * elements` (elements touched per item) is too little to share.
    pub(crate) fn for_ranges(
        &self,
        items: usize,
        elements: usize,
        work: &(dyn Fn(Range<usize>) + Sync),
    ) {
        if items * elements < 2 * ELEMENTS_PER_THREAD_MIN {
            work(0..items);
        } else {
            self.pool.for_ranges(items, work);
        }
    }
}

/// The items of a range of chunks of `size`, of `items` in all.
pub(crate) fn share_chunks(chunks: Range<usize>, size: usize, items: usize) -> Range<usize> {
    chunks.start * size..(chunks.end * size).min(items)
}

/// A pointer threads may share because each writes its own part of what is behind it.
#[derive(Clone, Copy)]
pub(crate) struct Shared<T>(*mut T, usize);

// SAFETY: a shared pointer is only used through `slice`, whose callers promise disjoint parts.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    pub fn new(slice: &mut [T]) -> Shared<T> {
        Shared(slice.as_mut_ptr(), slice.len())
    }

    /// An element's address. Panics where it is more than one behind the end.
    #[inline(always)]
    pub fn at(self, index: usize) -> *mut T {
        assert!(index <= self.1, "element `{index}` of `{}`", self.1);
        // SAFETY: in bounds, or one behind the last element.
        unsafe { self.0.add(index) }
    }

    /// A part of the slice. Panics where it is out of bounds.
    ///
    /// # Safety
    /// The slice given to `new` is still borrowed, and no other part alive overlaps this one.
    #[inline(always)]
    pub unsafe fn slice<'a>(self, range: Range<usize>) -> &'a mut [T] {
        assert!(
            range.start <= range.end && range.end <= self.1,
            "part `{range:?}` of `{}`",
            self.1
        );
        // SAFETY: in bounds, and exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(range.start), range.len()) }
    }
}
