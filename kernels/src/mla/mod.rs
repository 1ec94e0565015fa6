//! Multi-head latent attention over paged latent rows (MODELS.md section 5; DeepSeek-V2 report).
//!
//! A block holds, per layer, `[64][rank + rope]`: the latent after its norm, then the key part all
//! heads share. The up-projection `up` is `[heads * (nope + value), rank]`, per head the key rows,
//! then the value rows. Two forms give the same numbers in different orders:
//!
//! * **expanded** (prompt rows): keys `[up_k ĉ | shared]` and values `up_v ĉ` of each head are
//!   computed from the latents, then attended;
//! * **absorbed** (generated rows, and the prompt's last cell): the query is taken into the latent
//!   space, `q_lat = up_kᵀ q`, attends latents directly, and the attended latent is projected.
//!
//! A quantised up-projection multiplies 8-bit rows, as all quantised weights do: latents in the
//! first form, queries and attended latents in the second.
//!
//! Which row takes which form is written in its span (`absorbed_from`), never guessed from a length
//! here. Scores are times `(nope + rope)^-1/2`, causal, softmax in f32. In Kimi's models the shared
//! part is not rotated, but it is still projected, cached and scored.

mod absorbed;
mod expanded;
pub mod naive;
mod up;

pub use up::Up;

use std::ops::Range;

use crate::arena::Arena;
use crate::attention::{KvPlace, Paged, RowTask, write_rows};
use crate::device::Cpu;
use crate::meter::{SPECIAL, Work};
use crate::rows::{Rows, RowsMut};
use crate::scratch::Scratch;
use crate::span::Span;

/// Heads and widths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Query heads.
    pub heads: usize,
    /// Width of a head's part that comes from the latent.
    pub nope: usize,
    /// Width of the key part all heads share.
    pub rope: usize,
    /// Width of a head's values.
    pub value_dim: usize,
    /// Width of the latent.
    pub rank: usize,
}

impl Shape {
    /// Width of a cached row.
    pub fn row(&self) -> usize {
        self.rank + self.rope
    }

    /// Width of a head's query.
    pub fn query(&self) -> usize {
        self.nope + self.rope
    }

    /// Rows of the up-projection per head.
    fn up(&self) -> usize {
        self.nope + self.value_dim
    }

    pub(crate) fn scale(&self) -> f32 {
        1.0 / (self.query() as f32).sqrt()
    }
}

/// Values of scratch that [`attend`] needs per thread for batches of up to `most_rows` rows.
pub fn scratch_len(shape: Shape, most_rows: usize) -> usize {
    expanded::scratch_len(shape, most_rows).max(absorbed::scratch_len(shape))
}

/// Writes the latent rows `[rows][rank + rope]` of every span to their blocks.
pub fn write(
    shape: Shape,
    (spans, tables): (&[Span], &[usize]),
    latents: Rows<'_>,
    arena: &mut Arena,
    place: KvPlace,
) {
    write_rows((spans, tables), latents, shape.row(), arena, place);
}

/// Queries and weights of one layer.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a, W> {
    /// `[rows][heads * (nope + rope)]`.
    pub q: Rows<'a>,
    /// The up-projection: [`&Up`](Up), or a [`Matrix`](crate::Matrix) for the definition.
    pub up: W,
}

/// Working memory of [`attend`] that its threads share, made once.
#[derive(Debug, Default)]
pub struct Workspace {
    /// Spans, and some of their rows.
    tasks: Vec<RowTask>,
    shared: absorbed::Shared,
}

impl Workspace {
    /// For layers of this shape, and batches of up to `most_rows` rows.
    pub fn new(shape: Shape, most_rows: usize) -> Workspace {
        // A task has at least one row.
        Workspace { tasks: Vec::with_capacity(most_rows), shared: absorbed::Shared::new(shape) }
    }

    /// Values of a workspace for layers of this shape.
    pub fn len(shape: Shape) -> usize {
        absorbed::Shared::len(shape)
    }

    /// Overwrites all values: tests poison what kernels must not rely on.
    pub fn fill(&mut self, value: f32) {
        self.shared.fill(value);
    }
}

/// Attends every row of every span, in the form its span says; `out` is `[rows][heads * value]`.
///
/// # Panics
/// When the shapes do not fit, or `scratch` or `work` is too small.
pub fn attend(
    cpu: &Cpu,
    inputs: Inputs<'_, &Up>,
    paged: Paged<'_>,
    scratch: &mut Scratch,
    work: &mut Workspace,
    mut out: RowsMut<'_>,
) {
    let Inputs { q, up } = inputs;
    let shape = up.shape();
    assert_eq!(q.width(), shape.heads * shape.query());
    assert_eq!((out.count(), out.width()), (q.count(), shape.heads * shape.value_dim));
    assert_eq!(q.count(), paged.spans.rows());
    let job = Job { cpu, shape, q, up, paged };
    expanded::attend(job, scratch, &mut work.tasks, &mut out);
    absorbed::attend(job, scratch, work, &mut out);
}

/// What the tasks of both forms share.
#[derive(Clone, Copy)]
struct Job<'a> {
    cpu: &'a Cpu,
    shape: Shape,
    q: Rows<'a>,
    up: &'a Up,
    paged: Paged<'a>,
}

impl Job<'_> {
    /// What the rows of each span that `rows` names take: `per_row` operations of a row, `per_pair`
    /// of a row and a position it sees, and `per_position` of each position, all for one head.
    /// Cached rows and the up-projection are read once.
    fn work(
        &self,
        rows: impl Fn(&Span) -> Range<usize>,
        [per_row, per_pair, per_position]: [usize; 3],
    ) -> Work {
        let shape = self.shape;
        let (mut operations, mut bytes) = (0, self.up.bytes());
        for span in self.paged.spans.all() {
            let rows = rows(span);
            if rows.is_empty() {
                continue;
            }
            let (count, end) = (rows.len(), span.start + rows.end);
            operations += count * per_row + end * per_position;
            operations += span.seen(rows) * (per_pair + SPECIAL);
            bytes += end * shape.row() * self.paged.place.dtype.bytes();
            let values = count * shape.heads * (shape.query() + shape.value_dim);
            bytes += values * size_of::<f32>();
        }
        Work::f32(operations * shape.heads, bytes)
    }
}
