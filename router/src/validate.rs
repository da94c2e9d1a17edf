//! A client's request, checked field by field. Pure.
//!
//! Whatever is not offered is refused by name, whatever is wrong is refused with
//! the value and what is allowed; nothing is ignored or clamped. Text becomes
//! tokens here too ([`Prompt::encode`]), which may take long and belongs off the
//! runtime.

use baton_proto::sampling::SamplingParams;
use baton_proto::work::check_context;
use baton_proto::{Error, TokenId, convert, limits, v1};
use baton_tokenizer::{ChatRequest, EncodeOptions, Json, JsonObject, Tokenizer};

use crate::text::StopRules;
use crate::workers::ServedModel;

/// What is to be turned into tokens.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    Text {
        text: String,
        /// Whether control tokens that it spells become tokens.
        allow_special_tokens: bool,
    },
    Tokens(Vec<TokenId>),
    Chat(Box<ChatRequest>),
}

/// Refuses the fields that are known but not offered.
///
/// # Errors
/// [`ErrorKind::Unsupported`] naming the field.
pub fn check_supported(request: &v1::GenerateRequest) -> Result<(), Error> {
    let refused = |field: &str, message: &str| Err(Error::unsupported(field, message));
    if request.response_format.is_some() {
        return refused("response_format", "structured output is not supported");
    }
    if !request.adapter.is_empty() {
        return refused("adapter", "adapters are not supported");
    }
    Ok(())
}

/// The stop strings and how they are treated.
///
/// # Errors
/// [`ErrorKind::Invalid`] naming `stop`: too many, too long, or empty.
pub fn stop_rules(request: &v1::GenerateRequest, min_tokens: u32) -> Result<StopRules, Error> {
    let stop = &request.stop;
    if stop.len() > limits::STOP_STRINGS_MAX {
        let message = format!(
            "{} strings, at most {}",
            stop.len(),
            limits::STOP_STRINGS_MAX
        );
        return Err(Error::invalid("stop", message));
    }
    for text in stop {
        if text.is_empty() {
            return Err(Error::invalid("stop", "an empty string is not allowed"));
        }
        if text.len() > limits::STOP_STRING_BYTES_MAX {
            let max = limits::STOP_STRING_BYTES_MAX;
            let message = format!("a string of {} bytes, at most {max}", text.len());
            return Err(Error::invalid("stop", message));
        }
    }
    Ok(StopRules {
        stop: stop.clone(),
        include_stop: request.include_stop_in_output,
        min_tokens,
    })
}

/// The field that a request's prompt comes from.
pub fn prompt_field(request: &v1::GenerateRequest) -> &'static str {
    match request.prompt {
        Some(v1::generate_request::Prompt::Chat(_)) => "messages",
        _ => "prompt",
    }
}

/// How much there is to a request's prompt, before anything is done with it.
pub fn prompt_bytes(request: &v1::GenerateRequest) -> usize {
    use v1::generate_request::Prompt as Wire;
    match &request.prompt {
        None => 0,
        Some(Wire::Text(text)) => text.len(),
        Some(Wire::TokenIds(tokens)) => size_of_val(tokens.ids.as_slice()),
        Some(Wire::Chat(chat)) => chat_bytes(chat),
    }
}

/// The same of a conversation.
pub fn chat_bytes(chat: &v1::Chat) -> usize {
    let messages = chat.messages.iter().map(|message| message.json.len());
    messages.sum::<usize>() + chat.tools_json.len() + chat.chat_template_kwargs_json.len()
}

