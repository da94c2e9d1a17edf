//! A cursor over a GGUF header that never reads past the file's end.
//!
//! Each count and length is compared with the bytes that are left before it is
//! believed. What the values mean is not known here.

use std::collections::HashMap;
use std::path::Path;

use baton_kernels::WeightType;

use super::{Array, Value};
use crate::model::error::Error;

/// Longest metadata key or tensor name, in bytes (ggml's own bounds are 65535 and 64).
const NAME_BYTES_MAX: u64 = 65_535;
const DIMENSIONS_MAX: u32 = 4;
/// Key length, one byte of key at least, type, one byte of value at least.
pub(super) const ENTRY_BYTES_MIN: u64 = 8 + 1 + 4 + 1;
/// Name length, one byte of name, one dimension, type, offset.
pub(super) const TENSOR_BYTES_MIN: u64 = 8 + 1 + 4 + 8 + 4 + 8;

/// The scalar types of GGUF metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Element {
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
        10 => WeightType::Q2K,
        11 => WeightType::Q3K,
        12 => WeightType::Q4K,
        13 => WeightType::Q5K,
        14 => WeightType::Q6K,
        20 => WeightType::IQ4NL,
        23 => WeightType::IQ4XS,
        30 => WeightType::BF16,
        39 => WeightType::MXFP4,
        9 => return Err(Some("Q8_1")),
        15 => return Err(Some("Q8_K")),
        16 => return Err(Some("IQ2_XXS")),
        17 => return Err(Some("IQ2_XS")),
        18 => return Err(Some("IQ3_XXS")),
        19 => return Err(Some("IQ1_S")),
        21 => return Err(Some("IQ3_S")),
        22 => return Err(Some("IQ2_S")),
        24 => return Err(Some("I8")),
        25 => return Err(Some("I16")),
        26 => return Err(Some("I32")),
        27 => return Err(Some("I64")),
        28 => return Err(Some("F64")),
        29 => return Err(Some("IQ1_M")),
        34 => return Err(Some("TQ1_0")),
        35 => return Err(Some("TQ2_0")),
        40 => return Err(Some("NVFP4")),
        _ => return Err(None),
    })
}

/// One entry of the tensor list.
pub(super) struct TensorInfo<'a> {
    pub name: &'a str,
    pub ty: WeightType,
    /// Slowest first.
    pub dims: Vec<usize>,
    pub bytes: u64,
    /// From the start of the data.
    pub offset: u64,
    /// Where this info stands in the file.
    pub at: u64,
}

/// A cursor over the file that never reads past its end.
pub(super) struct Reader<'a> {
    pub path: &'a Path,
    pub bytes: &'a [u8],
    pub at: usize,
}

impl<'a> Reader<'a> {
    pub fn take(&mut self, len: usize, field: &str) -> Result<&'a [u8], Error> {
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

    pub fn u32(&mut self, field: &str) -> Result<u32, Error> {
        self.array(field).map(u32::from_le_bytes)
    }

    fn u64(&mut self, field: &str) -> Result<u64, Error> {
        self.array(field).map(u64::from_le_bytes)
    }

    fn left(&self) -> u64 {
        (self.bytes.len() - self.at) as u64
    }

    /// A number of things that take at least `bytes_min` each.
    pub fn count(&mut self, field: &str, bytes_min: u64) -> Result<usize, Error> {
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

    pub fn bytes_with_length(&mut self, field: &str) -> Result<&'a [u8], Error> {
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

    pub fn metadata(&mut self, count: usize) -> Result<HashMap<&'a str, Value<'a>>, Error> {
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

    pub fn scalar(&mut self, element: Element, key: &str) -> Result<Value<'a>, Error> {
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

    pub fn tensor_info(&mut self, index: usize, alignment: u64) -> Result<TensorInfo<'a>, Error> {
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
