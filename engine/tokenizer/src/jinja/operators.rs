//! Python's arithmetic, and what it means for text and lists.

use super::ast::Binary;
use super::compare::{Number, number};
use super::error::{Error, Result};
use super::interpreter::Interpreter;
use super::numbers;
use super::printf;
use super::text::{Str, StrBuilder, escaped};
use super::value::Value;

impl Interpreter {
    pub(super) fn binary(
        &mut self,
        operator: Binary,
        left: &Value,
        right: &Value,
    ) -> Result<Value> {
        if operator == Binary::Modulo
            && let Value::Str(format) = left
        {
            return printf::format(self, format, right);
        }
        for operand in [left, right] {
            if let Value::Undefined(what) = operand {
                return Err(Error::failed(what.as_ref()));
            }
        }
        if let (Some(left), Some(right)) = (number(left), number(right)) {
            return arithmetic(operator, left, right);
        }
        match (operator, left, right) {
            (Binary::Add, Value::Str(left), Value::Str(right)) => {
                self.spend_bytes(left.len() + right.len())?;
                let markup = left.markup || right.markup;
                let mut out = StrBuilder::default();
                for part in [left, right] {
                    if markup {
                        out.push(&escaped(part));
                    } else {
                        out.push(part);
                    }
                }
                Ok(Value::Str(out.finish().with_markup(markup)))
            }
            (Binary::Add, Value::List(left), Value::List(right)) => {
                self.spend(left.items.len() + right.items.len())?;
                Value::list([&left.items[..], &right.items[..]].concat())
            }
            (Binary::Add, Value::Tuple(left), Value::Tuple(right)) => {
                self.spend(left.items.len() + right.items.len())?;
                Value::tuple([&left.items[..], &right.items[..]].concat())
            }
            (Binary::Multiply, sequence, Value::Int(_) | Value::Bool(_)) => {
                self.repeat(sequence, right)
            }
            (Binary::Multiply, Value::Int(_) | Value::Bool(_), sequence) => {
                self.repeat(sequence, left)
            }
            _ => Err(unsupported_operands(operator, left, right)),
        }
    }

    fn repeat(&mut self, sequence: &Value, count: &Value) -> Result<Value> {
        let count = match count {
            Value::Int(count) => {
                usize::try_from(*count).unwrap_or(if *count < 0 { 0 } else { usize::MAX })
            }
            count => usize::from(count.is_true()),
        };
        match sequence {
            Value::Str(text) => {
                self.spend_bytes(text.len().saturating_mul(count))?;
                let mut out = StrBuilder::default();
                if !text.is_empty() {
                    for _ in 0..count {
                        out.push(text);
                    }
                }
                Ok(Value::Str(out.finish().with_markup(text.markup)))
            }
            Value::List(items) | Value::Tuple(items) => {
                let total = items.items.len().saturating_mul(count);
                self.spend(total)?;
                let repeated = items.items.iter().cycle().take(total).cloned().collect();
                if matches!(sequence, Value::List(_)) {
                    Value::list(repeated)
                } else {
                    Value::tuple(repeated)
                }
            }
            _ => Err(unsupported_operands(
                Binary::Multiply,
                sequence,
                &Value::Int(0),
            )),
        }
    }
}

fn unsupported_operands(operator: Binary, left: &Value, right: &Value) -> Error {
    let operator = match operator {
        Binary::Add => "+",
        Binary::Subtract => "-",
        Binary::Multiply => "*",
        Binary::Divide => "/",
        Binary::FloorDivide => "//",
        Binary::Modulo => "%",
        Binary::Power => "**",
    };
    // Sets and the like that Python makes of a dict's keys.
    if matches!(left, Value::View(..)) || matches!(right, Value::View(..)) {
        return Error::unsupported(format!("`{operator}` of a dict's view"));
    }
    Error::failed(format!(
        "unsupported operand type(s) for {operator}: '{}' and '{}'",
        left.type_name(),
        right.type_name()
    ))
}

fn arithmetic(operator: Binary, left: Number, right: Number) -> Result<Value> {
    let (left, right) = match (left, right) {
        (Number::Int(left), Number::Int(right)) => return integers(operator, left, right),
        (Number::Int(left), Number::Float(right)) => (numbers::to_float(left), right),
        (Number::Float(left), Number::Int(right)) => (left, numbers::to_float(right)),
        (Number::Float(left), Number::Float(right)) => (left, right),
    };
    let result = match operator {
        Binary::Add => left + right,
        Binary::Subtract => left - right,
        Binary::Multiply => left * right,
        Binary::Divide if right == 0.0 => return Err(Error::failed("float division by zero")),
        Binary::Divide => left / right,
        Binary::FloorDivide => numbers::floor_divide_float(left, right)?.0,
        Binary::Modulo => numbers::floor_divide_float(left, right)?.1,
        Binary::Power => power(left, right)?,
    };
    Ok(Value::Float(result))
}

fn power(left: f64, right: f64) -> Result<f64> {
    if left == 0.0 && right < 0.0 {
        return Err(Error::failed("0.0 cannot be raised to a negative power"));
    }
    if left < 0.0 && left.is_finite() && right.is_finite() && right.fract() != 0.0 {
        return Err(Error::unsupported("a complex number"));
    }
    let result = left.powf(right);
    if result.is_infinite() && left.is_finite() && right.is_finite() {
        return Err(Error::failed("numerical result out of range"));
    }
    Ok(result)
}

fn integers(operator: Binary, left: i128, right: i128) -> Result<Value> {
    let checked = match operator {
        Binary::Add => left.checked_add(right),
        Binary::Subtract => left.checked_sub(right),
        Binary::Multiply => left.checked_mul(right),
        Binary::Divide => return numbers::divide(left, right).map(Value::Float),
        Binary::FloorDivide => Some(numbers::floor_divide(left, right)?.0),
        Binary::Modulo => Some(numbers::floor_divide(left, right)?.1),
        Binary::Power if right < 0 => {
            return power(numbers::to_float(left), numbers::to_float(right)).map(Value::Float);
        }
        Binary::Power => Some(numbers::power(left, right)?),
    };
    checked.map(Value::Int).ok_or_else(numbers::too_large)
}

pub(super) fn negative(value: &Value) -> Result<Value> {
    match number(value) {
        Some(Number::Int(integer)) => integer
            .checked_neg()
            .map(Value::Int)
            .ok_or_else(numbers::too_large),
        Some(Number::Float(float)) => Ok(Value::Float(-float)),
        None => Err(bad_operand('-', value)),
    }
}

pub(super) fn positive(value: &Value) -> Result<Value> {
    match number(value) {
        Some(Number::Int(integer)) => Ok(Value::Int(integer)),
        Some(Number::Float(float)) => Ok(Value::Float(float)),
        None => Err(bad_operand('+', value)),
    }
}

fn bad_operand(operator: char, value: &Value) -> Error {
    match value {
        Value::Undefined(what) => Error::failed(what.as_ref()),
        _ => Error::failed(format!(
            "bad operand type for unary {operator}: '{}'",
            value.type_name()
        )),
    }
}

/// Joins texts as Python's `str.join` does.
pub(super) fn join(separator: &Str, parts: &[Str]) -> Str {
    let mut out = StrBuilder::default();
    for (index, part) in parts.iter().enumerate() {
        if index > 0 {
            out.push(separator);
        }
        out.push(part);
    }
    out.finish()
}
