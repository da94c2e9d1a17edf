//! A model's chat templates: Jinja as Hugging Face renders it, within bounds.
//!
//! The environment copies `transformers`: blocks are trimmed, Python's string and dict
//! methods exist, `tojson` writes Python's JSON, `raise_exception` and `strftime_now`
//! are there, `{% generation %}` marks nothing. Templates come from model files, so a
//! render has a budget of work (fuel), of nesting and of output.

use std::collections::BTreeMap;
use std::io;

use baton_proto::tokenizer_spec::ChatTemplate;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, ErrorKind, Value};
use regex::Regex;

use crate::chat::{self, ChatRequest};
use crate::error::Error;
use crate::python_json;
use crate::strftime::strftime;
use crate::tokenizer::TEXT_BYTES_MAX;

/// Instructions, plus one per 64 bytes touched. Three thousand messages of eight
/// megabytes under a long template fit; a hostile template ends in about a second.
const FUEL: u64 = 2_000_000;
/// Real templates are up to some tens of kilobytes.
const SOURCE_BYTES_MAX: usize = 1 << 20;
/// The engine counts 1 to 10 per nested call; recursive macros over tool schemas stay
/// far below, and the stack of a 2 MiB thread holds it.
const RECURSION_MAX: usize = 200;
/// A template can nest a value once per two units of fuel, and dropping such a value
/// takes at most 130 bytes of stack a level in an optimised build, 1 kB in others. This
/// is four times (twice) that; pages that are not touched cost nothing.
const STACK_BYTES: usize = if cfg!(debug_assertions) {
    2 << 30
} else {
    512 << 20
};
/// Variables that a request cannot replace.
const RESERVED: [&str; 11] = [
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "raise_exception",
    "strftime_now",
];

