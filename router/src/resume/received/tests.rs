//! Every cut of a stream, by token and by byte: what comes after it is exactly what
//! is missing, or a refusal that names the count that cannot be.

use std::sync::Arc;

use baton_tokenizer::Tokenizer;

use super::*;
use crate::text::tests::byte_tokenizer;
use crate::text::{ChoiceText, StopRules};

/// One choice as a worker would make it.
struct Script {
    ids: Vec<u32>,
    rules: StopRules,
    tokenizer: Arc<Tokenizer>,
}

/// What a client of an undisturbed stream has: the tokens that count, all text, and
/// the bytes of text after each token, and where in the text each token's part ends.
struct Whole {
    tokens: Vec<u32>,
    text: String,
    after: Vec<usize>,
    ends: Vec<usize>,
}

fn token(id: u32) -> SampledToken {
    SampledToken { id, logprob: None }
}

impl Script {
    fn new(text: &str, stop: &[&str], min_tokens: u32) -> Self {
        Self {
            ids: text.bytes().map(u32::from).collect(),
            rules: StopRules {
                stop: stop.iter().map(|stop| (*stop).to_owned()).collect(),
                include_stop: min_tokens % 2 == 1,
                min_tokens,
            },
            tokenizer: byte_tokenizer(),
        }
    }

    fn text(&self) -> ChoiceText {
        ChoiceText::new(&self.tokenizer, &[u32::from(b'x')], &self.rules)
    }

    fn whole(&self) -> Whole {
        let mut text = self.text();
        let mut whole = Whole {
            tokens: Vec::new(),
            text: String::new(),
            after: vec![0],
            ends: Vec::new(),
        };
        let mut parts = Vec::new();
        for id in &self.ids {
            let piece = text.push(vec![token(*id)]);
            whole.tokens.extend(piece.tokens.iter().map(|t| t.id));
            whole.text.push_str(&piece.text);
            whole.after.push(whole.text.len());
            parts.extend(piece.token_texts);
            if piece.stopped {
                break;
            }
        }
        let last = text.finish();
        whole.text.push_str(&last.text);
        parts.extend(last.token_texts);
        let mut end = 0;
        for part in parts {
            end += part.bytes.len();
            whole.ends.push(end);
        }
        assert_eq!(whole.ends.len(), whole.tokens.len());
        whole
    }

    /// Resumes: the ids that were given back first, then everything else in runs of
    /// `run`, as the driver does it. Answers the tokens and the text that are sent.
    fn resume(
        &self,
        received: &v1::ResumeChoice,
        run: usize,
    ) -> Result<(u32, Vec<u32>, String), Error> {
        let mut text = self.text();
        let mut cursor = Cursor::resumed(0, received);
        let mut sent = String::new();
        for id in &received.token_ids {
            let rest = cursor.pass(text.push(vec![token(*id)]))?;
            assert_eq!(rest.tokens, [], "the client has them");
            sent.push_str(&rest.text);
        }
        let (mut first, mut tokens, mut parts) = (None, Vec::new(), Vec::new());
        let mut left = &self.ids[received.token_ids.len()..];
        while !left.is_empty() && text.stopped().is_none() {
            let size = if cursor.is_caught_up() { run } else { 1 };
            let (now, later) = left.split_at(size.min(left.len()));
            left = later;
            let piece = text.push(now.iter().copied().map(token).collect());
            let rest = cursor.pass(piece)?;
            if !rest.tokens.is_empty() {
                let next = first.get_or_insert(rest.first_index);
                assert_eq!(*next as usize + tokens.len(), rest.first_index as usize);
            }
            tokens.extend(rest.tokens.iter().map(|token| token.id));
            sent.push_str(&rest.text);
            parts.extend(rest.token_texts);
        }
        let rest = cursor.end(text.finish())?;
        sent.push_str(&rest.text);
        parts.extend(rest.token_texts);
        // Those of the tokens that were sent, and what there is of the text behind the others.
        assert_eq!(parts.len(), tokens.len());
        let first = first.unwrap_or(text.tokens());
        Ok((first, tokens, sent))
    }
}

