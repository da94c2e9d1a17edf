//! `baton model`: fetch, list, inspect.

use crate::cli::{ModelCommand, ModelFetchArgs, ModelListArgs};
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
    let cache = locate::cache_folder(args.cache_dir.as_deref())?;
    locate::locate(&args.model, &cache, args.quiet)
}

fn fetch(args: &ModelFetchArgs) -> anyhow::Result<()> {
    let located = find(args)?;
    if args.json {
        let report = serde_json::json!({ "name": located.name, "path": located.path });
        println!("{report}");
    } else {
        println!("{}", located.path.display());
    }
    Ok(())
}

fn list(args: &ModelListArgs) -> anyhow::Result<()> {
    let cache = locate::cache_folder(args.cache_dir.as_deref())?;
    let rows: Vec<serde_json::Value> = catalogue::CATALOGUE
        .iter()
        .map(|model| {
            let path = cache.join(model.file);
            serde_json::json!({
                "name": model.name,
                "about": model.about,
                "licence": model.licence,
                "bytes": model.bytes,
                "path": path.is_file().then_some(path),
            })
        })
        .collect();
    if args.json {
        println!("{}", serde_json::Value::Array(rows));
        return Ok(());
    }
    for (model, row) in catalogue::CATALOGUE.iter().zip(&rows) {
        let here = if row["path"].is_null() {
            "not fetched"
        } else {
            "fetched"
        };
        println!(
            "{:24} {:>5} MB  {:11}  {} ({})",
            model.name,
            model.bytes / 1_000_000,
            here,
            model.about,
            model.licence
        );
    }
    Ok(())
}

fn inspect(args: &ModelFetchArgs) -> anyhow::Result<()> {
    let located = find(args)?;
    let report = inspect::report(&located)?;
    if args.json {
        println!("{report}");
    } else {
        inspect::print(&report);
    }
    Ok(())
}
