//! The tokenizer of one model: built from a specification, then only read.
//!
//! It joins the parts: whole tokens are cut out first, an encoder does the rest, and
//! decoding is a look-up of bytes. Chat rendering is delegated to the templates.

use baton_proto::ids::TokenId;
use baton_proto::tokenizer_spec::{TokenKind, TokenizerModel, TokenizerSpec};

use crate::added_tokens::{AddedTokens, Segment};
use crate::byte_level::{self, ByteLevelEncoder};
use crate::chat::ChatRequest;
use crate::control_tokens::ControlTokens;
use crate::error::Error;
use crate::hugging_face::{HuggingFace, HuggingFaceEncoder};
use crate::merge::Merger;
use crate::reach::Reach;
use crate::rendered::{Marked, RenderedChat};
use crate::sentence_piece::{BLANK, SentencePieceEncoder};
use crate::special::{Specials, Symbol};
use crate::template::Templates;
use crate::vocabulary::{Vocabulary, byte_token};

/// The longest text that is encoded or rendered, in bytes. A context of a million
/// tokens is about 4 MB; the rest is head-room, and a bound on memory.
pub const TEXT_BYTES_MAX: usize = 16 << 20;

/// How a text is encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncodeOptions {
    /// Put BOS before and EOS behind the text, as the model asks for plain text.
    /// False for rendered chats: the template writes BOS itself. A BOS that the text
    /// already spells out is not doubled.
    pub add_special: bool,
    /// Recognise control tokens (`<|im_start|>`) that are written out in the text.
    pub parse_special: bool,
}

impl EncodeOptions {
    /// A prompt of the completions endpoint. Control tokens are recognised, as other
    /// OpenAI-like servers do: clients render their own chat formats this way.
    pub const PROMPT: Self = Self {
        add_special: true,
        parse_special: true,
    };
    /// Text whose author may write control tokens: a template, not a user of one. Rendered
    /// chats are for [`Tokenizer::encode_chat`].
    pub const TRUSTED: Self = Self {
        add_special: false,
        parse_special: true,
    };
    /// Text that must stay text, whatever it spells.
    pub const LITERAL: Self = Self {
        add_special: false,
        parse_special: false,
    };
}

/// Text to ids and back. Immutable; share it by `Arc`.
pub struct Tokenizer {
    encoder: Encoder,
    vocabulary: Vocabulary,
    specials: Specials,
    /// Blanks that decoding takes from the front of a whole text.
    strip_blanks: usize,
    reach: Option<Reach>,
    bos: Option<TokenId>,
    eos: Vec<TokenId>,
    add_bos: bool,
    add_eos: bool,
    templates: Templates,
}

