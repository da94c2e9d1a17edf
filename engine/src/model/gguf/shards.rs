//! The files of one GGUF model: one, or the shards it is split into.
//!
//! Any shard stands for all of them: its name says how many there are and how the others
//! are called. The first holds the metadata; each says its place (`split.no`), how many
//! there are (`split.count`) and the tensors of all (`split.tensors.count`). A shard that
//! is missing, out of place, of another model, or brings a tensor that another one has
//! is refused by the name of its file.
//!
//! *Source*: llama.cpp, `llama-model-loader.cpp` and `gguf-split`.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use super::Gguf;
use crate::model::error::Error;
use crate::model::files;
use crate::model::shard_name::ShardName;

const NUMBER: &str = "split.no";
const COUNT: &str = "split.count";
const TENSORS: &str = "split.tensors.count";

/// Metadata that each shard has for itself.
const OWN_KEYS: [&str; 2] = [NUMBER, "general.alignment"];

const SHARDS_MAX: u32 = 4096;

/// The mapped files of a model, the first shard first.
#[derive(Debug)]
pub(crate) struct GgufFiles(Vec<(PathBuf, Mmap)>);

impl GgufFiles {
    /// Maps the file at `path` and, where its name is that of a shard, the others.
    ///
    /// # Errors
    /// [`Error::Io`] for a shard that is missing, [`Error::NotAModel`] for what is no
    /// file, [`Error::Unsupported`] for too many.
    pub(crate) fn open(path: &Path) -> Result<Self, Error> {
        let shard = path
            .file_name()
            .and_then(|name| name.to_str()?.strip_suffix(".gguf"))
            .and_then(ShardName::parse);
        let Some(shard) = shard else {
            return Ok(Self(vec![(path.to_owned(), files::map(path)?)]));
        };
        if shard.count > SHARDS_MAX {
            return Err(Error::unsupported(
                path,
                "file name",
                format!("{} shards are not in 1..={SHARDS_MAX}", shard.count),
            ));
        }
        let mut maps = Vec::new();
        for number in 1..=shard.count {
            let path = path.with_file_name(format!("{}.gguf", shard.of(number)));
            let map = files::map(&path)?;
            maps.push((path, map));
        }
        Ok(Self(maps))
    }

    /// The header of all files together.
    ///
    /// # Errors
    /// As [`Gguf::parse`], and [`Error::Config`] or [`Error::Tensor`] for shards that do
    /// not belong together.
    pub(crate) fn parse(&self) -> Result<Gguf<'_>, Error> {
        let count = self.0.len();
        let mut whole: Option<Gguf<'_>> = None;
        for (index, (path, map)) in self.0.iter().enumerate() {
            let mut shard = Gguf::parse(path, map)?;
            check_place(&shard, index, count)?;
            match &mut whole {
                None => whole = Some(shard),
                Some(whole) => {
                    check_same_model(whole, &shard)?;
                    take_tensors(whole, &mut shard)?;
                }
            }
        }
        let whole = whole.ok_or_else(|| Error::NotAModel {
            path: PathBuf::new(),
            message: "it has no files".to_owned(),
        })?;
        if let Some(tensors) = whole.unsigned(TENSORS)?
            && tensors != whole.tensors.len() as u64
        {
            return Err(Error::config(
                whole.path,
                TENSORS,
                format!(
                    "{tensors} tensors are announced, the {count} files hold {}",
                    whole.tensors.len()
                ),
            ));
        }
        Ok(whole)
    }

    /// What a digest covers: the bytes of each file, and the place of a shard.
    pub(crate) fn digested(&self) -> Vec<(Cow<'_, str>, &[u8])> {
        let alone = self.0.len() == 1;
        let name = |index: usize| match alone {
            true => Cow::Borrowed(""),
            false => Cow::Owned((index + 1).to_string()),
        };
        self.0
            .iter()
            .enumerate()
            .map(|(index, (_, map))| (name(index), &map[..]))
            .collect()
    }
}

/// What the file says of its place against where it was found.
fn check_place(shard: &Gguf<'_>, index: usize, count: usize) -> Result<(), Error> {
    let says = shard.unsigned(COUNT)?.unwrap_or(1);
    let number = shard.unsigned(NUMBER)?.unwrap_or(0);
    if says != count as u64 {
        let message = if count == 1 {
            format!(
                "it is shard {} of {says}; shards are found by names like \
                 `NAME-00001-of-{says:05}.gguf`",
                number.saturating_add(1)
            )
        } else {
            format!("{says} files, by its name it is one of {count}")
        };
        return Err(Error::config(shard.path, COUNT, message));
    }
    if number != index as u64 {
        return Err(Error::config(
            shard.path,
            NUMBER,
            format!("{number}, counted from 0; by its name it is {index}"),
        ));
    }
    Ok(())
}

/// What a shard says of the model must be what the first one says.
fn check_same_model(first: &Gguf<'_>, shard: &Gguf<'_>) -> Result<(), Error> {
    let differs = |key: &str| {
        let message = format!("differs from that of `{}`", first.path.display());
        Err(Error::config(shard.path, key, message))
    };
    if first.get(TENSORS) != shard.get(TENSORS) {
        return differs(TENSORS);
    }
    let mut keys: Vec<&&str> = shard.metadata.keys().collect();
    keys.sort_unstable();
    for key in keys {
        let same = match (first.get(key), shard.get(key)) {
            (Some(ours), Some(theirs)) => ours.same(&theirs),
            _ => false,
        };
        if !same && !OWN_KEYS.contains(key) {
            return differs(key);
        }
    }
    Ok(())
}

fn take_tensors<'a>(whole: &mut Gguf<'a>, shard: &mut Gguf<'a>) -> Result<(), Error> {
    for (name, tensor) in shard.take_tensors() {
        if let Some(other) = whole.tensors.get(&name) {
            let message = format!("is also in `{}`", other.file.display());
            return Err(Error::tensor(shard.path, name, message));
        }
        whole.tensors.insert(name, tensor);
    }
    Ok(())
}
