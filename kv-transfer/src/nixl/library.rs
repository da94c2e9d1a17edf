//! Where NIXL's library may lie.

use std::path::{Path, PathBuf};

use super::NixlError;

const FILE: &str = "libnixl_capi.so";

/// The library at `path`, which is the file or a folder that it is in: beside other
/// libraries, of an installation, or of a Python environment.
///
/// # Errors
/// [`NixlError::NotFound`].
pub(super) fn find(path: &Path) -> Result<PathBuf, NixlError> {
    if path.is_file() {
        return Ok(path.to_owned());
    }
    let mut folders = vec![path.to_owned(), path.join("lib"), path.join("lib64")];
    for arch in ["x86_64", "aarch64"] {
        folders.push(path.join("lib").join(format!("{arch}-linux-gnu")));
    }
    // A wheel's own folder is beside its package.
    folders.extend(entries(path, is_wheel));
    for python in entries(&path.join("lib"), |name| name.starts_with("python3")) {
        folders.extend(entries(&python.join("site-packages"), is_wheel));
    }
    let mut files = folders.into_iter().map(|folder| folder.join(FILE));
    files
        .find(|file| file.is_file())
        .ok_or_else(|| NixlError::NotFound(path.to_owned()))
}

fn is_wheel(name: &str) -> bool {
    name.starts_with(".nixl") && name.ends_with(".mesonpy.libs")
}

/// Entries of `folder` by name, in order; none if it is no folder.
fn entries(folder: &Path, wanted: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let listed = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let named = listed.filter(|entry| entry.file_name().to_str().is_some_and(&wanted));
    let mut paths: Vec<PathBuf> = named.map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_found_by_file_folder_wheel_and_environment() {
        let root = std::env::temp_dir().join(format!("baton-nixl-{:x}", rand::random::<u64>()));
        let site = root.join("venv/lib/python3.11/site-packages");
        let wheel = site.join(".nixl_cu12.mesonpy.libs");
        std::fs::create_dir_all(&wheel).unwrap();
        assert!(matches!(find(&site), Err(NixlError::NotFound(path)) if path == site));
        let file = wheel.join(FILE);
        std::fs::write(&file, "").unwrap();
        for path in [&file, &wheel, &site, &root.join("venv")] {
            assert_eq!(find(path).unwrap(), file, "{path:?}");
        }
        assert!(find(&root).is_err());
        std::fs::remove_dir_all(root).unwrap();
    }
}
