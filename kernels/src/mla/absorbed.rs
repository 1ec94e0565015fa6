//! Generated rows and the prompt's last cell: queries are taken into the latent space.

use std::ops::Range;

use super::{Job, Shape};
use crate::attention::{Running, TileKeys, Widths, core_scratch, row_tasks};
use crate::gemm::tile::{Nn, Nt};
use crate::rows::RowsMut;
use crate::scratch::{Scratch, take};
use crate::simd::{Element, Kernel, Simd};
use crate::span::{BLOCK_LEN, Span};
use crate::threads::Shards;

/// Rows of a span per task.
const ROWS: usize = 4;
/// Most heads per task: they share each read of a latent row.
const HEADS: usize = 16;

pub(super) fn scratch_len(shape: Shape) -> usize {
    ROWS * HEADS * shape.row() + core_scratch(ROWS * HEADS, shape.rank)
}

/// One task per group of heads and up to 4 rows of a span.
pub(super) fn attend<E: Element>(
    job: Job<'_, E>,
    scratch: &mut Scratch,
    tasks: &mut Vec<(usize, Range<usize>)>,
    out: &mut RowsMut<'_>,
) {
    let shape = job.shape;
    row_tasks(job.paged.spans.all(), ROWS, |span| span.absorbed_from..span.rows, tasks);
    let threads = job.cpu.gang.threads();
    if tasks.is_empty() {
        return;
    }
    let _timed = job.cpu.meter.time("mla absorbed", || {
        let projections = 2 * shape.rank * (shape.nope + shape.value_dim);
        let pair = 2 * (shape.row() + shape.rank);
        job.work(|span| span.absorbed_from..span.rows, [projections, pair, 0])
    });
    // With many tasks, larger groups; with few, enough groups to give every thread one.
    let wanted = threads.div_ceil(tasks.len().max(1));
    let heads_per_task = shape.heads.div_ceil(wanted).min(HEADS);
    let groups = shape.heads.div_ceil(heads_per_task);
    let scratch = scratch.pieces(threads, scratch_len(shape));
    let stride = out.stride();
    let shards = Shards::new(out.data());
    job.cpu.gang.run(tasks.len() * groups, |worker, task| {
        let (span, rows) = &tasks[task / groups];
        let first = task % groups * heads_per_task;
        let heads = first..shape.heads.min(first + heads_per_task);
        // SAFETY: this is the worker.
        let scratch = unsafe { scratch.of(worker) };
        let (span, rows) = (&job.paged.spans.all()[*span], rows.clone());
        job.cpu.isa.run(Task { job, span, rows, heads, scratch, out: shards, stride });
    });
}

struct Task<'a, E> {
    job: Job<'a, E>,
    span: &'a Span,
    rows: Range<usize>,
    heads: Range<usize>,
    scratch: &'a mut [f32],
    out: Shards<'a, f32>,
    stride: usize,
}

impl<E: Element> Kernel for Task<'_, E> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let shape = self.job.shape;
        let row = shape.row();
        let mut rest = std::mem::take(&mut self.scratch);
        let queries = take(&mut rest, self.rows.len() * self.heads.len() * row);
        self.absorb(s, queries);
        let widths = Widths { key: row, value: shape.rank, scale: shape.scale() };
        let start = self.span.start + self.rows.start;
        let mut running = Running::new(queries, widths, start, self.heads.len(), rest);
        for block in 0..running.end().div_ceil(BLOCK_LEN) {
            let at = block * BLOCK_LEN;
            let len = BLOCK_LEN.min(running.end() - at);
            let latents = self.job.paged.block(self.span, block, 0, len * row);
            let tile =
                TileKeys { keys: latents, key_stride: row, values: latents, value_stride: row };
            running.tile(s, at, tile);
        }
        let attended = running.finish(s);
        self.project(s, attended);
    }
}

impl<E: Element> Task<'_, E> {
    /// The up-projection of a head: its key rows, then its value rows.
    fn up(&self, head: usize) -> &[E] {
        let len = self.job.shape.up() * self.job.shape.rank;
        &self.job.up[head * len..(head + 1) * len]
    }

    /// `[row][head][up_kᵀ q | shared part of q]`.
    #[inline(always)]
    fn absorb<S: Simd>(&self, s: S, queries: &mut [f32]) {
        let shape = self.job.shape;
        let (rank, row, heads) = (shape.rank, shape.row(), self.heads.len());
        for (i, head) in self.heads.clone().enumerate() {
            let up = self.up(head);
            for (j, r) in self.rows.clone().enumerate() {
                let q = &self.job.q.row(self.span.first_row + r)[head * shape.query()..];
                let (nope, shared) = q[..shape.query()].split_at(shape.nope);
                let out = &mut queries[(j * heads + i) * row..][..row];
                out[rank..].copy_from_slice(shared);
                // SAFETY: `nope` has nope values, `up` as many rows of `rank`, `out` rank values.
                unsafe {
                    let a = (nope.as_ptr(), (0, 1));
                    let up = (up.as_ptr(), rank);
                    let size = (1, rank, shape.nope);
                    s.vectorize(Nn::new(size, a, up, (out.as_mut_ptr(), rank), false));
                }
            }
        }
    }

    /// Projects the attended latents `[row][head][rank]` to the heads' values.
    #[inline(always)]
    fn project<S: Simd>(&self, s: S, attended: &[f32]) {
        let shape = self.job.shape;
        let (rank, dv, heads) = (shape.rank, shape.value_dim, self.heads.len());
        for (i, head) in self.heads.clone().enumerate() {
            let up = &self.up(head)[shape.nope * rank..];
            for (j, r) in self.rows.clone().enumerate() {
                let latent = &attended[(j * heads + i) * rank..][..rank];
                let at = (self.span.first_row + r) * self.stride + head * dv;
                // SAFETY: this task alone writes this head of this row; `latent` has `rank`
                // values, `up` value rows of as many.
                unsafe {
                    let out = self.out.slice_mut(at..at + dv);
                    let (x, up) = ((latent.as_ptr(), rank), (up.as_ptr(), rank));
                    s.vectorize(Nt::new((1, dv, rank), x, up, (out.as_mut_ptr(), dv), false));
                }
            }
        }
    }
}
