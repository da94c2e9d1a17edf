//! Macros, and the bodies of `call` blocks, as values.

use std::rc::{Rc, Weak};
use std::sync::Arc;

use super::ast::{Macro, Target};
use super::calls::CallArgs;
use super::error::{Error, Result};
use super::interpreter::{Interpreter, Scope};
use super::text::StrBuilder;
use super::value::{Dict, Value};

pub(crate) struct MacroValue {
    pub(super) declaration: Arc<Macro>,
    /// Where the macro was declared: its body reads the variables there as they are when
    /// it is called. Weak, because the scope holds the macro.
    pub(super) scope: Weak<Scope>,
}

impl MacroValue {
    pub(super) fn attribute(&self, name: &str) -> Result<Option<Value>> {
        let declaration = &self.declaration;
        Ok(Some(match name {
            "name" => Value::str(declaration.name.clone()),
            "arguments" => {
                let names = declaration.parameters.iter().cloned();
                Value::tuple(names.map(Value::str).collect())?
            }
            "caller" => Value::Bool(declaration.uses_caller),
            "catch_kwargs" => Value::Bool(declaration.uses_kwargs),
            "catch_varargs" => Value::Bool(declaration.uses_varargs),
            "explicit_caller" => Value::Bool(false),
            _ => return Ok(None),
        }))
    }
}

impl Interpreter {
    pub(super) fn declare(&self, declaration: &Arc<Macro>, scope: &Rc<Scope>) -> Value {
        Value::Macro(Rc::new(MacroValue {
            declaration: declaration.clone(),
            scope: Rc::downgrade(scope),
        }))
    }

    pub(super) fn call_macro(&mut self, callee: &MacroValue, mut args: CallArgs) -> Result<Value> {
        let declaration = callee.declaration.clone();
        let name = &declaration.name;
        let Some(outer) = callee.scope.upgrade() else {
            return Err(Error::unsupported(format!(
                "calling the macro `{name}` after the block that declares it ended"
            )));
        };
        let scope = Scope::inside(&outer);
        if declaration.uses_caller {
            let caller = args.take("caller");
            let missing = || Value::undefined("No caller defined");
            scope.set(&"caller".into(), caller.unwrap_or_else(missing));
        }
        let count = declaration.parameters.len();
        let first_default = count - declaration.defaults.len();
        let mut positional = args.positional.into_iter();
        for (index, parameter) in declaration.parameters.iter().enumerate() {
            let at = args
                .keywords
                .iter()
                .position(|(known, _)| known == parameter);
            let keyword = at.map(|at| args.keywords.remove(at).1);
            let value = match (positional.next(), keyword) {
                (Some(_), Some(_)) => {
                    return Err(Error::failed(format!(
                        "macro {name:?} got two values for the argument `{parameter}`"
                    )));
                }
                (Some(value), None) | (None, Some(value)) => value,
                (None, None) if index >= first_default => {
                    let default = &declaration.defaults[index - first_default];
                    self.evaluate(default, &scope)?
                }
                (None, None) => {
                    Value::undefined(format!("parameter '{parameter}' was not provided"))
                }
            };
            self.assign(&Target::Name(parameter.clone()), value, &scope)?;
        }
        let rest: Vec<Value> = positional.collect();
        if declaration.uses_kwargs {
            let pairs = args.keywords.drain(..);
            let pairs = pairs.map(|(key, value)| (Value::str(key), value));
            let dict = Dict::from_pairs(pairs)?;
            scope.set(&"kwargs".into(), Value::Dict(Rc::new(dict)));
        } else if let Some((keyword, _)) = args.keywords.first() {
            return Err(Error::failed(format!(
                "macro '{name}' takes no keyword argument '{keyword}'"
            )));
        }
        if declaration.uses_varargs {
            scope.set(&"varargs".into(), Value::tuple(rest)?);
        } else if !rest.is_empty() {
            return Err(Error::failed(format!(
                "macro '{name}' takes not more than {count} argument(s)"
            )));
        }
        let mut out = StrBuilder::default();
        self.deeper(|interpreter| interpreter.run(&declaration.body, &scope, &mut out))
            .map_err(|error| error.at(declaration.line))?;
        Ok(Value::Str(out.finish()))
    }
}
