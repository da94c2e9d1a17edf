//! Text of any origin on one line of a terminal or a log.
//!
//! Names and messages of other processes are shown to people: a line break in one would look
//! like a line of its own, an escape sequence would move the cursor or change colours.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{self, Write};

/// Whether a character does something instead of being seen: control characters, Unicode's
/// line separators, and the marks that change the direction of what follows.
fn acts(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{2028}' | '\u{2029}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// `text` with every such character written out (`\n`, `\u{1b}`).
pub fn one_line(text: &str) -> Cow<'_, str> {
    written_out(text, acts)
}

fn written_out(text: &str, wanted: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(&wanted) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        if wanted(c) {
            // Writing to a string cannot fail.
            let _ = write!(shown, "{}", c.escape_default());
        } else {
            shown.push(c);
        }
    }
    Cow::Owned(shown)
}

/// A log's writer that gets one whole record per call, and keeps it on one line.
pub(crate) struct OneLine<W> {
    inner: W,
    /// Colours are on: the format's own escape sequences stay. It writes out those of values.
    coloured: bool,
}

impl<W> OneLine<W> {
    pub(crate) fn new(inner: W, coloured: bool) -> Self {
        Self { inner, coloured }
    }
}

impl<W: Write> Write for OneLine<W> {
    fn write(&mut self, record: &[u8]) -> io::Result<usize> {
        let (line, end) = match record.strip_suffix(b"\n") {
            Some(line) => (line, "\n"),
            None => (record, ""),
        };
        let text = String::from_utf8_lossy(line);
        match written_out(&text, |c| acts(c) && !(self.coloured && c == '\u{1b}')) {
            Cow::Borrowed(_) => self.inner.write_all(record)?,
            Cow::Owned(shown) => self.inner.write_all((shown + end).as_bytes())?,
        }
        Ok(record.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_acts_on_a_terminal_is_written_out_and_the_rest_stays() {
        assert_eq!(one_line("a\u{e9} \u{1f642}\\n"), "a\u{e9} \u{1f642}\\n");
        assert_eq!(one_line("a\nb\r\tc"), "a\\nb\\r\\tc");
        assert_eq!(
            one_line("\u{1b}[2J\u{9b}\u{202e}x"),
            "\\u{1b}[2J\\u{9b}\\u{202e}x"
        );
    }

    #[test]
    fn a_record_keeps_its_own_end_and_colours_alone() {
        let written = |coloured: bool, record: &str| {
            let mut sink = Vec::new();
            let mut writer = OneLine::new(&mut sink, coloured);
            assert_eq!(writer.write(record.as_bytes()).unwrap(), record.len());
            String::from_utf8(sink).unwrap()
        };
        assert_eq!(written(false, "a\nb\u{1b}[0m\n"), "a\\nb\\u{1b}[0m\n");
        assert_eq!(
            written(true, "\u{1b}[1ma\nb\u{1b}[0m\n"),
            "\u{1b}[1ma\\nb\u{1b}[0m\n"
        );
        assert_eq!(written(false, "whole\n"), "whole\n");
    }
}
