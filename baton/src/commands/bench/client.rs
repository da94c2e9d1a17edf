//! The server under test, whatever it speaks.

mod grpc;
mod openai;
mod sse;

use std::time::Duration;

use super::flags::{Api, TargetArgs};
use super::sample::{Arrival, Clock, Failure, Sample};
use super::workload::Job;

/// Vocabulary assumed of a server that does not tell its own: the size of Llama 2's,
/// which the vocabularies of current models exceed.
const VOCAB_SIZE_UNTOLD: u32 = 32_000;

/// What sees each arrival at its receipt.
pub type OnArrival<'a> = &'a mut dyn FnMut(Arrival);

/// A server that requests can be sent to.
pub struct Client {
    wire: Wire,
    pub model: String,
    pub vocab_size: u32,
    timeout: Duration,
}

enum Wire {
    Grpc(grpc::Client),
    Openai(openai::Client),
}

impl Client {
    /// Connects and learns which model answers.
    ///
    /// # Errors
    /// A flag's value that cannot be used, a server that does not answer, or a model
    /// that it does not serve.
    pub async fn connect(args: &TargetArgs) -> anyhow::Result<Self> {
        let (wire, model, vocab_size) = match args.api {
            Api::Grpc => {
                let (client, model) = grpc::Client::connect(args).await?;
                (Wire::Grpc(client), model.name, model.vocab_size)
            }
            Api::Openai => {
                let (client, model) = openai::Client::connect(args).await?;
                (Wire::Openai(client), model, VOCAB_SIZE_UNTOLD)
            }
        };
        Ok(Self {
            wire,
            model,
            vocab_size: args.vocab_size.unwrap_or(vocab_size).max(1),
            timeout: Duration::from_millis(args.request_timeout_ms),
        })
    }

    /// What one arrival stands for on this wire.
    pub fn counts(&self) -> &'static str {
        match self.wire {
            Wire::Grpc(_) => "tokens, as each message lists them",
            Wire::Openai(_) => {
                "events with text, since the wire does not count tokens; tokens that complete a character together share one"
            }
        }
    }

    /// Sends one request and follows it to its end. Failures are in the sample.
    ///
    /// # Cancel safety
    /// Dropping the future cancels the request.
    pub async fn run(&self, job: &Job, clock: Clock, on_arrival: OnArrival<'_>) -> Sample {
        let mut sample = Sample {
            sent: clock.now(),
            prompt_tokens: u32::try_from(job.prompt.len()).unwrap_or(u32::MAX),
            ..Sample::default()
        };
        let following = async {
            match &self.wire {
                Wire::Grpc(client) => {
                    client
                        .follow(&self.model, job, clock, &mut sample, on_arrival)
                        .await
                }
                Wire::Openai(client) => {
                    client
                        .follow(&self.model, job, clock, &mut sample, on_arrival)
                        .await
                }
            }
        };
        let followed = match tokio::time::timeout(self.timeout, following).await {
            Ok(followed) => followed,
            Err(_) => Err(Failure::new(
                "CLIENT_TIMEOUT",
                format!("no end within {} ms", self.timeout.as_millis()),
            )),
        };
        sample.ended = clock.now();
        sample.failure = followed.err().or_else(|| too_short(&sample, job));
        sample
    }
}

/// A stream that ended well but with fewer tokens than asked for. Over SSE events
/// may hold several tokens, so the server's own count decides, where there is one.
fn too_short(sample: &Sample, job: &Job) -> Option<Failure> {
    let received = sample.reported_tokens.unwrap_or_else(|| sample.tokens());
    let message = if sample.arrivals.is_empty() {
        "no token was received".to_owned()
    } else if received < job.output_tokens {
        format!("{received} of {} tokens", job.output_tokens)
    } else {
        return None;
    };
    Some(Failure::new("SHORT", message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fewer_tokens_than_asked_is_a_failure() {
        let job = Job {
            prompt: vec![1],
            output_tokens: 3,
            drawn: None,
        };
        let sample = |events: u32, reported_tokens| Sample {
            arrivals: (0..events)
                .map(|at| Arrival {
                    at: Duration::from_millis(u64::from(at)),
                    tokens: 1,
                })
                .collect(),
            reported_tokens,
            ..Sample::default()
        };
        assert_eq!(too_short(&sample(3, None), &job), None);
        assert_eq!(too_short(&sample(2, Some(3)), &job), None);
        for short in [sample(2, None), sample(3, Some(2)), sample(0, Some(3))] {
            assert_eq!(too_short(&short, &job).unwrap().reason, "SHORT");
        }
    }
}
