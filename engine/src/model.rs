//! A model: its files read once into a configuration, weights and a tokenizer.
//!
//! A model comes from a GGUF file, from the shards of one, or from a Hugging Face folder
//! and is the same thing afterwards. Its weights are copied into the kernels' layout while loading and
//! the files are let go of, so one [`Model`] behind an `Arc` serves every engine
//! of a process. The files are untrusted: whatever is wrong with them ends in an
//! [`Error`] that names the file and the place, never in a panic or in memory
//! beyond a small multiple of the file's size.
//!
//! ```text
//! gguf / safetensors   the container: names, shapes, bytes
//! family               which tensor is what, which parts a family uses
//! config               what the decoder computes
//! tokenizer            what the text layer needs
//! weights              tensors -> packed matrices
//! warnings             what is odd about the files and changes nothing
//! weight_format        what a matrix becomes on the way
//! ```

pub mod config;
mod error;
mod family;
mod files;
mod gguf;
mod safetensors;
mod shard_name;
mod tensors;
mod tokenizer;
mod unique_keys;
mod warnings;
mod weight_format;
pub mod weights;

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use baton_proto::kv_layout::{KvDtype, KvGroup, KvLayout, KvOrigin};
use baton_proto::model_card::ModelCard;
use baton_proto::tokenizer_spec::TokenizerSpec;
use baton_proto::{ModelRevision, NumericsId, TokenId};
use serde_json::{Map, Value};

pub use config::ModelConfig;
pub use config::keys::page as known_keys;
pub use error::Error;
pub use shard_name::ShardName;
pub use weight_format::WeightFormat;
pub use weights::{CpuWeights, LayerWeights, Weights};

use family::Family;
use tensors::Tensors;
use warnings::Warnings;

/// Names the arithmetic of the kernels and of the decoder. Bumped with every change
/// that may change a bit of K, V or logits.
const ARITHMETIC: &[u8] =
    b"baton arithmetic 2: int8 activations per 32, f32 sums in K order, kv tiles of 256, weights 2^x";

/// Names how weights are converted at load. Bumped with every change that may change a
/// bit of a converted weight.
const CONVERSION: &[u8] = b"baton weights 1: Q8_0, Q4_1 by least squares";

/// Names how K and V become codes and are multiplied. Bumped with every change that may
/// change a bit of either.
const CODES: &[u8] =
    b"baton kv codes 2: f16 scale and minimum, 14-bit weights of the largest scale per kv tile";

const CONFIG_BYTES_MAX: u64 = 16 << 20;

/// Bytes hashed between two looks at the rest of the file.
const DIGEST_CHUNK_BYTES: usize = 4 << 20;

/// Says why a tokenizer cannot be used.
pub type TokenizerCheck = fn(&TokenizerSpec) -> Result<(), String>;

/// How a model is to be loaded.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// Sequences of up to so many tokens: shortens the context the files allow, and with
    /// it the RoPE tables; lengthens it where a scaling stretches as far as it is asked to.
    pub context_max: Option<u32>,
    /// What the matrices become while they are loaded.
    pub weights: WeightFormat,
    /// Asked before the weights are read; the engine knows no text itself.
    pub tokenizer_check: Option<TokenizerCheck>,
}

/// A loaded model. Immutable; shared by every engine of a process.
pub struct Model {
    config: ModelConfig,
    tokenizer: TokenizerSpec,
    weights: Arc<CpuWeights>,
    digest: [u8; 32],
    parameters: u64,
    /// Unix seconds, as clients are told; 0 if that is not known.
    created: i64,
    formats: String,
    /// The load-time format, where it changed a matrix.
    converted: Option<WeightFormat>,
    warnings: Vec<String>,
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Model")
            .field("architecture", &self.config.architecture)
            .field("digest", &self.digest_hex())
            .field("parameters", &self.parameters)
            .field("formats", &self.formats)
            .finish_non_exhaustive()
    }
}

