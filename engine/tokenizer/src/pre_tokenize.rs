//! How each known byte-level model cuts text into words before merging.
//!
//! A GGUF file names its split rule (`tokenizer.ggml.pre`) but does not contain it, so
//! the rules stand here. A name that is not in the table is refused: a wrong rule
//! gives plausible but wrong ids. `default` is refused as well; it is what
//! converters write when they did not recognise the tokenizer.
//!
//! The published patterns end in `\s+(?!\S)|\s+`. That look-ahead is the only part
//! that a linear-time engine cannot run, so patterns here end in `\s+` and the last
//! blank is given back afterwards ([`Blanks`]). Hostile text cannot make it backtrack.
//!
//! *Source*: llama.cpp `src/llama-vocab.cpp` for the names, the models' own
//! `tokenizer.json` for the patterns.

use regex::Regex;

use crate::error::Error;

/// What a run of blanks in front of a word gives back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Blanks {
    /// The pattern has no `\s+(?!\S)`.
    Keep,
    /// The last blank belongs to what follows.
    GiveBackLast,
    /// The same, but a run that ends in a line break is a word of its own
    /// (the pattern has `\s*[\r\n]+`).
    GiveBackLastUnlessLineBreak,
}

/// One cut; a later stage cuts the pieces of the one before.
struct Stage {
    pattern: &'static str,
    blanks: Blanks,
}

/// A split rule.
struct Rule {
    names: &'static [&'static str],
    stages: &'static [Stage],
    /// A word that is itself a token is taken whole, without merging.
    whole_words: bool,
    /// The text is brought into Unicode NFC first.
    nfc: bool,
}

const DIGITS_ONE_BY_ONE: Stage = Stage {
    pattern: r"\p{N}",
    blanks: Blanks::Keep,
};
const GPT2: Stage = Stage {
    pattern: r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+",
    blanks: Blanks::GiveBackLast,
};

const RULES: &[Rule] = &[
    Rule {
        names: &[
            "gpt-2",
            "gpt2",
            "phi-2",
            "mpt",
            "olmo",
            "jais",
            "exaone4",
            "granite-docling",
        ],
        stages: &[GPT2],
        whole_words: false,
        nfc: false,
    },
    Rule {
        names: &[
            "smollm",
            "starcoder",
            "refact",
            "command-r",
            "codeshell",
            "exaone",
            "minerva-7b",
        ],
        stages: &[DIGITS_ONE_BY_ONE, GPT2],
        whole_words: false,
        nfc: false,
    },
    Rule {
        names: &[
            "llama3",
            "llama-v3",
            "llama-bpe",
            "falcon3",
            "lfm2",
            "pixtral",
        ],
        stages: &[LLAMA3],
        whole_words: true,
        nfc: false,
    },
    Rule {
        names: &["dbrx", "smaug-bpe", "glm4", "chatglm-bpe"],
        stages: &[LLAMA3],
        whole_words: false,
        nfc: false,
    },
    Rule {
        names: &["qwen2"],
        stages: &[QWEN2],
        whole_words: false,
        nfc: true,
    },
    Rule {
        names: &[
            "deepseek-r1-qwen",
            "megrez",
            "stablelm2",
            "hunyuan",
            "grok-2",
        ],
        stages: &[QWEN2],
        whole_words: false,
        nfc: false,
    },
    Rule {
        names: &["qwen35"],
        stages: &[Stage {
            pattern: r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
            blanks: Blanks::GiveBackLastUnlessLineBreak,
        }],
        whole_words: false,
        nfc: true,
    },
    Rule {
        names: &["tekken"],
        stages: &[Stage {
            pattern: r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+",
            blanks: Blanks::GiveBackLastUnlessLineBreak,
        }],
        whole_words: true,
        nfc: false,
    },
    Rule {
        names: &["gpt-4o", "llama4"],
        stages: &[Stage {
            pattern: r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+",
            blanks: Blanks::GiveBackLastUnlessLineBreak,
        }],
        whole_words: false,
        nfc: false,
    },
    Rule {
        names: &["deepseek-v3", "hunyuan-dense"],
        stages: &[
            Stage {
                pattern: r"\p{N}{1,3}",
                blanks: Blanks::Keep,
            },
            Stage {
                pattern: r"[\u{4e00}-\u{9fa5}\u{3040}-\u{309f}\u{30a0}-\u{30ff}]+",
                blanks: Blanks::Keep,
            },
            Stage {
                pattern: r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+"##,
                blanks: Blanks::GiveBackLastUnlessLineBreak,
            },
        ],
        whole_words: false,
        nfc: false,
    },
    Rule {
        names: &["deepseek-coder"],
        stages: &[
            Stage {
                pattern: r"[\r\n]",
                blanks: Blanks::Keep,
            },
            Stage {
                pattern: r"\s?\p{L}+",
                blanks: Blanks::Keep,
            },
            Stage {
                pattern: r"\s?\p{P}+",
                blanks: Blanks::Keep,
            },
            Stage {
                pattern: r"[\u{4e00}-\u{9fa5}\u{800}-\u{4e00}\u{ac00}-\u{d7ff}]+",
                blanks: Blanks::Keep,
            },
            DIGITS_ONE_BY_ONE,
        ],
        whole_words: false,
        nfc: false,
    },
];

