//! Histogram bounds.
//!
//! Three rules, each held by a test. A set contains every bound that vLLM and
//! OpenTelemetry use for the same quantity, so that their dashboards and alert
//! rules read ours without loss. From 1 ms upwards two neighbouring bounds differ
//! at most by a factor of two, so a quantile read from the buckets is within a
//! factor of two of the true one. The upper end is far beyond any deadline, so
//! the last bucket stays empty.

/// Time to first token, seconds.
pub const TTFT_SECONDS: &[f64] = &[
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2,
    0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    320.0, 640.0, 1280.0, 2560.0,
];

/// Gap between two tokens, and the mean gap of a request, seconds.
pub const ITL_SECONDS: &[f64] = &[
    0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05,
    0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0,
];

/// A whole request, seconds.
pub const REQUEST_SECONDS: &[f64] = &[
    0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.3, 0.32, 0.5, 0.64, 0.8, 1.0, 1.28,
    1.5, 2.0, 2.5, 2.56, 5.0, 5.12, 10.0, 10.24, 15.0, 20.0, 20.48, 30.0, 40.0, 40.96, 50.0, 60.0,
    81.92, 120.0, 240.0, 480.0, 960.0, 1920.0, 3840.0, 7680.0,
];

/// A phase inside a request, an engine step, a transfer: from 10 µs, seconds.
pub const PHASE_SECONDS: &[f64] = &[
    0.000_01, 0.000_02, 0.000_05, 0.000_1, 0.000_2, 0.000_5, 0.001, 0.002, 0.003, 0.005, 0.0075,
    0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.5,
    5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0,
];

/// Token counts of a request or a step.
pub const TOKENS: &[f64] = &[
    1.0, 2.0, 5.0, 8.0, 10.0, 16.0, 20.0, 32.0, 50.0, 64.0, 100.0, 128.0, 200.0, 256.0, 500.0,
    512.0, 1000.0, 1024.0, 2000.0, 2048.0, 4096.0, 5000.0, 8192.0, 10_000.0, 16_384.0, 20_000.0,
    32_768.0, 50_000.0, 65_536.0, 100_000.0, 131_072.0, 200_000.0,
];

/// Sequences in a step.
pub const SEQUENCES: &[f64] = &[
    1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0,
];

/// A share between 0 and 1.
pub const RATIO: &[f64] = &[0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0];

/// A share of a limit, 0 to 1: decode reaches percents of the arithmetic, small models a
/// percent of the bandwidth.
pub const UTILISATION: &[f64] = &[
    0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55,
    0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0,
];

/// Real over foretold time: close around 1, where a forecast is good.
pub const OVER_PREDICTION: &[f64] = &[
    0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0, 4.0, 8.0,
];

#[cfg(test)]
mod tests {
    use super::*;

    const VLLM_TTFT: &[f64] = &[
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
        20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
    ];
    const VLLM_ITL: &[f64] = &[
        0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
        20.0, 40.0, 80.0,
    ];
    const VLLM_REQUEST: &[f64] = &[
        0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
        240.0, 480.0, 960.0, 1920.0, 7680.0,
    ];
    const OTEL_TTFT: &[f64] = &[
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    ];
    const OTEL_TPOT: &[f64] = &[
        0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    ];
    const OTEL_REQUEST: &[f64] = &[
        0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
    ];

    #[test]
    fn contain_the_bounds_of_vllm_and_opentelemetry() {
        for (ours, theirs) in [
            (TTFT_SECONDS, VLLM_TTFT),
            (TTFT_SECONDS, OTEL_TTFT),
            (ITL_SECONDS, VLLM_ITL),
            (ITL_SECONDS, OTEL_TPOT),
            (REQUEST_SECONDS, VLLM_REQUEST),
            (REQUEST_SECONDS, OTEL_REQUEST),
        ] {
            for bound in theirs {
                assert!(ours.contains(bound), "{bound} is missing");
            }
        }
    }

    #[test]
    fn ascend_start_at_a_millisecond_and_at_most_double() {
        for bounds in [TTFT_SECONDS, ITL_SECONDS, REQUEST_SECONDS, PHASE_SECONDS] {
            assert!(bounds.contains(&0.001));
            for pair in bounds.windows(2) {
                assert!(pair[0] < pair[1], "{pair:?}");
                if pair[0] >= 0.001 {
                    assert!(pair[1] / pair[0] <= 2.0 + 1e-9, "{pair:?}");
                }
            }
        }
        for bounds in [TOKENS, SEQUENCES, RATIO, UTILISATION, OVER_PREDICTION] {
            assert!(bounds.windows(2).all(|pair| pair[0] < pair[1]));
        }
    }
}
