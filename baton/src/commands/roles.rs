//! One role in a process of its own, found through etcd.

use std::net::SocketAddr;
use std::sync::Arc;

use baton_decode_worker::DecodeWorker;
use baton_prefill_worker::PrefillWorker;
use baton_router::Router;

use super::up::bind;
use super::{load_unless, print, run_role, shutdown_signal, unless_ended};
use crate::cli::{DecodeRoleArgs, PrefillRoleArgs, RouterRoleArgs, TlsArgs};
use crate::cluster::{Doors, serve_doors};
use crate::settings;
use crate::settings::flag_error;

/// `baton router`.
///
/// # Errors
/// A setting or a port that cannot be used.
pub fn router(args: RouterRoleArgs) -> anyhow::Result<()> {
    let mut config = settings::router_config(&args.router, &args.tls, &args.worker_tls)?;
    config.worker.clone_from(&args.seeds.worker);
    config.state_dir.clone_from(&args.seeds.state_dir);
    run_role(async {
        let shutdown = shutdown_signal()?;
        let http = bind("--http", config.http).await?;
        let grpc = bind("--grpc", config.grpc).await?;
        let (http_at, grpc_at) = (http.local_addr()?, grpc.local_addr()?);
        let membership = settings::membership(&args.etcd)?;
        let router = Router::start(config, Arc::clone(&membership)).map_err(flag_error)?;
        // A process serves on although nobody reads this; likewise below.
        drop(print(&format!(
            "baton router: {}://{http_at} grpc {grpc_at}\n",
            scheme(&args.tls)
        )));
        let admin = router.frontend().admin_state();
        let served = serve_doors(&router, Some(Doors { http, grpc }), admin, shutdown).await;
        router.stop().await;
        membership.close().await;
        served
    })
}

/// `baton prefill`.
///
/// # Errors
/// A setting, a model or a port that cannot be used, or an engine that failed.
pub fn prefill(args: PrefillRoleArgs) -> anyhow::Result<()> {
    run_role(async {
        let shutdown = shutdown_signal()?;
        let membership = settings::membership(&args.etcd)?;
        let Some(served) = load_unless(&shutdown, &args.model, &args.engine).await? else {
            return Ok(());
        };
        let config = settings::prefill_config(&args, &served.name)?;
        let id = config.worker_id.clone();
        let starting = PrefillWorker::start(config, served.model, Arc::clone(&membership));
        let Some(worker) = unless_ended(&shutdown, "the worker started", starting).await else {
            membership.close().await;
            return Ok(());
        };
        let worker = worker?;
        let admin = admin_url(worker.admin_address(), &args.tls);
        announce("prefill", id.as_str(), worker.control_address(), admin);
        let result = worker.run(shutdown).await;
        membership.close().await;
        Ok(result?)
    })
}

/// `baton decode`.
///
/// # Errors
/// As [`prefill`].
pub fn decode(args: DecodeRoleArgs) -> anyhow::Result<()> {
    run_role(async {
        let shutdown = shutdown_signal()?;
        let membership = settings::membership(&args.etcd)?;
        let Some(served) = load_unless(&shutdown, &args.model, &args.engine).await? else {
            return Ok(());
        };
        let config = settings::decode_config(&args, &served.name)?;
        let id = config.worker_id.clone();
        let starting = DecodeWorker::start(config, served.model, Arc::clone(&membership));
        let Some(worker) = unless_ended(&shutdown, "the worker started", starting).await else {
            membership.close().await;
            return Ok(());
        };
        let worker = worker?;
        let admin = admin_url(worker.admin_address(), &args.tls);
        announce("decode", id.as_str(), worker.control_address(), admin);
        let result = worker.run(shutdown).await;
        membership.close().await;
        Ok(result?)
    })
}

fn scheme(tls: &TlsArgs) -> &'static str {
    match tls.tls_certificate {
        Some(_) => "https",
        None => "http",
    }
}

/// Where the metrics of a worker are.
fn admin_url(admin: Option<SocketAddr>, tls: &TlsArgs) -> Option<String> {
    let scheme = scheme(tls);
    admin.map(|admin| format!("{scheme}://{admin}/metrics"))
}

fn announce(role: &str, id: &str, control: SocketAddr, admin: Option<String>) {
    let admin = admin
        .map(|admin| format!(" metrics {admin}"))
        .unwrap_or_default();
    drop(print(&format!(
        "baton {role} `{id}`: control {control}{admin}\n"
    )));
}
