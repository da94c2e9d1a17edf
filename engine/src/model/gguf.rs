//! Reads the header of a GGUF file: metadata, tensor infos, and where the data lies.
//! A model may be split into several such files (`shards`).
//!
//! The file is untrusted. Every count and length is compared with the bytes that
//! are left before anything is allocated for it, so the memory taken is bounded by
//! the file's own size; every error names the field and its byte offset. Strings
//! stay slices of the mapped file and arrays stay byte ranges until asked for.
//!
//! Not here: what the metadata means (`family`, `tokenizer`).
//!
//! ```text
//! magic "GGUF" | version u32 | tensor count u64 | metadata count u64
//! metadata: key string, type u32, value            (string = length u64, bytes)
//! tensor infos: name string, n dims u32, dims u64.., type u32, offset u64
//! padding to general.alignment, then the data the offsets are relative to
//! ```
//!
//! *Source*: ggml `docs/gguf.md`.

mod reader;
mod shards;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use reader::{ENTRY_BYTES_MIN, Element, Reader, TENSOR_BYTES_MIN};
pub(crate) use shards::GgufFiles;

use super::error::Error;
use super::tensors::Tensor;

/// Larger alignments are nonsense; ggml's default is 32.
const ALIGNMENT_MAX: u64 = 1 << 20;
const ALIGNMENT_DEFAULT: u64 = 32;

/// A metadata value. Strings and arrays point into the file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Value<'a> {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    String(&'a str),
    Array(Array<'a>),
}

impl Value<'_> {
    /// Whether two files say the same; an array may lie elsewhere.
    fn same(&self, other: &Value<'_>) -> bool {
        match (self, other) {
            (Value::Array(a), Value::Array(b)) => {
                (a.element, a.count, a.bytes) == (b.element, b.count, b.bytes)
            }
            _ => self == other,
        }
    }
}

/// An array of scalars or strings, checked to be whole.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Array<'a> {
    element: Element,
    count: usize,
    bytes: &'a [u8],
    /// Byte offset of `bytes` in the file.
    offset: u64,
}

impl Array<'_> {
    pub(crate) fn len(&self) -> usize {
        self.count
    }
}

/// The header of a GGUF file.
#[derive(Debug)]
pub(crate) struct Gguf<'a> {
    path: &'a Path,
    metadata: HashMap<&'a str, Value<'a>>,
    tensors: BTreeMap<String, Tensor<'a>>,
}

impl<'a> Gguf<'a> {
    /// Reads the header of the file `bytes`.
    ///
    /// # Errors
    /// [`Error::Malformed`] naming field and offset, [`Error::Unsupported`] for
    /// a version or weight format this build does not read.
    pub(crate) fn parse(path: &'a Path, bytes: &'a [u8]) -> Result<Self, Error> {
        let mut reader = Reader { path, bytes, at: 0 };
        let magic = reader.take(4, "magic")?;
        if magic != b"GGUF" {
            let message = if magic == b"FUGG" {
                "is `FUGG`: a big-endian file".to_owned()
            } else {
                format!("is `{}`, not `GGUF`", magic.escape_ascii())
            };
            return Err(Error::malformed(path, "magic", 0, message));
        }
        let version = reader.u32("version")?;
        if !matches!(version, 2 | 3) {
            let message = if matches!(version.swap_bytes(), 1..=3) {
                format!("version {version:#010x} is byte-swapped: a big-endian file is not read")
            } else {
                format!("version {version} is not one of 2, 3")
            };
            return Err(Error::malformed(path, "version", 4, message));
        }
        let tensor_count = reader.count("tensor_count", TENSOR_BYTES_MIN)?;
        let metadata_count = reader.count("metadata_kv_count", ENTRY_BYTES_MIN)?;
        let metadata = reader.metadata(metadata_count)?;
        let mut gguf = Self {
            path,
            metadata,
            tensors: BTreeMap::new(),
        };
        gguf.tensors = gguf.read_tensors(&mut reader, tensor_count)?;
        Ok(gguf)
    }

