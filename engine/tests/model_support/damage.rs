//! Damage to a file's header that a fuzzer can steer: edits of bytes, and new values for
//! the numbers and texts whose places are known.

use bolero::{TypeGenerator, ValueGenerator, produce};

/// One edit. Places are fractions of the header (of 2^32), so that every draw hits it.
#[derive(Clone, Debug, TypeGenerator)]
pub enum Edit {
    /// Overwrites one byte.
    Byte { at: u32, value: u8 },
    /// Ends the file there.
    Cut { at: u32 },
    /// Takes bytes out; what follows moves up.
    Remove { at: u32, len: u8 },
    /// Puts bytes in; what follows moves down.
    Insert { at: u32, bytes: [u8; 6], len: u8 },
    /// Repeats a piece of the header somewhere else.
    Copy { from: u32, to: u32, len: u8 },
}

/// What happens to one file: known values are replaced, then bytes are edited.
#[derive(Clone, Debug)]
pub struct Damage {
    /// Which value, as a fraction of all, and what it becomes.
    pub values: Vec<(u32, Value)>,
    pub edits: Vec<Edit>,
}

impl Damage {
    /// A third of the cases only replaces values: any edit of bytes is likely to break
    /// the file before a value is believed.
    pub fn any() -> impl ValueGenerator<Output = Self> {
        let values = produce::<Vec<(u32, Value)>>().with().len(0..=3_usize);
        let edits = produce::<Vec<Edit>>().with().len(0..=2_usize);
        (values, edits).map_gen(|(values, edits)| Self { values, edits })
    }
}

/// A value that readers stumble over.
#[derive(Clone, Debug, TypeGenerator)]
pub enum Value {
    Small(u8),
    Any(u64),
    Power {
        of_two: u8,
        minus_one: bool,
    },
    Negative(u8),
    /// One of [`TEXTS`] where the value is JSON, else a number.
    Text(u8),
}

impl Value {
    pub fn number(&self) -> u64 {
        match self {
            Self::Small(value) | Self::Text(value) => u64::from(*value),
            Self::Any(value) => *value,
            Self::Power { of_two, minus_one } => {
                (1_u64 << (of_two % 64)).wrapping_sub(u64::from(*minus_one))
            }
            Self::Negative(value) => u64::from(*value).wrapping_neg(),
        }
    }

    fn json(&self) -> String {
        match self {
            Self::Text(which) => TEXTS[usize::from(*which) % TEXTS.len()].to_owned(),
            Self::Negative(value) => format!("-{value}"),
            other => other.number().to_string(),
        }
    }
}

/// JSON values of the wrong kind, and the right kind with a wrong meaning.
const TEXTS: [&str; 16] = [
    "null",
    "true",
    "\"\"",
    "\"F32\"",
    "\"F64\"",
    "\"llama\"",
    "[]",
    "{}",
    "[0,0]",
    "[1e308,-1]",
    "1e400",
    "0.5",
    "\"\\ud800\"",
    "\"\\u0000\"",
    "[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]",
    "{\"a\":1,\"a\":2}",
];

/// How values stand in a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Little-endian bytes; their number stays.
    Binary,
    /// Text; the length changes.
    Json,
}

/// A sound file and where its header's values are.
#[derive(Clone, Debug)]
pub struct Sound {
    pub bytes: Vec<u8>,
    /// Bytes of the header; damage happens below.
    pub header: usize,
    /// Place and length of each value, upwards.
    pub values: Vec<(usize, usize)>,
    pub form: Form,
}

impl Sound {
    /// The file with all of it done.
    pub fn damaged(&self, damage: &Damage) -> Vec<u8> {
        let mut bytes = self.bytes.clone();
        let mut header = self.header;
        let mut chosen: Vec<(usize, &Value)> = damage
            .values
            .iter()
            .map(|(which, value)| (scaled(*which, self.values.len()), value))
            .collect();
        // From the back, so that places before stay right.
        chosen.sort_by_key(|(which, _)| std::cmp::Reverse(*which));
        chosen.dedup_by_key(|(which, _)| *which);
        for (which, value) in chosen {
            let (at, len) = self.values[which];
            let new = match self.form {
                Form::Binary => value.number().to_le_bytes()[..len].to_vec(),
                Form::Json => value.json().into_bytes(),
            };
            header = header + new.len() - len;
            bytes.splice(at..at + len, new);
        }
        for edit in &damage.edits {
            let place = |at: u32| scaled(at, header);
            match edit {
                Edit::Byte { at, value } => {
                    if let Some(byte) = bytes.get_mut(place(*at)) {
                        *byte = *value;
                    }
                }
                Edit::Cut { at } => bytes.truncate(place(*at)),
                Edit::Remove { at, len } => {
                    let at = place(*at).min(bytes.len());
                    let end = (at + usize::from(*len)).min(bytes.len());
                    header = header.saturating_sub(end - at);
                    bytes.drain(at..end);
                }
                Edit::Insert {
                    at,
                    bytes: new,
                    len,
                } => {
                    let at = place(*at).min(bytes.len());
                    let new = &new[..usize::from(*len) % (new.len() + 1)];
                    header += new.len();
                    bytes.splice(at..at, new.iter().copied());
                }
                Edit::Copy { from, to, len } => {
                    let from = place(*from).min(bytes.len());
                    let end = (from + usize::from(*len)).min(bytes.len());
                    let to = place(*to).min(bytes.len());
                    let piece = bytes[from..end].to_vec();
                    header += piece.len();
                    bytes.splice(to..to, piece);
                }
            }
        }
        bytes
    }
}

/// A fraction of 2^32 as an index below `len`, or 0.
pub fn scaled(fraction: u32, len: usize) -> usize {
    ((u64::from(fraction) * len as u64) >> 32) as usize
}

/// Where the numbers, texts and words of a JSON document are.
pub fn json_values(json: &[u8]) -> Vec<(usize, usize)> {
    let mut values = Vec::new();
    let mut at = 0;
    while at < json.len() {
        let start = at;
        match json[at] {
            b'"' => {
                at += 1;
                while at < json.len() && json[at] != b'"' {
                    at += if json[at] == b'\\' { 2 } else { 1 };
                }
                at = (at + 1).min(json.len());
                values.push((start, at - start));
            }
            b'-' | b'0'..=b'9' | b'a'..=b'z' => {
                while at < json.len()
                    && matches!(json[at], b'-' | b'+' | b'.' | b'0'..=b'9' | b'a'..=b'z' | b'E')
                {
                    at += 1;
                }
                values.push((start, at - start));
            }
            _ => at += 1,
        }
    }
    values
}
