//! Memory that its owner can lend to other processes of the host, for reading.
//!
//! A segment is a memfd: it has no name, so nothing is left behind when the processes
//! that hold it are gone, however they went. It is sealed before anybody else sees it:
//! its size is final (reading it never faults), and nobody else can map it writable.
//! It lies on small pages unless the system gives shared memory huge ones
//! (`/sys/kernel/mm/transparent_hugepage/shmem_enabled` at `advise` or above).
#![allow(unsafe_code)]

use std::io;
use std::os::fd::OwnedFd;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

/// Without these a mapping may fault, or change its meaning, under its reader.
pub const SIZE_IS_FINAL: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// A segment of this process that peers may be lent. Unmapped when dropped.
#[derive(Debug)]
pub struct SharedMemory {
    base: NonNull<u8>,
    len: usize,
    fd: Arc<OwnedFd>,
}

// SAFETY: an address and a length; whoever touches the bytes says how that is ordered.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// `len` bytes of zeros. Pages nobody writes to cost nothing.
    ///
    /// # Errors
    /// Whatever the operating system says; [`io::ErrorKind::InvalidInput`] for no bytes.
    pub fn new(len: usize) -> io::Result<Self> {
        if len == 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let fd = create()?;
        ftruncate(&fd, len as u64)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice touches nothing else.
        let base = unsafe { mmap(null_mut(), len, protection, MapFlags::SHARED, &fd, 0) }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let memory = Self {
            base,
            len,
            fd: Arc::new(fd),
        };
        // Advice alone: refused where shared memory has small pages only.
        // SAFETY: the advice covers the mapping just made and changes no contents.
        let _ = unsafe { madvise(base.as_ptr().cast(), len, Advice::LinuxHugepage) };
        // After our own mapping, which stays writable.
        let seals = SIZE_IS_FINAL | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
        fcntl_add_seals(&memory.fd, seals)?;
        Ok(memory)
    }

    /// Where it lies; page-aligned.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Bytes of it.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// What another process can map it by.
    pub fn fd(&self) -> &Arc<OwnedFd> {
        &self.fd
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this address and length, unmapped only here; who uses
        // its bytes holds it.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "unmap of our own mapping: {unmapped:?}");
    }
}

/// A memfd that nobody can execute, where the system knows that it can be said (some
/// refuse any other).
fn create() -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    match memfd_create("baton-kv", flags | MemfdFlags::NOEXEC_SEAL) {
        Err(Errno::INVAL) => Ok(memfd_create("baton-kv", flags)?),
        created => Ok(created?),
    }
}
