//! The fast form: one task per span and head, in chunks or in steps.

use super::chunk::{Chunk, chunk_scratch};
use super::step::{Step, step_scratch};
use super::{Inputs, Shape, States};
use crate::arena::ArenaParts;
use crate::device::Cpu;
use crate::meter::Work;
use crate::rows::RowsMut;
use crate::scratch::Scratch;
use crate::span::{CELL_LEN, Form, NO_SLOT, Span};
use crate::threads::Shards;

/// Values of scratch that [`kda`] needs per thread.
pub fn scratch_len(shape: Shape) -> usize {
    chunk_scratch(shape).max(step_scratch(shape))
}

/// Runs every span; see the module's description.
///
/// # Panics
/// When the shapes do not fit or `scratch` is too small.
pub fn kda(
    cpu: &Cpu,
    shape: Shape,
    inputs: Inputs<'_>,
    states: States<'_>,
    scratch: &mut Scratch,
    mut out: RowsMut<'_>,
) {
    inputs.check(&shape);
    assert_eq!(
        (out.count(), out.width()),
        (inputs.qkv.count(), shape.value_heads * shape.value_dim)
    );
    assert_eq!(inputs.qkv.count(), states.spans.rows());
    let state_bytes = shape.value_heads * shape.head_state() * size_of::<f32>();
    states.spans.check_part(states.at, state_bytes);
    let spans = states.spans.all();
    let _timed = cpu.meter.time(name(spans), || work(&shape, &inputs, spans));
    let scratch = scratch.pieces(cpu.gang.threads(), scratch_len(shape));
    let out_stride = out.stride();
    let out = Shards::new(out.data());
    let job = Job { cpu, shape, inputs, parts: states.arena.parts(), at: states.at };
    cpu.gang.run(spans.len() * shape.value_heads, |worker, task| {
        let span = &spans[task / shape.value_heads];
        let head = task % shape.value_heads;
        // SAFETY: this is the worker.
        let scratch = unsafe { scratch.of(worker) };
        let head_rows = HeadRows { out, stride: out_stride, head, width: shape.value_dim };
        let mut snapshots = states.spans.snapshots(span).iter().peekable();
        let mut done = 0;
        while done < span.rows {
            done += job.advance(span, head, done, &head_rows, scratch);
            while let Some(snapshot) = snapshots.next_if(|s| s.after_rows <= done) {
                assert_eq!(snapshot.after_rows, done, "a snapshot off the grid");
                job.copy_state(span.write, snapshot.slot, head);
            }
        }
    });
}

/// Prompts and generated tokens are told apart where a batch has only one of them.
fn name(spans: &[Span]) -> &'static str {
    let steps = spans.iter().filter(|span| span.form == Form::Step).count();
    match steps {
        0 => "kda chunk",
        _ if steps == spans.len() => "kda step",
        _ => "kda chunk and step",
    }
}

/// Each span's state is read and written once. A row alone decays the state, reads it twice and
/// writes it; in a chunk it is read twice and written, and half of the chunk's rows are scored by
/// both inner products, solved for and summed.
fn work(shape: &Shape, inputs: &Inputs<'_>, spans: &[Span]) -> Work {
    let (head, widths) = (shape.head_state(), shape.key_dim + shape.value_dim);
    let operations = spans.iter().map(|span| match span.form {
        Form::Step => span.rows * 7 * head,
        Form::Chunk => span.rows * (6 * head + 2 * widths * span.rows.min(CELL_LEN)),
    });
    let operations = operations.sum::<usize>() * shape.value_heads;
    let row = inputs.qkv.width() + inputs.decay.width() + inputs.beta.width();
    let rows = inputs.qkv.count() * (row + shape.value_heads * shape.value_dim);
    let states = 2 * spans.len() * shape.value_heads * head;
    Work::f32(operations, (rows + states) * size_of::<f32>())
}

/// The output of one head in every row.
struct HeadRows<'a> {
    out: Shards<'a, f32>,
    stride: usize,
    head: usize,
    width: usize,
}

impl HeadRows<'_> {
    /// From the head's first value in `row` to its last in `row + rows - 1`.
    ///
    /// # Safety
    /// The caller is the one task that writes this head of these rows, and touches nothing else.
    unsafe fn start(&self, row: usize, rows: usize) -> *mut f32 {
        let at = row * self.stride + self.head * self.width;
        assert!(at + (rows - 1) * self.stride + self.width <= self.out.len());
        // SAFETY: in bounds by the assertion.
        unsafe { self.out.as_mut_ptr().add(at) }
    }
}

/// What all tasks share.
struct Job<'a> {
    cpu: &'a Cpu,
    shape: Shape,
    inputs: Inputs<'a>,
    parts: ArenaParts<'a>,
    at: usize,
}

impl Job<'_> {
    /// Computes the next row or chunk of the span after `done` rows; returns how many rows.
    fn advance(
        &self,
        span: &Span,
        head: usize,
        done: usize,
        out: &HeadRows<'_>,
        scratch: &mut [f32],
    ) -> usize {
        let to_grid = CELL_LEN - (span.start + done) % CELL_LEN;
        let rows = match span.form {
            Form::Step => 1,
            Form::Chunk => to_grid.min(span.rows - done),
        };
        let row = span.first_row + done;
        let (source, target) = self.head_state(span, head, done);
        // SAFETY: this task alone writes its head in the rows of its span.
        let out_start = unsafe { out.start(row, rows) };
        let out = (out_start, out.stride);
        let (shape, inputs) = (self.shape, self.inputs);
        match span.form {
            Form::Step => {
                self.cpu.isa.run(Step { shape, inputs, head, row, source, target, out, scratch });
            }
            Form::Chunk => {
                self.cpu.isa.run(Chunk {
                    shape,
                    inputs,
                    head,
                    row,
                    rows,
                    source,
                    target,
                    out,
                    scratch,
                });
            }
        }
        rows
    }

    /// The state a row or chunk reads and writes: of different slots at most at the span's start.
    #[allow(clippy::mut_from_ref)] // disjoint parts of the arena, as `ArenaParts` promises
    fn head_state(&self, span: &Span, head: usize, done: usize) -> (Option<&[f32]>, &mut [f32]) {
        let len = self.shape.head_state();
        let at = self.at + head * len * size_of::<f32>();
        // SAFETY: written slots are pairwise distinct and read by no other span, and this task
        // alone works on this head of the span's slots. Where both slots are one, the source is
        // not also given out.
        unsafe {
            let target = self.parts.f32s_mut(span.write + at, len);
            if done > 0 || span.read == span.write {
                return (None, target);
            }
            if span.read == NO_SLOT {
                target.fill(0.0);
                return (None, target);
            }
            (Some(self.parts.f32s(span.read + at, len)), target)
        }
    }

    fn copy_state(&self, from: usize, to: usize, head: usize) {
        let len = self.shape.head_state();
        let at = self.at + head * len * size_of::<f32>();
        // SAFETY: a snapshot's slot is distinct from every other slot of the batch, and this task
        // alone works on this head of the span's slots.
        unsafe {
            self.parts.f32s_mut(to + at, len).copy_from_slice(self.parts.f32s(from + at, len));
        }
    }
}
