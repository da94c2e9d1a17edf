//! The benches against a whole cluster of a tiny model inside the test's process.

use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;

use baton_engine::model::{LoadOptions, Model};
use baton_router::RouterConfig;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::client::Client;
use super::flags::BenchCommand;
use super::{interference, load, sweep};
use crate::cli::{CliCommand, EngineArgs, PoolArgs, SloArgs};
use crate::cluster::{Cluster, ClusterPlan, Doors};
use crate::config;

/// A served cluster: one prefill and one decode worker of the random checkpoint.
struct Served {
    grpc: String,
    url: String,
    stop: CancellationToken,
    task: tokio::task::JoinHandle<anyhow::Result<()>>,
}

impl Served {
    async fn start() -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/rand");
        let model: Arc<Model> =
            Model::open(&folder, &LoadOptions::default(), &mut |_, _| {}).unwrap();
        let flags = ["baton", "generate", "x", "--no-pin", "--kv-tokens", "4096"];
        let CliCommand::Generate(args) = parse(&flags) else {
            panic!("not `generate`");
        };
        let (engine, pools): (EngineArgs, PoolArgs) = (args.engine, args.pools);
        let slo = SloArgs {
            itl_target_ms: Some(60_000.0),
        };
        let plan = ClusterPlan::from_flags(RouterConfig::default(), &engine, &pools, slo, "rand");
        let cluster = Cluster::start(plan, model).await.unwrap();
        let http = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let grpc = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stop = CancellationToken::new();
        Self {
            grpc: grpc.local_addr().unwrap().to_string(),
            url: format!("http://{}", http.local_addr().unwrap()),
            task: tokio::spawn(cluster.run(Some(Doors { http, grpc }), stop.clone())),
            stop,
        }
    }

    async fn close(self) {
        self.stop.cancel();
        self.task.await.unwrap().unwrap();
    }

    fn bench(&self, api: &str, flags: &[&str]) -> BenchCommand {
        let mut all = vec!["baton", "bench", flags[0], "--api", api, "--quiet"];
        // Over HTTP a server does not tell how large its vocabulary is.
        all.extend(["--vocab-size", "300"]);
        all.extend(["--connect", &self.grpc, "--url", &self.url]);
        all.extend(&flags[1..]);
        match parse(&all) {
            CliCommand::Bench(command) => command,
            _ => panic!("not `bench`"),
        }
    }

    async fn load(&self, api: &str, flags: &[&str]) -> load::LoadReport {
        let all: Vec<&str> = ["load"].iter().chain(flags).copied().collect();
        let BenchCommand::Load(args) = self.bench(api, &all) else {
            panic!("not `load`");
        };
        let client = Client::connect(&args.target).await.unwrap();
        load::run(&args, &client).await.unwrap()
    }
}