impl Model {
    /// Opens a GGUF file (any shard of a split one opens all), a Hugging Face folder, or
    /// a folder that holds one GGUF model and no `config.json`. `progress` hears the bytes
    /// of weights packed so far and of all, the last call with both equal.
    ///
    /// # Errors
    /// Every kind of [`Error`]; nothing is held afterwards.
    pub fn open(
        path: &Path,
        options: &LoadOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Arc<Self>, Error> {
        let kind = files::kind(path)?.ok_or_else(|| files::missing(path))?;
        let mut model = if kind.is_dir() && files::is_there(&path.join("config.json")) {
            open_folder(path, options, progress)
        } else if kind.is_dir() {
            open_gguf(&gguf_in(path)?, options, progress)
        } else if path
            .extension()
            .is_some_and(|extension| extension == "safetensors")
        {
            Err(Error::NotAModel {
                path: path.to_owned(),
                message: "a safetensors file needs the rest of its folder; give the folder"
                    .to_owned(),
            })
        } else {
            open_gguf(path, options, progress)
        }?;
        if let Some(model) = Arc::get_mut(&mut model) {
            model.created = files::created(path);
        }
        Ok(model)
    }

    /// What the decoder computes.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// What the text layer needs.
    pub fn tokenizer_spec(&self) -> &TokenizerSpec {
        &self.tokenizer
    }

    /// The weights in the CPU kernels' layout.
    pub fn weights(&self) -> &Arc<CpuWeights> {
        &self.weights
    }

    /// Every id that ends a sequence.
    pub fn eos(&self) -> &[TokenId] {
        &self.tokenizer.eos
    }

    /// What is odd about the files and changes nothing that is computed, a sentence each.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Longest sequence, in tokens.
    pub fn context_max(&self) -> u32 {
        self.config.context_max
    }

    /// Width of a row of logits.
    pub fn vocab_size(&self) -> usize {
        self.config.vocab
    }

    /// The layers that share a block table: full attention first, then one group
    /// per distinct window.
    pub fn kv_groups(&self) -> Vec<KvGroup> {
        self.config.kv_groups()
    }

    /// BLAKE3 of a GGUF file's bytes; of a split one, of the places, lengths and bytes of
    /// all shards; for a folder, of the names, lengths and bytes of `config.json` and all
    /// weight files.
    pub fn digest(&self) -> &[u8; 32] {
        &self.digest
    }

    fn digest_hex(&self) -> String {
        blake3::Hash::from_bytes(self.digest).to_hex().to_string()
    }

    /// Weights, tied ones counted once.
    pub fn parameters(&self) -> u64 {
        self.parameters
    }

    /// Bytes of weights read for one decode step.
    pub fn weight_bytes(&self) -> u64 {
        self.weights.step_bytes()
    }

    /// Weight formats as loaded and how many tensors have each, as `F32:61,Q4_1:210,Q8_0:1`.
    pub fn formats(&self) -> &str {
        &self.formats
    }

    /// What two workers must share for their K and V to be interchangeable: the files,
    /// what the weights became, the rotations (which may depend on the context the model is
    /// loaded for), the arithmetic, and the type of K and V.
    pub fn numerics(&self, kv_dtype: KvDtype) -> NumericsId {
        let group = kv_dtype.scale_group().to_string();
        let rope = self.config.rope_text();
        let mut parts: Vec<&[u8]> = vec![
            &self.digest,
            self.formats.as_bytes(),
            rope.as_bytes(),
            ARITHMETIC,
            kv_dtype.name().as_bytes(),
        ];
        if kv_dtype.scale_group() > 0 {
            parts.extend([group.as_bytes(), CODES]);
        }
        if let Some(format) = self.converted {
            parts.extend([format.name().as_bytes(), CONVERSION]);
        }
        NumericsId::derive(&parts)
    }

    /// How K and V of this model lie in pools of such blocks.
    pub fn kv_layout(&self, block_size: u32, dtype: KvDtype) -> KvLayout {
        KvLayout {
            block_size,
            dtype,
            scale_group: dtype.scale_group(),
            kv_heads: self.config.kv_heads as u32,
            head_dim: self.config.head_dim_stored() as u32,
            layers: self.config.layers.len() as u32,
            groups: self.kv_groups(),
            numerics: self.numerics(dtype),
            origin: Some(self.origin()),
            shard: None,
        }
    }

    /// What [`Model::numerics`] is made of besides the type of K and V.
    fn origin(&self) -> KvOrigin {
        // What is bumped with a change stands before the colon.
        let version = |text: &'static [u8]| {
            let text = String::from_utf8_lossy(text);
            text.split(':').next().unwrap_or_default().to_owned()
        };
        let mut weights = self.formats.clone();
        if let Some(format) = self.converted {
            weights = format!("{weights} as {format}, {}", version(CONVERSION));
        }
        KvOrigin {
            model: self.digest_hex()[..32].to_owned(),
            weights,
            rope: self.config.rope_text(),
            arithmetic: format!("{}, {}", version(ARITHMETIC), version(CODES)),
        }
    }

