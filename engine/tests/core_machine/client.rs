//! One request as its client and its two workers see it, and what must hold for it.

use baton_engine::api::{GroupReservation, Rejection, Submission};
use baton_proto::sampling::{FinishReason, SampledToken};

use crate::fake::Expected;

/// A block of the prefill engine that was reported: (group, ordinal, layer, block).
pub type Reported = (usize, u32, u32, u32);

/// One request as its client and its two workers see it.
pub struct Client {
    pub submission: Submission,
    pub expected: Vec<Expected>,
    pub forced: Vec<usize>,
    pub got: Vec<Vec<SampledToken>>,
    pub finished: Vec<Option<(FinishReason, u32)>>,
    pub choice_cancelled: Vec<bool>,
    pub cancelled: bool,
    pub rejected: Option<Rejection>,
    pub accepted: [u32; 2],
    pub released: [u32; 2],
    pub reserved: Vec<GroupReservation>,
    pub reported: Vec<Reported>,
    /// The bytes of everything reported, as they were then.
    pub sent: Vec<Vec<u8>>,
    /// Copy layer by layer as reported, or all at once with the first token.
    pub lazy: bool,
    /// Rounds until the prefill engine may drop the blocks, once it may.
    pub release_p_in: Option<u32>,
    pub release_d_in: Option<u32>,
    pub d_lent: bool,
    pub cached: u32,
    pub preset_delay: u32,
}

impl Client {
    pub fn start(&mut self, cached: u32) {
        self.cached = cached;
        assert!((cached as usize) < self.submission.prompt.len());
        assert!(self.submission.use_cache || cached == 0);
    }

    pub fn on_token(&mut self, choice: u32, index: u32, token: SampledToken) {
        let at = choice as usize;
        assert_eq!(
            index as usize,
            self.forced[at] + self.got[at].len(),
            "tokens come in order"
        );
        assert!(self.finished[at].is_none(), "no token after the end");
        let expected = &self.expected[at].tokens[index as usize];
        assert_eq!(
            &token, expected,
            "request {:?} choice {choice} index {index}",
            self.submission.key
        );
        self.got[at].push(token);
    }

    pub fn check(&self, key: u64) {
        if self.rejected.is_some() {
            assert_eq!((self.accepted[0], self.released[0]), (0, 0));
            return;
        }
        assert_eq!(
            (self.accepted[0], self.released[0]),
            (1, 1),
            "request {key} on decode"
        );
        assert_eq!(
            self.accepted[1], self.released[1],
            "request {key} on prefill"
        );
        if self.cancelled {
            return;
        }
        for (choice, expected) in self.expected.iter().enumerate() {
            let (reason, count) = self.finished[choice].expect("every choice ends");
            let have = self.forced[choice] + self.got[choice].len();
            assert_eq!(count as usize, have);
            if reason == FinishReason::Cancelled {
                assert!(self.choice_cancelled[choice]);
            } else {
                assert_eq!(reason, expected.reason, "request {key} choice {choice}");
                assert_eq!(have, expected.tokens.len(), "request {key} choice {choice}");
            }
        }
    }
}
