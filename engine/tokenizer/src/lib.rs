//! Text to token ids and back, for one model.
//!
//! A router builds a [`Tokenizer`] from the [`baton_proto::tokenizer_spec::TokenizerSpec`]
//! that a worker ships, so it needs no model files. The crate also renders chat
//! templates, turns a stream of ids into text that never holds half a character
//! ([`TextStream`]), and watches such text for stop strings ([`StopMatcher`]).
//!
//! Everything that has state is rebuilt by replay: feed the same ids again and the
//! same state results. That is what resuming a stream on another router relies on.
//!
//! What it does not do: it reads no files, knows no requests or sockets, and never
//! guesses. A split rule, decoder or template feature that it does not know is
//! refused with an [`Error`] that names it.

mod added_tokens;
mod byte_level;
mod chat;
mod control_tokens;
mod error;
mod hugging_face;
mod jinja;
mod json;
mod merge;
mod pre_tokenize;
mod reach;
mod rendered;
mod sentence_piece;
mod special;
mod stop;
mod strftime;
mod template;
mod template_format;
mod template_values;
mod text_stream;
mod tokenizer;
mod vocabulary;

pub use chat::ChatRequest;
pub use error::Error;
pub use json::{Json, JsonObject};
pub use rendered::RenderedChat;
pub use stop::{StopMatcher, StopStep};
pub use text_stream::TextStream;
pub use tokenizer::{EncodeOptions, TEXT_BYTES_MAX, Tokenizer};
