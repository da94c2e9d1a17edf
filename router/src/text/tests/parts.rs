//! Whatever the tokens are: their parts, joined, are the text, and offsets are characters of it.

use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use rand::{Rng as _, SeedableRng as _};

use super::*;

const END: u32 = 256;
const OTHER_END: u32 = 257;
const HELLO: u32 = 258;
const WORD: u32 = 259;
const SMILE: u32 = 260;
const MARK: u32 = 261;

/// Bytes, two end tokens of one spelling, whole pieces, and a mark that is no part of the text.
/// A leading blank of the text is taken away, as SentencePiece models want it.
fn pieces() -> Arc<Tokenizer> {
    let entry = |text: &str, kind| TokenEntry {
        text: text.to_owned(),
        score: 0.0,
        kind,
    };
    let mut tokens: Vec<TokenEntry> = (0..=255_u8)
        .map(|byte| entry(&format!("<0x{byte:02X}>"), TokenKind::Byte))
        .collect();
    tokens.extend([
        entry("<|end|>", TokenKind::Control),
        entry("<|end|>", TokenKind::Control),
        entry("\u{2581}Hello", TokenKind::Normal),
        entry("daytues", TokenKind::Normal),
        entry("\u{1f642}", TokenKind::Normal),
        entry("<|mark|>", TokenKind::Control),
    ]);
    let spec = TokenizerSpec {
        template_tokens: None,
        model: TokenizerModel::SentencePiece {
            add_space_prefix: true,
        },
        tokens,
        bos: None,
        eos: vec![END],
        unknown: None,
        padding: None,
        add_bos: false,
        add_eos: false,
        chat_templates: Vec::new(),
    };
    Arc::new(Tokenizer::from_spec(&spec).unwrap())
}

/// A choice from its first token to its end.
#[derive(Debug, Default, PartialEq)]
struct Made {
    text: String,
    tokens: Vec<u32>,
    parts: Vec<TokenText>,
    stop_string: Option<String>,
}

fn make(
    tokenizer: &Arc<Tokenizer>,
    prompt: &[u32],
    ids: &[u32],
    rules: &StopRules,
    run: usize,
) -> Made {
    let mut choice = ChoiceText::new(tokenizer, prompt, rules);
    let mut made = Made::default();
    let take = |made: &mut Made, piece: Piece| {
        made.text.push_str(&piece.text);
        made.tokens
            .extend(piece.tokens.iter().map(|token| token.id));
        made.parts.extend(piece.token_texts);
        // A part is given out as soon as its text is, and never before.
        let joined: usize = made.parts.iter().map(|part| part.bytes.len()).sum();
        assert!(joined <= made.text.len());
    };
    for ids in ids.chunks(run) {
        take(
            &mut made,
            choice.push(ids.iter().copied().map(sampled).collect()),
        );
    }
    take(&mut made, choice.finish());
    made.stop_string = choice.stopped().map(|stopped| stopped.stop_string.clone());
    made
}

fn assert_parts(made: &Made, case: &str) {
    let joined: Vec<u8> = made
        .parts
        .iter()
        .flat_map(|part| part.bytes.clone())
        .collect();
    assert_eq!(joined, made.text.as_bytes(), "{case}");
    assert_eq!(made.parts.len(), made.tokens.len(), "{case}");
    let ends = || made.text.char_indices().map(|(at, c)| at + c.len_utf8());
    let mut begin = 0;
    for part in &made.parts {
        let whole = ends().filter(|end| *end <= begin).count();
        assert_eq!(part.offset as usize, whole, "{case}");
        begin += part.bytes.len();
    }
}

