//! Generated rows and the prompt's last cell: queries are taken into the latent space.
//!
//! ```text
//! absorb    head by head, all rows at once: q_lat = up_kᵀ q
//! attend    sequence by sequence, heads together: they share each read of a latent row
//! project   head by head, all rows at once: out = up_v attended
//! ```

use std::ops::Range;

use super::{Job, Shape, Workspace};
use crate::attention::{Running, TileKeys, Widths, core_scratch, row_tasks};
use crate::gemm::strip::Multiply;
use crate::rows::RowsMut;
use crate::scratch::{Pieces, Scratch, take};
use crate::simd::{Kernel, Simd};
use crate::span::{BLOCK_LEN, Span};
use crate::threads::Shards;

/// Rows of a span per task.
const ROWS: usize = 4;
/// Most heads per task: they share each read of a latent row.
const HEADS: usize = 16;
/// Rows that are in the latent space at once.
const MOST_ROWS: usize = 64;

/// Values per thread.
pub(super) fn scratch_len(shape: Shape) -> usize {
    let attend = ROWS * HEADS * shape.row() + core_scratch(ROWS * HEADS, shape.rank);
    attend.max(MOST_ROWS * shape.nope.max(shape.value_dim))
}

/// Values of the queries and of the attended latents of all heads.
pub(super) fn shared_len(shape: Shape) -> (usize, usize) {
    let rows = MOST_ROWS * shape.heads;
    (rows * shape.row(), rows * shape.rank)
}

pub(super) fn attend(
    job: Job<'_>,
    scratch: &mut Scratch,
    work: &mut Workspace,
    out: &mut RowsMut<'_>,
) {
    let shape = job.shape;
    let absorbed = |span: &Span| span.absorbed_from..span.rows;
    row_tasks(job.paged.spans.all(), ROWS, absorbed, &mut work.tasks);
    if work.tasks.is_empty() {
        return;
    }
    let _timed = job.cpu.meter.time("mla absorbed", || {
        let projections = 2 * shape.rank * (shape.nope + shape.value_dim);
        let pair = 2 * (shape.row() + shape.rank);
        job.work(absorbed, [projections, pair, 0])
    });
    let (queries, attended) = shared_len(shape);
    let (queries, attended) = (&mut work.queries[..queries], &mut work.attended[..attended]);
    let scratch = scratch.pieces(job.cpu.gang.threads(), scratch_len(shape));
    let mut rest = &work.tasks[..];
    while !rest.is_empty() {
        let mut rows = 0;
        let fit = rest.iter().take_while(|(_, range)| {
            rows += range.len();
            rows <= MOST_ROWS
        });
        let (tasks, behind) = rest.split_at(fit.count());
        rest = behind;
        let together = Together { job, tasks, scratch: &scratch };
        together.absorb(queries);
        together.attend(queries, attended);
        together.project(attended, out);
    }
}

/// Up to 64 rows of some spans.
struct Together<'a> {
    job: Job<'a>,
    tasks: &'a [(usize, Range<usize>)],
    scratch: &'a Pieces<'a>,
}

