//! Why a model cannot be opened.
//!
//! Every variant names the file, and what is wrong in it: a header field with its
//! byte offset, a tensor, or a configuration field. Nothing here is retryable: the
//! file must change.

use std::path::{Path, PathBuf};

use baton_proto::ErrorKind;

/// Why a model cannot be opened. Nothing of it is held afterwards.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused.
    #[error("cannot {action} `{}`: {source}", path.display())]
    Io {
        path: PathBuf,
        action: &'static str,
        source: std::io::Error,
    },
    /// The path holds no model this build can read.
    #[error("`{}` is not a model: {message}", path.display())]
    NotAModel { path: PathBuf, message: String },
    /// The container is broken: cut off, overlapping or nonsense.
    #[error("`{}`: field `{field}` at byte offset {offset}: {message}", path.display())]
    Malformed {
        path: PathBuf,
        field: String,
        offset: u64,
        message: String,
    },
    /// A tensor is missing, has the wrong shape or type, or is not used by the graph.
    #[error("`{}`: tensor `{tensor}`: {message}", path.display())]
    Tensor {
        path: PathBuf,
        tensor: String,
        message: String,
    },
    /// The description of the model is incomplete or contradicts itself.
    #[error("`{}`: `{field}`: {message}", path.display())]
    Config {
        path: PathBuf,
        field: String,
        message: String,
    },
    /// The file is sound, but asks for something this build does not have.
    #[error("`{}`: `{field}`: {message}", path.display())]
    Unsupported {
        path: PathBuf,
        field: String,
        message: String,
    },
    /// A matrix cannot be laid out for the kernels.
    #[error("`{}`: tensor `{tensor}`: {source}", path.display())]
    Pack {
        path: PathBuf,
        tensor: String,
        source: baton_kernels::Error,
    },
}

impl Error {
    /// What the caller should do.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
                ErrorKind::NotFound
            }
            Self::Io { .. } => ErrorKind::Unavailable,
            Self::Unsupported { .. } => ErrorKind::Unsupported,
            Self::NotAModel { .. }
            | Self::Malformed { .. }
            | Self::Tensor { .. }
            | Self::Config { .. }
            | Self::Pack { .. } => ErrorKind::Invalid,
        }
    }

    pub(crate) fn io(path: &Path, action: &'static str, source: std::io::Error) -> Self {
        Self::Io {
            path: path.to_owned(),
            action,
            source,
        }
    }

    pub(crate) fn malformed(
        path: &Path,
        field: impl Into<String>,
        offset: u64,
        message: impl Into<String>,
    ) -> Self {
        Self::Malformed {
            path: path.to_owned(),
            field: field.into(),
            offset,
            message: message.into(),
        }
    }

    pub(crate) fn tensor(
        path: &Path,
        tensor: impl Into<String>,
        message: impl Into<String>,
    ) -> Self {
        Self::Tensor {
            path: path.to_owned(),
            tensor: tensor.into(),
            message: message.into(),
        }
    }

    pub(crate) fn config(
        path: &Path,
        field: impl Into<String>,
        message: impl Into<String>,
    ) -> Self {
        Self::Config {
            path: path.to_owned(),
            field: field.into(),
            message: message.into(),
        }
    }

    pub(crate) fn unsupported(
        path: &Path,
        field: impl Into<String>,
        message: impl Into<String>,
    ) -> Self {
        Self::Unsupported {
            path: path.to_owned(),
            field: field.into(),
            message: message.into(),
        }
    }
}