    /// The tensors by name; their dimensions have the slowest first.
    pub(crate) fn take_tensors(&mut self) -> BTreeMap<String, Tensor<'a>> {
        std::mem::take(&mut self.tensors)
    }

    pub(crate) fn path(&self) -> &'a Path {
        self.path
    }

    pub(crate) fn get(&self, key: &str) -> Option<Value<'a>> {
        self.metadata.get(key).copied()
    }

    /// The names of all metadata keys, in no order.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &'a str> + '_ {
        self.metadata.keys().copied()
    }

    /// A value as JSON, for comparing and showing it; of long arrays and those of texts
    /// only the length.
    pub(crate) fn json(&self, key: &str) -> serde_json::Value {
        const ENTRIES_MAX: usize = 4096;
        match self.get(key) {
            None => serde_json::Value::Null,
            Some(Value::Unsigned(value)) => value.into(),
            Some(Value::Signed(value)) => value.into(),
            Some(Value::Float(value)) => value.into(),
            Some(Value::Bool(value)) => value.into(),
            Some(Value::String(value)) => value.into(),
            Some(Value::Array(array)) if array.count == 0 => serde_json::Value::Array(Vec::new()),
            Some(Value::Array(array)) if array.count > ENTRIES_MAX => {
                format!("{} entries", array.count).into()
            }
            Some(Value::Array(array)) => match self.numbers(key) {
                Ok(Some(numbers)) => {
                    let json = |number: f64| {
                        let whole = number as i64;
                        if whole as f64 == number {
                            serde_json::Value::from(whole)
                        } else {
                            serde_json::Value::from(number)
                        }
                    };
                    numbers.into_iter().map(json).collect()
                }
                _ => format!("{} texts", array.count).into(),
            },
        }
    }

    /// A whole number that is not negative.
    ///
    /// # Errors
    /// [`Error::Config`] where the value has another type.
    pub(crate) fn unsigned(&self, key: &str) -> Result<Option<u64>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Unsigned(value)) => Ok(Some(value)),
            Some(Value::Signed(value)) if value >= 0 => Ok(Some(value.unsigned_abs())),
            Some(other) => Err(self.wrong_type(key, "a whole number", &other)),
        }
    }

    /// A finite number.
    ///
    /// # Errors
    /// [`Error::Config`] where the value has another type or is not finite.
    pub(crate) fn float(&self, key: &str) -> Result<Option<f64>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Float(value)) if value.is_finite() => Ok(Some(value)),
            Some(Value::Unsigned(value)) => Ok(Some(value as f64)),
            Some(Value::Signed(value)) => Ok(Some(value as f64)),
            Some(other) => Err(self.wrong_type(key, "a finite number", &other)),
        }
    }

    /// # Errors
    /// [`Error::Config`] where the value has another type.
    pub(crate) fn boolean(&self, key: &str) -> Result<Option<bool>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(value)),
            Some(other) => Err(self.wrong_type(key, "a boolean", &other)),
        }
    }

    /// # Errors
    /// [`Error::Config`] where the value has another type.
    pub(crate) fn string(&self, key: &str) -> Result<Option<&'a str>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(value)) => Ok(Some(value)),
            Some(other) => Err(self.wrong_type(key, "a string", &other)),
        }
    }

    /// An array of strings.
    ///
    /// # Errors
    /// [`Error::Config`] for another type, [`Error::Malformed`] for invalid UTF-8.
    pub(crate) fn strings(&self, key: &str) -> Result<Option<Vec<&'a str>>, Error> {
        let Some(array) = self.array(key)? else {
            return Ok(None);
        };
        if array.element != Element::String {
            return Err(self.wrong_type(key, "an array of strings", &Value::Array(array)));
        }
        let mut reader = Reader {
            path: self.path,
            bytes: array.bytes,
            at: 0,
        };
        let mut strings = Vec::with_capacity(array.count);
        for index in 0..array.count {
            let at = array.offset + reader.at as u64;
            let text = reader.bytes_with_length(key)?;
            strings.push(std::str::from_utf8(text).map_err(|_| {
                Error::malformed(
                    self.path,
                    format!("{key}[{index}]"),
                    at,
                    "is not valid UTF-8",
                )
            })?);
        }
        Ok(Some(strings))
    }

    /// An array of numbers or booleans (0 and 1).
    ///
    /// # Errors
    /// [`Error::Config`] for another type.
    pub(crate) fn numbers(&self, key: &str) -> Result<Option<Vec<f64>>, Error> {
        let Some(array) = self.array(key)? else {
            return Ok(None);
        };
        if array.element == Element::String {
            return Err(self.wrong_type(key, "an array of numbers", &Value::Array(array)));
        }
        let mut reader = Reader {
            path: self.path,
            bytes: array.bytes,
            at: 0,
        };
        let mut numbers = Vec::with_capacity(array.count);
        for _ in 0..array.count {
            numbers.push(match reader.scalar(array.element, key)? {
                Value::Unsigned(value) => value as f64,
                Value::Signed(value) => value as f64,
                Value::Float(value) => value,
                Value::Bool(value) => f64::from(u8::from(value)),
                other => return Err(self.wrong_type(key, "an array of numbers", &other)),
            });
        }
        Ok(Some(numbers))
    }

    fn array(&self, key: &str) -> Result<Option<Array<'a>>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(array)) => Ok(Some(array)),
            Some(other) => Err(self.wrong_type(key, "an array", &other)),
        }
    }

    fn wrong_type(&self, key: &str, wanted: &str, value: &Value<'_>) -> Error {
        let found = match value {
            Value::Unsigned(value) => value.to_string(),
            Value::Signed(value) => value.to_string(),
            Value::Float(value) => value.to_string(),
            Value::Bool(value) => value.to_string(),
            Value::String(_) => "a string".to_owned(),
            Value::Array(array) => format!("an array of {} {:?}", array.count, array.element),
        };
        Error::config(self.path, key, format!("must be {wanted}, is {found}"))
    }

    fn read_tensors(
        &self,
        reader: &mut Reader<'a>,
        count: usize,
    ) -> Result<BTreeMap<String, Tensor<'a>>, Error> {
        let path = self.path;
        let alignment = self
            .unsigned("general.alignment")?
            .unwrap_or(ALIGNMENT_DEFAULT);
        if !alignment.is_power_of_two() || alignment > ALIGNMENT_MAX {
            return Err(Error::config(
                path,
                "general.alignment",
                format!("{alignment} is not a power of two up to {ALIGNMENT_MAX}"),
            ));
        }
        let mut infos = Vec::new();
        for index in 0..count {
            infos.push(reader.tensor_info(index, alignment)?);
        }
        let data = (reader.at as u64).next_multiple_of(alignment);
        let size = reader.bytes.len() as u64;
        let mut ends: Vec<(u64, u64, &str)> = Vec::with_capacity(infos.len());
        let mut tensors = BTreeMap::new();
        for info in &infos {
            let field = format!("tensor `{}`", info.name);
            let start = data.checked_add(info.offset);
            let range = start.and_then(|start| Some((start, start.checked_add(info.bytes)?)));
            let Some((start, end)) = range.filter(|(_, end)| *end <= size) else {
                return Err(Error::malformed(
                    path,
                    field,
                    info.at,
                    format!(
                        "{} bytes at data offset {} end past the file of {size} bytes; it is cut off",
                        info.bytes, info.offset
                    ),
                ));
            };
            ends.push((start, end, info.name));
            let tensor = Tensor {
                file: path,
                ty: info.ty,
                dims: info.dims.clone(),
                bytes: &reader.bytes[start as usize..end as usize],
            };
            if tensors.insert(info.name.to_owned(), tensor).is_some() {
                return Err(Error::malformed(path, field, info.at, "is listed twice"));
            }
        }
        ends.sort_unstable();
        for pair in ends.windows(2) {
            if pair[0].1 > pair[1].0 {
                return Err(Error::malformed(
                    path,
                    format!("tensor `{}`", pair[1].2),
                    pair[1].0,
                    format!("overlaps tensor `{}`", pair[0].2),
                ));
            }
        }
        Ok(tensors)
    }
}
