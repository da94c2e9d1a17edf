//! From flags to the roles' configurations.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use baton_decode_worker::DecodeWorkerConfig;
use baton_engine::config::{EngineConfig, PoolSize, Role};
use baton_engine::kv::PoolSharing;
use baton_engine::model::{LoadOptions, Model};
use baton_kv_transfer::NixlLibrary;
use baton_membership::{Credentials, Etcd, EtcdConfig, Membership};
use baton_prefill_worker::PrefillWorkerConfig;
use baton_proto::WorkerId;
use baton_proto::name::check_name;
use baton_proto::transport::TlsSettings;
use baton_router::config::RouterConfig;

use crate::cli::{
    DecodeRoleArgs, EngineArgs, EtcdArgs, ModelArgs, PrefillRoleArgs, RouterArgs, TlsArgs,
    TransportArgs, WorkerArgs, WorkerTlsArgs,
};
use crate::model::{locate, open};

/// A loaded model and the name it is served under.
pub struct ServedModel {
    pub name: String,
    pub model: Arc<Model>,
}

/// Finds, fetches if need be, and loads the model that the flags name, for sequences of up
/// to `context_max` tokens.
///
/// # Errors
/// A model that cannot be found, fetched or read.
pub fn load_model(
    args: &ModelArgs,
    context_max: Option<u32>,
    quiet: bool,
) -> anyhow::Result<ServedModel> {
    let located = locate::locate(&args.model, args.cache_dir.as_deref(), quiet)?;
    let options = LoadOptions {
        context_max,
        weights: args.weights.weights,
        ..LoadOptions::default()
    };
    let model = open::open(&located, &options, quiet)?;
    let name = args.model_name.clone().unwrap_or(located.name);
    check_name("model_name", &name).map_err(flag_error)?;
    Ok(ServedModel { name, model })
}

/// An engine's settings; threads and cores are the caller's.
pub fn engine_config(args: &EngineArgs, role: Role, model_name: &str) -> EngineConfig {
    let mut config = EngineConfig::new(role, model_name);
    config.block_size = args.block_size;
    config.kv_dtype = args.kv_dtype;
    config.pool = PoolSize::Tokens(args.kv_tokens);
    config.context_max = args.context_max;
    config.prefix_cache = !args.no_prefix_cache;
    config.limits.chunk_tokens = args.chunk_tokens;
    config.limits.sequences_max = args.sequences_max;
    config.limits.step_tokens_max = args.chunk_tokens + args.sequences_max;
    config.limits.queue_requests_max = args.queue_requests_max;
    config
}

/// The router's settings.
///
/// # Errors
/// A key file that cannot be read, or a setting out of its range.
pub fn router_config(
    args: &RouterArgs,
    tls: &TlsArgs,
    worker_tls: &WorkerTlsArgs,
) -> anyhow::Result<RouterConfig> {
    both_or_neither(
        (
            "--worker-tls-certificate",
            &worker_tls.worker_tls_certificate,
        ),
        ("--worker-tls-key", &worker_tls.worker_tls_key),
    )?;
    let config = RouterConfig {
        grpc: args.grpc,
        http: args.http,
        tls: tls_settings(tls)?,
        worker_tls: TlsSettings {
            certificate: worker_tls.worker_tls_certificate.clone(),
            key: worker_tls.worker_tls_key.clone(),
            authority: worker_tls.worker_tls_authority.clone(),
            peer_name: worker_tls.worker_tls_name.clone(),
        },
        api_keys: match &args.api_keys {
            Some(path) => read_api_keys(path)?,
            None => BTreeMap::new(),
        },
        allow_anonymous: args.allow_anonymous,
        requests_max: args.requests_max,
        local_prefill_tokens_max: args.local_prefill_tokens_max,
        refuse_without_prefill: args.refuse_without_prefill,
        request_timeout_ms: args.request_timeout_ms,
        ttft_target_ms: args.ttft_target_ms,
        handoff_timeout_ms: args.handoff_timeout_ms,
        pool_timeout_ms: args.pool_timeout_ms,
        stream_gap_ms: args.stream_gap_ms,
        prefix_spans_max: args.prefix_spans_max as usize,
        drain_ms: args.drain_ms,
        resume_keys: match &args.resume_key_file {
            Some(path) => read_resume_keys(path)?,
            None => Vec::new(),
        },
        resume_life_s: args.resume_life_s,
        ..RouterConfig::default()
    };
    config.validate().map_err(flag_error)?;
    Ok(config)
}

