//! An answer as server-sent events.
//!
//! Each event is one JSON chunk. The first one also carries `baton`, with what
//! [resumes](crate::resume) the stream at another router. Order per choice: a first chunk with the role
//! (chat), chunks with text, one chunk without text that carries the finish reason.
//! Then the usage chunk if it was asked for, then `[DONE]`. After an error object
//! nothing follows, no finish reason and no `[DONE]`, so that a broken answer never
//! looks whole.

use std::convert::Infallible;
use std::sync::Arc;

use axum::http::{HeaderValue, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use baton_proto::{Error, v1};
use baton_tokenizer::Tokenizer;
use futures::{Stream, StreamExt as _};
use serde_json::{Value, json};

use super::answer::{add, finish_reason, logprobs_object, usage_object};
use super::fault;
use super::logprobs::{Listed, Unlisted};
use super::request::Shape;
use crate::frontend::GenerateStream;
use crate::resume::to_hex;

/// Starts the stream. Dropping the response cancels every request behind it.
pub(crate) fn respond(
    streams: Vec<GenerateStream>,
    shape: Shape,
    tokenizer: Arc<Tokenizer>,
) -> Response {
    let events = events(streams, shape, tokenizer);
    let sse = Sse::new(events).keep_alive(KeepAlive::default());
    let mut response = sse.into_response();
    // Proxies that buffer would turn a stream into one late answer.
    let headers = response.headers_mut();
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

fn events(
    streams: Vec<GenerateStream>,
    shape: Shape,
    tokenizer: Arc<Tokenizer>,
) -> impl Stream<Item = Result<Event, Infallible>> {
    async_stream::stream! {
        let mut renderer = Renderer::new(shape, tokenizer, streams.len());
        let choices = renderer.shape.choices;
        let all = streams.into_iter().enumerate().map(|(prompt, stream)| {
            let first_choice = prompt as u32 * choices;
            stream.map(move |event| (first_choice, event))
        });
        let mut events = futures::stream::select_all(all.map(Box::pin));
        while let Some((first_choice, event)) = events.next().await {
            let event = match event {
                Ok(event) => event,
                Err(error) => {
                    yield Ok(failure(&error));
                    return;
                }
            };
            for chunk in renderer.render(first_choice, event) {
                yield Ok(data(&chunk));
            }
        }
        if let Some(chunk) = renderer.usage_chunk() {
            yield Ok(data(&chunk));
        }
        yield Ok(Event::default().data("[DONE]"));
    }
}

fn data(value: &Value) -> Event {
    Event::default().data(value.to_string())
}

fn failure(error: &Error) -> Event {
    data(&fault::object(error))
}

/// Turns events into chunks.
struct Renderer {
    shape: Shape,
    tokenizer: Arc<Tokenizer>,
    id: String,
    created: i64,
    model: String,
    /// Sent with the first chunk of an answer to one prompt: what resumes it.
    extension: Option<Value>,
    one_prompt: bool,
    usage: v1::Usage,
    /// Per choice.
    unlisted: Vec<Unlisted>,
}

impl Renderer {
    fn new(shape: Shape, tokenizer: Arc<Tokenizer>, prompts: usize) -> Self {
        let mut unlisted = Vec::new();
        unlisted.resize_with(prompts * shape.choices as usize, Unlisted::default);
        Self {
            shape,
            tokenizer,
            id: String::new(),
            created: 0,
            model: String::new(),
            extension: None,
            one_prompt: prompts == 1,
            usage: v1::Usage::default(),
            unlisted,
        }
    }

    fn render(&mut self, first_choice: u32, event: v1::GenerateEvent) -> Vec<Value> {
        let mut chunks = self.render_event(first_choice, event);
        if let Some(first) = chunks.first_mut()
            && let Some(extension) = self.extension.take()
        {
            first["baton"] = extension;
        }
        chunks
    }

    fn render_event(&mut self, first_choice: u32, event: v1::GenerateEvent) -> Vec<Value> {
        match event.event {
            Some(v1::generate_event::Event::Accepted(accepted)) => {
                self.accept(accepted);
                // The role comes first, in a chunk of its own.
                let roles = if self.shape.chat {
                    self.shape.choices
                } else {
                    0
                };
                (0..roles)
                    .map(|choice| {
                        let delta = json!({ "role": "assistant", "content": "" });
                        self.chat_chunk(first_choice + choice, delta, Value::Null, None)
                    })
                    .collect()
            }
            Some(v1::generate_event::Event::Tokens(mut tokens)) => {
                let choice = first_choice + tokens.choice;
                let unlisted = self.unlisted.get_mut(choice as usize);
                let listed = unlisted.map_or_else(Vec::new, |u| u.push(&mut tokens));
                self.text_chunk(choice, &tokens.text, &listed)
                    .into_iter()
                    .collect()
            }
            Some(v1::generate_event::Event::Finished(mut finished)) => {
                let choice = first_choice + finished.choice;
                let texts = std::mem::take(&mut finished.token_texts);
                let unlisted = self.unlisted.get_mut(choice as usize);
                let listed = unlisted.map_or_else(Vec::new, |u| u.settle(texts));
                let text = self.text_chunk(choice, &finished.text, &listed);
                let mut chunks: Vec<Value> = text.into_iter().collect();
                let reason = Some(finish_reason(finished.reason()));
                chunks.push(if self.shape.chat {
                    self.chat_chunk(choice, json!({}), Value::Null, reason)
                } else {
                    self.completion_chunk(choice, "", Value::Null, reason)
                });
                chunks
            }
            Some(v1::generate_event::Event::Completed(completed)) => {
                add(&mut self.usage, completed.usage.unwrap_or_default());
                Vec::new()
            }
            None => Vec::new(),
        }
    }

    /// The first prompt's acceptance names the whole call.
    fn accept(&mut self, accepted: v1::Accepted) {
        if self.id.is_empty() {
            let prefix = if self.shape.chat { "chatcmpl" } else { "cmpl" };
            self.id = format!("{prefix}-{}", accepted.request_id);
            self.created = accepted.created;
            self.model = accepted.model;
            self.extension = self.one_prompt.then(|| {
                json!({
                    "resume_token": to_hex(&accepted.resume_token),
                    "seed": accepted.seed,
                })
            });
        }
    }

    /// A chunk of text and of the tokens that can be listed, if there is either.
    fn text_chunk(&self, choice: u32, text: &str, listed: &[Listed]) -> Option<Value> {
        if text.is_empty() && listed.is_empty() {
            return None;
        }
        let wanted = self.shape.logprobs && !listed.is_empty();
        let logprobs = match wanted {
            true => logprobs_object(&self.shape, &self.tokenizer, listed),
            false => Value::Null,
        };
        Some(if self.shape.chat {
            self.chat_chunk(choice, json!({ "content": text }), logprobs, None)
        } else {
            self.completion_chunk(choice, text, logprobs, None)
        })
    }

    fn chat_chunk(
        &self,
        choice: u32,
        delta: Value,
        logprobs: Value,
        finish: Option<&'static str>,
    ) -> Value {
        self.chunk(vec![json!({
            "index": choice,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish,
        })])
    }

    fn completion_chunk(
        &self,
        choice: u32,
        text: &str,
        logprobs: Value,
        finish: Option<&'static str>,
    ) -> Value {
        self.chunk(vec![json!({
            "index": choice,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish,
        })])
    }

    fn chunk(&self, choices: Vec<Value>) -> Value {
        let object = if self.shape.chat {
            "chat.completion.chunk"
        } else {
            "text_completion"
        };
        let mut chunk = json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        });
        if self.shape.include_usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    }

    fn usage_chunk(&self) -> Option<Value> {
        self.shape.include_usage.then(|| {
            let mut chunk = self.chunk(Vec::new());
            chunk["usage"] = usage_object(&self.usage);
            chunk
        })
    }
}
