//! From JSON bodies to requests of `baton.v1`.
//!
//! Values are checked by the frontend; here only what JSON alone can get wrong is:
//! two names for one limit, ids written as text, fields this build does not serve.

use std::collections::{BTreeMap, HashMap};

use baton_proto::float_range::{self, FloatRange};
use baton_proto::{Error, limits, v1};
use serde_json::Value;
use serde_json::value::RawValue;

use super::number::{self, Whole};
use super::wire;
use crate::resume::from_hex;

/// A call, translated.
#[derive(Debug)]
pub(crate) struct Call {
    /// One per prompt, at least one.
    pub(crate) requests: Vec<v1::GenerateRequest>,
    pub(crate) shape: Shape,
}

/// How the answer looks.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) chat: bool,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    pub(crate) choices: u32,
    pub(crate) logprobs: bool,
}

/// The sampling fields that both bodies have, moved out of either.
macro_rules! sampling {
    ($body:ident, $max_tokens:expr, $logprobs:expr) => {
        v1::SamplingParams {
            temperature: narrow(&float_range::TEMPERATURE, $body.temperature)?,
            top_k: $body.top_k.map(|whole| whole.0),
            top_p: narrow(&float_range::TOP_P, $body.top_p)?,
            min_p: narrow(&float_range::MIN_P, $body.min_p)?,
            repetition_penalty: narrow(&float_range::REPETITION_PENALTY, $body.repetition_penalty)?,
            presence_penalty: narrow(&float_range::PRESENCE_PENALTY, $body.presence_penalty)?,
            frequency_penalty: narrow(&float_range::FREQUENCY_PENALTY, $body.frequency_penalty)?,
            logit_bias: logit_bias($body.logit_bias.take())?,
            seed: $body.seed.map(|seed| seed.0),
            n: $body.n.map(|whole| whole.0),
            max_tokens: $max_tokens,
            min_tokens: $body.min_tokens.map(|whole| whole.0),
            stop_token_ids: number::all($body.stop_token_ids.take().unwrap_or_default()),
            ignore_eos: $body.ignore_eos,
            logprobs: $logprobs,
        }
    };
}

impl Call {
    /// A chat completion.
    pub(crate) fn from_chat(mut body: wire::ChatCompletion) -> Result<Self, Error> {
        for (field, value) in [
            ("tools", &body.tools),
            ("tool_choice", &body.tool_choice),
            ("functions", &body.functions),
            ("function_call", &body.function_call),
            ("audio", &body.audio),
            ("prediction", &body.prediction),
            ("reasoning_effort", &body.reasoning_effort),
            ("verbosity", &body.verbosity),
            ("web_search_options", &body.web_search_options),
        ] {
            refuse_if(field, value.as_ref().is_some_and(|value| !value.is_null()))?;
        }
        let text_only = |value: &Value| value.is_null() || *value == serde_json::json!(["text"]);
        refuse_if(
            "modalities",
            !body.modalities.as_ref().is_none_or(text_only),
        )?;
        refuse_format(body.response_format.as_ref())?;
        let whole = |given: Option<Whole<u32>>| given.map(|whole| whole.0);
        let max_tokens = one_limit(whole(body.max_tokens), whole(body.max_completion_tokens))?;
        let wants_logprobs = body.logprobs.unwrap_or(false);
        if body.top_logprobs.is_some() && !wants_logprobs {
            return Err(Error::invalid("top_logprobs", "needs `logprobs: true`"));
        }
        let logprobs = wants_logprobs.then(|| whole(body.top_logprobs).unwrap_or(0));
        let sampling = sampling!(body, max_tokens, logprobs);
        let shape = shape(
            true,
            body.stream,
            body.stream_options.as_ref(),
            sampling.n,
            logprobs,
        )?;
        let prompt = v1::generate_request::Prompt::Chat(chat(Conversation {
            messages: body.messages,
            add_generation_prompt: body.add_generation_prompt,
            continue_final_message: body.continue_final_message,
            chat_template_kwargs: body.chat_template_kwargs,
        })?);
        let request = v1::GenerateRequest {
            model: body.model.unwrap_or_default(),
            prompt: Some(prompt),
            sampling: Some(sampling),
            stop: body.stop.map(wire::Stop::into_vec).unwrap_or_default(),
            include_stop_in_output: body.include_stop_str_in_output.unwrap_or(false),
            exact: body.exact,
            use_cache: body.use_cache,
            slo: body.slo.map(wire::Slo::into_v1),
            priority: body.priority.map_or(0, |whole| whole.0),
            allow_special_tokens: body.allow_special_tokens,
            resume: resume(body.resume, &shape, 1)?,
            ..v1::GenerateRequest::default()
        };
        Ok(Self {
            requests: vec![request],
            shape,
        })
    }

