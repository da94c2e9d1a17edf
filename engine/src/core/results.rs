//! From a finished step to tokens: computed positions, draws, forks, ends.

use baton_proto::TokenId;
use baton_proto::sampling::SampledToken;

use super::outbox::append;
use super::request::{Kind, Request, RequestStage, Sequence};
use super::{Core, InFlight};
use crate::api::{Event, RequestKey, StepStatistics};
use crate::sampling::{self, Draw, Rules};
use crate::scheduler::{SequenceId, Stage};
use crate::step::StepOutput;

impl Core {
    /// Takes over what a step computed.
    pub(super) fn take_results(
        &mut self,
        rows: &[InFlight],
        output: &StepOutput,
        statistics: &mut StepStatistics,
    ) {
        // First all positions, then all draws: a draw may end or fail a request, and
        // every row's blocks must be final before they are shared or given back.
        for row in rows {
            let sequence = self
                .sequences
                .get_mut(&row.id)
                .expect("a row's sequence is kept");
            if sequence.trunk || sequence.known - sequence.computed > 1 {
                statistics.prefill_tokens += row.tokens;
            } else {
                statistics.decode_tokens += row.tokens;
            }
            sequence.computed += row.tokens;
            self.publish_blocks(row.id);
        }
        let mut logits = output.logits.chunks_exact(output.vocab_size.max(1));
        let mut best = output.best.iter();
        for row in rows {
            let from = if !row.wants_logits {
                Source::Logits(&[])
            } else if output.best.is_empty() {
                Source::Logits(logits.next().unwrap_or_default())
            } else {
                Source::Best(best.next().copied().flatten())
            };
            let Some(sequence) = self.sequences.get(&row.id) else {
                continue;
            };
            if sequence.computed < sequence.known {
                continue;
            }
            let drawn = if sequence.trunk {
                self.complete_prompt(row.id, from)
            } else {
                self.continue_choice(row.id, from)
            };
            match drawn {
                Ok(()) => {}
                Err(error) => {
                    let not_finite = matches!(error, sampling::Error::NotFinite { .. });
                    self.totals.not_finite += u64::from(not_finite);
                    self.fail(row.key, error.to_proto());
                }
            }
        }
    }

    /// Names the whole blocks a sequence has computed in the prefix index.
    pub(super) fn publish_blocks(&mut self, id: SequenceId) {
        let block_size = self.pools.layout().block_size;
        let sequence = self.sequences.get_mut(&id).expect("the caller has it");
        let request = &self.requests[&sequence.key];
        let whole = sequence.computed / block_size;
        if request.hasher.is_some() && whole > sequence.published {
            sequence.extend_names(request, whole, block_size);
            self.pools
                .publish(&sequence.tables, &sequence.names, sequence.published, whole);
            sequence.published = whole;
        }
    }

    /// The prompt is computed: draws the next token of every choice that has none
    /// forced, and lets the choices go their own ways.
    fn complete_prompt(&mut self, id: SequenceId, from: Source<'_>) -> Result<(), sampling::Error> {
        let key = self.sequences[&id].key;
        let count = self.requests[&key].choices.len() as u32;
        let mut drawn: Vec<Option<SampledToken>> = Vec::new();
        for choice in 0..count {
            let request = &self.requests[&key];
            let waits = &request.choices[choice as usize];
            let token = if waits.ended || !waits.output.is_empty() {
                None
            } else {
                Some(draw(request, choice, from, &mut self.scratch)?)
            };
            drawn.push(token);
        }
        let request = self
            .requests
            .get_mut(&key)
            .expect("a sequence has its request");
        for (choice, token) in drawn.into_iter().enumerate() {
            let Some(token) = token else { continue };
            if request.kind == Kind::Prefill {
                let reason = append(request, choice as u32, token.id, self.context_max);
                request.first[choice] = Some((token, reason));
                // Nothing more is computed here for it.
                request.choices[choice].ended = true;
            } else {
                self.outbox
                    .push_token(request, choice as u32, token, self.context_max);
            }
        }
        self.fork(id);
        Ok(())
    }

