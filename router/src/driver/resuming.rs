//! The driver's part in resuming: what the client brings is taken over before the
//! request is placed, and older attempts are fenced off.

use std::sync::Arc;
use std::time::Duration;

use baton_proto::sampling::SampledToken;
use baton_proto::{Error, v1};

use super::{Driver, sessions};
use crate::request::Event;
use crate::resume::received::Cursor;
use crate::resume::{Claims, parameter_hashes, prompt_hash, tenant_hash};

/// What a worker gets to answer that it ended older attempts.
const FENCE_TIME: Duration = Duration::from_secs(1);

impl Driver {
    /// Takes over what the client has; a fresh request has nothing. Answers whether
    /// every choice is over by that alone.
    pub(super) fn take_over(&mut self) -> Result<bool, Error> {
        let Some(resumed) = &self.job.resumed else {
            return Ok(false);
        };
        self.numerics = resumed.numerics;
        let choices = resumed.choices.clone();
        for (choice, received) in choices.into_iter().enumerate() {
            let mut cursor = Cursor::resumed(choice, &received);
            let ids = received.token_ids;
            let text = &mut self.texts[choice];
            for (index, id) in ids.iter().enumerate() {
                let token = SampledToken {
                    id: *id,
                    logprob: None,
                };
                let piece = text.push(vec![token]);
                if piece.stopped && index + 1 < ids.len() {
                    let message =
                        format!("{} ids, token {index} completes a stop string", ids.len());
                    let field = format!("resume.choices[{choice}].token_ids");
                    return Err(Error::invalid(field, message).with_reason("RESUME_MISMATCH"));
                }
                let rest = cursor.pass(piece)?;
                self.owed[choice].push_str(&rest.text);
            }
            self.cursors[choice] = cursor;
            self.machine.take_over(choice as u32, ids);
        }
        self.fence_off();
        Ok(self.texts.iter().all(|text| text.stopped().is_some()))
    }

    /// Everything is there already: no worker is needed.
    pub(super) async fn finish_taken_over(&mut self) {
        for event in self.acknowledge().await {
            self.step(event).await;
        }
    }

    /// Sends text whose tokens the client has; names the choices that are over.
    pub(super) async fn pay_what_is_owed(&mut self) -> Vec<Event> {
        for choice in 0..self.owed.len() {
            let text = std::mem::take(&mut self.owed[choice]);
            if text.is_empty() {
                continue;
            }
            let tokens = v1::Tokens {
                choice: choice as u32,
                first_index: self.texts[choice].tokens(),
                text,
                ..v1::Tokens::default()
            };
            let event = v1::generate_event::Event::Tokens(tokens);
            if let Err(failed) = self.deliver(event).await {
                return vec![failed];
            }
        }
        let over = self.texts.iter().enumerate().filter_map(|(choice, text)| {
            text.stopped().map(|stopped| Event::StopMatched {
                choice: choice as u32,
                output_tokens: stopped.output_tokens,
            })
        });
        over.collect()
    }

    /// Who speaks for the client's request.
    pub(super) fn fence(&self) -> v1::Fence {
        v1::Fence {
            request: self.job.request_id.0.clone(),
            generation: self.job.fenced.generation(),
        }
    }

    /// Tells every worker of the model to end older attempts: one may still run where
    /// this attempt does not come to.
    fn fence_off(&self) {
        let revision = &self.job.model.card.revision;
        for worker in self.shared.workers.of_revision(revision) {
            let fence = self.fence();
            self.shared.requests.spawn(async move {
                let raising = sessions::raise_fence(Arc::clone(&worker), fence);
                match tokio::time::timeout(FENCE_TIME, raising).await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => {
                        tracing::debug!(worker = %worker.key.id, %error, "older attempts not fenced");
                    }
                    Err(_) => {
                        tracing::debug!(worker = %worker.key.id, "no answer to a fence");
                    }
                }
            });
        }
    }

    /// What lets the client go on from here at another router.
    pub(super) fn resume_token(&self) -> Vec<u8> {
        let job = &self.job;
        let life = i64::try_from(self.shared.config.resume_life_s).unwrap_or(i64::MAX);
        let numerics = self.numerics.map(|numerics| numerics.0.to_vec());
        self.shared.resume_keys.seal(&Claims {
            request_id: job.request_id.0.clone(),
            generation: job.fenced.generation(),
            prompt_hash: prompt_hash(&job.prompt).as_bytes().to_vec(),
            seed: job.sampling.seed,
            created: job.created,
            model_revision: job.model.card.revision.0.clone(),
            expires: crate::frontend::unix_seconds().saturating_add(life),
            numerics: numerics.unwrap_or_default(),
            tenant: tenant_hash(&job.tenant),
            max_tokens: job.sampling.max_tokens,
            parameters: parameter_hashes(&job.sampling, &job.rules),
        })
    }
}
