//! Jinja2's filters, by name.
//!
//! Filters that give generators are in `filters/lazy`, those of text in `filters/text`,
//! those of lists and dicts in `filters/collections`, `tojson` in `json`.

mod collections;
mod lazy;
mod text;

use super::calls::{CallArgs, integer, string};
use super::compare::{Number, number};
use super::error::{Error, Result};
use super::generator::{Generator, Step};
use super::interpreter::Interpreter;
use super::json;
use super::numbers;
use super::text::Str;
use super::value::Value;

/// Every filter of Jinja2 3.1.
pub(super) const NAMES: [&str; 54] = [
    "abs",
    "attr",
    "batch",
    "capitalize",
    "center",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "filesizeformat",
    "first",
    "float",
    "forceescape",
    "format",
    "groupby",
    "indent",
    "int",
    "items",
    "join",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "pprint",
    "random",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "slice",
    "sort",
    "string",
    "striptags",
    "sum",
    "title",
    "tojson",
    "trim",
    "truncate",
    "unique",
    "upper",
    "urlencode",
    "urlize",
    "wordcount",
    "wordwrap",
    "xmlattr",
];
/// Those that are refused: random, or a text layout that no prompt needs.
pub(super) const REFUSED: [&str; 5] = ["pprint", "random", "striptags", "urlize", "wordwrap"];

impl Interpreter {
    pub(super) fn filter(&mut self, name: &str, value: Value, args: CallArgs) -> Result<Value> {
        self.spend(1)?;
        if REFUSED.contains(&name) {
            return Err(Error::unsupported(format!("the filter `{name}`")));
        }
        let lazy = match name {
            "map" => Some(Step::Map),
            "select" => Some(Step::Select),
            "reject" => Some(Step::Reject),
            "selectattr" => Some(Step::SelectAttribute),
            "rejectattr" => Some(Step::RejectAttribute),
            _ => None,
        };
        if let Some(step) = lazy {
            return Value::generator(Generator::new(step, value, args));
        }
        match name {
            "unique" => {
                args.clone()
                    .bind(name, ["case_sensitive", "attribute"], 0)?;
                Value::generator(Generator::new(Step::Unique, value, args))
            }
            "batch" => {
                args.clone().bind(name, ["linecount", "fill_with"], 1)?;
                Value::generator(Generator::new(Step::Batch, value, args))
            }
            "slice" => {
                args.clone().bind(name, ["slices", "fill_with"], 1)?;
                Value::generator(Generator::new(Step::Slice, value, args))
            }
            "items" => {
                args.clone().none(name)?;
                Value::generator(Generator::new(Step::Items, value, args))
            }
            "d" | "default" => {
                let [default, boolean] = args.bind(name, ["default_value", "boolean"], 0)?;
                let boolean = boolean.is_some_and(|boolean| boolean.is_true());
                if value.is_undefined() || boolean && !value.is_true() {
                    return Ok(default.unwrap_or_else(|| Value::str("")));
                }
                Ok(value)
            }
            "attr" => {
                let [attribute] = args.bind(name, ["name"], 1)?;
                let attribute = self.str_of(&attribute.unwrap_or(Value::None))?;
                if value.is_undefined() {
                    return Err(Error::unsupported("`attr` of an undefined value"));
                }
                let found = self.own_attribute(&value, &attribute)?;
                Ok(found.unwrap_or_else(|| {
                    Value::undefined(format!("no attribute '{}'", attribute.as_str()))
                }))
            }
            "count" | "length" => {
                args.none(name)?;
                Ok(Value::Int(self.length(&value)? as i128))
            }
            "string" => args
                .none(name)
                .and_then(|()| self.str_of(&value))
                .map(Value::Str),
            "tojson" => json::tojson(self, &value, args),
            "abs" => {
                args.none(name)?;
                match number(&value) {
                    Some(Number::Int(integer)) => integer
                        .checked_abs()
                        .map(Value::Int)
                        .ok_or_else(numbers::too_large),
                    Some(Number::Float(float)) => Ok(Value::Float(float.abs())),
                    None => Err(not_a(name, &value)),
                }
            }
            "int" => {
                let [default, base] = args.bind(name, ["default", "base"], 0)?;
                let base = base.map_or(Ok(10), |base| integer(&base, "base"))?;
                self.int_of(&value, default.unwrap_or(Value::Int(0)), base)
            }
            "float" => {
                let [default] = args.bind(name, ["default"], 0)?;
                let found = to_float(&value)?.map(Value::Float);
                Ok(found.unwrap_or_else(|| default.unwrap_or(Value::Float(0.0))))
            }
            "round" => round(&value, args),
            "filesizeformat" => file_size(&value, args).map(Value::str),
            "first" | "last" | "list" | "reverse" | "sort" | "sum" | "min" | "max" | "join"
            | "groupby" | "dictsort" => self.collection_filter(name, value, args),
            _ if NAMES.contains(&name) => self.text_filter(name, value, args),
            _ => Err(Error::failed(format!("no filter named '{name}'"))),
        }
    }

