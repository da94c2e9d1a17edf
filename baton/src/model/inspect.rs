//! What is in a model: read through the engine's own loader, so that what is shown
//! is what would run.

use anyhow::Context as _;
use baton_engine::model::{LoadOptions, Model};
use baton_proto::kv_layout::KvDtype;
use serde_json::{Value, json};

use super::locate::Located;

/// The facts about a model, as JSON.
///
/// # Errors
/// A file that cannot be loaded.
pub fn report(located: &Located) -> anyhow::Result<Value> {
    let model = Model::open(&located.path, &LoadOptions::default(), &mut |_, _| {})
        .with_context(|| format!("read `{}`", located.path.display()))?;
    let layout = model.kv_layout(16, KvDtype::F16);
    let spec = model.tokenizer_spec();
    Ok(json!({
        "name": located.name,
        "path": located.path,
        "parameters": model.parameters(),
        "weight_bytes_per_token": model.weight_bytes(),
        "weight_formats": model.formats(),
        "context_max": model.context_max(),
        "vocab_size": model.vocab_size(),
        "tokenizer_size": spec.tokens.len(),
        "eos": model.eos(),
        "chat_templates": spec.chat_templates.iter().map(|template| &template.name).collect::<Vec<_>>(),
        "kv_bytes_per_token_f16": layout.token_bytes(),
        "kv_groups": model.kv_groups(),
        "numerics_id_f16": model.numerics(KvDtype::F16).to_string(),
        "config": model.config(),
    }))
}

/// Prints a report for people: one fact a line, nested ones indented.
pub fn print(report: &Value) {
    print_at(report, 0);
}

fn print_at(value: &Value, depth: usize) {
    let Value::Object(fields) = value else { return };
    for (key, value) in fields {
        let indent = " ".repeat(2 * depth);
        match value {
            Value::Object(_) => {
                println!("{indent}{key}:");
                print_at(value, depth + 1);
            }
            Value::Array(list) if list.len() > 12 => {
                println!("{indent}{key:24} {} entries", list.len())
            }
            Value::String(text) => println!("{indent}{key:24} {text}"),
            other => println!("{indent}{key:24} {other}"),
        }
    }
}
