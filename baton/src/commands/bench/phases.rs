//! Which token gaps a long prompt disturbed.
//!
//! ```text
//!            sent        first token   ended
//! ---quiet-----|----during----|-settling-|-----quiet-----
//! stream  .  . .  .  .    .    .  .  . .   .  .
//! ```
//!
//! A gap belongs to what it overlaps: first to an injection's prefill, then to its
//! tail (handoff and its few decode steps), then to the start of a running stream,
//! and only what touches none of these is quiet. So a stall counts as a stall even
//! if it began before or ended after the window.

use std::time::Duration;

use super::sample::Gap;

/// A stretch of time, ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub from: Duration,
    pub to: Duration,
}

impl Span {
    fn overlaps(&self, gap: Gap) -> bool {
        gap.from <= self.to && gap.to >= self.from
    }
}

/// The life of one injected prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Injection {
    pub sent: Duration,
    pub first_token: Duration,
    pub ended: Duration,
}

/// What a gap is counted as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    Quiet,
    /// The injection of this index was being prefilled.
    During(usize),
    /// The injection of this index had its first token but was not over.
    Settling(usize),
    /// A stream was starting, or measuring had not begun or was over.
    Outside,
}

/// Everything that gaps are compared with.
#[derive(Clone, Debug, Default)]
pub struct Timeline {
    /// When measuring went on; `None` measures nothing.
    pub observed: Option<Span>,
    pub injections: Vec<Injection>,
    /// From the send of each running stream to its first token.
    pub starts: Vec<Span>,
}

impl Timeline {
    /// What `gap` is counted as.
    pub fn phase(&self, gap: Gap) -> Phase {
        let inside = self
            .observed
            .is_some_and(|span| gap.from >= span.from && gap.to <= span.to);
        if !inside {
            return Phase::Outside;
        }
        let overlapped = |from: fn(&Injection) -> Duration, to: fn(&Injection) -> Duration| {
            self.injections.iter().position(|injection| {
                let span = Span {
                    from: from(injection),
                    to: to(injection),
                };
                span.overlaps(gap)
            })
        };
        if let Some(at) = overlapped(|life| life.sent, |life| life.first_token) {
            return Phase::During(at);
        }
        if let Some(at) = overlapped(|life| life.first_token, |life| life.ended) {
            return Phase::Settling(at);
        }
        if self.starts.iter().any(|span| span.overlaps(gap)) {
            return Phase::Outside;
        }
        Phase::Quiet
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(value: u64) -> Duration {
        Duration::from_millis(value)
    }

    fn timeline() -> Timeline {
        let injection = |sent, first_token, ended| Injection {
            sent: ms(sent),
            first_token: ms(first_token),
            ended: ms(ended),
        };
        Timeline {
            observed: Some(Span {
                from: ms(100),
                to: ms(1_000),
            }),
            injections: vec![injection(200, 300, 340), injection(500, 700, 700)],
            starts: vec![
                Span {
                    from: ms(20),
                    to: ms(90),
                },
                Span {
                    from: ms(620),
                    to: ms(800),
                },
            ],
        }
    }

    #[test]
    fn a_gap_belongs_to_the_worst_thing_it_overlaps() {
        let timeline = timeline();
        for (from, to, expect) in [
            // Before and after measuring.
            (90, 110, Phase::Outside),
            (990, 1_001, Phase::Outside),
            (100, 120, Phase::Quiet),
            // A gap that only reaches into an injection counts as disturbed.
            (180, 201, Phase::During(0)),
            (210, 220, Phase::During(0)),
            (150, 330, Phase::During(0)),
            (299, 500, Phase::During(0)),
            (301, 310, Phase::Settling(0)),
            (335, 360, Phase::Settling(0)),
            (341, 499, Phase::Quiet),
            // A restart inside an injection does not excuse the injection.
            (640, 660, Phase::During(1)),
            (750, 790, Phase::Outside),
            (801, 900, Phase::Quiet),
        ] {
            let gap = Gap {
                from: ms(from),
                to: ms(to),
            };
            assert_eq!(timeline.phase(gap), expect, "{from}..{to}");
        }
    }

    #[test]
    fn nothing_is_measured_without_a_measured_span() {
        let timeline = Timeline {
            observed: None,
            ..timeline()
        };
        let gap = Gap {
            from: ms(100),
            to: ms(120),
        };
        assert_eq!(timeline.phase(gap), Phase::Outside);
    }
}
