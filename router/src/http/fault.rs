//! Errors as HTTP answers: `{"error": {message, type, param, code}}`.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use baton_proto::Error;
use serde_json::{Value, json};

/// An error on its way to a client.
#[derive(Debug)]
pub(crate) struct Fault(pub(crate) Error);

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self(error)
    }
}

/// The error object, also sent inside streams.
pub(crate) fn object(error: &Error) -> Value {
    json!({
        "error": {
            "message": error.to_string(),
            "type": error.kind.openai_type(),
            "param": (!error.field.is_empty()).then_some(&error.field),
            "code": error.reason.to_ascii_lowercase(),
        }
    })
}

impl IntoResponse for Fault {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.0.kind.http_status())
            .unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (status, axum::Json(object(&self.0))).into_response();
        if let Some(after) = self.0.retry_after {
            // The header counts whole seconds; a shorter hint becomes one.
            let seconds = after.as_secs_f64().ceil().max(1.0) as u64;
            response
                .headers_mut()
                .insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_proto::ErrorKind;
    use std::time::Duration;

    #[test]
    fn an_overload_says_when_to_come_back() {
        let error =
            Error::new(ErrorKind::Overloaded, "full").with_retry_after(Duration::from_millis(1200));
        let response = Fault(error).into_response();
        assert_eq!(response.status(), 429);
        assert_eq!(response.headers()["retry-after"], "2");
    }

    #[test]
    fn a_wrong_field_is_the_param() {
        let object = object(&Error::invalid("n", "0 is not in 1..=16"));
        assert_eq!(object["error"]["param"], "n");
        assert_eq!(object["error"]["type"], "invalid_request_error");
        assert_eq!(object["error"]["message"], "`n`: 0 is not in 1..=16");
    }
}
