//! Reads safetensors files: one, or the shards an index names.
//!
//! The files are untrusted. A header is read only when its length fits the file,
//! and its tensors must cover the data exactly: no hole, no overlap, nothing
//! behind, each range as long as its shape and type say. With an index, every
//! tensor must be in the shard the index names, and in no other. Which files a folder
//! means is never guessed: shards that no index names are refused, and so is a file
//! with the whole model beside shards of it.
//!
//! ```text
//! header length u64 | header JSON {name: {dtype, shape, data_offsets}} | data
//! ```
//!
//! *Source*: the safetensors format description. The container is parsed here
//! rather than by the crate of that name, whose errors do not name the tensor; the
//! tests hold the two against each other.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};

use baton_kernels::WeightType;
use memmap2::Mmap;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};

use super::error::Error;
use super::files;
use super::shard_name::ShardName;
use super::tensors::Tensor;

/// The format's own bound.
const HEADER_BYTES_MAX: u64 = 100_000_000;
const INDEX_BYTES_MAX: u64 = 64 << 20;
const SHARDS_MAX: usize = 4096;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The mapped weight files of a folder, in the order of their names.
#[derive(Debug)]
pub(crate) struct Shards {
    files: Vec<(PathBuf, Mmap)>,
    /// Tensor name to index in `files`; `None` for a single file without an index.
    index: Option<BTreeMap<String, usize>>,
    folder: PathBuf,
}

impl Shards {
    /// Maps the weight files of `folder`.
    ///
    /// # Errors
    /// [`Error::NotAModel`] where there are none or more than one choice,
    /// [`Error::Io`] for a missing shard, [`Error::Config`] for a broken index.
    pub(crate) fn open(folder: &Path) -> Result<Self, Error> {
        let index_path = folder.join(INDEX);
        let single = folder.join(SINGLE);
        let not_a_model = |message: String| Error::NotAModel {
            path: folder.to_owned(),
            message,
        };
        let shards = shard_names(folder)?;
        if !files::is_there(&index_path) {
            if let Some(shard) = shards.first() {
                return Err(not_a_model(format!(
                    "it has `{shard}` but no `{INDEX}`, which says what its shards hold"
                )));
            }
            if !files::is_there(&single) {
                let other = ["pytorch_model.bin", "pytorch_model.bin.index.json"]
                    .iter()
                    .find(|name| files::is_there(&folder.join(name)));
                return Err(not_a_model(match other {
                    Some(name) => format!("`{name}` is a pickle and is not read; use safetensors"),
                    None => format!("it has neither `{SINGLE}` nor `{INDEX}`"),
                }));
            }
            let map = files::map(&single)?;
            return Ok(Self {
                files: vec![(single, map)],
                index: None,
                folder: folder.to_owned(),
            });
        }
        let json: Index = files::read_json(&index_path, INDEX_BYTES_MAX)?;
        let names: BTreeSet<&str> = json
            .weight_map
            .iter()
            .map(|(_, file)| file.as_str())
            .collect();
        if names.is_empty() || names.len() > SHARDS_MAX {
            return Err(Error::config(
                &index_path,
                "weight_map",
                format!(
                    "names {} files, which is not in 1..={SHARDS_MAX}",
                    names.len()
                ),
            ));
        }
        for name in &names {
            // A file name, so that an index cannot point outside its folder.
            if Path::new(name).file_name().and_then(|n| n.to_str()) != Some(name) {
                return Err(Error::config(
                    &index_path,
                    "weight_map",
                    format!("`{name}` is not a plain file name"),
                ));
            }
        }
        if files::is_there(&single) && !names.contains(SINGLE) {
            return Err(not_a_model(format!(
                "it has both `{SINGLE}` and `{INDEX}`, which names other files; take one away"
            )));
        }
        if let Some(shard) = shards.iter().find(|name| !names.contains(name.as_str())) {
            return Err(not_a_model(format!(
                "`{shard}` is a shard that `{INDEX}` does not name"
            )));
        }
        let mut files = Vec::with_capacity(names.len());
        for name in &names {
            let path = folder.join(name);
            files.push((path.clone(), files::map(&path)?));
        }
        let positions: BTreeMap<&str, usize> = names
            .iter()
            .enumerate()
            .map(|(at, name)| (*name, at))
            .collect();
        let mut index = BTreeMap::new();
        for (tensor, file) in &json.weight_map {
            if index
                .insert(tensor.clone(), positions[file.as_str()])
                .is_some()
            {
                return Err(Error::config(
                    &index_path,
                    "weight_map",
                    format!("tensor `{tensor}` is listed twice"),
                ));
            }
        }
        Ok(Self {
            files,
            index: Some(index),
            folder: folder.to_owned(),
        })
    }

