//! The tensors of a model's files, by name, as slices of the mapped bytes.
//!
//! Both containers (GGUF, safetensors) end here, so that everything after them is
//! the same. Each tensor may be taken once; what is left when the graph is
//! complete is an error, because a tensor that exists and is not used means the
//! model computes something else than we would.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use baton_kernels::{MatrixSource, WeightType, dequantize};

use super::error::Error;
use super::weight_format::WeightFormat;

/// One tensor of a file. `dims` has the slowest dimension first.
#[derive(Clone, Debug)]
pub(crate) struct Tensor<'a> {
    pub file: &'a Path,
    pub ty: WeightType,
    pub dims: Vec<usize>,
    pub bytes: &'a [u8],
}

/// All tensors of a model that were not taken yet.
#[derive(Debug)]
pub(crate) struct Tensors<'a> {
    /// Named in errors about tensors that are not there.
    origin: PathBuf,
    left: BTreeMap<String, Tensor<'a>>,
}

impl<'a> Tensors<'a> {
    pub(crate) fn new(origin: &Path, tensors: BTreeMap<String, Tensor<'a>>) -> Self {
        Self {
            origin: origin.to_owned(),
            left: tensors,
        }
    }

    pub(crate) fn origin(&self) -> &Path {
        &self.origin
    }

    pub(crate) fn contains(&self, name: &str) -> bool {
        self.left.contains_key(name)
    }

    /// Dimensions of a tensor that is still here.
    pub(crate) fn dims(&self, name: &str) -> Option<&[usize]> {
        self.left.get(name).map(|tensor| tensor.dims.as_slice())
    }

    /// A tensor that is still here.
    pub(crate) fn peek(&self, name: &str) -> Option<&Tensor<'a>> {
        self.left.get(name)
    }

    /// Bytes of all tensors.
    pub(crate) fn bytes(&self) -> u64 {
        self.left
            .values()
            .map(|tensor| tensor.bytes.len() as u64)
            .sum()
    }

    /// Weights of all tensors.
    pub(crate) fn elements(&self) -> u64 {
        self.left
            .values()
            .map(|tensor| tensor.dims.iter().product::<usize>() as u64)
            .sum()
    }

    /// Number of tensors per weight type once matrices are loaded as `format`, as
    /// `Q4_1:210,Q8_0:1`.
    pub(crate) fn formats(&self, format: WeightFormat) -> String {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for tensor in self.left.values() {
            let is_matrix = tensor.dims.len() == 2;
            let ty = if is_matrix {
                format.of(tensor.ty)
            } else {
                tensor.ty
            };
            *counts.entry(ty.name()).or_default() += 1;
        }
        let parts: Vec<String> = counts
            .iter()
            .map(|(name, count)| format!("{name}:{count}"))
            .collect();
        parts.join(",")
    }

    /// Takes a tensor out.
    ///
    /// # Errors
    /// [`Error::Tensor`] where it is not there.
    pub(crate) fn take(&mut self, name: &str) -> Result<Tensor<'a>, Error> {
        self.left
            .remove(name)
            .ok_or_else(|| Error::tensor(&self.origin, name, "is missing"))
    }

    /// Takes a matrix of `rows` outputs and `cols` inputs.
    ///
    /// # Errors
    /// [`Error::Tensor`] where it is missing or has another shape.
    pub(crate) fn take_matrix(
        &mut self,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<MatrixSource<'a>, Error> {
        let tensor = self.take(name)?;
        if tensor.dims != [rows, cols] {
            return Err(Error::tensor(
                tensor.file,
                name,
                format!(
                    "has shape {:?}, the configuration asks for [{rows}, {cols}]",
                    tensor.dims
                ),
            ));
        }
        Ok(MatrixSource {
            ty: tensor.ty,
            rows,
            cols,
            bytes: tensor.bytes,
        })
    }

    /// Takes a vector of `len` values as f32.
    ///
    /// # Errors
    /// [`Error::Tensor`] where it is missing or has another shape.
    pub(crate) fn take_vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>, Error> {
        let tensor = self.take(name)?;
        if tensor.dims != [len] {
            return Err(Error::tensor(
                tensor.file,
                name,
                format!(
                    "has shape {:?}, the configuration asks for [{len}]",
                    tensor.dims
                ),
            ));
        }
        let mut values = vec![0.0; len];
        dequantize(tensor.ty, tensor.bytes, &mut values).map_err(|source| Error::Pack {
            path: tensor.file.to_owned(),
            tensor: name.to_owned(),
            source,
        })?;
        if let Some(at) = values.iter().position(|value| !value.is_finite()) {
            return Err(Error::tensor(
                tensor.file,
                name,
                format!("element {at} is not a finite number"),
            ));
        }
        Ok(values)
    }

    /// Ends the taking: everything left must be listed as known to be unneeded.
    ///
    /// # Errors
    /// [`Error::Tensor`] for the first tensor that no part of the graph used.
    pub(crate) fn finish(self, unneeded: &[&str]) -> Result<(), Error> {
        match self
            .left
            .iter()
            .find(|(name, _)| !unneeded.iter().any(|end| name.ends_with(end)))
        {
            None => Ok(()),
            Some((name, tensor)) => Err(Error::tensor(
                tensor.file,
                name,
                "exists in the file but is not used by this architecture",
            )),
        }
    }
}
