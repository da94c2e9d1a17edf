//! Text comes out of a stream of ids whole: no half characters, no lost blanks.

use std::sync::Arc;

use baton_tokenizer::{EncodeOptions, TextStream, Tokenizer};
use proptest::prelude::*;

use crate::specs::{self, build, piece};

/// Streams `output` behind `prompt`; checks every delta and returns their join.
fn stream(tokenizer: &Arc<Tokenizer>, prompt: &[u32], output: &[u32]) -> String {
    let mut stream = TextStream::new(tokenizer, prompt);
    let mut joined = String::new();
    for &id in output {
        joined += &stream.push(id);
    }
    joined += &stream.finish();
    assert_eq!(stream.finish(), "");
    joined
}

#[test]
fn characters_of_several_tokens_come_out_whole() {
    let tokenizer = build(&specs::bytes_only());
    for target in ["🙂", "값", "é", "👩‍💻", "A🙂B", "🙂🙂", "각️\u{20e3}"] {
        let ids: Vec<u32> = target.bytes().map(u32::from).collect();
        let mut stream = TextStream::new(&tokenizer, &[65]);
        let deltas: Vec<String> = ids.iter().map(|&id| stream.push(id)).collect();
        assert_eq!(deltas.concat(), target);
        assert_eq!(stream.finish(), "");
        assert!(!deltas.concat().contains('\u{fffd}'));
        // A character is given out with its last byte, not later.
        let ends: Vec<usize> = target
            .char_indices()
            .skip(1)
            .map(|(at, _)| at - 1)
            .collect();
        for (at, delta) in deltas.iter().enumerate() {
            assert_eq!(
                !delta.is_empty(),
                ends.contains(&at) || at == target.len() - 1,
                "{target} {deltas:?}"
            );
        }
    }
}

#[test]
fn a_character_begun_in_the_prompt_is_finished_by_the_output() {
    let tokenizer = build(&specs::bytes_only());
    let bytes: Vec<u32> = "x🙂".bytes().map(u32::from).collect();
    for cut in 1..=bytes.len() {
        let text = stream(&tokenizer, &bytes[..cut], &bytes[cut..]);
        assert_eq!(text, if cut < bytes.len() { "🙂" } else { "" });
        // Replay on another router: same prompt, same ids, same state.
        let mut first = TextStream::new(&tokenizer, &bytes[..1]);
        let mut again = TextStream::new(&tokenizer, &bytes[..1]);
        for &id in &bytes[1..cut] {
            assert_eq!(first.push(id), again.push(id));
        }
        assert_eq!(first.finish(), again.finish());
    }
    // If the output does not complete it, the mark belongs to the prompt's text.
    assert_eq!(stream(&tokenizer, &bytes[..3], &[65]), "A");
    assert_eq!(stream(&tokenizer, &bytes[..3], &[]), "");
}

#[test]
fn invalid_bytes_become_one_mark_each_and_only_when_certain() {
    let tokenizer = build(&specs::bytes_only());
    let mut stream = TextStream::new(&tokenizer, &[]);
    assert_eq!(stream.push(0xf0), "");
    assert_eq!(stream.push(0x9f), "");
    assert_eq!(stream.push(65), "\u{fffd}A");
    assert_eq!(stream.push(0xff), "\u{fffd}");
    assert_eq!(stream.push(0xe2), "");
    assert_eq!(stream.finish(), "\u{fffd}");
}

#[test]
fn special_padded_and_hole_ids_add_nothing() {
    let tokenizer = build(&specs::bytes_only());
    assert_eq!(
        stream(&tokenizer, &[10, 11], &[65, 310, 258, 256, 257, 66]),
        "A<think>B"
    );
    let mut shown = TextStream::with_special(&tokenizer, &[], false);
    assert_eq!(shown.push(256), "<|end|>");
}

/// What the walk must add to the prompt's text, from a GGUF vocabulary and from both
/// decoders that a `tokenizer.json` of this kind has.
fn check_walk(prompt: &[&str], output: &[&str], expect: &str) {
    for spec in [
        specs::pieces(),
        specs::sentence_piece_json(&specs::pieces(), specs::byte_fallback_decoder()),
        specs::sentence_piece_json(&specs::pieces(), specs::metaspace_decoder()),
    ] {
        check_walk_with(&build(&spec), prompt, output, expect);
    }
}

