//! The files of a model and what their headers say, before any tensor is looked at.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::ops::Range;
use std::path::Path;

use safetensors::tensor::Metadata;

use super::fault::{Fault, WeightsError};
use super::source::Source;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Bytes before the header: its length, little-endian.
const LENGTH_BYTES: usize = 8;

/// Bytes of a header at most, as in the library that writes them.
const MOST_HEADER_BYTES: usize = 100_000_000;

/// A tensor as a header describes it.
#[derive(Debug, Clone)]
pub(super) struct Stored {
    /// Its encoding.
    pub(super) dtype: safetensors::Dtype,
    /// Its shape.
    pub(super) shape: Vec<usize>,
    /// Its bytes, counted from the start of the file.
    pub(super) at: Range<usize>,
}

/// One file, its header read.
#[derive(Debug)]
pub(super) struct Shard {
    /// The file's name.
    pub(super) name: String,
    /// Its content.
    pub(super) source: Source,
    /// Its tensors.
    pub(super) tensors: BTreeMap<String, Stored>,
}

/// All files of a model.
#[derive(Debug)]
pub(super) struct Listing {
    /// Where the files are, for messages.
    pub(super) place: String,
    /// The files whose header could be read.
    pub(super) shards: Vec<Shard>,
    /// What is wrong so far.
    pub(super) faults: Vec<Fault>,
    /// Tensors that are said to be in files that could not be read; none if that is not known
    /// because a file without an index is unreadable.
    pub(super) unreadable: Option<BTreeSet<String>>,
}

impl Listing {
    /// Whether `dir` has weight files at all.
    pub(super) fn is_in(dir: &Path) -> bool {
        dir.join(SINGLE).exists() || dir.join(INDEX).exists()
    }

    /// Opens the files in `dir` and reads their headers.
    pub(super) fn of_dir(dir: &Path) -> Result<Listing, WeightsError> {
        let mut listing = Listing::empty(dir.display().to_string());
        if dir.join(INDEX).exists() {
            listing.add_indexed(dir)?;
        } else if dir.join(SINGLE).exists() {
            listing.add_single(SINGLE, Source::open(&dir.join(SINGLE))?)?;
        } else {
            return Err(WeightsError::NoFiles { dir: dir.to_owned() });
        }
        Ok(listing)
    }

    /// Reads the header of a file that is part of the binary.
    pub(super) fn of_bytes(bytes: &'static [u8]) -> Result<Listing, WeightsError> {
        let mut listing = Listing::empty("the binary".to_owned());
        listing.add_single(SINGLE, Source::Static(bytes))?;
        Ok(listing)
    }

    fn empty(place: String) -> Listing {
        Listing { place, shards: Vec::new(), faults: Vec::new(), unreadable: Some(BTreeSet::new()) }
    }

    fn add_single(&mut self, name: &str, source: Source) -> Result<(), WeightsError> {
        if !self.add(name, source)? {
            self.unreadable = None;
        }
        Ok(())
    }

    fn add_indexed(&mut self, dir: &Path) -> Result<(), WeightsError> {
        let path = dir.join(INDEX);
        let text = fs::read(&path).map_err(|source| WeightsError::Io { path, source })?;
        let by_file = match read_index(&text) {
            Ok(by_file) => by_file,
            Err(reason) => {
                self.faults.push(Fault::BadIndex { file: INDEX.to_owned(), reason });
                self.unreadable = None;
                return Ok(());
            }
        };
        if dir.join(SINGLE).exists() && !by_file.contains_key(SINGLE) {
            return Err(WeightsError::TwoLayouts { dir: dir.to_owned() });
        }
        for (file, tensors) in by_file {
            let readable = match Source::open(&dir.join(&file)) {
                Ok(source) => self.add(&file, source)?,
                Err(WeightsError::Io { source, .. })
                    if source.kind() == io::ErrorKind::NotFound =>
                {
                    self.faults.push(Fault::AbsentFile { file: file.clone() });
                    false
                }
                Err(error) => return Err(error),
            };
            if readable {
                let shard = self.shards.last().expect("the readable file was just added");
                let absent = tensors.into_iter().filter(|t| !shard.tensors.contains_key(t));
                for tensor in absent {
                    self.faults.push(Fault::NotInFile { tensor, file: file.clone() });
                }
            } else if let Some(unreadable) = &mut self.unreadable {
                unreadable.extend(tensors);
            }
        }
        Ok(())
    }

