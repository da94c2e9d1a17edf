//! A router over `baton.v1`. All requests share one connection, as a gateway's would.

use anyhow::Context as _;
use baton_proto::v1::generate_event::Event;
use baton_proto::v1::inference_client::InferenceClient;
use baton_proto::{limits, status, transport, v1};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::Channel;

use super::super::answers::Answer;
use super::super::flags::TargetArgs;
use super::super::sample::{Arrival, Clock, Failure, Handoff, Sample};
use super::super::workload::Job;
use super::OnArrival;

pub struct Client {
    stub: InferenceClient<Channel>,
    bearer: Option<MetadataValue<Ascii>>,
}

impl Client {
    /// Connects and picks the model.
    ///
    /// # Errors
    /// A router that does not answer, or does not serve the model.
    pub async fn connect(args: &TargetArgs) -> anyhow::Result<(Self, v1::Model)> {
        let address = &args.connect;
        let channel = transport::channel(address, &transport::TlsSettings::default())?;
        let bearer = args
            .api_key
            .as_ref()
            .map(|key| format!("Bearer {key}").parse())
            .transpose()
            .ok()
            .context("`--api-key`: holds characters that a header cannot carry")?;
        let client = Self {
            stub: InferenceClient::new(channel)
                .max_decoding_message_size(limits::INTERNAL_MESSAGE_BYTES_MAX),
            bearer,
        };
        let models = client
            .stub
            .clone()
            .list_models(client.request(v1::ListModelsRequest {}))
            .await
            .map_err(|status| status::from_status(&status))
            .with_context(|| format!("`--connect {address}`: no router answers there"))?
            .into_inner()
            .models;
        let wanted = args.model_name.as_deref();
        let model = models
            .into_iter()
            .find(|model| wanted.is_none_or(|wanted| wanted == model.name))
            .with_context(|| match wanted {
                Some(wanted) => format!("`--model-name {wanted}`: the router does not serve it"),
                None => "the router serves no model yet".to_owned(),
            })?;
        Ok((client, model))
    }

    fn request<T>(&self, message: T) -> tonic::Request<T> {
        let mut request = tonic::Request::new(message);
        if let Some(bearer) = &self.bearer {
            request
                .metadata_mut()
                .insert("authorization", bearer.clone());
        }
        request
    }

    /// Sends one request and follows its events.
    ///
    /// # Errors
    /// The router's refusal, or how the stream broke.
    pub async fn follow(
        &self,
        model: &str,
        job: &Job,
        clock: Clock,
        sample: &mut Sample,
        on_arrival: OnArrival<'_>,
    ) -> Result<(), Failure> {
        let failed = |status: tonic::Status| {
            let error = status::from_status(&status);
            let reason = if error.reason.is_empty() {
                error.kind.reason().to_owned()
            } else {
                error.reason.clone()
            };
            Failure::new(reason, error.to_string())
        };
        let request = self.request(v1::GenerateRequest {
            model: model.to_owned(),
            prompt: Some(v1::generate_request::Prompt::TokenIds(v1::TokenIds {
                ids: job.prompt.clone(),
            })),
            sampling: Some(v1::SamplingParams {
                temperature: Some(job.drawn.map_or(0.0, |drawn| drawn.temperature)),
                seed: job.drawn.map(|drawn| drawn.seed),
                max_tokens: Some(job.output_tokens),
                ignore_eos: Some(true),
                ..v1::SamplingParams::default()
            }),
            ..v1::GenerateRequest::default()
        });
        let mut stub = self.stub.clone();
        sample.sent = clock.now();
        let mut events = stub.generate(request).await.map_err(failed)?.into_inner();
        let mut completed = false;
        while let Some(message) = events.message().await.map_err(failed)? {
            let at = clock.now();
            match message.event {
                Some(Event::Tokens(tokens)) if !tokens.ids.is_empty() => {
                    let arrival = Arrival {
                        at,
                        tokens: u32::try_from(tokens.ids.len()).unwrap_or(u32::MAX),
                    };
                    sample.arrivals.push(arrival);
                    if let Answer::Tokens(received) = &mut sample.answer {
                        received.extend(&tokens.ids);
                    }
                    on_arrival(arrival);
                }
                Some(Event::Completed(last)) => {
                    completed = true;
                    let usage = last.usage.unwrap_or_default();
                    sample.cached_tokens = usage.cached_tokens;
                    sample.reported_tokens = Some(usage.completion_tokens);
                    if let Some(timings) = last.timings {
                        sample.path = Some(timings.path);
                        sample.handoff = timings.handoff.map(Handoff::of);
                    }
                }
                _ => {}
            }
        }
        if completed {
            Ok(())
        } else {
            Err(Failure::new(
                "CUT",
                "the stream ended before it was complete",
            ))
        }
    }
}
