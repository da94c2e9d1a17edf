//! The JSON bodies clients send.
//!
//! Every field of the public API is listed: those that are served, those that
//! cannot change the answer (taken and ignored, see [`Ignored`]), and those that
//! would change it but are not supported (refused by name, see `request`). A field
//! in none of these lists is refused as unknown, so nothing is dropped silently.
//! `null` means absent everywhere.

use std::collections::BTreeMap;

use baton_proto::v1;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::number::{Seed, Whole};

/// A field that is taken and has no effect: bookkeeping of the client's.
pub(crate) type Ignored = Option<serde::de::IgnoredAny>;
/// A field that would change the answer; refused unless absent or null.
pub(crate) type Refused = Option<Value>;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct StreamOptions {
    pub(crate) include_usage: Option<bool>,
    #[serde(rename = "include_obfuscation")]
    pub(crate) _include_obfuscation: Ignored,
}

/// What is expected of latency; an extension of the public API.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Slo {
    pub(crate) ttft_ms: Option<f64>,
    pub(crate) itl_ms: Option<f64>,
}

impl Slo {
    pub(crate) fn into_v1(self) -> v1::Slo {
        v1::Slo {
            ttft_ms: self.ttft_ms,
            itl_ms: self.itl_ms,
        }
    }
}

/// What a client has of a stream that broke off; an extension of the public API.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Resume {
    /// Hexadecimal, from the first chunk's `baton.resume_token`.
    pub(crate) resume_token: String,
    pub(crate) choices: Vec<ResumeChoice>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ResumeChoice {
    pub(crate) tokens_received: Option<Whole<u32>>,
    #[serde(default = "nothing")]
    pub(crate) text_bytes_received: Whole<u64>,
    pub(crate) token_ids: Option<Vec<Whole<u32>>>,
}

fn nothing() -> Whole<u64> {
    Whole(0)
}

/// One stop string or several.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "a string or a list of strings")]
pub(crate) enum Stop {
    One(String),
    Many(Vec<String>),
}

impl Stop {
    pub(crate) fn into_vec(self) -> Vec<String> {
        match self {
            Self::One(stop) => vec![stop],
            Self::Many(stops) => stops,
        }
    }
}

