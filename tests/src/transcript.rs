//! Everything a client sees of one gRPC stream, put together over break-offs.
//!
//! Two transcripts are the same if no client could tell them apart but by time: ids,
//! text, log-probabilities with their alternatives, ends and usage. How tokens were
//! grouped into messages is time's doing and is not compared.

use baton_proto::v1;
use baton_proto::v1::generate_event::Event;

/// One choice as the client has it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Seen {
    pub ids: Vec<u32>,
    pub text: String,
    pub logprobs: Vec<v1::Logprobs>,
    /// Reason, tokens and stop string.
    pub end: Option<(i32, u32, Option<String>)>,
}

/// What the client gives back when it resumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// The ids of the tokens and the bytes of text.
    Ids,
    /// The numbers of tokens and of bytes.
    Counts,
    /// The bytes alone.
    Bytes,
}

/// A stream as its client has it.
#[derive(Clone, Debug, Default)]
pub struct Transcript {
    pub accepted: Option<v1::Accepted>,
    pub choices: Vec<Seen>,
    pub completed: Option<v1::Completed>,
    /// The client did not count tokens: some may come again.
    uncounted: bool,
    /// A new stream of the same request has begun and not been accepted yet.
    reconnecting: bool,
}

impl Transcript {
    /// Nothing yet, of `n` choices.
    pub fn new(n: u32) -> Self {
        Self {
            choices: vec![Seen::default(); n as usize],
            ..Self::default()
        }
    }

    /// Tokens received, over all choices.
    pub fn tokens(&self) -> usize {
        self.choices.iter().map(|choice| choice.ids.len()).sum()
    }

    /// Takes the next event.
    ///
    /// # Panics
    /// If it may not come here: an index or an end twice or left out, another request.
    pub fn take(&mut self, event: v1::GenerateEvent) {
        assert!(self.completed.is_none(), "an event after the last one");
        match event.event.expect("an event") {
            Event::Accepted(accepted) => {
                if let Some(before) = &self.accepted {
                    assert!(self.reconnecting, "accepted twice");
                    let told = |a: &v1::Accepted| v1::Accepted {
                        resume_token: Vec::new(),
                        ..a.clone()
                    };
                    assert_eq!(told(before), told(&accepted), "the same request");
                }
                self.reconnecting = false;
                assert!(!accepted.resume_token.is_empty());
                self.accepted = Some(accepted);
            }
            Event::Tokens(tokens) => self.take_tokens(tokens),
            Event::Finished(finished) => {
                let choice = &mut self.choices[finished.choice as usize];
                assert!(choice.end.is_none(), "a choice ended twice");
                choice.text.push_str(&finished.text);
                choice.end = Some((
                    finished.reason,
                    finished.output_tokens,
                    finished.stop_string,
                ));
            }
            Event::Completed(completed) => self.completed = Some(completed),
        }
    }

    fn take_tokens(&mut self, tokens: v1::Tokens) {
        assert!(self.accepted.is_some() && !self.reconnecting);
        let choice = &mut self.choices[tokens.choice as usize];
        assert!(choice.end.is_none(), "tokens after the end of their choice");
        let first = tokens.first_index as usize;
        if self.uncounted && first < choice.ids.len() {
            // Tokens without text of their own; they must be the same ones.
            for (id, known) in tokens.ids.iter().zip(&choice.ids[first..]) {
                assert_eq!(id, known);
            }
            choice.ids.truncate(first);
            choice.logprobs.truncate(first);
        }
        assert_eq!(first, choice.ids.len(), "each index once and in order");
        choice.ids.extend(tokens.ids);
        choice.logprobs.extend(tokens.logprobs);
        choice.text.push_str(&tokens.text);
    }

    /// The field that goes on from here; what comes next is taken as a new stream of
    /// the same request. Ends are said again.
    ///
    /// # Panics
    /// If nothing was accepted yet.
    pub fn resume(&mut self, way: Way) -> v1::Resume {
        let accepted = self.accepted.as_ref().expect("accepted");
        let choices = self.choices.iter().map(|choice| v1::ResumeChoice {
            tokens_received: (way == Way::Counts).then_some(choice.ids.len() as u32),
            text_bytes_received: choice.text.len() as u64,
            token_ids: match way {
                Way::Ids => choice.ids.clone(),
                _ => Vec::new(),
            },
        });
        let resume = v1::Resume {
            resume_token: accepted.resume_token.clone(),
            choices: choices.collect(),
        };
        self.reconnecting = true;
        self.uncounted = way == Way::Bytes;
        for choice in &mut self.choices {
            choice.end = None;
        }
        resume
    }

