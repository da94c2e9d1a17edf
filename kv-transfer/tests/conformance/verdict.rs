//! What a run amounts to.

use std::collections::BTreeMap;

/// How the last attempt of a run's main request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Every byte is where it belongs, and both sides know.
    Right,
    /// In an error with a type.
    Error(String),
}

/// What was found in one run. Empty lists are good.
#[derive(Clone, Debug, Default)]
pub struct Verdict {
    pub ending: Option<Ending>,
    /// Whether what the kind is about did happen.
    pub hit: bool,
    pub wrong: Vec<String>,
    pub leaked: Vec<String>,
    pub hung: Vec<String>,
    /// A digest of every choice that was made, if the run can be repeated.
    pub trace: u64,
}

impl Verdict {
    /// What the kind promises.
    pub fn expect(&mut self, right: bool) {
        let is = matches!(self.ending, Some(Ending::Right));
        if is != right && self.hung.is_empty() {
            self.wrong.push(format!(
                "ended in `{:?}`, promised was {}",
                self.ending,
                if right { "the right bytes" } else { "an error" }
            ));
        }
    }

    pub fn is_good(&self) -> bool {
        self.wrong.is_empty() && self.leaked.is_empty() && self.hung.is_empty()
    }
}

/// The runs of one kind over one transport.
#[derive(Default)]
pub struct Row {
    pub runs: usize,
    pub hit: usize,
    pub right: usize,
    pub errors: BTreeMap<String, usize>,
    pub wrong: usize,
    pub leaked: usize,
    pub hung: usize,
    /// The first bad ones, with their seeds.
    pub bad: Vec<(u64, Verdict)>,
}

impl Row {
    pub fn add(&mut self, seed: u64, verdict: Verdict) {
        self.runs += 1;
        self.hit += usize::from(verdict.hit);
        match &verdict.ending {
            Some(Ending::Right) => self.right += 1,
            Some(Ending::Error(what)) => *self.errors.entry(what.clone()).or_default() += 1,
            None => {}
        }
        self.wrong += usize::from(!verdict.wrong.is_empty());
        self.leaked += usize::from(!verdict.leaked.is_empty());
        self.hung += usize::from(!verdict.hung.is_empty());
        if !verdict.is_good() && self.bad.len() < 3 {
            self.bad.push((seed, verdict));
        }
    }
}
