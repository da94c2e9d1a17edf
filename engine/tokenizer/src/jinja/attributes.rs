//! `a.b`, `a[b]` and `a[b:c]`.
//!
//! Jinja2 asks `a.b` of the object's attributes first and of its items then, `a['b']`
//! the other way round. What neither has is undefined. Attributes that Python has and
//! this crate does not are refused by name, so that they never turn into an item.

use super::error::{Error, Result};
use super::interpreter::Interpreter;
use super::loops;
use super::methods::{self, Support};
use super::text::StrBuilder;
use super::value::{Span, Value};

impl Interpreter {
    /// `object.name`.
    pub(super) fn attribute(&mut self, object: &Value, name: &str) -> Result<Value> {
        if let Value::Undefined(what) = object {
            return Err(Error::failed(what.as_ref()));
        }
        if let Some(value) = self.own_attribute(object, name)? {
            return Ok(value);
        }
        let item = match object {
            Value::Dict(dict) => dict.get_str(name).cloned(),
            _ => None,
        };
        Ok(item.unwrap_or_else(|| missing_attribute(object, name)))
    }

    /// `object[index]`.
    pub(super) fn item(&mut self, object: &Value, index: &Value) -> Result<Value> {
        if let Value::Undefined(what) = object {
            return Err(Error::failed(what.as_ref()));
        }
        if let Some(value) = self.own_item(object, index)? {
            return Ok(value);
        }
        match index {
            Value::Str(name) => {
                let found = self.own_attribute(object, name)?;
                Ok(found.unwrap_or_else(|| missing_attribute(object, name)))
            }
            _ => Ok(Value::undefined(format!(
                "'{} object' has no such element",
                object.type_name()
            ))),
        }
    }

    fn own_item(&mut self, object: &Value, index: &Value) -> Result<Option<Value>> {
        if let Value::Dict(dict) = object {
            // An unhashable key is a `TypeError`, which Jinja2 takes as missing.
            if matches!(index, Value::List(_) | Value::Dict(_)) {
                return Ok(None);
            }
            return Ok(dict.get(index)?.cloned());
        }
        let index = match index {
            Value::Int(index) => *index,
            Value::Bool(index) => i128::from(*index),
            _ => return Ok(None),
        };
        Ok(match object {
            Value::Str(text) => {
                self.spend_bytes(text.len())?;
                let count = text.chars().count();
                let at = position(index, count);
                at.and_then(|at| {
                    let (start, c) = text.char_indices().nth(at)?;
                    Some(Value::Str(text.slice(start..start + c.len_utf8())))
                })
            }
            Value::List(sequence) | Value::Tuple(sequence) => {
                position(index, sequence.items.len()).map(|at| sequence.items[at].clone())
            }
            Value::Range(span) => position(index, span.len()).map(|at| span.get(at)),
            _ => None,
        })
    }

    /// What Python's `getattr` finds.
    pub(super) fn own_attribute(&mut self, object: &Value, name: &str) -> Result<Option<Value>> {
        // The sandbox shows nothing of Python's inside.
        if name.starts_with("__") && name.ends_with("__") {
            return Err(Error::unsupported(format!("the attribute `{name}`")));
        }
        match object {
            Value::Loop(state) if loops::ATTRIBUTES.contains(&name) => {
                return self.loop_attribute(state, name).map(Some);
            }
            Value::Namespace(index) => {
                return Ok(self.namespaces[*index].get(name).cloned());
            }
            Value::Macro(value) => return value.attribute(name),
            Value::Cycler(cycler) if name == "current" => {
                return Ok(Some(cycler.items[cycler.position.get()].clone()));
            }
            Value::Joiner(_) if matches!(name, "sep" | "used") => {
                return Err(Error::unsupported(format!("`joiner.{name}`")));
            }
            Value::Tuple(pair) if pair.is_group && matches!(name, "grouper" | "list") => {
                return Ok(Some(pair.items[usize::from(name == "list")].clone()));
            }
            _ => {}
        }
        match methods::support(object, name) {
            Support::Yes(name) => Value::method(object.clone(), name).map(Some),
            Support::Unsafe => Ok(Some(Value::undefined(format!(
                "access to attribute '{name}' of '{}' object is unsafe",
                object.type_name()
            )))),
            Support::No => Err(Error::unsupported(format!(
                "the attribute `{name}` of a {}",
                object.type_name()
            ))),
            Support::Absent => Ok(None),
        }
    }
}

fn missing_attribute(object: &Value, name: &str) -> Value {
    Value::undefined(format!(
        "'{} object' has no attribute '{name}'",
        object.type_name()
    ))
}

/// An index from either end.
fn position(index: i128, length: usize) -> Option<usize> {
    let from_end = if index < 0 { length as i128 } else { 0 };
    usize::try_from(index.checked_add(from_end)?)
        .ok()
        .filter(|&at| at < length)
}

/// Python's slices.
pub(super) fn slice(
    object: &Value,
    start: Option<i128>,
    stop: Option<i128>,
    step: Option<i128>,
) -> Result<Value> {
    let step = step.unwrap_or(1);
    if step == 0 {
        return Err(Error::failed("slice step cannot be zero"));
    }
    let bounds = |length: usize| -> Span {
        let length = length as i128;
        let (low, high) = if step > 0 {
            (0, length)
        } else {
            (-1, length - 1)
        };
        let clamp = |bound: i128| {
            let from_start = if bound < 0 {
                bound.saturating_add(length)
            } else {
                bound
            };
            from_start.clamp(low, high)
        };
        let (first, last) = if step > 0 { (low, high) } else { (high, low) };
        Span {
            start: start.map_or(first, clamp),
            stop: stop.map_or(last, clamp),
            step: step.clamp(-length - 1, length + 1),
        }
    };
    let indexes = |length: usize| {
        let span = bounds(length);
        (0..span.len()).map(move |at| (span.start + span.step * at as i128) as usize)
    };
    match object {
        Value::Str(text) => {
            let starts: Vec<usize> = text
                .char_indices()
                .map(|(at, _)| at)
                .chain([text.len()])
                .collect();
            let count = starts.len() - 1;
            if step == 1 {
                let span = bounds(count);
                let stop = span.stop.max(span.start) as usize;
                let range = starts[span.start as usize]..starts[stop];
                return Ok(Value::Str(text.slice(range)));
            }
            let mut out = StrBuilder::default();
            for at in indexes(count) {
                out.push(&text.slice(starts[at]..starts[at + 1]));
            }
            Ok(Value::Str(out.finish().with_markup(text.markup)))
        }
        Value::List(items) => {
            let items = &items.items;
            Value::list(indexes(items.len()).map(|at| items[at].clone()).collect())
        }
        Value::Tuple(items) => {
            let items = &items.items;
            Value::tuple(indexes(items.len()).map(|at| items[at].clone()).collect())
        }
        Value::Range(span) => {
            let inner = bounds(span.len());
            Ok(Value::Range(Span {
                start: span.start + inner.start * span.step,
                stop: span.start + inner.stop * span.step,
                step: span.step * step,
            }))
        }
        Value::Undefined(what) => Err(Error::failed(what.as_ref())),
        // Jinja2 fails, except where it folds constants.
        _ => Err(Error::unsupported(format!(
            "a slice of a {}",
            object.type_name()
        ))),
    }
}
