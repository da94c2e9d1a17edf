//! Text of any origin as the value of a metric label.
//!
//! Model names, versions and the like come from files, flags and other machines. The encoder
//! writes a label's value as it is given, so that a quote or a line break in one would end the
//! value, break the page or add series to it. [`label_value`] is the one way from such text to
//! a label.

/// Characters of a label's value that are kept.
pub const LABEL_VALUE_CHARS_MAX: usize = 256;

/// `text` as it stands between the quotes of a label: cut to [`LABEL_VALUE_CHARS_MAX`], with
/// backslash, quote and line feed escaped as OpenMetrics wants it. Other control characters and
/// Unicode's line separators, at which some readers of the page break lines, become U+FFFD.
pub fn label_value(text: &str) -> String {
    let mut value = String::with_capacity(text.len().min(LABEL_VALUE_CHARS_MAX));
    for c in text.chars().take(LABEL_VALUE_CHARS_MAX) {
        match c {
            '\\' => value.push_str("\\\\"),
            '"' => value.push_str("\\\""),
            '\n' => value.push_str("\\n"),
            '\u{2028}' | '\u{2029}' => value.push(char::REPLACEMENT_CHARACTER),
            c if c.is_control() => value.push(char::REPLACEMENT_CHARACTER),
            c => value.push(c),
        }
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exposition::{metrics_text, metrics_text_merged, registry};
    use crate::labels::Label;
    use crate::{RouterMetrics, WorkerMetrics, catalogue::MetricSpec};

    /// One line of a scrape: its name, its labels as they were meant, its value.
    type Sample = (String, Vec<(String, String)>, f64);

    /// Reads a line of the exposition strictly, by its grammar and by none of the code that
    /// writes it.
    fn sample(line: &str) -> Result<Sample, String> {
        let mut rest = line.chars().peekable();
        let mut name = String::new();
        while let Some(c) = rest.next_if(|c| c.is_ascii_alphanumeric() || "_:".contains(*c)) {
            name.push(c);
        }
        let mut labels = Vec::new();
        if rest.next_if_eq(&'{').is_some() {
            loop {
                let mut key = String::new();
                while let Some(c) = rest.next_if(|c| c.is_ascii_alphanumeric() || *c == '_') {
                    key.push(c);
                }
                if key.is_empty() || (rest.next(), rest.next()) != (Some('='), Some('"')) {
                    return Err(format!("no label in {line:?}"));
                }
                let mut value = String::new();
                loop {
                    match rest.next() {
                        Some('"') => break,
                        Some('\\') => value.push(match rest.next() {
                            Some('n') => '\n',
                            Some(c @ ('"' | '\\')) => c,
                            other => return Err(format!("escape {other:?} in {line:?}")),
                        }),
                        Some(c) => value.push(c),
                        None => return Err(format!("open value in {line:?}")),
                    }
                }
                labels.push((key, value));
                match rest.next() {
                    Some(',') => {}
                    Some('}') => break,
                    other => return Err(format!("{other:?} after a value in {line:?}")),
                }
            }
        }
        let left: String = rest.collect();
        let number = left.strip_prefix(' ').ok_or_else(|| format!("{line:?}"))?;
        let number = number.parse().map_err(|_| format!("value of {line:?}"))?;
        if name.is_empty() {
            return Err(format!("no name in {line:?}"));
        }
        Ok((name, labels, number))
    }

    fn page(text: &str) -> Vec<Sample> {
        let body = text.strip_suffix("# EOF\n").expect("the page has its end");
        let lines = body.split('\n').filter(|line| !line.is_empty());
        lines
            .filter(|line| {
                !["# HELP ", "# TYPE ", "# UNIT "]
                    .iter()
                    .any(|c| line.starts_with(c))
            })
            .map(|line| sample(line).unwrap_or_else(|error| panic!("{error}")))
            .collect()
    }

    const HOSTILE: [&str; 8] = [
        "plain",
        "a\"} 1\nbaton_requests_total{code=\"OK\"} 1e9\n#",
        "quote\" backslash\\ both\\\" end\\",
        "line\nbreak\n",
        "\\n is no line break",
        "{}=,# EOF",
        "\u{1f642} \u{e9} <script>alert(1)</script>",
        "",
    ];

    #[test]
    fn hostile_names_come_back_whole_and_add_no_series() {
        let mut plain = registry(&[("model_name", "plain")]);
        let metrics = WorkerMetrics::new(&mut plain);
        metrics.build.set(&[("version", "plain")]);
        let expected = page(&metrics_text(&plain)).len();
        for name in HOSTILE {
            let mut hostile = registry(&[("model_name", name), ("role", "decode")]);
            let metrics = WorkerMetrics::new(&mut hostile);
            metrics.build.set(&[("version", name)]);
            let mut router = registry(&[("role", "router")]);
            RouterMetrics::new(&mut router);
            let alone = page(&metrics_text(&hostile));
            assert_eq!(alone.len(), expected, "{name:?}");
            for (metric, labels, _) in &alone {
                let found = |key: &str| labels.iter().find(|(k, _)| k == key).map(|(_, v)| v);
                assert_eq!(
                    found("model_name").map(String::as_str),
                    Some(name),
                    "{metric}"
                );
                if metric == "baton_worker_build_info" {
                    assert_eq!(found("version").map(String::as_str), Some(name));
                }
            }
            let merged = page(&metrics_text_merged(&[&hostile, &router]));
            assert_eq!(merged.len(), expected + page(&metrics_text(&router)).len());
        }
    }

    #[test]
    fn no_character_breaks_a_line_and_no_value_is_endless() {
        for code in (0..0x100).chain([0x2028, 0x2029]) {
            let c = char::from_u32(code).unwrap();
            let value = label_value(&format!("a{c}b"));
            let breaks = |c: char| c.is_control() || ['\u{2028}', '\u{2029}'].contains(&c);
            assert!(!value.contains(breaks), "{c:?}");
        }
        assert_eq!(label_value(&"\u{e9}".repeat(4096)).chars().count(), 256);
    }

    #[test]
    fn no_label_that_is_written_in_the_program_needs_escaping() {
        let specs = [RouterMetrics::catalogue(), WorkerMetrics::catalogue()].concat();
        let values = |spec: &MetricSpec| {
            let labels = spec.labels.clone().into_iter();
            labels.flat_map(|(_, values)| values).collect::<Vec<_>>()
        };
        for value in specs.iter().flat_map(values) {
            assert_eq!(label_value(value), value);
        }
        for (_, value) in crate::labels::Outcome::all()
            .into_iter()
            .flat_map(Label::pairs)
        {
            assert_eq!(label_value(value), value);
        }
    }
}
