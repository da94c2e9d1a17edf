//! What stands in for NIXL in a program built without it: types that cannot exist, and a
//! refusal that says how to build one that has it.

use std::convert::Infallible;
use std::io::IoSliceMut;
use std::path::Path;

use super::{Lend, NixlError};
use crate::region::RegionTable;

#[derive(Clone, Debug)]
pub(super) struct Loaded(Infallible);

impl Loaded {
    pub(super) fn open(_path: &Path) -> Result<Self, NixlError> {
        Err(NixlError::NotBuilt)
    }
}

pub(super) struct Lent(Infallible);

impl Lent {
    pub(super) fn new(loaded: &Loaded, _regions: &RegionTable) -> Result<Self, NixlError> {
        match loaded.0 {}
    }

    pub(super) fn lend(&self) -> Lend {
        match self.0 {}
    }
}

pub(crate) struct Reads(Infallible);

pub(crate) struct Read(Infallible);

impl Reads {
    pub(crate) fn open(
        library: &super::NixlLibrary,
        _lend: &Lend,
        _staging: usize,
        _silence_max: std::time::Duration,
    ) -> Result<Self, NixlError> {
        match library.loaded.0 {}
    }

    pub(crate) fn post(&mut self, _pieces: &[super::ring::Piece]) -> Result<Read, NixlError> {
        match self.0 {}
    }

    pub(crate) fn is_done(&mut self, read: &Read) -> Result<bool, NixlError> {
        match read.0 {}
    }

    pub(crate) fn copy(&self, _at: usize, _len: usize, _buffers: &mut [IoSliceMut<'_>]) -> usize {
        match self.0 {}
    }
}
