//! Prompt rows: keys and values of a head are computed from the latents, tile by tile.

use std::ops::Range;

use super::{Job, Shape};
use crate::attention::{Running, TileKeys, Widths, core_scratch, row_tasks};
use crate::gemm::strip::Multiply;
use crate::panels::StoredPanels;
use crate::rows::RowsMut;
use crate::scratch::{Scratch, take};
use crate::simd::{Kernel, Simd};
use crate::span::{BLOCK_LEN, Span};
use crate::threads::Shards;

/// Rows of a span per task: the more, the fewer times a tile is expanded.
const ROWS: usize = 512;

pub(super) fn scratch_len(shape: Shape) -> usize {
    let tile = BLOCK_LEN * (shape.query() + shape.value_dim);
    ROWS * shape.query() + tile + core_scratch(ROWS, shape.value_dim)
}

/// One task per head and up to 512 rows of a span.
pub(super) fn attend(
    job: Job<'_>,
    scratch: &mut Scratch,
    tasks: &mut Vec<(usize, Range<usize>)>,
    out: &mut RowsMut<'_>,
) {
    let shape = job.shape;
    row_tasks(job.paged.spans.all(), ROWS, |span| 0..span.absorbed_from, tasks);
    if tasks.is_empty() {
        return;
    }
    let _timed = job.cpu.meter.time("mla expanded", || {
        let expansion = 2 * shape.rank * (shape.nope + shape.value_dim);
        let pair = 2 * (shape.query() + shape.value_dim);
        job.work(|span| 0..span.absorbed_from, [0, pair, expansion])
    });
    let scratch = scratch.pieces(job.cpu.gang.threads(), scratch_len(shape));
    let stride = out.stride();
    let shards = Shards::new(out.data());
    job.cpu.gang.run(tasks.len() * shape.heads, |worker, task| {
        let (span, rows) = &tasks[task / shape.heads];
        // SAFETY: this is the worker.
        let scratch = unsafe { scratch.of(worker) };
        let (span, rows, head) = (&job.paged.spans.all()[*span], rows.clone(), task % shape.heads);
        job.cpu.isa.run(Task { job, span, rows, head, scratch, out: shards, stride });
    });
}

struct Task<'a> {
    job: Job<'a>,
    span: &'a Span,
    rows: Range<usize>,
    head: usize,
    scratch: &'a mut [f32],
    out: Shards<'a, f32>,
    stride: usize,
}

impl Kernel for Task<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let shape = self.job.shape;
        let (dq, dv) = (shape.query(), shape.value_dim);
        let mut rest = self.scratch;
        let queries = take(&mut rest, self.rows.len() * dq);
        for (i, r) in self.rows.clone().enumerate() {
            let q = &self.job.q.row(self.span.first_row + r)[self.head * dq..][..dq];
            queries[i * dq..(i + 1) * dq].copy_from_slice(q);
        }
        let keys = take(&mut rest, BLOCK_LEN * dq);
        let values = take(&mut rest, BLOCK_LEN * dv);
        let widths = Widths { key: dq, value: dv, scale: shape.scale() };
        let start = self.span.start + self.rows.start;
        let mut running = Running::new(queries, widths, start, 1, rest);
        for block in 0..running.end().div_ceil(BLOCK_LEN) {
            let at = block * BLOCK_LEN;
            let len = BLOCK_LEN.min(running.end() - at);
            let latents = self.job.paged.block(self.span, block, 0, len * shape.row());
            let up = [self.job.up.keys(self.head), self.job.up.values(self.head)];
            expand(s, shape, latents, up, keys, values);
            let tile = TileKeys { keys, key_stride: dq, values, value_stride: dv };
            running.tile(s, at, tile);
        }
        let attended = running.finish(s);
        for (i, r) in self.rows.enumerate() {
            let at = (self.span.first_row + r) * self.stride + self.head * dv;
            // SAFETY: this task alone writes this head of these rows.
            let out = unsafe { self.out.slice_mut(at..at + dv) };
            out.copy_from_slice(&attended[i * dv..(i + 1) * dv]);
        }
    }
}

/// Keys `[up_k ĉ | shared]` and values `up_v ĉ` of one head for the rows of a tile.
#[inline(always)]
fn expand<S: Simd>(
    s: S,
    shape: Shape,
    latents: &[f32],
    [up_keys, up_values]: [StoredPanels<'_>; 2],
    keys: &mut [f32],
    values: &mut [f32],
) {
    let (row, rank, dq, dv) = (shape.row(), shape.rank, shape.query(), shape.value_dim);
    let rows = latents.len() / row;
    assert!(rows <= BLOCK_LEN && up_keys.cols() == rank && up_values.cols() == rank);
    assert!((up_keys.rows(), up_values.rows()) == (shape.nope, dv));
    assert!(keys.len() >= rows * dq && values.len() >= rows * dv);
    let latent_rows = (latents.as_ptr(), row);
    // SAFETY: `latents` is `rows` rows of `row >= rank` values, `keys` and `values` hold as many
    // rows of `dq >= nope` and `dv` values by the assertions.
    unsafe {
        Multiply::new(rows, latent_rows, up_keys, (keys.as_mut_ptr(), dq), false).run(s);
        Multiply::new(rows, latent_rows, up_values, (values.as_mut_ptr(), dv), false).run(s);
    }
    for (key, latent) in keys.chunks_exact_mut(dq).zip(latents.chunks_exact(row)) {
        key[shape.nope..].copy_from_slice(&latent[rank..]);
    }
}