/// A completion's prompt: text or token ids, one or several.
#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "a string, a list of strings, a list of token ids, or a list of such lists"
)]
pub(crate) enum Prompt {
    Text(String),
    Texts(Vec<String>),
    Ids(Vec<u32>),
    IdLists(Vec<Vec<u32>>),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ChatCompletion {
    pub(crate) model: Option<String>,
    /// As the client wrote them, so that no number changes.
    pub(crate) messages: Vec<Box<RawValue>>,
    pub(crate) add_generation_prompt: Option<bool>,
    pub(crate) continue_final_message: Option<bool>,
    pub(crate) chat_template_kwargs: Option<Box<RawValue>>,
    pub(crate) allow_special_tokens: Option<bool>,
    pub(crate) logprobs: Option<bool>,
    pub(crate) top_logprobs: Option<Whole<u32>>,
    pub(crate) max_completion_tokens: Option<Whole<u32>>,

    pub(crate) max_tokens: Option<Whole<u32>>,
    pub(crate) temperature: Option<f64>,
    pub(crate) top_p: Option<f64>,
    pub(crate) top_k: Option<Whole<u32>>,
    pub(crate) min_p: Option<f64>,
    pub(crate) n: Option<Whole<u32>>,
    pub(crate) stop: Option<Stop>,
    pub(crate) include_stop_str_in_output: Option<bool>,
    pub(crate) stop_token_ids: Option<Vec<Whole<u32>>>,
    pub(crate) seed: Option<Seed>,
    pub(crate) presence_penalty: Option<f64>,
    pub(crate) frequency_penalty: Option<f64>,
    pub(crate) repetition_penalty: Option<f64>,
    pub(crate) logit_bias: Option<BTreeMap<String, f64>>,
    pub(crate) min_tokens: Option<Whole<u32>>,
    pub(crate) ignore_eos: Option<bool>,
    pub(crate) stream: Option<bool>,
    pub(crate) stream_options: Option<StreamOptions>,
    pub(crate) exact: Option<bool>,
    pub(crate) use_cache: Option<bool>,
    pub(crate) slo: Option<Slo>,
    pub(crate) priority: Option<Whole<i32>>,
    pub(crate) resume: Option<Resume>,

    pub(crate) response_format: Option<Value>,
    pub(crate) tools: Refused,
    pub(crate) tool_choice: Refused,
    pub(crate) functions: Refused,
    pub(crate) function_call: Refused,
    pub(crate) audio: Refused,
    pub(crate) modalities: Refused,
    pub(crate) prediction: Refused,
    pub(crate) reasoning_effort: Refused,
    pub(crate) verbosity: Refused,
    pub(crate) web_search_options: Refused,

    #[serde(rename = "user")]
    pub(crate) _user: Ignored,
    #[serde(rename = "metadata")]
    pub(crate) _metadata: Ignored,
    #[serde(rename = "store")]
    pub(crate) _store: Ignored,
    #[serde(rename = "service_tier")]
    pub(crate) _service_tier: Ignored,
    #[serde(rename = "parallel_tool_calls")]
    pub(crate) _parallel_tool_calls: Ignored,
    #[serde(rename = "prompt_cache_key")]
    pub(crate) _prompt_cache_key: Ignored,
    #[serde(rename = "safety_identifier")]
    pub(crate) _safety_identifier: Ignored,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Completion {
    pub(crate) model: Option<String>,
    pub(crate) prompt: Option<Prompt>,
    pub(crate) allow_special_tokens: Option<bool>,
    /// Alternatives beside each token; absent or null reports nothing.
    pub(crate) logprobs: Option<Whole<u32>>,

    pub(crate) max_tokens: Option<Whole<u32>>,
    pub(crate) temperature: Option<f64>,
    pub(crate) top_p: Option<f64>,
    pub(crate) top_k: Option<Whole<u32>>,
    pub(crate) min_p: Option<f64>,
    pub(crate) n: Option<Whole<u32>>,
    pub(crate) stop: Option<Stop>,
    pub(crate) include_stop_str_in_output: Option<bool>,
    pub(crate) stop_token_ids: Option<Vec<Whole<u32>>>,
    pub(crate) seed: Option<Seed>,
    pub(crate) presence_penalty: Option<f64>,
    pub(crate) frequency_penalty: Option<f64>,
    pub(crate) repetition_penalty: Option<f64>,
    pub(crate) logit_bias: Option<BTreeMap<String, f64>>,
    pub(crate) min_tokens: Option<Whole<u32>>,
    pub(crate) ignore_eos: Option<bool>,
    pub(crate) stream: Option<bool>,
    pub(crate) stream_options: Option<StreamOptions>,
    pub(crate) exact: Option<bool>,
    pub(crate) use_cache: Option<bool>,
    pub(crate) slo: Option<Slo>,
    pub(crate) priority: Option<Whole<i32>>,
    pub(crate) resume: Option<Resume>,

    pub(crate) best_of: Option<Whole<u32>>,
    pub(crate) echo: Option<bool>,
    pub(crate) suffix: Option<String>,
    pub(crate) response_format: Option<Value>,

    #[serde(rename = "user")]
    pub(crate) _user: Ignored,
    #[serde(rename = "metadata")]
    pub(crate) _metadata: Ignored,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Tokenize {
    pub(crate) model: Option<String>,
    /// Plain text; `text` is the same.
    pub(crate) prompt: Option<String>,
    pub(crate) text: Option<String>,
    /// A conversation, rendered through the chat template.
    pub(crate) messages: Option<Vec<Box<RawValue>>>,
    pub(crate) add_special_tokens: Option<bool>,
    pub(crate) add_generation_prompt: Option<bool>,
    pub(crate) continue_final_message: Option<bool>,
    pub(crate) chat_template_kwargs: Option<Box<RawValue>>,
    pub(crate) allow_special_tokens: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Detokenize {
    pub(crate) model: Option<String>,
    pub(crate) tokens: Vec<u32>,
}
