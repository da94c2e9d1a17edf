//! `baton model`: fetch, list, inspect.

use super::print;
use crate::cli::{ModelCommand, ModelFetchArgs, ModelInspectArgs, ModelListArgs};
use crate::model::{catalogue, inspect, locate};

/// Runs one of the three.
///
/// # Errors
/// A model that cannot be found, fetched or read.
pub fn run(command: ModelCommand) -> anyhow::Result<()> {
    match command {
        ModelCommand::Fetch(args) => fetch(&args),
        ModelCommand::List(args) => list(&args),
        ModelCommand::Inspect(args) => inspect(&args),
    }
}

fn find(args: &ModelFetchArgs) -> anyhow::Result<locate::Located> {
    locate::locate(&args.model, args.cache_dir.as_deref(), args.quiet)
}

fn fetch(args: &ModelFetchArgs) -> anyhow::Result<()> {
    let located = find(args)?;
    if args.json {
        let report = serde_json::json!({ "name": located.name, "path": located.path });
        print(&format!("{report}\n"))
    } else {
        print(&format!("{}\n", located.path.display()))
    }
}

fn list(args: &ModelListArgs) -> anyhow::Result<()> {
    // Without a cache folder nothing has been fetched.
    let cache = locate::cache_folder(args.cache_dir.as_deref()).ok();
    let rows: Vec<serde_json::Value> = catalogue::CATALOGUE
        .iter()
        .map(|model| {
            let path = cache.as_ref().map(|cache| cache.join(model.file));
            serde_json::json!({
                "name": model.name,
                "about": model.about,
                "licence": model.licence,
                "bytes": model.bytes,
                "path": path.filter(|path| path.is_file()),
            })
        })
        .collect();
    if args.json {
        return print(&format!("{}\n", serde_json::Value::Array(rows)));
    }
    let mut table = String::new();
    for (model, row) in catalogue::CATALOGUE.iter().zip(&rows) {
        let here = if row["path"].is_null() {
            "not fetched"
        } else {
            "fetched"
        };
        table += &format!(
            "{:24} {:>5} MB  {:11}  {} ({})\n",
            model.name,
            model.bytes / 1_000_000,
            here,
            model.about,
            model.licence
        );
    }
    print(&table)
}

fn inspect(args: &ModelInspectArgs) -> anyhow::Result<()> {
    let located = find(&args.fetch)?;
    let report = inspect::report(&located, args.weights.weights, args.fetch.quiet)?;
    if args.fetch.json {
        print(&format!("{report}\n"))
    } else {
        print(&inspect::text(&report))
    }
}
