//! Filters of lists and dicts that give a result at once.

use crate::jinja::ast::Binary;
use crate::jinja::calls::CallArgs;
use crate::jinja::compare::{self, order};
use crate::jinja::error::{Error, Result};
use crate::jinja::generator::{Generator, Step};
use crate::jinja::interpreter::Interpreter;
use crate::jinja::operators;
use crate::jinja::text::{Str, StrBuilder};
use crate::jinja::value::Value;

impl Interpreter {
    pub(super) fn collection_filter(
        &mut self,
        name: &str,
        value: Value,
        args: CallArgs,
    ) -> Result<Value> {
        match name {
            "first" => {
                args.none(name)?;
                let (items, _) = self.iterator(&value)?;
                let first = items.borrow_mut().pop_front();
                Ok(first.unwrap_or_else(|| Value::undefined("no first item, sequence was empty")))
            }
            "last" => {
                args.none(name)?;
                if matches!(value, Value::Generator(_)) {
                    return Err(Error::failed(format!(
                        "'{}' object is not reversible",
                        value.type_name()
                    )));
                }
                let last = self.items(&value)?.pop();
                Ok(last.unwrap_or_else(|| Value::undefined("no last item, sequence was empty")))
            }
            "list" => {
                args.none(name)?;
                Value::list(self.items(&value)?)
            }
            "reverse" => {
                args.none(name)?;
                self.reverse(value)
            }
            "join" => self.join(value, args),
            "sum" => {
                let [attribute, start] = args.bind(name, ["attribute", "start"], 0)?;
                let mut total = start.unwrap_or(Value::Int(0));
                if matches!(total, Value::Str(_)) {
                    return Err(Error::failed("sum() can't sum strings"));
                }
                for item in self.items(&value)? {
                    let item = self.item_key(&item, attribute.as_ref(), None, false)?;
                    // Python adds floats with a correction for what rounding loses since
                    // 3.12, and without one before.
                    if let (Value::Float(_), Value::Float(_)) = (&total, &item) {
                        return Err(Error::unsupported("the sum of several floats"));
                    }
                    total = self.binary(Binary::Add, &total, &item)?;
                }
                Ok(total)
            }
            "min" | "max" => {
                let [case_sensitive, attribute] =
                    args.bind(name, ["case_sensitive", "attribute"], 0)?;
                let lower = !case_sensitive.is_some_and(|value| value.is_true());
                let mut best: Option<(Value, Value)> = None;
                for item in self.items(&value)? {
                    let key = self.item_key(&item, attribute.as_ref(), None, lower)?;
                    self.spend(key.weight())?;
                    let better = match &best {
                        None => true,
                        Some((known, _)) if name == "min" => {
                            order(&key, known, "<")? == Some(std::cmp::Ordering::Less)
                        }
                        Some((known, _)) => {
                            order(&key, known, ">")? == Some(std::cmp::Ordering::Greater)
                        }
                    };
                    if better {
                        best = Some((key, item));
                    }
                }
                Ok(best.map_or_else(
                    || Value::undefined("no aggregated item, sequence was empty"),
                    |(_, item)| item,
                ))
            }
            "sort" => {
                let [reverse, case_sensitive, attribute] =
                    args.bind(name, ["reverse", "case_sensitive", "attribute"], 0)?;
                let lower = !case_sensitive.is_some_and(|value| value.is_true());
                let attributes = match attribute {
                    Some(Value::Str(list)) => list
                        .split(',')
                        .map(|part| Value::str(part.to_owned()))
                        .collect(),
                    other => vec![other.unwrap_or(Value::None)],
                };
                let mut keyed = Vec::new();
                for item in self.items(&value)? {
                    let mut keys = Vec::with_capacity(attributes.len());
                    for attribute in &attributes {
                        keys.push(self.item_key(&item, Some(attribute), None, lower)?);
                    }
                    keyed.push((Value::list(keys)?, item));
                }
                self.sorted(keyed, reverse.is_some_and(|reverse| reverse.is_true()))
            }
            "dictsort" => {
                let [case_sensitive, by, reverse] =
                    args.bind(name, ["case_sensitive", "by", "reverse"], 0)?;
                let lower = !case_sensitive.is_some_and(|value| value.is_true());
                let by_key = match by {
                    None => true,
                    Some(Value::Str(by)) if by.as_str() == "key" => true,
                    Some(Value::Str(by)) if by.as_str() == "value" => false,
                    Some(_) => {
                        return Err(Error::failed(
                            "you can only sort by either \"key\" or \"value\"",
                        ));
                    }
                };
                let Value::Dict(dict) = &value else {
                    return Err(super::not_a(name, &value));
                };
                let mut keyed = Vec::new();
                for (key, value) in &dict.entries {
                    let by = if by_key { key } else { value };
                    let by = self.item_key(by, None, None, lower)?;
                    keyed.push((by, Value::tuple(vec![key.clone(), value.clone()])?));
                }
                self.sorted(keyed, reverse.is_some_and(|reverse| reverse.is_true()))
            }
            _ => self.group_by(&value, args),
        }
    }

