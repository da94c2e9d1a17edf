//! The tables as Markdown, as `docs/model-keys.md` shows them.

use super::{ARITHMETIC, Key, Neutral, Treatment, config_json, metadata};

/// `docs/model-keys.md` from the tables that the readers use.
pub fn page() -> String {
    let arithmetic: Vec<String> = ARITHMETIC.iter().map(|part| format!("`{part}`")).collect();
    format!(
        "{HEAD}\n## config.json\n\nNames with one of {} in them that are not listed are refused; \
         other unknown names are ignored with a warning.\nKeys below `rope_scaling` are those of \
         `rope_parameters` too; a key there that its type does not read is refused.\n\n{}\n\
         ## GGUF\n\nNames without `general.` or `tokenizer.` stand below the architecture's name \
         (`llama.block_count`); there every name that is not\nlisted is refused. Unknown \
         `tokenizer.` names are ignored with a warning.\n\n{}",
        arithmetic.join(", "),
        table(config_json::KEYS),
        table(metadata::KEYS),
    )
}

const HEAD: &str = "\
# What a model's description may say

A key of `config.json` or of a GGUF file's metadata that changes what the model computes is **applied** or
**refused** by name; a key that changes nothing is **ignored**. The tables below are the ones the readers use
(`engine/src/model/config/keys/`); a test tries the example of each row, and another compares this page with them.
`baton model inspect MODEL` shows what was applied (`config`, `rope`), names a refused key with its value, and lists
what was ignored with a warning (`warnings`).

**Contradictions are refused**: a key that stands in two places with two values, a scaling without a type, a type
without its factor. A JSON key that stands twice in one object is refused.

**Context.** A model has one table of rotation angles, made when it is loaded. `dynamic` and `longrope` choose by
the length of each sequence in the library they come from; here they choose by the context that the worker is started
for (`--context-max`, else the file's), so that a row's bits depend on its own tokens alone
([ADR 0016](adr/0016-rotations-are-chosen-by-the-context.md)):

| scaling | up to the original context | above it |
|---|---|---|
| `dynamic` | the plain angles, and the default | `--context-max` up to `factor` times the context gives the angles of a sequence of exactly that length |
| `longrope` | `short_factor`, where `--context-max` is no longer than the original | `long_factor` for every sequence, short ones too |
| `yarn` | one set of angles | the same; the context is the longer of the file's and `factor` times the original |

Workers that are loaded for contexts with different angles have different numerics ids and never share KV.

**Special ids** (`bos`, `eos`, `eot`, `eom`, `unknown`, `padding`; in config.json, generation_config.json and GGUF
metadata) that are no token, such as 4294967295, -1 or the vocabulary's size, count as absent, with a warning. The
model is refused where that id is needed: a start id that the file says goes in front of prompts, and end ids
of which none is a token.
";

fn table(keys: &[Key]) -> String {
    let mut text = "| key | example | becomes |\n|---|---|---|\n".to_owned();
    for key in keys {
        let becomes = match &key.treatment {
            Treatment::Applied(meaning) => format!("applied: {meaning}"),
            Treatment::Tokenizer(meaning) => format!("applied to the tokenizer: {meaning}"),
            Treatment::Ignored(why) => format!("ignored: {why}"),
            Treatment::Refused { unless: [], why } => format!("refused: {why}"),
            Treatment::Refused { unless, why } => {
                let neutral: Vec<String> = unless.iter().map(Neutral::text).collect();
                format!("refused unless {}: {why}", neutral.join(" or "))
            }
        };
        let example = key.example.replace('|', "\\|");
        text += &format!("| `{}` | `{example}` | {becomes} |\n", key.name);
    }
    text
}

impl Neutral {
    fn text(&self) -> String {
        match self {
            Self::Number(number) => format!("{number}"),
            Self::Bool(boolean) => format!("{boolean}"),
            Self::Text(text) => format!("`{text}`"),
            Self::Empty => "empty".to_owned(),
            Self::AllOnes => "all 1".to_owned(),
            Self::Ends(end) => format!("`…{end}`"),
            Self::FamilyQkNorm => "as the family has it".to_owned(),
            Self::FamilyActivation => "the family's".to_owned(),
            Self::Reader(what) => format!("equal to {what}"),
        }
    }
}
