//! Chat templates against Python's `jinja2`, message shapes, and templates that refuse.

use std::sync::Arc;

use baton_proto::error::ErrorKind;
use baton_tokenizer::{ChatRequest, EncodeOptions, Error, Json, Tokenizer};
use serde_json::{Value, json};

use crate::specs::{self, build, with_template};

fn golden() -> Value {
    serde_json::from_str(include_str!("../golden/templates.json")).unwrap()
}

fn list(value: &Value) -> Vec<Json> {
    let items = value.as_array().unwrap().iter().cloned();
    items.map(Json::from).collect()
}

fn chat(messages: Value) -> ChatRequest {
    ChatRequest {
        messages: list(&messages),
        ..ChatRequest::default()
    }
}

/// The reference was given `<s>` and `</s>`, as this vocabulary spells them.
fn with(template: &str) -> Arc<Tokenizer> {
    build(&with_template(specs::pieces(), "default", template))
}

fn template(name: &str) -> String {
    golden()["templates"][name].as_str().unwrap().to_owned()
}

fn user() -> ChatRequest {
    chat(json!([{"role": "user", "content": "Hello there"}]))
}

#[test]
fn rendered_text_equals_the_reference_byte_by_byte() {
    let golden = golden();
    let mut checked = 0;
    let mut left_out = Vec::new();
    for case in golden["cases"].as_array().unwrap() {
        let name = case["template"].as_str().unwrap();
        let conversation = case["conversation"].as_str().unwrap();
        let tokenizer = with(golden["templates"][name].as_str().unwrap());
        let chat = ChatRequest {
            messages: list(&golden["conversations"][conversation]),
            tools: match case["tools"].as_bool() {
                Some(true) => list(&golden["tools"]),
                _ => Vec::new(),
            },
            add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap(),
            now: golden["now"].as_i64().unwrap(),
            ..ChatRequest::default()
        };
        let rendered = tokenizer.render_chat(&chat);
        let what = format!("{name} / {conversation} / {}", chat.add_generation_prompt);
        if let Some(message) = case["raises"].as_str().filter(|_| conversation != "foo") {
            let message = message.to_owned();
            assert_eq!(rendered, Err(Error::TemplateRaised { message }), "{what}");
        } else if conversation == "foo" {
            // A role that no client may send.
            assert_eq!(rendered.unwrap_err().field(), "messages[0].role", "{what}");
        } else if let Err(Error::InvalidChat { path, .. }) = &rendered {
            // The reference drops a part of the conversation here; we refuse to.
            left_out.push(format!("{name} / {conversation} / {path}"));
        } else {
            assert_eq!(
                rendered.as_deref(),
                Ok(case["text"].as_str().unwrap()),
                "{what}"
            );
            checked += 1;
        }
    }
    left_out.dedup();
    let expected = [
        "chatml / tool / messages[1].tool_calls[0]",
        "chatml_blocks / tool / messages[1].tool_calls[0]",
        "dict_macro / tool / messages[1].tool_calls[0]",
        "generation / tool / messages[1].tool_calls[0]",
        "inst_sys / tool / messages[1].tool_calls[0]",
        "inst_sys / developer / messages[0].content",
        "loop_controls / tool / messages[1].tool_calls[0]",
        "qwen_tools / developer / messages[0].content",
        "strftime / tool / messages[1].tool_calls[0]",
        "values / tool / messages[1].tool_calls[0]",
    ];
    left_out.sort();
    let mut expected = expected.map(str::to_owned);
    expected.sort();
    assert_eq!(left_out, expected);
    assert!(checked > 200, "{checked}");
}

#[test]
fn a_rendered_bos_is_encoded_once() {
    let tokenizer = with(&template("inst"));
    let text = tokenizer.render_chat(&user()).unwrap();
    assert!(text.starts_with("<s>[INST]"));
    let ids = tokenizer.encode_chat(&text, usize::MAX).unwrap();
    assert_eq!(ids[0], 1);
    assert_eq!(ids.iter().filter(|&&id| id == 1).count(), 1);
}

