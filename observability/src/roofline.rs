//! How close a step came to what the device can do.
//!
//! The roofline model: a step that needs F operations and B bytes takes at least
//! max(F / peak FLOP/s, B / peak bytes/s). Decoding one sequence reads every
//! weight once per token and is bound by memory; prefill and large batches reuse
//! a weight many times and are bound by arithmetic. In between, a batch breaks even where
//! both take the same time; and each sequence brings KV of its own, which no batch shares.
//!
//! *Source*: Williams, Waterman, Patterson, "Roofline", CACM 2009, section 3.

/// What a device can do at best, as measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peaks {
    pub flops_per_second: f64,
    pub bytes_per_second: f64,
}

/// What a step had to do.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    pub flops: f64,
    /// Bytes of weights and KV read.
    pub bytes: f64,
}

impl Work {
    /// A step of `rows` tokens through a dense model: two operations per
    /// parameter and row, all weights once, and the KV that the rows attend to.
    /// Attention's own operations are left out; they are small for short contexts.
    pub fn dense_step(rows: u64, parameters: u64, weight_bytes: u64, kv_bytes: u64) -> Self {
        Self {
            flops: 2.0 * parameters as f64 * rows as f64,
            bytes: weight_bytes as f64 + kv_bytes as f64,
        }
    }

    /// Operations per byte.
    pub fn intensity(&self) -> f64 {
        self.flops / self.bytes
    }
}

impl Peaks {
    /// The least time `work` can take, seconds.
    pub fn seconds_min(&self, work: &Work) -> f64 {
        (work.flops / self.flops_per_second).max(work.bytes / self.bytes_per_second)
    }

    /// Operations per byte above which work is bound by arithmetic.
    pub fn ridge(&self) -> f64 {
        self.flops_per_second / self.bytes_per_second
    }

    /// Rows per step at which reading the weights and computing with them take the same
    /// time; fewer are bound by memory. `parameter_bytes` is 2 for BF16 weights. KV, of
    /// which every sequence brings its own, is left out and moves the point up.
    pub fn break_even_rows(&self, parameter_bytes: f64) -> f64 {
        self.ridge() * parameter_bytes / 2.0
    }

    /// Whether `work` takes longer to read than to compute.
    pub fn is_memory_bound(&self, work: &Work) -> bool {
        work.intensity() < self.ridge()
    }

    /// Model FLOP/s utilisation: achieved over peak, 0 to 1.
    pub fn mfu(&self, work: &Work, seconds: f64) -> f64 {
        work.flops / seconds / self.flops_per_second
    }

    /// Model bandwidth utilisation: achieved over peak, 0 to 1.
    pub fn mbu(&self, work: &Work, seconds: f64) -> f64 {
        work.bytes / seconds / self.bytes_per_second
    }
}

/// Bytes that one token adds to the KV cache: a key and a value per layer and KV head.
/// `value_bytes` may be a fraction where values are packed.
pub fn kv_bytes_per_token(layers: u32, kv_heads: u32, head_dim: u32, value_bytes: f64) -> f64 {
    2.0 * f64::from(layers) * f64::from(kv_heads) * f64::from(head_dim) * value_bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(value: f64, expected: f64, tolerance: f64) {
        assert!(
            (value - expected).abs() <= tolerance,
            "{value} is not {expected} ± {tolerance}"
        );
    }

    #[test]
    fn fourteen_gigabytes_at_one_terabyte_a_second_give_seventy_tokens_a_second() {
        let peaks = Peaks {
            flops_per_second: 100e12,
            bytes_per_second: 1e12,
        };
        let work = Work::dense_step(1, 7_000_000_000, 14_000_000_000, 0);
        close(1.0 / peaks.seconds_min(&work), 71.4, 0.1);
    }

    #[test]
    fn eight_billion_parameters_in_bf16_take_five_milliseconds_on_an_h100() {
        let peaks = Peaks {
            flops_per_second: 989e12,
            bytes_per_second: 3.35e12,
        };
        let work = Work::dense_step(1, 8_000_000_000, 16_000_000_000, 0);
        close(peaks.seconds_min(&work) * 1e3, 4.8, 0.05);
        close(1.0 / peaks.seconds_min(&work), 210.0, 1.0);
        assert!(work.intensity() < peaks.ridge());
    }

    #[test]
    fn seventy_billion_parameters_in_fp8_take_21_milliseconds_on_an_h100() {
        let peaks = Peaks {
            flops_per_second: 1979e12,
            bytes_per_second: 3.35e12,
        };
        let work = Work::dense_step(1, 70_000_000_000, 70_000_000_000, 0);
        close(peaks.seconds_min(&work) * 1e3, 21.0, 0.2);
        close(1.0 / peaks.seconds_min(&work), 48.0, 0.2);
    }

    #[test]
    fn kv_of_long_conversations_outweighs_the_weights() {
        const MIB: f64 = 1048576.0;
        // 8B with grouped queries: 32 layers, 8 KV heads of 128, 2 bytes a value.
        let token = kv_bytes_per_token(32, 8, 128, 2.0);
        close(token / MIB, 0.125, 1e-12);
        let conversation = 32768.0 * token;
        close(conversation / MIB / 1024.0, 4.0, 1e-12);
        let kv_bytes = 16 * conversation as u64;
        close(kv_bytes as f64 / MIB / 1024.0, 64.0, 1e-12);
        let work = Work::dense_step(16, 8_000_000_000, 16_000_000_000, kv_bytes);
        close(work.bytes, 16e9 + 64.0 * 1024.0 * MIB, 1.0);
        let peaks = Peaks {
            flops_per_second: 989e12,
            bytes_per_second: 3.35e12,
        };
        // Five times as long as reading the weights alone.
        close(peaks.seconds_min(&work) * 1e3, 25.3, 0.1);
        assert!(peaks.is_memory_bound(&work));
    }

    #[test]
    fn batches_break_even_where_reading_and_computing_take_the_same_time() {
        let rows = |tera_flops: f64| {
            Peaks {
                flops_per_second: tera_flops * 1e12,
                bytes_per_second: 3.35e12,
            }
            .break_even_rows(2.0)
        };
        close(rows(400.0), 120.0, 1.0);
        close(rows(989.0), 295.0, 0.5);
        let peaks = Peaks {
            flops_per_second: 989e12,
            bytes_per_second: 3.35e12,
        };
        let bound =
            |rows| peaks.is_memory_bound(&Work::dense_step(rows, 8_000_000_000, 16_000_000_000, 0));
        assert!(bound(295) && !bound(296));
    }

    #[test]
    fn a_long_prefill_is_bound_by_arithmetic() {
        let peaks = Peaks {
            flops_per_second: 989e12,
            bytes_per_second: 3.35e12,
        };
        let work = Work::dense_step(4096, 8_000_000_000, 16_000_000_000, 0);
        close(peaks.seconds_min(&work), 2.0 * 8e9 * 4096.0 / 989e12, 1e-12);
        assert!(work.intensity() > peaks.ridge());
    }

    #[test]
    fn utilisation_is_one_at_the_roof_and_half_at_twice_the_time() {
        let peaks = Peaks {
            flops_per_second: 1e12,
            bytes_per_second: 1e11,
        };
        let work = Work {
            flops: 1e12,
            bytes: 5e10,
        };
        close(peaks.mfu(&work, 1.0), 1.0, 1e-12);
        close(peaks.mfu(&work, 2.0), 0.5, 1e-12);
        close(peaks.mbu(&work, 1.0), 0.5, 1e-12);
    }
}