enum Encoder {
    ByteLevel {
        added: AddedTokens,
        encoder: Box<ByteLevelEncoder>,
    },
    SentencePiece {
        added: AddedTokens,
        encoder: Box<SentencePieceEncoder>,
    },
    HuggingFace(Box<HuggingFaceEncoder>),
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("size", &self.size())
            .field("bos", &self.bos)
            .field("eos", &self.eos)
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Builds the tokenizer. A chat template that does not parse is no error here (the
    /// model still serves completions); see [`Self::chat_template_error`].
    ///
    /// *Errors*: the specification is damaged, or needs a rule this crate lacks.
    pub fn from_spec(spec: &TokenizerSpec) -> Result<Self, Error> {
        // As the tokens are spelled, which is never shorter than what they stand for.
        let spelled = spec.tokens.iter().map(|token| token.text.len()).max();
        let spelled = spelled.unwrap_or(0);
        let named = named_ids(spec);
        let is_control = |id: TokenId, kind: TokenKind| {
            is_hidden(kind) || (kind == TokenKind::UserDefined && named.contains(&id))
        };
        let spelled_tokens = || (0..).zip(&spec.tokens);
        let mut control: Vec<(String, TokenId)> = spelled_tokens()
            .filter(|(id, token)| is_control(*id, token.kind))
            .map(|(id, token)| (token.text.clone(), id))
            .collect();
        let text_tokens: Vec<(String, TokenId)> = spelled_tokens()
            .filter(|(id, token)| {
                token.kind == TokenKind::UserDefined && !is_control(*id, token.kind)
            })
            .map(|(id, token)| (token.text.clone(), id))
            .collect();
        let (encoder, mut vocabulary, strip_blanks, reach) = match &spec.model {
            TokenizerModel::ByteLevelBpe { merges, pre } => {
                let encoder = ByteLevelEncoder::new(&spec.tokens, merges, pre, spec.unknown)?;
                let reach = Reach::of(spelled, encoder.normalises());
                let encoder = Encoder::ByteLevel {
                    added: AddedTokens::new(text_tokens.clone(), control.clone())?,
                    encoder: Box::new(encoder),
                };
                (encoder, byte_level_vocabulary(spec), 0, Some(reach))
            }
            TokenizerModel::SentencePiece { add_space_prefix } => {
                let encoder =
                    SentencePieceEncoder::new(&spec.tokens, *add_space_prefix, spec.unknown)?;
                let encoder = Encoder::SentencePiece {
                    added: AddedTokens::new(unescaped(&text_tokens), unescaped(&control))?,
                    encoder: Box::new(encoder),
                };
                control = unescaped(&control);
                let strip_blanks = usize::from(*add_space_prefix);
                // An unknown token stands for one character.
                let reach = Reach::of(spelled.max(4), false);
                (
                    encoder,
                    sentence_piece_vocabulary(spec),
                    strip_blanks,
                    Some(reach),
                )
            }
            TokenizerModel::HuggingFace { json } => {
                let HuggingFace {
                    encoder,
                    mut vocabulary,
                    strip_blanks,
                    reach,
                } = HuggingFace::from_json(json, &named)?;
                control = encoder.special();
                for (id, token) in (0..).zip(&spec.tokens) {
                    if is_hidden(token.kind) {
                        vocabulary.mark_special(id);
                    }
                }
                while vocabulary.len() < spec.tokens.len() {
                    vocabulary.push(&[], false);
                }
                let encoder = Encoder::HuggingFace(Box::new(encoder));
                (encoder, vocabulary, strip_blanks, reach)
            }
        };
        for (name, id) in [("bos", spec.bos), ("unknown", spec.unknown)]
            .into_iter()
            .chain(spec.eos.iter().map(|&id| ("eos", Some(id))))
        {
            let Some(id) = id else { continue };
            if id as usize >= vocabulary.len() {
                return Err(Error::InvalidSpec {
                    reason: format!("{name} id {id} is outside the vocabulary"),
                });
            }
            vocabulary.mark_special(id);
        }
        let text = |id: TokenId| String::from_utf8_lossy(vocabulary.bytes(id)).into_owned();
        let names = match &spec.template_tokens {
            Some(tokens) => tokens
                .iter()
                .map(|(name, text)| (name.clone(), text.clone()))
                .collect(),
            // From a worker that does not say what its files say.
            None => [
                ("bos_token", spec.bos),
                ("eos_token", spec.eos.first().copied()),
                ("unk_token", spec.unknown),
                ("pad_token", spec.padding),
            ]
            .into_iter()
            .filter_map(|(name, id)| Some((name.to_owned(), text(id?))))
            .collect(),
        };
        let spellings = control.into_iter().map(|(text, _)| text).collect();
        let control = ControlTokens::new(spellings)?;
        Ok(Self {
            templates: Templates::new(&spec.chat_templates, names, control),
            encoder,
            specials: Specials::new(&vocabulary)?,
            vocabulary,
            strip_blanks,
            reach,
            bos: spec.bos,
            eos: spec.eos.clone(),
            add_bos: spec.add_bos,
            add_eos: spec.add_eos,
        })
    }

    /// Text to ids. Linear up to a logarithm in the text's length, for any text.
    ///
    /// *Errors*: [`Error::TextTooLong`]; [`Error::Unencodable`] for a vocabulary
    /// without bytes.
    pub fn encode(&self, text: &str, options: EncodeOptions) -> Result<Vec<TokenId>, Error> {
        self.encode_within(text, options, usize::MAX)
    }

    /// The same for whoever has no use for more than `max` tokens. Byte-level vocabularies
    /// stop there, however long the text is; others find it out at its end.
    ///
    /// *Errors*: [`Error::TooManyTokens`], or as [`Self::encode`].
    pub fn encode_within(
        &self,
        text: &str,
        options: EncodeOptions,
        max: usize,
    ) -> Result<Vec<TokenId>, Error> {
        if text.len() > TEXT_BYTES_MAX {
            return Err(Error::TextTooLong {
                bytes: text.len(),
                max: TEXT_BYTES_MAX,
            });
        }
        let mut ids = self.split_and_encode(Source::Text(text, options), max)?;
        if options.add_special {
            self.add_special(&mut ids);
        }
        if ids.len() > max {
            return Err(Error::TooManyTokens { max });
        }
        Ok(ids)
    }

    /// The ids of a rendered conversation. The template's own control tokens become
    /// tokens; those that the request spells stay text, unless it allowed them.
    ///
    /// *Errors*: as [`Self::encode_within`].
    pub fn encode_chat(&self, chat: &RenderedChat, max: usize) -> Result<Vec<TokenId>, Error> {
        let Some(marked) = chat.marked() else {
            return self.encode_within(chat, EncodeOptions::TRUSTED, max);
        };
        let ids = self.split_and_encode(Source::Chat(marked), max)?;
        match ids.len() > max {
            true => Err(Error::TooManyTokens { max }),
            false => Ok(ids),
        }
    }

    /// Cuts whole tokens out and encodes the text between them.
    fn split_and_encode(&self, source: Source<'_>, max: usize) -> Result<Vec<TokenId>, Error> {
        let bytes = match source {
            Source::Text(text, _) => text.len(),
            Source::Chat(marked) => marked.text.len(),
        };
        let mut ids = Vec::with_capacity((bytes / 3 + 2).min(max.saturating_add(2)));
        let mut merger = Merger::default();
        match &self.encoder {
            Encoder::ByteLevel { added, encoder } => {
                source.split(added, |segment| match segment {
                    Segment::Token(id) => {
                        ids.push(id);
                        Ok(())
                    }
                    Segment::Text(text) => encoder.encode(text, max, &mut merger, &mut ids),
                })?;
            }
            Encoder::SentencePiece { added, encoder } => {
                let mut at_border = true;
                source.split(added, |segment| match segment {
                    Segment::Token(id) => {
                        at_border = true;
                        ids.push(id);
                        Ok(())
                    }
                    Segment::Text(text) => {
                        let border = std::mem::replace(&mut at_border, false);
                        encoder.encode(text, border, &mut merger, &mut ids)
                    }
                })?;
            }
            Encoder::HuggingFace(encoder) => {
                ids = match source {
                    Source::Text(text, options) => {
                        encoder.encode(text, options.add_special, options.parse_special)?
                    }
                    Source::Chat(marked) => encoder.encode_marked(marked)?,
                };
            }
        }
        Ok(ids)
    }

    /// A number of tokens that no encoding of `text` is shorter than, found without
    /// encoding it; 0 if nothing is known.
    pub fn fewest_tokens(&self, text: &str) -> usize {
        self.reach.map_or(0, |reach| reach.fewest(text))
    }

    fn add_special(&self, ids: &mut Vec<TokenId>) {
        if let Some(bos) = self.bos.filter(|_| self.add_bos)
            && ids.first() != Some(&bos)
        {
            ids.insert(0, bos);
        }
        if let Some(&eos) = self.eos.first().filter(|_| self.add_eos)
            && ids.last() != Some(&eos)
        {
            ids.push(eos);
        }
    }

    /// Ids to text. Bytes that are no UTF-8 become U+FFFD; nothing else is changed, but
    /// for the one leading blank that SentencePiece models put there.
    pub fn decode(&self, ids: &[TokenId], skip_special: bool) -> String {
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        let mut strip = self.strip_blanks;
        for &id in ids {
            bytes.extend_from_slice(self.strip_front(self.shown(id, skip_special), &mut strip));
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The bytes of one token alone, as `bytes` of a logprob entry. Empty for padded
    /// and unknown ids.
    pub fn token_bytes(&self, id: TokenId) -> &[u8] {
        self.vocabulary.bytes(id)
    }

    /// One token for people, as `token` of a logprob entry. Half characters are
    /// written `bytes:\xf0\x9f`, as OpenAI does.
    pub fn token_text(&self, id: TokenId) -> String {
        let bytes = self.vocabulary.bytes(id);
        match std::str::from_utf8(bytes) {
            Ok(text) => text.to_owned(),
            Err(_) => bytes
                .iter()
                .fold("bytes:".to_owned(), |text, b| format!("{text}\\x{b:02x}")),
        }
    }

    /// Number of ids, holes included.
    pub fn size(&self) -> u32 {
        self.vocabulary.len() as u32
    }

    /// The token that starts a sequence, if the model has one.
    pub fn bos(&self) -> Option<TokenId> {
        self.bos
    }

    /// Every token that ends a sequence.
    pub fn eos(&self) -> &[TokenId] {
        &self.eos
    }

    /// Whether `skip_special` hides the token: control tokens, BOS, EOS and unknown.
    /// User-defined tokens (`<think>`) are text.
    pub fn is_special(&self, id: TokenId) -> bool {
        self.vocabulary.is_special(id)
    }

    /// Whether the model came with a chat template, usable or not.
    pub fn has_chat_template(&self) -> bool {
        !self.templates.is_empty()
    }

    /// The first template that does not parse, for a warning at load.
    pub fn chat_template_error(&self) -> Option<&Error> {
        self.templates.first_error()
    }

    /// Renders a conversation to a prompt; encode it with [`Self::encode_chat`].
    ///
    /// *Errors*: [`Error::NoChatTemplate`], [`Error::UnknownTemplate`],
    /// [`Error::TemplateSyntax`] (found in [`Self::from_spec`]),
    /// [`Error::TemplateRaised`] with the template's own message,
    /// [`Error::InvalidChat`] naming the field. Nothing is ever dropped silently: a
    /// message that the template leaves out is an [`Error::InvalidChat`].
    pub fn render_chat(&self, chat: &ChatRequest) -> Result<RenderedChat, Error> {
        self.templates.render(chat)
    }

    /// A text with the special tokens that it spells out as tokens; none if there is none.
    pub(crate) fn cut_special(&self, text: &str) -> Option<Vec<Symbol>> {
        self.specials.cut(text)
    }

    /// What stands for a special token in such a text.
    pub(crate) fn special_symbol(&self, id: TokenId) -> Option<Symbol> {
        self.specials.symbol(id)
    }

    /// The bytes of a token as output shows them.
    pub(crate) fn shown(&self, id: TokenId, skip_special: bool) -> &[u8] {
        if skip_special && self.vocabulary.is_special(id) {
            return &[];
        }
        self.vocabulary.bytes(id)
    }

    /// How many blanks decoding takes from the front of a whole text.
    pub(crate) fn strip_blanks(&self) -> usize {
        self.strip_blanks
    }

    /// Takes up to `*strip` blanks from the front; the first other byte ends it.
    pub(crate) fn strip_front<'b>(&self, mut bytes: &'b [u8], strip: &mut usize) -> &'b [u8] {
        while *strip > 0
            && let [first, rest @ ..] = bytes
        {
            if *first == b' ' {
                bytes = rest;
                *strip -= 1;
            } else {
                *strip = 0;
            }
        }
        bytes
    }
}

/// What is encoded.
#[derive(Clone, Copy)]
enum Source<'t> {
    Text(&'t str, EncodeOptions),
    Chat(&'t Marked),
}

impl Source<'_> {
    fn split(
        self,
        added: &AddedTokens,
        visit: impl FnMut(Segment<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        match self {
            Self::Text(text, options) => added.split(text, options.parse_special, visit),
            Self::Chat(marked) => added.split_marked(marked, visit),
        }
    }
}

/// Kinds that are never part of the text.
fn is_hidden(kind: TokenKind) -> bool {
    matches!(kind, TokenKind::Control | TokenKind::Unknown)
}

fn unescape(text: &str) -> String {
    text.replace(BLANK, " ")
}

fn unescaped(tokens: &[(String, TokenId)]) -> Vec<(String, TokenId)> {
    let tokens = tokens.iter();
    tokens.map(|(text, id)| (unescape(text), *id)).collect()
}

/// The ids that the model's files name for a purpose.
fn named_ids(spec: &TokenizerSpec) -> Vec<TokenId> {
    let one = [spec.bos, spec.unknown, spec.padding];
    let one = one.into_iter().flatten();
    one.chain(spec.eos.iter().copied()).collect()
}

fn byte_level_vocabulary(spec: &TokenizerSpec) -> Vocabulary {
    let mut vocabulary = Vocabulary::default();
    for token in &spec.tokens {
        let verbatim = || token.text.clone().into_bytes();
        let bytes = match token.kind {
            TokenKind::Unused => Vec::new(),
            TokenKind::Normal => byte_level::piece_bytes(&token.text).unwrap_or_else(verbatim),
            TokenKind::Byte => byte_token(&token.text).map_or_else(verbatim, |byte| vec![byte]),
            TokenKind::Control | TokenKind::Unknown | TokenKind::UserDefined => verbatim(),
        };
        vocabulary.push(&bytes, is_hidden(token.kind));
    }
    vocabulary
}

fn sentence_piece_vocabulary(spec: &TokenizerSpec) -> Vocabulary {
    let mut vocabulary = Vocabulary::default();
    for token in &spec.tokens {
        let bytes = match token.kind {
            TokenKind::Unused => Vec::new(),
            TokenKind::Normal | TokenKind::UserDefined => unescape(&token.text).into_bytes(),
            TokenKind::Byte => byte_token(&token.text).into_iter().collect(),
            TokenKind::Control | TokenKind::Unknown => token.text.clone().into_bytes(),
        };
        vocabulary.push(&bytes, is_hidden(token.kind));
    }
    vocabulary
}