#[test]
fn legal_message_shapes_render_as_the_plain_string() {
    let tokenizer = with(&template("qwen_tools"));
    let golden = golden();
    let arguments = r#"{"place": "<Zürich & Köln>", "days": 2, "exact": true, "unit": null}"#;
    let call = json!([{"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}]);
    let render = |assistant: Value, tool: Value| {
        let mut assistant = assistant;
        assistant["role"] = json!("assistant");
        assistant["tool_calls"] = call.clone();
        tokenizer.render_chat(&ChatRequest {
            messages: list(&json!([
                {"role": "user", "content": "Weather?"},
                assistant,
                {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": tool},
            ])),
            tools: list(&golden["tools"]),
            ..ChatRequest::default()
        })
    };
    let sky = json!("{\"sky\": \"grey\"}");
    let expect = render(json!({"content": ""}), sky.clone()).unwrap();
    assert!(expect.contains(r#"{"name": "get_weather", "arguments": {"place": "<Zürich & Köln>", "days": 2, "exact": true, "unit": null}}"#));
    assert_eq!(
        render(json!({"content": null}), sky.clone()).as_ref(),
        Ok(&expect)
    );
    assert_eq!(render(json!({}), sky.clone()).as_ref(), Ok(&expect));
    assert_eq!(
        render(json!({"content": []}), sky.clone()).as_ref(),
        Ok(&expect)
    );
    let parts = json!([{"type": "text", "text": sky}]);
    assert_eq!(
        render(json!({"content": null}), parts).as_ref(),
        Ok(&expect)
    );

    let said = |content: Value| {
        let messages = json!([
            {"role": "user", "content": content},
            {"role": "assistant", "content": content, "tool_calls": null},
            {"role": "user", "content": "go on"},
        ]);
        tokenizer.render_chat(&chat(messages)).unwrap()
    };
    let parts = json!([{"type": "text", "text": "a1"}, {"type": "text", "text": "b2"}]);
    assert_eq!(said(parts), said(json!("a1\nb2")));
}

#[test]
fn illegal_message_shapes_name_their_path() {
    let tokenizer = with(&template("qwen_tools"));
    let refused = |messages: Value| {
        let error = tokenizer.render_chat(&chat(messages)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        error.field().to_owned()
    };
    let image = json!({"type": "image_url", "image_url": {"url": "data:"}});
    let text = json!({"type": "text", "text": "a"});
    assert_eq!(
        refused(json!([{"role": "user", "content": [text, image]}])),
        "messages[0].content[1].type"
    );
    assert_eq!(
        refused(
            json!([{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "novel"}]}])
        ),
        "messages[1].content[0].type"
    );
    assert_eq!(
        refused(json!([{"role": "user", "content": [{"text": "a"}]}])),
        "messages[0].content[0].type"
    );
    assert_eq!(
        refused(json!([{"role": "user", "content": [{"type": "text"}]}])),
        "messages[0].content[0].text"
    );
    assert_eq!(
        refused(json!([{"role": "user", "content": 5}])),
        "messages[0].content"
    );
    assert_eq!(refused(json!([{"role": "user"}])), "messages[0].content");
    assert_eq!(refused(json!([{"content": "a"}])), "messages[0].role");
    assert_eq!(refused(json!(["a"])), "messages[0]");
    assert_eq!(refused(json!([])), "messages");
    assert_eq!(
        refused(json!([{"role": "assistant", "function_call": {"name": "f"}}])),
        "messages[0].function_call"
    );
    let call = |arguments: Value| json!([{"role": "user", "content": "u"}, {"role": "assistant", "tool_calls": [{"function": {"name": "f1", "arguments": arguments}}]}]);
    for arguments in [json!([1]), json!(7)] {
        assert_eq!(
            refused(call(arguments)),
            "messages[1].tool_calls[0].function.arguments"
        );
    }
    for arguments in [json!(""), json!("{broken"), json!("[1]")] {
        assert!(tokenizer.render_chat(&chat(call(arguments))).is_ok());
    }
}

#[test]
fn a_template_that_leaves_something_out_is_refused() {
    let plain = with(&template("chatml"));
    let request = ChatRequest {
        tools: list(&golden()["tools"]),
        ..user()
    };
    assert_eq!(plain.render_chat(&request).unwrap_err().field(), "tools[0]");
    assert!(plain.render_chat(&user()).is_ok());
    // Earlier thoughts are dropped by design and are not missed.
    let thinking = with(&template("qwen_tools"));
    let messages = golden()["conversations"]["think"].clone();
    assert!(thinking.render_chat(&chat(messages)).is_ok());
}

#[test]
fn models_without_a_usable_template_still_serve_completions() {
    let none = build(&specs::pieces());
    assert!(!none.has_chat_template());
    assert_eq!(none.render_chat(&user()), Err(Error::NoChatTemplate));

    let broken = with("line\n{% if %}");
    assert!(broken.has_chat_template());
    let error = broken.chat_template_error().unwrap().clone();
    assert!(
        matches!(&error, Error::TemplateSyntax { name, message } if name == "default" && message.contains("line 2"))
    );
    assert_eq!(broken.render_chat(&user()), Err(error));

    let raising = with(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{{ m.content }}{% endfor %}",
    );
    let system =
        chat(json!([{"role": "system", "content": "s1"}, {"role": "user", "content": "u1"}]));
    let error = raising.render_chat(&system).unwrap_err();
    assert_eq!(error.to_string(), "System role not supported");
    assert_eq!(
        (error.kind(), error.field()),
        (ErrorKind::Invalid, "messages")
    );
    assert!(raising.render_chat(&user()).is_ok());

    for tokenizer in [none, broken, raising] {
        let ids = tokenizer.encode("a", EncodeOptions::PROMPT).unwrap();
        assert_eq!(ids, [1, specs::piece("▁a")]);
    }
}

#[test]
fn named_templates_are_chosen_never_guessed() {
    let mut spec = with_template(specs::pieces(), "rag", "R {{ messages[0].content }}");
    let request = |template: Option<&str>| ChatRequest {
        template: template.map(str::to_owned),
        ..user()
    };
    let tokenizer = build(&spec);
    let Err(Error::UnknownTemplate { name, available }) = tokenizer.render_chat(&request(None))
    else {
        panic!("a template was guessed");
    };
    assert_eq!((name.as_str(), available.as_str()), ("default", "rag"));
    assert!(
        tokenizer
            .render_chat(&request(Some("rag")))
            .unwrap()
            .starts_with('R')
    );

    spec = with_template(spec, "default", "D {{ messages[0].content }}");
    spec = with_template(
        spec,
        "tool_use",
        "T {{ messages[0].content }} {{ tools | tojson }}",
    );
    let tokenizer = build(&spec);
    assert!(tokenizer.render_chat(&user()).unwrap().starts_with('D'));
    let mut with_tools = user();
    with_tools.tools = list(&golden()["tools"]);
    assert!(tokenizer.render_chat(&with_tools).unwrap().starts_with('T'));
}

#[test]
fn the_last_message_can_be_left_open() {
    let messages = json!([{"role": "user", "content": "Count"}, {"role": "assistant", "content": "one, two, "}]);
    let mut request = chat(messages);
    request.continue_final_message = true;
    let text = with(&template("chatml")).render_chat(&request).unwrap();
    assert_eq!(
        text,
        "<|im_start|>user\nCount<|im_end|>\n<|im_start|>assistant\none, two, "
    );
    // The template trims, so the trimmed text is what is continued.
    let text = with(&template("gemma")).render_chat(&request).unwrap();
    assert!(text.ends_with("<start_of_turn>model\none, two,"));
    request.add_generation_prompt = true;
    let error = with(&template("chatml")).render_chat(&request).unwrap_err();
    assert_eq!(error.field(), "continue_final_message");
}

#[test]
fn more_variables_reach_the_template_but_replace_nothing() {
    let tokenizer = with(&template("qwen_tools"));
    let mut request = user();
    request.add_generation_prompt = true;
    request
        .extra
        .insert("enable_thinking".into(), Json::Bool(false));
    let text = tokenizer.render_chat(&request).unwrap();
    assert!(text.ends_with("<|im_start|>assistant\n<think>\n\n</think>\n\n"));
    request.extra.insert("messages".into(), Json::Null);
    let error = tokenizer.render_chat(&request).unwrap_err();
    assert_eq!(error.field(), "chat_template_kwargs.messages");
}
