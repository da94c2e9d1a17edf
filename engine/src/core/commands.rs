//! What each command does to the core. Runs between steps, never inside one.

use std::time::Duration;

use baton_proto::block_hash::BlockHasher;
use baton_proto::sampling::{FinishReason, SampledToken};
use baton_proto::{Error, ErrorKind};

use super::Core;
use super::admission::Needs;
use super::request::{Choice, Kind, Request, RequestStage, Sequence, shipped};
use crate::api::{Command, Event, Rejection, RequestKey, Submission, Work};
use crate::sampling::Rules;
use crate::scheduler::Stage;

impl Core {
    /// Takes one command. Its events are emitted before this returns.
    pub fn handle(&mut self, command: Command, now: Duration) {
        match command {
            Command::Submit(submission) => self.submit(*submission, now),
            Command::Commit {
                key,
                first,
                foreign,
            } => self.commit(key, first, foreign),
            Command::Cancel { key } => self.withdraw(key),
            Command::CancelChoice { key, choice } => self.cancel_choice(key, choice),
            Command::Release { key } => self.release(key),
            Command::Pause {
                key,
                choice,
                paused,
            } => {
                let choice = self
                    .requests
                    .get_mut(&key)
                    .and_then(|request| request.choices.get_mut(choice as usize));
                if let Some(choice) = choice {
                    choice.paused = paused;
                }
            }
            Command::ClearCache => self.pools.clear_cache(),
        }
        self.flush();
    }

    fn submit(&mut self, submission: Submission, now: Duration) {
        let key = submission.key;
        match self.check(&submission) {
            Err(error) => {
                let retry_after = error.retry_after;
                self.sink.emit(Event::Rejected {
                    key,
                    rejection: Rejection { error, retry_after },
                });
            }
            Ok(needs) => {
                self.sink.emit(Event::Accepted { key });
                self.enqueue(submission, needs, now);
            }
        }
    }

    /// Puts a checked submission into the queue.
    fn enqueue(&mut self, submission: Submission, needs: Needs, now: Duration) {
        let Submission {
            key,
            work,
            prompt,
            mut forced,
            sampling,
            cache_salt,
            priority,
            use_cache,
            itl_target,
            ..
        } = submission;
        let layout = self.pools.layout();
        let block_size = layout.block_size;
        let rules = Rules::new(
            &sampling,
            &self.eos,
            self.tokenizer_size,
            prompt.len() as u32,
        );
        forced.resize(sampling.n as usize, Vec::new());
        let choices: Vec<Choice> = forced
            .into_iter()
            .map(|output| Choice {
                history: rules.replay(&prompt, &output),
                output,
                ended: false,
                paused: false,
            })
            .collect();
        let groups = layout.groups.len();
        let (kind, ship) = match &work {
            Work::Local => (Kind::Local, vec![0..0; groups]),
            Work::Receive => (Kind::Receive, vec![0..0; groups]),
            Work::Prefill { ship } => (
                Kind::Prefill,
                (0..groups).map(|group| shipped(ship, group)).collect(),
            ),
        };
        let hasher = (use_cache && self.prefix_cache)
            .then(|| BlockHasher::new(&cache_salt, layout.numerics, ""));
        let mut request = Request {
            key,
            kind,
            arrival: self.arrivals,
            arrived: now,
            tenant: cache_salt,
            priority,
            tag: 0,
            stage: RequestStage::Queued,
            prompt: prompt.into(),
            first: vec![None; choices.len()],
            choices,
            rules,
            hasher,
            itl_target,
            delayed: false,
            started: false,
            cached_tokens: 0,
            ship,
            pinned: None,
            granted: vec![Vec::new(); groups],
            held_charge: vec![0; groups],
            unit_charge: needs.unit_charge,
        };
        self.arrivals += 1;
        self.end_forced_choices(&mut request);
        if request.all_ended() {
            if request.kind == Kind::Prefill {
                self.emit_first(&mut request);
                self.requests.insert(key, request);
            } else {
                self.outbox.released.push(key);
            }
            return;
        }
        let expected = match request.kind {
            Kind::Prefill => 0,
            Kind::Local | Kind::Receive => self.pacer.foreseen(&request, request.made_least()),
        };
        let tokens =
            u64::from(request.prompt_len()) + u64::from(expected) * request.choices.len() as u64;
        request.tag = self.fair_clock.enter(&request.tenant, tokens);
        let mut trunk = Sequence {
            id: request.id(0),
            key,
            trunk: true,
            stage: Stage::Waiting,
            known: request.prompt_len(),
            computed: 0,
            tables: self.pools.empty_tables(),
            names: Vec::new(),
            published: 0,
            credit: 0,
            extra_credit: needs.extra_credit,
            slots: needs.slots,
            charge: request
                .unit_charge
                .iter()
                .map(|unit| unit * needs.slots)
                .collect(),
        };
        let whole = request.prompt_len() / block_size;
        trunk.extend_names(&request, whole, block_size);
        self.sequences.insert(trunk.id, trunk);
        self.requests.insert(key, request);
    }

    /// A resumed choice may have ended with its last forced token. It draws nothing;
    /// in `First` its last token stands again, with the reason.
    fn end_forced_choices(&mut self, request: &mut Request) {
        for choice in 0..request.choices.len() {
            let output = &request.choices[choice].output;
            let Some(last) = output.last() else { continue };
            let index = output.len() as u32 - 1;
            let Some(reason) = request.rules.end_after(*last, index) else {
                continue;
            };
            request.first[choice] = Some((
                SampledToken {
                    id: *last,
                    logprob: None,
                },
                Some(reason),
            ));
            request.choices[choice].ended = true;
            if request.kind != Kind::Prefill {
                self.outbox.finished(request, choice as u32, reason);
            }
        }
    }