fn read_api_keys(path: &Path) -> anyhow::Result<BTreeMap<String, String>> {
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("`--api-keys`: read `{}`", path.display()))?;
    // The parser's message would quote the line, and the line is a secret.
    toml::from_str(&text).map_err(|_| {
        anyhow::anyhow!(
            "`--api-keys`: `{}` is not a list of `\"key\" = \"tenant\"` lines",
            path.display()
        )
    })
}

/// The lines of a key file. They are secrets: no message quotes one.
fn read_resume_keys(path: &Path) -> anyhow::Result<Vec<String>> {
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("`--resume-key-file`: read `{}`", path.display()))?;
    let lines = text.lines().map(str::trim);
    let keys: Vec<String> = lines
        .filter(|line| !line.is_empty())
        .map(str::to_owned)
        .collect();
    if keys.is_empty() {
        bail!("`--resume-key-file`: `{}` has no key", path.display());
    }
    Ok(keys)
}

/// TLS of a port.
///
/// # Errors
/// A certificate without its key, or a key without its certificate.
pub fn tls_settings(args: &TlsArgs) -> anyhow::Result<TlsSettings> {
    both_or_neither(
        ("--tls-certificate", &args.tls_certificate),
        ("--tls-key", &args.tls_key),
    )?;
    Ok(TlsSettings {
        certificate: args.tls_certificate.clone(),
        key: args.tls_key.clone(),
        authority: args.tls_authority.clone(),
        peer_name: None,
    })
}

/// Two settings that only mean something together, wherever each came from: one may be
/// in the file and the other in the environment.
fn both_or_neither<T>(a: (&str, &Option<T>), b: (&str, &Option<T>)) -> anyhow::Result<()> {
    match (a.1.is_some(), b.1.is_some()) {
        (true, false) => bail!("`{}` needs `{}` beside it", a.0, b.0),
        (false, true) => bail!("`{}` needs `{}` beside it", b.0, a.0),
        _ => Ok(()),
    }
}

/// A library's refusal of a setting, under the name that the command line gives it.
pub(crate) fn flag_error(error: baton_proto::Error) -> anyhow::Error {
    if error.field.is_empty() {
        return error.into();
    }
    let flag = error.field.replace('_', "-");
    anyhow::anyhow!("`--{flag}`: {}", error.message)
}

/// The etcd that the flags name. Connects lazily and keeps trying.
///
/// # Errors
/// A malformed URL or an authority file that cannot be read. Must be called inside a runtime.
pub fn membership(args: &EtcdArgs) -> anyhow::Result<Arc<dyn Membership>> {
    let tls = etcd_tls(args)?;
    let endpoints = args.etcd.iter().map(|text| endpoint(text, tls.is_some()));
    let mut config = EtcdConfig::new(endpoints.collect(), args.cluster.clone());
    config.generation.clone_from(&args.generation);
    config.ttl = Duration::from_secs(args.etcd_ttl_s);
    both_or_neither(
        ("--etcd-user", &args.etcd_user),
        ("--etcd-password", &args.etcd_password),
    )?;
    if let (Some(user), Some(password)) = (&args.etcd_user, &args.etcd_password) {
        config.credentials = Some(Credentials {
            user: user.clone(),
            password: password.clone(),
        });
    }
    config.tls = tls;
    Ok(Arc::new(Etcd::start(config)?))
}

/// An endpoint's URL; HOST:PORT alone is one over what the TLS flags say.
fn endpoint(text: &str, tls: bool) -> String {
    let port = text.rsplit_once(':').map(|(_, port)| port);
    match port.is_some_and(|port| port.parse::<u16>().is_ok()) && !text.contains("://") {
        true if tls => format!("https://{text}"),
        true => format!("http://{text}"),
        false => text.to_owned(),
    }
}

fn etcd_tls(args: &EtcdArgs) -> anyhow::Result<Option<baton_membership::TlsConfig>> {
    both_or_neither(
        ("--etcd-certificate", &args.etcd_certificate),
        ("--etcd-key", &args.etcd_key),
    )?;
    let pem = |flag: &str, path: &Option<PathBuf>| {
        let text = path.as_ref().map(|path| {
            let shown = path.display();
            std::fs::read_to_string(path).with_context(|| format!("`{flag}`: read `{shown}`"))
        });
        text.transpose()
    };
    let ca_pem = pem("--etcd-authority", &args.etcd_authority)?;
    let certificate = pem("--etcd-certificate", &args.etcd_certificate)?;
    let identity_pem = certificate.zip(pem("--etcd-key", &args.etcd_key)?);
    let wanted = ca_pem.is_some() || identity_pem.is_some();
    Ok(wanted.then_some(baton_membership::TlsConfig {
        ca_pem,
        identity_pem,
        domain: None,
    }))
}

