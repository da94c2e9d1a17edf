//! What a worker counts.
//!
//! The `vllm:*` names are the ones that dashboards, autoscalers and endpoint
//! pickers already read; the meaning is vLLM's. What vLLM has no name for is
//! `baton_*`. Registries of workers carry `model_name` and `engine` as constant
//! labels ([`crate::exposition::registry`]).

use crate::buckets;
use crate::instrument::{ByLabel, Counter, Gauge, GaugeF64, Histogram, Info};
use crate::labels::{BlockState, Direction, FinishedReason, StepPhase, TransferFailure, Transport};
use crate::metrics::metric_set;

metric_set! {
    /// The metrics of a prefill or decode worker.
    WorkerMetrics {
        requests_running: Gauge = "vllm:num_requests_running", Requests, &[],
            "Sequences in the running batch.";
        requests_waiting: Gauge = "vllm:num_requests_waiting", Requests, &[],
            "Sequences that wait for a place in the batch or for their KV.";
        kv_cache_usage: GaugeF64 = "vllm:kv_cache_usage_perc", Ratio, &[],
            "Share of KV blocks that are not free and not merely cached, 0 to 1.";
        prompt_tokens: Counter = "vllm:prompt_tokens_total", Tokens, &[],
            "Prompt tokens of started sequences, aborted ones included.";
        generation_tokens: Counter = "vllm:generation_tokens_total", Tokens, &[],
            "Tokens generated, aborted sequences included.";
        preemptions: Counter = "vllm:num_preemptions_total", Events, &[],
            "Running sequences whose blocks were taken.";
        prefix_cache_queries: Counter = "vllm:prefix_cache_queries_total", Tokens, &[],
            "Prompt tokens looked up in the prefix cache. A resumed sequence is not looked up again.";
        prefix_cache_hits: Counter = "vllm:prefix_cache_hits_total", Tokens, &[],
            "Prompt tokens found in the prefix cache. Tokens recomputed after a preemption are not hits.";
        request_success: ByLabel<FinishedReason, Counter> = "vllm:request_success_total", Requests, &[],
            "Sequences that ended, by reason.";
        time_to_first_token: Histogram = "vllm:time_to_first_token_seconds", Seconds, buckets::TTFT_SECONDS,
            "From the worker's acceptance to its first token.";
        inter_token_latency: Histogram = "vllm:inter_token_latency_seconds", Seconds, buckets::ITL_SECONDS,
            "Gap between two tokens of one sequence as the worker made them.";
        request_queue_time: Histogram = "vllm:request_queue_time_seconds", Seconds, buckets::REQUEST_SECONDS,
            "From acceptance to the first step.";
        request_prefill_time: Histogram = "vllm:request_prefill_time_seconds", Seconds, buckets::REQUEST_SECONDS,
            "From the first step to the first token.";
        request_decode_time: Histogram = "vllm:request_decode_time_seconds", Seconds, buckets::REQUEST_SECONDS,
            "From the first to the last token.";
        e2e_request_latency: Histogram = "vllm:e2e_request_latency_seconds", Seconds, buckets::REQUEST_SECONDS,
            "From acceptance to the end.";
        request_prompt_tokens: Histogram = "vllm:request_prompt_tokens", Tokens, buckets::TOKENS,
            "Prompt tokens of an ended request.";
        request_generation_tokens: Histogram = "vllm:request_generation_tokens", Tokens, buckets::TOKENS,
            "Tokens generated for an ended request.";
        not_finite_requests: Counter = "baton_not_finite_requests_total", Requests, &[],
            "Requests that failed because the model's logits were not finite. Not 0: the weights are damaged, or too large for the arithmetic.";
        cache_config: Info = "vllm:cache_config_info", Flag, &[],
            "Always 1; the labels block_size and num_gpu_blocks describe the KV pool.";
        kv_blocks: ByLabel<BlockState, Gauge> = "baton_kv_blocks", Blocks, &[],
            "KV blocks by state; the states add up to the pool.";
        kv_transfer_bytes: ByLabel<(Direction, Transport), Counter> = "baton_kv_transfer_bytes_total", Bytes, &[],
            "KV bytes moved, by what carried them (their commit, if a lane was replaced). Sent and received bytes of a cluster agree.";
        kv_transfer: ByLabel<Direction, Histogram> = "baton_kv_transfer_seconds", Seconds, buckets::PHASE_SECONDS,
            "From the first frame to the commit of a handoff.";
        kv_transfer_exposed: Histogram = "baton_kv_transfer_exposed_seconds", Seconds, buckets::PHASE_SECONDS,
            "The part of a transfer that computing did not hide.";
        kv_transfer_overlap: Histogram = "baton_kv_transfer_overlap_ratio", Ratio, buckets::RATIO,
            "1 minus exposed over total time of a transfer.";
        kv_transfer_failures: ByLabel<(Direction, TransferFailure), Counter> = "baton_kv_transfer_failures_total", Events, &[],
            "Handoffs that did not commit, by cause.";
        kv_transfers_in_flight: ByLabel<Direction, Gauge> = "baton_kv_transfers_in_flight", Events, &[],
            "Handoffs between their reservation and their end. 0 when idle.";
        step: ByLabel<StepPhase, Histogram> = "baton_step_seconds", Seconds, buckets::PHASE_SECONDS,
            "One engine step.";
        batch_tokens: ByLabel<StepPhase, Histogram> = "baton_batch_tokens", Tokens, buckets::TOKENS,
            "Token rows in a step.";
        batch_sequences: ByLabel<StepPhase, Histogram> = "baton_batch_size", Sequences, buckets::SEQUENCES,
            "Sequences in a step.";
        step_over_prediction: Histogram = "baton_step_over_prediction_ratio", Times, buckets::OVER_PREDICTION,
            "Real over foretold time of a step with decode rows, from the end of the step before.";
        itl_target: GaugeF64 = "baton_itl_target_seconds", Seconds, &[],
            "Smallest target on the gap between tokens that steps are planned for. 0 without one.";
        slo_delayed_requests: Counter = "baton_slo_delayed_requests_total", Requests, &[],
            "Requests whose start was put off to keep a target on the gap between tokens.";
        slo_cut_steps: Counter = "baton_slo_cut_steps_total", Events, &[],
            "Steps whose prompt tokens were cut to keep a target on the gap between tokens.";
        mfu: ByLabel<StepPhase, Histogram> = "baton_step_mfu_ratio", Ratio, buckets::UTILISATION,
            "Model FLOP/s utilisation of a step: operations the model asked for, per second, over baton_device_peak_flops.";
        mbu: ByLabel<StepPhase, Histogram> = "baton_step_mbu_ratio", Ratio, buckets::UTILISATION,
            "Model bandwidth utilisation of a step: bytes it had to read, per second, over baton_device_peak_memory_bytes_per_second.";
        flops: Counter = "baton_flops_total", Flops, &[],
            "Operations the model asked for, a multiply-add counting 2. Its rate over the peak and the share of time in steps is MFU.";
        memory_bytes: Counter = "baton_memory_bytes_total", Bytes, &[],
            "Bytes of weights and KV that steps had to read. Its rate over the peak and the share of time in steps is MBU.";
        peak_flops: GaugeF64 = "baton_device_peak_flops", FlopsPerSecond, &[],
            "Operations per second of the worker's threads at best, measured at start: of integer dot products for quantised weights, of f32 for others, of their mix for both.";
        peak_memory_bytes: GaugeF64 = "baton_device_peak_memory_bytes_per_second", BytesPerSecond, &[],
            "Reading a working set of the weights' size at best with the worker's threads, measured at start.";
        build: Info = "baton_worker_build_info", Flag, &[],
            "Always 1; the labels version and isa name the build and its kernels.";
    }
}
