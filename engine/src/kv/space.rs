//! How much memory this process can ever have: the machine's, or what its control groups let it
//! have of that.
//!
//! Pools are mapped without being touched, so one that can never fit would start well, and its
//! worker be killed by the system once it fills. What others use at the moment is not looked
//! at: it may be gone when the pool needs it.

use std::fs::read_to_string;
use std::path::{Path, PathBuf};

/// In bytes; `None` where the system does not say.
pub(super) fn memory_max() -> Option<u64> {
    memory_max_under(Path::new("/"))
}

fn memory_max_under(root: &Path) -> Option<u64> {
    let machine = read_to_string(root.join("proc/meminfo"));
    let machine = machine.ok().and_then(|text| total(&text));
    let groups = read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let limits = groups.lines().flat_map(|line| limits(root, line));
    machine.into_iter().chain(limits).min()
}

fn total(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// The limits of one of the groups of this process, and of those around it.
fn limits(root: &Path, group: &str) -> Vec<u64> {
    let mut parts = group.splitn(3, ':').skip(1);
    let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else {
        return Vec::new();
    };
    // One hierarchy for everything, or the one of memory.
    let (mount, file) = if controllers.is_empty() {
        ("sys/fs/cgroup", "memory.max")
    } else if controllers.split(',').any(|one| one == "memory") {
        ("sys/fs/cgroup/memory", "memory.limit_in_bytes")
    } else {
        return Vec::new();
    };
    let around: Vec<PathBuf> = Path::new(path.trim_start_matches('/'))
        .ancestors()
        .map(|folder| root.join(mount).join(folder).join(file))
        .collect();
    let limit = |file: &PathBuf| read_to_string(file).ok()?.trim().parse().ok();
    // No limit is a word, or a number larger than any memory.
    around.iter().filter_map(limit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        root
    }

    const MEMINFO: (&str, &str) = (
        "proc/meminfo",
        "MemTotal:       1000 kB\nMemFree:        10 kB\n",
    );

    #[test]
    fn the_smallest_limit_around_the_process_counts() {
        for (files, most) in [
            (&[][..], Some(1_024_000)),
            (
                &[
                    ("proc/self/cgroup", "0::/a/b\n"),
                    ("sys/fs/cgroup/a/b/memory.max", "max\n"),
                    ("sys/fs/cgroup/a/memory.max", "4096\n"),
                ],
                Some(4096),
            ),
            // Its own root, as a container sees it.
            (
                &[
                    ("proc/self/cgroup", "0::/\n"),
                    ("sys/fs/cgroup/memory.max", "8192\n"),
                ],
                Some(8192),
            ),
            (
                &[
                    ("proc/self/cgroup", "3:cpu,memory:/a\n2:pids:/b\n"),
                    ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "12288\n"),
                    (
                        "sys/fs/cgroup/memory/memory.limit_in_bytes",
                        "9223372036854771712\n",
                    ),
                    ("sys/fs/cgroup/memory.max", "1\n"),
                ],
                Some(12288),
            ),
        ] {
            let root = machine(&[&[MEMINFO], files].concat());
            assert_eq!(memory_max_under(root.path()), most, "{files:?}");
        }
    }

    #[test]
    fn a_system_that_says_nothing_limits_nothing() {
        let root = machine(&[
            ("proc/meminfo", "MemTotal: many\n"),
            ("proc/self/cgroup", "x\n"),
        ]);
        assert_eq!(memory_max_under(root.path()), None);
    }

    #[test]
    fn this_machine_says_something() {
        assert!(memory_max().is_some_and(|most| most > 1 << 20));
    }
}
