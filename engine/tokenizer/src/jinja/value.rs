//! Values of a template, with Python's types.
//!
//! Values are immutable, as Jinja2's sandbox has them, so they hold no cycles. Each
//! container knows how deep it is nested; deeper than [`DEPTH_MAX`] is refused, which
//! bounds the stack that printing, comparing and dropping need. It knows its weight too:
//! what walking it whole costs, although parts may be shared (`[x, x]` of `[y, y]` …).

use std::cell::Cell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use super::error::{Error, Result};
use super::generator::Generator;
use super::loops::LoopState;
use super::macros::MacroValue;
use super::text::Str;

/// Clients' JSON is at most 128 levels deep.
pub(crate) const DEPTH_MAX: u16 = 256;
/// Keys are copied; real ones are names.
const KEY_WEIGHT_MAX: usize = 1_000;

#[derive(Clone)]
pub(crate) enum Value {
    /// What it is the absence of, for the error message.
    Undefined(Rc<str>),
    None,
    Bool(bool),
    /// Python's integers have no bound; results beyond 128 bits are refused.
    Int(i128),
    Float(f64),
    Str(Str),
    List(Rc<Sequence>),
    Tuple(Rc<Sequence>),
    Dict(Rc<Dict>),
    Range(Span),
    View(View, Rc<Dict>),
    Generator(Rc<Generator>),
    Method(Rc<Method>),
    Function(Function),
    Macro(Rc<MacroValue>),
    Loop(Rc<LoopState>),
    /// An index into the interpreter's namespaces.
    Namespace(usize),
    Cycler(Rc<Cycler>),
    Joiner(Rc<Joiner>),
}

/// A list or a tuple.
pub(crate) struct Sequence {
    pub(crate) items: Vec<Value>,
    depth: u16,
    weight: usize,
    /// `groupby`'s pairs have names.
    pub(crate) is_group: bool,
}

/// Python's `range`.
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct Span {
    pub(crate) start: i128,
    pub(crate) stop: i128,
    pub(crate) step: i128,
}

#[derive(Clone, Copy, PartialEq)]
pub(crate) enum View {
    Keys,
    Values,
    Items,
}

pub(crate) struct Method {
    pub(crate) receiver: Value,
    pub(crate) name: &'static str,
}

#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Function {
    Range,
    Dict,
    Namespace,
    Cycler,
    Joiner,
    Lipsum,
    RaiseException,
    StrftimeNow,
}

pub(crate) struct Cycler {
    pub(crate) items: Vec<Value>,
    pub(crate) position: Cell<usize>,
}

pub(crate) struct Joiner {
    pub(crate) separator: Value,
    pub(crate) used: Cell<bool>,
}

/// What a dict looks keys up by. Equal numbers of different types are one key.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) enum Key {
    Undefined,
    None,
    Int(i128),
    Float(u64),
    Str(Arc<str>),
    Tuple(Vec<Key>),
}

/// A dict in the order of insertion.
#[derive(Default)]
pub(crate) struct Dict {
    pub(crate) entries: Vec<(Value, Value)>,
    index: HashMap<Key, usize>,
    depth: u16,
    weight: usize,
}

impl Dict {
    pub(crate) fn get(&self, key: &Value) -> Result<Option<&Value>> {
        Ok(self.index.get(&key.key()?).map(|&at| &self.entries[at].1))
    }

    pub(crate) fn get_str(&self, key: &str) -> Option<&Value> {
        // The map's keys own their text; an `Arc` per look-up is what a borrow costs.
        let at = self.index.get(&Key::Str(key.into()))?;
        Some(&self.entries[*at].1)
    }

    pub(crate) fn insert(&mut self, key: Value, value: Value) -> Result<()> {
        let found = key.key()?;
        self.depth = self.depth.max(nested(&key)?).max(nested(&value)?);
        let more = key.weight().saturating_add(value.weight());
        self.weight = self.weight.saturating_add(more);
        match self.index.get(&found) {
            Some(&at) => self.entries[at].1 = value,
            None => {
                self.index.insert(found, self.entries.len());
                self.entries.push((key, value));
            }
        }
        Ok(())
    }

    pub(crate) fn from_pairs(pairs: impl IntoIterator<Item = (Value, Value)>) -> Result<Self> {
        let mut dict = Self::default();
        for (key, value) in pairs {
            dict.insert(key, value)?;
        }
        Ok(dict)
    }
}

impl Span {
    pub(crate) fn len(&self) -> usize {
        let (low, high, step) = if self.step > 0 {
            (self.start, self.stop, self.step)
        } else {
            (self.stop, self.start, -self.step)
        };
        if low >= high {
            return 0;
        }
        usize::try_from((high - low - 1) / step + 1).unwrap_or(usize::MAX)
    }

    pub(crate) fn get(&self, index: usize) -> Value {
        Value::Int(self.start + self.step * index as i128)
    }
}

/// The depth of a container around `value`.
fn nested(value: &Value) -> Result<u16> {
    let depth = value.depth() + 1;
    if depth > DEPTH_MAX {
        return Err(too_deep());
    }
    Ok(depth)
}

fn too_deep() -> Error {
    Error::limit(format!(
        "a value is nested more than {DEPTH_MAX} levels deep"
    ))
}

impl Value {
    pub(crate) fn undefined(what: impl Into<Rc<str>>) -> Self {
        Self::Undefined(what.into())
    }

    pub(crate) fn str(text: impl Into<Arc<str>>) -> Self {
        Self::Str(Str::own(text))
    }

    pub(crate) fn list(items: Vec<Self>) -> Result<Self> {
        Ok(Self::List(Rc::new(sequence(items)?)))
    }

    pub(crate) fn tuple(items: Vec<Self>) -> Result<Self> {
        Ok(Self::Tuple(Rc::new(sequence(items)?)))
    }

