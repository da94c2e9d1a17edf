//! A model's chat templates: Jinja as Hugging Face renders it, within bounds.
//!
//! Templates come from model files, so a render has a budget of work (fuel), of nesting
//! and of output.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use baton_proto::tokenizer_spec::ChatTemplate;

use crate::chat::{self, ChatRequest};
use crate::control_tokens::ControlTokens;
use crate::error::Error;
use crate::jinja::{self, Kind, Limits, Rendered, Template, Value};
use crate::json::{Json, JsonObject};
use crate::rendered::{Marked, RenderedChat};
use crate::template_format::{Answers, Format};
use crate::template_values::{list, value};
use crate::tokenizer::TEXT_BYTES_MAX;

/// Instructions, plus one per 64 bytes touched. Three thousand messages of eight
/// megabytes under a long template fit; a hostile template ends in about a second.
const FUEL: u64 = 2_000_000;
/// Real templates are up to some tens of kilobytes.
const SOURCE_BYTES_MAX: usize = 1 << 20;
/// The interpreter nests at most 2,000 levels, each of some kilobytes of stack in a build
/// that is not optimised. Pages that are not touched cost nothing.
const STACK_BYTES: usize = 256 << 20;
/// Variables that a request cannot replace.
const RESERVED: [&str; 14] = [
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
    "raise_exception",
    "strftime_now",
];

/// The templates of one model.
pub(crate) struct Templates {
    entries: Vec<Entry>,
    /// `bos_token` and the like; a model without one leaves it undefined.
    token_texts: Vec<(String, String)>,
    control: ControlTokens,
}

struct Entry {
    name: String,
    /// Or why it does not parse.
    template: Result<Template, Error>,
    answers: Answers,
}

/// What a template is rendered with.
struct Variables<'a> {
    messages: &'a [Json],
    tools: &'a [Json],
    documents: &'a [Json],
    add_generation_prompt: bool,
    now: i64,
    extra: &'a JsonObject,
}

