//! Asks a router what it sees.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail};
use baton_router::ClusterView;
use ureq::tls::{Certificate, ClientCert, PemItem, PrivateKey, RootCerts, TlsConfig, parse_pem};

use crate::cli::TopArgs;

/// A router that does not answer within this is not well.
const ANSWER_MAX: Duration = Duration::from_secs(5);
/// Of an answer; a worker takes half a kilobyte.
const ANSWER_BYTES_MAX: u64 = 64 << 20;

/// One router's front door.
#[derive(Clone)]
pub struct Source {
    agent: ureq::Agent,
    /// As it was given, for messages.
    url: String,
    endpoint: String,
    bearer: Option<String>,
}

impl Source {
    /// Prepares to ask.
    ///
    /// # Errors
    /// A URL that is none, or a certificate that cannot be read, by the flag's name.
    pub fn new(args: &TopArgs) -> anyhow::Result<Self> {
        let url = &args.url;
        let uri: http::Uri = url
            .parse()
            .with_context(|| format!("`--url {url}`: no URL"))?;
        if !matches!(uri.scheme_str(), Some("http" | "https")) || uri.host().is_none() {
            bail!("`--url {url}`: a URL is http://HOST:PORT or https://HOST:PORT");
        }
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(ANSWER_MAX))
            .http_status_as_error(false)
            .tls_config(tls(args)?)
            .build();
        Ok(Self {
            agent: config.into(),
            url: url.clone(),
            endpoint: format!("{}/cluster", url.trim_end_matches('/')),
            bearer: args.api_key.as_ref().map(|key| format!("Bearer {key}")),
        })
    }

    /// What the router sees now. Blocks for at most [`ANSWER_MAX`].
    ///
    /// # Errors
    /// Who did not answer, or what it said instead.
    pub fn look(&self) -> anyhow::Result<ClusterView> {
        let url = &self.url;
        let mut request = self.agent.get(&self.endpoint);
        if let Some(bearer) = &self.bearer {
            request = request.header("authorization", bearer);
        }
        let answer = request.call();
        let mut answer = answer.with_context(|| format!("`--url {url}`: no router answers"))?;
        match answer.status().as_u16() {
            200 => {}
            401 => bail!("`--url {url}`: the router wants a key, give `--api-key`"),
            404 => {
                bail!("`--url {url}`: what answers there is no router that tells of its cluster")
            }
            other => bail!("`--url {url}`: the router answered with status {other}"),
        }
        let body = answer.body_mut().with_config().limit(ANSWER_BYTES_MAX);
        let view = body.read_json();
        view.with_context(|| format!("`--url {url}`: the answer is not what a router sends"))
    }
}

fn tls(args: &TopArgs) -> anyhow::Result<TlsConfig> {
    let mut config = TlsConfig::builder();
    if let Some(path) = &args.tls_authority {
        let (authorities, _) = pem("--tls-authority", path)?;
        config = config.root_certs(RootCerts::new_with_certs(&authorities));
    }
    if let (Some(certificate), Some(key)) = (&args.tls_certificate, &args.tls_key) {
        let (chain, _) = pem("--tls-certificate", certificate)?;
        let (_, key) = pem("--tls-key", key)?;
        let key = key.context("`--tls-key`: no private key in the file")?;
        config = config.client_cert(Some(ClientCert::new_with_certs(&chain, key)));
    }
    Ok(config.build())
}

/// What a PEM file has of certificates and keys.
fn pem(
    flag: &str,
    path: &Path,
) -> anyhow::Result<(Vec<Certificate<'static>>, Option<PrivateKey<'static>>)> {
    let shown = path.display();
    let bytes = std::fs::read(path).with_context(|| format!("`{flag} {shown}`"))?;
    let (mut certificates, mut key) = (Vec::new(), None);
    for item in parse_pem(&bytes) {
        match item.with_context(|| format!("`{flag} {shown}`: not PEM"))? {
            PemItem::Certificate(certificate) => certificates.push(certificate),
            PemItem::PrivateKey(found) => key = Some(found),
            _ => {}
        }
    }
    if certificates.is_empty() && key.is_none() {
        bail!("`{flag} {shown}`: neither a certificate nor a key is in it");
    }
    Ok((certificates, key))
}
