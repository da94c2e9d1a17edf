//! What the workers do while a world runs, and the books: what came, what ended how, and
//! whether every block came back.

use std::time::{Duration, Instant};

use baton_kv_transfer::receiver::{EventKind, Receiver, Terminal};
use baton_kv_transfer::sender::{CommitOutcome, Sender};

use crate::fabric::Fabric;
use crate::job::{Job, ReceiverEnd, SenderEnd};
use crate::verdict::{Ending, Verdict};
use crate::world::{World, poll_once};

/// A run whose request's deadline is this far back has not ended in time.
const SLACK: Duration = Duration::from_secs(2);

impl World {
    /// Runs until `done`, or until every job is over or late.
    pub fn run(&mut self, mut done: impl FnMut(&mut Self) -> bool) {
        loop {
            self.turn();
            if self.jobs.iter().all(Job::is_over) || done(self) || !self.step(None) {
                return;
            }
        }
    }

    /// Runs until a point in time.
    pub fn run_to(&mut self, at: Instant) {
        loop {
            self.turn();
            if self.now() >= at || !self.step(Some(at)) {
                return;
            }
        }
    }

    /// Whatever the workers have to do now.
    fn turn(&mut self) {
        for index in 0..self.jobs.len() {
            self.prefill(index);
            self.decode(index);
        }
        self.hear();
    }

    /// One step of the network; false once the run is late.
    fn step(&mut self, until: Option<Instant>) -> bool {
        let over = |job: &Job| {
            let longest = job.plan.deadline.max(job.plan.sent_deadline);
            (!job.is_over()).then(|| job.started + longest + SLACK)
        };
        let late = self.jobs.iter().filter_map(over).min();
        let pushes = self.jobs.iter().filter_map(Self::next_word);
        let next = pushes.chain(late).chain(until).min();
        let next = next.unwrap_or_else(|| self.now() + Duration::from_secs(1));
        self.steps += 1;
        self.fabric.step(next);
        late.is_none_or(|late| self.now() < late)
    }

    /// When a worker of a prefill side has its next word.
    fn next_word(job: &Job) -> Option<Instant> {
        job.transfer.as_ref()?;
        match job.pushes.front() {
            Some((at, ..)) => Some(*at),
            None if job.committed_at.is_none() => Some(job.started + job.plan.commit_after?),
            None => None,
        }
    }

    fn prefill(&mut self, index: usize) {
        let now = self.fabric.now();
        let job = &mut self.jobs[index];
        let Some(transfer) = job.transfer.clone() else {
            return;
        };
        while job.pushes.front().is_some_and(|(at, ..)| *at <= now) {
            let Some((_, layer, blocks)) = job.pushes.front() else {
                break;
            };
            match poll_once(transfer.push(0, *layer, blocks)) {
                None => break,
                Some(Ok(())) => drop(job.pushes.pop_front()),
                Some(Err(_)) => job.pushes.clear(),
            }
            self.fabric.poke();
        }
        let due = job
            .plan
            .commit_after
            .is_some_and(|after| job.started + after <= now);
        if job.pushes.is_empty() && due && job.committed_at.is_none() {
            job.committed_at = Some(now);
            let payload = job.payload();
            let _ = poll_once(transfer.commit(payload));
            self.fabric.poke();
        }
        let Some(outcome) = transfer.try_outcome() else {
            return;
        };
        job.sender_end.get_or_insert(SenderEnd::Said(outcome));
        job.pushes.clear();
        if job.sender_back.is_none() && poll_once(transfer.quiesced()).is_some() {
            if transfer.may_be_read() {
                let text = format!("job {index}: quiet, but a lane may read");
                self.verdict.wrong.push(text);
            }
            job.sender_back = Some(now);
            job.transfer = None;
            self.source.give(&job.source_blocks);
            if job.sender_due.is_some_and(|due| now > due) {
                let late = now.duration_since(job.sender_due.unwrap_or(now));
                let text = format!("job {index}: source blocks back {late:?} late");
                self.verdict.hung.push(text);
            }
        }
    }

    fn decode(&mut self, index: usize) {
        let Some(receiver) = self.receiver.clone() else {
            return;
        };
        let job = &mut self.jobs[index];
        if job.receiver_back.is_some() {
            // A newer attempt has a ticket of its own.
            if receiver.may_be_written(job.ticket) {
                let text = format!("job {index}: its blocks are free, but a lane may write them");
                self.verdict.wrong.push(text);
            }
            return;
        }
        if !job.revoking {
            return;
        }
        match poll_once(receiver.revoke(job.ticket)) {
            None => {}
            Some(Some(Terminal::Fenced)) => {
                self.back(index, ReceiverEnd::Ended("revoked".to_owned()))
            }
            // The event of the other end comes, or came.
            Some(_) => job.revoking = false,
        }
        self.fabric.poke();
    }

    fn hear(&mut self) {
        let events = std::mem::take(&mut *self.events.lock().unwrap());
        for event in events {
            let of = |job: &Job| job.ticket == event.ticket;
            let Some(index) = self.jobs.iter().position(of) else {
                continue;
            };
            let end = match &event.what {
                EventKind::LaneLost => continue,
                EventKind::Started => {
                    self.jobs[index].opened = true;
                    continue;
                }
                EventKind::Completed { commit_payload, .. } => {
                    if *commit_payload != self.jobs[index].payload() {
                        let text = format!("job {index}: another commit's payload");
                        self.verdict.wrong.push(text);
                    }
                    self.compare(index);
                    ReceiverEnd::Completed
                }
                EventKind::Aborted { reason } => ReceiverEnd::Ended(format!("{reason:?}")),
                EventKind::Expired { reason } => ReceiverEnd::Ended(format!("{reason:?}")),
            };
            if self.receiver.is_some() {
                self.back(index, end);
            }
        }
    }

