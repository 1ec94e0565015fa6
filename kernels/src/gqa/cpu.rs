//! The fast form: one task per key head and up to 64 rows of a span, or, where threads would be
//! idle, per key head and segment of what a few rows see.

use std::ops::Range;

use bytemuck::cast_slice;
use half::bf16;

use super::Shape;
use crate::attention::{
    Keys, KvDtype, Paged, Queries, RowTask, Running, Segments, Softmax, Tile, Unit, core_scratch,
    first_tasks, row_tasks, running_scratch, softmax_len, widen,
};
use crate::device::Cpu;
use crate::meter::{SPECIAL, Work};
use crate::rows::{Rows, RowsMut};
use crate::scratch::{Pieces, Scratch, take};
use crate::simd::{Element, Kernel, Simd};
use crate::span::{BLOCK_LEN, SEGMENT_LEN, Span};
use crate::threads::Shards;

/// Most rows of a span per task.
const ROWS: usize = 64;
/// Rows of a span that are attended segment by segment.
const FEW_ROWS: usize = 4;
/// More query rows than these want a tile widened once; fewer widen what they read.
const FEW_QUERIES: usize = 12;

/// Values of scratch that [`attend`] needs per thread.
pub fn scratch_len(shape: Shape) -> usize {
    let rows = |rows: usize| rows * shape.heads / shape.kv_heads;
    let widened = 2 * BLOCK_LEN * shape.head_dim;
    let whole = rows(ROWS) * shape.head_dim + widened + running_scratch(rows(ROWS), shape.head_dim);
    let queries = rows(FEW_ROWS) * shape.head_dim;
    let softmax = softmax_len(rows(FEW_ROWS), shape.head_dim) + core_scratch(rows(FEW_ROWS));
    whole.max(queries + widened + softmax)
}

/// Working memory of [`attend`] that its threads share, made once.
#[derive(Debug, Default)]
pub struct Workspace {
    tasks: Vec<RowTask>,
    segments: Segments,
}

impl Workspace {
    /// For layers of this shape, and batches of up to `most_rows` rows.
    pub fn new(shape: Shape, most_rows: usize) -> Workspace {
        // A task has at least one row.
        let tasks = Vec::with_capacity(most_rows);
        Workspace { tasks, segments: Segments::new(shape.heads, shape.head_dim) }
    }

    /// Values of a workspace for layers of this shape.
    pub fn len(shape: Shape) -> usize {
        Segments::len(shape.heads, shape.head_dim)
    }

    /// Overwrites all values: tests poison what kernels must not rely on.
    pub fn fill(&mut self, value: f32) {
        self.segments.fill(value);
    }
}

/// Attends every row of every span; `q` and `out` are `[rows][heads * head_dim]`.
///
/// # Panics
/// When the shapes do not fit, or `scratch` or `work` is too small.
pub fn attend(
    cpu: &Cpu,
    shape: Shape,
    q: Rows<'_>,
    paged: Paged<'_>,
    scratch: &mut Scratch,
    work: &mut Workspace,
    mut out: RowsMut<'_>,
) {
    let width = shape.heads * shape.head_dim;
    assert_eq!((q.width(), out.width(), q.count()), (width, width, out.count()));
    assert_eq!(q.count(), paged.spans.rows());
    let _timed = cpu.meter.time("gqa", || operations(shape, q.count(), paged));
    let job = Job { cpu, shape, q, paged };
    let scratch = scratch.pieces(cpu.gang.threads(), scratch_len(shape));
    let Workspace { tasks, segments } = work;
    let leaves_threads_idle = job.leaves_threads_idle();
    let by_segment = |span: &Span| leaves_threads_idle && is_long(span);
    let whole = |span: &Span| 0..if by_segment(span) { 0 } else { span.rows };
    row_tasks(paged.spans.all(), ROWS, whole, tasks);
    job.attend_whole(tasks, &scratch, &mut out);
    row_tasks(paged.spans.all(), ROWS, |span| whole(span).end..span.rows, tasks);
    let mut rest = &tasks[..];
    while !rest.is_empty() {
        let tasks;
        (tasks, rest) = first_tasks(rest);
        job.attend_by_segment(tasks, segments, &scratch, &mut out);
    }
}

/// Whether a few rows see more than a segment.
fn is_long(span: &Span) -> bool {
    span.rows <= FEW_ROWS && span.end() > SEGMENT_LEN
}

/// What all tasks share.
#[derive(Clone, Copy)]
struct Job<'a> {
    cpu: &'a Cpu,
    shape: Shape,
    q: Rows<'a>,
    paged: Paged<'a>,
}

