//! How long prompts and outputs are: a distribution as a flag's value.
//!
//! Sampling is a pure function of the generator it is given, so a seed names a
//! workload.

use std::fmt;
use std::str::FromStr;

use rand::Rng;

/// Longest length that can be asked for, in tokens.
const TOKENS_MAX: u32 = 1 << 20;

/// A distribution of token counts. Every sample is at least 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Lengths {
    /// Always this many.
    Fixed(u32),
    /// Each count from `low` to `high`, both included, is equally likely.
    Uniform { low: u32, high: u32 },
    /// Log-normal with this mean of the count and this deviation of its logarithm.
    LogNormal { mean: f64, sigma: f64 },
}

impl Lengths {
    /// Draws one length.
    pub fn sample(&self, rng: &mut impl Rng) -> u32 {
        match *self {
            Self::Fixed(tokens) => tokens,
            Self::Uniform { low, high } => rng.random_range(low..=high),
            Self::LogNormal { mean, sigma } => {
                // The mean of exp(N(mu, sigma^2)) is exp(mu + sigma^2 / 2).
                let mu = mean.ln() - sigma * sigma / 2.0;
                let tokens = (mu + sigma * standard_normal(rng)).exp().round();
                // The cast saturates; the bounds then hold whatever was drawn.
                (tokens as u32).clamp(1, TOKENS_MAX)
            }
        }
    }
}

/// One draw of the standard normal distribution (Box and Muller, 1958).
fn standard_normal(rng: &mut impl Rng) -> f64 {
    // In (0, 1], so that the logarithm is finite.
    let radius: f64 = 1.0 - rng.random::<f64>();
    let angle: f64 = rng.random::<f64>() * std::f64::consts::TAU;
    (-2.0 * radius.ln()).sqrt() * angle.cos()
}

impl FromStr for Lengths {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let allowed = || {
            format!(
                "`{text}`: give fixed:N, uniform:A-B or lognormal:MEAN,SIGMA with 1 to {TOKENS_MAX} tokens and a SIGMA of 0 to 4"
            )
        };
        let tokens = |text: &str| -> Option<u32> {
            let tokens = text.trim().parse().ok()?;
            (1..=TOKENS_MAX).contains(&tokens).then_some(tokens)
        };
        let parsed = match text.split_once(':') {
            None => tokens(text).map(Self::Fixed),
            Some(("fixed", count)) => tokens(count).map(Self::Fixed),
            Some(("uniform", range)) => range.split_once('-').and_then(|(low, high)| {
                let (low, high) = (tokens(low)?, tokens(high)?);
                (low <= high).then_some(Self::Uniform { low, high })
            }),
            Some(("lognormal", shape)) => shape.split_once(',').and_then(|(mean, sigma)| {
                let mean: f64 = mean.trim().parse().ok()?;
                let sigma: f64 = sigma.trim().parse().ok()?;
                let fits =
                    (1.0..=f64::from(TOKENS_MAX)).contains(&mean) && (0.0..=4.0).contains(&sigma);
                fits.then_some(Self::LogNormal { mean, sigma })
            }),
            Some(_) => None,
        };
        parsed.ok_or_else(allowed)
    }
}

impl fmt::Display for Lengths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(tokens) => write!(f, "fixed:{tokens}"),
            Self::Uniform { low, high } => write!(f, "uniform:{low}-{high}"),
            Self::LogNormal { mean, sigma } => write!(f, "lognormal:{mean},{sigma}"),
        }
    }
}

impl serde::Serialize for Lengths {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng as _;
    use rand::rngs::StdRng;

    fn draw(lengths: &str, count: usize) -> Vec<u32> {
        let lengths: Lengths = lengths.parse().unwrap();
        let mut rng = StdRng::seed_from_u64(7);
        (0..count).map(|_| lengths.sample(&mut rng)).collect()
    }

    #[test]
    fn every_form_is_read_and_written_back() {
        for text in ["fixed:1", "uniform:5-9", "lognormal:256,0.5"] {
            assert_eq!(text.parse::<Lengths>().unwrap().to_string(), text);
        }
        assert_eq!("64".parse::<Lengths>(), Ok(Lengths::Fixed(64)));
    }

    #[test]
    fn a_value_out_of_range_is_refused_with_what_is_allowed() {
        for text in [
            "0",
            "fixed:0",
            "fixed:9999999",
            "fixed:-1",
            "uniform:9-5",
            "uniform:5",
            "lognormal:0,1",
            "lognormal:5,NaN",
            "lognormal:5,9",
            "zipf:3",
            "",
        ] {
            let error = text.parse::<Lengths>().unwrap_err();
            assert!(error.contains("uniform:A-B"), "{text}: {error}");
        }
    }

    #[test]
    fn a_seed_names_the_lengths_and_each_stays_in_its_range() {
        assert_eq!(draw("uniform:3-900", 50), draw("uniform:3-900", 50));
        assert_eq!(draw("fixed:8", 3), [8, 8, 8]);
        let uniform = draw("uniform:3-6", 400);
        for tokens in 3..=6 {
            let share = uniform.iter().filter(|drawn| **drawn == tokens).count();
            assert!((60..=140).contains(&share), "{tokens}: {share} of 400");
        }
        assert!(uniform.iter().all(|tokens| (3..=6).contains(tokens)));
        assert!(
            draw("lognormal:1,4", 2_000)
                .iter()
                .all(|tokens| *tokens >= 1)
        );
    }

    #[test]
    fn a_log_normal_has_the_mean_it_was_asked_for() {
        let drawn = draw("lognormal:400,0.5", 20_000);
        let mean = drawn.iter().map(|tokens| f64::from(*tokens)).sum::<f64>() / 20_000.0;
        // The deviation of one sample is 213, of the mean of 20,000 it is 1.5.
        assert!((392.0..408.0).contains(&mean), "{mean}");
        assert!(drawn.iter().any(|tokens| *tokens > 800));
        assert!(
            draw("lognormal:400,0", 10)
                .iter()
                .all(|tokens| *tokens == 400)
        );
    }
}