    /// A plain completion.
    pub(crate) fn from_completion(mut body: wire::Completion) -> Result<Self, Error> {
        refuse_if("echo", body.echo == Some(true))?;
        refuse_if(
            "suffix",
            body.suffix
                .as_ref()
                .is_some_and(|suffix| !suffix.is_empty()),
        )?;
        refuse_if(
            "best_of",
            body.best_of
                .is_some_and(|best| best != body.n.unwrap_or(Whole(1))),
        )?;
        refuse_format(body.response_format.as_ref())?;
        let logprobs = body.logprobs.map(|top| top.0);
        let sampling = sampling!(body, body.max_tokens.map(|whole| whole.0), logprobs);
        let shape = shape(
            false,
            body.stream,
            body.stream_options.as_ref(),
            sampling.n,
            logprobs,
        )?;
        let stop = body.stop.map(wire::Stop::into_vec).unwrap_or_default();
        let prompts = prompts(body.prompt)?;
        let resume = resume(body.resume, &shape, prompts.len())?;
        let request = |prompt| v1::GenerateRequest {
            model: body.model.clone().unwrap_or_default(),
            prompt: Some(prompt),
            sampling: Some(sampling.clone()),
            stop: stop.clone(),
            include_stop_in_output: body.include_stop_str_in_output.unwrap_or(false),
            exact: body.exact,
            use_cache: body.use_cache,
            slo: body.slo.map(wire::Slo::into_v1),
            priority: body.priority.map_or(0, |whole| whole.0),
            allow_special_tokens: body.allow_special_tokens,
            resume: resume.clone(),
            ..v1::GenerateRequest::default()
        };
        let requests = prompts.into_iter().map(request).collect();
        Ok(Self { requests, shape })
    }
}

/// What is to be resumed: one stream, as a stream. Logprobs are told apart by token,
/// so a client that reads them has to have counted.
fn resume(
    given: Option<wire::Resume>,
    shape: &Shape,
    prompts: usize,
) -> Result<Option<v1::Resume>, Error> {
    let Some(given) = given else {
        return Ok(None);
    };
    if !shape.stream {
        return Err(Error::invalid("resume", "needs `stream: true`"));
    }
    if prompts != 1 {
        let message = format!("resumes one prompt, {prompts} were sent");
        return Err(Error::invalid("resume", message));
    }
    for (index, choice) in given.choices.iter().enumerate() {
        let counted = choice.tokens_received.is_some() || choice.token_ids.is_some();
        if shape.logprobs && !counted && choice.text_bytes_received.0 > 0 {
            let field = format!("resume.choices[{index}].tokens_received");
            return Err(Error::invalid(field, "is needed beside logprobs"));
        }
    }
    let choices = given.choices.into_iter().map(|choice| v1::ResumeChoice {
        tokens_received: choice.tokens_received.map(|whole| whole.0),
        text_bytes_received: choice.text_bytes_received.0,
        token_ids: number::all(choice.token_ids.unwrap_or_default()),
    });
    Ok(Some(v1::Resume {
        resume_token: from_hex(&given.resume_token)?,
        choices: choices.collect(),
    }))
}

/// The fields of a conversation, which two bodies have.
struct Conversation {
    messages: Vec<Box<RawValue>>,
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
    chat_template_kwargs: Option<Box<RawValue>>,
}