#[test]
fn joined_parts_are_the_text_of_any_tokens_and_stop_strings() {
    let tokenizer = pieces();
    let known = [
        u32::from(b'a'),
        u32::from(b' '),
        0xf0,
        0x9f,
        0x99,
        0x82,
        0xc3,
        0xa9,
        0xff,
        END,
        OTHER_END,
        HELLO,
        WORD,
        SMILE,
        MARK,
    ];
    let stops = [
        "a",
        "tues",
        "daytuesa",
        "aa",
        "\u{fffd}",
        "\u{1f642}",
        "\u{e9}a",
        "<|end|>",
        "a<|end|>",
        "<|mark|>a",
        "<|mark|><|end|>",
        "a<|mark|>daytues",
        "lo<|mark|> <|end|>",
    ];
    let mut stopped = 0;
    for seed in 0..4_000 {
        let mut random = StdRng::seed_from_u64(seed);
        let mut draw = |most: usize| -> Vec<u32> {
            let count = random.random_range(0..=most);
            (0..count)
                .map(|_| *known.choose(&mut random).unwrap())
                .collect()
        };
        let (prompt, ids) = (draw(4), draw(24));
        let rules = StopRules {
            stop: (0..random.random_range(0..3))
                .map(|_| (*stops.choose(&mut random).unwrap()).to_owned())
                .collect(),
            include_stop: random.random(),
            min_tokens: random.random_range(0..4),
        };
        let case = format!("seed {seed}: {prompt:?}, {ids:?}, {rules:?}");
        let one = make(&tokenizer, &prompt, &ids, &rules, 1);
        assert_parts(&one, &case);
        for run in [3, 100] {
            let other = make(&tokenizer, &prompt, &ids, &rules, run);
            assert_eq!(other, one, "{case} in runs of {run}");
        }
        stopped += u32::from(one.stop_string.is_some());
        // Where nothing is cut, hidden or replaced, a part is what the token spells.
        if one.stop_string.is_none() && prompt.is_empty() && !one.text.contains('\u{fffd}') {
            let bytes = |id: &u32| match tokenizer.is_special(*id) {
                true => Vec::new(),
                false => tokenizer.token_bytes(*id).to_vec(),
            };
            let mut spelled: Vec<Vec<u8>> = ids.iter().map(bytes).collect();
            let first = spelled.iter_mut().find(|bytes| !bytes.is_empty());
            if let Some(first) = first.filter(|bytes| bytes[0] == b' ') {
                first.remove(0);
            }
            let parts = one.parts.iter().map(|part| part.bytes.clone());
            assert_eq!(parts.collect::<Vec<_>>(), spelled, "{case}");
        }
    }
    assert!(stopped > 300, "{stopped} cases met a stop string");
}

/// The parts of `ids` behind `prompt` as text, with `\u{..}` for parts of characters.
fn parts_of(prompt: &[u32], ids: &[u32], stop: &[&str], include_stop: bool) -> Vec<(Vec<u8>, u32)> {
    let rules = StopRules {
        stop: stop.iter().map(|stop| (*stop).to_owned()).collect(),
        include_stop,
        min_tokens: 0,
    };
    let made = make(&pieces(), prompt, ids, &rules, 1);
    let parts = made.parts.into_iter();
    parts.map(|part| (part.bytes, part.offset)).collect()
}

#[test]
fn characters_are_counted_once_however_many_tokens_they_have() {
    let a = u32::from(b'a');
    let part = |bytes: &[u8], offset| (bytes.to_vec(), offset);
    assert_eq!(
        parts_of(&[a], &[a, 0xf0, 0x9f, 0x99, 0x82, a, END], &[], false),
        [
            part(b"a", 0),
            part(&[0xf0], 1),
            part(&[0x9f], 1),
            part(&[0x99], 1),
            part(&[0x82], 1),
            part(b"a", 2),
            part(b"", 3),
        ]
    );
    // What is no character is shown as one.
    let mark = "\u{fffd}".as_bytes();
    assert_eq!(
        parts_of(&[a], &[0xff, 0xf0, 0x9f, a], &[], false),
        [part(mark, 0), part(mark, 1), part(b"", 2), part(b"a", 2)]
    );
    assert_eq!(
        parts_of(&[a], &[0xf0, 0x9f, 0x99, a], &[], false),
        [part(mark, 0), part(b"", 1), part(b"", 1), part(b"a", 1)]
    );
    // A character that the prompt began is the output's.
    let smile = "\u{1f642}".as_bytes();
    assert_eq!(
        parts_of(&[0xf0, 0x9f], &[0x99, 0x82, a], &[], false),
        [part(&smile[..3], 0), part(&smile[3..], 0), part(b"a", 1)]
    );
    // The blank in front is no part of the text.
    assert_eq!(
        parts_of(&[], &[HELLO, HELLO], &[], false),
        [part(b"Hello", 0), part(b" Hello", 5)]
    );
    // Cut in the middle of a token, and kept.
    assert_eq!(
        parts_of(&[a], &[a, WORD], &["ytu"], false),
        [part(b"a", 0), part(b"da", 1)]
    );
    assert_eq!(
        parts_of(&[a], &[a, WORD], &["ytu"], true),
        [part(b"a", 0), part(b"daytu", 1)]
    );
}
