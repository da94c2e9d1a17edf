//! The calls into NIXL, behind types whose drop order keeps its promises.
//!
//! An agent is used by one thread at a time. The lender's has a thread of NIXL's own besides,
//! because UCX answers those who connect only while somebody turns its wheel; it sleeps up to
//! [`PROGRESS_SLEEP`] in between, since NIXL's default burns a core. A lane's agent has none:
//! whoever waits for a read turns the wheel by asking for it.
//!
//! Only reads that need nobody at the other end are used: see [`ONE_SIDED_ONLY`].
#![allow(unsafe_code)]

use std::ffi::{CStr, CString};
use std::io::IoSliceMut;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use bytes::Bytes;
use nixl_sys::{
    Agent, AgentConfig, MemType, MemoryRegion, NixlDescriptor, RegistrationHandle, XferDescList,
    XferOp, XferRequest, XferStatus,
};

use super::ring::Piece;
use super::{Lend, NixlError, NixlLibrary, PROBE_BYTES, agent_name, library};
use crate::region::RegionTable;
use crate::wake::lock;

/// How long NIXL's thread may sleep before it looks whether there is something to do.
const PROGRESS_SLEEP: Duration = Duration::from_millis(1);
/// For the first read of a lane, or this share of the time that a silent peer has: what cannot be
/// reached by then is not reached by NIXL.
const PROBE_MAX: Duration = Duration::from_millis(600);
const PROBE_SHARE: f64 = 0.6;
const BACKEND: &str = "UCX";
/// Settings of UCX that NIXL passes on; a `UCX_…` variable of the same name goes before them.
///
/// Where the fabric has no reads (TCP), UCX would emulate them: the other end's thread answers
/// each with messages. The lane's own TCP is many times faster than that, and in UCX 1.23 a
/// reader that dies while it is answered ends the process that answers. Without emulation
/// the first read fails instead, and the lane carries the bytes itself.
const ONE_SIDED_ONLY: (&str, &str) = ("engine_config", "PROTO_EMULATION_ENABLE=n");

/// Every entry point that the calls below lead to. `nixl-sys` ends the process when it misses
/// one, so that they are looked for first.
const ENTRY_POINTS: [&CStr; 28] = [
    c"nixl_capi_create_configured_agent",
    c"nixl_capi_destroy_agent",
    c"nixl_capi_get_plugin_params",
    c"nixl_capi_destroy_mem_list",
    c"nixl_capi_params_add",
    c"nixl_capi_destroy_params",
    c"nixl_capi_create_backend",
    c"nixl_capi_destroy_backend",
    c"nixl_capi_create_opt_args",
    c"nixl_capi_destroy_opt_args",
    c"nixl_capi_create_reg_dlist",
    c"nixl_capi_reg_dlist_add_desc",
    c"nixl_capi_reg_dlist_clear",
    c"nixl_capi_destroy_reg_dlist",
    c"nixl_capi_register_mem",
    c"nixl_capi_deregister_mem",
    c"nixl_capi_get_local_md",
    c"nixl_capi_load_remote_md",
    c"nixl_capi_invalidate_remote_md",
    c"nixl_capi_create_xfer_dlist",
    c"nixl_capi_xfer_dlist_add_desc",
    c"nixl_capi_xfer_dlist_clear",
    c"nixl_capi_destroy_xfer_dlist",
    c"nixl_capi_create_xfer_req",
    c"nixl_capi_post_xfer_req",
    c"nixl_capi_get_xfer_status",
    c"nixl_capi_release_xfer_req",
    c"nixl_capi_destroy_xfer_req",
];

/// The library of this process: `nixl-sys` looks for it once.
static LOADED: Mutex<Option<PathBuf>> = Mutex::new(None);

/// Proof that the library is there.
#[derive(Clone, Debug)]
pub(super) struct Loaded(());

impl Loaded {
    pub(super) fn open(path: &Path) -> Result<Self, NixlError> {
        let file = library::find(path)?;
        let refused = |reason: String| NixlError::Open {
            path: file.clone(),
            reason,
        };
        let real = file
            .canonicalize()
            .map_err(|error| refused(error.to_string()))?;
        let mut loaded = lock(&LOADED);
        match &*loaded {
            Some(first) if *first == real => {}
            Some(first) => {
                let first = first.display();
                return Err(refused(format!("this process uses `{first}` already")));
            }
            None => {
                open(&real, &file)?;
                *loaded = Some(real);
            }
        }
        drop(loaded);
        let this = Self(());
        drop(this.agent("probe", false)?);
        Ok(this)
    }

