//! Loads a model that is on this machine, with a progress bar for whoever watches.
//!
//! Its tokenizer is built as a router will build it, so that a model whose tokenizer
//! cannot be used is refused here and never joins a cluster.

use std::sync::Arc;

use anyhow::Context as _;
use baton_engine::model::{LoadOptions, Model, WeightFormat};
use baton_proto::tokenizer_spec::TokenizerSpec;
use baton_tokenizer::Tokenizer;

use super::fetch::bytes_bar;
use super::locate::Located;

/// Reads and packs the weights, as `options` say.
///
/// # Errors
/// A file that cannot be read or is no model.
pub fn open(located: &Located, options: &LoadOptions, quiet: bool) -> anyhow::Result<Arc<Model>> {
    let message = match options.weights {
        WeightFormat::Keep => format!("loading {}", located.name),
        format => format!("loading {} as {format}", located.name),
    };
    let bar = bytes_bar(0, &message, quiet);
    let options = LoadOptions {
        tokenizer_check: Some(check_tokenizer),
        ..options.clone()
    };
    let opened = Model::open(&located.path, &options, &mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    opened.with_context(|| format!("cannot load model `{}`", located.path.display()))
}

fn check_tokenizer(spec: &TokenizerSpec) -> Result<(), String> {
    Tokenizer::from_spec(spec)
        .map(drop)
        .map_err(|error| error.to_string())
}
