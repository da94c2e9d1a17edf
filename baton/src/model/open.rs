//! Loads a model that is on this machine, with a progress bar for whoever watches.

use std::sync::Arc;

use anyhow::Context as _;
use baton_engine::model::{LoadOptions, Model, WeightFormat};

use super::fetch::bytes_bar;
use super::locate::Located;

/// Reads and packs the weights, as `weights` says.
///
/// # Errors
/// A file that cannot be read or is no model.
pub fn open(located: &Located, weights: WeightFormat, quiet: bool) -> anyhow::Result<Arc<Model>> {
    let message = match weights {
        WeightFormat::Keep => format!("loading {}", located.name),
        format => format!("loading {} as {format}", located.name),
    };
    let bar = bytes_bar(0, &message, quiet);
    let options = LoadOptions {
        weights,
        ..LoadOptions::default()
    };
    let opened = Model::open(&located.path, &options, &mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    opened.with_context(|| format!("cannot load model `{}`", located.path.display()))
}