    /// A fresh agent with the UCX backend.
    fn agent(&self, role: &str, progress: bool) -> Result<Agent, NixlError> {
        let what = "start an agent with the UCX backend";
        let failed = |error| failed(what, &error);
        let agent =
            Agent::new_configured(&agent_name(role), &configuration(progress)).map_err(failed)?;
        let (_memory, mut parameters) = agent.get_plugin_params(BACKEND).map_err(failed)?;
        let (key, value) = ONE_SIDED_ONLY;
        parameters.set(key, value).map_err(failed)?;
        agent.create_backend(BACKEND, &parameters).map_err(failed)?;
        Ok(agent)
    }
}

fn configuration(progress: bool) -> AgentConfig {
    AgentConfig {
        enable_prog_thread: progress,
        pthr_delay_us: PROGRESS_SLEEP.as_micros() as u64,
        ..AgentConfig::default()
    }
}

fn failed(what: &'static str, reason: &dyn ToString) -> NixlError {
    NixlError::Failed {
        what,
        reason: reason.to_string(),
    }
}

/// Opens the library for good: by its full path, so that the later search by name finds it.
fn open(real: &Path, path: &Path) -> Result<(), NixlError> {
    let refused = |reason: String| NixlError::Open {
        path: path.to_owned(),
        reason,
    };
    let name = CString::new(real.as_os_str().as_bytes()).map_err(|e| refused(e.to_string()))?;
    // SAFETY: a string that ends; the library's own initialisers are trusted as its operator
    // trusts them by naming it.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        // SAFETY: of this thread, and valid until its next call of that kind.
        let reason = unsafe {
            let reason = libc::dlerror();
            (!reason.is_null()).then(|| CStr::from_ptr(reason).to_string_lossy().into_owned())
        };
        return Err(refused(reason.unwrap_or_default()));
    }
    for name in ENTRY_POINTS {
        // SAFETY: an open handle, which is never closed, and a string that ends.
        if unsafe { libc::dlsym(handle, name.as_ptr()) }.is_null() {
            return Err(NixlError::EntryPoint {
                path: path.to_owned(),
                name: name.to_str().unwrap_or_default(),
            });
        }
    }
    // The only call that a missing library does not turn into the end of the process.
    if nixl_sys::is_stub() {
        let reason = "its SONAME is not libnixl_capi.so, by which it is looked for";
        return Err(refused(reason.to_owned()));
    }
    Ok(())
}

/// Bytes for an agent to register.
#[derive(Debug)]
struct Memory {
    base: usize,
    len: usize,
}

impl MemoryRegion for Memory {
    unsafe fn as_ptr(&self) -> *const u8 {
        self.base as *const u8
    }

    fn size(&self) -> usize {
        self.len
    }
}

impl NixlDescriptor for Memory {
    fn mem_type(&self) -> MemType {
        MemType::Dram
    }

    fn device_id(&self) -> u64 {
        0
    }
}

fn register(agent: &Agent, base: usize, len: usize) -> Result<RegistrationHandle, NixlError> {
    let registered = agent.register_memory(&Memory { base, len }, None);
    registered.map_err(|error| failed("register memory", &error))
}

/// Pools that others may read. The fields are dropped in this order: what is registered, the
/// agent, the memory.
pub(super) struct Lent {
    registered: Vec<RegistrationHandle>,
    _agent: Agent,
    metadata: Bytes,
    probe: Box<[u8; PROBE_BYTES]>,
    regions: RegionTable,
}

impl Lent {
    pub(super) fn new(loaded: &Loaded, regions: &RegionTable) -> Result<Self, NixlError> {
        let agent = loaded.agent("lend", true)?;
        let mut this = Self {
            registered: Vec::with_capacity(regions.len() + 1),
            _agent: agent.clone(),
            metadata: Bytes::new(),
            probe: Box::new(rand::random()),
            regions: regions.clone(),
        };
        let probe = this.probe.as_ptr() as usize;
        this.registered.push(register(&agent, probe, PROBE_BYTES)?);
        for region in regions {
            let handle = register(&agent, region.address(), region.len())?;
            this.registered.push(handle);
        }
        let metadata = agent.get_local_md();
        this.metadata = metadata
            .map_err(|error| failed("describe its agent", &error))?
            .into();
        Ok(this)
    }

    pub(super) fn lend(&self) -> Lend {
        let place =
            |region: &crate::region::MemoryRegion| (region.address() as u64, region.len() as u64);
        Lend {
            probe: *self.probe,
            probe_at: self.probe.as_ptr() as u64,
            regions: self.regions.iter().map(place).collect(),
            metadata: self.metadata.clone(),
        }
    }
}

