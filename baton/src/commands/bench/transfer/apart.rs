//! A core for each end: the first two that this process may use.
//!
//! Senders, and whoever copies or writes alone, run on the first one, receivers on the second.
//! With fewer than two, all stays as it is.

use std::fs;
use std::io;

use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};

/// The names of the lanes' threads, as far as the system keeps them.
const SENDERS: &str = "kv-lane-out";
const RECEIVERS: &str = "kv-lane-in";

/// The cores of this process, as it was started: asked for before anything is pinned.
fn cores() -> io::Result<Option<(usize, usize)>> {
    use std::sync::OnceLock;
    static CORES: OnceLock<Option<(usize, usize)>> = OnceLock::new();
    if let Some(cores) = CORES.get() {
        return Ok(*cores);
    }
    let allowed = sched_getaffinity(None)?;
    let mut allowed = (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core));
    let both = allowed.next().zip(allowed.next());
    Ok(*CORES.get_or_init(|| both))
}

fn pin(thread: Option<Pid>, core: usize) -> io::Result<()> {
    let mut only = CpuSet::new();
    only.set(core);
    Ok(sched_setaffinity(thread, &only)?)
}

/// Keeps the lanes' threads that run now, and the caller, on the cores of their ends.
pub fn keep() -> io::Result<()> {
    let Some((near, far)) = cores()? else {
        return Ok(());
    };
    pin(None, near)?;
    for task in fs::read_dir("/proc/self/task")? {
        let task = task?;
        // Gone since: nothing to keep anywhere.
        let Ok(name) = fs::read_to_string(task.path().join("comm")) else {
            continue;
        };
        let thread = task.file_name().to_str().and_then(|id| id.parse().ok());
        let Some(thread) = thread.and_then(Pid::from_raw) else {
            continue;
        };
        match name.trim() {
            SENDERS => pin(Some(thread), near)?,
            RECEIVERS => pin(Some(thread), far)?,
            _ => {}
        }
    }
    Ok(())
}

/// Lets the caller run on every core again.
pub fn let_go() -> io::Result<()> {
    let Some((near, far)) = cores()? else {
        return Ok(());
    };
    let mut all = CpuSet::new();
    // Those that the process must not use are left out by the system.
    (near.min(far)..CpuSet::MAX_CPU).for_each(|core| all.set(core));
    Ok(sched_setaffinity(None, &all)?)
}

/// Keeps the caller on the receivers' core, once the ends are apart.
pub fn far_end() -> io::Result<()> {
    match cores()? {
        Some((_, far)) => pin(None, far),
        None => Ok(()),
    }
}
