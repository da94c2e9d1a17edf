//! What a template can fail with, and the line of the template where it did.

/// The module's result.
pub(crate) type Result<T> = std::result::Result<T, Error>;

/// A template that cannot be read or that failed on a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Error {
    pub(crate) kind: Kind,
    pub(crate) message: String,
    /// Counted from 1; the innermost place that is known.
    pub(crate) line: Option<u32>,
}

/// Why a template ended early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The template called `raise_exception`; the message is its own.
    Raised,
    /// Jinja2 fails here too.
    Failed,
    /// Jinja2 has this, and this crate refuses it by name.
    Unsupported,
    /// The work, nesting or output exceeds its bound.
    Limit,
    /// The output is longer than the caller allows.
    TooLong,
}

impl Error {
    pub(crate) fn failed(message: impl Into<String>) -> Self {
        Self::new(Kind::Failed, message)
    }

    /// `what` names the feature: "the filter `random`".
    pub(crate) fn unsupported(what: impl std::fmt::Display) -> Self {
        Self::new(Kind::Unsupported, format!("{what} is not supported"))
    }

    pub(crate) fn limit(message: impl Into<String>) -> Self {
        Self::new(Kind::Limit, message)
    }

    pub(crate) fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            line: None,
        }
    }

    /// Adds the line unless a place further inside is known.
    pub(crate) fn at(mut self, line: u32) -> Self {
        self.line.get_or_insert(line);
        self
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.line {
            Some(line) => write!(f, "{} (line {line})", self.message),
            None => f.write_str(&self.message),
        }
    }
}
