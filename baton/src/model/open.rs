//! Loads a model that is on this machine, with a progress bar for whoever watches.

use std::sync::Arc;

use anyhow::Context as _;
use baton_engine::model::{LoadOptions, Model};

use super::fetch::bytes_bar;
use super::locate::Located;

/// Reads and packs the weights.
///
/// # Errors
/// A file that cannot be read or is no model.
pub fn open(located: &Located, quiet: bool) -> anyhow::Result<Arc<Model>> {
    let bar = bytes_bar(0, &format!("loading {}", located.name), quiet);
    let opened = Model::open(
        &located.path,
        &LoadOptions::default(),
        &mut |done, total| {
            bar.set_length(total);
            bar.set_position(done);
        },
    );
    bar.finish_and_clear();
    opened.with_context(|| format!("cannot load model `{}`", located.path.display()))
}
