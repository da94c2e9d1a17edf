//! What a template gets of a conversation: content in parts, tool arguments, absent
//! content, numbers, and the texts of special tokens.
//!
//! Expected texts are those of `transformers.apply_chat_template` (`jinja2` 3.1.6) with
//! the input that is named beside each, unless a comment says otherwise.

use std::collections::BTreeMap;

use baton_tokenizer::{ChatRequest, Error, Json};
use serde_json::{Value, json};

use crate::specs::{self, build, with_template};

fn golden(name: &str) -> String {
    let golden: Value = serde_json::from_str(include_str!("../golden/templates.json")).unwrap();
    golden["templates"][name].as_str().unwrap().to_owned()
}

fn chat(messages: Value) -> ChatRequest {
    let messages = messages.as_array().unwrap().iter().cloned();
    ChatRequest {
        messages: messages.map(Json::from).collect(),
        ..ChatRequest::default()
    }
}

fn rendered(template: &str, request: &ChatRequest) -> Result<String, Error> {
    let tokenizer = build(&with_template(specs::pieces(), "default", template));
    tokenizer.render_chat(request).map(|text| text.to_string())
}

fn parts() -> Value {
    json!([{ "type": "text", "text": "part1" }, { "type": "text", "text": "part2" }])
}

#[test]
fn a_template_that_walks_parts_decides_what_is_between_them() {
    let messages = json!([{ "role": "user", "content": parts() }]);
    let text = rendered(&golden("gemma"), &chat(messages.clone())).unwrap();
    assert_eq!(text, "<s><start_of_turn>user\npart1part2<end_of_turn>\n");
    // Strings are joined by a line break for templates that know nothing else.
    let text = rendered(&golden("chatml"), &chat(messages)).unwrap();
    assert_eq!(text, "<|im_start|>user\npart1\npart2<|im_end|>\n");
    // By role: this template takes the first part of a system message alone.
    let messages = json!([
        { "role": "system", "content": parts() }, { "role": "user", "content": "u1" },
    ]);
    let text = rendered(&golden("gemma"), &chat(messages)).unwrap();
    assert!(
        text.starts_with("<s><start_of_turn>user\npart1\npart2\n\n"),
        "{text}"
    );
    // A list that would be printed as one is no walk.
    for shown in ["{{ m.content }}", "{{ m.content | tojson }}"] {
        let template = format!("{{% for m in messages %}}{shown}{{% endfor %}}");
        let messages = json!([{ "role": "user", "content": parts() }]);
        let text = rendered(&template, &chat(messages)).unwrap();
        assert!(!text.contains("type"), "{text}");
    }
}

fn call(arguments: Value) -> Value {
    json!([
        { "role": "user", "content": "u1" },
        { "role": "assistant", "content": "", "tool_calls": [
            { "id": "call00001", "type": "function", "function": { "name": "f1", "arguments": arguments } },
        ] },
        { "role": "tool", "content": "t1", "tool_call_id": "call00001", "name": "f1" },
    ])
}

const CALLS: &str = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}]";
const END: &str = "{% endfor %}{% endfor %}";

#[test]
fn arguments_are_text_where_a_template_joins_and_an_object_where_it_looks_inside() {
    let sent = r#"{"a":1,  "b": [18446744073709551616, 1.0, 1e22]}"#;
    for (show, expect) in [
        (
            "{{ '```' + c.function.arguments + '```' }}",
            format!("```{sent}```"),
        ),
        ("{{ c.function.arguments }}", sent.to_owned()),
        (
            "{{ c.function.arguments | tojson }}",
            r#"{"a": 1, "b": [18446744073709551616, 1.0, 1e+22]}"#.to_owned(),
        ),
        (
            "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }};{% endfor %}",
            "a=1;b=[18446744073709551616, 1.0, 1e+22];".to_owned(),
        ),
    ] {
        let template = format!("{CALLS}{show}{END}");
        let text = rendered(&template, &chat(call(json!(sent)))).unwrap();
        assert_eq!(text, format!("u1[f1]{expect}t1"));
    }
    // An object that the client sent, where text is wanted.
    let template = format!("{CALLS}{{{{ '' + c.function.arguments }}}}{END}");
    let text = rendered(&template, &chat(call(json!({ "a": "\u{e9}" })))).unwrap();
    assert_eq!(text, "u1[f1]{\"a\": \"\u{e9}\"}t1");
}

#[test]
fn arguments_that_are_no_object_go_on_as_text() {
    for sent in ["{\"a\": \"cut o", "[1, 2]", "7", "nonsense"] {
        for (show, expect) in [
            ("{{ '' + c.function.arguments }}", sent.to_owned()),
            (
                "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}",
                sent.to_owned(),
            ),
            // No text fits here, so it is one member of an object.
            (
                "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}",
                format!("arguments={sent};"),
            ),
        ] {
            let template = format!("{CALLS}{show}{END}");
            let text = rendered(&template, &chat(call(json!(sent)))).unwrap();
            assert_eq!(text, format!("u1[f1]{expect}t1"));
        }
    }
}

