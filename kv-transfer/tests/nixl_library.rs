//! NIXL's library for tests.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use baton_kv_transfer::NixlLibrary;

/// The library, if it is installed; says so if it is not.
pub fn library() -> Option<NixlLibrary> {
    static LIBRARY: LazyLock<Option<NixlLibrary>> = LazyLock::new(|| {
        let path = match std::env::var_os("BATON_NIXL_LIBRARY") {
            Some(path) => PathBuf::from(path),
            None => {
                let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/venv-nixl");
                if !path.exists() {
                    let required = std::env::var_os("BATON_REQUIRE_NIXL").is_some();
                    assert!(!required, "NIXL is required and not at {path:?}");
                    return None;
                }
                path
            }
        };
        Some(NixlLibrary::open(&path).unwrap())
    });
    if LIBRARY.is_none() {
        eprintln!("skipped: NIXL's library is not installed; scripts/test does that");
    }
    LIBRARY.clone()
}
