//! Evaluates expressions.

use std::rc::Rc;

use super::ast::{Arguments, Comparison, Expr, ExprKind};
use super::attributes;
use super::calls::CallArgs;
use super::compare;
use super::error::{Error, Result};
use super::interpreter::{Interpreter, Scope};
use super::operators;
use super::text::{Str, StrBuilder};
use super::value::{Dict, Value};

impl Interpreter {
    pub(super) fn evaluate(&mut self, expression: &Expr, scope: &Rc<Scope>) -> Result<Value> {
        self.spend(1)?;
        self.deeper(|interpreter| interpreter.expression(expression, scope))
            .map_err(|error| error.at(expression.line))
    }

    fn expression(&mut self, expression: &Expr, scope: &Rc<Scope>) -> Result<Value> {
        match &expression.kind {
            ExprKind::None => Ok(Value::None),
            ExprKind::Bool(value) => Ok(Value::Bool(*value)),
            ExprKind::Int(value) => Ok(Value::Int(*value)),
            ExprKind::Float(value) => Ok(Value::Float(*value)),
            ExprKind::Str(text) => Ok(Value::Str(Str::own(text.clone()))),
            ExprKind::Name(name) => Ok(self.variable(name, scope)),
            ExprKind::List(items) => Value::list(self.all(items, scope)?),
            ExprKind::Tuple(items) => Value::tuple(self.all(items, scope)?),
            ExprKind::Dict(items) => {
                let mut dict = Dict::default();
                for (key, value) in items {
                    let key = self.evaluate(key, scope)?;
                    dict.insert(key, self.evaluate(value, scope)?)?;
                }
                Ok(Value::Dict(Rc::new(dict)))
            }
            ExprKind::Attribute(object, name) => {
                let object = self.evaluate(object, scope)?;
                self.attribute(&object, name)
            }
            ExprKind::Item(object, index) => {
                let object = self.evaluate(object, scope)?;
                let index = self.evaluate(index, scope)?;
                self.item(&object, &index)
            }
            ExprKind::Slice(object, bounds) => self.slice(object, bounds, scope),
            ExprKind::Call(callee, arguments) => {
                let callee = self.evaluate(callee, scope)?;
                let arguments = self.arguments(arguments, scope)?;
                self.call(&callee, arguments)
            }
            ExprKind::Filter(value, filter) => {
                let value = self.evaluate(value, scope)?;
                let arguments = self.arguments(&filter.arguments, scope)?;
                self.filter(&filter.name, value, arguments)
            }
            ExprKind::Test(value, test) => {
                let value = self.evaluate(value, scope)?;
                let arguments = self.arguments(&test.arguments, scope)?;
                self.test(&test.name, &value, arguments).map(Value::Bool)
            }
            ExprKind::Negative(value) => operators::negative(&self.evaluate(value, scope)?),
            ExprKind::Positive(value) => operators::positive(&self.evaluate(value, scope)?),
            ExprKind::Not(value) => Ok(Value::Bool(!self.evaluate(value, scope)?.is_true())),
            ExprKind::Binary(operator, left, right) => {
                let left = self.evaluate(left, scope)?;
                let right = self.evaluate(right, scope)?;
                self.binary(*operator, &left, &right)
            }
            ExprKind::Concat(parts) => {
                let mut out = StrBuilder::default();
                for part in parts {
                    let value = self.evaluate(part, scope)?;
                    self.write_str(&value, &mut out)?;
                }
                Ok(Value::Str(out.finish()))
            }
            ExprKind::Compare(first, rest) => {
                let mut left = self.evaluate(first, scope)?;
                for (comparison, right) in rest {
                    let right = self.evaluate(right, scope)?;
                    if !self.compare(*comparison, &left, &right)? {
                        return Ok(Value::Bool(false));
                    }
                    left = right;
                }
                Ok(Value::Bool(true))
            }
            ExprKind::And(left, right) => {
                let left = self.evaluate(left, scope)?;
                if left.is_true() {
                    self.evaluate(right, scope)
                } else {
                    Ok(left)
                }
            }
            ExprKind::Or(left, right) => {
                let left = self.evaluate(left, scope)?;
                if left.is_true() {
                    Ok(left)
                } else {
                    self.evaluate(right, scope)
                }
            }
            ExprKind::Conditional(condition, value, other) => {
                if self.evaluate(condition, scope)?.is_true() {
                    return self.evaluate(value, scope);
                }
                match other {
                    Some(other) => self.evaluate(other, scope),
                    None => Ok(Value::undefined(
                        "the inline if-expression evaluated to false and no else section was defined",
                    )),
                }
            }
        }
    }

