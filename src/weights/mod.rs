//! Weights: safetensors files, read into memory once.
//!
//! [`WeightFiles`] checks files against the list of tensors that a model needs, names everything
//! that is wrong with them at once, and reads them, or some of them, in the order in which they
//! will be used, quantised where that is asked for. [`Weights`] owns what was read and hands out
//! views. What a tensor means to a model is not known here: names, shapes and orders come from
//! `models`. For measurements there are random values in the place of files.

mod fault;
mod files;
mod load;
mod source;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::mem::discriminant;
use std::path::Path;

use kernels::{Arena, Dtype, Matrix, Panels, Quantization, QuantizedPanels, StoredPanels, Values};

pub use fault::{Fault, WeightsError};
use files::{Listing, Stored};
pub use source::Noise;
use source::Source;

const _: () =
    assert!(cfg!(target_endian = "little"), "safetensors are little-endian, read as they are");

/// Tensors begin at multiples of this many bytes: a line of the cache.
const ALIGN: usize = 64;

/// The order of a tensor's values in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Row after row, as stored.
    Rows,
    /// In panels, as products read them.
    Panels,
    /// In panels, quantised.
    Quantized(Quantization),
}

impl Order {
    /// Bytes that a tensor of `dtype` takes in this order.
    pub fn bytes(self, dtype: Dtype, rows: usize, cols: usize) -> usize {
        match self {
            Order::Rows => rows * cols * dtype.bytes(),
            Order::Panels => StoredPanels::len(dtype, rows, cols) * dtype.bytes(),
            Order::Quantized(quantization) => quantization.bytes(rows, cols),
        }
    }
}

/// A tensor that a model needs. It may need one of a file in two orders.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Named {
    /// Its name in the files.
    pub name: String,
    /// Its shape; compared with dimensions of 1 left out, on both sides.
    pub shape: Vec<usize>,
    /// The order in which it is used.
    pub order: Order,
}

/// Outputs and inputs of a tensor of `shape`: its first dimension and the others multiplied. A
/// vector has one output.
pub fn matrix_size(shape: &[usize]) -> (usize, usize) {
    match shape {
        [len] => (1, *len),
        [rows, rest @ ..] => (*rows, rest.iter().product()),
        [] => (1, 1),
    }
}

/// Bytes of a model's weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeightBytes {
    /// As their files store them.
    pub stored: usize,
    /// In memory: padded to panels, and quantised where that is asked for. Copies that models make
    /// of small tensors, and of MLA's up-projection in other orders, come on top.
    pub held: usize,
}

/// A tensor of loaded weights: a handle to ask [`Weights`] with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tensor {
    offset: usize,
    rows: usize,
    cols: usize,
    dtype: Dtype,
    order: Order,
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

    /// How the values are encoded in their file.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Bytes of the values as stored.
    pub fn bytes(&self) -> usize {
        self.rows * self.cols * self.dtype.bytes()
    }
}

/// Weights of a model. Owns their memory.
#[derive(Debug)]
pub struct Weights {
    memory: Arena,
    /// In the order in which they were required.
    tensors: Vec<Tensor>,
    names: HashMap<String, usize>,
}

/// The tensors that a model needs, found where they are stored and checked; none is read yet.
#[derive(Debug)]
pub struct WeightFiles {
    sources: Vec<Source>,
    required: Vec<Named>,
    found: Vec<Found>,
}

impl WeightFiles {
    /// Opens `model.safetensors` in `dir`, or the shards that `model.safetensors.index.json` lists.
    ///
    /// Tensors that are not `required` are an error, but for those that `ignore` accepts.
    ///
    /// # Errors
    /// Everything that is wrong with the files ([`Fault`]), or that they are not there.
    pub fn of_dir(
        dir: &Path,
        required: Vec<Named>,
        ignore: &dyn Fn(&str) -> bool,
    ) -> Result<WeightFiles, WeightsError> {
        WeightFiles::of(Listing::of_dir(dir)?, required, ignore)
    }

    /// Whether `dir` has weight files.
    pub fn is_in(dir: &Path) -> bool {
        Listing::is_in(dir)
    }

    /// `file`, a safetensors file that is part of the binary. See [`WeightFiles::of_dir`].
    ///
    /// # Errors
    /// Everything that is wrong with the file.
    pub fn of_bytes(
        file: &'static [u8],
        required: Vec<Named>,
        ignore: &dyn Fn(&str) -> bool,
    ) -> Result<WeightFiles, WeightsError> {
        WeightFiles::of(Listing::of_bytes(file)?, required, ignore)
    }

