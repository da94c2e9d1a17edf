//! What one choice has sent to its client, and what is held until it may be sent.
//!
//! Tokens arrive from two workers, twice or out of order; each index leaves once,
//! in order, from whichever source had it first. The log is also what a
//! re-placement forces. It knows no text and no worker.

use std::collections::BTreeMap;

use baton_proto::TokenId;
use baton_proto::sampling::{FinishReason, SampledToken};

/// A token as a worker reported it, with the reason if its choice ends with it.
pub type Drawn = (SampledToken, Option<FinishReason>);

/// Why a report cannot be true beside an earlier one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Conflict {
    #[error("choice {choice} index {index}: one worker drew token {ours}, another {theirs}")]
    Token {
        choice: u32,
        index: u32,
        ours: TokenId,
        theirs: TokenId,
    },
    #[error("choice {choice} index {index}: the client claims token {claimed}, {drawn} was drawn")]
    Claimed {
        choice: u32,
        index: u32,
        claimed: TokenId,
        drawn: TokenId,
    },
    #[error("choice {choice}: a worker reported token index {index}, max_tokens is {max_tokens}")]
    BeyondMax {
        choice: u32,
        index: u64,
        max_tokens: u32,
    },
    #[error("choice {choice}: a worker reported its end after {reported} tokens, {sent} were sent")]
    End {
        choice: u32,
        reported: u32,
        sent: u32,
    },
}

/// Tokens that may be sent now; `first_index` is the index of the first.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    pub first_index: u32,
    pub tokens: Vec<SampledToken>,
}

/// The log of one choice. Bounded: at most `max_tokens` entries, sent and held together.
#[derive(Clone, Debug)]
pub struct TokenLog {
    choice: u32,
    max_tokens: u32,
    sent: Vec<TokenId>,
    /// Indices at or above `sent.len()`.
    held: BTreeMap<u32, Drawn>,
    /// An end that was announced for a length not reached yet.
    announced: Option<(FinishReason, u32)>,
    finished: Option<FinishReason>,
    /// The tokens are a client's word; no worker has drawn the last one yet.
    claimed: bool,
}

impl TokenLog {
    /// An empty log.
    pub fn new(choice: u32, max_tokens: u32) -> Self {
        Self {
            choice,
            max_tokens,
            sent: Vec::new(),
            held: BTreeMap::new(),
            announced: None,
            finished: None,
            claimed: false,
        }
    }

    /// A log that begins with what a client says it was sent. At most `max_tokens` ids.
    pub fn claimed(choice: u32, max_tokens: u32, ids: Vec<TokenId>) -> Self {
        Self {
            claimed: !ids.is_empty(),
            sent: ids,
            ..Self::new(choice, max_tokens)
        }
    }

    /// Tokens sent so far.
    pub fn sent(&self) -> &[TokenId] {
        &self.sent
    }

    /// Whether nothing was sent yet.
    pub fn is_empty(&self) -> bool {
        self.sent.is_empty()
    }

    /// Number of tokens sent.
    pub fn len(&self) -> u32 {
        u32::try_from(self.sent.len()).expect("a log has at most max_tokens entries")
    }

    /// Whether no further token may come. The reason is still the worker's to say:
    /// the last token allowed may also be an end token.
    pub fn is_full(&self) -> bool {
        self.len() == self.max_tokens
    }

    /// What a new worker is made to repeat: all of it, or all but the last token
    /// when nothing would be left to draw. The worker draws that one again and
    /// says how the choice ended. A client's last token is drawn again as well, since
    /// the choice may have ended with it, and to see that it is right.
    pub fn forced(&self) -> &[TokenId] {
        let over = self.finished.is_some() || self.len() == self.max_tokens || self.claimed;
        &self.sent[..self.sent.len() - usize::from(over)]
    }

    /// Why the choice ended, if it did.
    pub fn finished(&self) -> Option<FinishReason> {
        self.finished
    }

    /// Takes a run that starts at `first_index`; returns what may be sent now.
    ///
    /// # Errors
    /// A [`Conflict`] when the run contradicts what is known. Nothing of it is then kept.
    pub fn offer(&mut self, first_index: u32, run: Vec<Drawn>) -> Result<Run, Conflict> {
        let start = self.len();
        for (offset, drawn) in run.into_iter().enumerate() {
            let index = u64::from(first_index) + offset as u64;
            self.hold(index, drawn)?;
        }
        let mut tokens = Vec::new();
        while self.finished.is_none()
            && let Some((token, finish)) = self.held.remove(&self.len())
        {
            self.sent.push(token.id);
            tokens.push(token);
            self.finished = finish.or_else(|| self.reached_end());
        }
        if self.finished.is_some() {
            self.held.clear();
        }
        Ok(Run {
            first_index: start,
            tokens,
        })
    }

    fn hold(&mut self, index: u64, drawn: Drawn) -> Result<(), Conflict> {
        let known = match u32::try_from(index) {
            Ok(index) if index < self.len() => Some(self.sent[index as usize]),
            // Tokens past the end were decoded before the worker heard of it.
            _ if self.finished.is_some() => return Ok(()),
            Ok(index) if index < self.max_tokens => {
                self.held.get(&index).map(|(token, _)| token.id)
            }
            _ => {
                return Err(Conflict::BeyondMax {
                    choice: self.choice,
                    index,
                    max_tokens: self.max_tokens,
                });
            }
        };
        let index = index as u32;
        let claimed = self.claimed && index + 1 == self.len();
        match known {
            Some(ours) if ours != drawn.0.id && claimed => Err(Conflict::Claimed {
                choice: self.choice,
                index,
                claimed: ours,
                drawn: drawn.0.id,
            }),
            Some(ours) if ours != drawn.0.id => Err(Conflict::Token {
                choice: self.choice,
                index,
                ours,
                theirs: drawn.0.id,
            }),
            Some(_) => {
                self.claimed &= !claimed;
                // The second source may know that the choice ends here.
                if u64::from(index) + 1 == self.sent.len() as u64 && self.finished.is_none() {
                    self.finished = drawn.1;
                }
                Ok(())
            }
            None => {
                self.held.insert(index, drawn);
                Ok(())
            }
        }
    }

    fn reached_end(&self) -> Option<FinishReason> {
        match self.announced {
            Some((reason, at)) if at == self.len() => Some(reason),
            _ => None,
        }
    }

    /// A worker says that the choice ended after `output_tokens` tokens.
    ///
    /// # Errors
    /// [`Conflict::End`] when more tokens than that were sent already.
    pub fn announce_end(
        &mut self,
        reason: FinishReason,
        output_tokens: u32,
    ) -> Result<(), Conflict> {
        if self.finished.is_some() {
            return Ok(());
        }
        if output_tokens < self.len() {
            return Err(Conflict::End {
                choice: self.choice,
                reported: output_tokens,
                sent: self.len(),
            });
        }
        self.announced = Some((reason, output_tokens));
        self.finished = self.reached_end();
        Ok(())
    }

    /// A stop string matched: the choice ends after `output_tokens` tokens, and
    /// what was logged past it never counts.
    pub fn stop_at(&mut self, output_tokens: u32) {
        self.sent.truncate(output_tokens as usize);
        self.claimed = false;
        self.held.clear();
        self.finished = Some(FinishReason::Stop);
    }

    /// The worker that held back a gap is gone; another one repeats from the log's end.
    pub fn forget_held(&mut self) {
        self.held.clear();
        self.announced = None;
    }
}
