//! Multi-head latent attention on a device.
//!
//! The definition is [`mla::naive`](crate::mla::naive); blocks have its layout. As on the
//! processor, generated rows and a prompt's last cell attend in the latent space, with products by
//! the up-projection before and behind, and other prompt rows attend keys and values that are
//! expanded from the latents, a segment at a time:
//!
//! ```text
//! absorbed    q_lat = up_kT q    attend latents                    out = up_v attended
//! expanded    for each segment:  gather latents, [k | v] = up latents, attend, keep what is known
//! ```

use std::iter;
use std::ops::Range;

use super::attention::{
    Attention, DevicePaged, MOST_SPANS, Over, Part, Source, Together, gather, parts_len, write,
};
use super::gemm::{Batch, Products, RoundedRows, Side};
use super::memory::Extent;
use super::{Cuda, CudaError, DeviceArena, DeviceBuffer, DeviceRows, DeviceRowsMut, DeviceSpans};
use crate::attention::KvPlace;
use crate::device::Compute;
use crate::matrix::{Dtype, Matrix};
use crate::mla::Shape;
use crate::span::{BLOCK_LEN, Form, SEGMENT_LEN, Span, Spans};

/// The up-projection of one layer as stored, and its key rows transposed, head by head: a prompt
/// multiplies latents by the one, an absorbed query by the other.
#[derive(Debug)]
pub struct Up {
    shape: Shape,
    dtype: Dtype,
    stored: DeviceBuffer<u8>,
    /// `[heads][rank][nope]`.
    keys_transposed: DeviceBuffer<u8>,
}

impl Up {
    /// A copy of `matrix`, `[heads * (nope + value), rank]`.
    ///
    /// # Errors
    /// When the device has no room.
    ///
    /// # Panics
    /// When the matrix is not of the shape.
    pub fn new(cuda: &Cuda, shape: Shape, matrix: Matrix<'_>) -> Result<Up, CudaError> {
        let of_head = shape.nope + shape.value_dim;
        assert_eq!((matrix.rows, matrix.cols), (shape.heads * of_head, shape.rank));
        let (dtype, bytes) = (matrix.values.dtype(), matrix.values.bytes());
        let mut transposed = Vec::with_capacity(bytes.len());
        for head in 0..shape.heads {
            for c in 0..shape.rank {
                for row in 0..shape.nope {
                    let at = ((head * of_head + row) * shape.rank + c) * dtype.bytes();
                    transposed.extend_from_slice(&bytes[at..at + dtype.bytes()]);
                }
            }
        }
        Ok(Up {
            shape,
            dtype,
            stored: DeviceBuffer::of(cuda, bytes)?,
            keys_transposed: DeviceBuffer::of(cuda, &transposed)?,
        })
    }

    /// Rows of the matrix for each head.
    fn of_head(&self) -> usize {
        self.shape.nope + self.shape.value_dim
    }

    /// Where the value rows of the first head are.
    fn values(&self) -> u64 {
        let at = self.shape.nope * self.shape.rank * self.dtype.bytes();
        self.stored.address() + at as u64
    }
}

/// Working memory of [`attend`], made once.
#[derive(Debug)]
pub struct Workspace {
    /// Queries in the latent space and attended latents, `[rows][heads][rank]`.
    latent: [DeviceBuffer<f32>; 2],
    rounded: RoundedRows,
    /// Parts of split segments, and what is known of expanded rows.
    parts: DeviceBuffer<f32>,
    running: DeviceBuffer<f32>,
    /// Latents of a segment, as many rows as are expanded at once, and what comes of them.
    gathered: DeviceBuffer<f32>,
    expanded: DeviceBuffer<f32>,
    expanded_rows: usize,
}

/// What a [`Workspace`] is for.
#[derive(Debug, Clone, Copy)]
pub struct Most {
    /// Rows of a step.
    pub rows: usize,
    /// Generated rows of a step whose segments are attended at once.
    pub steps: usize,
    /// Positions of a sequence.
    pub positions: usize,
    /// Positions that are expanded at once, at least a segment.
    pub expanded: usize,
}

impl Workspace {
    /// For layers of this shape.
    ///
    /// # Errors
    /// When the device has no room.
    pub fn new(cuda: &Cuda, shape: Shape, most: Most) -> Result<Workspace, CudaError> {
        assert!(most.expanded >= SEGMENT_LEN, "a segment is expanded at once");
        let of = |len| DeviceBuffer::zeros(cuda, len);
        let latent = most.rows * shape.heads * shape.rank;
        let parts = most.steps * most.positions.div_ceil(SEGMENT_LEN);
        let wide = shape.heads * shape.query().max(shape.rank);
        Ok(Workspace {
            latent: [of(latent)?, of(latent)?],
            rounded: RoundedRows::new(cuda, most.rows, wide)?,
            parts: of(parts * parts_len(shape.heads, shape.rank))?,
            running: of(most.rows * parts_len(shape.heads, shape.value_dim))?,
            gathered: of(most.expanded * shape.rank.next_multiple_of(8))?,
            expanded: of(most.expanded * shape.heads * (shape.nope + shape.value_dim))?,
            expanded_rows: most.expanded,
        })
    }
}

