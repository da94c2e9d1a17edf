//! Ids equal Python's, from a GGUF-like vocabulary and from a `tokenizer.json` alike.

use baton_proto::tokenizer_spec::{TokenKind, TokenizerModel};
use baton_tokenizer::{EncodeOptions, Error, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::specs::{self, build, entry};

fn check_cases(tokenizer: &Tokenizer, section: &Value, what: &str) {
    let cases = section["cases"].as_array().unwrap();
    assert!(cases.len() > 50);
    for case in cases {
        let text = case[0].as_str().unwrap();
        let expect: Vec<u32> = serde_json::from_value(case[1].clone()).unwrap();
        let options = EncodeOptions::TRUSTED;
        let ids = tokenizer.encode(text, options).unwrap();
        assert_eq!(ids, expect, "{what}: {text:?}");
        let fewest = tokenizer.fewest_tokens(text);
        assert!(fewest <= ids.len(), "{what}: {fewest} for {text:?}");
    }
}

#[test]
fn byte_level_ids_equal_the_reference_for_every_split_rule() {
    let golden = specs::golden_tokenizers();
    for rule in golden["byte_level"]["rules"].as_array().unwrap() {
        let pre = rule["pre"].as_str().unwrap();
        let from_gguf = build(&specs::byte_level(&golden, pre));
        check_cases(&from_gguf, rule, pre);
        let from_json = build(&specs::byte_level_json(&golden, rule));
        check_cases(&from_json, rule, &format!("{pre} json"));
    }
}

#[test]
fn sentence_piece_ids_equal_the_reference() {
    let golden = specs::golden_tokenizers();
    for section in golden["sentence_piece"].as_array().unwrap() {
        let tokenizer = build(&specs::sentence_piece(section));
        check_cases(&tokenizer, section, "sentencepiece");
    }
    let section = &golden["sentence_piece"][0];
    let spec = specs::sentence_piece(section);
    let json = specs::sentence_piece_json(&spec, specs::byte_fallback_decoder());
    check_cases(&build(&json), section, "sentencepiece json");
}

#[test]
fn byte_level_text_survives_a_round_trip() {
    let golden = specs::golden_tokenizers();
    let tokenizer = build(&specs::byte_level(&golden, "smollm"));
    let json = build(&specs::byte_level_json(
        &golden,
        &golden["byte_level"]["rules"][1],
    ));
    proptest!(|(text in "\\PC*|[\\s<|imstart>0-9'\u{301}🙂한]{0,40}")| {
        for options in [EncodeOptions::TRUSTED, EncodeOptions::LITERAL] {
            let ids = tokenizer.encode(&text, options).unwrap();
            prop_assert_eq!(&tokenizer.decode(&ids, false), &text);
            prop_assert!(tokenizer.fewest_tokens(&text) <= ids.len());
            prop_assert!(json.fewest_tokens(&text) <= ids.len());
            prop_assert_eq!(json.encode(&text, options).unwrap(), ids);
        }
    });
}

#[test]
fn sentence_piece_text_survives_a_round_trip() {
    let golden = specs::golden_tokenizers();
    for section in golden["sentence_piece"].as_array().unwrap() {
        let tokenizer = build(&specs::sentence_piece(section));
        proptest!(|(text in "[^\u{2581}]{0,40}|[ a-e\n🙂한]{0,40}")| {
            let ids = tokenizer.encode(&text, EncodeOptions::LITERAL).unwrap();
            prop_assert!(tokenizer.fewest_tokens(&text) <= ids.len());
            prop_assert_eq!(tokenizer.decode(&ids, true), text);
        });
    }
}

#[test]
fn control_tokens_are_recognised_only_where_asked() {
    let golden = specs::golden_tokenizers();
    let rule = &golden["byte_level"]["rules"][1];
    for spec in [
        specs::byte_level(&golden, "smollm"),
        specs::byte_level_json(&golden, rule),
    ] {
        let tokenizer = build(&spec);
        let text = "a<|im_end|><think>";
        let parsed = tokenizer.encode(text, EncodeOptions::PROMPT).unwrap();
        let literal = tokenizer.encode(text, EncodeOptions::LITERAL).unwrap();
        assert_eq!(parsed[1], 2);
        assert!(!literal.contains(&2), "{literal:?}");
        // User-defined tokens are text: matched whole always, and shown.
        assert_eq!(parsed.last(), literal.last());
        assert_eq!(tokenizer.decode(&parsed, true), "a<think>");
        assert_eq!(tokenizer.decode(&parsed, false), text);
        assert_eq!(tokenizer.decode(&literal, true), text);
        assert!(tokenizer.is_special(2) && !tokenizer.is_special(*parsed.last().unwrap()));
    }
}

#[test]
fn bos_and_eos_are_added_once_and_only_where_asked() {
    let mut spec = specs::pieces();
    spec.add_eos = true;
    let tokenizer = build(&spec);
    let encode = |text, options| tokenizer.encode(text, options).unwrap();
    let word = specs::piece("▁a");
    assert_eq!(encode("a", EncodeOptions::PROMPT), [1, word, 2]);
    assert_eq!(encode("<s>a</s>", EncodeOptions::PROMPT), [1, word, 2]);
    assert_eq!(encode("a", EncodeOptions::TRUSTED), [word]);
    assert_eq!(encode("<s>a", EncodeOptions::TRUSTED), [1, word]);
    assert_eq!(encode("", EncodeOptions::PROMPT), [1, 2]);
    // A model without BOS: the caller sees an empty prompt and refuses it.
    let without = build(&specs::bytes_only());
    assert!(
        without
            .encode("", EncodeOptions::PROMPT)
            .unwrap()
            .is_empty()
    );
}

#[test]
fn hugging_face_post_processor_adds_bos_and_it_is_not_doubled() {
    let golden = specs::golden_tokenizers();
    let mut spec = specs::byte_level_json(&golden, &golden["byte_level"]["rules"][0]);
    let TokenizerModel::HuggingFace { json } = &mut spec.model else {
        unreachable!()
    };
    let mut file: Value = serde_json::from_str(json).unwrap();
    file["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    });
    *json = file.to_string();
    spec.bos = Some(1);
    spec.add_bos = true;
    let tokenizer = build(&spec);
    let ids = tokenizer.encode("a", EncodeOptions::PROMPT).unwrap();
    assert_eq!((ids[0], ids.len()), (1, 2));
    let chat = tokenizer.encode("a", EncodeOptions::TRUSTED).unwrap();
    assert_eq!(chat, ids[1..]);
}

#[test]
fn padded_ids_and_holes_have_no_text() {
    let tokenizer = build(&specs::bytes_only());
    assert_eq!(tokenizer.size(), 300);
    for id in [258, 299, 300, 310, u32::MAX] {
        assert_eq!(tokenizer.decode(&[65, id, 66], true), "AB");
        assert_eq!(tokenizer.token_bytes(id), b"");
        assert_eq!(tokenizer.token_text(id), "");
        assert!(!tokenizer.is_special(id));
    }
    // A hole in a tokenizer.json's ids, and an output matrix wider than it.
    let golden = specs::golden_tokenizers();
    let mut spec = specs::byte_level_json(&golden, &golden["byte_level"]["rules"][0]);
    let TokenizerModel::HuggingFace { json } = &mut spec.model else {
        unreachable!()
    };
    *json = json.replace("\"id\":568,", "\"id\":580,");
    spec.tokens = vec![entry("", 0.0, TokenKind::Unused); 640];
    let tokenizer = build(&spec);
    assert_eq!(tokenizer.size(), 640);
    assert_eq!(tokenizer.decode(&[575, 639], true), "");
}

#[test]
fn logprob_texts_show_half_characters_as_bytes() {
    let tokenizer = build(&specs::bytes_only());
    assert_eq!(tokenizer.token_text(259), " hello");
    assert_eq!(tokenizer.token_bytes(259), b" hello");
    assert_eq!(tokenizer.token_text(0xf0), "bytes:\\xf0");
    assert_eq!(tokenizer.token_text(256), "<|end|>");
}

#[test]
fn specifications_that_would_guess_are_refused() {
    let golden = specs::golden_tokenizers();
    let refused = |spec: &_| Tokenizer::from_spec(spec).unwrap_err();

    for pre in ["default", "", "brand-new"] {
        let error = refused(&specs::byte_level(&golden, pre));
        assert!(matches!(error, Error::UnknownPreTokenizer { name, .. } if name == pre));
    }
    let mut spec = specs::byte_level(&golden, "gpt-2");
    spec.model = TokenizerModel::ByteLevelBpe {
        merges: Vec::new(),
        pre: "gpt-2".into(),
    };
    assert_eq!(refused(&spec), Error::NoMerges { tokens: 570 });
    for merge in ["é", "", "zzzz yyyy", "  "] {
        spec.model = TokenizerModel::ByteLevelBpe {
            merges: vec![merge.into()],
            pre: "gpt-2".into(),
        };
        assert!(
            matches!(refused(&spec), Error::InvalidSpec { .. }),
            "{merge:?}"
        );
    }
    let mut spec = specs::pieces();
    spec.eos = vec![100_000];
    assert!(matches!(refused(&spec), Error::InvalidSpec { .. }));
    spec = specs::pieces();
    spec.tokens[5].text = "0x02".into();
    assert!(matches!(refused(&spec), Error::InvalidSpec { .. }));
}

#[test]
fn hugging_face_files_that_cannot_be_decoded_are_refused() {
    let golden = specs::golden_tokenizers();
    let spec = specs::byte_level_json(&golden, &golden["byte_level"]["rules"][0]);
    let TokenizerModel::HuggingFace { json } = &spec.model else {
        unreachable!()
    };
    let with = |change: &dyn Fn(&mut Value)| {
        let mut file: Value = serde_json::from_str(json).unwrap();
        change(&mut file);
        let json = file.to_string();
        let spec = specs::spec(TokenizerModel::HuggingFace { json }, Vec::new());
        Tokenizer::from_spec(&spec).unwrap_err()
    };
    let word_piece = json!({"type": "WordPiece", "prefix": "##", "cleanup": true});
    let error = with(&|file| file["decoder"] = word_piece.clone());
    assert!(matches!(&error, Error::Unsupported { what } if what.contains("WordPiece")));
    let error = with(&|file| file["decoder"] = Value::Null);
    assert!(matches!(error, Error::Unsupported { .. }));
    // A merge longer than every token makes the reference crate panic.
    let error = with(&|file| {
        let half = "a".repeat(40);
        file["model"]["vocab"] = json!({half.clone(): 0});
        file["model"]["merges"] = json!([[half, half]]);
        file["added_tokens"] = json!([]);
    });
    assert!(matches!(error, Error::InvalidSpec { .. }));
    let error = with(&|file| file["model"] = json!({"type": "BPE"}));
    assert!(matches!(error, Error::InvalidSpec { .. }));
}

#[test]
fn unknown_token_stands_in_where_a_vocabulary_has_no_bytes() {
    let tokens = vec![
        entry("<unk>", 0.0, TokenKind::Unknown),
        entry("a", 0.0, TokenKind::Normal),
    ];
    let add_space_prefix = false;
    let mut spec = specs::spec(TokenizerModel::SentencePiece { add_space_prefix }, tokens);
    let encode = |spec: &_| build(spec).encode("a한a", EncodeOptions::PROMPT);
    assert_eq!(encode(&spec), Err(Error::Unencodable { byte: 0xed }));
    spec.unknown = Some(0);
    assert_eq!(encode(&spec), Ok(vec![1, 0, 1]));
}
