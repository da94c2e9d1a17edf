//! Which instruction set the kernels run on.
//!
//! Chosen once, at start. Every choice gives the same bits, so it is a matter of speed only. This file does not hold
//! any arithmetic.

use std::fmt;

use crate::Error;

/// An instruction set the kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Plain Rust: the reference, and what architectures other than x86-64 run.
    Scalar,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, VL and VNNI, on top of what `Avx2` needs.
    Avx512,
}

impl Isa {
    /// Every set that is compiled in, narrowest first.
    #[cfg(target_arch = "x86_64")]
    pub const COMPILED: &[Isa] = &[Isa::Scalar, Isa::Avx2, Isa::Avx512];
    /// Every set that is compiled in, narrowest first.
    #[cfg(not(target_arch = "x86_64"))]
    pub const COMPILED: &[Isa] = &[Isa::Scalar];

    /// The widest set this processor has.
    pub fn detect() -> Isa {
        [Isa::Avx512, Isa::Avx2]
            .into_iter()
            .find(|isa| isa.is_available())
            .unwrap_or(Isa::Scalar)
    }

    /// Parses `scalar`, `avx2` or `avx512`.
    ///
    /// # Errors
    /// [`Error::UnknownIsa`] for another name, [`Error::IsaUnavailable`] where this processor lacks the set.
    pub fn from_name(name: &str) -> Result<Isa, Error> {
        let isa = match name {
            "scalar" => Isa::Scalar,
            "avx2" => Isa::Avx2,
            "avx512" => Isa::Avx512,
            _ => {
                return Err(Error::UnknownIsa {
                    name: name.to_owned(),
                });
            }
        };
        if isa.is_available() {
            Ok(isa)
        } else {
            Err(Error::IsaUnavailable { isa })
        }
    }

    /// Whether this processor has the set.
    pub fn is_available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            match self {
                Isa::Scalar => true,
                Isa::Avx2 => avx2,
                Isa::Avx512 => {
                    avx2 && is_x86_feature_detected!("avx512f")
                        && is_x86_feature_detected!("avx512bw")
                        && is_x86_feature_detected!("avx512vl")
                        && is_x86_feature_detected!("avx512vnni")
                }
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            self == Isa::Scalar
        }
    }

    /// Every set this processor has, narrowest first.
    pub fn available() -> impl Iterator<Item = Isa> {
        let compiled = Self::COMPILED.iter().copied();
        compiled.filter(|isa| isa.is_available())
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
        })
    }
}