/// Writes the latent rows `[rows][rank + rope]` of every span to their blocks, rounded to the
/// cache's type.
///
/// # Errors
/// When the launch fails.
///
/// # Panics
/// When the shapes do not fit.
pub fn write_rows(
    cuda: &Cuda,
    shape: Shape,
    spans: &DeviceSpans<'_>,
    latents: DeviceRows<'_>,
    arena: &mut DeviceArena,
    place: KvPlace,
) -> Result<(), CudaError> {
    assert_eq!(latents.extent.width, shape.row());
    write(cuda, spans, latents.extent, (shape.row(), false), arena, place)
}

/// Attends every row of every span, in the form its span says, after [`write_rows`]; `q` is
/// `[rows][heads * (nope + rope)]`, `out` `[rows][heads * value]`. `spans` are those the step was
/// uploaded with. Padding rows become zeros.
///
/// Under [`Compute::Bf16`] what is multiplied by a bf16 up-projection is rounded first, and over a
/// bf16 cache queries, what is expanded from latents, and weights are too, where widths are of
/// whole fragments of 16; of expanded keys up to 192 and of values up to 128. Else they are f32.
///
/// # Errors
/// When a launch fails.
///
/// # Panics
/// When the shapes do not fit, or the workspace is too small.
pub fn attend(
    cuda: &Cuda,
    (q, up, compute): (DeviceRows<'_>, &Up, Compute),
    spans: Spans<'_>,
    paged: DevicePaged<'_>,
    work: &mut Workspace,
    out: DeviceRowsMut<'_>,
) -> Result<(), CudaError> {
    let (shape, q, out) = (up.shape, q.extent, out.extent);
    assert_eq!((q.count, q.width), (paged.spans.rows, shape.heads * shape.query()));
    assert_eq!((out.count, out.width), (q.count, shape.heads * shape.value_dim));
    paged.check(shape.row() * BLOCK_LEN);
    let rounds = compute == Compute::Bf16 && up.dtype == Dtype::Bf16;
    let layer = Layer { cuda, up, q, out, paged, rounds };
    let chunks: Vec<&Span> = spans.all().iter().filter(|span| span.form == Form::Chunk).collect();
    assert_eq!(chunks.len(), paged.spans.chunks, "the spans are those of the step");
    assert!(q.count * shape.heads * shape.rank <= work.latent[0].len(), "{} rows", q.count);
    layer.expanded(&chunks, work)?;
    layer.absorbed(spans, work)
}

/// What both forms share.
#[derive(Clone, Copy)]
struct Layer<'a> {
    cuda: &'a Cuda,
    up: &'a Up,
    q: Extent,
    out: Extent,
    paged: DevicePaged<'a>,
    rounds: bool,
}

/// Runs of rows that attend in the latent space, padding among them.
fn absorbed_runs(spans: Spans<'_>, rows: usize) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    let of_spans = spans.all().iter().map(|span| {
        let rows = span.batch_rows();
        rows.start + span.absorbed_from..rows.end
    });
    for run in of_spans.chain(iter::once(spans.rows()..rows)).filter(|run| !run.is_empty()) {
        match runs.last_mut() {
            Some(last) if last.end == run.start => last.end = run.end,
            _ => runs.push(run),
        }
    }
    runs
}

