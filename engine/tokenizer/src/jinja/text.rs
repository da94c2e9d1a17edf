//! Strings of a template, which know what part of them came with the request.
//!
//! A prompt mixes the template's own text with the client's. Only the first may spell
//! control tokens, so each string carries the byte ranges that the request gave, through
//! slicing, joining and formatting. Where characters are replaced one by one (`upper`),
//! the whole result counts as given when any of the input was.
//!
//! A string may also be marked as HTML (`safe`, `escape`): Jinja2 then escapes what is
//! added to it.

use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

/// Immutable text; cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Str {
    text: Arc<str>,
    /// Ascending, not touching, not empty; `None` where all is the template's own.
    given: Option<Rc<[Range<usize>]>>,
    /// `markupsafe.Markup` in Jinja2.
    pub(crate) markup: bool,
}

impl Str {
    /// The template's own text.
    pub(crate) fn own(text: impl Into<Arc<str>>) -> Self {
        Self {
            text: text.into(),
            given: None,
            markup: false,
        }
    }

    /// Text that came with the request.
    pub(crate) fn given(text: impl Into<Arc<str>>) -> Self {
        let text = text.into();
        let given = (!text.is_empty()).then(|| std::iter::once(0..text.len()).collect());
        Self {
            text,
            given,
            markup: false,
        }
    }

    /// Text made from `source` character by character.
    pub(crate) fn derived(text: impl Into<Arc<str>>, source: &Self) -> Self {
        match source.given {
            Some(_) => Self::given(text),
            None => Self::own(text),
        }
        .with_markup(source.markup)
    }

    pub(crate) fn with_markup(mut self, markup: bool) -> Self {
        self.markup = markup;
        self
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.text
    }

    pub(crate) fn shared(&self) -> Arc<str> {
        self.text.clone()
    }

    pub(crate) fn given_ranges(&self) -> &[Range<usize>] {
        self.given.as_deref().unwrap_or_default()
    }

    /// `range` is in bytes, on character boundaries.
    pub(crate) fn slice(&self, range: Range<usize>) -> Self {
        if range == (0..self.text.len()) {
            return self.clone();
        }
        let mut builder = StrBuilder::default();
        builder.push_slice(self, range);
        builder.finish().with_markup(self.markup)
    }

    /// The part `inner` that was cut out of this text.
    pub(crate) fn part(&self, inner: &str) -> Self {
        let start = inner.as_ptr() as usize - self.text.as_ptr() as usize;
        self.slice(start..start + inner.len())
    }
}

impl std::ops::Deref for Str {
    type Target = str;

    fn deref(&self) -> &str {
        &self.text
    }
}

impl PartialEq for Str {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

/// Puts texts together.
#[derive(Default)]
pub(crate) struct StrBuilder {
    text: String,
    given: Vec<Range<usize>>,
}

impl StrBuilder {
    pub(crate) fn len(&self) -> usize {
        self.text.len()
    }

    /// The template's own text, or text that the engine makes.
    pub(crate) fn push_own(&mut self, text: &str) {
        self.text.push_str(text);
    }

    pub(crate) fn push(&mut self, text: &Str) {
        self.push_slice(text, 0..text.len());
    }

    /// Text made from `source` character by character.
    pub(crate) fn push_derived(&mut self, text: &str, source: &Str) {
        let start = self.text.len();
        self.text.push_str(text);
        if source.given.is_some() {
            self.mark(start..self.text.len());
        }
    }

    fn push_slice(&mut self, text: &Str, range: Range<usize>) {
        let start = self.text.len();
        self.text.push_str(&text[range.clone()]);
        for given in text.given_ranges() {
            let from = given.start.max(range.start);
            let to = given.end.min(range.end);
            if from < to {
                self.mark(start + from - range.start..start + to - range.start);
            }
        }
    }

    fn mark(&mut self, range: Range<usize>) {
        match self.given.last_mut() {
            _ if range.is_empty() => {}
            Some(last) if last.end == range.start => last.end = range.end,
            _ => self.given.push(range),
        }
    }

    pub(crate) fn finish(self) -> Str {
        Str {
            text: self.text.into(),
            given: (!self.given.is_empty()).then(|| self.given.into()),
            markup: false,
        }
    }

    /// The text and the byte ranges that the request gave.
    pub(crate) fn into_parts(self) -> (String, Vec<Range<usize>>) {
        (self.text, self.given)
    }
}

/// HTML's five characters, as `markupsafe.escape` writes them.
pub(crate) fn escaped(text: &Str) -> Str {
    if text.markup {
        return text.clone();
    }
    let mut builder = StrBuilder::default();
    let mut rest = 0;
    for (at, c) in text.char_indices() {
        let entity = match c {
            '&' => "&amp;",
            '<' => "&lt;",
            '>' => "&gt;",
            '\'' => "&#39;",
            '"' => "&#34;",
            _ => continue,
        };
        builder.push_slice(text, rest..at);
        builder.push_derived(entity, text);
        rest = at + c.len_utf8();
    }
    builder.push_slice(text, rest..text.len());
    builder.finish().with_markup(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_and_joins_keep_what_the_request_gave() {
        let mut builder = StrBuilder::default();
        builder.push_own("<s>");
        builder.push(&Str::given("hello"));
        builder.push(&Str::given(" you"));
        builder.push_own("</s>");
        let text = builder.finish();
        assert_eq!(format!("{:?}", text.given_ranges()), "[3..12]");
        assert_eq!(format!("{:?}", text.slice(1..5).given_ranges()), "[2..4]");
        assert!(text.slice(12..16).given_ranges().is_empty());
        let escaped = escaped(&text);
        assert_eq!(escaped.as_str(), "&lt;s&gt;hello you&lt;/s&gt;");
    }
}
