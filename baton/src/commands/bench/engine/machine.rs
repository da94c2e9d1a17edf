//! Which machine the figures are of.

use serde::Serialize;

const MIB: usize = 1 << 20;
/// Reading more says nothing new: it is far beyond any cache of a few cores.
const WORKING_SET_MAX: usize = 1024 * MIB;
const KV_POOL_MAX: u64 = 4 << 30;

/// The machine as the system describes it.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Machine {
    pub cpu: String,
    /// Cores this process may use.
    pub cores: usize,
    pub memory_bytes: u64,
    /// Memory that was free for use at the start.
    pub memory_available_bytes: u64,
}

impl Machine {
    /// This one. What the system does not tell is left empty.
    pub fn here() -> Self {
        let read = |path| std::fs::read_to_string(path).unwrap_or_default();
        let memory = read("/proc/meminfo");
        Self {
            cpu: value(&read("/proc/cpuinfo"), "model name").to_owned(),
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            memory_bytes: kib(value(&memory, "MemTotal")),
            memory_available_bytes: kib(value(&memory, "MemAvailable")),
        }
    }

    /// KV memory where no flag says how much.
    pub fn kv_pool_bytes(&self) -> u64 {
        (self.memory_available_bytes / 4).clamp(64 << 20, KV_POOL_MAX)
    }

    /// Working sets to measure reading at: from what a core's cache holds to beyond the
    /// model's weights.
    pub fn working_sets(&self, weight_bytes: u64) -> Vec<usize> {
        let enough = usize::try_from(weight_bytes.saturating_mul(3) / 2)
            .unwrap_or(usize::MAX)
            .clamp(256 * MIB, WORKING_SET_MAX);
        let have = usize::try_from(self.memory_available_bytes / 4).unwrap_or(usize::MAX);
        std::iter::successors(Some(MIB), |size| Some(2 * size))
            .take_while(|size| *size <= MIB || (*size < 2 * enough && *size <= have))
            .collect()
    }
}

/// The value behind the first line that begins with `key`.
fn value<'a>(text: &'a str, key: &str) -> &'a str {
    text.lines()
        .find_map(|line| line.strip_prefix(key)?.split_once(':'))
        .map_or("", |(_, value)| value.trim())
}

fn kib(text: &str) -> u64 {
    let number = text.split_whitespace().next().unwrap_or_default();
    number.parse::<u64>().unwrap_or(0) << 10
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_systems_files_are_read() {
        let text = "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nMemTotal:  100 kB\n";
        assert_eq!(value(text, "model name"), "Some CPU @ 2 GHz");
        assert_eq!(kib(value(text, "MemTotal")), 100 << 10);
        assert_eq!(kib(value(text, "MemAvailable")), 0);
    }

    #[test]
    fn working_sets_reach_beyond_the_weights_but_not_beyond_memory() {
        let machine = Machine {
            memory_available_bytes: 8 << 30,
            ..Machine::default()
        };
        let sets = machine.working_sets(97 << 20);
        assert_eq!((sets[0], *sets.last().unwrap()), (MIB, 256 * MIB));
        assert_eq!(*machine.working_sets(600 << 20).last().unwrap(), 1024 * MIB);
        assert_eq!(Machine::default().working_sets(97 << 20), [MIB]);
    }
}