impl Job<'_> {
    /// Whether tasks of whole rows are too few for the threads.
    fn leaves_threads_idle(&self) -> bool {
        let tasks: usize = self.paged.spans.all().iter().map(|s| s.rows.div_ceil(ROWS)).sum();
        tasks * self.shape.kv_heads < 2 * self.cpu.gang.threads() && self.cpu.gang.threads() > 1
    }

    fn attend_whole(&self, tasks: &[RowTask], scratch: &Pieces<'_>, out: &mut RowsMut<'_>) {
        let (cpu, kv_heads) = (self.cpu, self.shape.kv_heads);
        let stride = out.stride();
        let shards = Shards::new(out.data());
        cpu.gang.run(tasks.len() * kv_heads, |worker, task| {
            let (span, rows) = &tasks[task / kv_heads];
            // SAFETY: this is the worker.
            let scratch = unsafe { scratch.of(worker) };
            let span = &self.paged.spans.all()[*span];
            let part = Part { job: *self, span, rows: rows.clone(), kv_head: task % kv_heads };
            cpu.isa.run(Whole { part, scratch, out: shards, stride });
        });
    }

    /// The same bits: whole rows merge their segments in the same order.
    fn attend_by_segment(
        &self,
        tasks: &[RowTask],
        segments: &mut Segments,
        scratch: &Pieces<'_>,
        out: &mut RowsMut<'_>,
    ) {
        let (cpu, spans, dim) = (self.cpu, self.paged.spans.all(), self.shape.head_dim);
        let kv_heads = self.shape.kv_heads;
        let attend = |units: &[Unit], parts: Shards<'_, f32>| {
            cpu.gang.run(units.len() * kv_heads, |worker, task| {
                let unit = units[task / kv_heads];
                let (span, rows) = &tasks[unit.task];
                let (span, kv_head) = (&spans[*span], task % kv_heads);
                let part = Part { job: *self, span, rows: rows.clone(), kv_head };
                // SAFETY: this is the worker.
                let scratch = unsafe { scratch.of(worker) };
                cpu.isa.run(Segment { part, unit, scratch, parts });
            });
        };
        let totals = segments.attend(cpu, (tasks, spans), attend);
        let stride = out.stride();
        let out = Shards::new(out.data());
        totals.for_each_head(cpu, |worker, head, attended| {
            // SAFETY: this is the worker.
            let values = unsafe { scratch.of(worker) };
            attended.copy_to(cpu, values);
            let rows = tasks.iter().flat_map(|(span, rows)| {
                let first = spans[*span].first_row;
                first + rows.start..first + rows.end
            });
            for (values, r) in values.chunks_exact(dim).zip(rows) {
                let at = r * stride + head * dim;
                // SAFETY: this task alone writes this head of the rows.
                unsafe { out.slice_mut(at..at + dim) }.copy_from_slice(values);
            }
        });
    }
}

/// Keys and values of each span are read once; a row is scored against all it sees and sums their
/// values.
fn operations(shape: Shape, rows: usize, paged: Paged<'_>) -> Work {
    let spans = paged.spans.all();
    let pairs: usize = spans.iter().map(|span| span.seen(0..span.rows)).sum();
    let cached: usize = spans.iter().map(Span::end).sum();
    let operations = pairs * shape.heads * (4 * shape.head_dim + SPECIAL);
    let cached_bytes = cached * shape.kv_heads * paged.place.dtype.bytes();
    let row_bytes = rows * shape.heads * size_of::<f32>();
    Work::f32(operations, 2 * (cached_bytes + row_bytes) * shape.head_dim)
}

/// Some rows of a span, with the heads that share a key head.
struct Part<'a> {
    job: Job<'a>,
    span: &'a Span,
    rows: Range<usize>,
    kv_head: usize,
}

impl<'a> Part<'a> {
    /// Query heads that share the key head.
    fn group(&self) -> usize {
        self.job.shape.heads / self.job.shape.kv_heads
    }

    /// Their first column in a row.
    fn column(&self) -> usize {
        self.kv_head * self.group() * self.job.shape.head_dim
    }

    /// Query rows.
    fn queries(&self) -> usize {
        self.rows.len() * self.group()
    }

    /// Whether tiles of values that are stored as `E` are widened first: the bits are the same.
    fn widens(&self) -> bool {
        self.job.paged.place.dtype == KvDtype::Bf16 && self.queries() > FEW_QUERIES
    }

    /// The query rows, copied to the front of `scratch`.
    fn gather<'b>(&self, scratch: &mut &'b mut [f32]) -> Queries<'b> {
        let Job { shape, q, .. } = self.job;
        let width = self.group() * shape.head_dim;
        let queries = take(scratch, self.rows.len() * width);
        for (i, r) in self.rows.clone().enumerate() {
            let q = &q.row(self.span.first_row + r)[self.column()..][..width];
            queries[i * width..(i + 1) * width].copy_from_slice(q);
        }
        Queries {
            values: queries,
            rows: self.queries(),
            start: self.span.start + self.rows.start,
            per_position: self.group(),
            width: shape.head_dim,
            scale: shape.scale(),
        }
    }

    /// Calls `attend` with each tile of positions `positions`, in order, of rows that are stored as
    /// `E`. They are widened in `scratch` first if `WIDEN`.
    #[inline(always)]
    fn for_each_tile<S: Simd, E: Element, const WIDEN: bool>(
        &self,
        s: S,
        positions: Range<usize>,
        scratch: &mut [f32],
        mut attend: impl FnMut(TileOf<'_, E>),
    ) {
        let Job { shape, paged, .. } = self.job;
        let dim = shape.head_dim;
        let part = BLOCK_LEN * dim;
        let (wide_keys, wide_values) = scratch.split_at_mut(part);
        let keys_from = self.kv_head * part;
        let values_from = shape.keys_in_block() + keys_from;
        let block = |at: usize, from: usize| -> &[E] {
            match at < positions.end {
                true => paged.block(self.span, at / BLOCK_LEN, from, part),
                false => &[],
            }
        };
        for at in positions.clone().step_by(BLOCK_LEN) {
            let (keys, values) = (block(at, keys_from), block(at, values_from));
            let fetch = cast_slice(block(at + BLOCK_LEN, keys_from));
            if WIDEN {
                let keys = Keys::Columns(widen(s, keys, wide_keys), &[]);
                let values = (widen(s, values, &mut wide_values[..part]), dim);
                attend(TileOf::Widened(Tile { at, keys, values, fetch }));
            } else {
                let keys = Keys::Columns(keys, cast_slice(values));
                attend(TileOf::Stored(Tile { at, keys, values: (values, dim), fetch }));
            }
        }
    }
}