    /// The files in the order of their names, for digests.
    pub(crate) fn files(&self) -> impl Iterator<Item = (&Path, &[u8])> {
        self.files
            .iter()
            .map(|(path, map)| (path.as_path(), &map[..]))
    }

    /// All tensors of all files.
    ///
    /// # Errors
    /// [`Error::Malformed`], [`Error::Tensor`], [`Error::Unsupported`], naming file and tensor.
    pub(crate) fn tensors(&self) -> Result<BTreeMap<String, Tensor<'_>>, Error> {
        let mut all = BTreeMap::new();
        for (at, (path, map)) in self.files.iter().enumerate() {
            for (name, tensor) in read_file(path, map)? {
                if let Some(index) = &self.index {
                    match index.get(&name) {
                        Some(named) if *named == at => {}
                        Some(named) => {
                            return Err(Error::tensor(
                                path,
                                name,
                                format!(
                                    "is in this shard, but the index says `{}`",
                                    self.files[*named].0.display()
                                ),
                            ));
                        }
                        None => {
                            return Err(Error::tensor(path, name, "is not listed in the index"));
                        }
                    }
                }
                all.insert(name, tensor);
            }
        }
        for (name, at) in self.index.iter().flatten() {
            if !all.contains_key(name) {
                return Err(Error::tensor(
                    &self.files[*at].0,
                    name,
                    format!("is listed in `{INDEX}` but is not in this shard"),
                ));
            }
        }
        if all.is_empty() {
            return Err(Error::NotAModel {
                path: self.folder.clone(),
                message: "its weight files hold no tensors".to_owned(),
            });
        }
        Ok(all)
    }
}

/// The files of a folder that are named like shards, sorted.
fn shard_names(folder: &Path) -> Result<Vec<String>, Error> {
    let failed = |source| Error::io(folder, "list", source);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        let Some(name) = name.to_str() else { continue };
        let numbered = name
            .strip_suffix(".safetensors")
            .and_then(ShardName::parse)
            .is_some_and(|shard| shard.stem == "model");
        if numbered {
            names.push(name.to_owned());
        }
    }
    names.sort_unstable();
    Ok(names)
}

#[derive(Deserialize)]
struct Index {
    #[serde(deserialize_with = "pairs")]
    weight_map: Vec<(String, String)>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum HeaderEntry {
    Tensor(Entry),
    Other(IgnoredAny),
}

struct Header(Vec<(String, HeaderEntry)>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        pairs(deserializer).map(Self)
    }
}

/// An object as pairs, so that a name given twice is seen.
fn pairs<'de, D, T>(deserializer: D) -> Result<Vec<(String, T)>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    struct Pairs<T>(std::marker::PhantomData<T>);
    impl<'de, T: Deserialize<'de>> Visitor<'de> for Pairs<T> {
        type Value = Vec<(String, T)>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut pairs = Vec::new();
            while let Some(pair) = map.next_entry()? {
                pairs.push(pair);
            }
            Ok(pairs)
        }
    }
    deserializer.deserialize_map(Pairs(std::marker::PhantomData))
}

