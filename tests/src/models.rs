//! The fixtures and the real models, loaded once per process.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use baton_engine::model::{LoadOptions, Model};

static LOADED: LazyLock<Mutex<HashMap<PathBuf, Arc<Model>>>> = LazyLock::new(Mutex::default);

/// A committed checkpoint of `tests/fixtures`.
///
/// # Panics
/// If it cannot be loaded.
pub fn fixture(name: &str) -> Arc<Model> {
    load(
        &Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("fixtures")
            .join(name),
    )
}

/// A real model from the cache folder. `scripts/test` fetches them first.
///
/// # Panics
/// If the model is not there, saying how to get it.
pub fn real(name: &str) -> Arc<Model> {
    load(&real_path(name))
}

/// The path of a real model in the cache folder.
///
/// # Panics
/// As [`real`].
pub fn real_path(name: &str) -> PathBuf {
    let cache = std::env::var_os("BATON_TEST_MODELS").map_or_else(
        || baton::model::locate::cache_folder(None).expect("a home folder"),
        PathBuf::from,
    );
    let path = cache.join(format!("{name}.gguf"));
    assert!(
        path.is_file(),
        "the tests need the model `{name}`: run `baton model fetch {name}` (scripts/test does)"
    );
    path
}

fn load(path: &Path) -> Arc<Model> {
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(model) = loaded.get(path) {
        return Arc::clone(model);
    }
    let model = Model::open(path, &LoadOptions::default(), &mut |_, _| {})
        .unwrap_or_else(|error| panic!("load `{}`: {error}", path.display()));
    loaded.insert(path.to_owned(), Arc::clone(&model));
    model
}
