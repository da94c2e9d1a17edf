//! What fewer bits cost: every weight and KV format beside the same model in f32.
//!
//! One text is read by the reference (the file's weights dequantised to f32, f32
//! activations, f32 KV) and by every combination asked for, side by side, so that the
//! distributions of both are there for each token and none has to be kept:
//!
//! ```text
//! text    | context | scored |
//!                   | context | scored |        windows half over each other: every token
//!                             | context | ...   is scored once, behind half a window at least
//! ```
//!
//! Reported are perplexity, its change against the reference, how often the likeliest
//! token is the same, and the mean Kullback-Leibler divergence from the reference. This
//! says what a format does to next-token distributions on one text; it says nothing
//! about tasks, and nothing about speed.
//!
//! ```text
//! windows   the text -> windows and what they score
//! reader    one model, one KV format: tokens -> logits
//! score     logits against logits -> figures
//! ```

mod reader;
mod score;
#[cfg(test)]
mod tests;
mod windows;

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, bail, ensure};
use baton_engine::model::{LoadOptions, Model, WeightFormat};
use baton_proto::TokenId;
use baton_proto::kv_layout::KvDtype;
use baton_tokenizer::{EncodeOptions, Tokenizer};
use serde::Serialize;
use sha2::{Digest as _, Sha256};

use super::flags::QualityArgs;
use super::report::{Table, counting_bar};
use crate::model::{locate, open};
use reader::Reader;
use score::{Figures, Scores};
use windows::Window;

/// Positions whose logits are held at once; a vocabulary of 262,144 takes 1 MiB for each.
const SCORED_AT_ONCE: usize = 64;
/// Context tokens computed in one step.
const CONTEXT_AT_ONCE: usize = 256;

/// The result.
#[derive(Debug, Serialize)]
pub struct Quality {
    pub model: String,
    pub text: Text,
    pub window: u32,
    /// Least number of tokens before a scored one.
    pub context: u32,
    pub scored_tokens: usize,
    pub reference: Row,
    pub rows: Vec<Row>,
}

/// Which text was read.
#[derive(Debug, Serialize)]
pub struct Text {
    pub path: String,
    pub sha256: String,
    pub tokens: usize,
}

/// One combination of formats.
#[derive(Debug, Serialize)]
pub struct Row {
    pub weights: &'static str,
    pub kv_dtype: &'static str,
    /// Tensors per type as loaded.
    pub formats: String,
    /// Bytes of weights that one step reads.
    pub weight_bytes: u64,
    pub kv_bytes_per_token: usize,
    pub figures: Figures,
}

/// Measures all combinations.
///
/// # Errors
/// A model or text that cannot be read, a text that is too short, a window beyond the
/// model's context, formats the engine refuses.
pub fn run(args: &QualityArgs) -> anyhow::Result<Quality> {
    let cache = args.cache_dir.as_deref();
    let located = locate::locate(&args.model, cache, args.report.quiet)?;
    let load = |weights| {
        let options = LoadOptions {
            weights,
            ..LoadOptions::default()
        };
        open::open(&located, &options, args.report.quiet)
    };
    let reference = load(WeightFormat::F32)?;
    ensure!(
        args.window <= reference.context_max(),
        "`--window {}`: the model's context is {} tokens",
        args.window,
        reference.context_max()
    );
    let (text, tokens) = read_text(&args.text, &reference)?;
    let bos = reference.tokenizer_spec();
    let bos = bos.bos.filter(|_| bos.add_bos);
    let wanted = args.tokens as usize;
    let Some(windows) = windows::cut(&tokens, args.window as usize, wanted, bos) else {
        bail!(
            "`--text {}`: it has {} tokens, scoring {wanted} of them takes {}",
            args.text.display(),
            tokens.len(),
            windows::tokens_needed(args.window as usize, wanted, bos)
        );
    };

    let threads = args.threads.map_or_else(
        || std::thread::available_parallelism().map_or(1, usize::from),
        |threads| threads as usize,
    );
    let reader = |model: &Arc<Model>, dtype| Reader::new(model, dtype, args.window, threads);
    let mut readers = vec![reader(&reference, KvDtype::F32)?];
    let mut named = vec![(WeightFormat::F32, KvDtype::F32)];
    for weights in &args.weights {
        let model = match weights {
            WeightFormat::F32 => Arc::clone(&reference),
            format => load(*format)?,
        };
        for dtype in &args.kv_dtype {
            readers.push(
                reader(&model, *dtype)
                    .with_context(|| format!("`--weights {weights} --kv-dtype {dtype}`"))?,
            );
            named.push((*weights, *dtype));
        }
    }
    let scores = read(&mut readers, &windows, threads, args.report.quiet)?;

    let mut rows =
        named
            .iter()
            .zip(&readers)
            .zip(&scores)
            .map(|(((weights, dtype), reader), scored)| Row {
                weights: weights.name(),
                kv_dtype: dtype.name(),
                formats: reader.model().formats().to_owned(),
                weight_bytes: reader.model().weight_bytes(),
                kv_bytes_per_token: reader.model().kv_layout(16, *dtype).token_bytes(),
                figures: scored.figures(&scores[0]),
            });
    let reference = rows.next().context("the reference is the first reader")?;
    Ok(Quality {
        model: located.name.clone(),
        text,
        window: args.window,
        context: windows::context(args.window as usize, bos) as u32,
        scored_tokens: wanted,
        reference,
        rows: rows.collect(),
    })
}

