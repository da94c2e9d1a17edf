//! Log set-up and the span that every line of a request is inside of.
//!
//! Logs go to stderr, so that stdout stays for results. A request's span carries
//! its id and the worker it is on; prompts and tokens are never logged.

use std::io::IsTerminal as _;

use tracing::Span;
use tracing_subscriber::EnvFilter;

use crate::one_line::OneLine;

/// How a log line looks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// One JSON object a line, for collectors.
    Json,
    /// One short line, for people.
    Compact,
    /// Compact if stderr is a terminal, JSON otherwise.
    #[default]
    Auto,
}

impl LogFormat {
    fn is_json(self) -> bool {
        match self {
            Self::Json => true,
            Self::Compact => false,
            Self::Auto => !std::io::stderr().is_terminal(),
        }
    }
}

impl std::str::FromStr for LogFormat {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "json" => Ok(Self::Json),
            "compact" => Ok(Self::Compact),
            "auto" => Ok(Self::Auto),
            other => Err(Error::Format {
                given: other.to_owned(),
            }),
        }
    }
}

/// Why logging could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("log format `{given}` is not one of json, compact, auto")]
    Format { given: String },
    #[error("log filter `{given}` is not a list of target=level: {message}")]
    Filter { given: String, message: String },
    #[error("a logger is already installed")]
    Installed,
}

/// Installs the process's logger. `filter` is a level or a list like
/// `info,baton_router=debug`; h2 and hyper are held at warn unless it names them.
///
/// # Errors
/// [`Error::Filter`] for a filter that does not parse, [`Error::Installed`] on a second call.
pub fn init(format: LogFormat, filter: &str) -> Result<(), Error> {
    let filter = parse_filter(filter)?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        // A line that cannot be written (a full disk) is lost. Saying so on standard error,
        // where it was to go, would panic.
        .log_internal_errors(false);
    let installed = if format.is_json() {
        // JSON escapes what would break a line.
        builder
            .with_writer(std::io::stderr)
            .json()
            .flatten_event(true)
            .with_span_list(false)
            .try_init()
    } else {
        let coloured = std::io::stderr().is_terminal();
        builder
            .with_writer(move || OneLine::new(std::io::stderr(), coloured))
            .compact()
            .with_ansi(coloured)
            .try_init()
    };
    installed.map_err(|_| Error::Installed)
}

fn parse_filter(given: &str) -> Result<EnvFilter, Error> {
    let mut full = given.trim().to_owned();
    for noisy in ["h2", "hyper", "hyper_util", "tower"] {
        if !full
            .split(',')
            .any(|part| part.trim().split('=').next() == Some(noisy))
        {
            if !full.is_empty() {
                full.push(',');
            }
            full.push_str(noisy);
            full.push_str("=warn");
        }
    }
    EnvFilter::try_new(full).map_err(|error| Error::Filter {
        given: given.to_owned(),
        message: error.to_string(),
    })
}

/// The span of one request. `worker` is empty at the router until one is chosen
/// ([`record_worker`]).
pub fn request_span(request_id: &str, worker: &str) -> Span {
    let span =
        tracing::info_span!("request", request_id = %request_id, worker = tracing::field::Empty);
    if !worker.is_empty() {
        record_worker(&span, worker);
    }
    span
}

/// Names the worker a request's span is on.
pub fn record_worker(span: &Span, worker: &str) {
    span.record("worker", worker);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_line_inside_a_request_carries_its_id_and_worker() {
        let sink = Sink::default();
        let writer = sink.clone();
        let subscriber = tracing_subscriber::fmt()
            .json()
            .flatten_event(true)
            .with_span_list(false)
            .with_writer(move || writer.clone())
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            let span = request_span("req-1", "");
            record_worker(&span, "decode-0");
            let _entered = span.enter();
            tracing::info!("reserved");
        });
        let text = String::from_utf8(sink.0.lock().unwrap().clone()).unwrap();
        let line: serde_json::Value = serde_json::from_str(text.trim()).unwrap();
        assert_eq!(line["message"], "reserved");
        assert_eq!(line["span"]["request_id"], "req-1");
        assert_eq!(line["span"]["worker"], "decode-0");
    }

    /// A hostile worker id in both formats: one record stays one line.
    #[test]
    fn a_line_break_in_a_value_makes_no_second_record() {
        let hostile = "d1\nFORGED \u{1b}[31m";
        let say = || tracing::info!(worker = %hostile, "joined {hostile}");
        let line = |sink: &Sink| {
            let text = String::from_utf8(sink.0.lock().unwrap().clone()).unwrap();
            let line = text.strip_suffix('\n').unwrap().to_owned();
            assert!(!line.contains(char::is_control), "{line:?}");
            line
        };
        let (json, compact) = (Sink::default(), Sink::default());
        let (to_json, to_compact) = (json.clone(), compact.clone());
        let builder = tracing_subscriber::fmt().json().flatten_event(true);
        let subscriber = builder.with_writer(move || to_json.clone()).finish();
        tracing::subscriber::with_default(subscriber, say);
        let builder = tracing_subscriber::fmt().compact().with_ansi(false);
        let subscriber = builder.with_writer(move || OneLine::new(to_compact.clone(), false));
        tracing::subscriber::with_default(subscriber.finish(), say);
        let record: serde_json::Value = serde_json::from_str(&line(&json)).unwrap();
        assert_eq!(record["worker"], hostile);
        assert!(line(&compact).contains("d1\\nFORGED"));
    }

    #[test]
    fn a_wrong_filter_or_format_is_refused_by_value() {
        assert!(parse_filter("info,baton_router=debug").is_ok());
        assert!(parse_filter("").is_ok());
        let error = parse_filter("baton=loud").unwrap_err().to_string();
        assert!(error.contains("`baton=loud`"), "{error}");
        let error = "xml".parse::<LogFormat>().unwrap_err().to_string();
        assert!(
            error.contains("`xml`") && error.contains("compact"),
            "{error}"
        );
    }
}
