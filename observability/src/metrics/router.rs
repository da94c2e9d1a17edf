//! What a router counts: what clients see, where their time went, what was decided.
//!
//! Times are measured on the router's clock, so that the phases of a request add
//! up to its total.

use crate::buckets;
use crate::instrument::{ByLabel, Counter, Gauge, Histogram, Info};
use crate::labels::{
    Decision, MemberState, Outcome, Path, PoolRole, RetryWhen, SecondTokenPhase, StallCause,
    Success, TtftPhase,
};
use crate::metrics::metric_set;

metric_set! {
    /// The metrics of a router.
    RouterMetrics {
        requests: ByLabel<Outcome, Counter> = "baton_requests_total", Requests, &[],
            "Requests that ended, by the gRPC code the client saw and the cause. Every accepted or refused request is counted exactly once.";
        requests_in_flight: Gauge = "baton_requests_in_flight", Requests, &[],
            "Requests accepted and not yet ended.";
        queue_requests: Gauge = "baton_queue_requests", Requests, &[],
            "Requests that wait for admission or placement.";
        queue_tokens: Gauge = "baton_queue_tokens", Tokens, &[],
            "Prompt tokens of the requests that wait for admission or placement.";
        time_to_first_token: ByLabel<Path, Histogram> = "baton_time_to_first_token_seconds", Seconds, buckets::TTFT_SECONDS,
            "From accepted to the first token handed to the client's connection. One sample per request that got a token.";
        inter_token_latency: ByLabel<Path, Histogram> = "baton_inter_token_latency_seconds", Seconds, buckets::ITL_SECONDS,
            "Gap between two tokens of one choice as sent to the client. One sample per gap.";
        time_per_output_token: ByLabel<Path, Histogram> = "baton_time_per_output_token_seconds", Seconds, buckets::ITL_SECONDS,
            "Mean gap of a finished request, its first token excluded. One sample per request with two or more tokens.";
        request_duration: ByLabel<Path, Histogram> = "baton_request_duration_seconds", Seconds, buckets::REQUEST_SECONDS,
            "From accepted to the end of the stream.";
        ttft_phase: ByLabel<TtftPhase, Histogram> = "baton_ttft_phase_seconds", Seconds, buckets::PHASE_SECONDS,
            "The parts of the time to first token; their sums add up to the sum of that metric.";
        ttft_over_forecast: Histogram = "baton_ttft_over_forecast_ratio", Times, buckets::OVER_PREDICTION,
            "Real over foretold time from placement to the first token, where it was foretold. Targets on that time are judged by the forecast and what it was off by lately.";
        second_token_phase: ByLabel<SecondTokenPhase, Histogram> = "baton_second_token_phase_seconds", Seconds, buckets::PHASE_SECONDS,
            "The parts of the gap between first and second token.";
        inter_token_stalls: ByLabel<StallCause, Counter> = "baton_inter_token_stall_total", Events, &[],
            "Gaps beyond the objective, by cause.";
        retries: ByLabel<(RetryWhen, Success), Counter> = "baton_retries_total", Events, &[],
            "Placements of a request after its first one.";
        migrations: ByLabel<Success, Counter> = "baton_migrations_total", Events, &[],
            "Running sequences moved to another decode worker.";
        resumed_requests: ByLabel<Success, Counter> = "baton_resumed_requests_total", Requests, &[],
            "Streams that clients went on with after a break, by how they ended. Each is also counted as a request.";
        cancel_to_release: Histogram = "baton_client_cancel_to_release_seconds", Seconds, buckets::PHASE_SECONDS,
            "From the client gone to the workers' word that the request's blocks are free.";
        decisions: ByLabel<Decision, Counter> = "baton_router_decisions_total", Events, &[],
            "Where the router had a prompt computed.";
        prompt_tokens: Counter = "baton_prompt_tokens_total", Tokens, &[],
            "Prompt tokens of requests that reached a worker, cancelled ones included.";
        cached_prompt_tokens: Counter = "baton_cached_prompt_tokens_total", Tokens, &[],
            "Prompt tokens that a prefix cache already held.";
        generation_tokens: Counter = "baton_generation_tokens_total", Tokens, &[],
            "Tokens sent to clients, cancelled requests included.";
        token_conflicts: Counter = "baton_token_conflicts_total", Events, &[],
            "Positions for which two workers reported different tokens. Anything but 0 is a defect.";
        overhead: Histogram = "baton_router_overhead_seconds", Seconds, buckets::PHASE_SECONDS,
            "The router's own work per request: validating, tokenising, hashing and choosing.";
        pool_members: ByLabel<(PoolRole, MemberState), Gauge> = "baton_pool_members", Workers, &[],
            "Workers as this router sees them.";
        lanes_cut: Gauge = "baton_lanes_cut", Lanes, &[],
            "Pairs of a prefill and a decode worker that a handoff could not pass between, and that are tried until one can.";
        membership_stale: Gauge = "baton_membership_stale", Flag, &[],
            "1 while the list of workers cannot be refreshed and the last known one is used.";
        build: Info = "baton_build_info", Flag, &[],
            "Always 1; the label version names the build.";
    }
}
