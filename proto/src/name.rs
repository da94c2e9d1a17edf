//! Names that people give to models, workers and tenants.
//!
//! They are shown in logs, metrics, tables and pages of every process of a cluster. Those cope
//! with any text; a name that cannot be seen or typed is refused all the same, where it is given.

use crate::error::Error;
use crate::limits::NAME_BYTES_MAX;

/// Checks a name: 1 to [`NAME_BYTES_MAX`] bytes without control characters.
///
/// # Errors
/// [`crate::ErrorKind::Invalid`] naming `field`.
pub fn check_name(field: &str, name: &str) -> Result<(), Error> {
    let refuse = |message: String| Err(Error::invalid(field, message));
    if name.is_empty() || name.len() > NAME_BYTES_MAX {
        let bytes = name.len();
        return refuse(format!(
            "a name of {bytes} bytes is not in 1..={NAME_BYTES_MAX}"
        ));
    }
    match name.chars().find(|c| c.is_control()) {
        None => Ok(()),
        Some(c) => refuse(format!(
            "`{}` has the control character `{}`",
            name.escape_debug(),
            c.escape_unicode()
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_can_be_seen_and_are_not_endless() {
        for name in [
            "m",
            "a \"quoted\\\" name",
            "{}=,</script>",
            "\u{1f642}",
            &"x".repeat(256),
        ] {
            check_name("model_name", name).unwrap();
        }
        for name in [
            "",
            "a\nb",
            "\r",
            "\u{1b}[2J",
            "\u{85}",
            "\0",
            &"x".repeat(257),
        ] {
            let error = check_name("model_name", name).unwrap_err();
            assert_eq!(error.field, "model_name");
            assert!(!error.message.contains(char::is_control));
            assert!(error.message.len() < 400);
        }
    }
}