    /// Compares with an undisturbed transcript of the same request.
    ///
    /// # Panics
    /// If a client could tell them apart.
    pub fn assert_same(&self, undisturbed: &Self, what: &str) {
        for (index, (got, right)) in self.choices.iter().zip(&undisturbed.choices).enumerate() {
            assert_eq!(got.ids, right.ids, "{what}: ids of choice {index}");
            assert_eq!(got.text, right.text, "{what}: text of choice {index}");
            assert_eq!(got.end, right.end, "{what}: end of choice {index}");
            assert_eq!(
                got.logprobs, right.logprobs,
                "{what}: logprobs of choice {index}"
            );
        }
        let usage = |transcript: &Self| {
            let completed = transcript.completed.as_ref().expect("completed");
            let usage = completed.usage.expect("usage");
            // What a cache held is the attempt's own.
            (usage.prompt_tokens, usage.completion_tokens)
        };
        assert_eq!(usage(self), usage(undisturbed), "{what}");
    }
}

/// Requests that between them use everything whose state a stream carries: `max_tokens`
/// tokens at most, each with its name.
pub fn demanding(max_tokens: u32) -> Vec<(&'static str, v1::GenerateRequest)> {
    let prompt = |salt: u32| {
        let ids = (0..97).map(|i| 6 + (i * 31 + salt * 17) % 290).collect();
        Some(v1::generate_request::Prompt::TokenIds(v1::TokenIds { ids }))
    };
    let request = |salt: u32, sampling: v1::SamplingParams| v1::GenerateRequest {
        prompt: prompt(salt),
        sampling: Some(v1::SamplingParams {
            max_tokens: Some(max_tokens),
            ignore_eos: sampling.ignore_eos.or(Some(true)),
            ..sampling
        }),
        ..v1::GenerateRequest::default()
    };
    let drawn = |seed: u64| v1::SamplingParams {
        temperature: Some(0.9),
        seed: Some(seed),
        ..v1::SamplingParams::default()
    };
    vec![
        (
            "greedy",
            request(
                1,
                v1::SamplingParams {
                    temperature: Some(0.0),
                    ..v1::SamplingParams::default()
                },
            ),
        ),
        (
            "drawn with logprobs",
            request(
                2,
                v1::SamplingParams {
                    top_p: Some(0.9),
                    logprobs: Some(3),
                    ..drawn(7)
                },
            ),
        ),
        (
            "penalties and min_tokens",
            request(
                3,
                v1::SamplingParams {
                    presence_penalty: Some(0.7),
                    frequency_penalty: Some(0.4),
                    repetition_penalty: Some(1.3),
                    min_tokens: Some(max_tokens / 2),
                    ignore_eos: Some(false),
                    ..drawn(8)
                },
            ),
        ),
        (
            "two choices",
            request(
                4,
                v1::SamplingParams {
                    n: Some(2),
                    logprobs: Some(0),
                    ..drawn(9)
                },
            ),
        ),
        (
            "a seed of the router's",
            request(
                5,
                v1::SamplingParams {
                    temperature: Some(1.0),
                    ..v1::SamplingParams::default()
                },
            ),
        ),
    ]
}

/// The request with a stop string that matches in the last third of an undisturbed
/// choice's text, and others that are half matched on the way.
pub fn with_stop(request: &v1::GenerateRequest, text: &str) -> v1::GenerateRequest {
    let characters: Vec<char> = text.chars().collect();
    let at = |share: usize, length: usize, tail: &str| {
        let from = characters.len() * share / 10;
        let found: String = characters.iter().skip(from).take(length).collect();
        format!("{found}{tail}")
    };
    v1::GenerateRequest {
        stop: vec![
            at(1, 4, "\u{2603}"),
            at(3, 9, "\u{2603}"),
            at(8, 12, ""),
            at(5, 3, "\u{2603}\u{2603}"),
        ],
        ..request.clone()
    }
}