/// A conversation as the template gets it.
fn chat(given: Conversation) -> Result<v1::Chat, Error> {
    let messages = given.messages;
    if messages.is_empty() {
        return Err(Error::invalid(
            "messages",
            "is empty, at least one message is needed",
        ));
    }
    if messages.len() > limits::CHAT_MESSAGES_MAX {
        return Err(Error::invalid(
            "messages",
            format!(
                "{} messages, at most {}",
                messages.len(),
                limits::CHAT_MESSAGES_MAX
            ),
        ));
    }
    let messages = messages
        .iter()
        .map(|message| v1::ChatMessage {
            json: message.get().to_owned(),
        })
        .collect();
    let kwargs = given.chat_template_kwargs;
    Ok(v1::Chat {
        messages,
        add_generation_prompt: given.add_generation_prompt,
        tools_json: String::new(),
        continue_final_message: given.continue_final_message.unwrap_or(false),
        chat_template_kwargs_json: kwargs.map(|json| json.get().to_owned()).unwrap_or_default(),
    })
}

/// A `/tokenize` body.
pub(crate) fn tokenize(body: wire::Tokenize) -> Result<v1::TokenizeRequest, Error> {
    use v1::tokenize_request::Input;
    let input = match (body.prompt.or(body.text), body.messages) {
        (Some(text), None) => {
            for (field, present) in [
                (
                    "add_generation_prompt",
                    body.add_generation_prompt.is_some(),
                ),
                (
                    "continue_final_message",
                    body.continue_final_message.is_some(),
                ),
                ("chat_template_kwargs", body.chat_template_kwargs.is_some()),
            ] {
                if present {
                    return Err(Error::invalid(field, "needs `messages`"));
                }
            }
            Input::Text(text)
        }
        (None, Some(messages)) => Input::Chat(chat(Conversation {
            messages,
            add_generation_prompt: body.add_generation_prompt,
            continue_final_message: body.continue_final_message,
            chat_template_kwargs: body.chat_template_kwargs,
        })?),
        _ => {
            return Err(Error::invalid(
                "prompt",
                "give either `prompt` or `messages`",
            ));
        }
    };
    Ok(v1::TokenizeRequest {
        model: body.model.unwrap_or_default(),
        input: Some(input),
        add_special: body.add_special_tokens,
        allow_special_tokens: body.allow_special_tokens,
    })
}

fn prompts(prompt: Option<wire::Prompt>) -> Result<Vec<v1::generate_request::Prompt>, Error> {
    use v1::generate_request::Prompt;
    let ids = |ids| Prompt::TokenIds(v1::TokenIds { ids });
    let prompts: Vec<Prompt> = match prompt {
        None => return Err(Error::invalid("prompt", "missing")),
        Some(wire::Prompt::Text(text)) => vec![Prompt::Text(text)],
        Some(wire::Prompt::Texts(texts)) => texts.into_iter().map(Prompt::Text).collect(),
        Some(wire::Prompt::Ids(list)) => vec![ids(list)],
        Some(wire::Prompt::IdLists(lists)) => lists.into_iter().map(ids).collect(),
    };
    if prompts.is_empty() {
        return Err(Error::invalid("prompt", "is an empty list"));
    }
    if prompts.len() > limits::PROMPTS_MAX {
        return Err(Error::invalid(
            "prompt",
            format!("{} prompts, at most {}", prompts.len(), limits::PROMPTS_MAX),
        ));
    }
    // Found before any prompt is started: one bad entry refuses the whole.
    let empty = prompts
        .iter()
        .position(|prompt| matches!(prompt, Prompt::TokenIds(list) if list.ids.is_empty()));
    match empty {
        Some(index) => Err(Error::invalid(format!("prompt[{index}]"), "has no tokens")),
        None => Ok(prompts),
    }
}

fn shape(
    chat: bool,
    stream: Option<bool>,
    options: Option<&wire::StreamOptions>,
    n: Option<u32>,
    logprobs: Option<u32>,
) -> Result<Shape, Error> {
    let stream = stream.unwrap_or(false);
    if options.is_some() && !stream {
        return Err(Error::invalid("stream_options", "needs `stream: true`"));
    }
    Ok(Shape {
        chat,
        stream,
        include_usage: options
            .and_then(|options| options.include_usage)
            .unwrap_or(false),
        choices: n.unwrap_or(1),
        logprobs: logprobs.is_some(),
    })
}

fn one_limit(old: Option<u32>, new: Option<u32>) -> Result<Option<u32>, Error> {
    match (old, new) {
        (Some(old), Some(new)) if old != new => Err(Error::invalid(
            "max_completion_tokens",
            format!("{new} contradicts `max_tokens` {old}"),
        )),
        (old, new) => Ok(new.or(old)),
    }
}

