//! Jinja2's statements.

use std::sync::Arc;

use super::{Parsed, Parser};
use crate::jinja::ast::{Body, Expr, ExprKind, FilterCall, For, Macro, Stmt, Target};
use crate::jinja::lexer::Token;

/// Statements that need other templates, or that a chat template cannot mean.
const REFUSED: [&str; 6] = [
    "extends",
    "include",
    "import",
    "from",
    "block",
    "autoescape",
];

impl Parser {
    pub(super) fn template(&mut self) -> Parsed<Body> {
        let body = self.body(&[])?;
        match self.token() {
            Token::Eof => Ok(body),
            _ => self.fail(format!("unexpected {}", self.describe())),
        }
    }

    /// Statements up to a tag with one of these names, which is the current token then.
    fn body(&mut self, ends: &[&str]) -> Parsed<Body> {
        self.deepen()?;
        let mut body = Body::new();
        loop {
            match self.token().clone() {
                Token::Text(text) => {
                    self.next();
                    body.push(Stmt::Text(text));
                }
                Token::VariableBegin => {
                    self.next();
                    body.push(Stmt::Output(self.tuple(true, false, None)?));
                    if *self.token() != Token::VariableEnd {
                        return self.fail(format!("expected `}}}}`, got {}", self.describe()));
                    }
                    self.next();
                }
                Token::BlockBegin => {
                    self.next();
                    if ends.iter().any(|end| self.is_name(end)) {
                        self.depth -= 1;
                        return Ok(body);
                    }
                    self.statement(&mut body)?;
                    self.block_end()?;
                }
                Token::Eof if ends.is_empty() => {
                    self.depth -= 1;
                    return Ok(body);
                }
                Token::Eof => {
                    let ends = ends.join("` or `");
                    return self.fail(format!("unexpected end of template: `{ends}` is missing"));
                }
                _ => return self.fail(format!("unexpected {}", self.describe())),
            }
        }
    }

    fn block_end(&mut self) -> Parsed<()> {
        if *self.token() != Token::BlockEnd {
            return self.fail(format!("expected `%}}`, got {}", self.describe()));
        }
        self.next();
        Ok(())
    }

    /// The body of a statement; the end tag's name is the current token then.
    fn statements(&mut self, ends: &[&str]) -> Parsed<Body> {
        self.skip_operator(":");
        self.block_end()?;
        self.body(ends)
    }

    /// Like `statements`, and passes the one name that ends it.
    fn statements_to(&mut self, end: &str) -> Parsed<Body> {
        let body = self.statements(&[end])?;
        self.next();
        Ok(body)
    }

    fn statement(&mut self, body: &mut Body) -> Parsed<()> {
        let line = self.line();
        let keyword = self.expect_name()?;
        let statement = match &*keyword {
            "for" => self.parse_for(line)?,
            "if" => self.parse_if()?,
            "set" => self.parse_set()?,
            "with" => self.parse_with()?,
            "macro" => {
                let name = self.expect_name()?;
                Stmt::Macro(self.parse_macro(name, line, "endmacro")?)
            }
            "call" => {
                let block = self.at;
                let has_signature = self.is_operator("(");
                if has_signature {
                    self.skip_signature()?;
                }
                let call = self.expression()?;
                if !matches!(call.kind, ExprKind::Call(..)) {
                    return self.fail("expected call");
                }
                let after = self.at;
                self.at = block;
                let caller = self.parse_caller(has_signature, after, line)?;
                Stmt::CallBlock(caller, call)
            }
            "filter" => {
                let mut filters = vec![self.filter()?];
                self.more_filters(&mut filters)?;
                Stmt::FilterBlock(filters, self.statements_to("endfilter")?)
            }
            "print" => {
                let mut first = true;
                while *self.token() != Token::BlockEnd {
                    if !first {
                        self.expect_operator(",")?;
                    }
                    first = false;
                    body.push(Stmt::Output(self.expression()?));
                }
                return Ok(());
            }
            "generation" => {
                let loops = std::mem::take(&mut self.loops);
                let inner = self.statements_to("endgeneration")?;
                self.loops = loops;
                Stmt::Generation(inner)
            }
            "break" | "continue" => {
                if self.loops == 0 {
                    return self.fail(format!("`{keyword}` outside of a loop"));
                }
                if &*keyword == "break" {
                    Stmt::Break
                } else {
                    Stmt::Continue
                }
            }
            refused if REFUSED.contains(&refused) => {
                return self.fail(format!("the statement `{refused}` is not supported"));
            }
            unknown => return self.fail(format!("encountered unknown tag `{unknown}`")),
        };
        body.push(statement);
        Ok(())
    }

    fn parse_for(&mut self, line: u32) -> Parsed<Stmt> {
        let target = self.target(false, Some("in"))?;
        if !self.skip_name("in") {
            return self.fail(format!("expected `in`, got {}", self.describe()));
        }
        let iterable = self.tuple(false, false, Some("recursive"))?;
        let condition = if self.skip_name("if") {
            Some(self.expression()?)
        } else {
            None
        };
        let recursive = self.skip_name("recursive");
        self.loops += 1;
        let body = self.statements(&["endfor", "else"])?;
        self.loops -= 1;
        let otherwise = if self.skip_name("else") {
            self.statements_to("endfor")?
        } else {
            self.next();
            Body::new()
        };
        Ok(Stmt::For(Arc::new(For {
            target,
            iterable,
            condition,
            recursive,
            body,
            otherwise,
            line,
        })))
    }

