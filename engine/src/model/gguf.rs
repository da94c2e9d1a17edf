//! Reads the header of a GGUF file: metadata, tensor infos, and where the data lies.
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

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use baton_kernels::WeightType;

use super::error::Error;
use super::tensors::Tensor;

/// Longest metadata key or tensor name, in bytes (ggml's own bounds are 65535 and 64).
const NAME_BYTES_MAX: u64 = 65_535;
const DIMENSIONS_MAX: u32 = 4;
/// Larger alignments are nonsense; ggml's default is 32.
const ALIGNMENT_MAX: u64 = 1 << 20;
const ALIGNMENT_DEFAULT: u64 = 32;
/// Key length, one byte of key at least, type, one byte of value at least.
const ENTRY_BYTES_MIN: u64 = 8 + 1 + 4 + 1;
/// Name length, one byte of name, one dimension, type, offset.
const TENSOR_BYTES_MIN: u64 = 8 + 1 + 4 + 8 + 4 + 8;

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

/// An array of scalars or strings, checked to be whole.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Array<'a> {
    element: Element,
    count: usize,
    bytes: &'a [u8],
    /// Byte offset of `bytes` in the file.
    offset: u64,
}

/// The scalar types of GGUF metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Element {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    U64,
    I64,
    F64,
}

impl Element {
    fn from_id(id: u32) -> Option<Self> {
        Some(match id {
            0 => Self::U8,
            1 => Self::I8,
            2 => Self::U16,
            3 => Self::I16,
            4 => Self::U32,
            5 => Self::I32,
            6 => Self::F32,
            7 => Self::Bool,
            8 => Self::String,
            10 => Self::U64,
            11 => Self::I64,
            12 => Self::F64,
            _ => return None,
        })
    }

    /// Bytes of one element; of a string, those of its length.
    fn bytes_min(self) -> u64 {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::String | Self::U64 | Self::I64 | Self::F64 => 8,
        }
    }
}

const ARRAY_ID: u32 = 9;

/// The weight format of a ggml type id, or its name where it is known but not offered.
fn weight_type(id: u32) -> Result<WeightType, Option<&'static str>> {
    Ok(match id {
        0 => WeightType::F32,
        1 => WeightType::F16,
        2 => WeightType::Q4_0,
        3 => WeightType::Q4_1,
        6 => WeightType::Q5_0,
        7 => WeightType::Q5_1,
        8 => WeightType::Q8_0,
        12 => WeightType::Q4K,
        13 => WeightType::Q5K,
        14 => WeightType::Q6K,
        30 => WeightType::BF16,
        9 => return Err(Some("Q8_1")),
        10 => return Err(Some("Q2_K")),
        11 => return Err(Some("Q3_K")),
        15 => return Err(Some("Q8_K")),
        16 => return Err(Some("IQ2_XXS")),
        17 => return Err(Some("IQ2_XS")),
        18 => return Err(Some("IQ3_XXS")),
        19 => return Err(Some("IQ1_S")),
        20 => return Err(Some("IQ4_NL")),
        21 => return Err(Some("IQ3_S")),
        22 => return Err(Some("IQ2_S")),
        23 => return Err(Some("IQ4_XS")),
        24 => return Err(Some("I8")),
        25 => return Err(Some("I16")),
        26 => return Err(Some("I32")),
        27 => return Err(Some("I64")),
        28 => return Err(Some("F64")),
        29 => return Err(Some("IQ1_M")),
        34 => return Err(Some("TQ1_0")),
        35 => return Err(Some("TQ2_0")),
        39 => return Err(Some("MXFP4")),
        _ => return Err(None),
    })
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
    /// a version, weight format or split file this build does not read.
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
        if let Some(count) = gguf.unsigned("split.count")?
            && count > 1
        {
            return Err(Error::unsupported(
                path,
                "split.count",
                format!("the model is split over {count} GGUF files; merge them first"),
            ));
        }
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

struct TensorInfo<'a> {
    name: &'a str,
    ty: WeightType,
    /// Slowest first.
    dims: Vec<usize>,
    bytes: u64,
    /// From the start of the data.
    offset: u64,
    /// Where this info stands in the file.
    at: u64,
}

