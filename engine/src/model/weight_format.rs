//! What a matrix becomes while a model loads: kept, dequantised, or quantised to 8 or 4 bits.
//!
//! One matrix of the file is converted at a time, in strips that threads take from a queue, so that beside the
//! model only the converted copy of that one matrix is held. Strips do not share a group, so neither their size nor
//! the number of threads can change a bit.
//!
//! Vectors (norms, biases) are never touched. The formats and their search are the kernels'
//! ([`quantize_weights`]).

use std::fmt;
use std::str::FromStr;
use std::sync::Mutex;

use baton_kernels::{Error, Isa, MatrixSource, WeightType, dequantize, quantize_weights};

/// Weights of one strip: enough to be worth a turn at the queue, small beside every matrix.
const STRIP_WEIGHTS: usize = 1 << 18;

/// How the matrices of a model are held, whatever its files have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum WeightFormat {
    /// As in the file.
    #[default]
    Keep,
    /// Dequantised, value for value: slow and large, for comparisons.
    F32,
    /// Float matrices as Q8_0; quantised ones stay.
    Q8,
    /// Everything of more than 4 bits as Q4_1.
    Q4,
}

impl WeightFormat {
    pub const ALL: [Self; 4] = [Self::Keep, Self::F32, Self::Q8, Self::Q4];

    /// The name used in flags, logs and model revisions.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Keep => "keep",
            Self::F32 => "f32",
            Self::Q8 => "q8",
            Self::Q4 => "q4",
        }
    }

    /// What a matrix of type `ty` becomes; `ty` itself where it stays.
    pub fn of(self, ty: WeightType) -> WeightType {
        match (self, ty) {
            (Self::F32, _) => WeightType::F32,
            (Self::Q8, ty) if !ty.is_quantized() => WeightType::Q8_0,
            (Self::Q4, ty) if ty.bits() <= 4 => ty,
            (Self::Q4, _) => WeightType::Q4_1,
            (Self::Keep | Self::Q8, ty) => ty,
        }
    }
}

impl fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for WeightFormat {
    type Err = baton_proto::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|format| format.name() == text)
            .ok_or_else(|| {
                baton_proto::Error::invalid(
                    "weights",
                    format!("`{text}` is not one of keep, f32, q8, q4"),
                )
            })
    }
}

/// The rows of `source` as type `to`, which is F32, Q8_0 or Q4_1. `progress` hears how
/// many bytes of the source are done, and of the last one at the end.
///
/// # Errors
/// As [`quantize_weights`]; a place within the matrix counts its weights row by row.
pub(crate) fn convert(
    source: &MatrixSource<'_>,
    to: WeightType,
    progress: &mut dyn FnMut(u64),
) -> Result<Vec<u8>, Error> {
    let (rows, cols) = (source.rows, source.cols);
    let expected = source.ty.matrix_bytes(rows, cols)?;
    if source.bytes.len() != expected {
        return Err(Error::ByteLength {
            ty: source.ty.name(),
            expected,
            actual: source.bytes.len(),
        });
    }
    let mut out = vec![0; to.matrix_bytes(rows, cols)?];
    if out.is_empty() {
        return Ok(out);
    }
    let strip_rows = (STRIP_WEIGHTS / cols).clamp(1, rows);
    let strips = source
        .bytes
        .chunks(expected / rows * strip_rows)
        .zip(out.chunks_mut(to.matrix_bytes(strip_rows, cols)?))
        .enumerate();
    let work = Work {
        queue: Mutex::new(Queue {
            strips,
            done: 0,
            failed: None,
        }),
        from: source.ty,
        to,
        strip_weights: strip_rows * cols,
    };
    let threads = std::thread::available_parallelism()
        .map_or(1, usize::from)
        .min(rows.div_ceil(strip_rows));
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(|| work.run(&mut |_| {}));
        }
        work.run(progress);
    });
    let queue = work.queue.into_inner().expect("strips do not panic");
    if let Some((_, error)) = queue.failed {
        return Err(error);
    }
    // Other threads may have taken the last strips, or all of them.
    progress(queue.done);
    Ok(out)
}

/// One matrix being converted.
struct Work<I> {
    queue: Mutex<Queue<I>>,
    from: WeightType,
    to: WeightType,
    strip_weights: usize,
}

struct Queue<I> {
    strips: I,
    /// Bytes of the source converted so far.
    done: u64,
    /// The first strip that could not be, by its place.
    failed: Option<(usize, Error)>,
}

