//! What can go wrong between text and tokens, and what the caller should do about it.
//!
//! Errors of [`crate::Tokenizer::from_spec`] speak about a model's files, the others
//! about one request.

use baton_proto::error::ErrorKind;

/// The crate's one error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The model names a split rule that is not in the table, or none at all.
    #[error("unknown pre-tokenizer `{name}`; refusing to guess how text is split (known: {known})")]
    UnknownPreTokenizer { name: String, known: String },
    /// The model's vocabulary cannot be used without merges, and it has none.
    #[error("byte-level vocabulary of {tokens} tokens has no merges")]
    NoMerges { tokens: usize },
    /// A known format uses a part that this crate does not implement.
    #[error("tokenizer uses {what}, which is not supported")]
    Unsupported { what: String },
    /// The specification contradicts itself.
    #[error("invalid tokenizer: {reason}")]
    InvalidSpec { reason: String },
    /// The input is longer than [`crate::TEXT_BYTES_MAX`].
    #[error("text of {bytes} bytes is longer than {max}")]
    TextTooLong { bytes: usize, max: usize },
    /// The text has more tokens than [`crate::Tokenizer::encode_within`] was to make.
    #[error("text of more than {max} tokens")]
    TooManyTokens { max: usize },
    /// The vocabulary has no token for a byte of the text, nor an unknown token.
    #[error("the model's vocabulary cannot express byte 0x{byte:02x}")]
    Unencodable { byte: u8 },
    /// The text could not be encoded by a Hugging Face tokenizer.
    #[error("encode text: {reason}")]
    Encode { reason: String },
    /// Chat was asked of a model without a chat template.
    #[error("the model has no chat template; use completions")]
    NoChatTemplate,
    /// Templates exist, but not the wanted one.
    #[error("the model has no chat template named `{name}` (it has: {available})")]
    UnknownTemplate { name: String, available: String },
    /// The model's template does not parse; found when the tokenizer was built.
    #[error("the model's chat template `{name}` has a syntax error: {message}")]
    TemplateSyntax { name: String, message: String },
    /// The template refused the conversation by `raise_exception`; its own words.
    #[error("{message}")]
    TemplateRaised { message: String },
    /// The template failed on this conversation.
    #[error("the model's chat template failed: {message}")]
    TemplateFailed { message: String },
    /// The rendered prompt would be longer than [`crate::TEXT_BYTES_MAX`].
    #[error("rendered chat is longer than {max} bytes")]
    RenderTooLong { max: usize },
    /// A message, tool or argument has a shape that cannot be served.
    #[error("{path}: {reason}")]
    InvalidChat { path: String, reason: String },
}

impl Error {
    /// Folds into the shared table, so that callers never parse text.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::UnknownPreTokenizer { .. } | Self::Unsupported { .. } => ErrorKind::Unsupported,
            Self::TextTooLong { .. } | Self::RenderTooLong { .. } => ErrorKind::TooLarge,
            _ => ErrorKind::Invalid,
        }
    }

    /// The request field at fault, as a dotted path; empty if the model is.
    pub fn field(&self) -> &str {
        match self {
            Self::InvalidChat { path, .. } => path,
            Self::TemplateRaised { .. }
            | Self::TemplateFailed { .. }
            | Self::RenderTooLong { .. } => "messages",
            _ => "",
        }
    }
}
