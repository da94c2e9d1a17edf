//! The one table of error kinds that every module folds into.
//!
//! A kind tells the caller what to do; a stable reason names the exact cause for
//! machines; the message is for people. The gRPC and HTTP codes of a kind stand
//! here, so the two front doors cannot disagree.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// What the caller should do about an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ErrorKind {
    /// The request is wrong; sending it again cannot help.
    Invalid,
    /// The named thing does not exist (a model, a request).
    NotFound,
    /// No valid credentials.
    Unauthenticated,
    /// A field is understood but this build does not offer it.
    Unsupported,
    /// The input is larger than a documented limit.
    TooLarge,
    /// No room now; retry after the hint.
    Overloaded,
    /// The peer cannot be reached or is leaving; another one may serve.
    Unavailable,
    /// The message belongs to an older epoch or attempt.
    Fenced,
    /// The caller gave up.
    Cancelled,
    /// The request's deadline passed.
    Deadline,
    /// A defect of ours.
    Internal,
}

impl ErrorKind {
    /// The stable, upper-case name used as `ErrorInfo.reason` when no finer one is set.
    pub const fn reason(self) -> &'static str {
        match self {
            Self::Invalid => "INVALID_ARGUMENT",
            Self::NotFound => "NOT_FOUND",
            Self::Unauthenticated => "UNAUTHENTICATED",
            Self::Unsupported => "UNSUPPORTED",
            Self::TooLarge => "TOO_LARGE",
            Self::Overloaded => "OVERLOADED",
            Self::Unavailable => "UNAVAILABLE",
            Self::Fenced => "FENCED",
            Self::Cancelled => "CANCELLED",
            Self::Deadline => "DEADLINE_EXCEEDED",
            Self::Internal => "INTERNAL",
        }
    }

    /// The HTTP status of this kind.
    pub const fn http_status(self) -> u16 {
        match self {
            Self::Invalid | Self::Unsupported => 400,
            Self::Unauthenticated => 401,
            Self::NotFound => 404,
            Self::Fenced => 409,
            Self::TooLarge => 413,
            Self::Overloaded => 429,
            Self::Cancelled => 499,
            Self::Internal => 500,
            Self::Unavailable => 503,
            Self::Deadline => 504,
        }
    }

    /// The gRPC status code of this kind (numeric, as in google.rpc.Code).
    pub const fn grpc_code(self) -> i32 {
        match self {
            Self::Cancelled => 1,
            Self::Invalid => 3,
            Self::Deadline => 4,
            Self::NotFound => 5,
            Self::TooLarge | Self::Overloaded => 8,
            Self::Fenced => 10,
            Self::Unsupported => 12,
            Self::Internal => 13,
            Self::Unavailable => 14,
            Self::Unauthenticated => 16,
        }
    }

    /// The `type` of the OpenAI error object.
    pub const fn openai_type(self) -> &'static str {
        match self {
            Self::Invalid | Self::Unsupported | Self::TooLarge => "invalid_request_error",
            Self::NotFound => "not_found_error",
            Self::Unauthenticated => "authentication_error",
            Self::Overloaded => "rate_limit_error",
            _ => "server_error",
        }
    }

    /// Whether another worker (or the same one later) may succeed.
    pub const fn is_retryable(self) -> bool {
        matches!(self, Self::Overloaded | Self::Unavailable | Self::Fenced)
    }
}

/// An error as it crosses a process boundary.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Error {
    /// What the caller should do.
    pub kind: ErrorKind,
    /// A stable machine-readable cause, for example `CONTEXT_LENGTH_EXCEEDED`.
    pub reason: String,
    /// The wrong field of the request, as a dotted path; empty if none.
    pub field: String,
    /// What a person should read: the value and what is allowed. Lower case, no full stop.
    pub message: String,
    /// When to try again, for [`ErrorKind::Overloaded`] and [`ErrorKind::Unavailable`].
    pub retry_after: Option<Duration>,
}

impl Error {
    /// An error of `kind` whose reason is the kind's own.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            reason: kind.reason().to_owned(),
            field: String::new(),
            message: message.into(),
            retry_after: None,
        }
    }

    /// A wrong field of a request.
    pub fn invalid(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Invalid, message).with_field(field)
    }

    /// A field that is known but not offered by this build.
    pub fn unsupported(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unsupported, message).with_field(field)
    }

    /// Names the field the error is about.
    pub fn with_field(mut self, field: impl Into<String>) -> Self {
        self.field = field.into();
        self
    }

    /// Sets the stable reason.
    pub fn with_reason(mut self, reason: impl Into<String>) -> Self {
        self.reason = reason.into();
        self
    }

    /// Sets the retry hint.
    pub fn with_retry_after(mut self, after: Duration) -> Self {
        self.retry_after = Some(after);
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.field.is_empty() {
            f.write_str(&self.message)
        } else {
            write!(f, "`{}`: {}", self.field, self.message)
        }
    }
}

impl std::error::Error for Error {}
