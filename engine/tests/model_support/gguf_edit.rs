//! Edits of a GGUF file: other metadata, further tensors.
#![allow(dead_code)]

use serde_json::Value;

/// A sound GGUF file in pieces.
#[derive(Clone)]
pub struct GgufEdit {
    /// Keys with type and value as they stand in the file.
    entries: Vec<(String, Vec<u8>)>,
    tensors: u64,
    infos: Vec<u8>,
    data: Vec<u8>,
}

const ALIGNMENT: usize = 32;

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, len: usize) -> &'a [u8] {
        self.at += len;
        &self.bytes[self.at - len..self.at]
    }

    fn number(&mut self, len: usize) -> u64 {
        let mut bytes = [0; 8];
        bytes[..len].copy_from_slice(self.take(len));
        u64::from_le_bytes(bytes)
    }

    fn string(&mut self) -> &'a [u8] {
        let len = self.number(8) as usize;
        self.take(len)
    }

    fn skip_value(&mut self, ty: u64) {
        match ty {
            0 | 1 | 7 => self.at += 1,
            2 | 3 => self.at += 2,
            4..=6 => self.at += 4,
            10..=12 => self.at += 8,
            8 => drop(self.string()),
            9 => {
                let element = self.number(4);
                for _ in 0..self.number(8) {
                    self.skip_value(element);
                }
            }
            other => panic!("value type {other}"),
        }
    }
}

fn string(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(text.as_bytes());
    bytes
}

/// Type and bytes of a JSON value.
fn value(json: &Value) -> (u32, Vec<u8>) {
    match json {
        Value::Bool(value) => (7, vec![u8::from(*value)]),
        Value::String(text) => (8, string(text)),
        Value::Number(number) => match (number.as_u64(), number.as_i64()) {
            (Some(value), _) if u32::try_from(value).is_ok() => {
                (4, (value as u32).to_le_bytes().to_vec())
            }
            (Some(value), _) => (10, value.to_le_bytes().to_vec()),
            (None, Some(value)) => (5, (value as i32).to_le_bytes().to_vec()),
            _ => (6, (number.as_f64().unwrap() as f32).to_le_bytes().to_vec()),
        },
        Value::Array(list) => {
            let values: Vec<(u32, Vec<u8>)> = list.iter().map(value).collect();
            let ty = values.first().map_or(4, |(ty, _)| *ty);
            let mut bytes = ty.to_le_bytes().to_vec();
            bytes.extend((list.len() as u64).to_le_bytes());
            for (_, value) in values {
                bytes.extend(value);
            }
            (9, bytes)
        }
        other => panic!("{other}"),
    }
}

impl GgufEdit {
    pub fn new(bytes: &[u8]) -> Self {
        let mut cursor = Cursor { bytes, at: 8 };
        let (tensors, count) = (cursor.number(8), cursor.number(8));
        let mut entries = Vec::new();
        for _ in 0..count {
            let key = String::from_utf8(cursor.string().to_vec()).unwrap();
            let start = cursor.at;
            let ty = cursor.number(4);
            cursor.skip_value(ty);
            entries.push((key, bytes[start..cursor.at].to_vec()));
        }
        let start = cursor.at;
        for _ in 0..tensors {
            cursor.string();
            let dims = cursor.number(4) as usize;
            cursor.take(8 * dims + 4 + 8);
        }
        let end = cursor.at;
        Self {
            entries,
            tensors,
            infos: bytes[start..end].to_vec(),
            data: bytes[end.next_multiple_of(ALIGNMENT)..].to_vec(),
        }
    }

    /// Sets a key; `null` takes it away.
    pub fn set(mut self, key: &str, json: &Value) -> Self {
        self.entries.retain(|(known, _)| known != key);
        if !json.is_null() {
            let (ty, bytes) = value(json);
            let entry = [&ty.to_le_bytes()[..], &bytes].concat();
            self.entries.push((key.to_owned(), entry));
        }
        self
    }

    /// Adds a vector of f32.
    pub fn vector(mut self, name: &str, values: &[f32]) -> Self {
        self.data
            .resize(self.data.len().next_multiple_of(ALIGNMENT), 0);
        self.infos.extend(string(name));
        self.infos.extend(1_u32.to_le_bytes());
        self.infos.extend((values.len() as u64).to_le_bytes());
        self.infos.extend(0_u32.to_le_bytes());
        self.infos.extend((self.data.len() as u64).to_le_bytes());
        self.data
            .extend(values.iter().flat_map(|v| v.to_le_bytes()));
        self.tensors += 1;
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(3_u32.to_le_bytes());
        bytes.extend(self.tensors.to_le_bytes());
        bytes.extend((self.entries.len() as u64).to_le_bytes());
        for (key, value) in &self.entries {
            bytes.extend(string(key));
            bytes.extend(value);
        }
        bytes.extend(&self.infos);
        bytes.resize(bytes.len().next_multiple_of(ALIGNMENT), 0);
        bytes.extend(&self.data);
        bytes
    }
}