/// The prompt of a request, not yet tokens. As much work as the prompt is long.
///
/// # Errors
/// [`ErrorKind::Invalid`] naming `prompt` or a message.
pub fn prompt(request: v1::GenerateRequest, created: i64) -> Result<Prompt, Error> {
    use v1::generate_request::Prompt as Wire;
    let allowed = request.allow_special_tokens;
    match request.prompt {
        None => Err(Error::invalid("prompt", "missing")),
        Some(Wire::Text(text)) => Ok(Prompt::Text {
            text,
            allow_special_tokens: allowed.unwrap_or(RAW_ALLOWS_SPECIAL_TOKENS),
        }),
        Some(Wire::TokenIds(_)) if allowed == Some(false) => {
            let message = "must be true beside token ids, which are taken as they are";
            Err(Error::invalid("allow_special_tokens", message))
        }
        Some(Wire::TokenIds(tokens)) => Ok(Prompt::Tokens(tokens.ids)),
        Some(Wire::Chat(chat)) => chat_prompt(&chat, created, allowed.unwrap_or(false)),
    }
}

/// Whether a text without a chat template gives control tokens where the request does
/// not say: clients render their own chats this way.
pub const RAW_ALLOWS_SPECIAL_TOKENS: bool = true;

/// A conversation, not yet rendered.
///
/// # Errors
/// [`ErrorKind::Invalid`] naming `messages`, `tools` or `chat_template_kwargs`.
pub fn chat_prompt(
    chat: &v1::Chat,
    created: i64,
    allow_special_tokens: bool,
) -> Result<Prompt, Error> {
    if chat.messages.is_empty() {
        return Err(Error::invalid("messages", "must not be empty"));
    }
    if chat.messages.len() > limits::CHAT_MESSAGES_MAX {
        let max = limits::CHAT_MESSAGES_MAX;
        let message = format!("{} messages, at most {max}", chat.messages.len());
        return Err(Error::invalid("messages", message));
    }
    let json = |field: String, text: &str| {
        Json::parse(text).map_err(|error| Error::invalid(field, format!("invalid JSON: {error}")))
    };
    let messages = chat
        .messages
        .iter()
        .enumerate()
        .map(|(index, message)| json(format!("messages[{index}]"), &message.json))
        .collect::<Result<_, _>>()?;
    let tools = match chat.tools_json.as_str() {
        "" => Vec::new(),
        text => match json("tools".to_owned(), text)? {
            Json::Array(tools) => tools,
            _ => return Err(Error::invalid("tools", "must be an array")),
        },
    };
    let extra = template_kwargs(&chat.chat_template_kwargs_json)?;
    let open = chat.continue_final_message;
    Ok(Prompt::Chat(Box::new(ChatRequest {
        messages,
        tools,
        add_generation_prompt: chat.add_generation_prompt.unwrap_or(!open),
        continue_final_message: open,
        allow_special_tokens,
        now: created,
        extra,
        ..ChatRequest::default()
    })))
}

/// More variables for the chat template.
fn template_kwargs(text: &str) -> Result<JsonObject, Error> {
    let invalid = |message: String| Error::invalid("chat_template_kwargs", message);
    let max = limits::CHAT_TEMPLATE_KWARGS_BYTES_MAX;
    if text.len() > max {
        return Err(invalid(format!("{} bytes, at most {max}", text.len())));
    }
    let kwargs = match text {
        "" => return Ok(JsonObject::new()),
        text => Json::parse(text).map_err(|error| invalid(format!("invalid JSON: {error}")))?,
    };
    let max = limits::CHAT_TEMPLATE_KWARGS_MAX;
    match kwargs {
        Json::Object(kwargs) if kwargs.len() > max => Err(invalid(format!(
            "{} variables, at most {max}",
            kwargs.len()
        ))),
        Json::Object(kwargs) => Ok(kwargs),
        _ => Err(invalid("must be an object".to_owned())),
    }
}