    /// The KV of a reservation's prompt has arrived: its choices may run.
    fn commit(&mut self, key: RequestKey, first: Vec<SampledToken>, foreign: bool) {
        let Some(request) = self.requests.get_mut(&key) else {
            return;
        };
        if request.stage != RequestStage::Reserved {
            tracing::warn!(?key, stage = ?request.stage, "commit of a request that is not reserved");
            return;
        }
        if foreign {
            // From here on nothing of it is named. What it hit itself was ours.
            request.hasher = None;
        }
        let id = request.id(0);
        let trunk = self
            .sequences
            .get_mut(&id)
            .expect("a reserved request has its trunk");
        let granted: Vec<_> = request.granted.iter_mut().map(std::mem::take).collect();
        for (group, granted) in granted.into_iter().enumerate() {
            for granted in granted {
                self.pools
                    .skip_to(&mut trunk.tables, group, granted.ordinal);
                self.pools
                    .append_committed(&mut trunk.tables, group, granted.block);
            }
        }
        trunk.computed = trunk.known;
        trunk.stage = Stage::Running;
        request.stage = RequestStage::Active;
        let bad = first.len() != request.choices.len()
            || first.iter().any(|token| token.id >= self.tokenizer_size);
        if bad {
            let message = format!("the commit has {} first tokens or a bad id", first.len());
            self.fail(
                key,
                Error::new(ErrorKind::Internal, message).with_reason("BAD_COMMIT"),
            );
            return;
        }
        self.publish_blocks(id);
        let request = self.requests.get_mut(&key).expect("it was there above");
        for (choice, token) in first.into_iter().enumerate() {
            if !request.choices[choice].ended {
                self.outbox
                    .push_token(request, choice as u32, token, self.context_max);
            }
        }
        self.fork(id);
    }

    fn cancel_choice(&mut self, key: RequestKey, choice: u32) {
        let Some(request) = self.requests.get_mut(&key) else {
            return;
        };
        if request.kind == Kind::Prefill || request.stage == RequestStage::AwaitingRelease {
            return;
        }
        match request.choices.get_mut(choice as usize) {
            Some(choice) if !choice.ended => choice.ended = true,
            _ => return,
        }
        self.outbox
            .finished(request, choice, FinishReason::Cancelled);
        let id = request.id(choice);
        if self
            .sequences
            .get(&id)
            .is_some_and(|sequence| !sequence.trunk)
        {
            self.drop_sequence(id);
        }
        let request = &self.requests[&key];
        if request.all_ended() && request.stage != RequestStage::Reserved {
            self.withdraw(key);
        }
    }

    /// Ends a request: what no peer can touch is given back now, the rest on `Release`.
    pub(super) fn withdraw(&mut self, key: RequestKey) {
        let Some(request) = self.requests.get_mut(&key) else {
            return;
        };
        if request.stage == RequestStage::AwaitingRelease {
            return;
        }
        for choice in 0..request.choices.len() as u32 {
            let Some(sequence) = self.sequences.remove(&request.id(choice)) else {
                continue;
            };
            let sending = request.kind == Kind::Prefill && sequence.trunk && request.started;
            if sending {
                self.pools.pin(&sequence.tables);
                request.pinned = Some(sequence.tables);
                request.held_charge.clone_from(&request.unit_charge);
            } else {
                self.pools.release(sequence.tables);
            }
        }
        if request.stage == RequestStage::Reserved {
            for (group, granted) in request.granted.iter().enumerate() {
                for granted in granted {
                    self.pools.pool_mut(group).quarantine(granted.block);
                }
            }
            request.held_charge.clone_from(&request.unit_charge);
        }
        let touched = request.pinned.is_some() || request.stage == RequestStage::Reserved;
        if touched {
            request.stage = RequestStage::AwaitingRelease;
        } else {
            self.requests.remove(&key);
            self.outbox.released.push(key);
        }
    }

    /// No peer touches the request's blocks any more.
    fn release(&mut self, key: RequestKey) {
        let Some(request) = self.requests.get(&key) else {
            return;
        };
        let lent = match request.kind {
            Kind::Local => false,
            Kind::Prefill => true,
            Kind::Receive => request.stage != RequestStage::Active,
        };
        if !lent {
            return;
        }
        self.withdraw(key);
        let Some(mut request) = self.requests.remove(&key) else {
            return;
        };
        if let Some(pinned) = request.pinned.take() {
            self.pools.unpin(pinned);
        }
        for (group, granted) in request.granted.iter().enumerate() {
            for granted in granted {
                self.pools.pool_mut(group).return_granted(granted.block);
            }
        }
        self.outbox.released.push(key);
    }

    /// Fails a request and withdraws it.
    pub(super) fn fail(&mut self, key: RequestKey, error: Error) {
        tracing::warn!(?key, %error, "request failed");
        self.outbox.failed.push((key, error));
        self.withdraw(key);
    }

    /// Gives a sequence's blocks back and forgets it.
    pub(super) fn drop_sequence(&mut self, id: crate::scheduler::SequenceId) {
        if let Some(sequence) = self.sequences.remove(&id) {
            self.pools.release(sequence.tables);
        }
    }
}