/// The templates of one model.
pub(crate) struct Templates {
    environment: Environment<'static>,
    /// Name and, where it does not parse, why.
    entries: Vec<(String, Result<(), Error>)>,
    /// `bos_token` and the like; a model without one leaves it undefined.
    token_texts: Vec<(&'static str, String)>,
}

/// Marks an error as the template's own words.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

impl Templates {
    pub(crate) fn new(
        templates: &[ChatTemplate],
        token_texts: Vec<(&'static str, String)>,
    ) -> Self {
        let mut environment = environment();
        let mut entries: Vec<(String, Result<(), Error>)> = Vec::new();
        for template in templates {
            let added = check_source(&template.source)
                .and_then(|()| {
                    let source = without_generation(&template.source);
                    environment
                        .add_template_owned(template.name.clone(), source)
                        .map_err(|error| describe(&error))
                })
                .map_err(|message| Error::TemplateSyntax {
                    name: template.name.clone(),
                    message,
                });
            entries.push((template.name.clone(), added));
        }
        Self {
            environment,
            entries,
            token_texts,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(crate) fn first_error(&self) -> Option<&Error> {
        self.entries
            .iter()
            .find_map(|(_, parsed)| parsed.as_ref().err())
    }

    pub(crate) fn render(&self, chat: &ChatRequest) -> Result<String, Error> {
        let name = self.choose(chat)?;
        let messages = chat.normalised()?;
        if chat.continue_final_message && chat.add_generation_prompt {
            return Err(chat::invalid(
                "continue_final_message",
                "excludes `add_generation_prompt`",
            ));
        }
        if let Some(key) = chat.extra.keys().find(|key| RESERVED.contains(&&***key)) {
            return Err(chat::invalid(
                &format!("chat_template_kwargs.{key}"),
                "is set by the server",
            ));
        }
        let mut text = on_own_stack(|| self.run(name, chat, &messages))?;
        chat::check_complete(&chat::expected(&messages, &chat.tools), &text)?;
        if chat.continue_final_message {
            let last = messages
                .last()
                .and_then(|message| message["content"].as_str());
            cut_after(&mut text, last.unwrap_or_default())?;
        }
        Ok(text)
    }

    fn run(
        &self,
        name: &str,
        chat: &ChatRequest,
        messages: &[serde_json::Value],
    ) -> Result<String, Error> {
        let mut output = Bounded(Vec::new());
        let template = self
            .environment
            .get_template(name)
            .map_err(|error| failed(&error))?;
        let rendered = template
            .render_captured_to(self.context(chat, messages), &mut output)
            .map(|_| ())
            .map_err(|error| failed(&error));
        if output.0.len() > TEXT_BYTES_MAX {
            return Err(Error::RenderTooLong {
                max: TEXT_BYTES_MAX,
            });
        }
        rendered?;
        String::from_utf8(output.0).map_err(|_| Error::TemplateFailed {
            message: "the output is no UTF-8".to_owned(),
        })
    }

    /// Never falls back to a template that the model does not have.
    fn choose<'a>(&'a self, chat: &'a ChatRequest) -> Result<&'a str, Error> {
        if self.entries.is_empty() {
            return Err(Error::NoChatTemplate);
        }
        let find = |name: &str| self.entries.iter().find(|(entry, _)| entry == name);
        let entry = match &chat.template {
            Some(name) => find(name),
            None if !chat.tools.is_empty() => find("tool_use").or_else(|| find("default")),
            None => find("default"),
        };
        match entry {
            Some((name, Ok(()))) => Ok(name),
            Some((_, Err(error))) => Err(error.clone()),
            None => Err(Error::UnknownTemplate {
                name: chat.template.clone().unwrap_or("default".to_owned()),
                available: self
                    .entries
                    .iter()
                    .map(|(name, _)| name.as_str())
                    .collect::<Vec<_>>()
                    .join(", "),
            }),
        }
    }

    fn context(&self, chat: &ChatRequest, messages: &[serde_json::Value]) -> Value {
        let or_none = |list: &[serde_json::Value]| {
            if list.is_empty() {
                Value::from(())
            } else {
                Value::from(Serde(list))
            }
        };
        let now = chat.now;
        let strftime_now = move |format: String| {
            strftime(&format, now).map_err(|directive| {
                minijinja::Error::new(
                    ErrorKind::InvalidOperation,
                    format!("strftime_now: unknown directive `%{directive}`"),
                )
            })
        };
        let mut variables = vec![
            ("messages".to_owned(), Value::from(Serde(messages))),
            ("tools".to_owned(), or_none(&chat.tools)),
            ("documents".to_owned(), or_none(&chat.documents)),
            (
                "add_generation_prompt".to_owned(),
                Value::from(chat.add_generation_prompt),
            ),
            (
                "strftime_now".to_owned(),
                Value::from_function(strftime_now),
            ),
        ];
        for (name, text) in &self.token_texts {
            variables.push(((*name).to_owned(), Value::from(text.as_str())));
        }
        for (name, value) in &chat.extra {
            variables.push((name.clone(), Value::from(Serde(value))));
        }
        Value::from(variables.into_iter().collect::<BTreeMap<_, _>>())
    }
}

/// Runs a render on a thread of its own. A template can nest a list in a list once per
/// few instructions, and dropping or comparing such a value recurses: the stack must
/// hold as many levels as the fuel buys. Pages that are not touched cost nothing.
fn on_own_stack(render: impl FnOnce() -> Result<String, Error> + Send) -> Result<String, Error> {
    let failed = |message: &str| Error::TemplateFailed {
        message: message.to_owned(),
    };
    std::thread::scope(|scope| {
        std::thread::Builder::new()
            .name("chat-template".to_owned())
            .stack_size(STACK_BYTES)
            .spawn_scoped(scope, render)
            .map_err(|error| failed(&format!("start thread: {error}")))?
            .join()
            .unwrap_or_else(|_| Err(failed("the template engine panicked")))
    })
}

fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()
        .expect("only the default delimiters are used");
    environment.set_syntax(syntax);
    environment.set_fuel(Some(FUEL));
    environment.set_recursion_limit(RECURSION_MAX);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_filter("tojson", python_json::tojson);
    environment.add_function("raise_exception", raise_exception);
    environment
}

fn raise_exception(message: String) -> Result<Value, minijinja::Error> {
    Err(
        minijinja::Error::new(ErrorKind::InvalidOperation, message.clone())
            .with_source(Raised(message)),
    )
}

/// Refuses sources that are too long.
fn check_source(source: &str) -> Result<(), String> {
    if source.len() > SOURCE_BYTES_MAX {
        return Err(format!("longer than {SOURCE_BYTES_MAX} bytes"));
    }
    Ok(())
}

/// `{% generation %}` marks the assistant's text for training. A block that is always
/// taken trims blanks in the same way.
fn without_generation(source: &str) -> String {
    let tag =
        Regex::new(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})").expect("the pattern is constant");
    tag.replace_all(source, |found: &regex::Captures<'_>| {
        let block = if found.get(2).is_some() {
            "endif"
        } else {
            "if true"
        };
        format!("{}{block}{}", &found[1], &found[3])
    })
    .into_owned()
}

/// The end of `transformers`' `continue_final_message`: the prompt ends where the last
/// message's text ends.
fn cut_after(text: &mut String, last: &str) -> Result<(), Error> {
    let trimmed = last.trim();
    let at = text.rfind(trimmed).filter(|_| !trimmed.is_empty());
    let Some(at) = at else {
        return Err(chat::invalid(
            "continue_final_message",
            "the last message's text is not in the rendered prompt",
        ));
    };
    let untrimmed = last.trim_start();
    let kept = if text[at..].starts_with(untrimmed) {
        untrimmed
    } else {
        trimmed
    };
    text.truncate(at + kept.len());
    Ok(())
}

fn failed(error: &minijinja::Error) -> Error {
    let mut source: Option<&dyn std::error::Error> = Some(error);
    while let Some(current) = source {
        if let Some(Raised(message)) = current.downcast_ref::<Raised>() {
            return Error::TemplateRaised {
                message: message.clone(),
            };
        }
        source = current.source();
    }
    Error::TemplateFailed {
        message: describe(error),
    }
}

/// One line: what and where, without the engine's excerpt of the template.
fn describe(error: &minijinja::Error) -> String {
    let what = match error.detail() {
        Some(detail) => detail.to_owned(),
        None => error.kind().to_string(),
    };
    match error.line() {
        Some(line) => format!("{what} (line {line})"),
        None => what,
    }
}

/// Refuses to grow past the limit by more than one write.
struct Bounded(Vec<u8>);

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.extend_from_slice(bytes);
        if self.0.len() > TEXT_BYTES_MAX {
            return Err(io::Error::other("rendered chat is too long"));
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