/// A cursor over the file that never reads past its end.
struct Reader<'a> {
    path: &'a Path,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize, field: &str) -> Result<&'a [u8], Error> {
        match self.bytes[self.at..].get(..len) {
            Some(bytes) => {
                self.at += len;
                Ok(bytes)
            }
            None => Err(self.error(
                field,
                format!(
                    "needs {len} bytes, {} are left; the file is cut off",
                    self.bytes.len() - self.at
                ),
            )),
        }
    }

    fn error(&self, field: impl Into<String>, message: impl Into<String>) -> Error {
        Error::malformed(self.path, field, self.at as u64, message)
    }

    fn array<const N: usize>(&mut self, field: &str) -> Result<[u8; N], Error> {
        let mut bytes = [0; N];
        bytes.copy_from_slice(self.take(N, field)?);
        Ok(bytes)
    }

    fn u32(&mut self, field: &str) -> Result<u32, Error> {
        self.array(field).map(u32::from_le_bytes)
    }

    fn u64(&mut self, field: &str) -> Result<u64, Error> {
        self.array(field).map(u64::from_le_bytes)
    }

    fn left(&self) -> u64 {
        (self.bytes.len() - self.at) as u64
    }

    /// A number of things that take at least `bytes_min` each.
    fn count(&mut self, field: &str, bytes_min: u64) -> Result<usize, Error> {
        let at = self.at as u64;
        let count = self.u64(field)?;
        let most = self.left() / bytes_min;
        if count > most {
            return Err(Error::malformed(
                self.path,
                field,
                at,
                format!(
                    "{count} entries cannot fit in the {} bytes that follow",
                    self.left()
                ),
            ));
        }
        Ok(count as usize)
    }

    fn bytes_with_length(&mut self, field: &str) -> Result<&'a [u8], Error> {
        let at = self.at as u64;
        let len = self.u64(field)?;
        if len > self.left() {
            return Err(Error::malformed(
                self.path,
                field,
                at,
                format!(
                    "a length of {len} bytes, {} are left in the file",
                    self.left()
                ),
            ));
        }
        self.take(len as usize, field)
    }

    fn name(&mut self, field: &str) -> Result<&'a str, Error> {
        let at = self.at as u64;
        let bytes = self.bytes_with_length(field)?;
        if bytes.is_empty() || bytes.len() as u64 > NAME_BYTES_MAX {
            return Err(Error::malformed(
                self.path,
                field,
                at,
                format!(
                    "a length of {} bytes is not in 1..={NAME_BYTES_MAX}",
                    bytes.len()
                ),
            ));
        }
        std::str::from_utf8(bytes)
            .map_err(|_| Error::malformed(self.path, field, at, "is not valid UTF-8"))
    }

    fn metadata(&mut self, count: usize) -> Result<HashMap<&'a str, Value<'a>>, Error> {
        let mut metadata = HashMap::new();
        for index in 0..count {
            let at = self.at as u64;
            let key = self.name(&format!("metadata key {index}"))?;
            let type_at = self.at as u64;
            let id = self.u32(key)?;
            let value = if id == ARRAY_ID {
                Value::Array(self.metadata_array(key)?)
            } else {
                let element = Element::from_id(id).ok_or_else(|| {
                    Error::malformed(self.path, key, type_at, format!("unknown value type {id}"))
                })?;
                self.scalar(element, key)?
            };
            if metadata.insert(key, value).is_some() {
                return Err(Error::malformed(
                    self.path,
                    key,
                    at,
                    "the key is there twice",
                ));
            }
        }
        Ok(metadata)
    }

    fn metadata_array(&mut self, key: &str) -> Result<Array<'a>, Error> {
        let at = self.at as u64;
        let id = self.u32(key)?;
        if id == ARRAY_ID {
            return Err(Error::malformed(
                self.path,
                key,
                at,
                "arrays of arrays are not read",
            ));
        }
        let element = Element::from_id(id).ok_or_else(|| {
            Error::malformed(
                self.path,
                key,
                at,
                format!("unknown array element type {id}"),
            )
        })?;
        let count = self.count(key, element.bytes_min())?;
        let start = self.at;
        if element == Element::String {
            for _ in 0..count {
                self.bytes_with_length(key)?;
            }
        } else {
            // No overflow: `count` elements fit in the bytes that are left.
            self.take(count * element.bytes_min() as usize, key)?;
        }
        Ok(Array {
            element,
            count,
            bytes: &self.bytes[start..self.at],
            offset: start as u64,
        })
    }

    fn scalar(&mut self, element: Element, key: &str) -> Result<Value<'a>, Error> {
        let at = self.at as u64;
        Ok(match element {
            Element::U8 => Value::Unsigned(u64::from(self.array::<1>(key)?[0])),
            Element::I8 => Value::Signed(i64::from(i8::from_le_bytes(self.array(key)?))),
            Element::U16 => Value::Unsigned(u64::from(u16::from_le_bytes(self.array(key)?))),
            Element::I16 => Value::Signed(i64::from(i16::from_le_bytes(self.array(key)?))),
            Element::U32 => Value::Unsigned(u64::from(u32::from_le_bytes(self.array(key)?))),
            Element::I32 => Value::Signed(i64::from(i32::from_le_bytes(self.array(key)?))),
            Element::U64 => Value::Unsigned(u64::from_le_bytes(self.array(key)?)),
            Element::I64 => Value::Signed(i64::from_le_bytes(self.array(key)?)),
            Element::F32 => Value::Float(f64::from(f32::from_le_bytes(self.array(key)?))),
            Element::F64 => Value::Float(f64::from_le_bytes(self.array(key)?)),
            Element::Bool => match self.array::<1>(key)?[0] {
                0 => Value::Bool(false),
                1 => Value::Bool(true),
                other => {
                    return Err(Error::malformed(
                        self.path,
                        key,
                        at,
                        format!("a boolean of {other}"),
                    ));
                }
            },
            Element::String => {
                let bytes = self.bytes_with_length(key)?;
                Value::String(
                    std::str::from_utf8(bytes)
                        .map_err(|_| Error::malformed(self.path, key, at, "is not valid UTF-8"))?,
                )
            }
        })
    }

    fn tensor_info(&mut self, index: usize, alignment: u64) -> Result<TensorInfo<'a>, Error> {
        let at = self.at as u64;
        let name = self.name(&format!("name of tensor {index}"))?;
        let field = |part: &str| format!("{part} of tensor `{name}`");
        let dims_at = self.at as u64;
        let dimensions = self.u32(&field("number of dimensions"))?;
        if dimensions == 0 || dimensions > DIMENSIONS_MAX {
            return Err(Error::malformed(
                self.path,
                field("number of dimensions"),
                dims_at,
                format!("{dimensions} is not in 1..={DIMENSIONS_MAX}"),
            ));
        }
        let mut dims = Vec::with_capacity(dimensions as usize);
        for _ in 0..dimensions {
            let at = self.at as u64;
            let dim = self.u64(&field("dimensions"))?;
            // A tensor has at most a few weights per byte of its file.
            if dim == 0 || dim > self.bytes.len() as u64 * 4 {
                return Err(Error::malformed(
                    self.path,
                    field("dimensions"),
                    at,
                    format!("{dim} is zero or more than the file can hold"),
                ));
            }
            dims.push(dim as usize);
        }
        // GGUF writes the fastest dimension first.
        dims.reverse();
        let type_at = self.at as u64;
        let id = self.u32(&field("type"))?;
        let ty = weight_type(id).map_err(|known| match known {
            Some(format) => Error::unsupported(
                self.path,
                field("type"),
                format!("the weight format {format} is not offered"),
            ),
            None => Error::malformed(
                self.path,
                field("type"),
                type_at,
                format!("unknown weight format {id}"),
            ),
        })?;
        let offset_at = self.at as u64;
        let offset = self.u64(&field("offset"))?;
        if !offset.is_multiple_of(alignment) {
            return Err(Error::malformed(
                self.path,
                field("offset"),
                offset_at,
                format!("{offset} is not a multiple of the alignment {alignment}"),
            ));
        }
        let cols = dims[dims.len() - 1];
        let bytes = dims[..dims.len() - 1]
            .iter()
            .try_fold(1_usize, |rows, dim| rows.checked_mul(*dim))
            .ok_or(baton_kernels::Error::TooLarge)
            .and_then(|rows| ty.matrix_bytes(rows, cols))
            .map_err(|error| {
                Error::malformed(self.path, field("dimensions"), dims_at, error.to_string())
            })?;
        Ok(TensorInfo {
            name,
            ty,
            dims,
            bytes: bytes as u64,
            offset,
            at,
        })
    }
}
