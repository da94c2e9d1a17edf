//! Opening the files of a model: mapping weights, reading small JSON files whole.
//!
//! Only regular files are read. Anything else at a path (a FIFO, a device, a socket, a
//! folder, a link to nothing) is refused by its kind before it is opened, and opening
//! never waits, so that a path which changes meanwhile cannot hang a load either.
//!
//! Weight files are mapped only while a model loads: packing copies every weight,
//! so that replacing or truncating a file under a running worker cannot change or
//! crash it. Truncating a file *during* the load raises SIGBUS, as with every
//! mapped file.

use std::fs::{File, FileType, OpenOptions};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::time::UNIX_EPOCH;

use memmap2::{Advice, Mmap};
use rustix::fs::OFlags;
use rustix::io::Errno;
use serde::de::DeserializeOwned;

use super::error::Error;
use super::unique_keys;

/// Whether anything is at `path`, a link to nothing included.
pub(crate) fn is_there(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok()
}

/// What is at `path`, links followed; `None` where nothing is.
///
/// # Errors
/// [`Error::NotAModel`] for a link to nothing, [`Error::Io`].
pub(crate) fn kind(path: &Path) -> Result<Option<FileType>, Error> {
    match std::fs::metadata(path) {
        Ok(metadata) => Ok(Some(metadata.file_type())),
        Err(error) if error.kind() == ErrorKind::NotFound => match std::fs::read_link(path) {
            Ok(target) => Err(Error::NotAModel {
                path: path.to_owned(),
                message: format!("it is a link to `{}`, where nothing is", target.display()),
            }),
            Err(_) => Ok(None),
        },
        Err(source) => Err(Error::io(path, "open", source)),
    }
}

/// Refuses everything but a regular file.
fn check_kind(path: &Path, kind: FileType) -> Result<(), Error> {
    let found = match kind {
        kind if kind.is_file() => return Ok(()),
        kind if kind.is_dir() => "a folder",
        kind if kind.is_fifo() => "a FIFO",
        kind if kind.is_socket() => "a socket",
        kind if kind.is_char_device() => "a character device",
        kind if kind.is_block_device() => "a block device",
        _ => "of an unknown kind",
    };
    Err(Error::NotAModel {
        path: path.to_owned(),
        message: format!("it is {found}, not a regular file"),
    })
}

/// Opens a regular file; `None` where nothing is.
///
/// # Errors
/// [`Error::NotAModel`] for another kind of file, [`Error::Io`].
fn open(path: &Path) -> Result<Option<File>, Error> {
    let Some(found) = kind(path)? else {
        return Ok(None);
    };
    check_kind(path, found)?;
    // Another file may have come to the path since: a FIFO must not be waited for, a
    // terminal not be taken.
    let never_wait = OFlags::NONBLOCK | OFlags::NOCTTY;
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(never_wait.bits() as i32)
        .open(path);
    let file = match opened {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(Error::io(path, "open", source)),
    };
    let metadata = file
        .metadata()
        .map_err(|source| Error::io(path, "read", source))?;
    check_kind(path, metadata.file_type())?;
    Ok(Some(file))
}

/// What opening a path says where nothing is.
pub(crate) fn missing(path: &Path) -> Error {
    Error::io(path, "open", Errno::NOENT.into())
}

/// Maps a file for one front-to-back reading.
///
/// # Errors
/// [`Error::Io`], [`Error::NotAModel`] for an empty file and what is no file.
#[allow(unsafe_code)]
pub(crate) fn map(path: &Path) -> Result<Mmap, Error> {
    let file = open(path)?.ok_or_else(|| missing(path))?;
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

/// When a model was written, in Unix seconds: its file, or of a folder its `config.json` where
/// it has one. 0 if the file system does not know.
pub(crate) fn created(path: &Path) -> i64 {
    let folder = path.join("config.json");
    let file = if folder.is_file() { &folder } else { path };
    let written = file.metadata().and_then(|metadata| metadata.modified());
    let since = written
        .ok()
        .and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    since.map_or(0, |since| i64::try_from(since.as_secs()).unwrap_or(0))
}

/// Reads a text file of at most `bytes_max`; `None` where it does not exist.
///
/// # Errors
/// [`Error::Io`], [`Error::NotAModel`] where it is no file, [`Error::Malformed`] where it
/// is longer or not UTF-8.
pub(crate) fn read_text(path: &Path, bytes_max: u64) -> Result<Option<String>, Error> {
    let Some(file) = open(path)? else {
        return Ok(None);
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
    let text = read_text(path, bytes_max)?.ok_or_else(|| missing(path))?;
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

/// Parses the text of a JSON file. A key that an object has twice is an error: readers
/// differ on which of its values counts.
///
/// # Errors
/// [`Error::Malformed`] with the byte offset.
pub(crate) fn parse_json<T: DeserializeOwned>(path: &Path, text: &str) -> Result<T, Error> {
    let parsed = unique_keys::check(text).and_then(|()| serde_json::from_str(text));
    parsed.map_err(|error| {
        let offset: usize = text
            .split_inclusive('\n')
            .take(error.line().saturating_sub(1))
            .map(str::len)
            .sum::<usize>()
            + error.column();
        Error::malformed(path, "JSON", offset as u64, error.to_string())
    })
}