impl Together<'_> {
    /// The rows, as those of the batch.
    fn rows(&self) -> impl Iterator<Item = usize> {
        self.tasks.iter().flat_map(|(span, rows)| {
            let first = self.job.paged.spans.all()[*span].first_row;
            first + rows.start..first + rows.end
        })
    }

    /// `queries`: `[row][head][up_kᵀ q | shared part of q]`.
    fn absorb(&self, queries: &mut [f32]) {
        let Job { cpu, shape, q, up, .. } = self.job;
        let (row, nope, stride) = (shape.row(), shape.nope, shape.heads * shape.row());
        let count = self.rows().count();
        let queries = Shards::new(&mut queries[..count * stride]);
        cpu.gang.run(shape.heads, |worker, head| {
            // SAFETY: this is the worker.
            let gathered = unsafe { self.scratch.of(worker) };
            for (i, r) in self.rows().enumerate() {
                let q = &q.row(r)[head * shape.query()..][..shape.query()];
                gathered[i * nope..(i + 1) * nope].copy_from_slice(&q[..nope]);
                let at = i * stride + head * row + shape.rank;
                // SAFETY: this task alone writes this head of the rows.
                unsafe { queries.slice_mut(at..at + shape.rope) }.copy_from_slice(&q[nope..]);
            }
            assert!(count * nope <= gathered.len() && count * stride <= queries.len());
            // SAFETY: `gathered` and `queries` hold `count` rows by the assertion, and this task
            // alone writes this head's first `rank` values of them.
            let multiply = unsafe {
                let out = (queries.as_mut_ptr().add(head * row), stride);
                let x = (gathered.as_ptr(), nope);
                Multiply::new(count, x, up.keys_transposed(head), out, false)
            };
            cpu.isa.run(multiply);
        });
    }

    /// `attended`: `[row][head][rank]`.
    fn attend(&self, queries: &[f32], attended: &mut [f32]) {
        let Job { cpu, shape, .. } = self.job;
        // With many tasks, larger groups; with few, enough groups to give every thread one.
        let wanted = cpu.gang.threads().div_ceil(self.tasks.len());
        let heads_per_task = shape.heads.div_ceil(wanted).min(HEADS);
        let groups = shape.heads.div_ceil(heads_per_task);
        let attended = Shards::new(attended);
        cpu.gang.run(self.tasks.len() * groups, |worker, task| {
            let (task, group) = (task / groups, task % groups);
            let (span, rows) = &self.tasks[task];
            let first = group * heads_per_task;
            cpu.isa.run(Task {
                job: self.job,
                span: &self.job.paged.spans.all()[*span],
                rows: rows.clone(),
                first_row: self.tasks[..task].iter().map(|(_, rows)| rows.len()).sum(),
                heads: first..shape.heads.min(first + heads_per_task),
                queries,
                // SAFETY: this is the worker.
                scratch: unsafe { self.scratch.of(worker) },
                attended,
            });
        });
    }

    /// Projects the attended latents to the heads' values.
    fn project(&self, attended: &[f32], out: &mut RowsMut<'_>) {
        let Job { cpu, shape, up, .. } = self.job;
        let (dv, stride) = (shape.value_dim, shape.heads * shape.rank);
        let count = self.rows().count();
        let out_stride = out.stride();
        let out = Shards::new(out.data());
        cpu.gang.run(shape.heads, |worker, head| {
            // SAFETY: this is the worker.
            let values = unsafe { self.scratch.of(worker) };
            assert!(count * dv <= values.len() && count * stride <= attended.len());
            // SAFETY: `attended` and `values` hold `count` rows by the assertion.
            let multiply = unsafe {
                let x = (attended.as_ptr().add(head * shape.rank), stride);
                Multiply::new(count, x, up.values(head), (values.as_mut_ptr(), dv), false)
            };
            cpu.isa.run(multiply);
            for (values, r) in values.chunks_exact(dv).zip(self.rows()) {
                let at = r * out_stride + head * dv;
                // SAFETY: this task alone writes this head of the rows.
                unsafe { out.slice_mut(at..at + dv) }.copy_from_slice(values);
            }
        });
    }
}

/// Some heads of up to 4 rows of a span.
struct Task<'a> {
    job: Job<'a>,
    span: &'a Span,
    rows: Range<usize>,
    /// The first row's place among those in the latent space.
    first_row: usize,
    heads: Range<usize>,
    queries: &'a [f32],
    scratch: &'a mut [f32],
    attended: Shards<'a, f32>,
}

impl Kernel for Task<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let shape = self.job.shape;
        let (row, rank, heads) = (shape.row(), shape.rank, self.heads.len());
        let mut rest = std::mem::take(&mut self.scratch);
        let queries = take(&mut rest, self.rows.len() * heads * row);
        for (i, queries) in queries.chunks_exact_mut(heads * row).enumerate() {
            let at = ((self.first_row + i) * shape.heads + self.heads.start) * row;
            queries.copy_from_slice(&self.queries[at..at + heads * row]);
        }
        let widths = Widths { key: row, value: rank, scale: shape.scale() };
        let start = self.span.start + self.rows.start;
        let mut running = Running::new(queries, widths, start, heads, rest);
        for block in 0..running.end().div_ceil(BLOCK_LEN) {
            let at = block * BLOCK_LEN;
            let len = BLOCK_LEN.min(running.end() - at);
            let latents = self.job.paged.block(self.span, block, 0, len * row);
            let tile =
                TileKeys { keys: latents, key_stride: row, values: latents, value_stride: row };
            running.tile(s, at, tile);
        }
        let attended = running.finish(s);
        for (i, attended) in attended.chunks_exact(heads * rank).enumerate() {
            let at = ((self.first_row + i) * shape.heads + self.heads.start) * rank;
            // SAFETY: this task alone writes these heads of this row.
            let out = unsafe { self.attended.slice_mut(at..at + heads * rank) };
            out.copy_from_slice(attended);
        }
    }
}