    /// A pair of `groupby`.
    pub(crate) fn group(grouper: Self, items: Self) -> Result<Self> {
        let mut pair = sequence(vec![grouper, items])?;
        pair.is_group = true;
        Ok(Self::Tuple(Rc::new(pair)))
    }

    pub(crate) fn generator(generator: Generator) -> Result<Self> {
        if generator.depth > DEPTH_MAX {
            return Err(too_deep());
        }
        Ok(Self::Generator(Rc::new(generator)))
    }

    pub(crate) fn method(receiver: Self, name: &'static str) -> Result<Self> {
        nested(&receiver)?;
        Ok(Self::Method(Rc::new(Method { receiver, name })))
    }

    pub(crate) fn cycler(items: Vec<Self>) -> Result<Self> {
        for item in &items {
            nested(item)?;
        }
        Ok(Self::Cycler(Rc::new(Cycler {
            items,
            position: Cell::new(0),
        })))
    }

    pub(crate) fn joiner(separator: Self) -> Result<Self> {
        nested(&separator)?;
        Ok(Self::Joiner(Rc::new(Joiner {
            separator,
            used: Cell::new(false),
        })))
    }

    pub(crate) fn depth(&self) -> u16 {
        match self {
            Self::List(sequence) | Self::Tuple(sequence) => sequence.depth,
            Self::Dict(dict) | Self::View(_, dict) => dict.depth,
            Self::Generator(generator) => generator.depth,
            Self::Method(method) => method.receiver.depth() + 1,
            Self::Cycler(cycler) => {
                let depths = cycler.items.iter().map(Self::depth);
                depths.max().unwrap_or(0) + 1
            }
            Self::Joiner(joiner) => joiner.separator.depth() + 1,
            _ => 0,
        }
    }

    /// What walking the whole value costs, in units of work.
    pub(crate) fn weight(&self) -> usize {
        match self {
            Self::Str(text) => 1 + text.len() / 64,
            Self::List(sequence) | Self::Tuple(sequence) => sequence.weight,
            Self::Dict(dict) | Self::View(_, dict) => dict.weight.saturating_add(1),
            _ => 1,
        }
    }

    /// Python's name of the type, for messages.
    pub(crate) fn type_name(&self) -> &'static str {
        match self {
            Self::Undefined(_) => "Undefined",
            Self::None => "NoneType",
            Self::Bool(_) => "bool",
            Self::Int(_) => "int",
            Self::Float(_) => "float",
            Self::Str(_) => "str",
            Self::List(_) => "list",
            Self::Tuple(_) => "tuple",
            Self::Dict(_) => "dict",
            Self::Range(_) => "range",
            Self::View(View::Keys, _) => "dict_keys",
            Self::View(View::Values, _) => "dict_values",
            Self::View(View::Items, _) => "dict_items",
            Self::Generator(_) => "generator",
            Self::Method(_) => "method",
            Self::Function(_) => "function",
            Self::Macro(_) => "Macro",
            Self::Loop(_) => "LoopContext",
            Self::Namespace(_) => "Namespace",
            Self::Cycler(_) => "Cycler",
            Self::Joiner(_) => "Joiner",
        }
    }

    pub(crate) fn is_undefined(&self) -> bool {
        matches!(self, Self::Undefined(_))
    }

    /// Python's `bool(value)`. A generator is true, whatever it yields.
    pub(crate) fn is_true(&self) -> bool {
        match self {
            Self::Undefined(_) | Self::None => false,
            Self::Bool(value) => *value,
            Self::Int(value) => *value != 0,
            Self::Float(value) => *value != 0.0,
            Self::Str(text) => !text.is_empty(),
            Self::List(sequence) | Self::Tuple(sequence) => !sequence.items.is_empty(),
            Self::Dict(dict) | Self::View(_, dict) => !dict.entries.is_empty(),
            Self::Range(span) => span.len() > 0,
            // A loop has a length too, which is at least one inside its body.
            _ => true,
        }
    }

    /// Python's `hash`, as a key.
    pub(crate) fn key(&self) -> Result<Key> {
        Ok(match self {
            Self::Undefined(_) => Key::Undefined,
            Self::None => Key::None,
            Self::Bool(value) => Key::Int(i128::from(*value)),
            Self::Int(value) => Key::Int(*value),
            Self::Float(value) => {
                let whole = *value as i128;
                if value.is_nan() {
                    return Err(Error::unsupported("NaN as a key of a dict"));
                } else if whole as f64 == *value && value.abs() < 1e38 {
                    Key::Int(whole)
                } else {
                    Key::Float(value.to_bits())
                }
            }
            Self::Str(text) => Key::Str(text.shared()),
            Self::Tuple(sequence) if sequence.weight > KEY_WEIGHT_MAX => {
                return Err(Error::unsupported("such a large tuple as a key"));
            }
            Self::Tuple(sequence) => {
                let keys: Result<_> = sequence.items.iter().map(Self::key).collect();
                Key::Tuple(keys?)
            }
            Self::List(_) | Self::Dict(_) | Self::View(View::Keys | View::Items, _) => {
                return Err(Error::failed(format!(
                    "unhashable type: '{}'",
                    self.type_name()
                )));
            }
            _ => {
                return Err(Error::unsupported(format!(
                    "a {} as a key of a dict",
                    self.type_name()
                )));
            }
        })
    }
}

fn sequence(items: Vec<Value>) -> Result<Sequence> {
    let mut depth = 1;
    let mut weight: usize = 1;
    for item in &items {
        depth = depth.max(nested(item)?);
        weight = weight.saturating_add(item.weight());
    }
    Ok(Sequence {
        items,
        depth,
        weight,
        is_group: false,
    })
}
