//! Runs a template: statements, scopes, and the budget of work.
//!
//! A scope is what Jinja2 calls a frame: the template, each iteration of a loop, each
//! call of a macro, the bodies of `with`, `set`, `filter` and `call`. `if` has none.
//! Reading looks outwards; assigning stays in the innermost scope.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use super::ast::{Body, FilterCall, Stmt, Target};
use super::error::{Error, Kind, Result};
use super::text::StrBuilder;
use super::value::{Function, Value};

/// Evaluations and calls inside each other. A level takes at most some kilobytes of
/// stack; see `STACK_BYTES` where renders are started.
const DEPTH_MAX: u32 = 2_000;

pub(super) enum Flow {
    Next,
    Break,
    Continue,
}

/// Variables, and where to look next.
pub(crate) struct Scope {
    variables: RefCell<HashMap<Arc<str>, Value>>,
    outer: Option<Rc<Scope>>,
}

impl Scope {
    pub(super) fn outermost(variables: HashMap<Arc<str>, Value>) -> Rc<Self> {
        Rc::new(Self {
            variables: RefCell::new(variables),
            outer: None,
        })
    }

    pub(super) fn inside(outer: &Rc<Self>) -> Rc<Self> {
        Rc::new(Self {
            variables: RefCell::default(),
            outer: Some(outer.clone()),
        })
    }

    pub(super) fn set(&self, name: &Arc<str>, value: Value) {
        self.variables.borrow_mut().insert(name.clone(), value);
    }

    fn get(&self, name: &str) -> Option<Value> {
        let mut scope = self;
        loop {
            if let Some(value) = scope.variables.borrow().get(name) {
                return Some(value.clone());
            }
            scope = scope.outer.as_deref()?;
        }
    }
}

pub(crate) struct Interpreter {
    /// Work that is left: one per evaluation, one per 64 bytes of text.
    fuel: u64,
    depth: u32,
    output_bytes_max: usize,
    /// Unix seconds, for `strftime_now`.
    pub(super) now: i64,
    /// What templates can change. They live until the render ends, so that one may hold
    /// another without a cycle.
    pub(super) namespaces: Vec<HashMap<Arc<str>, Value>>,
}

impl Interpreter {
    pub(super) fn new(fuel: u64, output_bytes_max: usize, now: i64) -> Self {
        Self {
            fuel,
            depth: 0,
            output_bytes_max,
            now,
            namespaces: Vec::new(),
        }
    }

    pub(super) fn spend(&mut self, work: usize) -> Result<()> {
        match self.fuel.checked_sub(work as u64) {
            Some(left) => {
                self.fuel = left;
                Ok(())
            }
            None => {
                self.fuel = 0;
                Err(Error::limit("the template does too much work"))
            }
        }
    }

    /// Pays for text before it is made or read.
    pub(super) fn spend_bytes(&mut self, bytes: usize) -> Result<()> {
        self.spend(bytes / 64)
    }