impl Templates {
    pub(crate) fn new(
        templates: &[ChatTemplate],
        token_texts: Vec<(String, String)>,
        control: ControlTokens,
    ) -> Self {
        let entry = |template: &ChatTemplate| Entry {
            name: template.name.clone(),
            template: parse(template),
            answers: Answers::default(),
        };
        Self {
            entries: templates.iter().map(entry).collect(),
            token_texts,
            control,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(crate) fn first_error(&self) -> Option<&Error> {
        self.entries
            .iter()
            .find_map(|entry| entry.template.as_ref().err())
    }

    pub(crate) fn render(&self, chat: &ChatRequest) -> Result<RenderedChat, Error> {
        let (template, answers) = self.choose(chat)?;
        let messages = chat.checked()?;
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
        let try_messages = |messages: Vec<Json>| {
            let variables = Variables {
                messages: &messages,
                tools: &[],
                documents: &[],
                add_generation_prompt: false,
                now: chat.now,
                extra: &JsonObject::new(),
            };
            Ok(self.run(template, &variables)?.text)
        };
        let format = Format {
            answers,
            render: &try_messages,
        };
        let shape = |only_objects: bool| -> Vec<Json> {
            let messages = messages.iter();
            messages
                .map(|message| message.shaped(&format, only_objects))
                .collect()
        };
        let rendered = self.render_shaped(template, chat, shape(false));
        match rendered {
            // Arguments that are no object, and a template that knows objects only.
            Err(Error::TemplateFailed { .. })
                if messages.iter().any(chat::Message::has_text_arguments) =>
            {
                self.render_shaped(template, chat, shape(true))
            }
            rendered => rendered,
        }
    }

    fn render_shaped(
        &self,
        template: &Template,
        chat: &ChatRequest,
        mut messages: Vec<Json>,
    ) -> Result<RenderedChat, Error> {
        let expected = chat::expected(&messages, &chat.tools);
        let run = |messages: &[Json]| {
            let variables = Variables {
                messages,
                tools: &chat.tools,
                documents: &chat.documents,
                add_generation_prompt: chat.add_generation_prompt,
                now: chat.now,
                extra: &chat.extra,
            };
            self.run(template, &variables)
        };
        let Rendered {
            mut text,
            mut given,
        } = run(&messages)?;
        chat::check_complete(&expected, &text)?;
        if chat.continue_final_message {
            let end = self.unused(&text)?;
            leave_open(&mut messages, end)?;
            Rendered { text, given } = run(&messages)?;
            cut_at(&mut text, end)?;
        }
        if chat.allow_special_tokens {
            return Ok(RenderedChat::new(text, None));
        }
        let marks = self.control.marks(&text, &given).map_err(|token| {
            let reason = format!("contains `{token}`, a control token; see `allow_special_tokens`");
            chat::invalid("messages", &reason)
        })?;
        let marked = match marks.is_empty() {
            true => None,
            false => Some(Marked::new(&text, &marks, self.unused(&text)?)),
        };
        Ok(RenderedChat::new(text, marked))
    }

    /// A character that is neither in `text` nor in a control token.
    fn unused(&self, text: &str) -> Result<char, Error> {
        CANDIDATES
            .into_iter()
            .find(|c| !text.contains(*c) && !self.control.uses(*c))
            .ok_or_else(|| {
                let reason = "have every Byzantine musical symbol, one must be left for the server";
                chat::invalid("messages", reason)
            })
    }

    fn run(&self, template: &Template, variables: &Variables<'_>) -> Result<Rendered, Error> {
        on_own_stack(|| {
            let limits = Limits {
                fuel: FUEL,
                output_bytes_max: TEXT_BYTES_MAX,
                now: variables.now,
            };
            let variables = self.context(variables).map_err(failed)?;
            template.render(variables, &limits).map_err(failed)
        })
    }

    /// Never falls back to a template that the model does not have.
    fn choose(&self, chat: &ChatRequest) -> Result<(&Template, &Answers), Error> {
        if self.entries.is_empty() {
            return Err(Error::NoChatTemplate);
        }
        let find = |name: &str| self.entries.iter().find(|entry| entry.name == name);
        let entry = match &chat.template {
            Some(name) => find(name),
            None if !chat.tools.is_empty() => find("tool_use").or_else(|| find("default")),
            None => find("default"),
        };
        match entry {
            Some(entry) => match &entry.template {
                Ok(template) => Ok((template, &entry.answers)),
                Err(error) => Err(error.clone()),
            },
            None => Err(Error::UnknownTemplate {
                name: chat.template.clone().unwrap_or("default".to_owned()),
                available: self
                    .entries
                    .iter()
                    .map(|entry| entry.name.as_str())
                    .collect::<Vec<_>>()
                    .join(", "),
            }),
        }
    }

    fn context(&self, variables: &Variables<'_>) -> Result<BTreeMap<String, Value>, jinja::Error> {
        let or_none = |items: &[Json]| match items {
            [] => Ok(Value::None),
            items => list(items),
        };
        let mut all = BTreeMap::from([
            ("messages".to_owned(), list(variables.messages)?),
            ("tools".to_owned(), or_none(variables.tools)?),
            ("documents".to_owned(), or_none(variables.documents)?),
            (
                "add_generation_prompt".to_owned(),
                Value::Bool(variables.add_generation_prompt),
            ),
        ]);
        for (name, text) in &self.token_texts {
            all.insert(name.clone(), Value::str(text.as_str()));
        }
        for (name, json) in variables.extra {
            all.insert(name.clone(), value(json)?);
        }
        Ok(all)
    }
}

/// Characters that mark: symbols of old music. No normalizer changes, splits at or strips
/// them, and letters beside them are still beside no letter.
const CANDIDATES: RangeInclusive<char> = '\u{1d000}'..='\u{1d0f5}';

/// Parses or renders on a thread of its own, whose stack holds the nesting that is allowed.
fn on_own_stack<T: Send>(run: impl FnOnce() -> Result<T, Error> + Send) -> Result<T, Error> {
    let failed = |message: &str| Error::TemplateFailed {
        message: message.to_owned(),
    };
    std::thread::scope(|scope| {
        std::thread::Builder::new()
            .name("chat-template".to_owned())
            .stack_size(STACK_BYTES)
            .spawn_scoped(scope, run)
            .map_err(|error| failed(&format!("start thread: {error}")))?
            .join()
            .unwrap_or_else(|_| Err(failed("the template engine panicked")))
    })
}

fn parse(template: &ChatTemplate) -> Result<Template, Error> {
    let name = template.name.clone();
    if template.source.len() > SOURCE_BYTES_MAX {
        return Err(Error::TemplateSyntax {
            name,
            message: format!("longer than {SOURCE_BYTES_MAX} bytes"),
        });
    }
    on_own_stack(|| {
        Template::parse(&template.source).map_err(|error| Error::TemplateSyntax {
            name,
            message: format!("{} (line {})", error.message, error.line),
        })
    })
}

/// Puts a tag behind the last message's text, as `transformers` does, to find where that
/// text ends in the prompt. The blank behind it tells whether the template trims.
fn leave_open(messages: &mut [Json], tag: char) -> Result<(), Error> {
    let content = match messages.last_mut() {
        Some(Json::Object(message)) => message.get_mut("content"),
        _ => None,
    };
    let text = match content {
        Some(Json::String(text)) => Some(text),
        Some(Json::Array(parts)) => match parts.last_mut() {
            Some(Json::Object(part)) => match part.get_mut("text") {
                Some(Json::String(text)) => Some(text),
                _ => None,
            },
            _ => None,
        },
        _ => None,
    };
    let Some(text) = text else {
        let reason = "the last message has no text to go on with";
        return Err(chat::invalid("continue_final_message", reason));
    };
    text.push(tag);
    text.push(' ');
    Ok(())
}

/// Ends the prompt where the last message's text ends.
fn cut_at(text: &mut String, tag: char) -> Result<(), Error> {
    let Some(at) = text.rfind(tag) else {
        return Err(chat::invalid(
            "continue_final_message",
            "the last message's text is not in the rendered prompt",
        ));
    };
    let trims = text[at..].chars().nth(1) != Some(' ');
    text.truncate(at);
    if trims {
        text.truncate(text.trim_end().len());
    }
    Ok(())
}

fn failed(error: jinja::Error) -> Error {
    match error.kind {
        Kind::Raised => Error::TemplateRaised {
            message: error.message,
        },
        Kind::TooLong => Error::RenderTooLong {
            max: TEXT_BYTES_MAX,
        },
        Kind::Failed | Kind::Unsupported | Kind::Limit => Error::TemplateFailed {
            message: error.to_string(),
        },
    }
}
