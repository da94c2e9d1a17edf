//! The weights of a decoder, and how they get from a file's tensors into the form
//! the kernels read.
//!
//! Matrices that read the same input are stacked into one (q over k over v, gate
//! over up), each source keeping its own format unless [`WeightFormat`] asks for
//! another; then each is converted on its own, right before it is packed.
//! Heads that are not whole vectors are padded with zeros on the way (see
//! [`ModelConfig::head_dim_stored`]).
//! A tied output matrix is the embedding matrix: one copy serves both.

use std::borrow::Cow;
use std::path::Path;

use baton_kernels::{
    Isa, Kernels, MatrixSource, PackedMatrix, RopeTable, WeightMemory, WeightType,
};

use super::config::ModelConfig;
use super::error::Error;
use super::family::{Names, UNNEEDED};
use super::tensors::Tensors;
use super::weight_format::{self, WeightFormat};

/// Rotation angles may always take this much, and as much as the weights beyond it.
const ROPE_BYTES_ALWAYS: u64 = 32 << 20;

/// Weights of one layer, over a backend's matrices `M` and vectors `V`.
pub struct LayerWeights<M, V> {
    pub attention_norm: V,
    /// Queries over keys over values: `[q + 2 kv, hidden]`.
    pub qkv: M,
    pub qkv_bias: Option<V>,
    pub q_norm: Option<V>,
    pub k_norm: Option<V>,
    /// `[hidden, q]`.
    pub attention_output: M,
    pub attention_output_bias: Option<V>,
    pub post_attention_norm: Option<V>,
    pub ffn_norm: V,
    /// Gates over ups: `[2 ffn, hidden]`.
    pub gate_up: M,
    pub gate_up_bias: Option<V>,
    /// `[hidden, ffn]`.
    pub down: M,
    pub down_bias: Option<V>,
    pub post_ffn_norm: Option<V>,
}

/// All weights of a decoder. `R` is a table of rotation angles.
pub struct Weights<M, V, R> {
    /// `[vocab, hidden]`.
    pub embedding: M,
    pub layers: Vec<LayerWeights<M, V>>,
    pub output_norm: V,
    /// `[vocab, hidden]`; `None` where the embedding matrix serves.
    pub output: Option<M>,
    /// As [`ModelConfig::ropes`].
    pub ropes: Vec<R>,
}

impl<M, V, R> Weights<M, V, R> {
    /// The matrix that turns hidden rows into logits.
    pub fn head(&self) -> &M {
        self.output.as_ref().unwrap_or(&self.embedding)
    }
}

/// Weights as the CPU's kernels read them.
pub type CpuWeights = Weights<PackedMatrix, Vec<f32>, RopeTable>;

impl CpuWeights {
    /// Bytes one decode step reads: every matrix once, an untied embedding not at all.
    pub fn step_bytes(&self) -> u64 {
        let layers: usize = self
            .layers
            .iter()
            .map(|layer| {
                layer.qkv.bytes()
                    + layer.attention_output.bytes()
                    + layer.gate_up.bytes()
                    + layer.down.bytes()
            })
            .sum();
        (layers + self.head().bytes()) as u64
    }
}

/// Packs the tensors of a whole model, its matrices as `format` says. `norm_offset` is
/// added to every norm weight.
///
/// # Errors
/// [`Error::Tensor`] for a missing, misshapen or unused tensor, [`Error::Pack`]
/// for a format that does not fit its shape, or a weight that does not fit its format.
pub(crate) fn load(
    config: &ModelConfig,
    names: &Names,
    norm_offset: f32,
    format: WeightFormat,
    mut tensors: Tensors<'_>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<CpuWeights, Error> {
    let total = tensors.bytes();
    check_rope_bytes(tensors.origin(), config, total)?;
    let ropes = ropes(tensors.origin(), config)?;
    let kernels = packers(tensors.origin())?;
    let mut loader = Loader {
        config,
        names,
        norm_offset,
        format,
        tensors: &mut tensors,
        kernels,
        memory: WeightMemory::new(),
        layer: 0,
        total,
        reported: 0,
        progress,
    };

    let output = loader.output()?;
    let embedding = loader.matrix(&[(names.embedding, config.vocab)], config.hidden)?;
    let output_norm = loader.norm(names.output_norm, config.hidden)?;
    loader.report();
    let mut layers = Vec::with_capacity(config.layers.len());
    for layer in 0..config.layers.len() {
        loader.layer = layer;
        layers.push(loader.layer()?);
        loader.report();
    }
    tensors.finish(UNNEEDED)?;
    Ok(Weights {
        embedding,
        layers,
        output_norm,
        output,
        ropes,
    })
}

