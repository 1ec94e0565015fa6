//! The fast form: one task per key head and up to 64 rows of a span.

use std::ops::Range;

use bytemuck::cast_slice;
use half::bf16;

use super::Shape;
use crate::attention::{
    Keys, KvDtype, Paged, Queries, Running, Tile, row_tasks, running_scratch, widen,
};
use crate::device::Cpu;
use crate::meter::{SPECIAL, Work};
use crate::rows::{Rows, RowsMut};
use crate::scratch::{Scratch, take};
use crate::simd::{Element, Kernel, Simd};
use crate::span::{BLOCK_LEN, Span};
use crate::threads::Shards;

/// Rows of a span per task.
const ROWS: usize = 64;
/// More query rows than these want a tile widened once; fewer widen what they read.
const FEW_QUERIES: usize = 12;

/// Values of scratch that [`attend`] needs per thread.
pub fn scratch_len(shape: Shape) -> usize {
    let rows = ROWS * shape.heads / shape.kv_heads;
    let widened = 2 * BLOCK_LEN * shape.head_dim;
    rows * shape.head_dim + widened + running_scratch(rows, shape.head_dim)
}

/// Attends every row of every span; `q` and `out` are `[rows][heads * head_dim]`. `tasks` is
/// reused from call to call.
///
/// # Panics
/// When the shapes do not fit or `scratch` is too small.
pub fn attend(
    cpu: &Cpu,
    shape: Shape,
    q: Rows<'_>,
    paged: Paged<'_>,
    scratch: &mut Scratch,
    tasks: &mut Vec<(usize, Range<usize>)>,
    mut out: RowsMut<'_>,
) {
    let width = shape.heads * shape.head_dim;
    assert_eq!((q.width(), out.width(), q.count()), (width, width, out.count()));
    assert_eq!(q.count(), paged.spans.rows());
    let _timed = cpu.meter.time("gqa", || work(shape, q.count(), paged));
    row_tasks(paged.spans.all(), ROWS, |span| 0..span.rows, tasks);
    let scratch = scratch.pieces(cpu.gang.threads(), scratch_len(shape));
    let stride = out.stride();
    let shards = Shards::new(out.data());
    cpu.gang.run(tasks.len() * shape.kv_heads, |worker, task| {
        let (span, rows) = &tasks[task / shape.kv_heads];
        // SAFETY: this is the worker.
        let scratch = unsafe { scratch.of(worker) };
        let (span, rows, kv_head) =
            (&paged.spans.all()[*span], rows.clone(), task % shape.kv_heads);
        cpu.isa.run(Task { shape, q, paged, span, rows, kv_head, scratch, out: shards, stride });
    });
}

/// Keys and values of each span are read once; a row is scored against all it sees and sums their
/// values.
fn work(shape: Shape, rows: usize, paged: Paged<'_>) -> Work {
    let spans = paged.spans.all();
    let pairs: usize = spans.iter().map(|span| span.seen(0..span.rows)).sum();
    let cached: usize = spans.iter().map(Span::end).sum();
    let operations = pairs * shape.heads * (4 * shape.head_dim + SPECIAL);
    let cached_bytes = cached * shape.kv_heads * paged.place.dtype.bytes();
    let row_bytes = rows * shape.heads * size_of::<f32>();
    Work::f32(operations, 2 * (cached_bytes + row_bytes) * shape.head_dim)
}

struct Task<'a> {
    shape: Shape,
    q: Rows<'a>,
    paged: Paged<'a>,
    span: &'a Span,
    rows: Range<usize>,
    kv_head: usize,
    scratch: &'a mut [f32],
    out: Shards<'a, f32>,
    stride: usize,
}

impl Kernel for Task<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.paged.place.dtype {
            KvDtype::F32 => self.attend::<S, f32, false>(s),
            KvDtype::Bf16 if self.queries() > FEW_QUERIES => self.attend::<S, bf16, true>(s),
            KvDtype::Bf16 => self.attend::<S, bf16, false>(s),
        }
    }
}

impl Task<'_> {
    /// Query rows of the task.
    fn queries(&self) -> usize {
        self.rows.len() * self.shape.heads / self.shape.kv_heads
    }

    /// Over rows that are stored as `E`, tiles of which are widened first if `WIDEN`: the bits are
    /// the same.
    #[inline(always)]
    fn attend<S: Simd, E: Element, const WIDEN: bool>(self, s: S) {
        let dim = self.shape.head_dim;
        let group = self.shape.heads / self.shape.kv_heads;
        let width = group * dim;
        let column = self.kv_head * width;
        let mut rest = self.scratch;
        let queries = take(&mut rest, self.rows.len() * width);
        for (i, r) in self.rows.clone().enumerate() {
            let q = &self.q.row(self.span.first_row + r)[column..column + width];
            queries[i * width..(i + 1) * width].copy_from_slice(q);
        }
        let queries = Queries {
            values: queries,
            rows: self.rows.len() * group,
            start: self.span.start + self.rows.start,
            per_position: group,
            width: dim,
            scale: self.shape.scale(),
        };
        let part = BLOCK_LEN * dim;
        let (wide_keys, wide_values) = (take(&mut rest, part), take(&mut rest, part));
        let mut running = Running::new(queries, dim, rest);
        let keys_from = self.kv_head * part;
        let values_from = self.shape.keys_in_block() + keys_from;
        let block = |at: usize, from: usize| -> &[E] {
            match at < queries.end() {
                true => self.paged.block(self.span, at / BLOCK_LEN, from, part),
                false => &[],
            }
        };
        for at in (0..queries.end()).step_by(BLOCK_LEN) {
            let (keys, values) = (block(at, keys_from), block(at, values_from));
            let next = cast_slice(block(at + BLOCK_LEN, keys_from));
            if WIDEN {
                let keys = Keys::Columns(widen(s, keys, wide_keys), &[]);
                let values = (widen(s, values, wide_values), dim);
                running.tile(s, Tile { at, keys, values, fetch: next });
            } else {
                let keys = Keys::Columns(keys, cast_slice(values));
                running.tile(s, Tile { at, keys, values: (values, dim), fetch: next });
            }
        }
        let attended = running.finish(s);
        for (i, r) in self.rows.enumerate() {
            let at = (self.span.first_row + r) * self.stride + column;
            // SAFETY: this task alone writes these heads of these rows.
            let out = unsafe { self.out.slice_mut(at..at + width) };
            for (head, out) in out.chunks_exact_mut(dim).enumerate() {
                out.copy_from_slice(attended.row(i * group + head));
            }
        }
    }
}
