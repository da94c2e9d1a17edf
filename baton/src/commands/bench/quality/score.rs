//! Logits against the reference's, and what many such tokens say together.
//!
//! Sums are in f64: a KV format may move a distribution by a millionth.

use baton_proto::TokenId;
use serde::Serialize;

/// The reference's distributions of the positions at hand.
#[derive(Debug, Default)]
pub struct Reference {
    logits: Vec<f32>,
    /// `[position][vocabulary]`.
    probabilities: Vec<f32>,
    rows: Vec<Row>,
    vocab: usize,
}

/// What a row of logits says by itself.
#[derive(Clone, Copy, Debug, Default)]
struct Row {
    /// Log of the sum of all exponentials.
    log_sum: f64,
    /// The first of the largest.
    top: usize,
}

impl Row {
    fn of(logits: &[f32]) -> Self {
        let top = logits.iter().enumerate().fold(
            0,
            |best, (id, value)| {
                if *value > logits[best] { id } else { best }
            },
        );
        let largest = logits[top];
        let sum: f64 = logits
            .iter()
            .map(|value| f64::from((value - largest).exp()))
            .sum();
        Self {
            log_sum: f64::from(largest) + sum.ln(),
            top,
        }
    }
}

impl Reference {
    /// Remembers rows of `vocab` logits instead of the last ones.
    pub fn take(&mut self, logits: &[f32], vocab: usize, threads: usize) {
        self.vocab = vocab;
        self.logits.clear();
        self.logits.extend_from_slice(logits);
        self.probabilities.resize(logits.len(), 0.0);
        self.rows.clear();
        self.rows.resize(logits.len() / vocab, Row::default());
        let share = self.rows.len().div_ceil(threads).max(1);
        std::thread::scope(|scope| {
            for ((rows, logits), probabilities) in self
                .rows
                .chunks_mut(share)
                .zip(logits.chunks(share * vocab))
                .zip(self.probabilities.chunks_mut(share * vocab))
            {
                scope.spawn(move || {
                    for ((row, logits), probabilities) in rows
                        .iter_mut()
                        .zip(logits.chunks_exact(vocab))
                        .zip(probabilities.chunks_exact_mut(vocab))
                    {
                        *row = Row::of(logits);
                        let log_sum = row.log_sum as f32;
                        for (p, value) in probabilities.iter_mut().zip(logits) {
                            *p = (value - log_sum).exp();
                        }
                    }
                });
            }
        });
    }

    fn score(&self, position: usize, logits: &[f32], target: TokenId) -> Token {
        let range = position * self.vocab..(position + 1) * self.vocab;
        let (ours, theirs) = (Row::of(logits), &self.rows[position]);
        let shift = ours.log_sum - theirs.log_sum;
        let kl: f64 = self.probabilities[range.clone()]
            .iter()
            .zip(&self.logits[range])
            .zip(logits)
            .map(|((p, reference), value)| {
                f64::from(*p) * (f64::from(*reference) - f64::from(*value) + shift)
            })
            .sum();
        Token {
            loss: ours.log_sum - f64::from(logits[target as usize]),
            kl: kl.max(0.0),
            same_top: ours.top == theirs.top,
        }
    }
}

/// One scored token.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Token {
    /// Negative log of its probability.
    loss: f64,
    kl: f64,
    same_top: bool,
}

/// All scored tokens of one reader, in the text's order.
#[derive(Debug, Default)]
pub struct Scores(Vec<Token>);

/// What they come to.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Figures {
    pub perplexity: f64,
    /// Against the reference's perplexity on the same tokens.
    pub perplexity_change_percent: f64,
    /// 1.96 standard errors of that change, tokens taken as independent.
    pub perplexity_change_error_percent: f64,
    /// Tokens whose likeliest id is the reference's.
    pub top1_agreement_percent: f64,
    /// Kullback-Leibler divergence from the reference, in nats.
    pub mean_kl: f64,
    pub p99_kl: f64,
}

impl Scores {
    /// Scores rows of logits against the tokens that followed.
    pub fn add(
        &mut self,
        reference: &Reference,
        logits: &[f32],
        targets: &[TokenId],
        threads: usize,
    ) {
        let share = targets.len().div_ceil(threads).max(1);
        let parts: Vec<Vec<Token>> = std::thread::scope(|scope| {
            let parts: Vec<_> = targets
                .chunks(share)
                .zip(logits.chunks(share * reference.vocab))
                .enumerate()
                .map(|(part, (targets, logits))| {
                    scope.spawn(move || {
                        targets
                            .iter()
                            .zip(logits.chunks_exact(reference.vocab))
                            .enumerate()
                            .map(|(row, (target, logits))| {
                                reference.score(part * share + row, logits, *target)
                            })
                            .collect()
                    })
                })
                .collect();
            parts
                .into_iter()
                .map(|part| part.join().expect("scoring does not panic"))
                .collect()
        });
        self.0.extend(parts.into_iter().flatten());
    }

