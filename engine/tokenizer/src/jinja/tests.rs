//! Jinja2's tests: what stands after `is`.

use super::ast::Comparison;
use super::calls::CallArgs;
use super::compare::{self, Number, number};
use super::error::{Error, Result};
use super::filters;
use super::interpreter::Interpreter;
use super::numbers;
use super::value::Value;

/// Every test of Jinja2 3.1.
pub(super) const NAMES: [&str; 39] = [
    "!=",
    "<",
    "<=",
    "==",
    ">",
    ">=",
    "boolean",
    "callable",
    "defined",
    "divisibleby",
    "eq",
    "equalto",
    "escaped",
    "even",
    "false",
    "filter",
    "float",
    "ge",
    "greaterthan",
    "gt",
    "in",
    "integer",
    "iterable",
    "le",
    "lessthan",
    "lower",
    "lt",
    "mapping",
    "ne",
    "none",
    "number",
    "odd",
    "sameas",
    "sequence",
    "string",
    "test",
    "true",
    "undefined",
    "upper",
];

impl Interpreter {
    pub(super) fn test(&mut self, name: &str, value: &Value, args: CallArgs) -> Result<bool> {
        self.spend(1)?;
        let comparison = match name {
            "==" | "eq" | "equalto" => Some(Comparison::Equal),
            "!=" | "ne" => Some(Comparison::NotEqual),
            ">" | "gt" | "greaterthan" => Some(Comparison::Greater),
            ">=" | "ge" => Some(Comparison::GreaterEqual),
            "<" | "lt" | "lessthan" => Some(Comparison::Less),
            "<=" | "le" => Some(Comparison::LessEqual),
            "in" => Some(Comparison::In),
            _ => None,
        };
        if let Some(comparison) = comparison {
            let parameter = if name == "in" { "seq" } else { "/other" };
            let [other] = args.bind(name, [parameter], 1)?;
            return self.compare(comparison, value, &other.unwrap_or(Value::None));
        }
        match name {
            "divisibleby" => {
                let [divisor] = args.bind(name, ["num"], 1)?;
                let rest = remainder(value, &divisor.unwrap_or(Value::None))?;
                return Ok(rest == 0.0);
            }
            "sameas" => {
                let [other] = args.bind(name, ["other"], 1)?;
                self.spend(value.weight())?;
                return same(value, &other.unwrap_or(Value::None));
            }
            _ => args.none(name)?,
        }
        Ok(match name {
            "odd" => remainder(value, &Value::Int(2))? == 1.0,
            "even" => remainder(value, &Value::Int(2))? == 0.0,
            "defined" => !value.is_undefined(),
            "undefined" => value.is_undefined(),
            "none" => matches!(value, Value::None),
            "boolean" => matches!(value, Value::Bool(_)),
            "true" => matches!(value, Value::Bool(true)),
            "false" => matches!(value, Value::Bool(false)),
            "integer" => matches!(value, Value::Int(_)),
            "float" => matches!(value, Value::Float(_)),
            "number" => matches!(value, Value::Bool(_) | Value::Int(_) | Value::Float(_)),
            "string" => matches!(value, Value::Str(_)),
            "mapping" => matches!(value, Value::Dict(_)),
            "escaped" => matches!(value, Value::Str(text) if text.markup),
            "callable" => matches!(
                value,
                Value::Method(_)
                    | Value::Function(_)
                    | Value::Macro(_)
                    | Value::Joiner(_)
                    | Value::Loop(_)
                    | Value::Undefined(_)
            ),
            "iterable" => match value {
                Value::Generator(_) | Value::View(..) | Value::Range(_) | Value::Undefined(_) => {
                    true
                }
                Value::Loop(_) => true,
                other => is_sequence(other),
            },
            "sequence" => match value {
                // An undefined value has a length, and no items to ask for.
                Value::Undefined(_) | Value::Range(_) => true,
                other => is_sequence(other),
            },
            "lower" | "upper" => {
                let text = self.str_of(value)?;
                let lower = text.chars().any(|c| c.is_lowercase());
                let upper = text.chars().any(|c| c.is_uppercase());
                let title = text.chars().any(super::characters::is_title);
                !title
                    && if name == "lower" {
                        lower && !upper
                    } else {
                        upper && !lower
                    }
            }
            "filter" => match value {
                Value::Str(text) => filters::NAMES.contains(&text.as_str()),
                _ => false,
            },
            "test" => match value {
                Value::Str(text) => NAMES.contains(&text.as_str()),
                _ => false,
            },
            _ => return Err(Error::failed(format!("no test named '{name}'"))),
        })
    }
}

/// What has `len` and `[]` in Python.
fn is_sequence(value: &Value) -> bool {
    matches!(
        value,
        Value::Str(_) | Value::List(_) | Value::Tuple(_) | Value::Dict(_)
    )
}

fn remainder(value: &Value, divisor: &Value) -> Result<f64> {
    for operand in [value, divisor] {
        if let Value::Undefined(what) = operand {
            return Err(Error::failed(what.as_ref()));
        }
    }
    match (number(value), number(divisor)) {
        (Some(Number::Int(value)), Some(Number::Int(divisor))) => {
            Ok(numbers::to_float(numbers::floor_divide(value, divisor)?.1))
        }
        (Some(value), Some(divisor)) => {
            let float = |number| match number {
                Number::Int(integer) => numbers::to_float(integer),
                Number::Float(float) => float,
            };
            Ok(numbers::floor_divide_float(float(value), float(divisor))?.1)
        }
        _ if matches!(value, Value::Str(_)) => Err(Error::unsupported("`%` in a test of text")),
        _ => Err(Error::failed(format!(
            "unsupported operand type(s) for %: '{}' and '{}'",
            value.type_name(),
            divisor.type_name()
        ))),
    }
}

/// Python's `is`. Whether two numbers or texts are one object is an accident there.
fn same(left: &Value, right: &Value) -> Result<bool> {
    match (left, right) {
        (Value::None, Value::None) => Ok(true),
        (Value::Bool(left), Value::Bool(right)) => Ok(left == right),
        (Value::Int(_), Value::Int(_))
        | (Value::Float(_), Value::Float(_))
        | (Value::Str(_), Value::Str(_))
        | (Value::Tuple(_), Value::Tuple(_))
        | (Value::Undefined(_), Value::Undefined(_)) => {
            if compare::equal(left, right) {
                return Err(Error::unsupported(
                    "`sameas` of equal numbers, texts or tuples",
                ));
            }
            Ok(false)
        }
        (Value::Function(left), Value::Function(right)) => Ok(left == right),
        (Value::Namespace(left), Value::Namespace(right)) => Ok(left == right),
        _ => Ok(compare::same(left, right)),
    }
}
