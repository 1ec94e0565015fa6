//! Generated rows and the prompt's last cell: queries are taken into the latent space.
//!
//! ```text
//! absorb    head by head, all rows at once: q_lat = up_kᵀ q
//! attend    segment by segment of each sequence, heads together: they share each read of a latent
//! merge     head by head: the segments of a row, in order
//! project   head by head, all rows at once: out = up_v attended
//! ```

use std::ops::Range;

use bytemuck::cast_slice;
use half::bf16;

use super::{Job, Shape, Workspace};
use crate::attention::{
    Keys, KvDtype, Queries, Softmax, Tile, core_scratch, finish_row, merge_row, row_tasks,
    softmax_len,
};
use crate::gemm::strip::Multiply;
use crate::rows::RowsMut;
use crate::scratch::{Pieces, Scratch, take};
use crate::simd::{Element, Kernel, Simd};
use crate::span::{BLOCK_LEN, SEGMENT_LEN, Span};
use crate::threads::Shards;

/// Rows of a span per unit.
const ROWS: usize = 4;
/// Most heads per task: they share each read of a latent row.
const HEADS: usize = 16;
/// Rows that are in the latent space at once, and rows of segments that are attended at once.
const MOST_ROWS: usize = 64;

/// Some rows of a span.
pub(super) type Task = (usize, Range<usize>);

/// One segment of what the rows of a task see.
#[derive(Debug, Clone, Copy)]
pub(super) struct Unit {
    /// The task.
    task: usize,
    /// The first row of the task among those in the latent space.
    first_row: usize,
    /// The same among the rows of the segments attended at once.
    first_part: usize,
    segment: usize,
}

/// Working memory that threads share.
#[derive(Debug, Default)]
pub(super) struct Shared {
    /// Queries in the latent space, `[row][head][rank + rope]`.
    queries: Vec<f32>,
    /// What rows attended to in one segment, then in all so far: rows of a [`Softmax`],
    /// `[row][head]`.
    parts: Vec<f32>,
    totals: Vec<f32>,
    units: Vec<Unit>,
}

impl Shared {
    pub(super) fn new(shape: Shape) -> Shared {
        let rows = MOST_ROWS * shape.heads;
        let softmax = vec![0.0; softmax_len(rows, shape.rank)];
        Shared {
            queries: vec![0.0; rows * shape.row()],
            parts: softmax.clone(),
            totals: softmax,
            // A unit has at least one row.
            units: Vec::with_capacity(MOST_ROWS),
        }
    }

    /// Values of working memory for layers of this shape.
    pub(super) fn len(shape: Shape) -> usize {
        let rows = MOST_ROWS * shape.heads;
        rows * shape.row() + 2 * softmax_len(rows, shape.rank)
    }

    pub(super) fn fill(&mut self, value: f32) {
        for memory in [&mut self.queries, &mut self.parts, &mut self.totals] {
            memory.fill(value);
        }
    }
}

/// Values per thread.
pub(super) fn scratch_len(shape: Shape) -> usize {
    let rows = ROWS * HEADS;
    let attend = rows * shape.row() + softmax_len(rows, shape.rank) + core_scratch(rows);
    attend.max(MOST_ROWS * shape.nope.max(shape.value_dim))
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
        Together { job, tasks, scratch: &scratch }.run(&mut work.shared, out);
    }
}

/// Up to 64 rows of some spans.
struct Together<'a> {
    job: Job<'a>,
    tasks: &'a [Task],
    scratch: &'a Pieces<'a>,
}

