//! Calling values, walking over them, and Jinja2's global functions.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;

use super::calls::{CallArgs, integer, string};
use super::error::{Error, Kind, Result};
use super::interpreter::Interpreter;
use super::text::Str;
use super::value::{Dict, Function, Span, Value, View};
use crate::strftime::strftime;

/// The sandbox's own bound for `range`.
const RANGE_MAX: usize = 100_000;

/// Items that are left to walk over, and whether the walked value knows its length.
pub(super) type Iteration = (Rc<RefCell<VecDeque<Value>>>, bool);

impl Interpreter {
    pub(super) fn call(&mut self, callee: &Value, args: CallArgs) -> Result<Value> {
        self.spend(1)?;
        match callee {
            Value::Method(method) => self.call_method(&method.receiver, method.name, args),
            Value::Macro(value) => self.call_macro(value, args),
            Value::Function(function) => self.call_function(*function, args),
            Value::Loop(state) => self.call_loop(state, args),
            Value::Joiner(joiner) => {
                args.none("joiner")?;
                if joiner.used.replace(true) {
                    Ok(joiner.separator.clone())
                } else {
                    Ok(Value::str(""))
                }
            }
            Value::Undefined(what) => Err(Error::failed(what.as_ref())),
            _ => Err(Error::failed(format!(
                "'{}' object is not callable",
                callee.type_name()
            ))),
        }
    }

    /// The items that Python's `iter` gives, as a list. Reading a generator uses it up.
    pub(super) fn items(&mut self, value: &Value) -> Result<Vec<Value>> {
        if let Value::List(sequence) | Value::Tuple(sequence) = value {
            self.spend(sequence.items.len())?;
            return Ok(sequence.items.clone());
        }
        let (items, _) = self.iterator(value)?;
        Ok(items.take().into())
    }

    /// Python's `iter`.
    pub(super) fn iterator(&mut self, value: &Value) -> Result<Iteration> {
        let items: VecDeque<Value> = match value {
            Value::Generator(generator) => {
                self.start(generator)?;
                return Ok((generator.items.clone(), false));
            }
            Value::Undefined(_) => VecDeque::new(),
            Value::Str(text) => {
                self.spend_bytes(text.len())?;
                self.spend(text.chars().count())?;
                // Characters of a string that is marked as safe are plain strings.
                let one = |at: usize, c: char| text.slice(at..at + c.len_utf8());
                text.char_indices()
                    .map(|(at, c)| Value::Str(one(at, c).with_markup(false)))
                    .collect()
            }
            Value::List(sequence) | Value::Tuple(sequence) => {
                self.spend(sequence.items.len())?;
                sequence.items.iter().cloned().collect()
            }
            Value::Dict(dict) | Value::View(View::Keys, dict) => {
                self.spend(dict.entries.len())?;
                dict.entries.iter().map(|(key, _)| key.clone()).collect()
            }
            Value::View(View::Values, dict) => {
                self.spend(dict.entries.len())?;
                dict.entries
                    .iter()
                    .map(|(_, value)| value.clone())
                    .collect()
            }
            Value::View(View::Items, dict) => {
                self.spend(dict.entries.len())?;
                let pair =
                    |(key, value): &(Value, Value)| Value::tuple(vec![key.clone(), value.clone()]);
                dict.entries.iter().map(pair).collect::<Result<_>>()?
            }
            Value::Range(span) => {
                self.spend(span.len())?;
                (0..span.len()).map(|at| span.get(at)).collect()
            }
            Value::Loop(_) => return Err(Error::unsupported("walking over `loop`")),
            _ => {
                return Err(Error::failed(format!(
                    "'{}' object is not iterable",
                    value.type_name()
                )));
            }
        };
        Ok((Rc::new(RefCell::new(items)), true))
    }

    /// Python's `len`.
    pub(super) fn length(&mut self, value: &Value) -> Result<usize> {
        match value {
            Value::Str(text) => {
                self.spend_bytes(text.len())?;
                Ok(text.chars().count())
            }
            Value::List(sequence) | Value::Tuple(sequence) => Ok(sequence.items.len()),
            Value::Dict(dict) | Value::View(_, dict) => Ok(dict.entries.len()),
            Value::Range(span) => Ok(span.len()),
            Value::Undefined(_) => Ok(0),
            Value::Loop(state) => self.loop_length(state),
            _ => Err(Error::failed(format!(
                "object of type '{}' has no len()",
                value.type_name()
            ))),
        }
    }