    /// No files: each tensor has random values, those of its `noise`, stored as `dtype`; the same
    /// ones in every run.
    pub fn random(required: Vec<Named>, noise: &[Noise], dtype: Dtype) -> WeightFiles {
        let mut kinds: Vec<Noise> = Vec::new();
        let mut offset = 0;
        let mut place = |(named, noise): (&Named, &Noise)| {
            let shard = kinds.iter().position(|kind| kind == noise).unwrap_or_else(|| {
                kinds.push(*noise);
                kinds.len() - 1
            });
            let (rows, cols) = matrix_size(&named.shape);
            let found = Found { shard, dtype, offset };
            offset += rows * cols * dtype.bytes();
            found
        };
        let found = required.iter().zip(noise).map(&mut place).collect();
        let sources = kinds.iter().map(|noise| Source::random(*noise, dtype)).collect();
        WeightFiles { sources, required, found }
    }

    fn of(
        listing: Listing,
        required: Vec<Named>,
        ignore: &dyn Fn(&str) -> bool,
    ) -> Result<WeightFiles, WeightsError> {
        let (sources, found) = checked(listing, &required, ignore)?;
        Ok(WeightFiles { sources, required, found })
    }

    /// Bytes of the required tensors.
    pub fn bytes(&self) -> WeightBytes {
        let mut bytes = WeightBytes { stored: 0, held: 0 };
        let mut seen = HashSet::new();
        for (named, found) in self.required.iter().zip(&self.found) {
            let (rows, cols) = matrix_size(&named.shape);
            bytes.held += named.order.bytes(found.dtype, rows, cols);
            if seen.insert(named.name.as_str()) {
                bytes.stored += Order::Rows.bytes(found.dtype, rows, cols);
            }
        }
        bytes
    }

    /// Bytes in memory of the required tensor in this place of the list, with what aligns the next.
    #[cfg(feature = "cuda")]
    pub fn held_bytes(&self, place: usize) -> usize {
        let (named, found) = (&self.required[place], &self.found[place]);
        let (rows, cols) = matrix_size(&named.shape);
        named.order.bytes(found.dtype, rows, cols).next_multiple_of(ALIGN)
    }

    /// Reads all tensors into memory; `progress` hears bytes done and bytes in all.
    ///
    /// # Errors
    /// A file that cannot be read, or no memory.
    pub fn read(&self, progress: &mut dyn FnMut(usize, usize)) -> Result<Weights, WeightsError> {
        self.read_some(&(0..self.required.len()).collect::<Vec<_>>(), progress)
    }

    /// Reads the required tensors `which` alone, by their place in the list and in this order.
    ///
    /// # Errors
    /// As [`WeightFiles::read`].
    pub fn read_some(
        &self,
        which: &[usize],
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Weights, WeightsError> {
        let mut offset = 0;
        let mut place = |&i: &usize| {
            let (named, found) = (&self.required[i], &self.found[i]);
            let (rows, cols) = matrix_size(&named.shape);
            let tensor = Tensor { offset, rows, cols, dtype: found.dtype, order: named.order };
            let bytes = named.order.bytes(found.dtype, rows, cols);
            offset = (offset + bytes).next_multiple_of(ALIGN);
            tensor
        };
        let tensors: Vec<Tensor> = which.iter().map(&mut place).collect();
        let found: Vec<&Found> = which.iter().map(|&i| &self.found[i]).collect();
        let mut memory = Arena::new(offset)?;
        load::read_all(&mut memory, &self.sources, &tensors, &found, progress)?;
        let mut names = HashMap::new();
        for (at, &i) in which.iter().enumerate() {
            names.entry(self.required[i].name.clone()).or_insert(at);
        }
        Ok(Weights { memory, tensors, names })
    }
}

impl Weights {
    /// How most bytes of the weights in `dir` are encoded, by the headers alone; none when no file
    /// there can be read, or holds weights as they can be loaded.
    pub fn dtype_in(dir: &Path) -> Option<Dtype> {
        Listing::of_dir(dir).ok().and_then(|listing| dtype_of(&listing))
    }

    /// The same of `file`, a safetensors file that is part of the binary.
    pub fn dtype_embedded(file: &'static [u8]) -> Option<Dtype> {
        Listing::of_bytes(file).ok().and_then(|listing| dtype_of(&listing))
    }