/// A float within its range, as it is used.
fn narrow(range: &FloatRange, given: Option<f64>) -> Result<Option<f32>, Error> {
    given.map(|value| range.narrow(value)).transpose()
}

fn logit_bias(given: Option<BTreeMap<String, f64>>) -> Result<HashMap<u32, f32>, Error> {
    given
        .unwrap_or_default()
        .into_iter()
        .map(|(id, bias)| {
            let parsed = id.parse::<u32>().map_err(|_| {
                let shown: String = id.chars().take(40).collect();
                Error::invalid("logit_bias", format!("`{shown}` is not a token id"))
            })?;
            let bias = float_range::LOGIT_BIAS.narrow(bias).map_err(|error| {
                let message = format!("of token {parsed}: {}", error.message);
                Error::invalid(error.field, message)
            })?;
            Ok((parsed, bias))
        })
        .collect()
}

fn refuse_format(format: Option<&Value>) -> Result<(), Error> {
    let plain = |format: &Value| format.is_null() || format["type"] == "text";
    refuse_if("response_format", !format.is_none_or(plain))
}

fn refuse_if(field: &str, present: bool) -> Result<(), Error> {
    if present {
        Err(Error::unsupported(field, "is not supported"))
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn chat_call(extra: Value) -> Result<Call, Error> {
        let mut body = json!({ "messages": [{ "role": "user", "content": "hi" }] });
        body.as_object_mut()
            .unwrap()
            .extend(extra.as_object().unwrap().clone());
        Call::from_chat(serde_json::from_value(body).unwrap())
    }

    fn field(extra: Value) -> String {
        chat_call(extra).unwrap_err().field
    }

    #[test]
    fn every_optional_field_may_be_null() {
        let nulls = json!({
            "model": null, "max_tokens": null, "temperature": null, "stop": null, "seed": null,
            "n": null, "tools": null, "response_format": null, "logit_bias": null, "user": null,
            "stream": null, "stream_options": null, "logprobs": null, "top_logprobs": null,
        });
        let call = chat_call(nulls).unwrap();
        assert!(!call.shape.stream && call.requests[0].sampling.as_ref().unwrap().seed.is_none());
    }

    #[test]
    fn what_is_not_served_is_refused_by_name() {
        assert_eq!(field(json!({ "tools": [] })), "tools");
        assert_eq!(
            field(json!({ "response_format": { "type": "json_object" } })),
            "response_format"
        );
        assert_eq!(field(json!({ "modalities": ["audio"] })), "modalities");
        assert_eq!(field(json!({ "top_logprobs": 3 })), "top_logprobs");
        assert_eq!(field(json!({ "logit_bias": { "abc": 1.0 } })), "logit_bias");
        assert_eq!(field(json!({ "stream_options": {} })), "stream_options");
        assert_eq!(
            field(json!({ "max_tokens": 3, "max_completion_tokens": 4 })),
            "max_completion_tokens"
        );
        let unknown = serde_json::from_value::<wire::ChatCompletion>(
            json!({ "messages": [], "tempratur": 1 }),
        );
        assert!(unknown.unwrap_err().to_string().contains("tempratur"));
    }

    #[test]
    fn the_newer_limit_is_honoured() {
        let call = chat_call(json!({ "max_completion_tokens": 7 })).unwrap();
        assert_eq!(
            call.requests[0].sampling.as_ref().unwrap().max_tokens,
            Some(7)
        );
    }

    #[test]
    fn prompts_come_in_four_shapes() {
        let count = |prompt: Value| {
            let body = serde_json::from_value(json!({ "prompt": prompt })).unwrap();
            Call::from_completion(body)
                .map(|call| call.requests.len())
                .map_err(|error| error.field)
        };
        assert_eq!(count(json!("a")), Ok(1));
        assert_eq!(count(json!(["a", "b"])), Ok(2));
        assert_eq!(count(json!([5, 6])), Ok(1));
        assert_eq!(count(json!([[5], [6]])), Ok(2));
        assert_eq!(count(json!([[5], []])), Err("prompt[1]".to_owned()));
        assert_eq!(count(json!([])), Err("prompt".to_owned()));
        assert_eq!(count(Value::Null), Err("prompt".to_owned()));
    }
}
