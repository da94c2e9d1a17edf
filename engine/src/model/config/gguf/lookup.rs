//! Looking metadata up below the architecture's name, with errors that name the key.

use crate::model::error::Error;
use crate::model::gguf::{Gguf, Value};

/// Looks metadata up below the architecture's name.
pub(super) struct Keys<'g, 'a> {
    pub gguf: &'g Gguf<'a>,
    pub architecture: &'a str,
    /// Layers of the model, once they are known: the length of a list with a value for each.
    pub layers: Option<usize>,
}

impl Keys<'_, '_> {
    pub fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    pub fn error(&self, name: &str, message: String) -> Error {
        Error::config(self.gguf.path(), self.key(name), message)
    }

    pub fn unsupported(&self, name: &str, message: String) -> Error {
        Error::unsupported(self.gguf.path(), self.key(name), message)
    }

    pub fn unsigned(&self, name: &str) -> Result<Option<u64>, Error> {
        self.gguf.unsigned(&self.key(name))
    }

    pub fn float(&self, name: &str) -> Result<Option<f64>, Error> {
        self.gguf.float(&self.key(name))
    }

    /// A cap of 0 means none, as converters write it.
    pub fn soft_cap(&self, name: &str) -> Result<Option<f32>, Error> {
        Ok(self
            .float(name)?
            .filter(|cap| *cap > 0.0)
            .map(|cap| cap as f32))
    }

    /// A size, or a list of one equal size per layer.
    pub fn optional_size(&self, name: &str) -> Result<Option<usize>, Error> {
        if let Some(Value::Array(list)) = self.gguf.get(&self.key(name)) {
            return self.equal_sizes(name, list.len()).map(Some);
        }
        match self.unsigned(name)? {
            None => Ok(None),
            Some(value) if (1..=u64::from(u32::MAX)).contains(&value) => Ok(Some(value as usize)),
            Some(value) => Err(self.error(name, format!("{value} is not in 1..2^32"))),
        }
    }

    /// The size that all layers have.
    fn equal_sizes(&self, name: &str, entries: usize) -> Result<usize, Error> {
        match self.layers {
            Some(layers) if entries == layers => {}
            Some(layers) => {
                let message = format!("has {entries} entries for {layers} layers");
                return Err(self.error(name, message));
            }
            None => return Err(self.error(name, "is a list; it must be one number".to_owned())),
        }
        let sizes = self.gguf.numbers(&self.key(name))?.unwrap_or_default();
        let first = sizes.first().copied().unwrap_or_default();
        if let Some(layer) = sizes.iter().position(|size| *size != first) {
            let message = format!(
                "is {first} in layer 0 and {} in layer {layer}; all layers must be alike",
                sizes[layer]
            );
            return Err(self.unsupported(name, message));
        }
        if first.fract() != 0.0 || !(1.0..=f64::from(u32::MAX)).contains(&first) {
            return Err(self.error(name, format!("{first} is not in 1..2^32")));
        }
        Ok(first as usize)
    }

    pub fn size_or(&self, name: &str, default: usize) -> Result<usize, Error> {
        Ok(self.optional_size(name)?.unwrap_or(default))
    }

    pub fn size(&self, name: &str) -> Result<usize, Error> {
        self.optional_size(name)?
            .ok_or_else(|| self.error(name, "is missing".to_owned()))
    }
}
