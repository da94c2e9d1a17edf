//! The flags of `baton bench transfer`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;

use crate::commands::bench::flags::ReportArgs;

#[derive(Clone, Debug, Args)]
pub struct TransferBenchArgs {
    /// Sizes of a part (K and V of one layer in one block), comma separated: powers of two
    /// from 4KiB to 4MiB. SmolLM2-135M in f16 has 12 KiB in blocks of 16 tokens.
    #[arg(
        long,
        env = "BATON_PART_BYTES",
        value_delimiter = ',',
        value_name = "BYTES",
        default_value = "4KiB,16KiB,64KiB,1MiB"
    )]
    pub part_bytes: Vec<PartBytes>,
    /// Bytes moved at once; three pools of this size are mapped.
    #[arg(
        long,
        env = "BATON_TOTAL",
        value_name = "BYTES",
        default_value = "256MiB"
    )]
    pub total: TotalBytes,
    /// Rounds of every way; the best one counts.
    #[arg(long, env = "BATON_ROUNDS", default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Transfers of a single part, for their latency.
    #[arg(long, env = "BATON_LATENCY_ROUNDS", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub latency_rounds: u32,
    /// Also over NIXL, by the transports that UCX_TLS allows: its library, as in `baton
    /// decode`.
    #[arg(long, env = "BATON_NIXL_LIBRARY", value_name = "PATH")]
    pub nixl_library: Option<PathBuf>,
    #[command(flatten)]
    pub report: ReportArgs,
}

/// Bytes of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartBytes(pub u32);

/// Bytes of all parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TotalBytes(pub u64);

impl FromStr for PartBytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bytes = binary(text).and_then(|bytes| u32::try_from(bytes).ok());
        let allowed = |bytes: &u32| bytes.is_power_of_two() && (1 << 12..=1 << 22).contains(bytes);
        let bytes = bytes.filter(allowed);
        let bytes = bytes.ok_or("give powers of two in 4KiB..=4MiB, as 4KiB,64KiB")?;
        Ok(Self(bytes))
    }
}

impl FromStr for TotalBytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bytes = binary(text).filter(|bytes| (64 << 20..=64 << 30).contains(bytes));
        let bytes = bytes.ok_or("give bytes in 64MiB..=64GiB, as 256MiB or 1GiB")?;
        Ok(Self(bytes))
    }
}

impl fmt::Display for PartBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes if bytes >= 1 << 20 => write!(f, "{} MiB", bytes >> 20),
            bytes => write!(f, "{} KiB", bytes >> 10),
        }
    }
}

/// Whole bytes, KiB, MiB or GiB.
fn binary(text: &str) -> Option<u64> {
    let units = [("KiB", 10), ("MiB", 20), ("GiB", 30)];
    let (number, shift) = units
        .iter()
        .find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, *shift)))
        .unwrap_or((text, 0));
    number.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_powers_of_two_in_binary_units() {
        for (text, bytes, shown) in [
            ("4096", 4 << 10, "4 KiB"),
            ("64KiB", 64 << 10, "64 KiB"),
            ("4MiB", 4 << 20, "4 MiB"),
        ] {
            let size: PartBytes = text.parse().unwrap();
            assert_eq!((size, size.to_string()), (PartBytes(bytes), shown.into()));
        }
        for wrong in ["", "2KiB", "12KiB", "8MiB", "4KB", "-4KiB", "4.0KiB"] {
            assert!(wrong.parse::<PartBytes>().is_err(), "{wrong}");
        }
        assert_eq!("1GiB".parse(), Ok(TotalBytes(1 << 30)));
        assert!("1MiB".parse::<TotalBytes>().is_err());
    }
}
