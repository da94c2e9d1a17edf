//! Hostile text and hostile templates cost bounded time and memory.

use std::time::{Duration, Instant};

use baton_tokenizer::{ChatRequest, EncodeOptions, Error, TEXT_BYTES_MAX};
use serde_json::json;

use crate::specs::{self, build, with_template};

/// Far above what linear work takes in a debug build on a busy machine (tenths of a
/// second), far below what quadratic work on a megabyte takes (hours).
const SECONDS_MAX: u64 = 20;

fn timed<T>(what: &str, work: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = work();
    let took = start.elapsed();
    assert!(took < Duration::from_secs(SECONDS_MAX), "{what}: {took:?}");
    result
}

#[test]
fn a_megabyte_of_anything_is_encoded_in_bounded_time() {
    let golden = specs::golden_tokenizers();
    let rules = golden["byte_level"]["rules"].as_array().unwrap();
    let mut tokenizers = vec![(
        "spm",
        build(&specs::sentence_piece(&golden["sentence_piece"][0])),
    )];
    for rule in rules {
        let pre = rule["pre"].as_str().unwrap();
        tokenizers.push((pre, build(&specs::byte_level(&golden, pre))));
    }
    tokenizers.push(("json", build(&specs::byte_level_json(&golden, &rules[2]))));
    for (name, tokenizer) in tokenizers {
        for (what, text) in [
            ("one letter", "w".repeat(1 << 20)),
            ("blanks", " ".repeat(1 << 20)),
            ("blanks, then a letter", " ".repeat(1 << 20) + "x"),
            ("line breaks and blanks", "\n ".repeat(1 << 19)),
            ("marks", "!?".repeat(1 << 19)),
            ("half a special", "<|im_star".repeat(1 << 17)),
            ("emoji", "🙂".repeat(1 << 18)),
        ] {
            let ids = timed(&format!("{name}: {what}"), || {
                tokenizer.encode(&text, EncodeOptions::LITERAL).unwrap()
            });
            assert_eq!(tokenizer.decode(&ids, true), text, "{name}: {what}");
            // Known before, without encoding it.
            let fewest = timed("a bound", || tokenizer.fewest_tokens(&text));
            assert!(
                (1000..=ids.len()).contains(&fewest),
                "{name}: {what}: {fewest}"
            );
        }
    }
}

#[test]
fn long_words_get_the_ids_of_the_reference() {
    let golden = specs::golden_tokenizers();
    for rule in [1, 2] {
        let rule = &golden["byte_level"]["rules"][rule];
        let ours = build(&specs::byte_level(&golden, rule["pre"].as_str().unwrap()));
        let reference = build(&specs::byte_level_json(&golden, rule));
        for text in [
            "w".repeat(5_000),
            "the".repeat(5_000),
            "inton".repeat(3_000),
            " ".repeat(100_000) + "x",
            "\n ".repeat(20_000) + "x",
        ] {
            let options = EncodeOptions::PROMPT;
            assert_eq!(
                ours.encode(&text, options),
                reference.encode(&text, options)
            );
        }
    }
}

#[test]
fn texts_over_the_limit_are_refused() {
    let tokenizer = build(&specs::bytes_only());
    let text = "a".repeat(TEXT_BYTES_MAX + 1);
    let error = tokenizer.encode(&text, EncodeOptions::PROMPT).unwrap_err();
    let (bytes, max) = (text.len(), TEXT_BYTES_MAX);
    assert_eq!(error, Error::TextTooLong { bytes, max });
}

#[test]
fn a_large_vocabulary_is_fast() {
    let golden = specs::golden_tokenizers();
    let mut spec = specs::sentence_piece(&golden["sentence_piece"][1]);
    let kind = baton_proto::tokenizer_spec::TokenKind::Normal;
    for index in spec.tokens.len()..262_144 {
        let text = format!("▁piece{index}");
        spec.tokens.push(specs::entry(&text, -(index as f32), kind));
    }
    let tokenizer = timed("build 262,144 pieces", || build(&spec));
    let text = "the quick brown fox, and 값 too. ".repeat(8_000);
    timed("encode 256 kB", || {
        tokenizer.encode(&text, EncodeOptions::PROMPT).unwrap()
    });
}

fn render(template: &str) -> Result<String, Error> {
    let tokenizer = build(&with_template(specs::pieces(), "default", template));
    let messages = vec![json!({"role": "user", "content": "!"})];
    timed(template, || {
        tokenizer.render_chat(&ChatRequest {
            messages,
            ..ChatRequest::default()
        })
    })
}

#[test]
fn hostile_templates_end_in_an_error() {
    for template in [
        // Time.
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
        // Memory and output.
        "{% set ns = namespace(x='abcdefgh') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
        "{{ 'x' * 99999999999 }}",
        "{{ range(99999999999) | list }}",
        "{% set x = 'x' * 1000000 %}{% for i in range(100) %}{{ x }}{% endfor %}",
        // Stack.
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{% for a in [[[messages]]] recursive %}{{ loop([[a]]) }}{% endfor %}",
        "{% include 'default' %}",
    ] {
        let error = render(template).unwrap_err();
        assert!(
            matches!(
                error,
                Error::TemplateFailed { .. } | Error::RenderTooLong { .. }
            ),
            "{error:?}"
        );
    }
    let deep = format!("{}1{}", "(".repeat(5_000), ")".repeat(5_000));
    let error = render(&format!("{{{{ {deep} }}}}")).unwrap_err();
    assert!(matches!(error, Error::TemplateSyntax { .. }));
}

/// Dropping, printing or comparing a deep value recurses, level by level.
#[test]
fn values_nested_by_a_template_do_not_exhaust_the_stack() {
    let step = format!(
        "{{% set ns.x = {}ns.x{} %}}",
        "[".repeat(40),
        "]".repeat(40)
    );
    let nest = |times: usize, end: &str| {
        format!(
            "{{% set ns = namespace(x=[1]) %}}{{% for i in range({times}) %}}{step}{{% endfor %}}{end}"
        )
    };
    // Until the fuel ends.
    assert!(render(&nest(99_999, "")).is_err());
    // Nearly as deep, with fuel left for the end.
    let error = render(&nest(20_000, "{{ ns.x | tojson }}")).unwrap_err();
    assert!(error.to_string().contains("too deeply"), "{error}");
    let printed = render(&nest(20_000, "{{ ns.x }}")).unwrap();
    assert_eq!(printed.matches('[').count(), 800_001);
    assert_eq!(
        render(&nest(20_000, "{{ ns.x == [ns.x] }}")).unwrap(),
        "False"
    );
}

#[test]
fn long_conversations_fit_the_budget() {
    let golden: serde_json::Value =
        serde_json::from_str(include_str!("../golden/templates.json")).unwrap();
    let template = golden["templates"]["qwen_tools"].as_str().unwrap();
    let tokenizer = build(&with_template(specs::pieces(), "default", template));
    let message = |index: usize| {
        let role = if index.is_multiple_of(2) {
            "user"
        } else {
            "assistant"
        };
        json!({"role": role, "content": format!("word{index} ").repeat(400)})
    };
    let chat = ChatRequest {
        messages: (0..3_001).map(message).collect(),
        add_generation_prompt: true,
        ..ChatRequest::default()
    };
    let text = timed("render", || tokenizer.render_chat(&chat).unwrap());
    assert!(text.len() > 8 << 20);
}