    /// Sums up, against the reference's own scores of the same tokens.
    pub fn figures(&self, reference: &Self) -> Figures {
        let count = self.0.len().max(1) as f64;
        let mean = |of: &dyn Fn(&Token) -> f64| self.0.iter().map(of).sum::<f64>() / count;
        let changes: Vec<f64> = self
            .0
            .iter()
            .zip(&reference.0)
            .map(|(ours, theirs)| ours.loss - theirs.loss)
            .collect();
        let change = changes.iter().sum::<f64>() / count;
        let variance = changes.iter().map(|x| (x - change).powi(2)).sum::<f64>() / count;
        let mut kl: Vec<f64> = self.0.iter().map(|token| token.kl).collect();
        kl.sort_by(f64::total_cmp);
        let p99 = (count * 0.99).ceil() as usize;
        Figures {
            perplexity: mean(&|token| token.loss).exp(),
            perplexity_change_percent: 100.0 * change.exp_m1(),
            perplexity_change_error_percent: 100.0
                * (1.96 * (variance / count).sqrt() * change.exp()),
            top1_agreement_percent: 100.0 * mean(&|token| f64::from(u8::from(token.same_top))),
            mean_kl: mean(&|token| token.kl),
            p99_kl: kl.get(p99.saturating_sub(1)).copied().unwrap_or(0.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Logits of given probabilities, shifted, which must not matter.
    fn logits(rows: &[&[f64]], shift: f64) -> Vec<f32> {
        rows.iter()
            .flat_map(|row| row.iter().map(|p| (p.ln() + shift) as f32))
            .collect()
    }

    fn near(actual: f64, expected: f64) {
        // Logits around -40 are known to 2e-6 in f32.
        let tolerance = 2e-5 * expected.abs().max(1.0);
        assert!(
            (actual - expected).abs() < tolerance,
            "{actual}, not {expected}"
        );
    }

    #[test]
    fn figures_are_those_of_the_textbook() {
        let p: [&[f64]; 2] = [&[0.5, 0.25, 0.25], &[0.1, 0.2, 0.7]];
        let q: [&[f64]; 2] = [&[0.25, 0.5, 0.25], &[0.1, 0.3, 0.6]];
        let targets = [0, 2];
        for threads in [1, 2, 5] {
            let mut reference = Reference::default();
            let exact = logits(&p, 3.0);
            reference.take(&exact, 3, threads);
            let (mut own, mut other) = (Scores::default(), Scores::default());
            own.add(&reference, &exact, &targets, threads);
            other.add(&reference, &logits(&q, -40.0), &targets, threads);

            let figures = own.figures(&own);
            near(figures.perplexity, (1.0 / (0.5 * 0.7_f64)).sqrt());
            near(figures.perplexity_change_percent, 0.0);
            near(figures.perplexity_change_error_percent, 0.0);
            near(figures.mean_kl, 0.0);
            assert_eq!(figures.top1_agreement_percent, 100.0);

            let figures = other.figures(&own);
            near(figures.perplexity, (1.0 / (0.25 * 0.6_f64)).sqrt());
            near(
                figures.perplexity_change_percent,
                100.0 * ((0.5 * 0.7 / (0.25 * 0.6_f64)).sqrt() - 1.0),
            );
            assert_eq!(figures.top1_agreement_percent, 50.0);
            let kl = |p: &[f64], q: &[f64]| -> f64 {
                p.iter().zip(q).map(|(p, q)| p * (p / q).ln()).sum()
            };
            near(figures.mean_kl, (kl(p[0], q[0]) + kl(p[1], q[1])) / 2.0);
            near(figures.p99_kl, kl(p[0], q[0]));
            assert!(figures.perplexity_change_error_percent > 0.0);
        }
    }

    #[test]
    fn nothing_scored_is_no_division_by_zero() {
        let figures = Scores::default().figures(&Scores::default());
        assert_eq!((figures.perplexity, figures.p99_kl), (1.0, 0.0));
    }
}