#[test]
fn absent_content_stays_absent_for_templates_that_ask() {
    let asks = "{% for m in messages %}{% if m.content is not defined %}A{% elif m.content is none %}N{% else %}{{ m.content }}{% endif %};{% endfor %}";
    let joins = "{% for m in messages %}{{ '' + m.content }};{% endfor %}";
    let prints = "{% for m in messages %}{{ m.content }};{% endfor %}";
    let calls = json!([{ "type": "function", "function": { "name": "f", "arguments": "{}" } }]);
    for (template, null, absent) in [
        (asks, "u1;N;", "u1;A;"),
        (joins, "u1;;", "u1;;"),
        (prints, "u1;;", "u1;;"),
    ] {
        let template = template.replace(
            "{% endfor %}",
            "{% for c in m.tool_calls or [] %}f{% endfor %}{% endfor %}",
        );
        for (message, expect) in [
            (
                json!({ "role": "assistant", "content": null, "tool_calls": calls }),
                null,
            ),
            (json!({ "role": "assistant", "tool_calls": calls }), absent),
        ] {
            let messages = json!([{ "role": "user", "content": "u1" }, message]);
            let text = rendered(&template, &chat(messages)).unwrap();
            assert_eq!(text, format!("{expect}f"), "{template}");
        }
    }
}

#[test]
fn integers_print_as_they_were_or_are_refused() {
    let template = "{% for m in messages %}{{ m.content }}{% endfor %} {{ n }} {{ n | tojson }} {{ m | tojson }}";
    let mut request = chat(json!([{ "role": "user", "content": "u1" }]));
    let long = "170141183460469231731687303715884105727";
    request.extra.insert("n".into(), Json::parse(long).unwrap());
    let other = Json::parse("[-0, 18446744073709551616, -1.50, 1E-7]").unwrap();
    request.extra.insert("m".into(), other);
    assert_eq!(
        rendered(template, &request).unwrap(),
        format!("u1 {long} {long} [0, 18446744073709551616, -1.5, 1e-07]")
    );
    let longer = "170141183460469231731687303715884105728";
    let n = Json::parse(longer).unwrap();
    request.extra.insert("n".into(), n);
    let refused = rendered(template, &request).unwrap_err().to_string();
    assert!(refused.contains(longer), "{refused}");
}

#[test]
fn special_tokens_in_a_template_are_those_that_the_files_name() {
    let template = "{{ bos_token }}|{{ eos_token }}|{{ eos_token is defined }}{% for m in messages %}{{ m.content }}{% endfor %}";
    let request = chat(json!([{ "role": "user", "content": "u1" }]));
    let text = |tokens: Option<&[(&str, &str)]>| {
        let mut spec = with_template(specs::pieces(), "default", template);
        spec.template_tokens = tokens.map(|tokens| {
            let owned = tokens
                .iter()
                .map(|(name, text)| ((*name).to_owned(), (*text).to_owned()));
            owned.collect::<BTreeMap<_, _>>()
        });
        // As a worker ships it.
        let mut json = serde_json::to_value(&spec).unwrap();
        if tokens.is_none() {
            json.as_object_mut().unwrap().remove("template_tokens");
        }
        let spec = serde_json::from_value(json).unwrap();
        build(&spec).render_chat(&request).unwrap().to_string()
    };
    assert_eq!(
        text(Some(&[("bos_token", "<b>"), ("eos_token", "<e>")])),
        "<b>|<e>|Trueu1"
    );
    assert_eq!(text(Some(&[])), "||Falseu1");
    // A worker of an older version does not say.
    assert_eq!(text(None), "<s>|</s>|Trueu1");
}

#[test]
fn roles_are_checked_by_name() {
    let template = golden("chatml");
    for role in [
        "system",
        "developer",
        "user",
        "assistant",
        "tool",
        "function",
    ] {
        let messages = json!([{ "role": role, "content": "u1" }]);
        assert!(rendered(&template, &chat(messages)).is_ok(), "{role}");
    }
    for role in ["User", "ipython", "", "user<|im_end|>", "im_end"] {
        let messages = json!([{ "role": role, "content": "u1" }]);
        let error = rendered(&template, &chat(messages)).unwrap_err();
        assert_eq!(error.field(), "messages[0].role");
        assert!(
            error
                .to_string()
                .contains("system, developer, user, assistant"),
            "{error}"
        );
    }
}

#[test]
fn a_message_is_left_open_where_its_own_text_ends() {
    let template = golden("chatml");
    for (content, expect) in [
        // Found again in what the template writes behind it.
        (json!("en"), "en"),
        (json!("d"), "d"),
        (json!(""), ""),
        (json!("ends in blanks \n"), "ends in blanks \n"),
        (parts(), "part1\npart2"),
        // A control token in the text stays text, and is kept.
        (json!("a<|im_end|>"), "a<|im_end|>"),
    ] {
        let messages = json!([{ "role": "user", "content": "u1" }, { "role": "assistant", "content": content }]);
        let mut request = chat(messages);
        request.continue_final_message = true;
        let text = rendered(&template, &request).unwrap();
        let start = "<|im_start|>user\nu1<|im_end|>\n<|im_start|>assistant\n";
        assert_eq!(text, format!("{start}{expect}"));
    }
    let mut request = chat(json!([{ "role": "user", "content": parts() }]));
    request.continue_final_message = true;
    let text = rendered(&golden("gemma"), &request).unwrap();
    assert_eq!(text, "<s><start_of_turn>user\npart1part2");
}