const LLAMA3: Stage = Stage {
    pattern: r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
    blanks: Blanks::GiveBackLastUnlessLineBreak,
};
const QWEN2: Stage = Stage {
    pattern: r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
    blanks: Blanks::GiveBackLastUnlessLineBreak,
};

/// A compiled rule.
#[derive(Debug)]
pub(crate) struct PreTokenizer {
    stages: Vec<(Regex, Blanks)>,
    pub(crate) whole_words: bool,
    pub(crate) nfc: bool,
}

impl PreTokenizer {
    /// Looks the rule up by its GGUF name.
    pub(crate) fn named(name: &str) -> Result<Self, Error> {
        let rule = RULES
            .iter()
            .find(|rule| rule.names.contains(&name))
            .ok_or_else(|| Error::UnknownPreTokenizer {
                name: name.to_owned(),
                known: RULES
                    .iter()
                    .flat_map(|rule| rule.names)
                    .copied()
                    .collect::<Vec<_>>()
                    .join(", "),
            })?;
        let stages = rule
            .stages
            .iter()
            .map(|stage| {
                let regex = Regex::new(stage.pattern).map_err(|error| Error::InvalidSpec {
                    reason: format!("split rule `{name}`: {error}"),
                })?;
                Ok((regex, stage.blanks))
            })
            .collect::<Result<_, Error>>()?;
        Ok(Self {
            stages,
            whole_words: rule.whole_words,
            nfc: rule.nfc,
        })
    }

    /// Hands the words of `text` to `visit`, in order. Together they are the text.
    pub(crate) fn split<'t>(
        &self,
        text: &'t str,
        visit: &mut impl FnMut(&'t str) -> Result<(), Error>,
    ) -> Result<(), Error> {
        split_stage(&self.stages, text, visit)
    }
}

fn split_stage<'t>(
    stages: &[(Regex, Blanks)],
    text: &'t str,
    visit: &mut impl FnMut(&'t str) -> Result<(), Error>,
) -> Result<(), Error> {
    let Some(((regex, blanks), later)) = stages.split_first() else {
        return if text.is_empty() { Ok(()) } else { visit(text) };
    };
    let mut done = 0;
    while let Some(found) = regex.find_at(text, done) {
        let (start, mut end) = (found.start(), found.end());
        if *blanks != Blanks::Keep && end < text.len() {
            end -= blank_to_give_back(found.as_str(), *blanks);
        }
        split_stage(later, &text[done..start], visit)?;
        split_stage(later, &text[start..end], visit)?;
        done = end;
    }
    split_stage(later, &text[done..], visit)
}

/// Bytes of the last blank of a match, if the match is a run of at least two blanks.
/// Called only where more text follows; a greedy run is then followed by a non-blank.
fn blank_to_give_back(matched: &str, blanks: Blanks) -> usize {
    let mut chars = matched.chars();
    let Some(last) = chars.next_back() else {
        return 0;
    };
    let ends_line = matches!(last, '\r' | '\n');
    if !last.is_whitespace()
        || (ends_line && blanks == Blanks::GiveBackLastUnlessLineBreak)
        || chars.as_str().is_empty()
        || !chars.all(char::is_whitespace)
    {
        return 0;
    }
    last.len_utf8()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words<'t>(name: &str, text: &'t str) -> Vec<&'t str> {
        let mut words = Vec::new();
        PreTokenizer::named(name)
            .unwrap()
            .split(text, &mut |word| {
                words.push(word);
                Ok(())
            })
            .unwrap();
        words
    }

    #[test]
    fn every_rule_compiles_and_names_are_unique() {
        let mut names: Vec<_> = RULES.iter().flat_map(|rule| rule.names).collect();
        for name in &names {
            PreTokenizer::named(name).unwrap();
        }
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    #[test]
    fn unknown_and_default_names_are_refused_by_name() {
        for name in ["default", "", "smollm9"] {
            let Err(Error::UnknownPreTokenizer { name: got, .. }) = PreTokenizer::named(name)
            else {
                panic!("`{name}` was accepted");
            };
            assert_eq!(got, name);
        }
    }

    #[test]
    fn gives_the_last_blank_to_the_next_word() {
        assert_eq!(words("gpt-2", "a   b  "), ["a", "  ", " b", "  "]);
        assert_eq!(words("gpt-2", "a\n\nb"), ["a", "\n", "\n", "b"]);
        assert_eq!(words("llama-bpe", "a\n\nb"), ["a", "\n\n", "b"]);
        assert_eq!(words("llama-bpe", "a \n  b"), ["a", " \n", " ", " b"]);
        assert_eq!(words("qwen2", " \u{3000}x"), [" ", "\u{3000}x"]);
    }

    #[test]
    fn digits_go_one_by_one_by_three_or_together() {
        assert_eq!(words("smollm", "a 1234"), ["a", " ", "1", "2", "3", "4"]);
        assert_eq!(words("llama-bpe", "1234"), ["123", "4"]);
        assert_eq!(words("gpt-2", "a 1234"), ["a", " 1234"]);
    }
}