fn parse(args: &[&str]) -> CliCommand {
    config::parse(args.iter().map(OsString::from))
        .unwrap()
        .command
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_is_measured_over_both_front_doors() {
    let served = Served::start().await;

    let flags = "--concurrency 3 --requests 7 --prompt-tokens uniform:70-90 --output-tokens 5 --slo-ttft-ms 60000";
    let flags: Vec<&str> = flags.split(' ').collect();
    let report = served.load("grpc", &flags).await;
    assert_eq!(
        (report.requests, report.succeeded),
        (7, 7),
        "{:?}",
        report.errors
    );
    assert_eq!(report.output_token_count, 35);
    assert_eq!(report.itl_ms.unwrap().count, 7 * 4);
    assert_eq!(report.ttft_ms.unwrap().count, 7);
    // Longer than what a decode worker prefills itself.
    assert_eq!(report.paths.get("disagg"), Some(&7), "{:?}", report.paths);
    assert!(report.goodput_requests_per_s.unwrap() > 0.0);
    assert!(report.table().contains("path: disagg 100 %"));

    let flags = "--rate 500 --requests 6 --prompt-tokens 20 --output-tokens 4";
    let flags: Vec<&str> = flags.split(' ').collect();
    let report = served.load("openai", &flags).await;
    assert_eq!(report.succeeded, 6, "{:?}", report.errors);
    // The server's count, whatever became of the events.
    assert_eq!(report.output_token_count, 24);
    assert_eq!(report.send_lag_ms.unwrap().count, 6);
    assert_eq!(report.goodput_requests_per_s, None);

    // More than the model's context: refused, counted, and the run goes on.
    let flags = "--requests 3 --warmup-requests 0 --prompt-tokens 5 --output-tokens 1000000";
    let flags: Vec<&str> = flags.split(' ').collect();
    for api in ["grpc", "openai"] {
        let report = served.load(api, &flags).await;
        assert_eq!((report.requests, report.succeeded), (3, 0));
        assert_eq!(
            report
                .errors
                .0
                .values()
                .map(|found| found.count)
                .sum::<u64>(),
            3
        );
        assert_eq!(report.ttft_ms, None);
    }
    served.close().await;
}

#[tokio::test]
async fn a_load_is_compared_with_an_earlier_one() {
    let served = Served::start().await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("answers");
    let file = path.to_str().unwrap();
    let flags =
        "--concurrency 3 --requests 6 --prompt-tokens 40 --output-tokens 12 --temperature 0.9";
    for api in ["grpc", "openai"] {
        let mut flags: Vec<&str> = flags.split(' ').collect();
        flags.extend(["--save-answers", file]);
        let report = served.load(api, &flags).await;
        assert_eq!((report.succeeded, report.wrong), (6, None));
        let lines = std::fs::read_to_string(&path).unwrap();
        assert_eq!(lines.lines().count(), 6);
        // Neither another pace nor a filled cache changes an answer.
        let compared: Vec<&str> = flags[..flags.len() - 2]
            .iter()
            .chain(&["--compare-answers", file, "--concurrency", "1"])
            .copied()
            .skip(2)
            .collect();
        let report = served.load(api, &compared).await;
        assert_eq!((report.succeeded, report.wrong), (6, Some(0)));
        assert!(report.table().contains("0 answers differ"));
        let mut changed = compared.clone();
        changed.extend(["--seed", "2"]);
        let report = served.load(api, &changed).await;
        assert_eq!((report.succeeded, report.wrong), (6, Some(6)));
    }
    served.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn long_prompts_are_injected_into_running_streams() {
    let served = Served::start().await;
    let flags = "interference --streams 2 --stream-prompt-tokens 8 --stream-tokens 200 --injections 2 --injection-prompt-tokens 150 --injection-tokens 2 --quiet-ms 60";
    let flags: Vec<&str> = flags.split(' ').collect();
    let BenchCommand::Interference(args) = served.bench("grpc", &flags) else {
        panic!("not `interference`");
    };
    let client = Client::connect(&args.target).await.unwrap();
    let report = interference::run(&args, &client).await.unwrap();
    assert_eq!(report.injections.len(), 2);
    for injection in &report.injections {
        assert_eq!(injection.path.as_deref(), Some("disagg"));
        assert!(injection.ttft_ms > 0.0 && injection.total_ms >= injection.ttft_ms);
    }
    assert!(report.quiet_itl_ms.count > 0 && report.during_itl_ms.count > 0);
    assert_eq!(
        report.p99_ratio,
        report.during_itl_ms.p99 / report.quiet_itl_ms.p99
    );
    served.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn loads_are_swept_and_laid_beside_an_earlier_run() {
    let served = Served::start().await;
    let folder = std::env::temp_dir().join(format!("baton-sweep-test-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let [earlier, plot] = ["earlier.json", "plot.svg"].map(|name| folder.join(name));
    let (earlier, plot) = (earlier.to_str().unwrap(), plot.to_str().unwrap());
    let common = "sweep --settle-ms 50 --step-ms 400 --prompt-tokens uniform:5-40 --output-tokens uniform:2-6 --slo-itl-ms 60000";
    let sweep = async |more: &str| {
        let flags = format!("{common} {more}");
        let flags: Vec<&str> = flags.split(' ').collect();
        let BenchCommand::Sweep(args) = served.bench("grpc", &flags) else {
            panic!("not `sweep`");
        };
        let client = Client::connect(&args.target).await.unwrap();
        sweep::run(&args, &client).await.unwrap()
    };
    let first = sweep("--clients 3 --label before").await;
    let written = serde_json::to_string(&first).unwrap();
    std::fs::write(earlier, &written).unwrap();
    assert_eq!(first.verdict, None);
    let second = sweep(&format!("--clients 1,3 --against {earlier} --plot {plot}")).await;
    // As read: a decimal number may come back as its neighbour.
    let read: serde_json::Value = serde_json::from_str(&written).unwrap();
    assert_eq!(
        serde_json::to_value(&second.against).unwrap(),
        serde_json::json!([read["curve"]])
    );
    assert_eq!(second.curve.points.len(), 2);
    for point in &second.curve.points {
        assert!(
            point.gaps > 0 && point.itl_p99_ms >= point.itl_p50_ms,
            "{point:?}"
        );
        assert!(
            point.output_tokens_per_s > point.requests_per_s,
            "{point:?}"
        );
        assert_eq!(point.failed, 0, "{point:?}");
    }
    let verdict = second.verdict.as_ref().unwrap();
    assert_eq!(
        (verdict.load.as_str(), verdict.best.as_deref()),
        ("3 clients", Some("before"))
    );
    assert!(second.table().contains("before"), "{}", second.table());
    let drawn = std::fs::read_to_string(plot).unwrap();
    assert_eq!(drawn.matches("<polyline").count(), 4);
    assert!(drawn.contains("target 60000 ms") && drawn.ends_with("</svg>\n"));

    let open = sweep("--rates 40").await;
    assert!(open.curve.points[0].gaps > 0);
    std::fs::remove_dir_all(&folder).unwrap();
    served.close().await;
}