impl Together<'_> {
    fn run(&self, shared: &mut Shared, out: &mut RowsMut<'_>) {
        let Shared { queries, parts, totals, units } = shared;
        self.absorb(queries);
        let rows = self.rows().count() * self.job.shape.heads;
        let totals = &mut totals[..softmax_len(rows, self.job.shape.rank)];
        Softmax::empty(totals, self.job.shape.rank);
        units.clear();
        let (mut first_row, mut first_part) = (0, 0);
        for (task, (span, rows)) in self.tasks.iter().enumerate() {
            let end = self.job.paged.spans.all()[*span].start + rows.end;
            for segment in 0..end.div_ceil(SEGMENT_LEN) {
                if first_part + rows.len() > MOST_ROWS {
                    self.attend_segments(units, queries, parts, totals);
                    units.clear();
                    first_part = 0;
                }
                units.push(Unit { task, first_row, first_part, segment });
                first_part += rows.len();
            }
            first_row += rows.len();
        }
        self.attend_segments(units, queries, parts, totals);
        self.project(totals, out);
    }

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

    /// Attends some segments, then adds them to `totals` in order.
    fn attend_segments(
        &self,
        units: &[Unit],
        queries: &[f32],
        parts: &mut [f32],
        totals: &mut [f32],
    ) {
        let Job { cpu, shape, .. } = self.job;
        let groups = head_groups(shape.heads, units.len(), cpu.gang.threads());
        let most_heads = shape.heads.div_ceil(groups);
        let shards = Shards::new(parts);
        cpu.gang.run(units.len() * groups, |worker, task| {
            let unit = units[task / groups];
            let (span, rows) = &self.tasks[unit.task];
            let first = task % groups * most_heads;
            cpu.isa.run(Segment {
                job: self.job,
                span: &self.job.paged.spans.all()[*span],
                rows: rows.clone(),
                unit,
                heads: first..shape.heads.min(first + most_heads),
                queries,
                // SAFETY: this is the worker.
                scratch: unsafe { self.scratch.of(worker) },
                parts: shards,
            });
        });
        let totals = Shards::new(totals);
        cpu.gang.run(shape.heads, |_, head| {
            cpu.isa.run(Merge { shape, tasks: self.tasks, units, head, parts, totals });
        });
    }

    /// Projects the attended latents to the heads' values.
    fn project(&self, totals: &mut [f32], out: &mut RowsMut<'_>) {
        let Job { cpu, shape, up, .. } = self.job;
        let (dv, len) = (shape.value_dim, softmax_len(1, shape.rank));
        let stride = shape.heads * len;
        let count = self.rows().count();
        let out_stride = out.stride();
        let (out, totals) = (Shards::new(out.data()), Shards::new(totals));
        cpu.gang.run(shape.heads, |worker, head| {
            // SAFETY: this is the worker.
            let values = unsafe { self.scratch.of(worker) };
            cpu.isa.run(Finish { rows: count, at: head * len, stride, len, totals });
            assert!(count * dv <= values.len() && count * stride <= totals.len());
            // SAFETY: `totals` and `values` hold `count` rows by the assertion, and this task alone
            // uses this head's.
            let multiply = unsafe {
                let x = (totals.as_mut_ptr().add(head * len).cast_const(), stride);
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

/// Into how many groups heads are cut: so many that no task has more than it should, or twice as
/// many where the threads are done sooner.
fn head_groups(heads: usize, units: usize, threads: usize) -> usize {
    let few = heads.div_ceil(HEADS);
    let many = heads.div_ceil(HEADS / 2);
    // Rounds, of whole groups and of half ones.
    let (whole, half) = ((units * few).div_ceil(threads), (units * many).div_ceil(threads));
    if half < 2 * whole { many } else { few }
}

/// Some heads of up to 4 rows of a span, against one segment.
struct Segment<'a> {
    job: Job<'a>,
    span: &'a Span,
    rows: Range<usize>,
    unit: Unit,
    heads: Range<usize>,
    queries: &'a [f32],
    scratch: &'a mut [f32],
    parts: Shards<'a, f32>,
}

impl Kernel for Segment<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.job.paged.place.dtype {
            KvDtype::F32 => self.attend::<S, f32>(s),
            KvDtype::Bf16 => self.attend::<S, bf16>(s),
        }
    }
}

impl Segment<'_> {
    /// Over latents that are stored as `E`.
    #[inline(always)]
    fn attend<S: Simd, E: Element>(mut self, s: S) {
        let shape = self.job.shape;
        let (row, rank, heads) = (shape.row(), shape.rank, self.heads.len());
        let mut rest = std::mem::take(&mut self.scratch);
        let queries = take(&mut rest, self.rows.len() * heads * row);
        for (i, queries) in queries.chunks_exact_mut(heads * row).enumerate() {
            let at = ((self.unit.first_row + i) * shape.heads + self.heads.start) * row;
            queries.copy_from_slice(&self.queries[at..at + heads * row]);
        }
        let queries = Queries {
            values: queries,
            rows: self.rows.len() * heads,
            start: self.span.start + self.rows.start,
            per_position: heads,
            width: row,
            scale: shape.scale(),
        };
        let memory = take(&mut rest, softmax_len(queries.rows, rank));
        let mut softmax = Softmax::empty(memory, rank);
        let from = self.unit.segment * SEGMENT_LEN;
        let end = queries.end().min(from + SEGMENT_LEN);
        let block = |at: usize| -> &[E] {
            let len = BLOCK_LEN.min(end.saturating_sub(at));
            if len == 0 {
                &[]
            } else {
                self.job.paged.block(self.span, at / BLOCK_LEN, 0, len * row)
            }
        };
        for at in (from..end).step_by(BLOCK_LEN) {
            let (latents, next) = (block(at), block(at + BLOCK_LEN));
            let tile = Tile {
                at,
                keys: Keys::Rows(latents),
                values: (latents, row),
                fetch: cast_slice(next),
            };
            softmax.tile(s, queries, tile, rest);
        }
        for (i, part) in softmax.into_rows().enumerate() {
            let (position, head) = (self.unit.first_part + i / heads, self.heads.start + i % heads);
            let at = (position * shape.heads + head) * part.len();
            // SAFETY: this task alone writes these heads of these rows.
            unsafe { self.parts.slice_mut(at..at + part.len()) }.copy_from_slice(part);
        }
    }
}

/// Adds what one head attended to in some segments to its totals.
struct Merge<'a> {
    shape: Shape,
    tasks: &'a [Task],
    units: &'a [Unit],
    head: usize,
    parts: &'a [f32],
    totals: Shards<'a, f32>,
}

impl Kernel for Merge<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let len = softmax_len(1, self.shape.rank);
        let place = |row: usize| {
            let at = (row * self.shape.heads + self.head) * len;
            at..at + len
        };
        for unit in self.units {
            for i in 0..self.tasks[unit.task].1.len() {
                let part = &self.parts[place(unit.first_part + i)];
                // SAFETY: this task alone uses this head's totals.
                let total = unsafe { self.totals.slice_mut(place(unit.first_row + i)) };
                merge_row(s, total, part);
            }
        }
    }
}

/// Turns the totals of a head, in rows `stride` apart from `at` on, into what it attended.
struct Finish<'a> {
    rows: usize,
    at: usize,
    stride: usize,
    len: usize,
    totals: Shards<'a, f32>,
}

impl Kernel for Finish<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for row in 0..self.rows {
            let at = self.at + row * self.stride;
            // SAFETY: this task alone uses this head's totals.
            finish_row(s, unsafe { self.totals.slice_mut(at..at + self.len) });
        }
    }
}
