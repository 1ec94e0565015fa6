//! Logits on the device, and what of them comes down.
//!
//! A row has as many values as the vocabulary, and most draws look at one token or a few: the
//! device finds these, and a row comes down for a draw that needs all of it.

use std::iter;

use kernels::cuda::gemm::RoundedRows;
use kernels::cuda::rows::{self, Origin, Origins};
use kernels::cuda::sampling::{self, Candidate, Judged, MOST_FIRST};
use kernels::cuda::{Cuda, CudaError, DeviceArena, DeviceBuffer, DeviceRows, Landing};

use super::weights::{DeviceTensor, Multiplied};

/// What is wanted of the rows of logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted<'a> {
    /// Whether each row's likeliest token is, or what is wrong with the row.
    pub verdicts: bool,
    /// How many of each row's first tokens are; at most [`MOST_FIRST`] and the vocabulary.
    pub first: usize,
    /// Rows that are as a whole.
    pub rows: &'a [usize],
}

/// What was wanted, on the host.
#[derive(Debug, Clone, Copy)]
pub struct Taken<'a> {
    /// `[rows of logits]`, or none.
    pub verdicts: &'a [Judged],
    /// `[rows of logits][first]`.
    pub first: &'a [Candidate],
    /// `[rows][vocab_size]`.
    pub rows: &'a [f32],
}

/// The logits of a step: buffers made once for the most.
pub(super) struct Logits {
    origins: Origins,
    head_rows: DeviceBuffer<f32>,
    values: DeviceBuffer<f32>,
    verdicts: DeviceBuffer<Judged>,
    first: DeviceBuffer<Candidate>,
    /// Rows there are, and values of each.
    size: (usize, usize),
    host_verdicts: Landing<Judged>,
    host_first: Landing<Candidate>,
    host_rows: Landing<f32>,
}

impl Logits {
    /// Room for `most` rows of `vocab` logits, from hidden rows of `width` values.
    pub fn new(
        cuda: &Cuda,
        most: usize,
        (width, vocab): (usize, usize),
    ) -> Result<Logits, CudaError> {
        Ok(Logits {
            origins: Origins::new(cuda, most)?,
            head_rows: DeviceBuffer::zeros(cuda, most * width)?,
            values: DeviceBuffer::zeros(cuda, most * vocab)?,
            verdicts: DeviceBuffer::zeros(cuda, most)?,
            first: DeviceBuffer::zeros(cuda, most * MOST_FIRST.min(vocab))?,
            size: (0, vocab),
            host_verdicts: Landing::default(),
            host_first: Landing::default(),
            host_rows: Landing::default(),
        })
    }

    /// Computes the logits of hidden rows, which are among `x` or in the arena.
    pub fn of_origins(
        &mut self,
        cuda: &Cuda,
        head: &DeviceTensor,
        x: (DeviceRows<'_>, &DeviceArena),
        origins: &[Origin],
        rounded: &mut RoundedRows,
    ) -> Result<(), CudaError> {
        let (count, width) = (origins.len(), head.size().1);
        self.size.0 = count;
        if count > 0 {
            let head_rows = self.head_rows.rows_mut(count, width);
            rows::gather(cuda, x, origins, &mut self.origins, head_rows)?;
            let x = Multiplied::new(cuda, self.head_rows.rows(count, width), rounded)?;
            x.times(cuda, std::slice::from_ref(head), &mut self.values, count)?;
        }
        Ok(())
    }

    /// Computes the logits of the `count` rows of `x`: launches and nothing else.
    pub fn of_rows(
        &mut self,
        cuda: &Cuda,
        head: &DeviceTensor,
        (x, count): (DeviceRows<'_>, usize),
        rounded: &mut RoundedRows,
    ) -> Result<(), CudaError> {
        let x = Multiplied::new(cuda, x, rounded)?;
        x.times(cuda, std::slice::from_ref(head), &mut self.values, count)
    }

    /// Of the rows that [`Logits::of_rows`] computes, so many are wanted: the others are padding.
    pub fn set_count(&mut self, count: usize) {
        self.size.0 = count;
    }

    /// Waits, and takes what is wanted to the host.
    pub fn take(&mut self, cuda: &Cuda, wanted: Wanted<'_>) -> Result<Taken<'_>, CudaError> {
        let (count, vocab) = self.size;
        let values = self.values.rows(count, vocab);
        let (verdicts, first) = (if wanted.verdicts { count } else { 0 }, count * wanted.first);
        if verdicts > 0 {
            sampling::judge(cuda, values, &mut self.verdicts)?;
        }
        if first > 0 {
            sampling::first(cuda, values, wanted.first, &mut self.first)?;
        }
        assert!(wanted.rows.iter().all(|row| *row < count), "a row of logits that is not there");
        let rows = wanted.rows.iter().map(|row| row * vocab..(row + 1) * vocab);
        Ok(Taken {
            verdicts: self.host_verdicts.take(cuda, &self.verdicts, iter::once(0..verdicts))?,
            first: self.host_first.take(cuda, &self.first, iter::once(0..first))?,
            rows: self.host_rows.take(cuda, &self.values, rows)?,
        })
    }

    /// Waits, and takes all rows to the host, `[rows][vocab_size]`.
    pub fn all(&mut self, cuda: &Cuda) -> Result<&[f32], CudaError> {
        let (count, vocab) = self.size;
        self.host_rows.take(cuda, &self.values, iter::once(0..count * vocab))
    }
}