/// Loading comes before any engine, so it has threads of its own: one per core it may use.
fn packers(path: &Path) -> Result<Kernels, Error> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    Kernels::new(Isa::detect(), threads)
        .map_err(|error| Error::io(path, "start threads to pack", std::io::Error::other(error)))
}

/// The tables of rotation angles are the one thing whose size follows from a number in
/// the file and not from its length.
fn check_rope_bytes(path: &Path, config: &ModelConfig, weight_bytes: u64) -> Result<(), Error> {
    let dims: u64 = config.ropes.iter().map(|rope| rope.dims as u64).sum();
    let bytes = dims * u64::from(config.context_max) * size_of::<f32>() as u64;
    let allowed = weight_bytes.max(ROPE_BYTES_ALWAYS);
    if bytes > allowed {
        return Err(Error::config(
            path,
            "context length",
            format!(
                "{} positions need {bytes} bytes of rotation angles, more than the {allowed} \
                 allowed for {weight_bytes} bytes of weights; ask for a shorter context",
                config.context_max
            ),
        ));
    }
    Ok(())
}

fn ropes(path: &Path, config: &ModelConfig) -> Result<Vec<RopeTable>, Error> {
    config
        .ropes
        .iter()
        .map(|rope| {
            RopeTable::new(
                rope.dims,
                rope.base,
                config.context_max as usize,
                &rope.divisors(config.context_max),
                rope.attention_factor as f32,
            )
            .map_err(|error| Error::config(path, "rope", error.to_string()))
        })
        .collect()
}

struct Loader<'l, 'a> {
    config: &'l ModelConfig,
    names: &'l Names,
    norm_offset: f32,
    format: WeightFormat,
    tensors: &'l mut Tensors<'a>,
    /// The threads that pack, for as long as the model loads.
    kernels: Kernels,
    memory: WeightMemory,
    layer: usize,
    /// Bytes of all tensors, and those last reported as dealt with.
    total: u64,
    reported: u64,
    progress: &'l mut dyn FnMut(u64, u64),
}

/// One matrix of the file, perhaps converted or padded.
struct Source<'a> {
    ty: WeightType,
    rows: usize,
    cols: usize,
    bytes: Cow<'a, [u8]>,
}

impl Source<'_> {
    fn borrowed(&self) -> MatrixSource<'_> {
        MatrixSource {
            ty: self.ty,
            rows: self.rows,
            cols: self.cols,
            bytes: &self.bytes,
        }
    }
}

