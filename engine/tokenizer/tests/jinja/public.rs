//! Public chat templates: each rendered over many conversations here and by Jinja2.

use std::collections::BTreeMap;
use std::fmt::Write;

use baton_tokenizer::{ChatRequest, Error, Tokenizer};
use serde_json::{Value, json};

use crate::conversations::{self, Conversation};
use crate::reference::{self, Reference};
use crate::render::specs;

/// 2026-01-02 03:04:05 UTC.
const NOW: i64 = 1_767_323_045;

struct Case<'c> {
    template: &'c str,
    conversation: &'c Conversation,
    opens: bool,
}

impl Case<'_> {
    fn request(&self, source: &str) -> Value {
        let Conversation {
            messages, tools, ..
        } = self.conversation;
        let mut variables = json!({
            "messages": messages,
            "tools": if tools.is_empty() { Value::Null } else { json!(tools) },
            "documents": null,
            "add_generation_prompt": self.opens,
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
        });
        let variables_of = variables.as_object_mut().unwrap();
        variables_of.extend(self.conversation.extra.clone());
        json!({
            "source": source,
            "variables": variables,
            "now": NOW,
            "continues": self.conversation.continues,
        })
    }

    fn render(&self, tokenizer: &Tokenizer) -> Result<String, Error> {
        let rendered = tokenizer.render_chat(&ChatRequest {
            add_generation_prompt: self.opens,
            now: NOW,
            ..self.conversation.request()
        });
        rendered.map(|text| text.to_string())
    }
}

#[test]
fn public_templates_render_as_jinja2_renders_them() {
    let Some(folder) = reference::folder("public templates") else {
        return;
    };
    let mut sources = BTreeMap::new();
    for file in std::fs::read_dir(folder.join("templates")).unwrap() {
        let path = file.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        sources.insert(name, std::fs::read_to_string(&path).unwrap());
    }
    assert!(sources.len() >= 18, "{} templates", sources.len());
    let conversations = conversations::all();
    let mut cases = Vec::new();
    for template in sources.keys() {
        for conversation in &conversations {
            for opens in [false, true] {
                if !(opens && conversation.continues) {
                    cases.push(Case {
                        template,
                        conversation,
                        opens,
                    });
                }
            }
        }
    }
    let requests: Vec<Value> = cases
        .iter()
        .map(|case| case.request(&sources[case.template]))
        .collect();
    let answers = Reference::start(&folder).ask(&requests);
    let mut wrong = String::new();
    let mut equal: BTreeMap<&str, usize> = BTreeMap::new();
    let [mut failed, mut left_out] = [0; 2];
    for (case, answer) in cases.iter().zip(&answers) {
        let source = &sources[case.template];
        let spec = specs::with_template(specs::pieces(), "default", source);
        let ours = case.render(&specs::build(&spec));
        match (&ours, answer["text"].as_str()) {
            (Ok(text), Some(expect)) if text == expect => {
                *equal.entry(case.template).or_default() += 1;
            }
            // The reference drops a part of the conversation here; it is refused.
            (Err(Error::InvalidChat { .. }), _) => left_out += 1,
            (Err(Error::TemplateRaised { .. } | Error::TemplateFailed { .. }), None) => failed += 1,
            _ => {
                let name = case.conversation.name;
                writeln!(
                    wrong,
                    "{} / {name} / {}\n  Jinja2: {answer}\n  here:   {ours:?}",
                    case.template, case.opens
                )
                .unwrap();
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
    let renders: usize = equal.values().sum();
    println!(
        "public templates: {} templates, {renders} renders equal, {failed} failed in both, {left_out} refused for what they leave out",
        equal.len()
    );
    assert!(equal.len() >= 18 && renders > 500, "{equal:?}");
}