impl Prompt {
    /// The prompt's tokens, at least one. CPU bound. A text that is far from fitting
    /// `context_max` tokens is refused here; one that is near it is counted by the caller.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] naming the field; an empty prompt has the reason `EMPTY_PROMPT`.
    pub fn encode(self, tokenizer: &Tokenizer, context_max: u32) -> Result<Vec<TokenId>, Error> {
        let (field, ids) = match self {
            Self::Text {
                text,
                allow_special_tokens,
            } => {
                let options = EncodeOptions {
                    parse_special: allow_special_tokens,
                    ..EncodeOptions::PROMPT
                };
                let ids = encode(tokenizer, &text, "prompt", context_max, |max| {
                    tokenizer.encode_within(&text, options, max)
                });
                ("prompt", ids?)
            }
            Self::Tokens(ids) => {
                if let Some(id) = ids.iter().find(|id| **id >= tokenizer.size()) {
                    let size = tokenizer.size();
                    let message = format!("token id {id} is not below the vocabulary's {size}");
                    return Err(Error::invalid("prompt", message));
                }
                ("prompt", ids)
            }
            Self::Chat(chat) => {
                let rendered = tokenizer
                    .render_chat(&chat)
                    .map_err(|error| tokenizer_error("messages", &error))?;
                let ids = encode(tokenizer, &rendered, "messages", context_max, |max| {
                    tokenizer.encode_chat(&rendered, max)
                });
                ("messages", ids?)
            }
        };
        if ids.is_empty() {
            let message = "has no tokens, at least one is needed";
            return Err(Error::invalid(field, message).with_reason("EMPTY_PROMPT"));
        }
        Ok(ids)
    }
}

/// A text's tokens. Encoding megabytes takes seconds, counting them nothing: what is too
/// long whatever its tokens are is refused before, and of what has more than twice the
/// context no more than that is made. In between a refusal knows how many there are.
fn encode(
    tokenizer: &Tokenizer,
    text: &str,
    field: &str,
    context_max: u32,
    encode_within: impl FnOnce(usize) -> Result<Vec<TokenId>, baton_tokenizer::Error>,
) -> Result<Vec<TokenId>, Error> {
    let max = (context_max as usize).saturating_mul(2);
    let fewest = tokenizer.fewest_tokens(text);
    let fewest = if fewest > context_max as usize {
        fewest
    } else {
        match encode_within(max) {
            Err(baton_tokenizer::Error::TooManyTokens { max }) => max + 1,
            encoded => return encoded.map_err(|error| tokenizer_error(field, &error)),
        }
    };
    let message = format!(
        "the model's context is {context_max} tokens, the prompt of {} bytes has at least {fewest}",
        text.len()
    );
    Err(Error::invalid("max_tokens", message).with_reason("CONTEXT_LENGTH_EXCEEDED"))
}

/// A tokenizer's error as a client sees it; `field` if it names none.
pub fn tokenizer_error(field: &str, error: &baton_tokenizer::Error) -> Error {
    let field = if error.field().is_empty() {
        field
    } else {
        error.field()
    };
    Error::new(error.kind(), error.to_string()).with_field(field)
}

/// Sampling parameters with every default filled in, once the prompt's length is
/// known: an absent `max_tokens` is what the context leaves.
///
/// # Errors
/// [`ErrorKind::Invalid`] naming the field; `CONTEXT_LENGTH_EXCEEDED` names the
/// context, the prompt's tokens and what was asked for.
pub fn sampling(
    wire: Option<&v1::SamplingParams>,
    prompt_tokens: usize,
    model: &ServedModel,
    seed: u64,
) -> Result<SamplingParams, Error> {
    let absent = v1::SamplingParams::default();
    let wire = wire.unwrap_or(&absent);
    let left = u64::from(model.context_max).saturating_sub(prompt_tokens as u64);
    // A full context still asks for one token, and is refused for it below.
    let max_tokens_default = u32::try_from(left).unwrap_or(u32::MAX).max(1);
    let params = convert::sampling_from_wire(wire, max_tokens_default, seed);
    params.validate(model.tokenizer.size())?;
    check_context(prompt_tokens, params.max_tokens, model.context_max)?;
    Ok(params)
}

