//! The bounds of every input, in one place, so that each front door and worker
//! refuses the same things by the same numbers.

/// Choices of one request (`n`).
pub const CHOICES_MAX: u32 = 16;
/// Alternatives listed beside each sampled token.
pub const TOP_LOGPROBS_MAX: u32 = 20;
/// Stop strings of one request.
pub const STOP_STRINGS_MAX: usize = 16;
/// Bytes of one stop string.
pub const STOP_STRING_BYTES_MAX: usize = 1024;
/// Bytes of the name of a model, worker or tenant.
pub const NAME_BYTES_MAX: usize = 256;
/// Stop token ids of one request.
pub const STOP_TOKENS_MAX: usize = 64;
/// Entries of `logit_bias`.
pub const LOGIT_BIAS_MAX: usize = 1024;
/// Milliseconds of a target on the gap between tokens. Below, a timer's own error
/// would be most of it; above, nobody waits.
pub const ITL_MS: std::ops::RangeInclusive<f64> = 0.1..=60_000.0;
/// Milliseconds of a target on the time to the first token: up to the longest time that
/// a request may take.
pub const TTFT_MS: std::ops::RangeInclusive<f64> = 1.0..=600_000.0;
/// What `priority` may be; higher goes first.
pub const PRIORITY: std::ops::RangeInclusive<i32> = -100..=100;
/// Characters of a client-given request id that are kept.
pub const REQUEST_ID_CHARS_MAX: usize = 64;
/// Bytes of one front-door request body or gRPC message.
pub const BODY_BYTES_MAX: usize = 16 << 20;
/// Bytes of one message between router and workers (a prompt of 16 Mi tokens never fits a context).
pub const INTERNAL_MESSAGE_BYTES_MAX: usize = 64 << 20;
/// Prompts in one completions call.
pub const PROMPTS_MAX: usize = 64;
/// Messages in one chat call.
pub const CHAT_MESSAGES_MAX: usize = 4096;
/// Variables for the chat template of one call, and bytes of their JSON.
pub const CHAT_TEMPLATE_KWARGS_MAX: usize = 64;
pub const CHAT_TEMPLATE_KWARGS_BYTES_MAX: usize = 64 << 10;
