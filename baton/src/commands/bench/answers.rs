//! What was answered, kept for another run to be compared with.
//!
//! The same seed sends the same requests, so a load can run twice: once against a server that
//! nothing happens to, once against a cluster whose workers die. Answers of one numerics id are
//! equal to the token, and so they are counted, not looked at.

use std::fs::File;
use std::io::{BufRead as _, BufReader, BufWriter, Write as _};
use std::path::Path;

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize};

use super::sample::Sample;

/// What one request was answered, as its wire tells.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    Tokens(Vec<u32>),
    Text(String),
}

impl Default for Answer {
    fn default() -> Self {
        Self::Tokens(Vec::new())
    }
}

impl Answer {
    /// Whether this may become `whole` as more of it comes.
    fn begins(&self, whole: &Self) -> bool {
        match (self, whole) {
            (Self::Tokens(begun), Self::Tokens(whole)) => whole.starts_with(begun),
            (Self::Text(begun), Self::Text(whole)) => whole.starts_with(begun),
            // Nothing was received, so it is not known how it would have come.
            (Self::Tokens(begun), Self::Text(_)) => begun.is_empty(),
            (Self::Text(_), Self::Tokens(_)) => false,
        }
    }
}

/// The answers of a run, in the order of its requests: a file of one JSON value a line.
#[derive(Debug)]
pub struct Answers(Vec<Answer>);

impl Answers {
    /// Those of `samples`, all of which must have succeeded.
    ///
    /// # Errors
    /// How many did not.
    pub fn of(samples: &[Sample]) -> anyhow::Result<Self> {
        let failed = samples.iter().filter(|one| one.failure.is_some()).count();
        if failed > 0 {
            bail!(
                "`--save-answers`: {failed} requests failed, so there is nothing to compare with"
            );
        }
        let mut samples: Vec<&Sample> = samples.iter().collect();
        samples.sort_by_key(|sample| sample.index);
        let answers = samples.iter().map(|sample| sample.answer.clone());
        Ok(Self(answers.collect()))
    }

    /// # Errors
    /// A file that cannot be written.
    pub fn save(&self, path: &Path) -> anyhow::Result<()> {
        let wrote = || format!("`--save-answers {}`", path.display());
        let mut file = BufWriter::new(File::create(path).with_context(wrote)?);
        for answer in &self.0 {
            serde_json::to_writer(&mut file, answer).with_context(wrote)?;
            file.write_all(b"\n").with_context(wrote)?;
        }
        file.flush().with_context(wrote)
    }

    /// # Errors
    /// A file that cannot be read, or is of something else, by line.
    pub fn load(path: &Path) -> anyhow::Result<Self> {
        let read = || format!("`--compare-answers {}`", path.display());
        let lines = BufReader::new(File::open(path).with_context(read)?).lines();
        let answers = lines.enumerate().map(|(at, line)| {
            let line = line.with_context(read)?;
            let answer = serde_json::from_str(&line);
            answer.with_context(|| format!("{}: line {} is no answer", read(), at + 1))
        });
        answers.collect::<anyhow::Result<_>>().map(Self)
    }

    /// How many requests were answered otherwise. Of one that failed, what came counts.
    ///
    /// # Errors
    /// More requests than there are answers.
    pub fn wrong(&self, samples: &[Sample]) -> anyhow::Result<u64> {
        let mut wrong = 0;
        for sample in samples {
            let Some(right) = self.0.get(sample.index) else {
                let known = self.0.len();
                bail!("`--compare-answers`: it has {known} answers, this run had more requests");
            };
            let same = match sample.failure {
                None => sample.answer == *right,
                Some(_) => sample.answer.begins(right),
            };
            wrong += u64::from(!same);
        }
        Ok(wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::bench::sample::Failure;

    fn sample(index: usize, tokens: &[u32], fails: bool) -> Sample {
        Sample {
            index,
            answer: Answer::Tokens(tokens.to_vec()),
            failure: fails.then(|| Failure::new("GONE", "gone")),
            ..Sample::default()
        }
    }

    #[test]
    fn answers_survive_a_file_and_what_differs_is_counted() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("answers");
        // Ended in another order than sent.
        let right = [sample(1, &[3, 4], false), sample(0, &[1, 2], false)];
        Answers::of(&right).unwrap().save(&path).unwrap();
        let answers = Answers::load(&path).unwrap();
        assert_eq!(answers.wrong(&right).unwrap(), 0);
        let other = [sample(0, &[1, 9], false), sample(1, &[3], false)];
        assert_eq!(answers.wrong(&other).unwrap(), 2);
        // What a failed request had received is held to the same.
        let failed = [sample(0, &[1], true), sample(1, &[4], true)];
        assert_eq!(answers.wrong(&failed).unwrap(), 1);
        assert!(answers.wrong(&[sample(2, &[], false)]).is_err());
        assert!(Answers::of(&failed).is_err());
        std::fs::write(&path, "{\"tokens\":[1]}\nno\n").unwrap();
        let refused = Answers::load(&path).unwrap_err().to_string();
        assert!(refused.contains("line 2"), "{refused}");
    }
}
