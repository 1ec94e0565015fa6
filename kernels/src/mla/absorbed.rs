//! Generated rows and the prompt's last cell: queries are taken into the latent space.
//!
//! ```text
//! absorb    head by head, all rows at once: q_lat = up_kᵀ q
//! attend    segment by segment of each sequence, heads together: they share each read of a latent
//! merge     head by head: the segments of a row, in order
//! project   head by head, all rows at once: out = up_v attended
//! ```

use std::ops::Range;

use bytemuck::{cast_slice, cast_slice_mut};
use half::bf16;

use super::{Job, Shape, Workspace};
use crate::attention::{
    Keys, KvDtype, MOST_ROWS, Queries, RowTask, Segments, Softmax, Tile, Totals, Unit,
    core_scratch, first_tasks, row_tasks, softmax_len,
};
use crate::device::Cpu;
use crate::gemm::inputs::Inputs;
use crate::panels::Panels;
use crate::quant::{GROUP_LEN, Group, quantize_rows};
use crate::rows::{Rows, RowsMut};
use crate::scratch::{Pieces, Scratch, take};
use crate::simd::{Element, Kernel, Simd};
use crate::span::{BLOCK_LEN, SEGMENT_LEN, Span};
use crate::threads::Shards;

/// Rows of a span per unit.
const ROWS: usize = 4;
/// Most heads per task: they share each read of a latent row.
const HEADS: usize = 16;

/// Working memory that threads share.
#[derive(Debug, Default)]
pub(super) struct Shared {
    /// Queries in the latent space, `[row][head][rank + rope]`.
    queries: Vec<f32>,
    segments: Segments,
}

impl Shared {
    pub(super) fn new(shape: Shape) -> Shared {
        Shared {
            queries: vec![0.0; MOST_ROWS * shape.heads * shape.row()],
            segments: Segments::new(shape.heads, shape.rank),
        }
    }

    /// Values of working memory for layers of this shape.
    pub(super) fn len(shape: Shape) -> usize {
        MOST_ROWS * shape.heads * shape.row() + Segments::len(shape.heads, shape.rank)
    }

    pub(super) fn fill(&mut self, value: f32) {
        self.queries.fill(value);
        self.segments.fill(value);
    }
}

/// Values per thread.
pub(super) fn scratch_len(shape: Shape) -> usize {
    let rows = ROWS * HEADS;
    let attend = rows * shape.row() + softmax_len(rows, shape.rank) + core_scratch(rows);
    let absorb = shape.nope + Group::scratch_len(shape.nope);
    let project = shape.rank + shape.value_dim + Group::scratch_len(shape.rank);
    attend.max(MOST_ROWS * absorb.max(project))
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
        let tasks;
        (tasks, rest) = first_tasks(rest);
        Together { job, tasks, scratch: &scratch }.run(&mut work.shared, out);
    }
}

/// Up to 64 rows of some spans.
struct Together<'a> {
    job: Job<'a>,
    tasks: &'a [RowTask],
    scratch: &'a Pieces<'a>,
}

impl Together<'_> {
    fn run(&self, shared: &mut Shared, out: &mut RowsMut<'_>) {
        let Shared { queries, segments } = shared;
        self.absorb(queries);
        let spans = self.job.paged.spans.all();
        let attend = |units: &[Unit], parts: Shards<'_, f32>| self.attend(units, queries, parts);
        let totals = segments.attend(self.job.cpu, (self.tasks, spans), attend);
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
            let mut rest = unsafe { self.scratch.of(worker) };
            let gathered = take(&mut rest, count * nope);
            for (i, r) in self.rows().enumerate() {
                let q = &q.row(r)[head * shape.query()..][..shape.query()];
                gathered[i * nope..(i + 1) * nope].copy_from_slice(&q[..nope]);
                let at = i * stride + head * row + shape.rank;
                // SAFETY: this task alone writes this head of the rows.
                unsafe { queries.slice_mut(at..at + shape.rope) }.copy_from_slice(&q[nope..]);
            }
            assert!(count * stride <= queries.len());
            // SAFETY: `queries` holds `count` rows by the assertion, and this task alone writes
            // this head's first `rank` values of them.
            unsafe {
                let out = (queries.as_mut_ptr().add(head * row), stride);
                multiply(cpu, Rows::new(gathered, nope), up.keys_transposed(head), rest, out);
            }
        });
    }

    /// Attends some segments.
    fn attend(&self, units: &[Unit], queries: &[f32], parts: Shards<'_, f32>) {
        let Job { cpu, shape, .. } = self.job;
        let groups = head_groups(shape.heads, units.len(), cpu.gang.threads());
        let most_heads = shape.heads.div_ceil(groups);
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
                parts,
            });
        });
    }

    /// Projects the attended latents to the heads' values.
    fn project(&self, totals: Totals<'_>, out: &mut RowsMut<'_>) {
        let Job { cpu, shape, up, .. } = self.job;
        let (dv, rank) = (shape.value_dim, shape.rank);
        let count = self.rows().count();
        let out_stride = out.stride();
        let out = Shards::new(out.data());
        totals.for_each_head(cpu, |worker, head, rows| {
            // SAFETY: this is the worker.
            let mut rest = unsafe { self.scratch.of(worker) };
            let attended = take(&mut rest, count * rank);
            rows.copy_to(cpu, attended);
            let values = take(&mut rest, count * dv);
            let attended = Rows::new(attended, rank);
            // SAFETY: `values` was cut to `count` rows.
            unsafe { multiply(cpu, attended, up.values(head), rest, (values.as_mut_ptr(), dv)) };
            for (values, r) in values.chunks_exact(dv).zip(self.rows()) {
                let at = r * out_stride + head * dv;
                // SAFETY: this task alone writes this head of the rows.
                unsafe { out.slice_mut(at..at + dv) }.copy_from_slice(values);
            }
        });
    }
}

/// `out = x wᵀ`, on this thread; `scratch` is for `x` in groups.
///
/// # Safety
/// As many rows of `out` as of `x` are valid for writes and reads of `w.rows` values, and nothing
/// else uses them meanwhile.
unsafe fn multiply(
    cpu: &Cpu,
    x: Rows<'_>,
    w: Panels<'_>,
    scratch: &mut [f32],
    out: (*mut f32, usize),
) {
    let inputs = match w {
        Panels::Stored(_) => Inputs::Stored(x),
        Panels::Quantized(_) => {
            let scratch = &mut scratch[..x.count() * Group::scratch_len(x.width())];
            let groups: &mut [Group] = cast_slice_mut(scratch);
            quantize_rows(cpu, x, groups);
            Inputs::Int8(groups, x.width().div_ceil(GROUP_LEN))
        }
    };
    // SAFETY: the caller's promise.
    unsafe { inputs.multiply(cpu, 0..x.count(), (w, 0..w.rows()), out, false) };
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
