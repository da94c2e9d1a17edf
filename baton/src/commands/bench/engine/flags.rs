//! The flags of `baton bench engine`.

use std::path::PathBuf;

use baton_kernels::Isa;
use baton_proto::kv_layout::KvDtype;
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser as _};

use crate::cli::ModelArgs;
use crate::commands::bench::flags::ReportArgs;

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Sweep")]
pub struct EngineBenchArgs {
    /// Threads of the engine [default: one per core].
    #[arg(long, env = "BATON_THREADS", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,
    /// Instruction set of the kernels: scalar, avx2 or avx512 [default: the widest there is].
    #[arg(long, env = "BATON_ISA", value_parser = isa)]
    pub isa: Option<Isa>,
    /// Decode: sequences in a step, comma separated.
    #[arg(
        long, env = "BATON_BATCH", value_delimiter = ',', value_name = "SEQUENCES",
        default_value = "1,2,4,8,16,32,64",
        value_parser = clap::value_parser!(u32).range(1..=4096),
    )]
    pub batch: Vec<u32>,
    /// Decode: positions each sequence has behind it, comma separated.
    #[arg(
        long, env = "BATON_CONTEXT", value_delimiter = ',', value_name = "TOKENS",
        default_value = "128,512,2048,8192",
        value_parser = clap::value_parser!(u32).range(1..=1 << 20),
    )]
    pub context: Vec<u32>,
    /// Prefill: tokens computed in one step, comma separated.
    #[arg(
        long, env = "BATON_PREFILL", value_delimiter = ',', value_name = "TOKENS",
        default_value = "128,512,2048",
        value_parser = clap::value_parser!(u32).range(1..=1 << 17),
    )]
    pub prefill: Vec<u32>,
    /// Prefill: positions of the prompt already computed, comma separated.
    #[arg(
        long, env = "BATON_PREFILL_DEPTH", value_delimiter = ',', value_name = "TOKENS",
        default_value = "0,2048",
        value_parser = clap::value_parser!(u32).range(0..=1 << 20),
    )]
    pub prefill_depth: Vec<u32>,
    /// Token positions in a KV block.
    #[arg(long, env = "BATON_BLOCK_SIZE", default_value = "16", value_parser = PossibleValuesParser::new(["16", "32", "64", "128"]).map(|text| text.parse::<u32>().unwrap_or(16)))]
    pub block_size: u32,
    /// Element type of the KV cache, as for `baton up`.
    #[arg(long, env = "BATON_KV_DTYPE", default_value = "f16")]
    pub kv_dtype: KvDtype,
    /// Memory for KV: bytes, or a number with KiB, MiB or GiB. Points that need more are
    /// skipped and listed [default: a quarter of the free memory, at most 4GiB].
    #[arg(long, env = "BATON_KV_POOL", value_name = "BYTES", value_parser = bytes)]
    pub kv_pool: Option<u64>,
    /// KV in memory that other processes of the host can be lent, as a prefill worker keeps
    /// it: on small pages, where the system has no huge ones for shared memory.
    #[arg(long, env = "BATON_KV_LENDABLE")]
    pub kv_lendable: bool,
    /// Steps measured per point, at least; the median counts. Short steps are repeated
    /// for 0.3 s.
    #[arg(long, env = "BATON_ROUNDS", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub rounds: u32,
    /// Time after which a point is left with the steps it has, one at least.
    #[arg(
        long,
        env = "BATON_POINT_SECONDS",
        default_value_t = 5.0,
        value_parser = seconds,
        allow_negative_numbers = true
    )]
    pub point_seconds: f64,
    /// Calibrate the step-time model on every other point and judge its predictions on all.
    #[arg(long, env = "BATON_PREDICT")]
    pub predict: bool,
    /// With --predict, draw predicted against measured times to this SVG file.
    #[arg(long, env = "BATON_PLOT", value_name = "FILE", requires = "predict")]
    pub plot: Option<PathBuf>,
    #[command(flatten)]
    pub report: ReportArgs,
    // Last, because its heading would hold for what follows.
    #[command(flatten)]
    pub model: ModelArgs,
}

fn isa(text: &str) -> Result<Isa, String> {
    Isa::from_name(text).map_err(|error| error.to_string())
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if (0.0..=3600.0).contains(&value) => Ok(value),
        _ => Err("give seconds in 0..=3600".to_owned()),
    }
}

/// `1048576`, `512KiB`, `64MiB` or `1.5GiB`.
fn bytes(text: &str) -> Result<u64, String> {
    let wrong = || "give bytes in 1MiB..=1024GiB, as 67108864, 64MiB or 1.5GiB".to_owned();
    let units = [("KiB", 10), ("MiB", 20), ("GiB", 30)];
    let (number, shift) = units
        .iter()
        .find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, *shift)))
        .unwrap_or((text, 0));
    let value: f64 = number.trim().parse().map_err(|_| wrong())?;
    let value = value * f64::from(1_u32 << shift);
    if (f64::from(1 << 20)..=1024.0 * f64::from(1 << 30)).contains(&value) {
        Ok(value as u64)
    } else {
        Err(wrong())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_given_in_bytes_or_binary_units() {
        assert_eq!(bytes("67108864"), Ok(64 << 20));
        assert_eq!(bytes("64MiB"), Ok(64 << 20));
        assert_eq!(bytes("1.5GiB"), Ok(3 << 29));
        for wrong in ["", "12", "4GB", "-1GiB", "nan", "2000GiB", "GiB"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
    }
}