impl<'s, I: Iterator<Item = (usize, (&'s [u8], &'s mut [u8]))>> Work<I> {
    /// Takes strips until none is left or one fails.
    fn run(&self, progress: &mut dyn FnMut(u64)) {
        let mut values = Vec::new();
        let lock = || self.queue.lock().expect("strips do not panic");
        loop {
            let (strip, (from, to)) = {
                let mut queue = lock();
                // Strips are handed out upwards, so the first bad one always had its turn.
                if queue.failed.is_some() {
                    return;
                }
                match queue.strips.next() {
                    Some(strip) => strip,
                    None => return,
                }
            };
            let converted = self.strip(from, to, &mut values);
            let done = {
                let mut queue = lock();
                queue.done += from.len() as u64;
                if let Err(error) = converted
                    && queue
                        .failed
                        .as_ref()
                        .is_none_or(|(first, _)| strip < *first)
                {
                    let error = moved(error, strip * self.strip_weights);
                    queue.failed = Some((strip, error));
                }
                queue.done
            };
            progress(done);
        }
    }

    fn strip(&self, from: &[u8], to: &mut [u8], values: &mut Vec<f32>) -> Result<(), Error> {
        let weights = from.len() / self.from.block_bytes() * self.from.block_elements();
        values.resize(weights, 0.0);
        dequantize(self.from, from, values)?;
        if self.to == WeightType::F32 {
            for (bytes, value) in to.chunks_exact_mut(4).zip(values) {
                bytes.copy_from_slice(&value.to_le_bytes());
            }
            return Ok(());
        }
        quantize_weights(Isa::detect(), self.to, values, to)
    }
}

/// An error of a strip as one of the whole matrix.
fn moved(error: Error, first: usize) -> Error {
    match error {
        Error::NotFinite { at } => Error::NotFinite { at: first + at },
        Error::WeightTooLarge { at } => Error::WeightTooLarge { at: first + at },
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back_and_others_refused_with_what_is_allowed() {
        for format in WeightFormat::ALL {
            assert_eq!(format.name().parse(), Ok(format));
        }
        let error = "q5".parse::<WeightFormat>().unwrap_err();
        assert_eq!(error.field, "weights");
        assert!(error.message.contains("`q5`") && error.message.contains("keep, f32, q8, q4"));
    }

    #[test]
    fn only_wider_matrices_become_narrower() {
        let bits = |ty: WeightType| ty.block_bytes() * 8 / ty.block_elements();
        for ty in WeightType::ALL {
            assert_eq!(WeightFormat::Keep.of(ty), ty);
            assert_eq!(WeightFormat::F32.of(ty), WeightType::F32);
            assert!(bits(WeightFormat::Q8.of(ty)) <= bits(ty).min(8), "{ty:?}");
            assert!(bits(WeightFormat::Q4.of(ty)) <= bits(ty).min(5), "{ty:?}");
        }
    }

    fn matrix(rows: usize, cols: usize) -> Vec<u8> {
        (0..rows * cols)
            .flat_map(|i| ((i as f32 * 0.37).sin() * 0.1).to_le_bytes())
            .collect()
    }

    fn source(bytes: &[u8], rows: usize, cols: usize) -> MatrixSource<'_> {
        MatrixSource {
            ty: WeightType::F32,
            rows,
            cols,
            bytes,
        }
    }

    #[test]
    fn strips_give_the_bytes_of_the_whole_and_progress_reaches_the_end() {
        // Several strips, the last of them short.
        let (rows, cols) = (701, 1024);
        let bytes = matrix(rows, cols);
        for to in [WeightType::Q8_0, WeightType::Q4_1] {
            let mut heard = Vec::new();
            let converted = convert(&source(&bytes, rows, cols), to, &mut |done| {
                heard.push(done);
            })
            .unwrap();
            assert!(heard.is_sorted() && heard.last() == Some(&(bytes.len() as u64)));
            let mut values = vec![0.0; rows * cols];
            dequantize(WeightType::F32, &bytes, &mut values).unwrap();
            let mut whole = vec![0; converted.len()];
            quantize_weights(Isa::Scalar, to, &values, &mut whole).unwrap();
            assert!(converted == whole, "{to:?}");
        }
        let back = convert(&source(&bytes, rows, cols), WeightType::F32, &mut |_| {}).unwrap();
        assert!(back == bytes);
    }

    #[test]
    fn the_first_bad_weight_of_a_matrix_is_named() {
        let (rows, cols) = (900, 1024);
        let mut bytes = matrix(rows, cols);
        for (at, value) in [(800_000, f32::NAN), (600_007, f32::INFINITY)] {
            bytes[at * 4..][..4].copy_from_slice(&value.to_le_bytes());
        }
        for _ in 0..8 {
            let error = convert(&source(&bytes, rows, cols), WeightType::Q4_1, &mut |_| {});
            assert_eq!(error.unwrap_err(), Error::NotFinite { at: 600_007 });
        }
    }

    #[test]
    fn shapes_that_do_not_fit_are_refused() {
        let bytes = matrix(3, 48);
        let error = convert(&source(&bytes, 3, 48), WeightType::Q4_1, &mut |_| {}).unwrap_err();
        let said = error.to_string();
        assert!(said.contains("48") && said.contains("Q4_1"), "{said}");
        let error = convert(&source(&bytes, 4, 48), WeightType::F32, &mut |_| {}).unwrap_err();
        assert!(matches!(error, Error::ByteLength { .. }), "{error}");
        assert_eq!(
            convert(&source(&[], 0, 64), WeightType::Q8_0, &mut |_| {}),
            Ok(Vec::new())
        );
    }
}
