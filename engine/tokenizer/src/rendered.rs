//! A rendered conversation: the prompt's text, and which of it may become control tokens.

use std::borrow::Cow;
use std::ops::Deref;

/// What [`crate::Tokenizer::render_chat`] gives and [`crate::Tokenizer::encode_chat`]
/// takes. It reads as the prompt's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RenderedChat {
    text: String,
    marked: Option<Marked>,
}

/// The same text with a mark inside of each control token that the request spells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Marked {
    pub(crate) text: String,
    pub(crate) mark: char,
}

impl Marked {
    /// `text` with a mark at each of these bytes, which ascend.
    pub(crate) fn new(text: &str, at: &[usize], mark: char) -> Self {
        let mut marked = String::with_capacity(text.len() + at.len() * mark.len_utf8());
        let mut done = 0;
        for &at in at {
            marked.push_str(&text[done..at]);
            marked.push(mark);
            done = at;
        }
        marked.push_str(&text[done..]);
        Self { text: marked, mark }
    }
}

impl RenderedChat {
    /// Without marks every control token that the text spells is one.
    pub(crate) fn new(text: String, marked: Option<Marked>) -> Self {
        Self { text, marked }
    }

    pub(crate) fn marked(&self) -> Option<&Marked> {
        self.marked.as_ref()
    }
}

impl Deref for RenderedChat {
    type Target = str;

    fn deref(&self) -> &str {
        &self.text
    }
}

impl PartialEq<&str> for RenderedChat {
    fn eq(&self, other: &&str) -> bool {
        self.text == *other
    }
}

/// `text` without its marks.
pub(crate) fn without(text: &str, mark: char) -> Cow<'_, str> {
    match text.contains(mark) {
        true => Cow::Owned(text.replace(mark, "")),
        false => Cow::Borrowed(text),
    }
}
