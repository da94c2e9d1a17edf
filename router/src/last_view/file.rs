//! The last view on disk: one JSON file, replaced as a whole.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};

use baton_membership::WorkerRecord;
use serde::{Deserialize, Serialize};

/// Bytes that are read at all. A record has a few kilobytes.
const FILE_BYTES_MAX: u64 = 64 << 20;
/// How the file is laid out.
const FORMAT: u32 = 1;

#[derive(Serialize, Deserialize)]
struct Kept {
    format: u32,
    workers: Vec<WorkerRecord>,
}

fn path(folder: &Path) -> PathBuf {
    folder.join("workers.json")
}

/// The workers of the last run. A file that is not there is no news; one that cannot be
/// used is said and ignored, since a router must start.
pub(super) fn read(folder: &Path) -> Vec<WorkerRecord> {
    let path = path(folder);
    match try_read(&path) {
        Ok(workers) => {
            if !workers.is_empty() {
                tracing::info!(file = %path.display(), workers = workers.len(),
                    "start with the last view of the cluster");
            }
            workers
        }
        Err(error) => {
            tracing::warn!(file = %path.display(), error,
                "ignore the last view of the cluster, the file cannot be used");
            Vec::new()
        }
    }
}

fn try_read(path: &Path) -> Result<Vec<WorkerRecord>, String> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error.to_string()),
    };
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| error.to_string())?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(format!("larger than {FILE_BYTES_MAX} bytes"));
    }
    let kept: Kept = serde_json::from_slice(&bytes).map_err(|error| error.to_string())?;
    if kept.format != FORMAT {
        return Err(format!("format {}, not {FORMAT}", kept.format));
    }
    for record in &kept.workers {
        record.validate().map_err(|error| error.to_string())?;
    }
    Ok(kept.workers)
}

/// Replaces the file. Whoever reads it, even after a crash, sees the old or the new one.
///
/// # Errors
/// What the file system says.
pub(super) fn write(folder: &Path, workers: &[WorkerRecord]) -> std::io::Result<()> {
    let kept = Kept {
        format: FORMAT,
        workers: workers.to_vec(),
    };
    let bytes = serde_json::to_vec(&kept).map_err(std::io::Error::other)?;
    fs::create_dir_all(folder)?;
    // Two routers by mistake in one folder must not write into one file.
    let new = folder.join(format!(".workers.json.{}", std::process::id()));
    let mut file = File::create(&new)?;
    file.write_all(&bytes)?;
    file.sync_all()?;
    drop(file);
    fs::rename(&new, path(folder))?;
    // The name is on disk once the folder is.
    File::open(folder)?.sync_all()
}
