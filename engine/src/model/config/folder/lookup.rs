//! Looking values up in one object of a `config.json`, with errors that name the key.

use std::path::Path;

use serde_json::{Map, Value};

use crate::model::error::Error;

/// Looks keys of one JSON object up; `null` counts as missing.
pub(super) struct Keys<'a> {
    pub path: &'a Path,
    pub json: &'a Map<String, Value>,
    /// What stands before a key in errors.
    pub prefix: &'static str,
}

impl<'a> Keys<'a> {
    /// The keys of an object inside this one.
    pub fn below(&self, json: &'a Map<String, Value>, prefix: &'static str) -> Keys<'a> {
        Keys {
            path: self.path,
            json,
            prefix,
        }
    }

    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.json.get(key).filter(|value| !value.is_null())
    }

    pub fn error(&self, key: &str, message: String) -> Error {
        Error::config(self.path, format!("{}{key}", self.prefix), message)
    }

    pub fn unsupported(&self, key: &str, message: impl Into<String>) -> Error {
        Error::unsupported(self.path, format!("{}{key}", self.prefix), message)
    }

    fn typed<T>(
        &self,
        key: &str,
        wanted: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => match read(value) {
                Some(value) => Ok(Some(value)),
                None => Err(self.error(key, format!("must be {wanted}"))),
            },
        }
    }

    pub fn boolean(&self, key: &str) -> Result<Option<bool>, Error> {
        self.typed(key, "true or false", Value::as_bool)
    }

    pub fn object(&self, key: &str) -> Result<Option<&'a Map<String, Value>>, Error> {
        self.typed(key, "an object", Value::as_object)
    }

    pub fn float(&self, key: &str) -> Result<Option<f64>, Error> {
        self.typed(key, "a finite number", |value| {
            value.as_f64().filter(|v| v.is_finite())
        })
    }

    /// A number above 0 that must be there.
    pub fn positive(&self, key: &str) -> Result<f64, Error> {
        match self.float(key)? {
            Some(value) if value > 0.0 => Ok(value),
            Some(value) => Err(self.error(key, format!("{value} is not above 0"))),
            None => Err(self.error(key, "is missing".to_owned())),
        }
    }

    /// A number of 1 or more that must be there.
    pub fn at_least_one(&self, key: &str) -> Result<f64, Error> {
        match self.positive(key)? {
            value if value >= 1.0 => Ok(value),
            value => Err(self.error(key, format!("{value} is below 1"))),
        }
    }

    /// A list of numbers that must be there.
    pub fn floats(&self, key: &str) -> Result<Vec<f32>, Error> {
        let numbers = |value: &Value| {
            let list = value.as_array()?.iter();
            list.map(|number| number.as_f64().map(|n| n as f32))
                .collect()
        };
        self.typed(key, "a list of numbers", numbers)?
            .ok_or_else(|| self.error(key, "is missing".to_owned()))
    }

    /// A cap of 0 means none.
    pub fn soft_cap(&self, key: &str) -> Result<Option<f32>, Error> {
        Ok(self
            .float(key)?
            .filter(|cap| *cap > 0.0)
            .map(|cap| cap as f32))
    }

    pub fn whole(&self, key: &str) -> Result<Option<u64>, Error> {
        self.typed(key, "a whole number", Value::as_u64)
    }

    pub fn optional_size(&self, key: &str) -> Result<Option<usize>, Error> {
        match self.whole(key)? {
            None => Ok(None),
            Some(value) if (1..=u64::from(u32::MAX)).contains(&value) => Ok(Some(value as usize)),
            Some(value) => Err(self.error(key, format!("{value} is not in 1..2^32"))),
        }
    }

    pub fn size(&self, key: &str) -> Result<usize, Error> {
        self.optional_size(key)?
            .ok_or_else(|| self.error(key, "is missing".to_owned()))
    }
}
