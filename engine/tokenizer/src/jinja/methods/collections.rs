//! Methods of lists, tuples, dicts and ranges.

use std::rc::Rc;

use crate::jinja::calls::{CallArgs, integer};
use crate::jinja::compare;
use crate::jinja::error::{Error, Result};
use crate::jinja::interpreter::Interpreter;
use crate::jinja::value::{Value, View};

impl Interpreter {
    pub(super) fn collection_method(
        &mut self,
        receiver: &Value,
        name: &'static str,
        args: CallArgs,
    ) -> Result<Value> {
        if matches!(name, "copy" | "count" | "index") {
            self.spend(receiver.weight())?;
        }
        match (receiver, name) {
            (_, "copy") => {
                args.none(name)?;
                // Values do not change; only `sameas` could tell the copy.
                match receiver {
                    Value::List(list) => Value::list(list.items.clone()),
                    Value::Dict(dict) => {
                        let pairs = dict.entries.iter().cloned();
                        let copy = crate::jinja::value::Dict::from_pairs(pairs)?;
                        Ok(Value::Dict(Rc::new(copy)))
                    }
                    other => Ok(other.clone()),
                }
            }
            (Value::Dict(dict), "get") => {
                let [key, default] = args.bind(name, ["/key", "/default"], 1)?;
                let key = key.unwrap_or(Value::None);
                let found = dict.get(&key)?.cloned();
                Ok(found.or(default).unwrap_or(Value::None))
            }
            (Value::Dict(dict), view) => {
                args.none(view)?;
                let view = match view {
                    "keys" => View::Keys,
                    "values" => View::Values,
                    _ => View::Items,
                };
                Ok(Value::View(view, dict.clone()))
            }
            (_, "count") => {
                let [wanted] = args.bind(name, ["/value"], 1)?;
                let wanted = wanted.unwrap_or(Value::None);
                let items = self.items(receiver)?;
                let equal = items.iter().filter(|item| compare::equal(item, &wanted));
                Ok(Value::Int(equal.count() as i128))
            }
            (_, "index") => {
                let [wanted, start, stop] = args.bind(name, ["/value", "/start", "/stop"], 1)?;
                if matches!(receiver, Value::Range(_)) && start.is_some() {
                    return Err(Error::failed("range.index() takes exactly one argument"));
                }
                let wanted = wanted.unwrap_or(Value::None);
                let items = self.items(receiver)?;
                let bound = |value: Option<Value>, default: usize| -> Result<usize> {
                    let Some(value) = value else {
                        return Ok(default);
                    };
                    let length = items.len() as i128;
                    let at = integer(&value, "the bound of index()")?;
                    let at = if at < 0 {
                        at.saturating_add(length)
                    } else {
                        at
                    };
                    Ok(at.clamp(0, length) as usize)
                };
                let (start, stop) = (bound(start, 0)?, bound(stop, items.len())?);
                let mut found = (start..stop).filter(|&at| compare::equal(&items[at], &wanted));
                match found.next() {
                    Some(at) => Ok(Value::Int(at as i128)),
                    None => Err(Error::failed("index(): the value is not in the sequence")),
                }
            }
            _ => Err(Error::unsupported(format!(
                "the method `{name}` of a {}",
                receiver.type_name()
            ))),
        }
    }
}