fn read_text(path: &Path, model: &Model) -> anyhow::Result<(Text, Vec<TokenId>)> {
    let flag = || format!("`--text {}`", path.display());
    let text = std::fs::read_to_string(path).with_context(|| format!("{}: read", flag()))?;
    let tokenizer = Tokenizer::from_spec(model.tokenizer_spec())?;
    let plain = EncodeOptions {
        add_special: false,
        parse_special: false,
    };
    let tokens = tokenizer.encode(&text, plain).with_context(flag)?;
    let hash = Sha256::digest(text.as_bytes());
    let text = Text {
        path: path.display().to_string(),
        sha256: hash.iter().map(|byte| format!("{byte:02x}")).collect(),
        tokens: tokens.len(),
    };
    Ok((text, tokens))
}

/// Every reader over every window, the first being the reference of all.
fn read(
    readers: &mut [Reader],
    windows: &[Window],
    threads: usize,
    quiet: bool,
) -> anyhow::Result<Vec<Scores>> {
    let tokens: usize = windows.iter().map(|window| window.tokens.len()).sum();
    let bar = counting_bar((tokens * readers.len()) as u64, quiet);
    let mut scores: Vec<Scores> = readers.iter().map(|_| Scores::default()).collect();
    let mut reference = score::Reference::default();
    for window in windows {
        let first = window.first_scored;
        for (start, part) in parts(0, first, CONTEXT_AT_ONCE) {
            for reader in &mut *readers {
                reader.store(&window.tokens[start..part], start)?;
                bar.inc((part - start) as u64);
            }
        }
        for (start, end) in parts(first, window.tokens.len() - 1, SCORED_AT_ONCE) {
            // What a position says is about the token behind it.
            let targets = &window.tokens[start + 1..=end];
            for (index, (reader, scores)) in readers.iter_mut().zip(&mut scores).enumerate() {
                let output = reader.logits(&window.tokens[start..end], start)?;
                if index == 0 {
                    reference.take(&output.logits, output.vocab_size, threads);
                }
                scores.add(&reference, &output.logits, targets, threads);
                reader.recycle(output);
                bar.inc((end - start) as u64);
            }
        }
    }
    bar.finish_and_clear();
    Ok(scores)
}

/// `from..to` in runs of at most `size`.
fn parts(from: usize, to: usize, size: usize) -> impl Iterator<Item = (usize, usize)> {
    (from..to)
        .step_by(size)
        .map(move |start| (start, (start + size).min(to)))
}

impl Quality {
    /// The result for people.
    pub fn table(&self) -> String {
        let mut table = Table::new(format!(
            "{}: {} tokens of `{}` in windows of {}, each behind {} to {} others",
            self.model,
            self.scored_tokens,
            self.text.path,
            self.window,
            self.context,
            self.window - 1
        ));
        table.line(format!(
            "{:<8}{:<7}{:>10}{:>11}{:>12}{:>11}{:>9}{:>11}{:>11}{:>11}",
            "weights",
            "kv",
            "MB a step",
            "KV B/token",
            "perplexity",
            "change %",
            "+-",
            "same top 1",
            "mean KL",
            "p99 KL"
        ));
        for (row, name) in std::iter::once((&self.reference, "f32 (reference)"))
            .chain(self.rows.iter().map(|row| (row, "")))
        {
            let figures = &row.figures;
            let (weights, kv) = if name.is_empty() {
                (row.weights, row.kv_dtype)
            } else {
                ("f32 *", row.kv_dtype)
            };
            table.line(format!(
                "{weights:<8}{kv:<7}{:>10.1}{:>11}{:>12.4}{:>+11.3}{:>9.3}{:>10.2}%{:>11.6}{:>11.6}",
                row.weight_bytes as f64 / 1e6,
                row.kv_bytes_per_token,
                figures.perplexity,
                figures.perplexity_change_percent,
                figures.perplexity_change_error_percent,
                figures.top1_agreement_percent,
                figures.mean_kl,
                figures.p99_kl
            ));
        }
        table.line(
            "* the reference: weights dequantised to f32, activations and KV f32; \
             +- is 1.96 standard errors of the change"
                .to_owned(),
        );
        table.finish()
    }
}