/// The wire's bounds that hold before anything is tokenized, so that a wrong
/// value is not paid for. Whether the prompt fits is only known after it.
///
/// # Errors
/// As [`sampling`], but for the context's length.
pub fn check_sampling_early(
    wire: Option<&v1::SamplingParams>,
    model: &ServedModel,
) -> Result<(), Error> {
    let absent = v1::SamplingParams::default();
    let params = convert::sampling_from_wire(wire.unwrap_or(&absent), model.context_max, 0);
    params.validate(model.tokenizer.size())
}

/// A client's request id, cleaned: letters, digits, `.`, `_` and `-` of its first
/// 64 characters; `req` if nothing is left.
pub fn clean_request_id(given: &str) -> String {
    let clean: String = given
        .chars()
        .take(limits::REQUEST_ID_CHARS_MAX)
        .map(|c| match c {
            c if c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-') => c,
            _ => '-',
        })
        .collect();
    if clean.chars().any(|c| c.is_ascii_alphanumeric()) {
        clean
    } else {
        "req".to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_proto::ErrorKind;

    fn unsupported(change: impl FnOnce(&mut v1::GenerateRequest)) -> String {
        let mut request = v1::GenerateRequest::default();
        change(&mut request);
        let error = check_supported(&request).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Unsupported);
        error.field
    }

    #[test]
    fn what_is_not_offered_is_refused_by_name() {
        check_supported(&v1::GenerateRequest::default()).unwrap();
        assert_eq!(
            unsupported(|r| r.response_format = Some(v1::ResponseFormat::default())),
            "response_format"
        );
        assert_eq!(unsupported(|r| r.adapter = "a".into()), "adapter");
    }

    fn stop_error(stop: Vec<String>) -> String {
        let request = v1::GenerateRequest {
            stop,
            ..v1::GenerateRequest::default()
        };
        let error = stop_rules(&request, 0).unwrap_err();
        assert_eq!(error.field, "stop");
        error.message
    }

    #[test]
    fn stop_strings_are_bounded() {
        assert!(stop_error(vec!["a".into(); 17]).contains("17"));
        assert!(stop_error(vec![String::new()]).contains("empty"));
        assert!(stop_error(vec!["x".repeat(1025)]).contains("1025"));
    }

    #[test]
    fn prompts_of_the_wrong_shape_are_named() {
        let chat = |messages: &[&str], tools: &str| v1::Chat {
            messages: messages
                .iter()
                .map(|json| v1::ChatMessage {
                    json: (*json).to_owned(),
                })
                .collect(),
            tools_json: tools.to_owned(),
            ..v1::Chat::default()
        };
        let field = |chat: v1::Chat| chat_prompt(&chat, 0, false).unwrap_err().field;
        assert_eq!(field(chat(&[], "")), "messages");
        assert_eq!(field(chat(&["{}", "{"], "")), "messages[1]");
        assert_eq!(field(chat(&["{}"], "{}")), "tools");
        assert_eq!(field(chat(&["{}"], "[")), "tools");
        let many = (0..65).map(|index| format!("\"k{index}\": 0"));
        let many = format!("{{{}}}", many.collect::<Vec<_>>().join(","));
        for kwargs in [
            "[]",
            "{",
            &many,
            &format!("{{\"k\": \"{}\"}}", "x".repeat(64 << 10)),
        ] {
            let chat = v1::Chat {
                chat_template_kwargs_json: kwargs.to_owned(),
                ..chat(&["{}"], "")
            };
            assert_eq!(field(chat), "chat_template_kwargs", "{kwargs:.40}");
        }
        assert_eq!(
            prompt(v1::GenerateRequest::default(), 0).unwrap_err().field,
            "prompt"
        );
    }

    #[test]
    fn request_ids_are_cleaned_and_cut() {
        assert_eq!(clean_request_id("abc-1.2_X"), "abc-1.2_X");
        assert_eq!(clean_request_id("a b\n\u{e9}/"), "a-b---");
        assert_eq!(clean_request_id(""), "req");
        assert_eq!(clean_request_id("\u{1f642}"), "req");
        assert_eq!(clean_request_id(&"x".repeat(4096)).len(), 64);
    }
}
