//! Says which commit the binary is built from: `unknown` where the source is no checkout of git's.

use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let commit = commit().unwrap_or_else(|| "unknown".to_owned());
    println!("cargo::rustc-env=BATON_COMMIT={commit}");
}

fn commit() -> Option<String> {
    let workspace = Path::new(&std::env::var_os("CARGO_MANIFEST_DIR")?)
        .parent()?
        .canonicalize()
        .ok()?;
    // A source tree that lies inside another project's checkout is none itself.
    let checkout = PathBuf::from(git(&["rev-parse", "--show-toplevel"])?);
    if checkout.canonicalize().ok()? != workspace {
        return None;
    }
    // The commit changes with either: the first says the branch, the second grows with it.
    for file in ["HEAD", "logs/HEAD"] {
        let path = git(&["rev-parse", "--git-path", file])?;
        if Path::new(&path).exists() {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    git(&["rev-parse", "HEAD"])
}

/// What git says; `None` where it is missing or refuses.
fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok()?;
    let said = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| said.trim().to_owned())
}
