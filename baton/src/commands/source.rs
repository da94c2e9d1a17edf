//! Where `generate` and `chat` get their tokens: a cluster started for the purpose,
//! or a running router.

use std::pin::Pin;

use anyhow::Context as _;
use baton_proto::v1::inference_client::InferenceClient;
use baton_proto::{limits, status, transport, v1};
use baton_router::auth::ANONYMOUS;
use baton_router::{CallContext, Frontend, Tenant};
use futures::{Stream, StreamExt as _};
use tokio_util::sync::CancellationToken;

use crate::cli::{EngineArgs, ModelArgs, PoolArgs, SamplingArgs};
use crate::cluster::{Cluster, start_private};
use crate::settings::{flag_error, load_model};

/// The events of one request.
pub type Events = Pin<Box<dyn Stream<Item = anyhow::Result<v1::GenerateEvent>> + Send>>;

/// A place that generates.
pub enum Source {
    /// In this process.
    Own {
        cluster: Box<Cluster>,
        frontend: Frontend,
        model: String,
    },
    /// A router elsewhere.
    Remote {
        client: InferenceClient<tonic::transport::Channel>,
        model: String,
    },
}

impl Source {
    /// Connects to `connect`, or loads the model and starts a cluster.
    ///
    /// # Errors
    /// A model that cannot be loaded, or a router that cannot be reached.
    pub async fn open(
        connect: Option<&str>,
        model: &ModelArgs,
        engine: &EngineArgs,
        pools: &PoolArgs,
    ) -> anyhow::Result<Self> {
        if let Some(address) = connect {
            let channel = transport::channel(address, &transport::TlsSettings::default())?;
            let mut client = InferenceClient::new(channel)
                .max_decoding_message_size(limits::INTERNAL_MESSAGE_BYTES_MAX);
            let models = client
                .list_models(v1::ListModelsRequest {})
                .await
                .map_err(|status| status::from_status(&status))
                .with_context(|| format!("`--connect {address}`: no router answers there"))?
                .into_inner()
                .models;
            let wanted = model.model_name.as_deref();
            let name = models
                .iter()
                .map(|model| model.name.as_str())
                .find(|name| wanted.is_none_or(|wanted| wanted == *name))
                .with_context(|| match wanted {
                    Some(wanted) => {
                        format!("`--model-name {wanted}`: the router does not serve it")
                    }
                    None => "the router serves no model yet".to_owned(),
                })?
                .to_owned();
            return Ok(Self::Remote {
                client,
                model: name,
            });
        }
        let (args, context_max) = (model.clone(), engine.context_max);
        let served = tokio::task::spawn_blocking(move || load_model(&args, context_max, false))
            .await
            .context("load model")??;
        let cluster = start_private(&served, engine, pools).await?;
        Ok(Self::Own {
            frontend: cluster.frontend(),
            cluster: Box::new(cluster),
            model: served.name,
        })
    }

    /// The model that answers.
    pub fn model(&self) -> &str {
        match self {
            Self::Own { model, .. } | Self::Remote { model, .. } => model,
        }
    }

    /// Whether the model has a chat template.
    ///
    /// # Errors
    /// A router that cannot be reached.
    pub async fn has_chat_template(&mut self) -> anyhow::Result<bool> {
        let models = match self {
            Self::Own { frontend, .. } => frontend.models(),
            Self::Remote { client, .. } => {
                client
                    .list_models(v1::ListModelsRequest {})
                    .await?
                    .into_inner()
                    .models
            }
        };
        let name = self.model();
        Ok(models
            .iter()
            .any(|model| model.name == name && model.has_chat_template))
    }

    /// Starts a request.
    ///
    /// # Errors
    /// The router's refusal.
    pub async fn generate(
        &mut self,
        prompt: v1::generate_request::Prompt,
        sampling: &SamplingArgs,
    ) -> anyhow::Result<Events> {
        let request = v1::GenerateRequest {
            model: self.model().to_owned(),
            prompt: Some(prompt),
            sampling: Some(v1::SamplingParams {
                temperature: Some(sampling.temperature),
                top_p: Some(sampling.top_p),
                top_k: Some(sampling.top_k),
                max_tokens: Some(sampling.max_tokens.unwrap_or(512)),
                seed: sampling.seed,
                ..v1::SamplingParams::default()
            }),
            ..v1::GenerateRequest::default()
        };
        match self {
            Self::Own { frontend, .. } => {
                let call = CallContext::new(Tenant::new(ANONYMOUS));
                let events = frontend.generate(request, call).await.map_err(flag_error)?;
                Ok(Box::pin(
                    events.map(|event| event.map_err(anyhow::Error::from)),
                ))
            }
            Self::Remote { client, .. } => {
                let events = client
                    .generate(request)
                    .await
                    .map_err(|status| flag_error(status::from_status(&status)))?;
                Ok(Box::pin(events.into_inner().map(|event| {
                    event.map_err(|status| status::from_status(&status).into())
                })))
            }
        }
    }

    /// Stops what was started.
    ///
    /// # Errors
    /// A worker that had failed.
    pub async fn close(self) -> anyhow::Result<()> {
        match self {
            Self::Own { cluster, .. } => {
                let stop = CancellationToken::new();
                stop.cancel();
                cluster.run(None, stop).await
            }
            Self::Remote { .. } => Ok(()),
        }
    }
}

/// A user's words as a chat message.
pub fn chat_message(role: &str, content: &str) -> v1::ChatMessage {
    v1::ChatMessage {
        json: serde_json::json!({ "role": role, "content": content }).to_string(),
    }
}