impl Layer<'_> {
    fn absorbed(self, spans: Spans<'_>, work: &mut Workspace) -> Result<(), CudaError> {
        let Layer { cuda, up, q, paged, .. } = self;
        let shape = up.shape;
        let (heads, rank) = (shape.heads, shape.rank);
        let stride = heads * rank;
        let [queries, attended] = [&work.latent[0], &work.latent[1]].map(DeviceBuffer::address);
        let runs = absorbed_runs(spans, q.count);
        for run in &runs {
            let batch = Batch { count: heads, x: shape.query(), w: rank * shape.nope, out: rank };
            let w = (up.keys_transposed.address(), rank, shape.nope);
            self.multiply(q, run.clone(), w, batch, (queries, stride), &mut work.rounded)?;
        }
        let shared = q.at + (shape.nope * size_of::<f32>()) as u64;
        let attention = Attention {
            paged,
            source: Source::Latents,
            heads,
            key_heads: 1,
            q: Part { at: queries, stride, head: rank, width: rank },
            more: Part { at: shared, stride: q.stride, head: shape.query(), width: shape.rope },
            out: Part { at: attended, stride, head: rank, width: rank },
            scale: shape.scale(),
            rounds: self.rounds,
            parts: (work.parts.address(), work.parts.len()),
        };
        let of_chunk = |span: &Span| match span.form {
            Form::Chunk => span.rows - span.absorbed_from,
            Form::Step => 0,
        };
        let most = spans.all().iter().map(of_chunk).max().unwrap_or(0);
        // SAFETY: queries and attended latents have the rows of the step.
        unsafe {
            attention.launch(cuda, Over::Steps)?;
            attention.launch(cuda, Over::Absorbed(most))?;
        }
        for run in runs {
            let dv = shape.value_dim;
            let batch = Batch { count: heads, x: rank, w: up.of_head() * rank, out: dv };
            let x = Extent { at: attended, count: q.count, stride, width: stride };
            let out = (self.out.at, self.out.stride);
            self.multiply(x, run, (up.values(), dv, rank), batch, out, &mut work.rounded)?;
        }
        Ok(())
    }

    /// Products of some rows, head by head, with weights `(address, outputs, inputs)`.
    fn multiply(
        self,
        x: Extent,
        run: Range<usize>,
        (w, outputs, inputs): (u64, usize, usize),
        batch: Batch,
        (out, out_stride): (u64, usize),
        rounded: &mut RoundedRows,
    ) -> Result<(), CudaError> {
        let at = |stride: usize| (run.start * stride * size_of::<f32>()) as u64;
        let x = Extent { at: x.at + at(x.stride), count: run.len(), ..x };
        let x = match self.rounds {
            true => rounded.round_extent(self.cuda, x)?,
            false => Side::f32(x),
        };
        let products = Products {
            x: Side { width: inputs, ..x },
            w,
            dtype: self.up.dtype,
            size: (run.len(), outputs, inputs),
            out: (out + at(out_stride), out_stride),
            add: false,
            narrow: false,
            batch,
            groups: None,
        };
        // SAFETY: x and out have the rows of the step, and each as many heads of these widths, by
        // the assertions of `attend`; the weights are those of all heads.
        unsafe { products.launch(self.cuda) }
    }

    /// Prompt rows before the absorbed ones, a segment at a time.
    fn expanded(self, chunks: &[&Span], work: &mut Workspace) -> Result<(), CudaError> {
        let end = |span: &Span| match span.absorbed_from {
            0 => 0,
            rows => span.start + rows,
        };
        let most = chunks.iter().map(|span| end(span)).max().unwrap_or(0);
        for segment in 0..most.div_ceil(SEGMENT_LEN) {
            let rows =
                |span: &Span| end(span).saturating_sub(segment * SEGMENT_LEN).min(SEGMENT_LEN);
            let mut first = 0;
            while first < chunks.len() {
                let mut together = Together { first, count: 0, bases: [0; MOST_SPANS], segment };
                let mut total = 0;
                for span in &chunks[first..chunks.len().min(first + MOST_SPANS)] {
                    if total + rows(span) > work.expanded_rows {
                        break;
                    }
                    together.bases[together.count] = total as i32;
                    together.count += 1;
                    total += rows(span);
                }
                let spans = &chunks[first..first + together.count];
                let longest = spans.iter().filter(|span| rows(span) > 0);
                let longest = longest.map(|span| span.absorbed_from).max().unwrap_or(0);
                self.expand(together, total, longest, work)?;
                first += together.count;
            }
        }
        Ok(())
    }

    /// Expands `total` latents of some spans and attends to them.
    fn expand(
        self,
        together: Together,
        total: usize,
        longest: usize,
        work: &mut Workspace,
    ) -> Result<(), CudaError> {
        let Layer { cuda, up, q, out, paged, rounds } = self;
        let (shape, rank, width) = (up.shape, up.shape.rank, up.shape.heads * up.of_head());
        let stride = rank.next_multiple_of(8);
        let gathered = work.gathered.address();
        // SAFETY: there is room for `expanded_rows` rows, of which spans have their own.
        unsafe { gather(cuda, paged, together, (shape.row(), rank), (gathered, stride, rounds))? }
        let (own, dim) = (shape.nope, shape.value_dim);
        let shared = q.at + (own * size_of::<f32>()) as u64;
        let attention = Attention {
            paged,
            source: Source::Latents,
            heads: shape.heads,
            key_heads: shape.heads,
            q: Part { at: q.at, stride: q.stride, head: shape.query(), width: own },
            more: Part { at: shared, stride: q.stride, head: shape.query(), width: shape.rope },
            out: Part { at: out.at, stride: out.stride, head: dim, width: dim },
            scale: shape.scale(),
            rounds,
            parts: (work.running.address(), work.running.len()),
        };
        let products = Products {
            x: Side { at: gathered, count: total, width: rank, stride, rounded: rounds },
            w: up.stored.address(),
            dtype: up.dtype,
            size: (total, width, rank),
            out: (work.expanded.address(), width),
            add: false,
            narrow: attention.expands_rounded(rank),
            batch: Batch::ONE,
            groups: None,
        };
        assert!(q.count * parts_len(shape.heads, dim) <= work.running.len(), "{} rows", q.count);
        // SAFETY: as many rows were gathered, and there is room for what they are expanded to; q,
        // out and what is known of rows have those of the step.
        unsafe {
            products.launch(cuda)?;
            attention.launch_expanded(cuda, together, (work.expanded.address(), rank), longest)
        }
    }
}