    /// Name, digest and, where it changed a matrix, the load-time format: workers whose
    /// weights differ are never of one pool, and those of a file that already has the
    /// format asked for still are.
    fn revision(&self, name: &str) -> ModelRevision {
        let format = self
            .converted
            .map_or_else(String::new, |format| format!("+{format}"));
        ModelRevision(format!("{name}@{}{format}", &self.digest_hex()[..16]))
    }

    /// What routers and peers need to know about this model under `name`.
    pub fn card(&self, name: &str, layout: KvLayout) -> ModelCard {
        let spec = serde_json::to_vec(&self.tokenizer)
            .expect("plain data without maps of non-string keys");
        ModelCard {
            name: name.to_owned(),
            revision: self.revision(name),
            architecture: self.config.architecture.clone(),
            vocab_size: self.config.vocab as u32,
            tokenizer_size: self.tokenizer.tokens.len() as u32,
            context_max: self.config.context_max,
            parameters: self.parameters,
            created: self.created,
            weight_bytes: self.weight_bytes(),
            layout,
            tokenizer_hash: blake3::hash(&spec).to_hex().to_string(),
        }
    }
}

/// What both kinds of files come to before the weights are packed.
struct Opened<'a> {
    config: ModelConfig,
    tokenizer: TokenizerSpec,
    names: &'static family::Names,
    norm_offset: f32,
    tensors: Tensors<'a>,
    /// Name and bytes of each file the digest covers, in order.
    digested: Vec<(Cow<'a, str>, &'a [u8])>,
    warnings: Warnings,
}

fn open_gguf(
    path: &Path,
    options: &LoadOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Arc<Model>, Error> {
    let files = gguf::GgufFiles::open(path)?;
    let mut gguf = files.parse()?;
    let path = gguf.path();
    let key = "general.architecture";
    let architecture = gguf
        .string(key)?
        .ok_or_else(|| Error::config(path, key, "is missing"))?;
    let family: &'static Family = family::by_gguf_architecture(architecture).ok_or_else(|| {
        let known = family::known(|family| family.gguf_architectures);
        Error::unsupported(path, key, format!("`{architecture}` is not one of {known}"))
    })?;
    let mut tensors = Tensors::new(path, gguf.take_tensors());
    let mut warnings = Warnings::default();
    let config = config::gguf::read(family, &gguf, &mut tensors, &mut warnings)?;
    let vocab_key = format!("{architecture}.vocab_size");
    if let Some(says) = gguf.unsigned(&vocab_key)? {
        check_vocab(path, &vocab_key, says, config.vocab)?;
    }
    let tokenizer = tokenizer::gguf::read(&gguf, config.vocab, &mut warnings)?;
    load(
        Opened {
            config,
            tokenizer,
            names: &family.gguf,
            norm_offset: 0.0,
            tensors,
            digested: files.digested(),
            warnings,
        },
        options,
        progress,
    )
}

/// The one GGUF model in a folder without `config.json`, by its first file.
fn gguf_in(folder: &Path) -> Result<PathBuf, Error> {
    let failed = |source| Error::io(folder, "list", source);
    let mut models = BTreeSet::new();
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        let Some(stem) = name.to_str().and_then(|name| name.strip_suffix(".gguf")) else {
            continue;
        };
        // All shards of a model are one.
        let first = ShardName::parse(stem).map_or_else(|| stem.to_owned(), |shard| shard.of(1));
        models.insert(format!("{first}.gguf"));
    }
    let refused = |message: String| Error::NotAModel {
        path: folder.to_owned(),
        message,
    };
    match (models.pop_first(), models.pop_first()) {
        (Some(model), None) => Ok(folder.join(model)),
        (None, _) => Err(refused(
            "it has no `config.json` and no GGUF file".to_owned(),
        )),
        (Some(one), Some(other)) => Err(refused(format!(
            "it holds more than one GGUF model, `{one}` and `{other}`; give the file"
        ))),
    }
}