    /// A choice's known tokens are all computed: draws its next one.
    fn continue_choice(&mut self, id: SequenceId, from: Source<'_>) -> Result<(), sampling::Error> {
        let sequence = self.sequences.get_mut(&id).expect("the caller has it");
        let key = sequence.key;
        let request = self
            .requests
            .get_mut(&key)
            .expect("a sequence has its request");
        let token = draw(request, id.choice, from, &mut self.scratch)?;
        sequence.known += 1;
        if request.kind == Kind::Prefill {
            let reason = append(request, id.choice, token.id, self.context_max);
            request.first[id.choice as usize] = Some((token, reason));
            request.choices[id.choice as usize].ended = true;
        } else {
            self.outbox
                .push_token(request, id.choice, token, self.context_max);
        }
        if request.choices[id.choice as usize].ended {
            self.drop_sequence(id);
            self.end_if_done(key);
        }
        Ok(())
    }

    /// Replaces a trunk whose prompt is complete by one sequence per choice that goes
    /// on. They share the prompt's blocks; who writes into the partial one copies it.
    pub(super) fn fork(&mut self, id: SequenceId) {
        let layout = self.pools.layout().clone();
        let mut trunk = self.sequences.remove(&id).expect("the caller has it");
        let request = self
            .requests
            .get_mut(&trunk.key)
            .expect("a sequence has its request");
        let prompt = request.prompt_len();
        let partial = !prompt.is_multiple_of(layout.block_size);
        for choice in 0..request.choices.len() as u32 {
            let state = &request.choices[choice as usize];
            if state.ended {
                continue;
            }
            let known = prompt + state.output.len() as u32;
            let wanted = match request.kind {
                // Prompts computed here promised nothing; a choice grows as any other.
                Kind::Local => 0,
                Kind::Prefill => layout.blocks_for(known) - prompt / layout.block_size,
                Kind::Receive => {
                    let soon = known + self.limits.growth_blocks * layout.block_size;
                    let most = prompt + request.rules.params().max_tokens;
                    layout.blocks_for(soon.min(most)) - layout.blocks_for(prompt)
                        + u32::from(partial && request.choices.len() > 1)
                }
            };
            let credit = wanted.min(trunk.credit);
            trunk.credit -= credit;
            let branch = Sequence {
                id: request.id(choice),
                key: trunk.key,
                trunk: false,
                stage: Stage::Running,
                known,
                computed: prompt,
                tables: self.pools.share(&trunk.tables),
                names: trunk.names.clone(),
                published: trunk.published,
                credit,
                extra_credit: 0,
                slots: 1,
                charge: request.unit_charge.clone(),
            };
            self.sequences.insert(branch.id, branch);
        }
        if request.kind == Kind::Prefill {
            self.pools.pin(&trunk.tables);
            request.pinned = Some(trunk.tables);
            request.held_charge.clone_from(&request.unit_charge);
        } else {
            self.pools.release(trunk.tables);
        }
        self.end_if_done(trunk.key);
    }

    /// Ends a request whose choices have all ended.
    fn end_if_done(&mut self, key: RequestKey) {
        let request = self.requests.get_mut(&key).expect("the caller has it");
        if !request.all_ended() {
            return;
        }
        if request.kind == Kind::Prefill {
            let mut request = self.requests.remove(&key).expect("it was there above");
            self.emit_first(&mut request);
            self.requests.insert(key, request);
        } else {
            self.withdraw(key);
        }
    }

    /// Every choice of a prefill has its next token; only the peer's reads are left.
    pub(super) fn emit_first(&mut self, request: &mut Request) {
        request.stage = RequestStage::AwaitingRelease;
        let tokens = request
            .first
            .iter_mut()
            .map(|first| first.take().expect("every choice has its next token"))
            .collect();
        self.outbox.first.push(Event::First {
            key: request.key,
            tokens,
            cached_tokens: request.cached_tokens,
        });
    }
}

/// What a token is drawn from.
#[derive(Clone, Copy)]
enum Source<'a> {
    Logits(&'a [f32]),
    Best(Option<TokenId>),
}

fn draw(
    request: &Request,
    choice: u32,
    from: Source<'_>,
    scratch: &mut sampling::Scratch,
) -> Result<SampledToken, sampling::Error> {
    let state = &request.choices[choice as usize];
    let draw = Draw {
        choice,
        index: state.output.len() as u32,
    };
    match from {
        Source::Logits(logits) => request.rules.draw(draw, &state.history, logits, scratch),
        Source::Best(best) => {
            debug_assert!(request.rules.takes_best_of(draw, &state.history).is_some());
            Rules::take_best(best)
        }
    }
}