    fn parse_if(&mut self) -> Parsed<Stmt> {
        let mut branches = Vec::new();
        loop {
            let condition = self.tuple(false, false, None)?;
            let body = self.statements(&["elif", "else", "endif"])?;
            branches.push((condition, body));
            if self.skip_name("elif") {
                continue;
            }
            let otherwise = if self.skip_name("else") {
                self.statements_to("endif")?
            } else {
                self.next();
                Body::new()
            };
            return Ok(Stmt::If(branches, otherwise));
        }
    }

    fn parse_set(&mut self) -> Parsed<Stmt> {
        let target = self.target(true, None)?;
        if self.skip_operator("=") {
            return Ok(Stmt::Set(target, self.tuple(true, false, None)?));
        }
        let mut filters = Vec::new();
        self.more_filters(&mut filters)?;
        Ok(Stmt::SetBlock(
            target,
            filters,
            self.statements_to("endset")?,
        ))
    }

    fn parse_with(&mut self) -> Parsed<Stmt> {
        let mut assignments = Vec::new();
        while !matches!(self.token(), Token::BlockEnd) {
            if !assignments.is_empty() {
                self.expect_operator(",")?;
            }
            let target = self.target(false, None)?;
            self.expect_operator("=")?;
            assignments.push((target, self.expression()?));
        }
        Ok(Stmt::With(assignments, self.statements_to("endwith")?))
    }

    fn more_filters(&mut self, filters: &mut Vec<FilterCall>) -> Parsed<()> {
        while self.skip_operator("|") {
            filters.push(self.filter()?);
        }
        Ok(())
    }

    fn parse_macro(&mut self, name: Arc<str>, line: u32, end: &str) -> Parsed<Arc<Macro>> {
        let (parameters, defaults) = self.signature()?;
        self.macro_body(name, parameters, defaults, line, end)
    }

    /// The caller of `{% call(parameters) macro() %}`: its parameters stand before the
    /// call, its body after it.
    fn parse_caller(
        &mut self,
        has_signature: bool,
        after_call: usize,
        line: u32,
    ) -> Parsed<Arc<Macro>> {
        let (parameters, defaults) = if has_signature {
            self.signature()?
        } else {
            (Vec::new(), Vec::new())
        };
        self.at = after_call;
        self.macro_body("caller".into(), parameters, defaults, line, "endcall")
    }

    fn macro_body(
        &mut self,
        name: Arc<str>,
        parameters: Vec<Arc<str>>,
        defaults: Vec<Expr>,
        line: u32,
        end: &str,
    ) -> Parsed<Arc<Macro>> {
        let names_before = self.names.len();
        let loops = std::mem::take(&mut self.loops);
        let body = self.statements_to(end)?;
        self.loops = loops;
        let uses = |special: &str| {
            self.names[names_before..]
                .iter()
                .any(|name| &**name == special)
        };
        Ok(Arc::new(Macro {
            uses_caller: uses("caller"),
            uses_kwargs: uses("kwargs"),
            uses_varargs: uses("varargs"),
            name,
            parameters,
            defaults,
            body,
            line,
        }))
    }

    fn skip_signature(&mut self) -> Parsed<()> {
        self.signature().map(|_| ())
    }

    fn signature(&mut self) -> Parsed<(Vec<Arc<str>>, Vec<Expr>)> {
        let mut parameters: Vec<Arc<str>> = Vec::new();
        let mut defaults = Vec::new();
        self.expect_operator("(")?;
        while !self.is_operator(")") {
            if !parameters.is_empty() {
                self.expect_operator(",")?;
            }
            let name = self.expect_name()?;
            if matches!(&*name, "caller" | "kwargs" | "varargs") {
                return self.fail(format!("a parameter named `{name}` is not supported"));
            }
            if parameters.contains(&name) {
                return self.fail(format!("the parameter `{name}` is named twice"));
            }
            if self.skip_operator("=") {
                defaults.push(self.expression()?);
            } else if !defaults.is_empty() {
                return self.fail("non-default argument follows default argument");
            }
            parameters.push(name);
        }
        self.expect_operator(")")?;
        Ok((parameters, defaults))
    }

    /// What a value is assigned to: names, and tuples of them.
    fn target(&mut self, with_attributes: bool, end_name: Option<&str>) -> Parsed<Target> {
        let line = self.line();
        let mut targets = Vec::new();
        let mut is_tuple = false;
        loop {
            let at_end = matches!(self.token(), Token::BlockEnd)
                || self.is_operator(")")
                || self.is_operator("=")
                || end_name.is_some_and(|name| self.is_name(name));
            if !targets.is_empty() && at_end {
                break;
            }
            targets.push(self.nested(|parser| parser.single_target(with_attributes))?);
            if !self.skip_operator(",") {
                break;
            }
            is_tuple = true;
        }
        match targets.pop() {
            Some(only) if !is_tuple => Ok(only),
            last => {
                targets.extend(last);
                Ok(Target::Tuple(targets, line))
            }
        }
    }

    fn single_target(&mut self, with_attributes: bool) -> Parsed<Target> {
        let line = self.line();
        if self.skip_operator("(") {
            let inner = self.target(false, None)?;
            self.expect_operator(")")?;
            return Ok(inner);
        }
        let name = self.expect_name()?;
        if matches!(
            &*name,
            "true" | "false" | "none" | "True" | "False" | "None"
        ) {
            return self.fail(format!("can't assign to `{name}`"));
        }
        if with_attributes && self.skip_operator(".") {
            let attribute = self.expect_name()?;
            return Ok(Target::Attribute(name, attribute, line));
        }
        Ok(Target::Name(name))
    }
}