fn open_folder(
    folder: &Path,
    options: &LoadOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Arc<Model>, Error> {
    let path = folder.join("config.json");
    let Some(text) = files::read_text(&path, CONFIG_BYTES_MAX)? else {
        return Err(Error::NotAModel {
            path: folder.to_owned(),
            message: "it has no `config.json`".to_owned(),
        });
    };
    let json: Map<String, Value> = files::parse_json(&path, &text)?;
    let key = "model_type";
    let model_type = json
        .get(key)
        .and_then(Value::as_str)
        .ok_or_else(|| Error::config(&path, key, "is missing or not a string"))?;
    let family: &'static Family = family::by_hf_model_type(model_type).ok_or_else(|| {
        let known = family::known(|family| family.hf_model_types);
        Error::unsupported(&path, key, format!("`{model_type}` is not one of {known}"))
    })?;
    let mut warnings = Warnings::default();
    let config = config::folder::read(family, &path, &json, &mut warnings)?;
    let shards = safetensors::Shards::open(folder)?;
    let tensors = Tensors::new(folder, shards.tensors()?);
    let embedding = format!("{}.weight", family.hf.embedding);
    if let Some([rows, _]) = tensors.dims(&embedding) {
        check_vocab(&path, "vocab_size", config.vocab as u64, *rows)?;
    }
    let tokenizer = tokenizer::folder::read(folder, &json, config.vocab, &mut warnings)?;
    let mut digested = vec![(Cow::Borrowed("config.json"), text.as_bytes())];
    digested.extend(shards.files().map(|(path, bytes)| {
        let name = path.file_name().and_then(|name| name.to_str());
        (Cow::Borrowed(name.unwrap_or_default()), bytes)
    }));
    load(
        Opened {
            config,
            tokenizer,
            names: &family.hf,
            norm_offset: family.hf_norm_offset,
            tensors,
            digested,
            warnings,
        },
        options,
        progress,
    )
}

/// The vocabulary's size is the embedding's, in whatever the files say.
fn check_vocab(path: &Path, key: &str, says: u64, rows: usize) -> Result<(), Error> {
    if says == rows as u64 {
        return Ok(());
    }
    let message = format!("{says}, but the embedding has {rows} rows");
    Err(Error::config(path, key, message))
}

/// Packs the weights while a second thread hashes the files.
fn load(
    opened: Opened<'_>,
    options: &LoadOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Arc<Model>, Error> {
    let Opened {
        mut config,
        tokenizer,
        names,
        norm_offset,
        tensors,
        digested,
        warnings,
    } = opened;
    if let Some(context_max) = options.context_max {
        if context_max == 0 {
            return Err(Error::config(
                tensors.origin(),
                "context_max",
                "0 is not above 0",
            ));
        }
        config.limit_context(context_max);
    }
    if let Some(check) = options.tokenizer_check {
        check(&tokenizer)
            .map_err(|message| Error::config(tensors.origin(), "tokenizer", message))?;
    }
    let parameters = tensors.elements();
    let formats = tensors.formats(options.weights);
    let converted = (formats != tensors.formats(WeightFormat::Keep)).then_some(options.weights);
    let (weights, digest) = std::thread::scope(|scope| {
        let digest = scope.spawn(|| digest(&digested));
        let weights = weights::load(
            &config,
            names,
            norm_offset,
            options.weights,
            tensors,
            progress,
        );
        (weights, digest.join().expect("hashing does not panic"))
    });
    let weights = Arc::new(weights?);
    let warnings = warnings.into_vec();
    for warning in &warnings {
        tracing::warn!("{warning}");
    }
    Ok(Arc::new(Model {
        weights,
        config,
        tokenizer,
        digest,
        parameters,
        created: 0,
        formats,
        converted,
        warnings,
    }))
}

/// One file alone is hashed as it is, so that the digest is the file's own.
fn digest(files: &[(Cow<'_, str>, &[u8])]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    for (name, bytes) in files {
        if !name.is_empty() {
            for part in [name.len(), bytes.len()] {
                hasher.update(&(part as u64).to_le_bytes());
            }
            hasher.update(name.as_bytes());
        }
        for chunk in bytes.chunks(DIGEST_CHUNK_BYTES) {
            hasher.update(chunk);
        }
    }
    *hasher.finalize().as_bytes()
}
