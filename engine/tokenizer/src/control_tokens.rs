//! Keeps the text of a request from spelling control tokens in a rendered chat.
//!
//! Only the template's own text may give control tokens. The template engine tells which
//! bytes of a prompt came with the request. Where a control token is spelled with such a
//! byte in it, a mark is put inside: a character that occurs nowhere else. A spelling with
//! a mark in it is not found when the prompt is cut into tokens; the marks are then taken
//! out of the text between them, so that it is encoded as one.

use std::ops::Range;

use aho_corasick::AhoCorasick;

use crate::error::Error;

/// The control tokens of one model, as text spells them.
#[derive(Debug, Default)]
pub(crate) struct ControlTokens {
    spellings: Vec<String>,
    /// Finds every spelling, overlapping ones too.
    spelled: Option<AhoCorasick>,
}

impl ControlTokens {
    pub(crate) fn new(mut spellings: Vec<String>) -> Result<Self, Error> {
        spellings.retain(|text| !text.is_empty());
        if spellings.is_empty() {
            return Ok(Self::default());
        }
        let spelled = AhoCorasick::new(&spellings).map_err(|error| Error::InvalidSpec {
            reason: format!("control tokens cannot be indexed: {error}"),
        })?;
        Ok(Self {
            spellings,
            spelled: Some(spelled),
        })
    }

    /// Whether one of the spellings has this character.
    pub(crate) fn uses(&self, character: char) -> bool {
        self.spellings.iter().any(|text| text.contains(character))
    }

    /// Where marks must go into `text`, ascending. `given` are the byte ranges that came
    /// with the request: ascending, apart from each other, on character boundaries.
    ///
    /// # Errors
    /// The spelling of one character that the request gave: no mark fits inside of it.
    pub(crate) fn marks(&self, text: &str, given: &[Range<usize>]) -> Result<Vec<usize>, &str> {
        let mut marks = Vec::new();
        let Some(spelled) = self.spelled.as_ref().filter(|_| !given.is_empty()) else {
            return Ok(marks);
        };
        for found in spelled.find_overlapping_iter(text) {
            let (start, end) = (found.start(), found.end());
            let first = given.partition_point(|range| range.end <= start);
            let Some(range) = given.get(first).filter(|range| range.start < end) else {
                continue;
            };
            // Never inside of the template's own text, which may spell a token there.
            let mark = match range.start > start {
                true => range.start,
                false => start + text[start..].chars().next().map_or(0, char::len_utf8),
            };
            if mark >= end {
                return Err(&self.spellings[found.pattern().as_usize()]);
            }
            marks.push(mark);
        }
        marks.sort_unstable();
        marks.dedup();
        Ok(marks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The prompt with its marks. What is in angle quotes came with the request.
    fn marked(quoted: &str) -> Result<String, String> {
        let tokens = ["<s>", "<|end|>", "\u{2581}"].map(str::to_owned);
        let tokens = ControlTokens::new(tokens.to_vec()).unwrap();
        let (mut text, mut given) = (String::new(), Vec::new());
        for (index, part) in quoted.split(['«', '»']).enumerate() {
            let start = text.len();
            text += part;
            if index % 2 == 1 && !part.is_empty() {
                given.push(start..text.len());
            }
        }
        let marks = tokens.marks(&text, &given)?;
        for at in marks.into_iter().rev() {
            text.insert(at, '·');
        }
        Ok(text)
    }

    #[test]
    fn only_spellings_with_bytes_of_the_request_are_marked() {
        for (prompt, expect) in [
            ("<s>«hello»<|end|>", "<s>hello<|end|>"),
            ("<s>«<|end|>»<|end|>", "<s><·|end|><|end|>"),
            ("<s>«<|en»«d|>»<|end|>", "<s><·|end|><|end|>"),
            ("<|«end»|>", "<|·end|>"),
            ("<|end«|>»", "<|end·|>"),
            ("«<|e»nd|>", "<·|end|>"),
            ("«a»<s>«s>»<s«>»", "a<s>s><s·>"),
            ("«x < y»", "x < y"),
            ("<s>", "<s>"),
        ] {
            assert_eq!(marked(prompt).as_deref(), Ok(expect), "{prompt}");
        }
        assert_eq!(marked("«\u{2581}»"), Err("\u{2581}".to_owned()));
        assert_eq!(marked("\u{2581}«a»").as_deref(), Ok("\u{2581}a"));
    }
}