    /// The tensor of that name, if the model needs it; the first where it needs it in two orders.
    pub fn tensor(&self, name: &str) -> Option<Tensor> {
        self.names.get(name).map(|&i| self.tensors[i])
    }

    /// All tensors, in the order in which they were required.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// Bytes of all tensors in memory.
    pub fn bytes(&self) -> usize {
        let held = |t: &Tensor| t.order.bytes(t.dtype, t.rows, t.cols);
        self.tensors.iter().map(held).sum()
    }

    /// The values of `tensor`, row after row.
    ///
    /// # Panics
    /// When they are in panels.
    pub fn matrix(&self, tensor: &Tensor) -> Matrix<'_> {
        assert_eq!(tensor.order, Order::Rows, "a tensor in panels");
        Matrix::new(tensor.rows, tensor.cols, self.values(tensor, tensor.rows * tensor.cols))
    }

    /// The values of `tensor`, in panels.
    ///
    /// # Panics
    /// When they lie row after row.
    pub fn panels(&self, tensor: &Tensor) -> Panels<'_> {
        let Tensor { offset, rows, cols, dtype, order } = *tensor;
        match order {
            Order::Rows => panic!("a tensor row after row"),
            Order::Panels => {
                let len = StoredPanels::len(dtype, rows, cols);
                Panels::Stored(StoredPanels::new(rows, cols, self.values(tensor, len)))
            }
            Order::Quantized(quantization) => {
                let bytes = self.memory.values(offset, quantization.bytes(rows, cols));
                Panels::Quantized(QuantizedPanels::new(quantization, rows, cols, bytes))
            }
        }
    }

    /// Copies row `row` of `tensor`, widened to single precision, into `out` (`cols` values).
    pub fn copy_row(&self, tensor: &Tensor, row: usize, out: &mut [f32]) {
        match tensor.order {
            Order::Rows => self.matrix(tensor).copy_row(row, out),
            Order::Panels | Order::Quantized(_) => self.panels(tensor).copy_row(row, out),
        }
    }

    /// A copy of the values of `tensor` in single precision: for norms, biases and convolutions.
    pub fn vector(&self, tensor: &Tensor) -> Vec<f32> {
        let mut values = vec![0.0; tensor.rows * tensor.cols];
        if tensor.cols > 0 {
            let rows = values.chunks_exact_mut(tensor.cols).enumerate();
            rows.for_each(|(row, out)| self.copy_row(tensor, row, out));
        }
        values
    }

    /// A copy of all tensors in single precision, by name.
    pub fn widened(&self) -> BTreeMap<String, Vec<f32>> {
        let widen = |(name, &i): (&String, &usize)| (name.clone(), self.vector(&self.tensors[i]));
        self.names.iter().map(widen).collect()
    }

    fn values(&self, tensor: &Tensor, len: usize) -> Values<'_> {
        Values::of_arena(&self.memory, tensor.dtype, tensor.offset, len)
    }
}

/// Where a required tensor was found.
#[derive(Debug)]
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
) -> Result<(Vec<Source>, Vec<Found>), WeightsError> {
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
        Ok((listing.shards.into_iter().map(|shard| shard.source).collect(), found))
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
    let Some(dtype) = readable(stored.dtype) else {
        faults.push(Fault::WrongDtype { tensor, file, dtype: stored.dtype.to_string() });
        return None;
    };
    Some(Found { shard, dtype, offset: stored.at.start })
}

/// An encoding as kernels know it, if they do.
fn readable(dtype: safetensors::Dtype) -> Option<Dtype> {
    match dtype {
        safetensors::Dtype::F32 => Some(Dtype::F32),
        safetensors::Dtype::BF16 => Some(Dtype::Bf16),
        safetensors::Dtype::F16 => Some(Dtype::F16),
        _ => None,
    }
}

/// How most bytes of all tensors are encoded; the wider where two have as many.
fn dtype_of(listing: &Listing) -> Option<Dtype> {
    let tensors = || listing.shards.iter().flat_map(|shard| shard.tensors.values());
    let bytes = |dtype| -> usize {
        let of = tensors().filter(|stored| readable(stored.dtype) == Some(dtype));
        of.map(|stored| stored.at.len()).sum()
    };
    let all = [Dtype::F16, Dtype::Bf16, Dtype::F32].map(|dtype| (bytes(dtype), dtype));
    let most = all.into_iter().max_by_key(|(bytes, _)| *bytes);
    most.filter(|(bytes, _)| *bytes > 0).map(|(_, dtype)| dtype)
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
