//! The bytes of a weight file, read where they are asked for.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use super::fault::WeightsError;

/// A weight file. Nothing of it stays mapped, so a file that changes later changes no weights.
#[derive(Debug)]
pub(super) enum Source {
    /// In a folder.
    File {
        /// Where it is.
        path: PathBuf,
        /// Open for reading.
        file: File,
        /// Its length when it was opened.
        bytes: usize,
    },
    /// In the binary.
    Static(&'static [u8]),
}

impl Source {
    /// Opens a file.
    pub(super) fn open(path: &Path) -> Result<Source, WeightsError> {
        let failed = |source| WeightsError::Io { path: path.to_owned(), source };
        let file = File::open(path).map_err(failed)?;
        let bytes = file.metadata().map_err(failed)?.len();
        let bytes =
            usize::try_from(bytes).map_err(|_| failed(io::ErrorKind::FileTooLarge.into()))?;
        Ok(Source::File { path: path.to_owned(), file, bytes })
    }

    /// Its length.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Source::File { bytes, .. } => *bytes,
            Source::Static(bytes) => bytes.len(),
        }
    }

    /// Fills `out` with the bytes from `offset` on. Several threads may read at once.
    pub(super) fn read_at(&self, offset: usize, out: &mut [u8]) -> Result<(), WeightsError> {
        match self {
            Source::File { path, file, .. } => {
                let failed = |source| WeightsError::Io { path: path.clone(), source };
                read_exact_at(file, out, offset as u64).map_err(failed)
            }
            Source::Static(bytes) => {
                out.copy_from_slice(&bytes[offset..offset + out.len()]);
                Ok(())
            }
        }
    }
}

#[cfg(unix)]
fn read_exact_at(file: &File, out: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, out, offset)
}

#[cfg(windows)]
fn read_exact_at(file: &File, mut out: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !out.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, out, offset)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n => (out, offset) = (&mut out[n..], offset + n as u64),
        }
    }
    Ok(())
}
