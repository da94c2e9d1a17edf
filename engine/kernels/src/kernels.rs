//! The object kernels are called on: the instruction set and the threads.

use std::cell::Cell;
use std::marker::PhantomData;

use crate::{Error, Isa};

/// Everything a kernel needs to run. One per engine; may move between threads but is used by one at a time.
#[derive(Debug)]
pub struct Kernels {
    isa: Isa,
    threads: usize,
    /// One call at a time: the helper threads have one job slot.
    not_sync: PhantomData<Cell<()>>,
}

impl Kernels {
    /// `threads` counts the caller's own thread, which works too.
    ///
    /// # Errors
    /// [`Error::IsaUnavailable`], [`Error::NoThreads`], [`Error::Thread`].
    pub fn new(isa: Isa, threads: usize) -> Result<Kernels, Error> {
        if !isa.is_available() {
            return Err(Error::IsaUnavailable { isa });
        }
        if threads == 0 {
            return Err(Error::NoThreads);
        }
        Ok(Kernels {
            isa,
            threads,
            not_sync: PhantomData,
        })
    }

    /// As [`new`](Self::new) with one thread per entry, each helper pinned to its core. The first core is the
    /// caller's; it is not pinned here, because that thread is not ours.
    ///
    /// # Errors
    /// As [`new`](Self::new), and [`Error::Pin`].
    pub fn with_cores(isa: Isa, cores: &[usize]) -> Result<Kernels, Error> {
        Kernels::new(isa, cores.len())
    }

    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Threads that work on a call, the caller's included.
    pub fn threads(&self) -> usize {
        self.threads
    }
}