fn scripts() -> Vec<Script> {
    let text = "A\u{1f642}monday \u{e9}\u{ac12}tuesday\u{1f469}\u{200d}\u{1f4bb}z";
    vec![
        Script::new(text, &[], 0),
        // Matched in the middle; nothing past it counts.
        Script::new(text, &["tues"], 0),
        Script::new(text, &["nday \u{e9}", "zz"], 3),
        // Half matched at the end: held back, then flushed.
        Script::new("monday tues", &["tuesday"], 0),
        // Ends inside a character.
        Script {
            ids: "ab\u{1f642}".bytes().take(4).map(u32::from).collect(),
            ..Script::new("", &["b\u{fffd}x"], 0)
        },
        // An end token without text comes last.
        Script {
            ids: vec![u32::from(b'a'), u32::from(b'b'), 256],
            ..Script::new("", &[], 0)
        },
    ]
}

#[test]
fn every_cut_by_tokens_and_bytes_goes_on_without_gap_or_repeat() {
    let mut good = 0;
    for (number, script) in scripts().iter().enumerate() {
        let whole = script.whole();
        for had in 0..=whole.tokens.len() {
            for bytes in 0..=whole.text.len() {
                let ids = v1::ResumeChoice {
                    token_ids: whole.tokens[..had].to_vec(),
                    text_bytes_received: bytes as u64,
                    ..v1::ResumeChoice::default()
                };
                let counted = v1::ResumeChoice {
                    tokens_received: Some(had as u32),
                    text_bytes_received: bytes as u64,
                    ..v1::ResumeChoice::default()
                };
                // Who counts tokens by their logprobs may have text of the next one.
                let most = whole.ends.get(had).copied().unwrap_or(whole.text.len());
                let possible = whole.text.is_char_boundary(bytes) && bytes <= most;
                let ways = [(&counted, 1), (&counted, 4), (&ids, 1), (&ids, 3)];
                // Without any id there is nothing that counts.
                let ways = &ways[..if had == 0 { 2 } else { 4 }];
                for (received, run) in ways.iter().copied() {
                    let cut = format!("script {number}: {received:?} in runs of {run}");
                    match script.resume(received, run) {
                        Ok((first, tokens, text)) => {
                            assert!(possible, "{cut}");
                            assert_eq!(first as usize, had, "{cut}");
                            assert_eq!(tokens, whole.tokens[had..], "{cut}");
                            assert_eq!(text, whole.text[bytes..], "{cut}");
                            good += 1;
                        }
                        Err(error) => {
                            assert!(!possible, "{cut}: {error}");
                            assert_eq!(
                                error.field, "resume.choices[0].text_bytes_received",
                                "{cut}"
                            );
                        }
                    }
                }
            }
        }
    }
    assert!(good > 1_000, "{good} cuts were possible");
}

#[test]
fn a_client_that_cannot_count_tokens_goes_on_at_its_byte() {
    for script in &scripts() {
        let whole = script.whole();
        for bytes in 0..=whole.text.len() {
            let received = v1::ResumeChoice {
                text_bytes_received: bytes as u64,
                ..v1::ResumeChoice::default()
            };
            for run in [1, 3] {
                let resumed = script.resume(&received, run);
                if !whole.text.is_char_boundary(bytes) {
                    let field = resumed.unwrap_err().field;
                    assert_eq!(field, "resume.choices[0].text_bytes_received");
                    continue;
                }
                let (first, tokens, text) = resumed.unwrap();
                assert_eq!(text, whole.text[bytes..]);
                // Tokens whose text the client has are left out, no other one is.
                assert_eq!(tokens, whole.tokens[first as usize..]);
                assert!(whole.after[first as usize] <= bytes);
            }
        }
    }
}

#[test]
fn more_than_there_is_cannot_have_been_received() {
    let script = Script::new("monday", &[], 0);
    let field = |tokens, bytes| {
        let received = v1::ResumeChoice {
            tokens_received: tokens,
            text_bytes_received: bytes,
            ..v1::ResumeChoice::default()
        };
        script.resume(&received, 2).unwrap_err().field
    };
    assert_eq!(field(Some(7), 6), "resume.choices[0].tokens_received");
    assert_eq!(field(Some(6), 7), "resume.choices[0].text_bytes_received");
    assert_eq!(field(None, 7), "resume.choices[0].text_bytes_received");
    assert_eq!(field(Some(2), 4), "resume.choices[0].text_bytes_received");
    assert_eq!(
        field(None, u64::MAX),
        "resume.choices[0].text_bytes_received"
    );
}