    fn int_of(&mut self, value: &Value, default: Value, base: i128) -> Result<Value> {
        let found = match value {
            Value::Str(text) => {
                self.spend_bytes(text.len())?;
                if base != 0 && !(2..=36).contains(&base) {
                    return Err(Error::unsupported(format!("the base {base}")));
                }
                match numbers::parse_int(text, base)? {
                    Some(integer) => Some(integer),
                    // `"42.7" | int` is 42.
                    None => match numbers::parse_float(text)? {
                        Some(float) if float.is_finite() => Some(numbers::truncate(float)?),
                        _ => None,
                    },
                }
            }
            Value::Undefined(what) => return Err(Error::failed(what.as_ref())),
            Value::Float(float) if float.is_infinite() => {
                return Err(Error::failed("cannot convert float infinity to integer"));
            }
            Value::Float(float) if float.is_nan() => None,
            other => match number(other) {
                Some(Number::Int(integer)) => Some(integer),
                Some(Number::Float(float)) => Some(numbers::truncate(float)?),
                None => None,
            },
        };
        Ok(found.map_or(default, Value::Int))
    }
}

fn not_a(filter: &str, value: &Value) -> Error {
    match value {
        Value::Undefined(what) => Error::failed(what.as_ref()),
        _ => Error::failed(format!(
            "the filter `{filter}` cannot take a {}",
            value.type_name()
        )),
    }
}

/// Python's `float(value)`; `None` where it fails.
fn to_float(value: &Value) -> Result<Option<f64>> {
    Ok(match value {
        Value::Str(text) => numbers::parse_float(text)?,
        Value::Undefined(what) => return Err(Error::failed(what.as_ref())),
        other => match number(other) {
            Some(Number::Int(integer)) => Some(numbers::to_float(integer)),
            Some(Number::Float(float)) => Some(float),
            None => None,
        },
    })
}

fn round(value: &Value, args: CallArgs) -> Result<Value> {
    let [precision, method] = args.bind("round", ["precision", "method"], 0)?;
    let precision = precision.map_or(Ok(0), |digits| integer(&digits, "precision"))?;
    let method = match method {
        None => Str::own("common"),
        Some(method) => string(&method, "method")?,
    };
    let found = number(value).ok_or_else(|| not_a("round", value))?;
    let up = match method.as_str() {
        "common" => {
            return match found {
                Number::Int(integer) => numbers::round_int(integer, precision).map(Value::Int),
                Number::Float(float) => numbers::round(float, precision).map(Value::Float),
            };
        }
        "ceil" => true,
        "floor" => false,
        _ => return Err(Error::failed("method must be common, ceil or floor")),
    };
    if !(0..=15).contains(&precision) {
        return Err(Error::unsupported("rounding up or down to so many digits"));
    }
    let unit = 10_i128.pow(precision as u32);
    let scaled = match found {
        Number::Int(integer) => integer.checked_mul(unit).ok_or_else(numbers::too_large)?,
        Number::Float(float) => {
            let scaled = float * unit as f64;
            numbers::truncate(if up { scaled.ceil() } else { scaled.floor() })?
        }
    };
    numbers::divide(scaled, unit).map(Value::Float)
}

fn file_size(value: &Value, args: CallArgs) -> Result<String> {
    let [binary] = args.bind("filesizeformat", ["binary"], 0)?;
    let binary = binary.is_some_and(|binary| binary.is_true());
    let bytes = to_float(value)?.ok_or_else(|| not_a("filesizeformat", value))?;
    let base: f64 = if binary { 1024.0 } else { 1000.0 };
    if bytes == 1.0 {
        return Ok("1 Byte".to_owned());
    }
    if bytes < base {
        return Ok(format!("{} Bytes", numbers::truncate(bytes)?));
    }
    let prefixes = if binary {
        ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB", "YiB"]
    } else {
        ["kB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB"]
    };
    let last = prefixes.len() - 1;
    let mut chosen = (base.powi(last as i32 + 2), prefixes[last]);
    for (index, prefix) in prefixes.into_iter().enumerate() {
        let unit = base.powi(index as i32 + 2);
        if bytes < unit {
            chosen = (unit, prefix);
            break;
        }
    }
    Ok(format!("{:.1} {}", base * bytes / chosen.0, chosen.1))
}
