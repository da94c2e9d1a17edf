//! Who may write a worker's key: the order of lives under one id.
//!
//! Pure. A life may replace what it found when it first looked (a former life,
//! dead or about to be told), and nothing that came later. It must hold even if
//! the answer to our own write was lost, so it does not depend on having written.

use baton_proto::Epoch;

/// What one life knows about its key.
#[derive(Clone, Debug)]
pub(super) struct Ownership {
    ours: Epoch,
    /// Whose record was there at the first look; outer `None` before it.
    former: Option<Option<Epoch>>,
}

/// What to do with the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The key is free or ours.
    Write,
    /// A former life's record is to be replaced.
    TakeOver { from: Epoch },
    /// A later life has it: never write again.
    Superseded { by: Epoch },
}

impl Ownership {
    pub(super) const fn new(ours: Epoch) -> Self {
        Self { ours, former: None }
    }

    /// Judges the epoch stored under the key, `None` if there is no readable record.
    pub(super) fn judge(&mut self, stored: Option<Epoch>) -> Verdict {
        let other = stored.filter(|epoch| *epoch != self.ours);
        let former = *self.former.get_or_insert(other);
        match other {
            None => Verdict::Write,
            Some(from) if former == Some(from) => Verdict::TakeOver { from },
            Some(by) => Verdict::Superseded { by },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMER: Epoch = Epoch(1);
    const OURS: Epoch = Epoch(2);
    const LATER: Epoch = Epoch(3);

    #[test]
    fn a_former_life_is_replaced_as_often_as_the_write_is_tried() {
        let mut ownership = Ownership::new(OURS);
        let take_over = Verdict::TakeOver { from: FORMER };
        assert_eq!(ownership.judge(Some(FORMER)), take_over);
        assert_eq!(ownership.judge(Some(FORMER)), take_over);
        assert_eq!(ownership.judge(Some(OURS)), Verdict::Write);
        assert_eq!(ownership.judge(None), Verdict::Write);
        assert_eq!(
            ownership.judge(Some(LATER)),
            Verdict::Superseded { by: LATER }
        );
    }

    #[test]
    fn a_later_life_wins_although_the_answer_to_our_write_was_lost() {
        let mut ownership = Ownership::new(OURS);
        assert_eq!(ownership.judge(None), Verdict::Write);
        // Whether the write arrived is not known here; the next look says all.
        assert_eq!(
            ownership.judge(Some(LATER)),
            Verdict::Superseded { by: LATER }
        );
    }
}