fn check_walk_with(tokenizer: &Arc<Tokenizer>, prompt: &[&str], output: &[&str], expect: &str) {
    let ids = |pieces: &[&str]| -> Vec<u32> {
        pieces
            .iter()
            .map(|&text| match text {
                "<s>" => 1,
                "</s>" => 2,
                "<0x20>" => 3 + 0x20,
                _ => piece(text),
            })
            .collect()
    };
    let (prompt, output) = (ids(prompt), ids(output));
    let all = [prompt.clone(), output.clone()].concat();
    let before = tokenizer.decode(&prompt, true);
    let whole = tokenizer.decode(&all, true);
    assert_eq!(whole.strip_prefix(&before), Some(expect));
    assert_eq!(stream(tokenizer, &prompt, &output), expect);
}

#[test]
fn sentence_piece_blanks_are_kept_in_every_walk() {
    let bos: &[&str] = &["<s>"];
    let text: &[&str] = &["<s>", "▁Hello"];
    check_walk(bos, &["▁Hello", "▁world", "▁again"], "Hello world again");
    check_walk(text, &["▁Hello", "▁world", "▁again"], " Hello world again");
    check_walk(text, &["▁a", "▁▁▁▁", "b"], " a    b");
    check_walk(bos, &["▁a", "▁▁", "▁▁", "b"], "a    b");
    check_walk(text, &["▁x", "▁,", "y", "▁.", "z"], " x ,y .z");
    check_walk(text, &["\n", "▁▁", "indented"], "\n  indented");
    check_walk(bos, &["\n", "▁▁", "indented"], "\n  indented");
    // The first output token starts with a blank; behind text it stays.
    check_walk(text, &["▁", "x"], " x");
    // Behind nothing but special tokens one blank goes, and only one.
    check_walk(bos, &["▁", "x"], "x");
    check_walk(bos, &["▁▁", "x"], " x");
    check_walk(&[], &["▁▁▁▁"], "   ");
    check_walk(bos, &["<0x20>", "x"], "x");
    // A token right after a special token.
    check_walk(text, &["</s>", "▁world"], " world");
    check_walk(bos, &["</s>", "▁world"], "world");
    check_walk(text, &["▁1", "▁2", "▁3"], " 1 2 3");
    check_walk(bos, &["▁1", "▁2", "▁3"], "1 2 3");
    // Nothing is trimmed at the end.
    check_walk(text, &["x", "▁▁▁▁"], "x    ");
    check_walk(&["▁"], &["▁", "x"], " x");
}

#[test]
fn sentence_piece_encoding_of_the_walks_is_as_spelled() {
    let tokenizer = build(&specs::pieces());
    let ids = tokenizer.encode("1 2 3", EncodeOptions::PROMPT).unwrap();
    assert_eq!(ids, [1, piece("▁1"), piece("▁2"), piece("▁3")]);
    let ids = tokenizer.encode("é", EncodeOptions::LITERAL).unwrap();
    assert_eq!(ids, [piece("▁"), 3 + 0xc3, 3 + 0xa9]);
}

#[test]
fn joined_deltas_equal_decoding_for_any_ids() {
    for spec in [specs::bytes_only(), specs::pieces()] {
        let tokenizer = build(&spec);
        // Mostly leading and trailing bytes of characters, so that halves abound.
        let id = prop_oneof![0..320u32, 0x80..0x100u32, Just(0xf0), Just(0x9f), Just(1)];
        proptest!(|(ids in prop::collection::vec(id, 0..40))| {
            prop_assert_eq!(stream(&tokenizer, &[], &ids), tokenizer.decode(&ids, true));
        });
    }
}

#[test]
fn any_text_streams_without_marks_at_any_prompt_border() {
    let golden = specs::golden_tokenizers();
    let mut specs_all = vec![specs::byte_level(&golden, "smollm")];
    for section in golden["sentence_piece"].as_array().unwrap() {
        specs_all.push(specs::sentence_piece(section));
    }
    for spec in specs_all {
        let tokenizer = build(&spec);
        proptest!(|(text in "[ a-d🙂값é\n\u{200d}]{0,24}", border in 0..40usize)| {
            let ids = tokenizer.encode(&text, EncodeOptions::LITERAL).unwrap();
            let border = border.min(ids.len());
            let (prompt, output) = ids.split_at(border);
            let joined = stream(&tokenizer, prompt, output);
            prop_assert!(!joined.contains(char::REPLACEMENT_CHARACTER));
            prop_assert!(text.ends_with(&joined));
            // The prompt's whole characters and the output's text make up the text.
            let before = tokenizer.decode(prompt, true);
            let before = before.trim_end_matches('\u{fffd}');
            prop_assert_eq!(format!("{before}{joined}"), text);
        });
    }
}
