//! What can be wrong with weight files, in words that name the file and the tensor.

use std::fmt;
use std::io;
use std::mem::discriminant;
use std::path::PathBuf;

/// Entries of one kind that an error lists before it only counts.
const LISTED: usize = 20;

/// Why weights were not loaded.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// The folder holds neither a single file nor an index.
    #[error(
        "{}: neither model.safetensors nor model.safetensors.index.json is there",
        .dir.display()
    )]
    NoFiles {
        /// The folder.
        dir: PathBuf,
    },
    /// The folder holds both; which one is meant is not ours to guess.
    #[error(
        "{}: model.safetensors is there, but model.safetensors.index.json does not name it; \
         remove one",
        .dir.display()
    )]
    TwoLayouts {
        /// The folder.
        dir: PathBuf,
    },
    /// A file could not be read.
    #[error("cannot read {}: {source}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// No thread could be started to read them.
    #[error("cannot start a thread to read the weights: {0}")]
    Thread(io::Error),
    /// There is no memory for them.
    #[error("no memory for the weights: {0}")]
    Memory(#[from] kernels::ArenaError),
    /// Everything that is wrong with the files, listed at once.
    #[error("the weights in {place} do not fit the model:{}", List(.faults))]
    Faults {
        /// The folder, or `the binary` for embedded weights.
        place: String,
        /// What is wrong, like with like.
        faults: Vec<Fault>,
    },
}

/// One thing that is wrong with weight files.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The index is not what an index must be.
    #[error("{file}: {reason}")]
    BadIndex {
        /// The index.
        file: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The index names a file that is not there.
    #[error("{file}: named by the index, but not there")]
    AbsentFile {
        /// The file.
        file: String,
    },
    /// A file is too short to hold the length of a header.
    #[error("{file}: {file_bytes} bytes are too few for a safetensors file")]
    TooShort {
        /// The file.
        file: String,
        /// Its length.
        file_bytes: usize,
    },
    /// The header would end behind the end of the file.
    #[error("{file}: a header of {header_bytes} bytes in a file of {file_bytes}")]
    HeaderBeyondFile {
        /// The file.
        file: String,
        /// Length of the header, as the file says.
        header_bytes: u64,
        /// Length of the file.
        file_bytes: usize,
    },
    /// The header is not JSON, or not what safetensors wants in it.
    #[error("{file}: bad header: {reason}")]
    BadHeader {
        /// The file.
        file: String,
        /// What the parser said.
        reason: String,
    },
    /// The file ends before the data that its header lists.
    #[error("{file}: truncated: {file_bytes} bytes, its header describes {described_bytes}")]
    Truncated {
        /// The file.
        file: String,
        /// Length of the file.
        file_bytes: usize,
        /// Length that the header describes.
        described_bytes: usize,
    },
    /// The file goes on behind the data that its header lists.
    #[error("{file}: {file_bytes} bytes, its header describes only {described_bytes}")]
    Overlong {
        /// The file.
        file: String,
        /// Length of the file.
        file_bytes: usize,
        /// Length that the header describes.
        described_bytes: usize,
    },
    /// The index says a tensor is in a file, and the file lacks it.
    #[error("{tensor}: the index says it is in {file}, but it is not")]
    NotInFile {
        /// The tensor.
        tensor: String,
        /// The file.
        file: String,
    },
    /// Two files hold a tensor of the same name.
    #[error("{tensor}: both in {first} and in {second}")]
    InTwoFiles {
        /// The tensor.
        tensor: String,
        /// One of the files.
        first: String,
        /// The other.
        second: String,
    },
    /// The model needs a tensor that no file has.
    #[error("{tensor} {shape:?}: missing")]
    Missing {
        /// The tensor.
        tensor: String,
        /// The shape it should have.
        shape: Vec<usize>,
    },
    /// A tensor has another shape than the model wants.
    #[error("{tensor}: {found:?} in {file}, the model wants {wanted:?}")]
    WrongShape {
        /// The tensor.
        tensor: String,
        /// Where it is.
        file: String,
        /// Its shape there.
        found: Vec<usize>,
        /// The shape it should have.
        wanted: Vec<usize>,
    },
    /// A tensor the model needs is encoded in a way we do not read.
    #[error("{tensor}: {dtype} in {file}; only F32, BF16 and F16 can be used")]
    WrongDtype {
        /// The tensor.
        tensor: String,
        /// Where it is.
        file: String,
        /// Its encoding.
        dtype: String,
    },
    /// A file has a tensor that the model has no use for.
    #[error("{tensor}: in {file}, but the model has no use for it")]
    Unused {
        /// The tensor.
        tensor: String,
        /// Where it is.
        file: String,
    },
}

/// Faults, one a line; of each kind the first few and then a count.
struct List<'a>(&'a [Fault]);

impl fmt::Display for List<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for alike in self.0.chunk_by(|a, b| discriminant(a) == discriminant(b)) {
            for fault in alike.iter().take(LISTED) {
                write!(f, "\n  {fault}")?;
            }
            if alike.len() > LISTED {
                write!(f, "\n  ... and {} more like the last", alike.len() - LISTED)?;
            }
        }
        Ok(())
    }
}
