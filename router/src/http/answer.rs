//! A whole answer as one JSON object.

use std::sync::Arc;

use axum::response::{IntoResponse, Response};
use baton_proto::{Error, ErrorKind, v1};
use baton_tokenizer::Tokenizer;
use futures::StreamExt as _;
use serde_json::{Value, json};

use super::logprobs::{Listed, Unlisted, chat_entry, completion_lists};
use super::request::Shape;
use crate::frontend::GenerateStream;

/// One choice while it grows.
#[derive(Default)]
struct Choice {
    text: String,
    finish: Option<&'static str>,
    unlisted: Unlisted,
    listed: Vec<Listed>,
}

/// Reads every stream to its end. Dropping the future cancels them all.
pub(crate) async fn collect(
    streams: Vec<GenerateStream>,
    shape: &Shape,
    tokenizer: &Arc<Tokenizer>,
) -> Result<Response, Error> {
    let mut choices: Vec<Choice> = Vec::new();
    choices.resize_with(streams.len() * shape.choices as usize, Choice::default);
    let mut accepted = v1::Accepted::default();
    let mut usage = v1::Usage::default();
    let all = streams.into_iter().enumerate().map(|(prompt, stream)| {
        let first_choice = prompt as u32 * shape.choices;
        stream.map(move |event| (first_choice, event))
    });
    let mut events = futures::stream::select_all(all.map(Box::pin));
    while let Some((first_choice, event)) = events.next().await {
        match event?.event {
            Some(v1::generate_event::Event::Accepted(one)) => accepted = one,
            Some(v1::generate_event::Event::Tokens(mut tokens)) => {
                let choice = choice(&mut choices, first_choice + tokens.choice)?;
                choice.text.push_str(&tokens.text);
                choice.listed.extend(choice.unlisted.push(&mut tokens));
            }
            Some(v1::generate_event::Event::Finished(finished)) => {
                let choice = choice(&mut choices, first_choice + finished.choice)?;
                choice.text.push_str(&finished.text);
                choice.finish = Some(finish_reason(finished.reason()));
                let rest = choice.unlisted.settle(finished.token_texts);
                choice.listed.extend(rest);
            }
            Some(v1::generate_event::Event::Completed(completed)) => {
                add(&mut usage, completed.usage.unwrap_or_default());
            }
            None => {}
        }
    }
    if choices.iter().any(|choice| choice.finish.is_none()) {
        return Err(Error::new(
            ErrorKind::Internal,
            "the answer ended before its last token",
        ));
    }
    let choices: Vec<Value> = choices
        .into_iter()
        .enumerate()
        .map(|(index, choice)| render(index, &choice, shape, tokenizer))
        .collect();
    let (prefix, object) = if shape.chat {
        ("chatcmpl", "chat.completion")
    } else {
        ("cmpl", "text_completion")
    };
    Ok(axum::Json(json!({
        "id": format!("{prefix}-{}", accepted.request_id),
        "object": object,
        "created": accepted.created,
        "model": accepted.model,
        "choices": choices,
        "usage": usage_object(&usage),
    }))
    .into_response())
}

fn choice(choices: &mut [Choice], index: u32) -> Result<&mut Choice, Error> {
    choices.get_mut(index as usize).ok_or_else(|| {
        Error::new(
            ErrorKind::Internal,
            format!("choice {index} was not asked for"),
        )
    })
}

fn render(index: usize, choice: &Choice, shape: &Shape, tokenizer: &Tokenizer) -> Value {
    let logprobs = shape
        .logprobs
        .then(|| logprobs_object(shape, tokenizer, &choice.listed));
    if shape.chat {
        json!({
            "index": index,
            "message": { "role": "assistant", "content": choice.text, "refusal": null },
            "logprobs": logprobs,
            "finish_reason": choice.finish,
        })
    } else {
        json!({
            "index": index,
            "text": choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish,
        })
    }
}

/// Log-probabilities in the shape of the call.
pub(crate) fn logprobs_object(shape: &Shape, tokenizer: &Tokenizer, listed: &[Listed]) -> Value {
    if shape.chat {
        let entries = listed.iter().map(|one| chat_entry(tokenizer, one));
        json!({ "content": entries.collect::<Vec<_>>(), "refusal": null })
    } else {
        completion_lists(tokenizer, listed)
    }
}

/// The public name of a finish reason.
pub(crate) fn finish_reason(reason: v1::FinishReason) -> &'static str {
    match reason {
        v1::FinishReason::Length => "length",
        v1::FinishReason::Stop | v1::FinishReason::Unspecified | v1::FinishReason::Cancelled => {
            "stop"
        }
    }
}

/// Adds one prompt's usage to a call's.
pub(crate) fn add(total: &mut v1::Usage, one: v1::Usage) {
    total.prompt_tokens += one.prompt_tokens;
    total.completion_tokens += one.completion_tokens;
    total.cached_tokens += one.cached_tokens;
}

/// Usage in the public shape.
pub(crate) fn usage_object(usage: &v1::Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": { "cached_tokens": usage.cached_tokens },
    })
}
