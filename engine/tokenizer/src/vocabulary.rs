//! The bytes of every token, decoded once, and which tokens are special.
//!
//! Detokenising is looking bytes up and joining them: the byte-level alphabet,
//! U+2581 and byte tokens are resolved when the table is built. It does not know
//! how text becomes ids.

use baton_proto::ids::TokenId;

/// All tokens' bytes in one buffer: token `i` is `bytes[ends[i-1]..ends[i]]`.
#[derive(Debug, Default)]
pub(crate) struct Vocabulary {
    bytes: Vec<u8>,
    ends: Vec<usize>,
    special: Vec<bool>,
}

impl Vocabulary {
    /// Appends the next id's bytes.
    pub(crate) fn push(&mut self, bytes: &[u8], special: bool) {
        self.bytes.extend_from_slice(bytes);
        self.ends.push(self.bytes.len());
        self.special.push(special);
    }

    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Empty for ids outside the vocabulary: an output matrix may be wider than it.
    pub(crate) fn bytes(&self, id: TokenId) -> &[u8] {
        let index = id as usize;
        let Some(&end) = self.ends.get(index) else {
            return &[];
        };
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.bytes[start..end]
    }

    pub(crate) fn is_special(&self, id: TokenId) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    /// Ids outside the vocabulary are ignored.
    pub(crate) fn mark_special(&mut self, id: TokenId) {
        if let Some(special) = self.special.get_mut(id as usize) {
            *special = true;
        }
    }
}

/// The value of a byte token's spelling, `<0xNN>`.
pub(crate) fn byte_token(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() != 2 || !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    u8::from_str_radix(digits, 16).ok()
}