/// Memory that reads land in. Touched through raw pointers alone: a device may be writing
/// other bytes of it.
struct Staging {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: an owned allocation; `Reads` is its only user.
unsafe impl Send for Staging {}

impl Staging {
    fn new(len: usize) -> Self {
        let bytes = Box::into_raw(vec![0; len].into_boxed_slice());
        // SAFETY: a box is not null.
        let base = unsafe { NonNull::new_unchecked(bytes.cast()) };
        Self { base, len }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        let bytes = std::ptr::slice_from_raw_parts_mut(self.base.as_ptr(), self.len);
        // SAFETY: the box that `new` gave up.
        drop(unsafe { Box::from_raw(bytes) });
    }
}

/// A read under way.
pub(crate) struct Read {
    request: XferRequest,
    /// Whether it was over as soon as it was posted.
    done: bool,
}

/// The reads of one lane, and where they land. The fields are dropped in this order: what is
/// registered, the agent (and with it its connections, so that nothing can arrive any more),
/// the memory. Reads are dropped before it.
pub(crate) struct Reads {
    _registered: RegistrationHandle,
    agent: Agent,
    peer: String,
    staging: Staging,
}

impl Reads {
    /// An agent that can read what `lend` describes, shown by a first read from a sender that may
    /// be silent for `silence_max`.
    pub(crate) fn open(
        library: &NixlLibrary,
        lend: &Lend,
        staging: usize,
        silence_max: Duration,
    ) -> Result<Self, NixlError> {
        let agent = library.loaded.agent("pull", false)?;
        let staging = Staging::new(staging);
        let registered = register(&agent, staging.base.as_ptr() as usize, staging.len)?;
        let loaded = agent.load_remote_md(&lend.metadata);
        let peer = loaded.map_err(|error| failed("use the sender's description", &error))?;
        let mut reads = Self {
            _registered: registered,
            agent,
            peer,
            staging,
        };
        reads.probe(lend, PROBE_MAX.max(silence_max.mul_f64(PROBE_SHARE)))?;
        Ok(reads)
    }

    fn probe(&mut self, lend: &Lend, patience: Duration) -> Result<(), NixlError> {
        let what = "reach the sender's memory";
        let piece = Piece {
            to: 0,
            from: lend.probe_at,
            len: PROBE_BYTES,
        };
        let read = self.post(&[piece])?;
        let until = Instant::now() + patience;
        while !self.is_done(&read)? {
            if Instant::now() >= until {
                let reason = format!("no answer within {patience:?}");
                return Err(failed(what, &reason));
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        let mut found = [0; PROBE_BYTES];
        self.copy(0, PROBE_BYTES, &mut [IoSliceMut::new(&mut found)]);
        if found == lend.probe {
            Ok(())
        } else {
            Err(failed(what, &"other bytes were there"))
        }
    }

    /// Begins to read `pieces`. Nothing else may land in, or be copied from, those bytes of
    /// the staging area until it is done.
    pub(crate) fn post(&mut self, pieces: &[Piece]) -> Result<Read, NixlError> {
        let failed = |error| failed("read from the sender", &error);
        let mut here = XferDescList::new(MemType::Dram).map_err(failed)?;
        let mut there = XferDescList::new(MemType::Dram).map_err(failed)?;
        for piece in pieces {
            assert!(piece.to + piece.len <= self.staging.len);
            let to = self.staging.base.as_ptr() as usize + piece.to;
            here.add_desc(to, piece.len, 0);
            there.add_desc(piece.from as usize, piece.len, 0);
        }
        let request = self
            .agent
            .create_xfer_req(XferOp::Read, &here, &there, &self.peer, None);
        let request = request.map_err(failed)?;
        let under_way = self.agent.post_xfer_req(&request, None).map_err(failed)?;
        Ok(Read {
            request,
            done: !under_way,
        })
    }

    /// Whether the bytes of a read are here.
    pub(crate) fn is_done(&mut self, read: &Read) -> Result<bool, NixlError> {
        if read.done {
            return Ok(true);
        }
        match self.agent.get_xfer_status(&read.request) {
            Ok(XferStatus::Success) => Ok(true),
            Ok(XferStatus::InProgress) => Ok(false),
            Err(error) => Err(failed("read from the sender", &error)),
        }
    }

    /// Copies up to `len` bytes from `at` of the staging area, whose read is done, into
    /// `buffers`, in order.
    pub(crate) fn copy(&self, at: usize, len: usize, buffers: &mut [IoSliceMut<'_>]) -> usize {
        assert!(at + len <= self.staging.len);
        let mut copied = 0;
        for buffer in buffers {
            let step = buffer.len().min(len - copied);
            // SAFETY: inside the staging area, where nothing lands any more (promise of the
            // caller), and inside the buffer, which is somebody else's memory.
            unsafe {
                let from = self.staging.base.as_ptr().add(at + copied);
                std::ptr::copy_nonoverlapping(from, buffer.as_mut_ptr(), step);
            }
            copied += step;
        }
        copied
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agents_sleep_while_nothing_moves() {
        // NIXL's default of 0 turns in a loop without end.
        let lender = configuration(true);
        assert!(lender.enable_prog_thread && lender.pthr_delay_us >= 1000);
        let puller = configuration(false);
        assert!(!puller.enable_prog_thread && !puller.enable_listen_thread);
    }
}
