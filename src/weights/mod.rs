//! Weights: safetensors files, read in place.
//!
//! [`Weights::open`] checks files against the list of tensors that a model needs, names everything
//! that is wrong with them at once, and hands out views. Nothing is converted and nothing copied,
//! but for a tensor whose bytes lie misaligned in its file. What a tensor means to a model is not
//! known here: names and shapes come from `models`.

mod fault;
mod files;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::hint::black_box;
use std::mem::discriminant;
use std::path::Path;

use half::{bf16, f16};
use kernels::matrix::Values;
use kernels::{Dtype, Matrix};

pub use fault::{Fault, WeightsError};
use files::{Bytes, Listing, Stored};

const _: () =
    assert!(cfg!(target_endian = "little"), "safetensors are little-endian, read in place");

/// Bytes read between two reports of progress.
const REPORT_BYTES: usize = 16 << 20;

/// Bytes of a memory page, at most: reading one byte in each reads the file.
const PAGE_BYTES: usize = 4096;

/// A tensor that a model needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Named {
    /// Its name in the files.
    pub name: String,
    /// Its shape; compared with dimensions of 1 left out, on both sides.
    pub shape: Vec<usize>,
}

/// A tensor of loaded weights: a handle to ask [`Weights`] with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tensor {
    source: usize,
    offset: usize,
    rows: usize,
    cols: usize,
    dtype: Dtype,
}

impl Tensor {
    /// First dimension; 1 for a vector.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The other dimensions multiplied; the length of a vector.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// How the values are encoded.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Bytes of the values.
    pub fn bytes(&self) -> usize {
        self.rows * self.cols * self.dtype.bytes()
    }
}

/// The weights of a model. Owns the files.
#[derive(Debug)]
pub struct Weights {
    /// Files first, then copies of misaligned tensors.
    sources: Vec<Bytes>,
    /// In the order in which they were required.
    tensors: Vec<Tensor>,
    names: HashMap<String, usize>,
}

