//! The text layer on a tokenizer whose every entry is a byte.

use baton_proto::tokenizer_spec::{TokenEntry, TokenKind, TokenizerModel, TokenizerSpec};

use super::*;

/// One token per byte (its id is the byte), and id 256 as the end token.
pub(crate) fn byte_tokenizer() -> Arc<Tokenizer> {
    let mut tokens: Vec<TokenEntry> = (0..=255_u8)
        .map(|byte| TokenEntry {
            text: format!("<0x{byte:02X}>"),
            score: 0.0,
            kind: TokenKind::Byte,
        })
        .collect();
    tokens.push(TokenEntry {
        text: "</s>".into(),
        score: 0.0,
        kind: TokenKind::Control,
    });
    let spec = TokenizerSpec {
        model: TokenizerModel::SentencePiece {
            add_space_prefix: false,
        },
        tokens,
        bos: None,
        eos: vec![256],
        unknown: None,
        padding: None,
        add_bos: false,
        add_eos: false,
        chat_templates: Vec::new(),
        template_tokens: None,
    };
    Arc::new(Tokenizer::from_spec(&spec).unwrap())
}

fn run(text: &str) -> Vec<SampledToken> {
    text.bytes().map(|byte| sampled(u32::from(byte))).collect()
}

fn sampled(id: u32) -> SampledToken {
    SampledToken { id, logprob: None }
}

fn choice(stop: &[&str], include_stop: bool, min_tokens: u32) -> ChoiceText {
    let rules = StopRules {
        stop: stop.iter().map(|text| (*text).to_owned()).collect(),
        include_stop,
        min_tokens,
    };
    ChoiceText::new(&byte_tokenizer(), &[u32::from(b'x')], &rules)
}

/// Feeds `text` in runs of `size` tokens: (deltas, tokens that count).
fn feed(choice: &mut ChoiceText, text: &str, size: usize) -> (Vec<String>, u32) {
    let mut deltas = Vec::new();
    for tokens in run(text).chunks(size) {
        let piece = choice.push(tokens.to_vec());
        assert_eq!(
            piece.stopped,
            choice.stopped().is_some() && !piece.tokens.is_empty()
        );
        deltas.push(piece.text);
    }
    deltas.push(choice.finish().text);
    (deltas, choice.tokens())
}

#[test]
fn text_ends_before_the_earliest_match_however_it_is_cut() {
    let text = "mondaytuesday!";
    for (stop, wanted, stopped_by) in [
        (vec!["daytues"], "mon", Some("daytues")),
        (vec!["a"], "mond", Some("a")),
        (vec!["day!"], "mondaytues", Some("day!")),
        (vec!["yt", "tues"], "monda", Some("yt")),
        (vec![text], "", Some(text)),
        (vec!["xyz"], text, None),
        (vec!["zz", "nday", "q", "w"], "mo", Some("nday")),
    ] {
        for size in 1..=text.len() {
            let mut choice = choice(&stop, false, 0);
            let (deltas, tokens) = feed(&mut choice, text, size);
            assert_eq!(deltas.concat(), wanted, "stop {stop:?} in runs of {size}");
            let stopped = choice.stopped().map(|stopped| stopped.stop_string.as_str());
            assert_eq!(stopped, stopped_by);
            let counted = wanted.len() + stopped_by.map_or(0, str::len);
            assert_eq!(tokens as usize, counted, "tokens up to the match count");
        }
    }
}

#[test]
fn nothing_past_a_match_is_sent_or_counted() {
    let mut choice = choice(&["b"], false, 0);
    let piece = choice.push(run("abcde"));
    assert_eq!(
        (piece.text.as_str(), piece.tokens.len(), piece.stopped),
        ("a", 2, true)
    );
    let after = choice.push(run("xyz"));
    assert_eq!(after, Piece::default());
    assert_eq!(choice.finish().text, "");
    assert_eq!(choice.stopped().unwrap().output_tokens, 2);
}

#[test]
fn the_stop_string_is_kept_when_asked() {
    let mut choice = choice(&["day"], true, 0);
    let (deltas, _) = feed(&mut choice, "mondaytuesday", 1);
    assert_eq!(deltas.concat(), "monday");
}

#[test]
fn what_was_held_back_comes_out_at_another_end() {
    let mut choice = choice(&["tuesday"], false, 0);
    let piece = choice.push(run("on tues"));
    assert_eq!(piece.text, "on ");
    assert_eq!(choice.finish().text, "tues");
    assert_eq!(choice.tokens(), 7);
}

#[test]
fn stop_strings_are_looked_for_only_after_min_tokens() {
    let mut choice = choice(&["ab"], false, 2);
    let (deltas, tokens) = feed(&mut choice, "ababab", 1);
    assert_eq!((deltas.concat().as_str(), tokens), ("ab", 4));
    // One that begins below the minimum does not match.
    let mut choice = self::choice(&["ab"], false, 1);
    let (deltas, _) = feed(&mut choice, "abxab", 1);
    assert_eq!(deltas.concat(), "abx");
}

#[test]
fn characters_of_several_tokens_come_whole() {
    for text in [
        "\u{1f642}",
        "\u{ac12}",
        "\u{e9}",
        "A\u{1f642}B\u{1f469}\u{200d}\u{1f4bb}",
    ] {
        for size in 1..=4 {
            let mut choice = choice(&[], false, 0);
            let (deltas, _) = feed(&mut choice, text, size);
            assert_eq!(deltas.concat(), text);
            assert!(deltas.iter().all(|delta| !delta.contains('\u{fffd}')));
        }
    }
}

#[test]
fn end_tokens_count_and_are_not_shown() {
    let mut choice = choice(&[], false, 0);
    let piece = choice.push(vec![sampled(u32::from(b'a')), sampled(256)]);
    assert_eq!((piece.text.as_str(), choice.tokens()), ("a", 2));
    assert_eq!(choice.finish().text, "");
}

mod parts;
mod special;