    /// Reads the header of a file; false when it makes no sense.
    fn add(&mut self, name: &str, source: Source) -> Result<bool, WeightsError> {
        match read_header(name, &source)? {
            Ok((tensors, described_bytes)) => {
                let (file, file_bytes) = (name.to_owned(), source.bytes());
                if file_bytes < described_bytes {
                    self.faults.push(Fault::Truncated { file, file_bytes, described_bytes });
                } else if file_bytes > described_bytes {
                    self.faults.push(Fault::Overlong { file, file_bytes, described_bytes });
                }
                self.shards.push(Shard { name: name.to_owned(), source, tensors });
                Ok(true)
            }
            Err(fault) => {
                self.faults.push(fault);
                Ok(false)
            }
        }
    }
}

/// The tensors of each file, by the index.
fn read_index(text: &[u8]) -> Result<BTreeMap<String, Vec<String>>, String> {
    let index: serde_json::Value =
        serde_json::from_slice(text).map_err(|error| format!("not JSON: {error}"))?;
    let map = index["weight_map"].as_object().ok_or("no object `weight_map` in it")?;
    let mut by_file = BTreeMap::<String, Vec<String>>::new();
    for (tensor, file) in map {
        let file = file.as_str().ok_or(format!("{tensor} is in {file}, which is no file name"))?;
        // An index that came with a download must not reach outside its folder.
        if Path::new(file).file_name() != Some(file.as_ref()) {
            return Err(format!("{tensor} is in {file:?}, which is not a plain file name"));
        }
        by_file.entry(file.to_owned()).or_default().push(tensor.clone());
    }
    Ok(by_file)
}

/// The tensors of a file, and the length that its header describes.
type Header = (BTreeMap<String, Stored>, usize);

fn read_header(name: &str, source: &Source) -> Result<Result<Header, Fault>, WeightsError> {
    let file = name.to_owned();
    let file_bytes = source.bytes();
    let mut length = [0; LENGTH_BYTES];
    if file_bytes < LENGTH_BYTES {
        return Ok(Err(Fault::TooShort { file, file_bytes }));
    }
    source.read_at(0, &mut length)?;
    let header_bytes = u64::from_le_bytes(length);
    let fits = |bytes: &usize| *bytes <= file_bytes - LENGTH_BYTES;
    let Some(bytes) = usize::try_from(header_bytes).ok().filter(fits) else {
        return Ok(Err(Fault::HeaderBeyondFile { file, header_bytes, file_bytes }));
    };
    if bytes > MOST_HEADER_BYTES {
        let reason = format!("{bytes} bytes long, at most {MOST_HEADER_BYTES} can be");
        return Ok(Err(Fault::BadHeader { file, reason }));
    }
    let mut header = vec![0; bytes];
    source.read_at(LENGTH_BYTES, &mut header)?;
    let metadata: Metadata = match serde_json::from_slice(&header) {
        Ok(metadata) => metadata,
        Err(error) => return Ok(Err(Fault::BadHeader { file, reason: error.to_string() })),
    };
    let data = LENGTH_BYTES + header.len();
    // Its tensors lie one behind the other, so that none ends beyond this.
    let Some(end) = data.checked_add(metadata.data_len()) else {
        let reason = "it describes more bytes than can be counted".to_owned();
        return Ok(Err(Fault::BadHeader { file, reason }));
    };
    let stored = |info: &safetensors::tensor::TensorInfo| Stored {
        dtype: info.dtype,
        shape: info.shape.clone(),
        at: data + info.data_offsets.0..data + info.data_offsets.1,
    };
    let tensors = metadata.tensors().into_iter().map(|(name, info)| (name, stored(info)));
    Ok(Ok((tensors.collect(), end)))
}
