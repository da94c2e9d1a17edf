//! Tokens to a tree: what expressions and statements share.
//!
//! *Source*: the grammar of Jinja2 3.1. Nesting, and the length of a chain of operators,
//! is bounded by [`NESTING_MAX`], so that walking and dropping the tree needs a known
//! stack.

mod expressions;
mod statements;

use std::sync::Arc;

use super::ast::Body;
use super::lexer::{self, Located, Token};

/// Real templates nest about twenty levels; a chain of `+` counts one a term.
const NESTING_MAX: u32 = 300;

/// What is wrong and where.
#[derive(Clone, Debug)]
pub(crate) struct SyntaxError {
    pub(crate) message: String,
    pub(crate) line: u32,
}

type Parsed<T> = Result<T, SyntaxError>;

pub(super) fn parse(source: &str) -> Parsed<Body> {
    let tokens = lexer::tokens(source).map_err(|(message, line)| SyntaxError { message, line })?;
    let mut parser = Parser {
        tokens,
        at: 0,
        depth: 0,
        loops: 0,
        names: Vec::new(),
    };
    parser.template()
}

struct Parser {
    tokens: Vec<Located>,
    at: usize,
    depth: u32,
    /// Loops around this place within the innermost macro.
    loops: u32,
    /// Every name that is read, in order; a macro looks for its special names here.
    names: Vec<Arc<str>>,
}

impl Parser {
    fn token(&self) -> &Token {
        &self.tokens[self.at.min(self.tokens.len() - 1)].token
    }

    fn look(&self) -> &Token {
        &self.tokens[(self.at + 1).min(self.tokens.len() - 1)].token
    }

    fn line(&self) -> u32 {
        self.tokens[self.at.min(self.tokens.len() - 1)].line
    }

    fn next(&mut self) {
        self.at += 1;
    }

    fn fail<T>(&self, message: impl Into<String>) -> Parsed<T> {
        Err(SyntaxError {
            message: message.into(),
            line: self.line(),
        })
    }

    fn is_operator(&self, text: &str) -> bool {
        matches!(self.token(), Token::Operator(operator) if *operator == text)
    }

    fn is_name(&self, text: &str) -> bool {
        matches!(self.token(), Token::Name(name) if &**name == text)
    }

    fn skip_operator(&mut self, text: &str) -> bool {
        let found = self.is_operator(text);
        self.at += usize::from(found);
        found
    }

    fn skip_name(&mut self, text: &str) -> bool {
        let found = self.is_name(text);
        self.at += usize::from(found);
        found
    }

    fn expect_operator(&mut self, text: &str) -> Parsed<()> {
        if self.skip_operator(text) {
            return Ok(());
        }
        self.fail(format!("expected `{text}`, got {}", self.describe()))
    }

    fn expect_name(&mut self) -> Parsed<Arc<str>> {
        match self.token().clone() {
            Token::Name(name) => {
                self.next();
                Ok(name)
            }
            _ => self.fail(format!("expected a name, got {}", self.describe())),
        }
    }

    fn describe(&self) -> String {
        match self.token() {
            Token::Text(_) => "text".to_owned(),
            Token::BlockBegin => "`{%`".to_owned(),
            Token::BlockEnd => "`%}`".to_owned(),
            Token::VariableBegin => "`{{`".to_owned(),
            Token::VariableEnd => "`}}`".to_owned(),
            Token::Name(name) => format!("`{name}`"),
            Token::Str(_) => "a string".to_owned(),
            Token::Int(value) => format!("`{value}`"),
            Token::Float(value) => format!("`{value}`"),
            Token::Operator(operator) => format!("`{operator}`"),
            Token::Eof => "the end of the template".to_owned(),
        }
    }

    /// Runs `parse` one level deeper.
    fn nested<T>(&mut self, parse: impl FnOnce(&mut Self) -> Parsed<T>) -> Parsed<T> {
        self.deepen()?;
        let parsed = parse(self)?;
        self.depth -= 1;
        Ok(parsed)
    }

    fn deepen(&mut self) -> Parsed<()> {
        self.depth += 1;
        if self.depth > NESTING_MAX {
            return self.fail(format!("nested more than {NESTING_MAX} levels deep"));
        }
        Ok(())
    }
}
