//! From files into memory: tensors are read in pieces by several threads, and put into panels on
//! the way where products read them, quantised where that is asked for.

use std::num::NonZero;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread;

use kernels::{Arena, Dtype, Matrix, PANEL_LEN, Values, panels, quant};

use super::fault::WeightsError;
use super::source::Source;
use super::{Found, Order, Tensor};

/// Bytes that a thread reads at once, about.
const PIECE_BYTES: usize = 1 << 20;

/// Threads at most: more than these wait for the memory.
const MOST_THREADS: usize = 8;

/// Some rows of a tensor, and where they go.
struct Piece<'a> {
    source: &'a Source,
    /// Byte of the file where they begin.
    from: usize,
    rows: usize,
    cols: usize,
    dtype: Dtype,
    order: Order,
    out: &'a mut [u8],
}

/// Reads all tensors to their places in `memory`; `progress` hears bytes done and bytes in all.
pub(super) fn read_all(
    memory: &mut Arena,
    sources: &[Source],
    tensors: &[Tensor],
    found: &[&Found],
    progress: &mut dyn FnMut(usize, usize),
) -> Result<(), WeightsError> {
    let pieces = pieces(memory, sources, tensors, found);
    let total = tensors.iter().map(Tensor::bytes).sum();
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    let threads = cores.min(MOST_THREADS).min(pieces.len()).max(1);
    let queue = Mutex::new(pieces.into_iter());
    let (done, hear) = channel();
    thread::scope(|scope| {
        for started in 0..threads {
            let (queue, done) = (&queue, done.clone());
            let work = move || read_pieces(queue, &done);
            match thread::Builder::new().spawn_scoped(scope, work) {
                Ok(_) => {}
                // Fewer take longer, and nothing else.
                Err(_) if started > 0 => break,
                Err(source) => return Err(WeightsError::Thread(source)),
            }
        }
        drop(done);
        let mut sum = 0;
        for read in hear {
            sum += read?;
            progress(sum, total);
        }
        Ok(())
    })
}

/// Takes pieces until there are none, or nobody listens any more.
fn read_pieces<'a>(
    queue: &Mutex<impl Iterator<Item = Piece<'a>>>,
    done: &Sender<Result<usize, WeightsError>>,
) {
    // In words of eight bytes for the sake of their alignment.
    let mut buffer: Vec<u64> = Vec::new();
    loop {
        let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
        let Some(piece) = next else { return };
        let bytes = piece.rows * piece.cols * piece.dtype.bytes();
        let read = piece.read(&mut buffer).map(|()| bytes);
        let has_failed = read.is_err();
        if done.send(read).is_err() || has_failed {
            return;
        }
    }
}

impl Piece<'_> {
    fn read(self, buffer: &mut Vec<u64>) -> Result<(), WeightsError> {
        let Piece { source, from, rows, cols, dtype, order, out } = self;
        if order == Order::Rows {
            return source.read_at(from, out);
        }
        let bytes = rows * cols * dtype.bytes();
        buffer.resize(buffer.len().max(bytes.div_ceil(size_of::<u64>())), 0);
        let stored = &mut bytemuck::cast_slice_mut::<u64, u8>(buffer)[..bytes];
        source.read_at(from, stored)?;
        let matrix = Matrix::new(rows, cols, Values::of_bytes(stored, dtype));
        match order {
            Order::Quantized(quantization) => quant::pack(quantization, matrix, out),
            Order::Rows | Order::Panels => panels::pack(matrix, out),
        }
        Ok(())
    }
}

fn pieces<'a>(
    memory: &'a mut Arena,
    sources: &'a [Source],
    tensors: &[Tensor],
    found: &[&Found],
) -> Vec<Piece<'a>> {
    let bytes = memory.bytes();
    let mut rest: &mut [u8] = memory.values_mut(0, bytes);
    let mut rest_at = 0;
    let mut pieces = Vec::new();
    for (tensor, found) in tensors.iter().zip(found) {
        let Tensor { offset, rows, cols, dtype, order } = *tensor;
        let row_bytes = cols * dtype.bytes();
        let fit = (PIECE_BYTES / row_bytes.max(1)).next_multiple_of(PANEL_LEN).max(PANEL_LEN);
        rest = rest.split_at_mut(offset - rest_at).1;
        rest_at = offset;
        for first in (0..rows).step_by(fit) {
            let rows = fit.min(rows - first);
            let len = order.bytes(dtype, rows, cols);
            let (out, behind) = rest.split_at_mut(len);
            (rest, rest_at) = (behind, rest_at + len);
            let (source, from) = (&sources[found.shard], found.offset + first * row_bytes);
            pieces.push(Piece { source, from, rows, cols, dtype, order, out });
        }
    }
    pieces
}
