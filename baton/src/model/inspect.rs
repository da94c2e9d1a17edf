//! What is in a model: read through the engine's own loader, so that what is shown
//! is what would run.

use baton_engine::model::{LoadOptions, WeightFormat};
use baton_proto::kv_layout::KvDtype;
use serde_json::{Value, json};

use super::locate::Located;
use super::open;

/// The facts about a model, as JSON.
///
/// # Errors
/// A file that cannot be loaded.
pub fn report(located: &Located, weights: WeightFormat, quiet: bool) -> anyhow::Result<Value> {
    let options = LoadOptions {
        weights,
        ..LoadOptions::default()
    };
    let model = open::open(located, &options, quiet)?;
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
        "rope": model.config().rope_text(),
        "warnings": model.warnings(),
        "config": model.config(),
    }))
}

/// A report for people: one fact a line, nested ones indented.
pub fn text(report: &Value) -> String {
    let mut text = String::new();
    write_at(report, 0, &mut text);
    text
}

fn write_at(value: &Value, depth: usize, text: &mut String) {
    let Value::Object(fields) = value else { return };
    for (key, value) in fields {
        let indent = " ".repeat(2 * depth);
        match value {
            Value::Object(_) => {
                *text += &format!("{indent}{key}:\n");
                write_at(value, depth + 1, text);
            }
            Value::Array(list) if list.len() > 12 => {
                *text += &format!("{indent}{key:24} {} entries\n", list.len());
            }
            Value::String(word) => *text += &format!("{indent}{key:24} {word}\n"),
            other => *text += &format!("{indent}{key:24} {other}\n"),
        }
    }
}
