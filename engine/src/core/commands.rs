//! What each command does to the core. Runs between steps, never inside one.

use std::time::Duration;

use baton_proto::block_hash::BlockHasher;
use baton_proto::kv_layout::KvGroupKind;
use baton_proto::sampling::{FinishReason, SampledToken};
use baton_proto::{Error, ErrorKind};

use super::Core;
use super::request::{Choice, Kind, Request, RequestStage, Sequence, shipped};
use crate::api::{Command, Event, OrdinalRange, Rejection, RequestKey, Submission, Work};
use crate::config::{Role, window_blocks};
use crate::sampling::Rules;
use crate::scheduler::Stage;

/// What a submission will need, worked out while it is checked.
struct Needs {
    unit_charge: Vec<u32>,
    slots: u32,
    extra_credit: u32,
}

impl Core {
    /// Takes one command. Its events are emitted before this returns.
    pub fn handle(&mut self, command: Command, now: Duration) {
        match command {
            Command::Submit(submission) => self.submit(*submission, now),
            Command::Commit { key, first } => self.commit(key, first),
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

    /// Whether a submission can ever be served, and whether it may wait.
    fn check(&self, submission: &Submission) -> Result<Needs, Error> {
        let sampling = &submission.sampling;
        if self.requests.contains_key(&submission.key) {
            return Err(Error::new(ErrorKind::Internal, "the request key is in use")
                .with_reason("DUPLICATE_KEY"));
        }
        match (self.role, &submission.work) {
            (Role::Prefill, Work::Prefill { .. }) | (Role::Decode, Work::Local | Work::Receive) => {
            }
            (role, _) => {
                return Err(Error::unsupported(
                    "work",
                    format!("a {role:?} engine does not take this kind of work"),
                ));
            }
        }
        sampling.validate(self.tokenizer_size)?;
        if submission.prompt.is_empty() {
            return Err(Error::invalid(
                "prompt",
                "it is empty, the least is 1 token",
            ));
        }
        self.check_tokens("prompt", &submission.prompt)?;
        let total = submission.prompt.len() as u64 + u64::from(sampling.max_tokens);
        if total > u64::from(self.context_max) {
            return Err(Error::invalid(
                "prompt",
                format!(
                    "the context holds {} tokens, but {} are in the prompt and {} were requested",
                    self.context_max,
                    submission.prompt.len(),
                    sampling.max_tokens
                ),
            )
            .with_reason("CONTEXT_LENGTH_EXCEEDED"));
        }
        if !submission.forced.is_empty() && submission.forced.len() != sampling.n as usize {
            return Err(Error::invalid(
                "forced",
                format!(
                    "{} entries for {} choices",
                    submission.forced.len(),
                    sampling.n
                ),
            ));
        }
        for forced in &submission.forced {
            self.check_tokens("forced", forced)?;
            if forced.len() > sampling.max_tokens as usize {
                return Err(Error::invalid(
                    "forced",
                    format!(
                        "{} tokens are above max_tokens {}",
                        forced.len(),
                        sampling.max_tokens
                    ),
                ));
            }
        }
        let needs = self.needs(submission)?;
        if let Work::Prefill { ship } = &submission.work {
            self.check_ship(ship, submission.prompt.len() as u32)?;
        }
        self.check_queue(submission)?;
        Ok(needs)
    }

    fn check_tokens(&self, field: &str, tokens: &[u32]) -> Result<(), Error> {
        match tokens.iter().find(|token| **token >= self.tokenizer_size) {
            None => Ok(()),
            Some(token) => Err(Error::invalid(
                field,
                format!(
                    "token id {token} is not below the vocabulary's {}",
                    self.tokenizer_size
                ),
            )),
        }
    }

    /// What the request needs of the pools; refused if they could never give it.
    fn needs(&self, submission: &Submission) -> Result<Needs, Error> {
        let layout = self.pools.layout();
        let sampling = &submission.sampling;
        let prompt = submission.prompt.len() as u32;
        let block_size = layout.block_size;
        let forced = |choice: usize| submission.forced.get(choice).map_or(0, |f| f.len() as u32);
        let choices = 0..sampling.n as usize;
        let full_total = self
            .pools
            .groups()
            .filter(|group| self.pools.is_full(*group))
            .map(|group| self.pools.pool(group).counts().total)
            .min()
            .unwrap_or(u32::MAX);

        let (longest, slots, extra_credit, alone);
        match submission.work {
            Work::Prefill { .. } => {
                let branches = || choices.clone().filter(|choice| forced(*choice) > 0);
                longest = prompt + branches().map(forced).max().unwrap_or(0);
                slots = 1 + branches().count() as u32;
                // A branch copies the prompt's partial block and grows from there.
                extra_credit = branches()
                    .map(|choice| layout.blocks_for(prompt + forced(choice)) - prompt / block_size)
                    .sum::<u32>();
                alone = layout.blocks_for(prompt) + extra_credit;
            }
            Work::Local | Work::Receive => {
                longest = prompt + sampling.max_tokens;
                slots = sampling.n;
                alone = layout.blocks_for(longest);
                let growth: u32 = choices
                    .map(|choice| self.growth(submission, forced(choice)))
                    .sum();
                extra_credit = match submission.work {
                    Work::Receive => {
                        growth.min(full_total.saturating_sub(layout.blocks_for(prompt)))
                    }
                    _ => 0,
                };
            }
        }
        let too_small = |need: u32, have: u32| {
            Error::invalid(
                "prompt",
                format!("the request needs {need} kv blocks at once, the pool has {have}"),
            )
            .with_reason("POOL_TOO_SMALL")
        };
        if alone > full_total {
            return Err(too_small(alone, full_total));
        }
        if slots > self.limits.sequences_max {
            return Err(Error::invalid(
                "n",
                format!(
                    "{slots} sequences at once, at most {}",
                    self.limits.sequences_max
                ),
            ));
        }
        let mut unit_charge = vec![0; layout.groups.len()];
        for (group, charge) in unit_charge.iter_mut().enumerate() {
            if let KvGroupKind::SlidingWindow { window } = layout.groups[group].kind {
                *charge = window_blocks(window, self.limits.chunk_tokens, block_size)
                    .min(layout.blocks_for(longest));
                let total = self.pools.pool(group).counts().total;
                if charge.saturating_mul(slots) > total {
                    return Err(too_small(charge.saturating_mul(slots), total));
                }
            }
        }
        Ok(Needs {
            unit_charge,
            slots,
            extra_credit,
        })
    }

    /// Blocks a choice of a reservation is promised beyond the prompt's: its forced
    /// tokens, a little growth, and its own copy of the partial block.
    fn growth(&self, submission: &Submission, forced: u32) -> u32 {
        let layout = self.pools.layout();
        let prompt = submission.prompt.len() as u32;
        let soon = prompt + forced + self.limits.growth_blocks * layout.block_size;
        let most = prompt + submission.sampling.max_tokens;
        let copy = submission.sampling.n > 1 && !prompt.is_multiple_of(layout.block_size);
        layout.blocks_for(soon.min(most)) - layout.blocks_for(prompt) + u32::from(copy)
    }

    fn check_ship(&self, ship: &[OrdinalRange], prompt: u32) -> Result<(), Error> {
        let layout = self.pools.layout();
        for (at, range) in ship.iter().enumerate() {
            let group = usize::from(range.group);
            if group >= layout.groups.len() {
                return Err(Error::invalid(
                    "ship",
                    format!("there is no kv group {group}"),
                ));
            }
            let allowed = layout.first_needed_ordinal(group, prompt)..layout.blocks_for(prompt);
            let end = u64::from(range.first) + u64::from(range.count);
            if range.first < allowed.start || end > u64::from(allowed.end) {
                return Err(Error::invalid(
                    "ship",
                    format!("ordinals {}..{end} are not within {allowed:?}", range.first),
                ));
            }
            if ship[..at].iter().any(|other| other.group == range.group) {
                return Err(Error::invalid(
                    "ship",
                    format!("kv group {group} is listed twice"),
                ));
            }
        }
        Ok(())
    }

    fn check_queue(&self, submission: &Submission) -> Result<(), Error> {
        let queued = || {
            self.requests
                .values()
                .filter(|request| request.stage == RequestStage::Queued)
        };
        let requests = queued().count();
        let tokens: u64 = queued().map(|request| request.prompt.len() as u64).sum();
        let overloaded = |message: String| {
            Err(Error::new(ErrorKind::Overloaded, message)
                .with_retry_after(self.limits.retry_after))
        };
        if requests >= self.limits.queue_requests_max as usize {
            return overloaded(format!("{requests} requests are waiting"));
        }
        let after = tokens + submission.prompt.len() as u64;
        if requests > 0 && after > u64::from(self.limits.queue_tokens_max) {
            return overloaded(format!("{tokens} prompt tokens are waiting"));
        }
        Ok(())
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
            use_cache,
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
            stage: RequestStage::Queued,
            prompt: prompt.into(),
            first: vec![None; choices.len()],
            choices,
            rules,
            hasher,
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
    fn commit(&mut self, key: RequestKey, first: Vec<SampledToken>) {
        let Some(request) = self.requests.get_mut(&key) else {
            return;
        };
        if request.stage != RequestStage::Reserved {
            tracing::warn!(?key, stage = ?request.stage, "commit of a request that is not reserved");
            return;
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
