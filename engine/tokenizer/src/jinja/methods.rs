//! The methods of Python's types, by name: which work here, which are refused.

mod collections;
mod strings;

pub(super) use strings::{split_lines, strip};

use super::calls::CallArgs;
use super::error::{Error, Result};
use super::interpreter::Interpreter;
use super::value::Value;

/// What becomes of an attribute of a type.
pub(super) enum Support {
    /// The type has it, and so has this crate, under its one name.
    Yes(&'static str),
    /// Jinja2's sandbox refuses it when it is called: it would change the value.
    Unsafe,
    /// The type has it, and it is refused by name.
    No,
    /// The type does not have it.
    Absent,
}

/// The public attributes of a type in Python 3.11, sorted by what becomes of them.
struct Attributes {
    supported: &'static [&'static str],
    changing: &'static [&'static str],
    refused: &'static [&'static str],
}

const STR: Attributes = Attributes {
    supported: &[
        "capitalize",
        "casefold",
        "center",
        "count",
        "endswith",
        "expandtabs",
        "find",
        "format",
        "format_map",
        "index",
        "isalnum",
        "isalpha",
        "isascii",
        "isdecimal",
        "isdigit",
        "isidentifier",
        "islower",
        "isnumeric",
        "isprintable",
        "isspace",
        "istitle",
        "isupper",
        "join",
        "ljust",
        "lower",
        "lstrip",
        "partition",
        "removeprefix",
        "removesuffix",
        "replace",
        "rfind",
        "rindex",
        "rjust",
        "rpartition",
        "rsplit",
        "rstrip",
        "split",
        "splitlines",
        "startswith",
        "strip",
        "swapcase",
        "title",
        "translate",
        "upper",
        "zfill",
    ],
    changing: &[],
    refused: &["encode", "maketrans"],
};
const LIST: Attributes = Attributes {
    supported: &["copy", "count", "index"],
    changing: &[
        "append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort",
    ],
    refused: &[],
};
const TUPLE: Attributes = Attributes {
    supported: &["count", "index"],
    changing: &[],
    refused: &[],
};
const DICT: Attributes = Attributes {
    supported: &["copy", "get", "items", "keys", "values"],
    changing: &["clear", "pop", "popitem", "setdefault", "update"],
    refused: &["fromkeys"],
};
const INT: Attributes = Attributes {
    supported: &["bit_count", "bit_length", "conjugate"],
    changing: &[],
    refused: &[
        "as_integer_ratio",
        "denominator",
        "from_bytes",
        "imag",
        "numerator",
        "real",
        "to_bytes",
    ],
};
const FLOAT: Attributes = Attributes {
    supported: &["conjugate", "is_integer"],
    changing: &[],
    refused: &["as_integer_ratio", "fromhex", "hex", "imag", "real"],
};
const RANGE: Attributes = Attributes {
    supported: &["count", "index"],
    changing: &[],
    refused: &["start", "step", "stop"],
};
const VIEW: Attributes = Attributes {
    supported: &[],
    changing: &[],
    refused: &["isdisjoint", "mapping"],
};
const GENERATOR: Attributes = Attributes {
    supported: &[],
    changing: &[],
    refused: &[
        "close",
        "gi_code",
        "gi_frame",
        "gi_running",
        "gi_suspended",
        "gi_yieldfrom",
        "send",
        "throw",
    ],
};
const LOOP: Attributes = Attributes {
    supported: &["changed", "cycle"],
    changing: &[],
    refused: &[],
};
const CYCLER: Attributes = Attributes {
    supported: &["next", "reset"],
    changing: &[],
    refused: &["items", "pos"],
};
/// Markup's methods that take no text which Jinja2 would escape.
const MARKUP: [&str; 14] = [
    "strip",
    "lstrip",
    "rstrip",
    "upper",
    "lower",
    "startswith",
    "endswith",
    "split",
    "rsplit",
    "splitlines",
    "find",
    "count",
    "isspace",
    "isdigit",
];

pub(super) fn support(object: &Value, name: &str) -> Support {
    let attributes = match object {
        Value::Str(text) if text.markup => {
            return match MARKUP.into_iter().find(|known| *known == name) {
                Some(known) => Support::Yes(known),
                None if known_to(&STR, name) => Support::No,
                None if matches!(name, "escape" | "striptags" | "unescape") => Support::No,
                None => Support::Absent,
            };
        }
        Value::Str(_) => &STR,
        Value::List(_) => &LIST,
        Value::Tuple(_) => &TUPLE,
        Value::Dict(_) => &DICT,
        Value::Bool(_) | Value::Int(_) => &INT,
        Value::Float(_) => &FLOAT,
        Value::Range(_) => &RANGE,
        Value::View(..) => &VIEW,
        Value::Generator(_) => &GENERATOR,
        Value::Loop(_) => &LOOP,
        Value::Cycler(_) => &CYCLER,
        // Attributes of functions say how Python made them.
        Value::Method(_) | Value::Function(_) => return Support::No,
        _ => return Support::Absent,
    };
    let find = |names: &[&'static str]| names.iter().find(|known| **known == name).copied();
    if let Some(known) = find(attributes.supported) {
        Support::Yes(known)
    } else if find(attributes.changing).is_some() {
        Support::Unsafe
    } else if find(attributes.refused).is_some() {
        Support::No
    } else {
        Support::Absent
    }
}

fn known_to(attributes: &Attributes, name: &str) -> bool {
    attributes.supported.contains(&name) || attributes.refused.contains(&name)
}

impl Interpreter {
    pub(super) fn call_method(
        &mut self,
        receiver: &Value,
        name: &'static str,
        args: CallArgs,
    ) -> Result<Value> {
        match receiver {
            Value::Str(text) => {
                self.spend_bytes(text.len())?;
                self.string_method(text, name, args)
            }
            Value::Loop(state) => self.loop_method(state, name, args),
            Value::Cycler(cycler) => {
                args.none(name)?;
                let at = cycler.position.get();
                if name == "reset" {
                    cycler.position.set(0);
                    return Ok(Value::None);
                }
                cycler.position.set((at + 1) % cycler.items.len());
                Ok(cycler.items[at].clone())
            }
            Value::Int(_) | Value::Bool(_) | Value::Float(_) => {
                args.none(name)?;
                number_method(receiver, name)
            }
            _ => self.collection_method(receiver, name, args),
        }
    }
}

fn number_method(receiver: &Value, name: &str) -> Result<Value> {
    let integer = match receiver {
        Value::Int(integer) => *integer,
        Value::Bool(value) => i128::from(*value),
        Value::Float(value) if name == "is_integer" => {
            return Ok(Value::Bool(value.is_finite() && value.fract() == 0.0));
        }
        other => return Ok(other.clone()),
    };
    let magnitude = integer.unsigned_abs();
    match name {
        "bit_length" => Ok(Value::Int(i128::from(
            u128::BITS - magnitude.leading_zeros(),
        ))),
        "bit_count" => Ok(Value::Int(i128::from(magnitude.count_ones()))),
        "conjugate" => Ok(Value::Int(integer)),
        _ => Err(Error::unsupported(format!(
            "the attribute `{name}` of an int"
        ))),
    }
}