    /// Sorts by the first of each pair and keeps the second.
    fn sorted(&mut self, mut keyed: Vec<(Value, Value)>, reverse: bool) -> Result<Value> {
        self.spend_sorting(&keyed)?;
        compare::sort_by_key(&mut keyed, reverse)?;
        Value::list(keyed.into_iter().map(|(_, item)| item).collect())
    }

    /// Each key is compared about as often as the logarithm of their number says.
    fn spend_sorting(&mut self, keyed: &[(Value, Value)]) -> Result<()> {
        let times = (usize::BITS - keyed.len().leading_zeros()) as usize;
        for (key, _) in keyed {
            self.spend(key.weight().saturating_mul(times))?;
        }
        Ok(())
    }

    fn group_by(&mut self, value: &Value, args: CallArgs) -> Result<Value> {
        let [attribute, default, case_sensitive] =
            args.bind("groupby", ["attribute", "default", "case_sensitive"], 1)?;
        let lower = !case_sensitive.is_some_and(|value| value.is_true());
        let (attribute, default) = (attribute.as_ref(), default.as_ref());
        let mut keyed = Vec::new();
        for item in self.items(value)? {
            keyed.push((self.item_key(&item, attribute, default, lower)?, item));
        }
        self.spend_sorting(&keyed)?;
        compare::sort_by_key(&mut keyed, false)?;
        let mut groups: Vec<(Value, Vec<Value>)> = Vec::new();
        for (key, item) in keyed {
            match groups.last_mut() {
                Some((known, items)) if compare::equal(known, &key) => items.push(item),
                _ => groups.push((key, vec![item])),
            }
        }
        let mut pairs = Vec::with_capacity(groups.len());
        for (key, items) in groups {
            // A group is named as its first item spells it.
            let name = match items.first().filter(|_| lower) {
                Some(first) => self.item_key(first, attribute, default, false)?,
                None => key,
            };
            pairs.push(Value::group(name, Value::list(items)?)?);
        }
        Value::list(pairs)
    }

    fn reverse(&mut self, value: Value) -> Result<Value> {
        match &value {
            Value::Str(text) => {
                self.spend_bytes(text.len())?;
                let mut out = StrBuilder::default();
                for (at, c) in text.char_indices().rev() {
                    self.spend(1)?;
                    out.push(&text.slice(at..at + c.len_utf8()));
                }
                Ok(Value::Str(out.finish().with_markup(text.markup)))
            }
            Value::Generator(_) => {
                let mut items = self.items(&value)?;
                items.reverse();
                Value::list(items)
            }
            Value::Undefined(_)
            | Value::List(_)
            | Value::Tuple(_)
            | Value::Dict(_)
            | Value::View(..)
            | Value::Range(_) => {
                Value::generator(Generator::new(Step::Reverse, value, CallArgs::default()))
            }
            _ => Err(Error::failed("argument must be iterable")),
        }
    }

    fn join(&mut self, value: Value, args: CallArgs) -> Result<Value> {
        let [separator, attribute] = args.bind("join", ["d", "attribute"], 0)?;
        let separator = separator.map_or_else(|| Ok(Str::own("")), |text| self.str_of(&text))?;
        let attribute = attribute.filter(|attribute| !matches!(attribute, Value::None));
        let mut parts = Vec::new();
        for item in self.items(&value)? {
            let item = match &attribute {
                None => item,
                attribute => self.item_key(&item, attribute.as_ref(), None, false)?,
            };
            let part = self.str_of(&item)?;
            self.spend_bytes(part.len() + separator.len())?;
            parts.push(part);
        }
        Ok(Value::Str(operators::join(&separator, &parts)))
    }
}
