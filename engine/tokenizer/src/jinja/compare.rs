//! Python's `==`, `<` and `in`.

use std::cmp::Ordering;

use super::error::{Error, Result};
use super::value::{Dict, Value, View};

/// Python's `left == right`.
pub(crate) fn equal(left: &Value, right: &Value) -> bool {
    match (left, right) {
        (Value::Undefined(_), Value::Undefined(_)) | (Value::None, Value::None) => true,
        (Value::Str(left), Value::Str(right)) => left == right,
        (Value::List(left), Value::List(right)) | (Value::Tuple(left), Value::Tuple(right)) => {
            equal_items(&left.items, &right.items)
        }
        (Value::Dict(left), Value::Dict(right)) => equal_dicts(left, right),
        (Value::Range(left), Value::Range(right)) => {
            let length = left.len();
            length == right.len()
                && (length == 0
                    || left.start == right.start && (length == 1 || left.step == right.step))
        }
        (Value::View(View::Keys, left), Value::View(View::Keys, right)) => {
            left.entries.len() == right.entries.len()
                && left
                    .entries
                    .iter()
                    .all(|(key, _)| matches!(right.get(key), Ok(Some(_))))
        }
        (Value::View(View::Items, left), Value::View(View::Items, right)) => {
            equal_dicts(left, right)
        }
        (Value::Namespace(left), Value::Namespace(right)) => left == right,
        (Value::Function(left), Value::Function(right)) => left == right,
        (Value::Method(left), Value::Method(right)) => {
            left.name == right.name && same(&left.receiver, &right.receiver)
        }
        _ => match (number(left), number(right)) {
            (Some(left), Some(right)) => compare_numbers(left, right) == Some(Ordering::Equal),
            _ => same(left, right),
        },
    }
}

/// Python's `left is right`, for the types where it can be known.
pub(crate) fn same(left: &Value, right: &Value) -> bool {
    use std::rc::Rc;
    match (left, right) {
        (Value::Generator(left), Value::Generator(right)) => Rc::ptr_eq(left, right),
        (Value::Macro(left), Value::Macro(right)) => Rc::ptr_eq(left, right),
        (Value::Loop(left), Value::Loop(right)) => Rc::ptr_eq(left, right),
        (Value::Cycler(left), Value::Cycler(right)) => Rc::ptr_eq(left, right),
        (Value::Joiner(left), Value::Joiner(right)) => Rc::ptr_eq(left, right),
        (Value::List(left), Value::List(right)) | (Value::Tuple(left), Value::Tuple(right)) => {
            Rc::ptr_eq(left, right)
        }
        (Value::Dict(left), Value::Dict(right)) => Rc::ptr_eq(left, right),
        _ => false,
    }
}

fn equal_items(left: &[Value], right: &[Value]) -> bool {
    left.len() == right.len()
        && left
            .iter()
            .zip(right)
            .all(|(left, right)| equal(left, right))
}

fn equal_dicts(left: &Dict, right: &Dict) -> bool {
    left.entries.len() == right.entries.len()
        && left
            .entries
            .iter()
            .all(|(key, value)| matches!(right.get(key), Ok(Some(other)) if equal(value, other)))
}

/// A number of any of Python's three types.
#[derive(Clone, Copy)]
pub(crate) enum Number {
    Int(i128),
    Float(f64),
}

pub(crate) fn number(value: &Value) -> Option<Number> {
    match value {
        Value::Bool(value) => Some(Number::Int(i128::from(*value))),
        Value::Int(value) => Some(Number::Int(*value)),
        Value::Float(value) => Some(Number::Float(*value)),
        _ => None,
    }
}

/// `None` for NaN. Integers are compared with floats exactly.
pub(crate) fn compare_numbers(left: Number, right: Number) -> Option<Ordering> {
    match (left, right) {
        (Number::Int(left), Number::Int(right)) => Some(left.cmp(&right)),
        (Number::Float(left), Number::Float(right)) => left.partial_cmp(&right),
        (Number::Int(left), Number::Float(right)) => compare_mixed(left, right),
        (Number::Float(left), Number::Int(right)) => {
            compare_mixed(right, left).map(Ordering::reverse)
        }
    }
}

fn compare_mixed(left: i128, right: f64) -> Option<Ordering> {
    if right.is_nan() {
        return None;
    }
    if right >= 1.7e38 {
        return Some(Ordering::Less);
    }
    if right <= -1.7e38 {
        return Some(Ordering::Greater);
    }
    let whole = right.trunc() as i128;
    let by_fraction = || 0.0.partial_cmp(&right.fract()).unwrap_or(Ordering::Equal);
    Some(left.cmp(&whole).then_with(by_fraction))
}

/// How two values are ordered; `Ok(None)` for NaN.
pub(crate) fn order(left: &Value, right: &Value, operator: &str) -> Result<Option<Ordering>> {
    if let Value::Undefined(what) = left {
        return Err(Error::failed(what.as_ref()));
    }
    if let Value::Undefined(what) = right {
        return Err(Error::failed(what.as_ref()));
    }
    match (left, right) {
        (Value::Str(left), Value::Str(right)) => Ok(Some(left.as_str().cmp(right.as_str()))),
        (Value::List(left), Value::List(right)) | (Value::Tuple(left), Value::Tuple(right)) => {
            for (left, right) in left.items.iter().zip(&right.items) {
                if !equal(left, right) {
                    return order(left, right, operator);
                }
            }
            Ok(Some(left.items.len().cmp(&right.items.len())))
        }
        _ => match (number(left), number(right)) {
            (Some(left), Some(right)) => Ok(compare_numbers(left, right)),
            _ => Err(Error::failed(format!(
                "'{operator}' not supported between instances of '{}' and '{}'",
                left.type_name(),
                right.type_name()
            ))),
        },
    }
}

/// Sorts as Python does: by `<` alone, stable.
///
/// # Errors
/// Two values that have no order, and NaN, whose place depends on the algorithm.
pub(crate) fn sort_by_key(items: &mut [(Value, Value)], reverse: bool) -> Result<()> {
    let mut failed = None;
    let mut compare = |left: &Value, right: &Value| match order(left, right, "<") {
        Ok(Some(ordering)) => ordering,
        Ok(None) => {
            failed.get_or_insert_with(|| Error::unsupported("sorting NaN"));
            Ordering::Equal
        }
        Err(error) => {
            failed.get_or_insert(error);
            Ordering::Equal
        }
    };
    items.sort_by(|left, right| {
        let ordering = compare(&left.0, &right.0);
        if reverse {
            ordering.reverse()
        } else {
            ordering
        }
    });
    failed.map_or(Ok(()), Err)
}