impl Weights {
    /// Opens `model.safetensors` in `dir`, or the shards that `model.safetensors.index.json` lists,
    /// and reads them through once, so that no request waits for the disk later.
    ///
    /// Tensors that are not `required` are an error, but for those that `ignore` accepts.
    /// `progress` hears bytes done and bytes in all.
    ///
    /// # Errors
    /// Everything that is wrong with the files ([`Fault`]), or that they are not there.
    pub fn open(
        dir: &Path,
        required: &[Named],
        ignore: &dyn Fn(&str) -> bool,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Weights, WeightsError> {
        Weights::load(Listing::of_dir(dir)?, required, ignore, progress)
    }

    /// The weights in `file`, a safetensors file that is part of the binary. See [`Weights::open`].
    ///
    /// # Errors
    /// Everything that is wrong with the file.
    pub fn embedded(
        file: &'static [u8],
        required: &[Named],
        ignore: &dyn Fn(&str) -> bool,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Weights, WeightsError> {
        Weights::load(Listing::of_bytes(file), required, ignore, progress)
    }

    fn load(
        listing: Listing,
        required: &[Named],
        ignore: &dyn Fn(&str) -> bool,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Weights, WeightsError> {
        let (mut sources, found) = checked(listing, required, ignore)?;
        let mut tensors = Vec::with_capacity(required.len());
        for (named, Found { shard, dtype, offset }) in required.iter().zip(found) {
            let (rows, cols) = match named.shape.as_slice() {
                [len] => (1, *len),
                [rows, rest @ ..] => (*rows, rest.iter().product()),
                [] => (1, 1),
            };
            let mut tensor = Tensor { source: shard, offset, rows, cols, dtype };
            let bytes = &sources[shard][offset..offset + tensor.bytes()];
            if !bytes.as_ptr().addr().is_multiple_of(dtype.bytes()) {
                let copy = Bytes::aligned_copy(bytes);
                (tensor.source, tensor.offset) = (sources.len(), 0);
                sources.push(copy);
            }
            tensors.push(tensor);
        }
        let names = required.iter().enumerate().map(|(i, n)| (n.name.clone(), i)).collect();
        let weights = Weights { sources, tensors, names };
        weights.read_through(progress);
        Ok(weights)
    }

    /// Bytes of the required tensors as stored in `dir`, by the headers alone; none when `dir` has
    /// no weight files.
    ///
    /// # Errors
    /// As [`Weights::open`].
    pub fn stored_bytes(
        dir: &Path,
        required: &[Named],
        ignore: &dyn Fn(&str) -> bool,
    ) -> Result<Option<usize>, WeightsError> {
        if !Listing::is_in(dir) {
            return Ok(None);
        }
        let (_, found) = checked(Listing::of_dir(dir)?, required, ignore)?;
        let values = |named: &Named| named.shape.iter().product::<usize>();
        Ok(Some(required.iter().zip(found).map(|(n, f)| values(n) * f.dtype.bytes()).sum()))
    }

    /// The tensor of that name, if the model needs it.
    pub fn tensor(&self, name: &str) -> Option<Tensor> {
        self.names.get(name).map(|&i| self.tensors[i])
    }

    /// All tensors, in the order in which they were required.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> usize {
        self.tensors.iter().map(Tensor::bytes).sum()
    }

    /// The values of `tensor`, where they lie.
    pub fn matrix(&self, tensor: &Tensor) -> Matrix<'_> {
        let bytes = self.raw(tensor);
        let values = match tensor.dtype {
            Dtype::F32 => Values::F32(bytemuck::cast_slice::<u8, f32>(bytes)),
            Dtype::Bf16 => Values::Bf16(bytemuck::cast_slice::<u8, bf16>(bytes)),
            Dtype::F16 => Values::F16(bytemuck::cast_slice::<u8, f16>(bytes)),
        };
        Matrix::new(tensor.rows, tensor.cols, values)
    }

    /// A copy of the values of `tensor` in single precision: for norms, biases and convolutions.
    pub fn vector(&self, tensor: &Tensor) -> Vec<f32> {
        let matrix = self.matrix(tensor);
        let mut values = vec![0.0; tensor.rows * tensor.cols];
        if tensor.cols > 0 {
            let rows = values.chunks_exact_mut(tensor.cols).enumerate();
            rows.for_each(|(row, out)| matrix.copy_row(row, out));
        }
        values
    }

    /// A copy of all tensors in single precision, by name.
    pub fn widened(&self) -> BTreeMap<String, Vec<f32>> {
        let widen = |(name, &i): (&String, &usize)| (name.clone(), self.vector(&self.tensors[i]));
        self.names.iter().map(widen).collect()
    }

    fn raw(&self, tensor: &Tensor) -> &[u8] {
        &self.sources[tensor.source][tensor.offset..tensor.offset + tensor.bytes()]
    }

    /// Reads one byte of each page of each tensor.
    fn read_through(&self, progress: &mut dyn FnMut(usize, usize)) {
        let total = self.bytes();
        let mut done = 0;
        for piece in self.tensors.iter().flat_map(|t| self.raw(t).chunks(REPORT_BYTES)) {
            black_box(piece.iter().step_by(PAGE_BYTES).fold(0u8, |sum, &byte| sum ^ byte));
            done += piece.len();
            progress(done, total);
        }
    }
}

/// Where a required tensor was found.
struct Found {
    shard: usize,
    dtype: Dtype,
    offset: usize,
}

/// The files of `listing`, and where in them each required tensor is; or all that is wrong.
fn checked(
    mut listing: Listing,
    required: &[Named],
    ignore: &dyn Fn(&str) -> bool,
) -> Result<(Vec<Bytes>, Vec<Found>), WeightsError> {
    let mut faults = std::mem::take(&mut listing.faults);
    let stored = by_name(&listing, &mut faults);
    let mut found = Vec::with_capacity(required.len());
    for named in required {
        match stored.get(named.name.as_str()) {
            Some(&(shard, entry)) => {
                let file = &listing.shards[shard].name;
                found.extend(usable(named, shard, entry, file, &mut faults));
            }
            // A tensor of an unreadable file is that file's fault.
            None if listing.unreadable.as_ref().is_none_or(|u| u.contains(&named.name)) => {}
            None => {
                let (tensor, shape) = (named.name.clone(), named.shape.clone());
                faults.push(Fault::Missing { tensor, shape });
            }
        }
    }
    let needed: HashSet<&str> = required.iter().map(|n| n.name.as_str()).collect();
    for (&tensor, &(shard, _)) in &stored {
        if !needed.contains(tensor) && !ignore(tensor) {
            let file = listing.shards[shard].name.clone();
            faults.push(Fault::Unused { tensor: tensor.to_owned(), file });
        }
    }
    if faults.is_empty() {
        Ok((listing.shards.into_iter().map(|shard| shard.bytes).collect(), found))
    } else {
        Err(WeightsError::Faults { place: listing.place, faults: alike_together(faults) })
    }
}

/// Every tensor of every file with the file's index. A name that two files hold is a fault.
fn by_name<'a>(
    listing: &'a Listing,
    faults: &mut Vec<Fault>,
) -> BTreeMap<&'a str, (usize, &'a Stored)> {
    let mut all = BTreeMap::<&str, (usize, &Stored)>::new();
    for (i, shard) in listing.shards.iter().enumerate() {
        for (tensor, stored) in &shard.tensors {
            if let Some((first, _)) = all.insert(tensor, (i, stored)) {
                faults.push(Fault::InTwoFiles {
                    tensor: tensor.clone(),
                    first: listing.shards[first].name.clone(),
                    second: shard.name.clone(),
                });
            }
        }
    }
    all
}

fn usable(
    named: &Named,
    shard: usize,
    stored: &Stored,
    file: &str,
    faults: &mut Vec<Fault>,
) -> Option<Found> {
    let (tensor, file) = (named.name.clone(), file.to_owned());
    let narrow = |shape: &[usize]| shape.iter().copied().filter(|&d| d != 1).collect::<Vec<_>>();
    if narrow(&stored.shape) != narrow(&named.shape) {
        let (found, wanted) = (stored.shape.clone(), named.shape.clone());
        faults.push(Fault::WrongShape { tensor, file, found, wanted });
        return None;
    }
    let dtype = match stored.dtype {
        safetensors::Dtype::F32 => Dtype::F32,
        safetensors::Dtype::BF16 => Dtype::Bf16,
        safetensors::Dtype::F16 => Dtype::F16,
        other => {
            faults.push(Fault::WrongDtype { tensor, file, dtype: other.to_string() });
            return None;
        }
    };
    Some(Found { shard, dtype, offset: stored.at.start })
}

/// `faults` with those of one kind next to each other, kinds in the order of their first.
fn alike_together(mut faults: Vec<Fault>) -> Vec<Fault> {
    let mut kinds = Vec::new();
    for fault in &faults {
        if !kinds.contains(&discriminant(fault)) {
            kinds.push(discriminant(fault));
        }
    }
    faults.sort_by_key(|fault| kinds.iter().position(|kind| *kind == discriminant(fault)));
    faults
}
