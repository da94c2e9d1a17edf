//! The filters that give generators, and how their items are made.

use std::collections::HashSet;

use crate::jinja::calls::{CallArgs, integer};
use crate::jinja::error::{Error, Result};
use crate::jinja::generator::{Generator, Step};
use crate::jinja::interpreter::Interpreter;
use crate::jinja::value::Value;

impl Interpreter {
    /// Makes a generator's items, once.
    pub(in crate::jinja) fn start(&mut self, generator: &Generator) -> Result<()> {
        if generator.started.replace(true) {
            return Ok(());
        }
        let made = self.deeper(|interpreter| interpreter.make(generator))?;
        self.spend(made.len())?;
        generator.items.replace(made.into());
        Ok(())
    }

    fn make(&mut self, generator: &Generator) -> Result<Vec<Value>> {
        let source = &generator.source;
        let args = generator.arguments.clone();
        match generator.step {
            Step::Map => self.map(source, args),
            Step::Select => self.choose(source, args, false, true),
            Step::Reject => self.choose(source, args, false, false),
            Step::SelectAttribute => self.choose(source, args, true, true),
            Step::RejectAttribute => self.choose(source, args, true, false),
            Step::Unique => {
                let [case_sensitive, attribute] =
                    args.bind("unique", ["case_sensitive", "attribute"], 0)?;
                let lower = !case_sensitive.is_some_and(|value| value.is_true());
                let mut seen = HashSet::new();
                let mut kept = Vec::new();
                for item in self.items(source)? {
                    let key = self.item_key(&item, attribute.as_ref(), None, lower)?;
                    if seen.insert(key.key()?) {
                        kept.push(item);
                    }
                }
                Ok(kept)
            }
            Step::Batch => {
                let [count, fill] = args.bind("batch", ["linecount", "fill_with"], 1)?;
                let count = integer(&count.unwrap_or(Value::None), "linecount")?;
                let items = self.items(source)?;
                let Ok(count @ 1..) = usize::try_from(count) else {
                    return Err(Error::unsupported("a batch of no items"));
                };
                let mut batches = Vec::new();
                for chunk in items.chunks(count) {
                    let mut chunk = chunk.to_vec();
                    if let Some(fill) = fill.as_ref().filter(|fill| !matches!(fill, Value::None)) {
                        self.spend(count - chunk.len())?;
                        chunk.resize(count, fill.clone());
                    }
                    batches.push(Value::list(chunk)?);
                }
                Ok(batches)
            }
            Step::Slice => {
                let [count, fill] = args.bind("slice", ["slices", "fill_with"], 1)?;
                let count = integer(&count.unwrap_or(Value::None), "slices")?;
                let items = self.items(source)?;
                if count == 0 {
                    return Err(Error::failed("integer division or modulo by zero"));
                }
                let count = usize::try_from(count).unwrap_or(0);
                self.spend(count)?;
                let fill = fill.filter(|fill| !matches!(fill, Value::None));
                let (each, longer) = (items.len() / count.max(1), items.len() % count.max(1));
                let mut slices = Vec::new();
                let mut from = 0;
                for index in 0..count {
                    let to = from + each + usize::from(index < longer);
                    let mut slice = items[from..to].to_vec();
                    slice.extend(fill.clone().filter(|_| index >= longer));
                    slices.push(Value::list(slice)?);
                    from = to;
                }
                Ok(slices)
            }
            Step::Items => match source {
                Value::Undefined(_) => Ok(Vec::new()),
                Value::Dict(dict) => {
                    let pair = |(key, value): &(Value, Value)| {
                        Value::tuple(vec![key.clone(), value.clone()])
                    };
                    dict.entries.iter().map(pair).collect()
                }
                _ => Err(Error::failed("can only get item pairs from a mapping")),
            },
            Step::Reverse => {
                let mut items = self.items(source)?;
                items.reverse();
                Ok(items)
            }
        }
    }

    fn map(&mut self, source: &Value, mut args: CallArgs) -> Result<Vec<Value>> {
        if !source.is_true() {
            return Ok(Vec::new());
        }
        if args.positional.is_empty()
            && let Some(attribute) = args.take("attribute")
        {
            let default = args.take("default");
            args.none("map")?;
            let items = self.items(source)?;
            return items
                .iter()
                .map(|item| self.item_key(item, Some(&attribute), default.as_ref(), false))
                .collect();
        }
        if args.positional.is_empty() {
            return Err(Error::failed("map requires a filter argument"));
        }
        let name = args.positional.remove(0);
        let Value::Str(name) = name else {
            return Err(Error::failed("map requires the name of a filter"));
        };
        let items = self.items(source)?;
        items
            .into_iter()
            .map(|item| self.filter(&name, item, args.clone()))
            .collect()
    }

    fn choose(
        &mut self,
        source: &Value,
        mut args: CallArgs,
        by_attribute: bool,
        wanted: bool,
    ) -> Result<Vec<Value>> {
        if !source.is_true() {
            return Ok(Vec::new());
        }
        let mut attribute = None;
        if by_attribute {
            if args.positional.is_empty() {
                return Err(Error::failed("missing parameter for attribute name"));
            }
            attribute = Some(args.positional.remove(0));
        }
        let test = match args.positional.is_empty() {
            true => None,
            false => Some(self.str_of(&args.positional.remove(0))?),
        };
        let mut kept = Vec::new();
        for item in self.items(source)? {
            let tested = self.item_key(&item, attribute.as_ref(), None, false)?;
            let holds = match &test {
                None => tested.is_true(),
                Some(test) => self.test(test, &tested, args.clone())?,
            };
            if holds == wanted {
                kept.push(item);
            }
        }
        Ok(kept)
    }

    /// What a filter's `attribute` picks from an item: `"a.b"`, `0`, or the item itself.
    pub(super) fn item_key(
        &mut self,
        item: &Value,
        attribute: Option<&Value>,
        default: Option<&Value>,
        lower: bool,
    ) -> Result<Value> {
        let mut value = item.clone();
        let parts = match attribute {
            None | Some(Value::None) => Vec::new(),
            Some(Value::Str(path)) => path.split('.').map(part).collect::<Result<_>>()?,
            Some(other) => vec![other.clone()],
        };
        for part in parts {
            self.spend(1)?;
            value = self.item(&value, &part)?;
            if let Some(default) = default.filter(|default| !matches!(default, Value::None))
                && value.is_undefined()
            {
                value = default.clone();
            }
        }
        if lower && let Value::Str(text) = &value {
            self.spend_bytes(text.len())?;
            return Ok(Value::str(text.to_lowercase()));
        }
        Ok(value)
    }
}

/// One part of an attribute's path.
fn part(text: &str) -> Result<Value> {
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        let index = text
            .parse()
            .map_err(|_| Error::unsupported("such a large index"))?;
        return Ok(Value::Int(index));
    }
    Ok(Value::str(text))
}