    /// Compares every part with what the prefill worker had.
    fn compare(&mut self, index: usize) {
        let job = &self.jobs[index];
        for (block, content) in job.destination_blocks.iter().zip(&job.content) {
            for (layer, bytes) in (0..).zip(content) {
                let right = match &self.relaid {
                    Some(relaid) => relaid.kept(bytes),
                    None => bytes.clone(),
                };
                if self.destination.bytes(*block, layer) != right {
                    let text = format!("job {index}: block {block}, layer {layer}: other bytes");
                    self.verdict.wrong.push(text);
                }
            }
        }
    }

    /// The receiver's side of a job has ended, and its blocks are the worker's.
    fn back(&mut self, index: usize, end: ReceiverEnd) {
        let now = self.now();
        let job = &mut self.jobs[index];
        if let Some(before) = &job.receiver_end {
            let text = format!("job {index} ended twice: {before:?}, then {end:?}");
            self.verdict.wrong.push(text);
            return;
        }
        if let Some(receiver) = &self.receiver
            && receiver.may_be_written(job.ticket)
        {
            let text = format!("job {index}: it ended, but a lane may write its blocks");
            self.verdict.wrong.push(text);
        }
        job.receiver_end = Some(end);
        job.receiver_back = Some(now);
        self.destination.give(&job.destination_blocks);
        if job.receiver_due.is_some_and(|due| now > due) {
            let late = now.duration_since(job.receiver_due.unwrap_or(now));
            let text = format!("job {index}: granted blocks back {late:?} late");
            self.verdict.hung.push(text);
        }
    }

    /// The end of a run whose outcome is that of job `main`.
    pub fn finish(mut self, main: usize) -> Verdict {
        self.run(|_| false);
        for (index, job) in self.jobs.iter().enumerate() {
            if !job.is_over() {
                self.verdict.hung.push(format!(
                    "job {index}: receiver {:?}, sender {:?}",
                    job.receiver_end, job.sender_end
                ));
            }
            let said_so = job.sender_end == Some(SenderEnd::Said(CommitOutcome::Committed));
            let is_so = job.receiver_end == Some(ReceiverEnd::Completed);
            let died = job.receiver_end == Some(ReceiverEnd::Died);
            let refused = matches!(
                job.sender_end,
                Some(SenderEnd::Said(CommitOutcome::Refused(_)))
            );
            if (said_so && !is_so && !died) || (is_so && refused) {
                self.verdict.wrong.push(format!(
                    "job {index}: the ends differ: receiver {:?}, sender {:?}",
                    job.receiver_end, job.sender_end
                ));
            }
        }
        self.settle();
        let job = &self.jobs[main];
        self.verdict.ending = match (&job.receiver_end, &job.sender_end) {
            (Some(ReceiverEnd::Completed), _) => Some(Ending::Right),
            (Some(receiver), Some(sender)) => {
                let receiver = match receiver {
                    ReceiverEnd::Ended(how) => how.as_str(),
                    _ => "died",
                };
                let sender = match sender {
                    SenderEnd::Said(CommitOutcome::Refused(refusal)) => format!("{refusal:?}"),
                    SenderEnd::Said(CommitOutcome::Aborted(_)) => "Aborted".to_owned(),
                    SenderEnd::Said(other) => format!("{other:?}"),
                    SenderEnd::Died => "died".to_owned(),
                };
                let receiver = receiver.split('(').next().unwrap_or_default();
                Some(Ending::Error(format!("{receiver}/{sender}")))
            }
            _ => None,
        };
        if let Fabric::Mem { network, .. } = &self.fabric {
            self.verdict.trace = network.trace();
        }
        self.fabric.end();
        self.verdict
    }

    /// Once every job is over: nothing is left in any table or pool.
    fn settle(&mut self) {
        let mut wait = self.now();
        let until = wait + Duration::from_secs(3);
        let open = |world: &Self| {
            let senders = world
                .prefills
                .iter()
                .filter_map(|prefill| prefill.sender.as_ref());
            let transfers: usize = senders.map(Sender::transfers_open).sum();
            let grants = world.receiver.as_ref().map_or(0, Receiver::grants_live);
            (transfers, grants)
        };
        // Dark links keep senders from saying their last words.
        while open(self) != (0, 0) && wait < until {
            wait += Duration::from_millis(50);
            self.run_to(wait);
        }
        let (transfers, grants) = open(self);
        if (transfers, grants) != (0, 0) {
            let text = format!("{transfers} transfers and {grants} grants are left");
            self.verdict.leaked.push(text);
        }
        let used = (self.source.used(), self.destination.used());
        if used != (0, 0) {
            let text = format!("{} source and {} granted blocks are left", used.0, used.1);
            self.verdict.leaked.push(text);
        }
        self.hear();
        for pool in [&self.source, &self.destination] {
            self.verdict.wrong.extend(pool.trespasses());
        }
    }
}
