//! Whether a submission can be served at all, what it will need, and whether it may wait.
//!
//! Every refusal names the field, the value and what is allowed. What passes here
//! fits the context and the pools, so the scheduler can always serve it alone.

use baton_proto::kv_layout::KvGroupKind;
use baton_proto::{Error, ErrorKind, share};

use super::Core;
use super::request::RequestStage;
use crate::api::{OrdinalRange, Submission, Work};
use crate::config::{Role, window_blocks};

/// What a submission will need, worked out while it is checked.
pub(super) struct Needs {
    /// Per group, the window blocks one of its sequences may hold at most.
    pub unit_charge: Vec<u32>,
    /// Sequences it may run at once.
    pub slots: u32,
    /// Blocks to promise its trunk beyond the prompt's.
    pub extra_credit: u32,
}

impl Core {
    /// Whether a submission can ever be served, and whether it may wait.
    pub(super) fn check(&self, submission: &Submission) -> Result<Needs, Error> {
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
        if submission.itl_target.is_some() && !self.pacer.foretells() {
            return Err(Error::unsupported(
                "slo.itl_ms",
                "this worker's device cannot foretell its steps",
            ));
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
        // Why the first of them waits, where it is not for want of blocks or places.
        let cause = if self.pacer.delays {
            let target = self.pacer.target(self.requests.values());
            let ms = target.unwrap_or_default().as_secs_f64() * 1e3;
            format!("; a target of {ms} ms between tokens keeps the batch small")
        } else {
            String::new()
        };
        let overloaded = |message: String| {
            let message = message + &cause;
            Err(Error::new(ErrorKind::Overloaded, message)
                .with_retry_after(self.limits.retry_after))
        };
        if requests >= self.limits.queue_requests_max as usize {
            return overloaded(format!("{requests} requests are waiting"));
        }
        let own = || queued().filter(|request| request.tenant == submission.cache_salt);
        let own_requests = own().count() as u64;
        let own_tokens: u64 = own().map(|request| request.prompt.len() as u64).sum();
        let (requests_max, tokens_max) = (
            u64::from(self.limits.queue_requests_max),
            u64::from(self.limits.queue_tokens_max),
        );
        let prompt = submission.prompt.len() as u64;
        if !share::may_hold(own_requests, 1, requests as u64, requests_max)
            || !share::may_hold(own_tokens, prompt, tokens, tokens_max)
        {
            return overloaded(format!(
                "{own_requests} requests with {own_tokens} prompt tokens of this tenant are \
                 waiting, its share of {requests_max} and {tokens_max}"
            ));
        }
        let after = tokens + submission.prompt.len() as u64;
        if requests > 0 && after > u64::from(self.limits.queue_tokens_max) {
            return overloaded(format!("{tokens} prompt tokens are waiting"));
        }
        Ok(())
    }
}
