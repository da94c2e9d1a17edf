//! What `--model` means: a path on this machine, fetched first if need be.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use baton_engine::model::ShardName;

use super::{catalogue, fetch, hub};
use crate::config::variable;

/// A model on this machine.
#[derive(Clone, Debug)]
pub struct Located {
    /// A GGUF file, a shard of one, or a folder.
    pub path: PathBuf,
    /// The name clients ask for unless another one is given.
    pub name: String,
}

/// The cache folder: `--cache-dir`, or `baton/models` in the user's cache folder.
///
/// # Errors
/// Neither a flag nor a variable that says where that is.
pub fn cache_folder(flag: Option<&Path>) -> anyhow::Result<PathBuf> {
    if let Some(folder) = flag {
        return Ok(folder.to_owned());
    }
    let base = variable("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| variable("HOME").map(|home| PathBuf::from(home).join(".cache")));
    match base {
        Some(base) => Ok(base.join("baton").join("models")),
        None => bail!(
            "no folder to keep fetched models in: set `--cache-dir`, or the variable HOME or XDG_CACHE_HOME"
        ),
    }
}

/// Finds or fetches the model that `spec` names; `cache_dir` is the flag's value. What is on
/// this machine needs no cache folder.
///
/// # Errors
/// A path that does not exist, a name that is not known, a fetch that failed, no cache folder
/// where one is needed.
pub fn locate(spec: &str, cache_dir: Option<&Path>, quiet: bool) -> anyhow::Result<Located> {
    let cache = || cache_folder(cache_dir).with_context(|| format!("`--model {spec}`"));
    if let Some(repository) = spec.strip_prefix("hf:") {
        return hub::fetch(repository, &cache()?, quiet);
    }
    if let Some(model) = catalogue::find(spec) {
        return Ok(Located {
            path: fetch::ensure_model(model, &cache()?, quiet)?,
            name: model.name.to_owned(),
        });
    }
    let path = PathBuf::from(spec);
    if let Ok(target) = std::fs::read_link(&path)
        && !path.exists()
    {
        bail!(
            "`--model {spec}`: it is a link to `{}`, where nothing is",
            target.display()
        );
    }
    if !path.exists() {
        let names: Vec<&str> = catalogue::CATALOGUE
            .iter()
            .map(|model| model.name)
            .collect();
        bail!(
            "`--model {spec}`: no such file or folder, and no short name; known names: {}; or `hf:owner/repo[:file]`",
            names.join(", ")
        );
    }
    let path = std::fs::canonicalize(&path).with_context(|| format!("read `{spec}`"))?;
    let stem = path.file_stem().and_then(|stem| stem.to_str());
    let stem = stem.unwrap_or("model");
    // All shards are one model, whichever was given.
    let name = ShardName::parse(stem).map_or(stem, |shard| shard.stem);
    Ok(Located {
        name: name.to_owned(),
        path,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_model_is_refused_with_what_is_known() {
        let folder = tempfile::tempdir().unwrap();
        let error = locate("no-such-model", Some(folder.path()), true)
            .unwrap_err()
            .to_string();
        assert!(error.contains("no-such-model") && error.contains("smollm2-135m-instruct"));
    }

    #[test]
    fn a_file_is_named_by_its_stem_and_a_shard_by_its_model() {
        let folder = tempfile::tempdir().unwrap();
        for file in ["tiny.gguf", "tiny-00002-of-00003.gguf"] {
            let path = folder.path().join(file);
            std::fs::write(&path, b"x").unwrap();
            let located = locate(path.to_str().unwrap(), Some(folder.path()), true).unwrap();
            assert_eq!(located.name, "tiny");
        }
    }

    #[test]
    fn a_link_to_nothing_is_refused_as_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tiny.gguf");
        std::os::unix::fs::symlink("nowhere", &path).unwrap();
        let error = locate(path.to_str().unwrap(), Some(folder.path()), true).unwrap_err();
        assert!(error.to_string().contains("a link to `nowhere`"), "{error}");
    }
}
