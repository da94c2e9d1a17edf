//! `hf:owner/repo[:file]`: a GGUF file or a whole safetensors folder from the hub. With
//! one shard of a split GGUF file come all of them.
//!
//! The hf-hub crate does the transfer, its cache and its resume; `HF_ENDPOINT`,
//! `HF_HOME` and the user's token apply as everywhere else.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use baton_engine::model::ShardName;
use hf_hub::Cache;
use hf_hub::api::sync::{ApiBuilder, ApiRepo};

use super::locate::Located;
use crate::config::variable;

/// Files of a folder that the engine reads; the rest stays on the hub.
const FOLDER_FILES: [&str; 6] = [
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
];

/// Fetches `owner/repo` (a folder) or `owner/repo:file` (a GGUF file).
///
/// # Errors
/// A malformed name, a repository or file that cannot be had.
pub fn fetch(repository: &str, cache: &Path, quiet: bool) -> anyhow::Result<Located> {
    let (id, file) = match repository.split_once(':') {
        Some((id, file)) => (id, Some(file)),
        None => (repository, None),
    };
    let named = |part: &str| {
        !part.is_empty()
            && part
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
    };
    let (owner, name) = match id.split_once('/') {
        Some((owner, name)) if named(owner) && named(name) => (owner, name),
        _ => bail!("`--model hf:{repository}`: expected hf:owner/repo or hf:owner/repo:file"),
    };
    let api = settings_of_the_user(cache)
        .with_cache_dir(cache.join("hub"))
        .with_progress(!quiet)
        .build()
        .context("set up the hub client")?;
    let repo = api.model(format!("{owner}/{name}"));
    let path = match file {
        Some(file) => fetch_files(&repo, file)?,
        None => fetch_folder(&repo)?,
    };
    Ok(Located {
        path,
        name: name.to_owned(),
    })
}

/// The client's own settings: the endpoint, and the token in the user's folder for it. As
/// `ApiBuilder::from_env`, which takes an empty variable for a value and panics without a home.
fn settings_of_the_user(cache: &Path) -> ApiBuilder {
    let own = variable("HF_HOME").map(PathBuf::from).or_else(|| {
        let home = variable("HOME").map(PathBuf::from);
        home.map(|home| home.join(".cache").join("huggingface"))
    });
    let token_beside = own.unwrap_or_else(|| cache.to_owned()).join("hub");
    let builder = ApiBuilder::from_cache(Cache::new(token_beside));
    match variable("HF_ENDPOINT").and_then(|url| url.into_string().ok()) {
        Some(url) => builder.with_endpoint(url),
        None => builder,
    }
}

/// The path of the first of the files that `file` stands for.
fn fetch_files(repo: &ApiRepo, file: &str) -> anyhow::Result<PathBuf> {
    let mut first = None;
    for name in shards_of(file) {
        let path = get(repo, &name)?;
        first.get_or_insert(path);
    }
    first.context("the file has no name")
}

/// All shards of the model that `file` is a shard of, or the file alone.
fn shards_of(file: &str) -> Vec<String> {
    let shard = file.strip_suffix(".gguf").and_then(ShardName::parse);
    match shard {
        Some(shard) => (1..=shard.count)
            .map(|number| format!("{}.gguf", shard.of(number)))
            .collect(),
        None => vec![file.to_owned()],
    }
}

fn fetch_folder(repo: &ApiRepo) -> anyhow::Result<PathBuf> {
    let info = repo.info().context("list the repository's files")?;
    let wanted = |name: &str| FOLDER_FILES.contains(&name) || is_weights(name);
    let files: Vec<&str> = info
        .siblings
        .iter()
        .map(|sibling| sibling.rfilename.as_str())
        .filter(|name| wanted(name))
        .collect();
    if !files.iter().any(|name| is_weights(name)) {
        bail!("the repository has no model.safetensors; name a GGUF file as hf:owner/repo:file");
    }
    let mut folder = None;
    for name in files {
        folder = get(repo, name)?.parent().map(Path::to_owned);
    }
    folder.context("the repository has no files")
}

/// Weight shards of the main folder, whatever their count.
fn is_weights(name: &str) -> bool {
    !name.contains('/') && name.starts_with("model") && name.ends_with(".safetensors")
}

fn get(repo: &ApiRepo, file: &str) -> anyhow::Result<PathBuf> {
    repo.get(file)
        .with_context(|| format!("fetch `{file}` from the hub"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shard_stands_for_all_of_them_in_its_folder() {
        assert_eq!(
            shards_of("q4/m-00002-of-00003.gguf"),
            [
                "q4/m-00001-of-00003.gguf",
                "q4/m-00002-of-00003.gguf",
                "q4/m-00003-of-00003.gguf"
            ]
        );
        for alone in ["m.gguf", "m-00004-of-00003.gguf", "m-00001-of-00002.bin"] {
            assert_eq!(shards_of(alone), [alone]);
        }
    }

    #[test]
    fn a_malformed_repository_is_refused_before_anything_is_asked() {
        for bad in ["", "owner", "/x", "owner/", "a/b/c", "../x/y", "o/r?x"] {
            let error = fetch(bad, Path::new("unused"), true)
                .unwrap_err()
                .to_string();
            assert!(error.contains("expected hf:owner/repo"), "{bad}: {error}");
        }
    }
}
