//! `baton up`: the whole cluster, its front doors and two lines to paste.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context as _;
use tokio::net::TcpListener;

use super::{load_unless, print, run_role, shutdown_signal, unless_ended};
use crate::cli::{UpArgs, WorkerTlsArgs};
use crate::cluster::{Cluster, ClusterPlan, Doors, START_PATIENCE};
use crate::settings::router_config;

/// Runs until SIGTERM or Ctrl-C.
///
/// # Errors
/// A setting, a model or a port that cannot be used.
pub fn run(args: UpArgs) -> anyhow::Result<()> {
    let router = router_config(&args.router, &args.tls, &WorkerTlsArgs::default())?;
    run_role(async {
        let shutdown = shutdown_signal()?;
        // Ports first: a taken one is found before the model is loaded.
        let http = bind("--http", router.http).await?;
        let grpc = bind("--grpc", router.grpc).await?;
        let (http_at, grpc_at) = (http.local_addr()?, grpc.local_addr()?);
        let Some(served) = load_unless(&shutdown, &args.model, &args.engine).await? else {
            return Ok(());
        };
        let plan =
            ClusterPlan::from_flags(router, &args.engine, &args.pools, args.slo, &served.name);
        let has_chat = !served.model.tokenizer_spec().chat_templates.is_empty();
        let launching = Cluster::launch(plan, Arc::clone(&served.model));
        let Some(cluster) = unless_ended(&shutdown, "the cluster started", launching).await else {
            return Ok(());
        };
        let cluster = cluster?;
        let ready = cluster.wait_ready(START_PATIENCE);
        if let Some(ready) = unless_ended(&shutdown, "the cluster was ready", ready).await {
            ready?;
            welcome(http_at, grpc_at, &served.name, has_chat, &args);
        }
        cluster.run(Some(Doors { http, grpc }), shutdown).await
    })
}

/// Binds a front door.
///
/// # Errors
/// Names the flag and the address.
pub(crate) async fn bind(flag: &str, address: SocketAddr) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address)
        .await
        .with_context(|| format!("`{flag} {address}`: cannot listen there"))
}

/// Says where the cluster is and how to ask it something.
fn welcome(http: SocketAddr, grpc: SocketAddr, model: &str, has_chat: bool, args: &UpArgs) {
    let scheme = if args.tls.tls_certificate.is_some() {
        "https"
    } else {
        "http"
    };
    let plain = if scheme == "http" { "-plaintext " } else { "" };
    let (path, body) = if has_chat {
        (
            "chat/completions",
            format!(
                r#"{{"model":"{model}","messages":[{{"role":"user","content":"Say hello"}}],"max_tokens":32}}"#
            ),
        )
    } else {
        (
            "completions",
            format!(r#"{{"model":"{model}","prompt":"Once upon a time","max_tokens":32}}"#),
        )
    };
    let text = format!(
        "baton is ready: model `{model}`, {} prefill and {} decode worker(s)\n  http  {scheme}://{http}\n  grpc  {grpc}\n\ntry:\n  curl {scheme}://{http}/v1/{path} -H 'content-type: application/json' -d '{body}'\n  grpcurl {plain}-d '{{\"model\":\"{model}\",\"text\":\"Once upon a time\",\"sampling\":{{\"max_tokens\":16}}}}' {grpc} baton.v1.Inference/Generate\n\nCtrl-C drains and stops it\n",
        args.pools.prefill_workers, args.pools.decode_workers,
    );
    // A cluster serves on although nobody reads this.
    drop(print(&text));
}