fn worker_id(args: &WorkerArgs, role: &str) -> WorkerId {
    match &args.worker_id {
        Some(id) => WorkerId(id.clone()),
        None => WorkerId(format!("{role}-{:08x}", rand::random::<u32>())),
    }
}

fn threads(args: &WorkerArgs) -> usize {
    args.threads
        .map_or(args.cores.len().max(1), |threads| threads as usize)
}

/// NIXL's library, opened, if KV is to go over it.
///
/// # Errors
/// What is missing, by its flag.
fn nixl(args: &TransportArgs) -> anyhow::Result<Option<NixlLibrary>> {
    if !args.kv_transport.uses_nixl() {
        return Ok(None);
    }
    let Some(path) = &args.nixl_library else {
        bail!("`--nixl-library` is missing beside `--kv-transport nixl`");
    };
    let library = NixlLibrary::open(path).context("--nixl-library")?;
    Ok(Some(library))
}

/// A prefill worker process's settings.
///
/// # Errors
/// As [`tls_settings`], TLS without an authority, or NIXL without its library.
pub fn prefill_config(
    args: &PrefillRoleArgs,
    model_name: &str,
) -> anyhow::Result<PrefillWorkerConfig> {
    let mut engine = engine_config(&args.engine, Role::Prefill, model_name);
    engine.threads = threads(&args.worker);
    engine.cores.clone_from(&args.worker.cores);
    let kv_transport = args.transport.kv_transport;
    if kv_transport.shares_memory() {
        engine.pool_sharing = PoolSharing::Lendable;
    }
    let mut config = PrefillWorkerConfig::new(worker_id(&args.worker, "prefill"), engine);
    config.kv_transport = kv_transport;
    config.kv_wire = args.wire.kv_wire;
    config.nixl = nixl(&args.transport)?;
    config.listen = args.worker.listen;
    config.advertise.clone_from(&args.worker.advertise);
    config.admin_listen = Some(args.worker.admin);
    config.tls = tls_settings(&args.tls)?;
    if config.tls.is_enabled() && config.tls.authority.is_none() {
        anyhow::bail!(
            "`--tls-authority` is missing beside `--tls-certificate`: without it a prefill worker cannot check the certificates of decode workers"
        );
    }
    config.tls.peer_name.clone_from(&args.tls_peer_name);
    config.drain_grace = Duration::from_secs(args.worker.drain_grace_s);
    config.topology.clone_from(&args.worker.topology);
    Ok(config)
}

/// A decode worker process's settings.
///
/// # Errors
/// As [`tls_settings`], or NIXL without its library.
pub fn decode_config(
    args: &DecodeRoleArgs,
    model_name: &str,
) -> anyhow::Result<DecodeWorkerConfig> {
    let mut engine = engine_config(&args.engine, Role::Decode, model_name);
    engine.limits.itl_target = args.slo.itl_target();
    engine.threads = threads(&args.worker);
    engine.cores.clone_from(&args.worker.cores);
    let mut config = DecodeWorkerConfig::new(worker_id(&args.worker, "decode"), engine);
    config.listen = args.worker.listen;
    config.advertise.clone_from(&args.worker.advertise);
    config.kv_transport = args.transport.kv_transport;
    config.nixl = nixl(&args.transport)?;
    config.data_listen = Some(args.data_listen);
    config.data_advertise.clone_from(&args.data_advertise);
    config.admin_listen = Some(args.worker.admin);
    config.tls = tls_settings(&args.tls)?;
    config.drain_grace = Duration::from_secs(args.worker.drain_grace_s);
    config.topology.clone_from(&args.worker.topology);
    Ok(config)
}

#[cfg(test)]
mod tests {
    use baton_kv_transfer::TransportChoice;

    use super::*;

    #[test]
    fn an_etcd_endpoint_may_be_a_host_and_a_port() {
        assert_eq!(endpoint("localhost:2379", false), "http://localhost:2379");
        assert_eq!(endpoint("[::1]:2379", true), "https://[::1]:2379");
        for whole in ["http://a:2379", "https://a", "nowhere", "a:b"] {
            assert_eq!(endpoint(whole, true), whole);
        }
    }

    #[test]
    fn nixl_says_what_is_missing() {
        let opened = |library: Option<&str>| {
            let args = TransportArgs {
                kv_transport: TransportChoice::Nixl,
                nixl_library: library.map(Into::into),
            };
            format!("{:#}", nixl(&args).unwrap_err())
        };
        assert!(opened(None).contains("`--nixl-library` is missing"));
        let text = opened(Some("/nowhere"));
        let missing = if cfg!(feature = "nixl") {
            "`/nowhere`"
        } else {
            "--features nixl"
        };
        assert!(
            text.starts_with("--nixl-library: ") && text.contains(missing),
            "{text}"
        );
    }
}
