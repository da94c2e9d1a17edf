//! The arguments of a call, and how they are given to the parameters of what is called.

use std::sync::Arc;

use super::error::{Error, Result};
use super::text::Str;
use super::value::Value;

/// Evaluated arguments.
#[derive(Clone, Default)]
pub(crate) struct CallArgs {
    pub(super) positional: Vec<Value>,
    pub(super) keywords: Vec<(Arc<str>, Value)>,
}

impl CallArgs {
    pub(super) fn depth(&self) -> u16 {
        let keywords = self.keywords.iter().map(|(_, value)| value);
        let depths = self.positional.iter().chain(keywords).map(Value::depth);
        depths.max().unwrap_or(0)
    }

    /// Gives the arguments to parameters, of which the first `required` have no default.
    /// A parameter whose name starts with `/` takes no keyword.
    pub(super) fn bind<const N: usize>(
        self,
        callee: &str,
        parameters: [&str; N],
        required: usize,
    ) -> Result<[Option<Value>; N]> {
        let mut bound = [const { None }; N];
        if self.positional.len() > N {
            return Err(Error::failed(format!(
                "{callee}() takes at most {N} arguments ({} given)",
                self.positional.len()
            )));
        }
        for (slot, value) in bound.iter_mut().zip(self.positional) {
            *slot = Some(value);
        }
        for (name, value) in self.keywords {
            let slot = parameters
                .iter()
                .position(|parameter| *parameter == &*name)
                .map(|index| &mut bound[index]);
            match slot {
                Some(slot @ None) => *slot = Some(value),
                Some(Some(_)) => {
                    return Err(Error::failed(format!(
                        "{callee}() got multiple values for argument '{name}'"
                    )));
                }
                None => {
                    return Err(Error::failed(format!(
                        "{callee}() got an unexpected keyword argument '{name}'"
                    )));
                }
            }
        }
        if let Some(index) = (0..required).find(|&index| bound[index].is_none()) {
            return Err(Error::failed(format!(
                "{callee}() missing the argument '{}'",
                parameters[index].trim_start_matches('/')
            )));
        }
        Ok(bound)
    }

    pub(super) fn none(self, callee: &str) -> Result<()> {
        self.bind(callee, [], 0).map(|[]| ())
    }

    /// Removes a keyword.
    pub(super) fn take(&mut self, name: &str) -> Option<Value> {
        let at = self
            .keywords
            .iter()
            .position(|(known, _)| &**known == name)?;
        Some(self.keywords.remove(at).1)
    }
}

/// An argument that must be an integer; Python takes booleans too.
pub(super) fn integer(value: &Value, what: &str) -> Result<i128> {
    match value {
        Value::Int(integer) => Ok(*integer),
        Value::Bool(value) => Ok(i128::from(*value)),
        Value::Undefined(message) => Err(Error::failed(message.as_ref())),
        _ => Err(Error::failed(format!(
            "{what} must be an integer, not '{}'",
            value.type_name()
        ))),
    }
}

/// An argument that must be a string.
pub(super) fn string(value: &Value, what: &str) -> Result<Str> {
    match value {
        Value::Str(text) => Ok(text.clone()),
        _ => Err(Error::failed(format!(
            "{what} must be a string, not '{}'",
            value.type_name()
        ))),
    }
}
