//! Hostile text and hostile templates cost bounded time and memory.

use std::time::{Duration, Instant};

use baton_tokenizer::{ChatRequest, EncodeOptions, Error, Json, RenderedChat, TEXT_BYTES_MAX};
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

fn render(template: &str) -> Result<RenderedChat, Error> {
    let tokenizer = build(&with_template(specs::pieces(), "default", template));
    let messages = vec![json!({"role": "user", "content": "!"}).into()];
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
        // Values that share their parts.
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
        "{% set ns = namespace(x=(1,)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ {ns.x: 1} }}",
        "{% set ns = namespace(x={}) %}{% for i in range(60) %}{% set ns.x = {1: ns.x, 2: ns.x} %}{% endfor %}{{ ns.x | tojson }}",
        // Stack.
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{% for a in [[[messages]]] recursive %}{{ loop([[a]]) }}{% endfor %}",
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
    for (open, middle, close) in [
        ("(", "1", ")"),
        ("[", "", "]"),
        ("not ", "1", ""),
        ("-", "1", ""),
        ("1+", "1", ""),
        ("", "1", "|abs"),
        ("", "x", ".y"),
        ("", "x", "()"),
        ("1 if 1 else ", "1", ""),
        ("{% if 1 %}", "1", "{% endif %}"),
        ("{% for x in y %}", "1", "{% endfor %}"),
        ("{% macro m() %}", "1", "{% endmacro %}"),
    ] {
        let deep = format!("{}{middle}{}", open.repeat(20_000), close.repeat(20_000));
        let source = match open.starts_with("{%") {
            true => deep,
            false => format!("{{{{ {deep} }}}}"),
        };
        let error = render(&source).unwrap_err();
        let message = error.to_string();
        assert!(message.contains("levels deep"), "{open}{close}: {message}");
        assert!(matches!(error, Error::TemplateSyntax { .. }));
    }
    // No loader: other templates cannot be named.
    let error = render("{% include 'default' %}").unwrap_err();
    assert!(error.to_string().contains("`include` is not supported"));
}

/// Dropping, printing or comparing a deep value would recurse, level by level.
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
    for end in [
        "",
        "{{ ns.x | tojson }}",
        "{{ ns.x }}",
        "{{ ns.x == [ns.x] }}",
    ] {
        let error = render(&nest(20_000, end)).unwrap_err();
        assert!(error.to_string().contains("levels deep"), "{error}");
    }
    // Lazy filters nest their sources, too.
    for step in [
        "ns.x | map('upper')",
        "ns.x | select",
        "cycler(ns.x)",
        "joiner(ns.x)",
        "{'k': ns.x}",
        "(ns.x,)",
    ] {
        let error = render(&format!(
            "{{% set ns = namespace(x=[1]) %}}{{% for i in range(99999) %}}{{% set ns.x = {step} %}}{{% endfor %}}"
        ))
        .unwrap_err();
        assert!(error.to_string().contains("levels deep"), "{step}: {error}");
    }
    let printed = render(&nest(6, "{{ ns.x }}")).unwrap();
    assert_eq!(printed.matches('[').count(), 241);
    // A namespace that holds itself ends with the render.
    assert_eq!(
        render("{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns.x | length }}").unwrap(),
        "1"
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
        messages: (0..3_001).map(message).map(Json::from).collect(),
        add_generation_prompt: true,
        ..ChatRequest::default()
    };
    let text = timed("render", || tokenizer.render_chat(&chat).unwrap());
    assert!(text.len() > 8 << 20);
}
