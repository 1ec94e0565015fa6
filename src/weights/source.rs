//! The bytes of a weight file, read where they are asked for.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use kernels::Dtype;

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
    /// Random values, again and again, without an end.
    Random(Vec<u8>),
}

/// Random values: evenly between `middle - spread` and `middle + spread`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Noise {
    /// Their mean.
    pub middle: f32,
    /// How far from it they go.
    pub spread: f32,
}

/// Random values that are made: a prime, so that no two rows of a matrix are alike.
const RANDOM_LEN: usize = 1_048_573;

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

    /// Random values stored as `dtype`.
    pub(super) fn random(noise: Noise, dtype: Dtype) -> Source {
        let mut state = 0_u64;
        let mut next = || {
            // SplitMix64.
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            let even = ((z ^ (z >> 31)) >> 40) as f32 / (1_u64 << 23) as f32 - 1.0;
            noise.middle + noise.spread * even
        };
        let mut bytes = Vec::with_capacity(RANDOM_LEN * dtype.bytes());
        for _ in 0..RANDOM_LEN {
            match dtype {
                Dtype::F32 => bytes.extend(next().to_le_bytes()),
                Dtype::Bf16 => bytes.extend(bf16::from_f32(next()).to_le_bytes()),
                Dtype::F16 => bytes.extend(f16::from_f32(next()).to_le_bytes()),
            }
        }
        Source::Random(bytes)
    }

    /// Its length.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Source::File { bytes, .. } => *bytes,
            Source::Static(bytes) => bytes.len(),
            Source::Random(_) => usize::MAX,
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
            Source::Random(bytes) => {
                let mut at = offset % bytes.len();
                let mut rest = out;
                while !rest.is_empty() {
                    let (now, later) = rest.split_at_mut(rest.len().min(bytes.len() - at));
                    now.copy_from_slice(&bytes[at..at + now.len()]);
                    (rest, at) = (later, 0);
                }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_values_are_the_same_wherever_they_are_read_from() {
        let noise = Noise { middle: 1.0, spread: 0.25 };
        let source = Source::random(noise, Dtype::F32);
        let mut all = vec![0; 3 * (RANDOM_LEN / 2) * 4];
        source.read_at(0, &mut all).expect("it is read");
        let at = RANDOM_LEN * 4 - 400;
        let mut part = vec![0; 1000];
        source.read_at(at, &mut part).expect("it is read");
        assert_eq!(part, all[at..at + 1000]);
        let values: &[f32] = bytemuck::cast_slice(&all);
        assert!(values.iter().all(|x| (0.75..1.25).contains(x)));
        let mean = values.iter().sum::<f32>() / values.len() as f32;
        assert!((mean - 1.0).abs() < 1e-2, "{mean}");
    }
}
