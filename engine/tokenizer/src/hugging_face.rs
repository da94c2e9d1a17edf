//! A Hugging Face `tokenizer.json`: encoding by the `tokenizers` crate, bytes by us.
//!
//! That crate decodes to text, where halves of characters are already lost. So its
//! decoder section is read here and turned into bytes per token, plus the number of
//! blanks stripped from the front of a whole text. Decoder steps that are no such
//! thing (WordPiece, CTC, `</w>` suffixes) are refused by name.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::str::FromStr;
use std::sync::OnceLock;

use baton_proto::ids::TokenId;
use serde_json::Value;
use tokenizers::{Model, NormalizedString, OffsetReferential, OffsetType, PreTokenizer, Token};

use crate::byte_level;
use crate::error::Error;
use crate::reach::Reach;
use crate::rendered::Marked;
use crate::vocabulary::{Vocabulary, byte_token};

/// Ids above this are taken for a damaged file: the table of bytes is dense.
const ID_MAX: u32 = 4 << 20;

pub(crate) struct HuggingFaceEncoder {
    parsing: tokenizers::Tokenizer,
    /// The same with special tokens taken for plain text; built on first use, since
    /// it doubles the memory.
    literal: OnceLock<tokenizers::Tokenizer>,
}

/// What the file says about decoding.
pub(crate) struct HuggingFace {
    pub(crate) encoder: HuggingFaceEncoder,
    pub(crate) vocabulary: Vocabulary,
    pub(crate) strip_blanks: usize,
    /// How much text a token can stand for, if that is known.
    pub(crate) reach: Option<Reach>,
}

impl HuggingFace {
    /// `named` are ids that the model's files call BOS, EOS, unknown or padding: such
    /// tokens are special also where `tokenizer.json` does not say so.
    pub(crate) fn from_json(json: &str, named: &[TokenId]) -> Result<Self, Error> {
        let file: Value = serde_json::from_str(json).map_err(|error| Error::InvalidSpec {
            reason: format!("tokenizer.json: {error}"),
        })?;
        let decoder = ByteDecoder::from_json(&file["decoder"])?;
        let mut parsing = parse(json)?;
        make_special(&mut parsing, named)?;

        let mut tokens: Vec<(u32, String)> = parsing
            .get_vocab(true)
            .into_iter()
            .map(|(text, id)| (id, text))
            .collect();
        tokens.sort_unstable();
        if let Some((id, text)) = tokens.last().filter(|(id, _)| *id > ID_MAX) {
            return Err(Error::InvalidSpec {
                reason: format!("token `{text}` has id {id}, more than {ID_MAX}"),
            });
        }
        let longest = tokens.iter().map(|(_, text)| text.len()).max();
        let reach = Reach::of_file(&file, longest.unwrap_or(0));
        let added = parsing.get_added_tokens_decoder();
        let mut vocabulary = Vocabulary::default();
        for (id, text) in tokens {
            while vocabulary.len() < id as usize {
                vocabulary.push(&[], false);
            }
            if vocabulary.len() > id as usize {
                continue;
            }
            match added.get(&id) {
                Some(token) if token.special => vocabulary.push(token.content.as_bytes(), true),
                Some(token) => vocabulary.push(&decoder.added_bytes(&token.content), false),
                None => vocabulary.push(&decoder.bytes(&text), false),
            }
        }
        Ok(Self {
            encoder: HuggingFaceEncoder {
                parsing,
                literal: OnceLock::new(),
            },
            vocabulary,
            strip_blanks: decoder.strip_blanks,
            reach,
        })
    }
}

impl HuggingFaceEncoder {
    /// `add_special` applies the file's own post-processor.
    pub(crate) fn encode(
        &self,
        text: &str,
        add_special: bool,
        parse_special: bool,
    ) -> Result<Vec<TokenId>, Error> {
        let tokenizer = if parse_special {
            &self.parsing
        } else {
            self.literal.get_or_init(|| {
                let mut literal = self.parsing.clone();
                literal.set_encode_special_tokens(true);
                literal
            })
        };
        let encoding = tokenizer
            .encode_fast(text, add_special)
            .map_err(|error| Error::Encode {
                reason: error.to_string(),
            })?;
        Ok(encoding.get_ids().to_vec())
    }
}

impl HuggingFaceEncoder {
    /// The ids of a rendered chat, without the file's own post-processor. Whole tokens
    /// are cut out of the marked text; the marks leave what remains before it is split.
    pub(crate) fn encode_marked(&self, marked: &Marked) -> Result<Vec<TokenId>, Error> {
        let failed = |error: tokenizers::Error| Error::Encode {
            reason: error.to_string(),
        };
        let tokenizer = &self.parsing;
        let added = tokenizer.get_added_vocabulary();
        let mut text = added.extract_and_normalize(tokenizer.get_normalizer(), &marked.text);
        let unmark = |text: &mut NormalizedString| {
            text.filter(|c| c != marked.mark);
            Ok(())
        };
        text.normalize(unmark).map_err(failed)?;
        // A part that was nothing but marks.
        let not_empty = |_, text: NormalizedString| Ok((!text.is_empty()).then_some(text));
        text.split(not_empty).map_err(failed)?;
        if let Some(pre_tokenizer) = tokenizer.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut text).map_err(failed)?;
        }
        let model = tokenizer.get_model();
        let special: HashMap<TokenId, String> = self
            .special()
            .into_iter()
            .map(|(text, id)| (id, text))
            .collect();
        // Some vocabularies find a control token in plain text by themselves (word lists,
        // Unigram). There is no other way to write that text, so it is refused.
        let tokenize = |text: &NormalizedString| {
            let tokens = model.tokenize(text.get())?;
            let found = |token: &Token| {
                let spelled = special.get(&token.id)?;
                text.get().contains(spelled).then_some(spelled)
            };
            match tokens.iter().find_map(found) {
                Some(spelled) => Err(format!(
                    "`{spelled}` is a control token, which this vocabulary cannot write as text"
                )
                .into()),
                None => Ok(tokens),
            }
        };
        text.tokenize(tokenize).map_err(failed)?;
        let splits = text.get_splits(OffsetReferential::Original, OffsetType::Byte);
        let tokens = splits
            .into_iter()
            .filter_map(|(_, _, tokens)| tokens.as_ref());
        Ok(tokens.flatten().map(|token| token.id).collect())
    }

    /// Spellings and ids of the tokens that are special.
    pub(crate) fn special(&self) -> Vec<(String, TokenId)> {
        let added = self.parsing.get_added_tokens_decoder().into_iter();
        added
            .filter(|(_, token)| token.special)
            .map(|(id, token)| (token.content, id))
            .collect()
    }
}