/// A tile as it is stored, or widened.
enum TileOf<'a, E> {
    Stored(Tile<'a, E>),
    Widened(Tile<'a, f32>),
}

/// What attends a part, whatever its rows are stored as.
trait OverRows<'a>: Sized {
    fn part(&self) -> &Part<'a>;

    /// Over rows that are stored as `E`, tiles of which are widened first if `WIDEN`.
    fn attend<S: Simd, E: Element, const WIDEN: bool>(self, s: S);
}

#[inline(always)]
fn attend_stored<'a, S: Simd>(s: S, rows: impl OverRows<'a>) {
    match rows.part().job.paged.place.dtype {
        KvDtype::F32 => rows.attend::<S, f32, false>(s),
        KvDtype::Bf16 if rows.part().widens() => rows.attend::<S, bf16, true>(s),
        KvDtype::Bf16 => rows.attend::<S, bf16, false>(s),
    }
}

/// A part, over all that its rows see.
struct Whole<'a> {
    part: Part<'a>,
    scratch: &'a mut [f32],
    out: Shards<'a, f32>,
    stride: usize,
}

impl Kernel for Whole<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        attend_stored(s, self);
    }
}

impl<'a> OverRows<'a> for Whole<'a> {
    fn part(&self) -> &Part<'a> {
        &self.part
    }

    #[inline(always)]
    fn attend<S: Simd, E: Element, const WIDEN: bool>(self, s: S) {
        let Whole { part, mut scratch, out, stride } = self;
        let dim = part.job.shape.head_dim;
        let queries = part.gather(&mut scratch);
        let widened = take(&mut scratch, 2 * BLOCK_LEN * dim);
        let mut running = Running::new(queries, dim, scratch);
        part.for_each_tile::<S, E, WIDEN>(s, 0..queries.end(), widened, |tile| match tile {
            TileOf::Stored(tile) => running.tile(s, tile),
            TileOf::Widened(tile) => running.tile(s, tile),
        });
        let attended = running.finish(s);
        let group = part.group();
        for (i, r) in part.rows.clone().enumerate() {
            let at = (part.span.first_row + r) * stride + part.column();
            // SAFETY: this task alone writes these heads of these rows.
            let out = unsafe { out.slice_mut(at..at + group * dim) };
            for (head, out) in out.chunks_exact_mut(dim).enumerate() {
                out.copy_from_slice(attended.row(i * group + head));
            }
        }
    }
}

/// A part, over one segment of what its rows see.
struct Segment<'a> {
    part: Part<'a>,
    unit: Unit,
    scratch: &'a mut [f32],
    parts: Shards<'a, f32>,
}

impl Kernel for Segment<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        attend_stored(s, self);
    }
}

impl<'a> OverRows<'a> for Segment<'a> {
    fn part(&self) -> &Part<'a> {
        &self.part
    }

    #[inline(always)]
    fn attend<S: Simd, E: Element, const WIDEN: bool>(self, s: S) {
        let Segment { part, unit, mut scratch, parts } = self;
        let Shape { heads, head_dim: dim, .. } = part.job.shape;
        let queries = part.gather(&mut scratch);
        let widened = take(&mut scratch, 2 * BLOCK_LEN * dim);
        let mut softmax = Softmax::empty(take(&mut scratch, softmax_len(queries.rows, dim)), dim);
        let from = unit.segment * SEGMENT_LEN;
        let positions = from..queries.end().min(from + SEGMENT_LEN);
        part.for_each_tile::<S, E, WIDEN>(s, positions, widened, |tile| match tile {
            TileOf::Stored(tile) => softmax.tile(s, queries, tile, scratch),
            TileOf::Widened(tile) => softmax.tile(s, queries, tile, scratch),
        });
        let group = part.group();
        for (i, row) in softmax.into_rows().enumerate() {
            let head = part.kv_head * group + i % group;
            let at = ((unit.first_part + i / group) * heads + head) * row.len();
            // SAFETY: this task alone writes these heads of these rows.
            unsafe { parts.slice_mut(at..at + row.len()) }.copy_from_slice(row);
        }
    }
}
