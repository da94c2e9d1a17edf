//! A GGUF file taken apart into metadata and tensors, changed, and written again.

#![allow(dead_code)]

/// Metadata entries and tensors of a file.
#[derive(Clone, Debug, Default)]
pub struct Parts {
    /// Key, and what follows it: type and value.
    pub entries: Vec<(String, Vec<u8>)>,
    pub tensors: Vec<Part>,
}

/// One tensor; the fastest dimension first, as GGUF has them.
#[derive(Clone, Debug)]
pub struct Part {
    pub name: String,
    pub dims: Vec<u64>,
    pub ty: u32,
    pub data: Vec<u8>,
}

/// Type ids of metadata values.
pub const U16: u32 = 2;
pub const U32: u32 = 4;
pub const I32: u32 = 5;
const STRING: u32 = 8;
const ARRAY: u32 = 9;

pub fn string(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(text.as_bytes());
    bytes
}

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Cursor<'_> {
    fn number(&mut self, len: usize) -> u64 {
        let mut le = [0; 8];
        le[..len].copy_from_slice(&self.bytes[self.at..self.at + len]);
        self.at += len;
        u64::from_le_bytes(le)
    }

    fn text(&mut self) -> String {
        let len = self.number(8) as usize;
        self.at += len;
        String::from_utf8(self.bytes[self.at - len..self.at].to_vec()).unwrap()
    }

    fn skip(&mut self, ty: u32) {
        match ty {
            0 | 1 | 7 => self.at += 1,
            2 | 3 => self.at += 2,
            4..=6 => self.at += 4,
            STRING => drop(self.text()),
            ARRAY => {
                let (element, count) = (self.number(4) as u32, self.number(8));
                (0..count).for_each(|_| self.skip(element));
            }
            _ => self.at += 8,
        }
    }
}

impl Parts {
    /// Of a sound file whose tensors have BF16 or F32 weights.
    pub fn read(bytes: &[u8]) -> Self {
        let mut cursor = Cursor { bytes, at: 8 };
        let (tensors, entries) = (cursor.number(8), cursor.number(8));
        let mut parts = Self::default();
        for _ in 0..entries {
            let key = cursor.text();
            let start = cursor.at;
            let ty = cursor.number(4) as u32;
            cursor.skip(ty);
            parts.entries.push((key, bytes[start..cursor.at].to_vec()));
        }
        let mut offsets = Vec::new();
        for _ in 0..tensors {
            let name = cursor.text();
            let dims: Vec<u64> = (0..cursor.number(4)).map(|_| cursor.number(8)).collect();
            let ty = cursor.number(4) as u32;
            offsets.push(cursor.number(8) as usize);
            parts.tensors.push(Part {
                name,
                dims,
                ty,
                data: Vec::new(),
            });
        }
        let data = cursor.at.next_multiple_of(32);
        for (tensor, offset) in parts.tensors.iter_mut().zip(offsets) {
            let element = if tensor.ty == 0 { 4 } else { 2 };
            let len = tensor.dims.iter().product::<u64>() as usize * element;
            tensor.data = bytes[data + offset..][..len].to_vec();
        }
        parts
    }

    /// Sets a metadata value that has a fixed size.
    pub fn set(&mut self, key: &str, ty: u32, value: &[u8]) -> &mut Self {
        self.entries.retain(|(other, _)| other != key);
        let mut bytes = ty.to_le_bytes().to_vec();
        bytes.extend_from_slice(value);
        self.entries.push((key.to_owned(), bytes));
        self
    }

    pub fn set_u32(&mut self, key: &str, value: u32) -> &mut Self {
        self.set(key, U32, &value.to_le_bytes())
    }

    pub fn set_strings(&mut self, key: &str, texts: &[String]) -> &mut Self {
        let mut value = STRING.to_le_bytes().to_vec();
        value.extend((texts.len() as u64).to_le_bytes());
        texts.iter().for_each(|text| value.extend(string(text)));
        self.set(key, ARRAY, &value)
    }

    /// The texts of an array.
    pub fn strings(&self, key: &str) -> Vec<String> {
        let (_, bytes) = self.entries.iter().find(|(other, _)| other == key).unwrap();
        // Type, element type, count.
        let mut cursor = Cursor { bytes, at: 8 };
        (0..cursor.number(8)).map(|_| cursor.text()).collect()
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(3_u32.to_le_bytes());
        bytes.extend((self.tensors.len() as u64).to_le_bytes());
        bytes.extend((self.entries.len() as u64).to_le_bytes());
        for (key, value) in &self.entries {
            bytes.extend(string(key));
            bytes.extend_from_slice(value);
        }
        let mut data = Vec::new();
        for tensor in &self.tensors {
            bytes.extend(string(&tensor.name));
            bytes.extend((tensor.dims.len() as u32).to_le_bytes());
            for dim in &tensor.dims {
                bytes.extend(dim.to_le_bytes());
            }
            bytes.extend(tensor.ty.to_le_bytes());
            bytes.extend((data.len() as u64).to_le_bytes());
            data.extend_from_slice(&tensor.data);
            data.resize(data.len().next_multiple_of(32), 0);
        }
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        bytes.extend(data);
        bytes
    }

    /// The file as `count` shards, as `gguf-split` cuts it: the metadata in the first,
    /// the tensors one after the other.
    pub fn split(&self, count: usize) -> Vec<Parts> {
        let each = self.tensors.len().div_ceil(count);
        (0..count)
            .map(|number| {
                let mut shard = Parts::default();
                if number == 0 {
                    shard.entries.clone_from(&self.entries);
                }
                shard
                    .set("split.no", U16, &(number as u16).to_le_bytes())
                    .set("split.count", U16, &(count as u16).to_le_bytes())
                    .set(
                        "split.tensors.count",
                        I32,
                        &(self.tensors.len() as i32).to_le_bytes(),
                    );
                let tensors = self.tensors.iter().skip(number * each).take(each);
                shard.tensors = tensors.cloned().collect();
                shard
            })
            .collect()
    }
}

/// `NAME-00001-of-00003.gguf`.
pub fn shard_name(stem: &str, number: usize, count: usize) -> String {
    format!("{stem}-{number:05}-of-{count:05}.gguf")
}
