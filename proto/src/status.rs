//! [`crate::Error`] to and from `tonic::Status` with google.rpc details.
//!
//! Every server of the cluster answers with [`to_status`]; every client of ours
//! reads with [`from_status`], so reasons and retry hints survive each hop.

use std::time::Duration;

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

use crate::error::{Error, ErrorKind};
use crate::v1;

/// The domain of `ErrorInfo`.
pub const ERROR_DOMAIN: &str = "baton.v1";

/// An error as a gRPC status with ErrorInfo, and RetryInfo and BadRequest where they apply.
pub fn to_status(error: &Error) -> Status {
    let mut details = ErrorDetails::new();
    let metadata =
        std::collections::HashMap::from([("kind".to_owned(), error.kind.reason().to_owned())]);
    details.set_error_info(error.reason.clone(), ERROR_DOMAIN, metadata);
    if !error.field.is_empty() {
        details.add_bad_request_violation(error.field.clone(), error.message.clone());
    }
    if let Some(after) = error.retry_after {
        details.set_retry_info(Some(after));
    }
    let text = error.to_string();
    Status::with_error_details(Code::from(error.kind.grpc_code()), text, details)
}

/// What a status of ours, or of any gRPC server, says.
///
/// A broken connection arrives as `Unknown` or `Internal` with an h2 message; it
/// is read as [`ErrorKind::Unavailable`], since another worker may serve.
pub fn from_status(status: &Status) -> Error {
    let details = status.get_error_details();
    let kind = match details
        .error_info()
        .and_then(|info| info.metadata.get("kind"))
    {
        Some(name) => kind_named(name),
        None => kind_of_code(status),
    };
    let mut error = Error::new(kind, status.message());
    if let Some(info) = details.error_info()
        && info.domain == ERROR_DOMAIN
    {
        error.reason = info.reason.clone();
    }
    if let Some(violation) = details
        .bad_request()
        .and_then(|bad| bad.field_violations.first())
    {
        error.field = violation.field.clone();
        error.message = violation.description.clone();
    }
    error.retry_after = details.retry_info().and_then(|info| info.retry_delay);
    error
}

/// An error inside a stream.
pub fn to_detail(error: &Error) -> v1::ErrorDetail {
    v1::ErrorDetail {
        code: error.kind.grpc_code(),
        reason: error.reason.clone(),
        field: error.field.clone(),
        message: error.message.clone(),
        retry_after_ms: error
            .retry_after
            .map(|after| u64::try_from(after.as_millis()).unwrap_or(u64::MAX)),
    }
}

/// The error a peer put into a stream.
pub fn from_detail(detail: &v1::ErrorDetail) -> Error {
    let kind = kind_of_code(&Status::new(Code::from(detail.code), ""));
    Error {
        kind,
        reason: detail.reason.clone(),
        field: detail.field.clone(),
        message: detail.message.clone(),
        retry_after: detail.retry_after_ms.map(Duration::from_millis),
    }
}

const KINDS: [ErrorKind; 11] = [
    ErrorKind::Invalid,
    ErrorKind::NotFound,
    ErrorKind::Unauthenticated,
    ErrorKind::Unsupported,
    ErrorKind::TooLarge,
    ErrorKind::Overloaded,
    ErrorKind::Unavailable,
    ErrorKind::Fenced,
    ErrorKind::Cancelled,
    ErrorKind::Deadline,
    ErrorKind::Internal,
];

fn kind_named(name: &str) -> ErrorKind {
    KINDS
        .into_iter()
        .find(|kind| kind.reason() == name)
        .unwrap_or(ErrorKind::Internal)
}

fn kind_of_code(status: &Status) -> ErrorKind {
    match status.code() {
        Code::Unknown | Code::Internal if status.message().contains("h2 protocol error") => {
            ErrorKind::Unavailable
        }
        Code::Cancelled => ErrorKind::Cancelled,
        Code::InvalidArgument | Code::OutOfRange => ErrorKind::Invalid,
        Code::DeadlineExceeded => ErrorKind::Deadline,
        Code::NotFound => ErrorKind::NotFound,
        Code::ResourceExhausted => ErrorKind::Overloaded,
        Code::Aborted | Code::FailedPrecondition => ErrorKind::Fenced,
        Code::Unimplemented => ErrorKind::Unsupported,
        Code::Unavailable | Code::Unknown => ErrorKind::Unavailable,
        Code::Unauthenticated | Code::PermissionDenied => ErrorKind::Unauthenticated,
        _ => ErrorKind::Internal,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_survives_the_wire_with_field_reason_and_hint() {
        for kind in KINDS {
            let error = Error::new(kind, "7 is not in 1..=3")
                .with_field("n")
                .with_reason("SOME_REASON")
                .with_retry_after(Duration::from_millis(250));
            assert_eq!(from_status(&to_status(&error)), error);
        }
    }

    #[test]
    fn a_broken_stream_is_retryable() {
        let status = Status::new(Code::Unknown, "h2 protocol error: error reading a body");
        assert_eq!(from_status(&status).kind, ErrorKind::Unavailable);
    }
}
