//! Prompt rows: keys and values of a head are computed from the latents, tile by tile.

use std::ops::{Range, RangeInclusive};

use bytemuck::cast_slice_mut;
use half::bf16;

use super::{Job, Shape};
use crate::attention::{
    Keys, KvDtype, Queries, RowTask, Running, Tile, row_tasks, running_scratch, widen,
};
use crate::device::Cpu;
use crate::gemm::strip::Multiply;
use crate::panels::Panels;
use crate::quant::strip::MultiplyInt8;
use crate::quant::{GROUP_LEN, Group, quantize_rows};
use crate::rows::{Rows, RowsMut};
use crate::scratch::{Scratch, take};
use crate::simd::{Kernel, Simd};
use crate::span::{BLOCK_LEN, Span};
use crate::threads::Shards;

/// Rows of a span per task: the more, the fewer times a tile is expanded; no more than keep all
/// threads busy, but these at least and at most.
const ROWS: RangeInclusive<usize> = 512..=2048;

pub(super) fn scratch_len(shape: Shape, most_rows: usize) -> usize {
    let rows = most_rows.min(*ROWS.end());
    let tile = BLOCK_LEN * (shape.row() + shape.query() + shape.nope + shape.value_dim);
    let narrow = BLOCK_LEN * Group::scratch_len(shape.rank);
    rows * shape.query() + tile + narrow + running_scratch(rows, shape.value_dim)
}

/// One task per head and up to 2,048 rows of a span.
pub(super) fn attend(
    job: Job<'_>,
    scratch: &mut Scratch,
    tasks: &mut Vec<RowTask>,
    out: &mut RowsMut<'_>,
) {
    let shape = job.shape;
    let rows: usize = job.paged.spans.all().iter().map(|span| span.absorbed_from).sum();
    let fair = (rows * shape.heads / (2 * job.cpu.gang.threads())).next_multiple_of(BLOCK_LEN);
    let most = fair.clamp(*ROWS.start(), *ROWS.end());
    row_tasks(job.paged.spans.all(), most, |span| 0..span.absorbed_from, tasks);
    if tasks.is_empty() {
        return;
    }
    let _timed = job.cpu.meter.time("mla expanded", || {
        let expansion = 2 * shape.rank * (shape.nope + shape.value_dim);
        let pair = 2 * (shape.query() + shape.value_dim);
        job.work(|span| 0..span.absorbed_from, [0, pair, expansion])
    });
    let longest = tasks.iter().map(|(_, rows)| rows.len()).max().unwrap_or(0);
    let scratch = scratch.pieces(job.cpu.gang.threads(), scratch_len(shape, longest));
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
        let queries = Queries {
            values: queries,
            rows: self.rows.len(),
            start: self.span.start + self.rows.start,
            per_position: 1,
            width: dq,
            scale: shape.scale(),
        };
        let widened = take(&mut rest, BLOCK_LEN * shape.row());
        let mut expanded = Expanded {
            rows: take(&mut rest, BLOCK_LEN * shape.nope),
            keys: take(&mut rest, BLOCK_LEN * dq),
            values: take(&mut rest, BLOCK_LEN * dv),
            narrow: cast_slice_mut(take(&mut rest, BLOCK_LEN * Group::scratch_len(shape.rank))),
        };
        let mut running = Running::new(queries, dv, rest);
        for at in (0..queries.end()).step_by(BLOCK_LEN) {
            let len = BLOCK_LEN.min(queries.end() - at);
            let (block, values) = (at / BLOCK_LEN, len * shape.row());
            let latents = match self.job.paged.place.dtype {
                KvDtype::F32 => self.job.paged.block(self.span, block, 0, values),
                KvDtype::Bf16 => {
                    let latents = self.job.paged.block::<bf16>(self.span, block, 0, values);
                    widen(s, latents, &mut widened[..values])
                }
            };
            let up = [self.job.up.keys(self.head), self.job.up.values(self.head)];
            expanded.fill(s, (self.job.cpu, shape), latents, up);
            let keys = Keys::Columns(&*expanded.keys, &[]);
            running.tile(s, Tile { at, keys, values: (&*expanded.values, dv), fetch: &[] });
        }
        let attended = running.finish(s);
        for (i, r) in self.rows.enumerate() {
            let at = (self.span.first_row + r) * self.stride + self.head * dv;
            // SAFETY: this task alone writes this head of these rows.
            let out = unsafe { self.out.slice_mut(at..at + dv) };
            out.copy_from_slice(attended.row(i));
        }
    }
}

/// One head's keys and values of a tile.
struct Expanded<'a> {
    /// `up_k ĉ`, `[64][nope]`.
    rows: &'a mut [f32],
    /// `[up_k ĉ | shared]` in columns, `[nope + rope][64]`.
    keys: &'a mut [f32],
    /// `up_v ĉ`, `[64][value_dim]`.
    values: &'a mut [f32],
    /// The latents in groups, for a quantised up-projection.
    narrow: &'a mut [Group],
}

impl Expanded<'_> {
    /// Those of the latent rows of a tile.
    #[inline(always)]
    fn fill<S: Simd>(
        &mut self,
        s: S,
        (cpu, shape): (&Cpu, Shape),
        latents: &[f32],
        up: [Panels<'_>; 2],
    ) {
        let (row, rank, nope, dv) = (shape.row(), shape.rank, shape.nope, shape.value_dim);
        let rows = latents.len() / row;
        assert!(rows <= BLOCK_LEN && up.map(|up| up.cols()) == [rank; 2]);
        assert!(up.map(|up| up.rows()) == [nope, dv]);
        assert!(self.rows.len() >= rows * nope && self.values.len() >= rows * dv);
        let groups = &mut self.narrow[..rows * rank.div_ceil(GROUP_LEN)];
        if let Panels::Quantized(_) = up[0] {
            quantize_rows(cpu, Rows::new(latents, row).columns(0, rank), groups);
        }
        for (up, out) in up.into_iter().zip([&mut *self.rows, &mut *self.values]) {
            let (latents, out) = ((latents.as_ptr(), row), (out.as_mut_ptr(), up.rows()));
            // SAFETY: `latents` is `rows` rows of `row >= rank` values, `rows` and `values` hold as
            // many rows of `nope` and `dv` values by the assertions.
            unsafe {
                match up {
                    Panels::Stored(up) => Multiply::new(rows, latents, up, out, false).run(s),
                    Panels::Quantized(up) => {
                        MultiplyInt8::new(rows, groups, up, out, false).run(s);
                    }
                }
            }
        }
        let (own, shared) = self.keys.split_at_mut(nope * BLOCK_LEN);
        to_columns(self.rows.chunks_exact(nope).take(rows), own);
        to_columns(latents.chunks_exact(row).map(|latent| &latent[rank..]), shared);
    }
}

/// Puts each row into a column of `out`, `[..][64]`.
#[inline(always)]
fn to_columns<'a>(rows: impl Iterator<Item = &'a [f32]>, out: &mut [f32]) {
    for (i, row) in rows.enumerate() {
        for (value, out) in row.iter().zip(out.chunks_exact_mut(BLOCK_LEN)) {
            out[i] = *value;
        }
    }
}