impl<'a> Loader<'_, 'a> {
    /// Says how many bytes of the files are dealt with.
    fn report(&mut self) {
        self.reported = self.total - self.tensors.bytes();
        (self.progress)(self.reported, self.total);
    }

    fn name(&self, part: &str, kind: &str) -> String {
        format!("{}.{kind}", part.replace("{}", &self.layer.to_string()))
    }

    fn take(&mut self, part: &str, rows: usize, cols: usize) -> Result<Source<'a>, Error> {
        let name = self.name(part, "weight");
        let source = self.tensors.take_matrix(&name, rows, cols)?;
        Ok(Source {
            ty: source.ty,
            rows,
            cols,
            bytes: Cow::Borrowed(source.bytes),
        })
    }

    /// A matrix in the type that the format makes of its own.
    fn converted(&mut self, part: &str, source: Source<'a>) -> Result<Source<'a>, Error> {
        let to = self.format.of(source.ty);
        self.convert(part, source, to)
    }

    fn convert(
        &mut self,
        part: &str,
        source: Source<'a>,
        to: WeightType,
    ) -> Result<Source<'a>, Error> {
        if source.ty == to {
            return Ok(source);
        }
        let (whole, total) = (source.bytes.len() as u64, self.total);
        let taken = total - self.tensors.bytes();
        let mut progress = |done: u64| {
            // A padded copy is longer than what it was made from, so this may fall behind.
            self.reported = self.reported.max((taken + done).saturating_sub(whole));
            (self.progress)(self.reported, total);
        };
        let bytes = weight_format::convert(&source.borrowed(), to, &mut progress);
        Ok(Source {
            ty: to,
            bytes: Cow::Owned(bytes.map_err(|error| self.refusal(part, error))?),
            ..source
        })
    }

    fn refusal(&self, part: &str, source: baton_kernels::Error) -> Error {
        Error::Pack {
            path: self.tensors.origin().to_owned(),
            tensor: self.name(part, "weight"),
            source,
        }
    }

    /// One matrix of the sources `(name, rows)` stacked.
    fn matrix(&mut self, parts: &[(&str, usize)], cols: usize) -> Result<PackedMatrix, Error> {
        let mut sources = Vec::with_capacity(parts.len());
        for (part, rows) in parts {
            let source = self.take(part, *rows, cols)?;
            sources.push(self.converted(part, source)?);
        }
        self.pack(parts[0].0, &sources)
    }

    fn pack(&mut self, part: &str, sources: &[Source<'_>]) -> Result<PackedMatrix, Error> {
        let sources: Vec<MatrixSource<'_>> = sources.iter().map(Source::borrowed).collect();
        self.kernels
            .pack(&sources, &mut self.memory)
            .map_err(|error| self.refusal(part, error))
    }

    /// Queries over keys over values, each head padded by rows of zeros.
    fn qkv(&mut self, parts: &[(&str, usize); 3]) -> Result<PackedMatrix, Error> {
        let (head_dim, stored) = (self.config.head_dim, self.config.head_dim_stored());
        let hidden = self.config.hidden;
        if head_dim == stored {
            return self.matrix(&parts.map(|(part, heads)| (part, heads * head_dim)), hidden);
        }
        let mut padded = Vec::with_capacity(parts.len());
        for (part, heads) in parts {
            let source = self.take(part, heads * head_dim, hidden)?;
            let source = self.converted(part, source)?;
            let head_bytes = source.bytes.len() / heads;
            let zeros = head_bytes / head_dim * (stored - head_dim);
            padded.push(Source {
                rows: heads * stored,
                bytes: Cow::Owned(pad(&source.bytes, head_bytes, zeros)),
                ..source
            });
        }
        self.pack(parts[0].0, &padded)
    }

    /// The matrix behind attention; its columns for padded dimensions are zeros.
    fn attention_output(&mut self, part: &str) -> Result<PackedMatrix, Error> {
        let (head_dim, stored) = (self.config.head_dim, self.config.head_dim_stored());
        let (heads, hidden) = (self.config.heads, self.config.hidden);
        if head_dim == stored {
            return self.matrix(&[(part, hidden)], heads * head_dim);
        }
        let mut source = self.take(part, hidden, heads * head_dim)?;
        // Blocks do not end where heads do: what becomes another type is padded as floats.
        let target = self.format.of(source.ty);
        if target != source.ty && source.ty.is_quantized() {
            source = self.convert(part, source, WeightType::F32)?;
        }
        if source.ty.is_quantized() {
            return Err(Error::unsupported(
                self.tensors.origin(),
                format!("tensor {}", self.name(part, "weight")),
                format!(
                    "{} weights with a head size of {head_dim}, not a multiple of 16",
                    source.ty.name()
                ),
            ));
        }
        let element = source.ty.block_bytes();
        let padded = Source {
            cols: heads * stored,
            bytes: Cow::Owned(pad(
                &source.bytes,
                head_dim * element,
                (stored - head_dim) * element,
            )),
            ..source
        };
        let source = self.convert(part, padded, target)?;
        self.pack(part, &[source])
    }

    fn bias(&mut self, wanted: bool, parts: &[(&str, usize)]) -> Result<Option<Vec<f32>>, Error> {
        if !wanted {
            return Ok(None);
        }
        let mut bias = Vec::new();
        for (part, rows) in parts {
            let name = self.name(part, "bias");
            bias.extend(self.tensors.take_vector(&name, *rows)?);
        }
        Ok(Some(bias))
    }

    /// Biases of queries, keys and values, padded like their matrix.
    fn qkv_bias(&mut self, parts: &[(&str, usize); 3]) -> Result<Option<Vec<f32>>, Error> {
        let (head_dim, stored) = (self.config.head_dim, self.config.head_dim_stored());
        let parts = parts.map(|(part, heads)| (part, heads * head_dim));
        let bias = self.bias(self.config.bias.qkv, &parts)?;
        Ok(bias.map(|bias| pad(&bias, head_dim, stored - head_dim)))
    }

    fn norm(&mut self, part: &str, len: usize) -> Result<Vec<f32>, Error> {
        let name = self.name(part, "weight");
        let mut norm = self.tensors.take_vector(&name, len)?;
        for value in &mut norm {
            *value += self.norm_offset;
        }
        Ok(norm)
    }

    fn optional_norm(
        &mut self,
        wanted: bool,
        part: &str,
        len: usize,
    ) -> Result<Option<Vec<f32>>, Error> {
        if wanted {
            self.norm(part, len).map(Some)
        } else {
            Ok(None)
        }
    }

    /// The output matrix. A tied model may carry a copy of its embedding, which is
    /// dropped, but not another matrix, which would be a contradiction.
    fn output(&mut self) -> Result<Option<PackedMatrix>, Error> {
        let names = self.names;
        if !self.config.tied {
            return self
                .matrix(&[(names.output, self.config.vocab)], self.config.hidden)
                .map(Some);
        }
        let (output, embedding) = (
            self.name(names.output, "weight"),
            self.name(names.embedding, "weight"),
        );
        if self.tensors.contains(&output) && self.tensors.contains(&embedding) {
            let output = self.tensors.take(&output)?;
            let same = self
                .tensors
                .peek(&embedding)
                .is_some_and(|other| other.ty == output.ty && other.bytes == output.bytes);
            if !same {
                return Err(Error::tensor(
                    output.file,
                    self.name(names.output, "weight"),
                    "differs from the embedding, though the configuration ties the two",
                ));
            }
        }
        Ok(None)
    }

    fn layer(&mut self) -> Result<LayerWeights<PackedMatrix, Vec<f32>>, Error> {
        let (config, names) = (self.config, self.names);
        let (hidden, ffn, head_dim) = (config.hidden, config.ffn, config.head_dim);
        let qkv = [
            (names.q, config.heads),
            (names.k, config.kv_heads),
            (names.v, config.kv_heads),
        ];
        let gate_up = [(names.gate, ffn), (names.up, ffn)];
        let output = [(names.attention_output, hidden)];
        let down = [(names.down, hidden)];
        Ok(LayerWeights {
            attention_norm: self.norm(names.attention_norm, hidden)?,
            qkv: self.qkv(&qkv)?,
            qkv_bias: self.qkv_bias(&qkv)?,
            q_norm: self.optional_norm(config.qk_norm, names.q_norm, head_dim)?,
            k_norm: self.optional_norm(config.qk_norm, names.k_norm, head_dim)?,
            attention_output: self.attention_output(names.attention_output)?,
            attention_output_bias: self.bias(config.bias.attention_output, &output)?,
            post_attention_norm: self.optional_norm(
                config.post_norms,
                names.post_attention_norm,
                hidden,
            )?,
            ffn_norm: self.norm(names.ffn_norm, hidden)?,
            gate_up: self.matrix(&gate_up, hidden)?,
            gate_up_bias: self.bias(config.bias.ffn, &gate_up)?,
            down: self.matrix(&down, ffn)?,
            down_bias: self.bias(config.bias.ffn, &down)?,
            post_ffn_norm: self.optional_norm(config.post_norms, names.post_ffn_norm, hidden)?,
        })
    }
}

/// `values` with `zeros` zeros behind every `chunk` of them.
fn pad<T: Copy + Default>(values: &[T], chunk: usize, zeros: usize) -> Vec<T> {
    let mut padded = Vec::with_capacity(values.len() / chunk * (chunk + zeros));
    for values in values.chunks_exact(chunk) {
        padded.extend_from_slice(values);
        padded.resize(padded.len() + zeros, T::default());
    }
    padded
}
