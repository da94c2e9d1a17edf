//! Opening the files of a model: mapping weights, reading small JSON files whole.
//!
//! Weight files are mapped only while a model loads: packing copies every weight,
//! so that replacing or truncating a file under a running worker cannot change or
//! crash it. Truncating a file *during* the load raises SIGBUS, as with every
//! mapped file.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::time::UNIX_EPOCH;

use memmap2::{Advice, Mmap};
use serde::de::DeserializeOwned;

use super::error::Error;

/// Maps a file for one front-to-back reading.
///
/// # Errors
/// [`Error::Io`], [`Error::NotAModel`] for an empty file.
#[allow(unsafe_code)]
pub(crate) fn map(path: &Path) -> Result<Mmap, Error> {
    let file = File::open(path).map_err(|source| Error::io(path, "open", source))?;
    let length = file
        .metadata()
        .map_err(|source| Error::io(path, "read", source))?
        .len();
    if length == 0 {
        return Err(Error::NotAModel {
            path: path.to_owned(),
            message: "it is empty".to_owned(),
        });
    }
    // SAFETY: the map is read-only and private to the load. That nobody truncates
    // the file meanwhile is the operator's part, as the file's header says.
    let map = unsafe { Mmap::map(&file) }.map_err(|source| Error::io(path, "map", source))?;
    // Only a hint: reading works without it.
    let _ = map.advise(Advice::Sequential);
    Ok(map)
}

/// When a model was written, in Unix seconds: its file, or of a folder its `config.json`. 0 if
/// the file system does not know.
pub(crate) fn created(path: &Path) -> i64 {
    let folder = path.join("config.json");
    let file = if path.is_dir() { &folder } else { path };
    let written = file.metadata().and_then(|metadata| metadata.modified());
    let since = written
        .ok()
        .and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    since.map_or(0, |since| i64::try_from(since.as_secs()).unwrap_or(0))
}

/// Reads a text file of at most `bytes_max`; `None` where it does not exist.
///
/// # Errors
/// [`Error::Io`], [`Error::Malformed`] where it is longer or not UTF-8.
pub(crate) fn read_text(path: &Path, bytes_max: u64) -> Result<Option<String>, Error> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(Error::io(path, "open", source)),
    };
    let mut bytes = Vec::new();
    file.take(bytes_max + 1)
        .read_to_end(&mut bytes)
        .map_err(|source| Error::io(path, "read", source))?;
    if bytes.len() as u64 > bytes_max {
        return Err(Error::malformed(
            path,
            "length",
            bytes_max,
            format!("the file is longer than {bytes_max} bytes"),
        ));
    }
    String::from_utf8(bytes).map(Some).map_err(|error| {
        Error::malformed(
            path,
            "text",
            error.utf8_error().valid_up_to() as u64,
            "is not valid UTF-8",
        )
    })
}

/// Reads a JSON file that must exist.
///
/// # Errors
/// As [`read_text`], and [`Error::Malformed`] where it is not the JSON expected.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path, bytes_max: u64) -> Result<T, Error> {
    let text = read_text(path, bytes_max)?.ok_or_else(|| {
        Error::io(
            path,
            "open",
            std::io::Error::from(std::io::ErrorKind::NotFound),
        )
    })?;
    parse_json(path, &text)
}

/// Reads a JSON file that may be missing.
///
/// # Errors
/// As [`read_json`].
pub(crate) fn read_json_if_there<T: DeserializeOwned>(
    path: &Path,
    bytes_max: u64,
) -> Result<Option<T>, Error> {
    match read_text(path, bytes_max)? {
        Some(text) => parse_json(path, &text).map(Some),
        None => Ok(None),
    }
}

/// Parses the text of a JSON file.
///
/// # Errors
/// [`Error::Malformed`] with the byte offset.
pub(crate) fn parse_json<T: DeserializeOwned>(path: &Path, text: &str) -> Result<T, Error> {
    serde_json::from_str(text).map_err(|error| {
        let offset: usize = text
            .split_inclusive('\n')
            .take(error.line().saturating_sub(1))
            .map(str::len)
            .sum::<usize>()
            + error.column();
        Error::malformed(path, "JSON", offset as u64, error.to_string())
    })
}
