//! Jinja as Jinja2 has it, in the set-up that `transformers` gives it.
//!
//! A chat template is a Python program in disguise: it prints with `str()`, compares with
//! `==`, calls methods of `str` and `dict`, and was only ever run by Jinja2. So this is an
//! interpreter with Python's values. What Jinja2 has is either the same here or refused
//! by name; `docs/chat-templates.md` has the table, which the tests run against Jinja2.
//!
//! ```text
//! source ── lexer ── parser ── tree (shared by all renders)
//!                                │
//!             context ── interpreter ── text, and which bytes of it the request gave
//! ```
//!
//! Templates come from model files and are not trusted: work, nesting, output and the
//! depth of values are bounded, and values hold no cycles.

mod ast;
mod attributes;
mod builtins;
mod calls;
mod characters;
mod compare;
mod error;
mod evaluate;
mod filters;
mod format_spec;
mod generator;
mod interpreter;
mod json;
mod lexer;
mod loops;
mod macros;
mod methods;
mod numbers;
mod operators;
mod parser;
mod printf;
mod repr;
mod str_format;
mod tests;
mod text;
mod value;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

pub(crate) use error::{Error, Kind};
use interpreter::{Interpreter, Scope};
pub(crate) use json::dumps;
pub(crate) use parser::SyntaxError;
pub(crate) use text::Str;
use text::StrBuilder;
pub(crate) use value::{Dict, Value};

/// A template that can be rendered.
pub(crate) struct Template {
    body: ast::Body,
}

/// What one render may cost, and the instant it takes as now.
pub(crate) struct Limits {
    /// One per evaluation, one per 64 bytes of text.
    pub(crate) fuel: u64,
    pub(crate) output_bytes_max: usize,
    /// Unix seconds, for `strftime_now`.
    pub(crate) now: i64,
}

/// A prompt.
pub(crate) struct Rendered {
    pub(crate) text: String,
    /// Byte ranges that came with the request, ascending; the rest is the template's own,
    /// and only there may a control token be spelled.
    pub(crate) given: Vec<Range<usize>>,
}

impl Template {
    pub(crate) fn parse(source: &str) -> Result<Self, SyntaxError> {
        Ok(Self {
            body: parser::parse(source)?,
        })
    }

    /// Renders with these variables.
    pub(crate) fn render(
        &self,
        variables: impl IntoIterator<Item = (String, Value)>,
        limits: &Limits,
    ) -> Result<Rendered, Error> {
        let mut interpreter = Interpreter::new(limits.fuel, limits.output_bytes_max, limits.now);
        let variables: HashMap<Arc<str>, Value> = variables
            .into_iter()
            .map(|(name, value)| (name.into(), value))
            .collect();
        let context = Scope::outermost(variables);
        let scope = Scope::inside(&context);
        let mut out = StrBuilder::default();
        interpreter.run(&self.body, &scope, &mut out)?;
        let (text, given) = out.into_parts();
        Ok(Rendered { text, given })
    }
}

#[cfg(test)]
mod unit {
    use serde_json::json;

    use super::*;

    /// The prompt, with what the request gave in angle quotes.
    fn quoted(source: &str) -> String {
        let messages = json!([
            {"name": "user", "content": " <eot> hi\n", "tags": ["a<eot>", "b"]},
            {"name": "assistant", "content": "x</think>y<eot>"},
        ]);
        let limits = Limits {
            fuel: 100_000,
            output_bytes_max: 10_000,
            now: 0,
        };
        let template = Template::parse(source).unwrap();
        let variables = [(
            "messages".to_owned(),
            crate::template_values::value(&messages.into()).unwrap(),
        )];
        let rendered = template.render(variables, &limits).unwrap();
        let mut out = String::new();
        let mut from = 0;
        for range in rendered.given {
            out += &rendered.text[from..range.start];
            out += &format!("«{}»", &rendered.text[range.clone()]);
            from = range.end;
        }
        out + &rendered.text[from..]
    }

    #[test]
    fn a_prompt_knows_which_of_its_bytes_the_request_gave() {
        for (source, expect) in [
            ("<s>{{ messages[0].name }}<eot>", "<s>«user»<eot>"),
            (
                "{{ '<s>' + messages[0].content|trim + '<eot>' }}",
                "<s>«<eot> hi»<eot>",
            ),
            (
                "{{ messages[1].content.split('</think>')[-1].strip('y') }}",
                "«<eot>»",
            ),
            ("{{ '<%s>%5s' % (messages[0].name, 'x') }}", "<«user»>    x"),
            ("{{ '<{}|{}>'.format(messages[0].name, 1) }}", "<«user»|1>"),
            ("{{ messages[0].tags|join('<eot>') }}", "«a<eot>»<eot>«b»"),
            ("{{ 'a-b'|replace('-', messages[0].name) }}", "a«user»b"),
            (
                "{{ messages[0].content|replace('<eot>', '-') }}",
                "« »-« hi\n»",
            ),
            ("{{ messages[0].tags|tojson }}", "[\"«a<eot>»\", \"«b»\"]"),
            ("{{ messages[0].tags }}", "['«a<eot>»', '«b»']"),
            ("{{ messages[0].name|upper ~ '<eot>' }}", "«USER»<eot>"),
            (
                "{% for c in messages[0].name %}{{ c }}-{% endfor %}",
                "«u»-«s»-«e»-«r»-",
            ),
            (
                "{% set x %}<s>{{ messages[0].name }}{% endset %}{{ x[2:5] }}",
                ">«us»",
            ),
            (
                "{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(messages[0].name) }}",
                "<«user»>",
            ),
            (
                "{{ messages[0].content|indent(2, true) }}",
                "  « <eot> hi\n»",
            ),
            ("{{ messages[0].name[::-1]|center(8) }}", "  «resu»  "),
            (
                "{% for k, v in messages[1].items() %}{{ k }}{% endfor %}",
                "«namecontent»",
            ),
            ("{{ messages|map(attribute='name')|list|first }}", "«user»"),
        ] {
            assert_eq!(quoted(source), expect, "{source}");
        }
    }
}