    fn all(&mut self, items: &[Expr], scope: &Rc<Scope>) -> Result<Vec<Value>> {
        items
            .iter()
            .map(|item| self.evaluate(item, scope))
            .collect()
    }

    pub(super) fn arguments(
        &mut self,
        arguments: &Arguments,
        scope: &Rc<Scope>,
    ) -> Result<CallArgs> {
        let mut positional = self.all(&arguments.positional, scope)?;
        let mut keywords = Vec::with_capacity(arguments.keywords.len());
        for (name, value) in &arguments.keywords {
            keywords.push((name.clone(), self.evaluate(value, scope)?));
        }
        if let Some(star) = &arguments.star {
            let star = self.evaluate(star, scope)?;
            positional.extend(self.items(&star)?);
        }
        if let Some(star_star) = &arguments.star_star {
            let Value::Dict(dict) = self.evaluate(star_star, scope)? else {
                return Err(Error::failed("argument after ** must be a mapping"));
            };
            for (key, value) in &dict.entries {
                let Value::Str(key) = key else {
                    return Err(Error::failed("keywords must be strings"));
                };
                if keywords.iter().any(|(name, _)| **name == **key) {
                    return Err(Error::failed(format!(
                        "multiple values for keyword argument '{}'",
                        key.as_str()
                    )));
                }
                keywords.push((key.shared(), value.clone()));
            }
        }
        Ok(CallArgs {
            positional,
            keywords,
        })
    }

    /// `{% call macro(…) %}`: the call with one argument more.
    pub(super) fn call_with_caller(
        &mut self,
        call: &Expr,
        caller: Value,
        scope: &Rc<Scope>,
    ) -> Result<Value> {
        let ExprKind::Call(callee, arguments) = &call.kind else {
            return Err(Error::failed("expected call"));
        };
        let callee = self.evaluate(callee, scope)?;
        let mut arguments = self.arguments(arguments, scope)?;
        arguments.keywords.push(("caller".into(), caller));
        self.call(&callee, arguments)
            .map_err(|error| error.at(call.line))
    }

    fn slice(
        &mut self,
        object: &Expr,
        bounds: &[Option<Expr>; 3],
        scope: &Rc<Scope>,
    ) -> Result<Value> {
        let object = self.evaluate(object, scope)?;
        let mut evaluated = [None; 3];
        for (slot, bound) in evaluated.iter_mut().zip(bounds) {
            let Some(bound) = bound else { continue };
            *slot = match self.evaluate(bound, scope)? {
                Value::None => None,
                Value::Int(value) => Some(value),
                Value::Bool(value) => Some(i128::from(value)),
                Value::Undefined(what) => return Err(Error::failed(what.as_ref())),
                _ => return Err(Error::failed("slice indices must be integers or None")),
            };
        }
        let [start, stop, step] = evaluated;
        if let Value::Str(text) = &object {
            self.spend_bytes(text.len())?;
        }
        let sliced = attributes::slice(&object, start, stop, step)?;
        if let Value::List(items) | Value::Tuple(items) = &sliced {
            self.spend(items.items.len())?;
        }
        Ok(sliced)
    }

    pub(super) fn compare(
        &mut self,
        comparison: Comparison,
        left: &Value,
        right: &Value,
    ) -> Result<bool> {
        use std::cmp::Ordering::{Equal, Greater, Less};
        // Comparing walks the smaller of the two at most.
        self.spend(left.weight().min(right.weight()))?;
        let order = |operator| compare::order(left, right, operator);
        Ok(match comparison {
            Comparison::Equal => compare::equal(left, right),
            Comparison::NotEqual => !compare::equal(left, right),
            Comparison::Less => order("<")? == Some(Less),
            Comparison::LessEqual => matches!(order("<=")?, Some(Less | Equal)),
            Comparison::Greater => order(">")? == Some(Greater),
            Comparison::GreaterEqual => matches!(order(">=")?, Some(Greater | Equal)),
            Comparison::In => self.contains(right, left)?,
            Comparison::NotIn => !self.contains(right, left)?,
        })
    }

    /// Python's `needle in container`.
    pub(super) fn contains(&mut self, container: &Value, needle: &Value) -> Result<bool> {
        match container {
            Value::Str(text) => match needle {
                Value::Str(needle) => {
                    self.spend_bytes(text.len())?;
                    Ok(text.contains(needle.as_str()))
                }
                _ => Err(Error::failed(format!(
                    "'in <string>' requires string as left operand, not {}",
                    needle.type_name()
                ))),
            },
            Value::Dict(dict) => Ok(dict.get(needle)?.is_some()),
            _ => {
                self.spend(container.weight())?;
                for item in self.items(container)? {
                    if compare::equal(&item, needle) {
                        return Ok(true);
                    }
                }
                Ok(false)
            }
        }
    }
}