fn read_file<'a>(path: &'a Path, bytes: &'a [u8]) -> Result<Vec<(String, Tensor<'a>)>, Error> {
    let size = bytes.len() as u64;
    let Some((length, rest)) = bytes.split_first_chunk::<8>() else {
        return Err(Error::malformed(
            path,
            "header length",
            0,
            format!("needs 8 bytes, the file has {size}"),
        ));
    };
    let length = u64::from_le_bytes(*length);
    if length == 0 || length > HEADER_BYTES_MAX || length > rest.len() as u64 {
        return Err(Error::malformed(
            path,
            "header length",
            0,
            format!(
                "{length} is not in 1..={}; the file may be cut off",
                HEADER_BYTES_MAX.min(rest.len() as u64)
            ),
        ));
    }
    let (json, data) = rest.split_at(length as usize);
    let header: Header = serde_json::from_slice(json).map_err(|error| {
        Error::malformed(
            path,
            "header",
            8,
            format!("is not the JSON it should be: {error}"),
        )
    })?;
    let mut tensors = Vec::with_capacity(header.0.len());
    // Start, end and position in `tensors`.
    let mut ranges: Vec<(u64, u64, usize)> = Vec::with_capacity(header.0.len());
    let mut names = BTreeSet::new();
    for (name, entry) in header.0 {
        if name == "__metadata__" {
            continue;
        }
        let HeaderEntry::Tensor(entry) = entry else {
            return Err(Error::tensor(
                path,
                name,
                "its header entry is not {dtype, shape, data_offsets}",
            ));
        };
        if !names.insert(name.clone()) {
            return Err(Error::tensor(path, name, "is listed twice"));
        }
        let (start, end) = entry.data_offsets;
        let ty = match entry.dtype.as_str() {
            "F32" => WeightType::F32,
            "F16" => WeightType::F16,
            "BF16" => WeightType::BF16,
            other => {
                return Err(Error::unsupported(
                    path,
                    format!("tensor {name}"),
                    format!("dtype `{other}` is not one of F32, F16, BF16"),
                ));
            }
        };
        if start > end || end > data.len() as u64 {
            return Err(Error::tensor(
                path,
                name,
                format!(
                    "data_offsets [{start}, {end}] do not lie in the {} bytes of data; \
                     the file may be cut off",
                    data.len()
                ),
            ));
        }
        let wanted = entry
            .shape
            .iter()
            .try_fold(ty.block_bytes() as u64, |bytes, dim| {
                bytes.checked_mul(*dim)
            });
        if wanted != Some(end - start) {
            return Err(Error::tensor(
                path,
                name,
                format!(
                    "data_offsets [{start}, {end}] are {} bytes, shape {:?} of {} needs {}",
                    end - start,
                    entry.shape,
                    entry.dtype,
                    wanted.map_or("more than fits".to_owned(), |bytes| bytes.to_string())
                ),
            ));
        }
        ranges.push((start, end, tensors.len()));
        let tensor = Tensor {
            file: path,
            ty,
            dims: entry.shape.iter().map(|dim| *dim as usize).collect(),
            bytes: &data[start as usize..end as usize],
        };
        tensors.push((name, tensor));
    }
    check_coverage(path, &mut ranges, &tensors, data.len() as u64)?;
    Ok(tensors)
}

/// The ranges must cover the data from its start to its end, each byte once.
fn check_coverage(
    path: &Path,
    ranges: &mut [(u64, u64, usize)],
    tensors: &[(String, Tensor<'_>)],
    size: u64,
) -> Result<(), Error> {
    ranges.sort_unstable();
    let mut at = 0;
    for (start, end, index) in ranges.iter() {
        if *start != at {
            let what = if *start < at {
                "overlaps the tensor before it"
            } else {
                "leaves a hole"
            };
            return Err(Error::tensor(
                path,
                &tensors[*index].0,
                format!("data_offsets start at {start} instead of {at}: it {what}"),
            ));
        }
        at = *end;
    }
    if at != size {
        let last = ranges
            .last()
            .map_or("header", |(_, _, index)| tensors[*index].0.as_str());
        return Err(Error::tensor(
            path,
            last,
            format!("is the last, but {} bytes follow its end", size - at),
        ));
    }
    Ok(())
}
