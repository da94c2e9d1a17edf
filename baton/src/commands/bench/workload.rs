//! What is sent and when: prompts of random token ids, output lengths, arrivals.
//!
//! All of it is drawn before the first request from one seed, so that two runs
//! send the same load and the client computes nothing while it measures.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use super::lengths::Lengths;

/// One request to be sent.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    pub prompt: Vec<u32>,
    /// New tokens; end tokens are ignored, so all of them come.
    pub output_tokens: u32,
    /// Greedy if there is nothing.
    pub drawn: Option<Drawn>,
}

/// How a request's tokens are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Drawn {
    pub temperature: f32,
    pub seed: u64,
}

/// The shape of a workload.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub prompt: Lengths,
    pub output: Lengths,
    /// Leading tokens that all prompts share; a shorter prompt shares all of its own.
    pub shared_prefix: u32,
    /// Entries of the vocabulary that ids are drawn from.
    pub vocab_size: u32,
    /// Every second request is drawn at this temperature.
    pub temperature: Option<f32>,
}

/// Ids at both ends of a vocabulary that are not drawn: control and byte tokens
/// stand there, and some servers refuse or reinterpret them.
const EDGE_IDS: u32 = 100;

/// Draws `count` jobs. The prompts differ from their first token after the shared
/// prefix on, but for chance, so that no prefix cache answers for them.
pub fn jobs(shape: &Shape, count: usize, seed: u64) -> Vec<Job> {
    let mut rng = StdRng::seed_from_u64(seed);
    let edge = EDGE_IDS.min(shape.vocab_size / 4);
    let ids = edge..shape.vocab_size.saturating_sub(edge).max(edge + 1);
    let shared: Vec<u32> = (0..shape.shared_prefix)
        .map(|_| rng.random_range(ids.clone()))
        .collect();
    (0..count)
        .map(|index| {
            let length = shape.prompt.sample(&mut rng) as usize;
            let own = length.saturating_sub(shared.len());
            let mut prompt = shared[..length - own].to_vec();
            prompt.extend((0..own).map(|_| rng.random_range(ids.clone())));
            Job {
                prompt,
                output_tokens: shape.output.sample(&mut rng),
                drawn: shape
                    .temperature
                    .filter(|_| index % 2 == 1)
                    .map(|temperature| Drawn {
                        temperature,
                        seed: seed.wrapping_add(index as u64),
                    }),
            }
        })
        .collect()
}

/// Arrival times of an open loop: a Poisson process of `rate` requests per second,
/// so gaps are exponential. The first request arrives at zero.
pub fn poisson_arrivals(rate: f64, count: usize, seed: u64) -> Vec<Duration> {
    // Apart from the jobs' stream, so that lengths do not change with the rate.
    let mut rng = StdRng::seed_from_u64(seed ^ 0x9E37_79B9_7F4A_7C15);
    let mut at = 0.0;
    (0..count)
        .map(|_| {
            let arrival = Duration::from_secs_f64(at);
            at += -(1.0 - rng.random::<f64>()).ln() / rate;
            arrival
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(prompt: &str, shared_prefix: u32) -> Shape {
        Shape {
            prompt: prompt.parse().unwrap(),
            output: "uniform:1-9".parse().unwrap(),
            shared_prefix,
            vocab_size: 1_000,
            temperature: None,
        }
    }

    #[test]
    fn a_seed_names_the_jobs() {
        let shape = shape("uniform:10-90", 0);
        assert_eq!(jobs(&shape, 20, 3), jobs(&shape, 20, 3));
        assert_ne!(jobs(&shape, 20, 3), jobs(&shape, 20, 4));
        // A longer run starts with the shorter one.
        assert_eq!(jobs(&shape, 20, 3), jobs(&shape, 40, 3)[..20]);
    }

    #[test]
    fn prompts_share_the_asked_prefix_and_nothing_else() {
        let jobs = jobs(&shape("fixed:64", 24), 8, 1);
        for (at, job) in jobs.iter().enumerate() {
            assert_eq!(job.prompt.len(), 64);
            assert_eq!(job.prompt[..24], jobs[0].prompt[..24]);
            for other in &jobs[..at] {
                assert_ne!(job.prompt[24..40], other.prompt[24..40]);
            }
        }
        let short = super::jobs(&shape("fixed:10", 24), 2, 1);
        assert_eq!(short[0].prompt, short[1].prompt);
        assert_eq!(short[0].prompt.len(), 10);
    }

    #[test]
    fn ids_keep_away_from_the_ends_of_the_vocabulary() {
        for job in jobs(&shape("fixed:500", 0), 4, 1) {
            assert!(job.prompt.iter().all(|id| (100..900).contains(id)));
        }
        for vocab_size in [1, 2, 16] {
            let tiny = Shape {
                vocab_size,
                ..shape("fixed:50", 0)
            };
            for job in jobs(&tiny, 2, 1) {
                assert!(job.prompt.iter().all(|id| *id < vocab_size));
            }
        }
    }

    #[test]
    fn poisson_gaps_have_the_mean_and_the_spread_of_the_process() {
        let arrivals = poisson_arrivals(50.0, 20_001, 9);
        assert_eq!(arrivals, poisson_arrivals(50.0, 20_001, 9));
        assert_eq!(arrivals[0], Duration::ZERO);
        let gaps: Vec<f64> = arrivals
            .windows(2)
            .map(|pair| (pair[1] - pair[0]).as_secs_f64())
            .collect();
        let mean = gaps.iter().sum::<f64>() / 20_000.0;
        assert!((0.0194..0.0206).contains(&mean), "{mean}");
        // Exponential: one gap in e is longer than the mean.
        let long = gaps.iter().filter(|gap| **gap > 0.02).count();
        assert!((7_000..7_720).contains(&long), "{long} of 20000");
    }
}