/// Makes the added tokens of these ids special, whatever the file says of them.
fn make_special(tokenizer: &mut tokenizers::Tokenizer, ids: &[TokenId]) -> Result<(), Error> {
    let decoder = tokenizer.get_added_tokens_decoder();
    let named = ids.iter().filter_map(|id| decoder.get(id));
    let plain: Vec<_> = named
        .filter(|token| !token.special)
        .map(|token| token.clone().special(true))
        .collect();
    if !plain.is_empty() {
        tokenizer
            .add_special_tokens(plain)
            .map_err(|error| Error::InvalidSpec {
                reason: format!("tokenizer.json: {error}"),
            })?;
    }
    Ok(())
}

fn parse(json: &str) -> Result<tokenizers::Tokenizer, Error> {
    let invalid = |reason: String| Error::InvalidSpec {
        reason: format!("tokenizer.json: {reason}"),
    };
    // The crate indexes out of bounds on some damaged files (a merge longer than every
    // token); such a file must cost one model, not the process.
    let parsed = catch_unwind(AssertUnwindSafe(|| tokenizers::Tokenizer::from_str(json)));
    let mut tokenizer = parsed
        .map_err(|_| invalid("damaged".to_owned()))?
        .map_err(|error| invalid(error.to_string()))?;
    // Training left-overs that would silently cut or fill prompts.
    tokenizer
        .with_truncation(None)
        .map_err(|error| invalid(error.to_string()))?
        .with_padding(None);
    Ok(tokenizer)
}

/// The decoder section, reduced to a mapping of one token to bytes.
#[derive(Debug, Default)]
struct ByteDecoder {
    byte_level: bool,
    byte_fallback: bool,
    replace: Vec<(String, String)>,
    strip_blanks: usize,
}

impl ByteDecoder {
    fn from_json(section: &Value) -> Result<Self, Error> {
        let mut decoder = Self::default();
        decoder.add(section)?;
        Ok(decoder)
    }

    fn add(&mut self, section: &Value) -> Result<(), Error> {
        let unsupported = |what: String| Err(Error::Unsupported { what });
        let Some(kind) = section["type"].as_str() else {
            return unsupported("a tokenizer.json without a decoder".to_owned());
        };
        match kind {
            "Sequence" => {
                for step in section["decoders"].as_array().into_iter().flatten() {
                    self.add(step)?;
                }
            }
            "ByteLevel" => self.byte_level = true,
            "ByteFallback" => self.byte_fallback = true,
            // Joins the tokens of a text; bytes are joined anyway.
            "Fuse" => {}
            "Replace" => {
                let from = section["pattern"]["String"].as_str();
                let (Some(from), Some(to)) = (from, section["content"].as_str()) else {
                    return unsupported(format!("decoder {section}"));
                };
                self.replace.push((from.to_owned(), to.to_owned()));
            }
            "Strip" => {
                let start = section["start"].as_u64();
                let (Some(" "), Some(start), Some(0)) =
                    (section["content"].as_str(), start, section["stop"].as_u64())
                else {
                    return unsupported(format!("decoder {section}"));
                };
                self.strip_blanks += usize::try_from(start).unwrap_or(usize::MAX);
            }
            "Metaspace" => {
                let blank = section["replacement"].as_str().unwrap_or("\u{2581}");
                self.replace.push((blank.to_owned(), " ".to_owned()));
                let never = section["prepend_scheme"].as_str() == Some("never")
                    || section["add_prefix_space"].as_bool() == Some(false);
                self.strip_blanks += usize::from(!never);
            }
            other => return unsupported(format!("decoder `{other}`")),
        }
        Ok(())
    }

    fn bytes(&self, text: &str) -> Vec<u8> {
        if self.byte_level
            && let Some(bytes) = byte_level::piece_bytes(text)
        {
            return bytes;
        }
        if self.byte_fallback
            && let Some(byte) = byte_token(text)
        {
            return vec![byte];
        }
        self.added_bytes(text)
    }

    /// Added tokens are spelled plainly, whatever the alphabet of the others.
    fn added_bytes(&self, text: &str) -> Vec<u8> {
        let mut text = text.to_owned();
        for (from, to) in &self.replace {
            text = text.replace(from, to);
        }
        text.into_bytes()
    }
}