    pub(super) fn deeper<T>(&mut self, run: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            self.depth -= 1;
            return Err(Error::limit("the template recurses too deeply"));
        }
        let result = run(self);
        self.depth -= 1;
        result
    }

    pub(super) fn run(
        &mut self,
        body: &Body,
        scope: &Rc<Scope>,
        out: &mut StrBuilder,
    ) -> Result<Flow> {
        for statement in body {
            self.spend(1)?;
            match self.deeper(|interpreter| interpreter.statement(statement, scope, out))? {
                Flow::Next => {}
                other => return Ok(other),
            }
            if out.len() > self.output_bytes_max {
                return Err(Error::new(Kind::TooLong, "the output is too long"));
            }
        }
        Ok(Flow::Next)
    }

    fn statement(
        &mut self,
        statement: &Stmt,
        scope: &Rc<Scope>,
        out: &mut StrBuilder,
    ) -> Result<Flow> {
        match statement {
            Stmt::Text(text) => {
                self.spend_bytes(text.len())?;
                out.push_own(text);
            }
            Stmt::Output(expression) => {
                let value = self.evaluate(expression, scope)?;
                self.write_str(&value, out)
                    .map_err(|error| error.at(expression.line))?;
            }
            Stmt::For(declaration) => {
                return self.run_for(declaration, scope, out);
            }
            Stmt::If(branches, otherwise) => {
                for (condition, body) in branches {
                    if self.evaluate(condition, scope)?.is_true() {
                        return self.run(body, scope, out);
                    }
                }
                return self.run(otherwise, scope, out);
            }
            Stmt::Set(target, expression) => {
                let value = self.evaluate(expression, scope)?;
                self.assign(target, value, scope)
                    .map_err(|error| error.at(expression.line))?;
            }
            Stmt::SetBlock(target, filters, body) => {
                let value = self.captured(body, filters, scope)?;
                self.assign(target, value, scope)?;
            }
            Stmt::FilterBlock(filters, body) => {
                let value = self.captured(body, filters, scope)?;
                self.write_str(&value, out)?;
            }
            Stmt::With(assignments, body) => {
                let inner = Scope::inside(scope);
                for (target, expression) in assignments {
                    let value = self.evaluate(expression, scope)?;
                    self.assign(target, value, &inner)?;
                }
                return self.run(body, &inner, out);
            }
            Stmt::Macro(declaration) => {
                let value = self.declare(declaration, scope);
                scope.set(&declaration.name, value);
            }
            Stmt::CallBlock(caller, call) => {
                let caller = self.declare(caller, scope);
                let value = self.call_with_caller(call, caller, scope)?;
                self.write_str(&value, out)?;
            }
            Stmt::Generation(body) => {
                let inner = Scope::inside(scope);
                self.run(body, &inner, out)?;
            }
            Stmt::Break => return Ok(Flow::Break),
            Stmt::Continue => return Ok(Flow::Continue),
        }
        Ok(Flow::Next)
    }

    /// A body's output, filtered. `break` cannot stand in it for a loop outside.
    fn captured(
        &mut self,
        body: &Body,
        filters: &[FilterCall],
        scope: &Rc<Scope>,
    ) -> Result<Value> {
        let inner = Scope::inside(scope);
        let mut out = StrBuilder::default();
        self.run(body, &inner, &mut out)?;
        let mut value = Value::Str(out.finish());
        for filter in filters {
            let arguments = self.arguments(&filter.arguments, &inner)?;
            value = self
                .filter(&filter.name, value, arguments)
                .map_err(|error| error.at(filter.line))?;
        }
        Ok(value)
    }

    pub(super) fn assign(
        &mut self,
        target: &Target,
        value: Value,
        scope: &Rc<Scope>,
    ) -> Result<()> {
        match target {
            Target::Name(name) => {
                scope.set(name, value);
                Ok(())
            }
            Target::Attribute(name, attribute, line) => match self.variable(name, scope) {
                Value::Namespace(index) => {
                    self.namespaces[index].insert(attribute.clone(), value);
                    Ok(())
                }
                _ => {
                    Err(Error::failed("cannot assign attribute on non-namespace object").at(*line))
                }
            },
            Target::Tuple(targets, line) => {
                let items = self.items(&value).map_err(|error| error.at(*line))?;
                if items.len() != targets.len() {
                    return Err(Error::failed(format!(
                        "{} values cannot be unpacked into {} names",
                        items.len(),
                        targets.len()
                    ))
                    .at(*line));
                }
                for (target, item) in targets.iter().zip(items) {
                    self.assign(target, item, scope)?;
                }
                Ok(())
            }
        }
    }

    pub(super) fn variable(&self, name: &Arc<str>, scope: &Scope) -> Value {
        if let Some(value) = scope.get(name) {
            return value;
        }
        let function = match &**name {
            "range" => Function::Range,
            "dict" => Function::Dict,
            "namespace" => Function::Namespace,
            "cycler" => Function::Cycler,
            "joiner" => Function::Joiner,
            "lipsum" => Function::Lipsum,
            "raise_exception" => Function::RaiseException,
            "strftime_now" => Function::StrftimeNow,
            _ => return Value::undefined(format!("'{name}' is undefined")),
        };
        Value::Function(function)
    }
}