    fn call_function(&mut self, function: Function, mut args: CallArgs) -> Result<Value> {
        match function {
            Function::Range => range(args),
            Function::Dict => self.dict(args).map(|dict| Value::Dict(Rc::new(dict))),
            Function::Namespace => {
                self.spend(16)?;
                let dict = self.dict(args)?;
                let mut variables = HashMap::new();
                for (key, value) in dict.entries {
                    let key = string(&key, "a name in namespace()")?;
                    variables.insert(key.shared(), value);
                }
                self.namespaces.push(variables);
                Ok(Value::Namespace(self.namespaces.len() - 1))
            }
            Function::Cycler => {
                if !args.keywords.is_empty() {
                    return Err(Error::failed("cycler() takes no keyword arguments"));
                }
                if args.positional.is_empty() {
                    return Err(Error::failed("at least one item has to be provided"));
                }
                Value::cycler(std::mem::take(&mut args.positional))
            }
            Function::Joiner => {
                let [separator] = args.bind("joiner", ["sep"], 0)?;
                Value::joiner(separator.unwrap_or_else(|| Value::str(", ")))
            }
            Function::Lipsum => Err(Error::unsupported("`lipsum`, which makes random text,")),
            Function::RaiseException => {
                let [message] = args.bind("raise_exception", ["message"], 1)?;
                let message = self.str_of(&message.unwrap_or(Value::None))?;
                Err(Error::new(Kind::Raised, message.as_str()))
            }
            Function::StrftimeNow => {
                let [format] = args.bind("strftime_now", ["format"], 1)?;
                let format = string(&format.unwrap_or(Value::None), "the format")?;
                match strftime(&format, self.now) {
                    Ok(text) => Ok(Value::str(text)),
                    Err(directive) => Err(Error::unsupported(format!(
                        "strftime_now: the directive `%{directive}`"
                    ))),
                }
            }
        }
    }

    /// Python's `dict(mapping or pairs, **more)`.
    fn dict(&mut self, mut args: CallArgs) -> Result<Dict> {
        if args.positional.len() > 1 {
            return Err(Error::failed("dict expected at most 1 argument"));
        }
        let mut dict = Dict::default();
        match args.positional.pop() {
            None => {}
            Some(Value::Dict(given)) => {
                self.spend(given.entries.len())?;
                for (key, value) in &given.entries {
                    dict.insert(key.clone(), value.clone())?;
                }
            }
            Some(pairs) => {
                for pair in self.items(&pairs)? {
                    let mut pair = self.items(&pair)?;
                    let (Some(value), Some(key), None) = (pair.pop(), pair.pop(), pair.pop())
                    else {
                        return Err(Error::failed("dict() takes pairs"));
                    };
                    dict.insert(key, value)?;
                }
            }
        }
        for (key, value) in args.keywords {
            dict.insert(Value::Str(Str::own(key)), value)?;
        }
        Ok(dict)
    }
}

fn range(args: CallArgs) -> Result<Value> {
    let [first, second, step] = args.bind("range", ["/start", "/stop", "/step"], 1)?;
    let number = |value: Option<Value>, default: i128| {
        value.map_or(Ok(default), |value| integer(&value, "range()'s argument"))
    };
    let (start, stop) = match second {
        None => (0, number(first, 0)?),
        Some(second) => (number(first, 0)?, integer(&second, "range()'s argument")?),
    };
    let step = number(step, 1)?;
    if step == 0 {
        return Err(Error::failed("range() arg 3 must not be zero"));
    }
    // The lengths are computed without overflow within these.
    let bound = 1 << 100;
    if [start, stop, step].iter().any(|value| value.abs() > bound) {
        return Err(Error::unsupported("a range of such numbers"));
    }
    let span = Span { start, stop, step };
    if span.len() > RANGE_MAX {
        return Err(Error::failed(format!(
            "range too big: the sandbox blocks ranges larger than {RANGE_MAX}"
        )));
    }
    Ok(Value::Range(span))
}
