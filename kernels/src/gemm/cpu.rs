//! The fast form: strips of products shared among the threads.

use std::ops::Range;

use super::inputs::{Form, Inputs};
use super::strip::block_inputs;
use crate::activation;
use crate::device::Cpu;
use crate::meter::Work;
use crate::narrow::NarrowRows;
use crate::panels::{PANEL_LEN, Panels};
use crate::rows::{Rows, RowsMut};
use crate::threads::Shards;

/// Most matrices that [`gemm_each`] is given.
pub const MOST_MATRICES: usize = 8;

/// Matrices whose outputs lie beside each other.
#[derive(Debug)]
pub struct Product<'a> {
    /// The matrices.
    pub w: &'a [Panels<'a>],
    /// As wide as all of them have outputs.
    pub out: RowsMut<'a>,
}

/// `out = x wᵀ`; `narrow` is working memory for `x` in fewer bits.
///
/// # Panics
/// When the shapes do not fit.
pub fn gemm(cpu: &Cpu, x: Rows<'_>, w: Panels<'_>, narrow: &mut NarrowRows, out: RowsMut<'_>) {
    each(cpu, x, [Product { w: &[w], out }], narrow, false);
}

/// `out += x wᵀ`; `narrow` is working memory for `x` in fewer bits.
///
/// # Panics
/// When the shapes do not fit.
pub fn gemm_add(cpu: &Cpu, x: Rows<'_>, w: Panels<'_>, narrow: &mut NarrowRows, out: RowsMut<'_>) {
    if block(cpu, w, x.count()) >= w.cols() {
        return each(cpu, x, [Product { w: &[w], out }], narrow, true);
    }
    // Chains wait in their outputs between blocks of inputs, where something is already.
    let len = x.count() * w.rows();
    let mut sums = narrow.take_sums(len);
    gemm(cpu, x, w, narrow, RowsMut::new(&mut sums[..len], w.rows()));
    activation::add(cpu, out, Rows::new(&sums[..len], w.rows()));
    narrow.give_sums(sums);
}

/// `out = x wᵀ` for each of some products of the same rows. They are brought into fewer bits once,
/// and the threads meet once, not after each matrix.
///
/// # Panics
/// When the shapes do not fit, or there are more than [`MOST_MATRICES`] matrices.
pub fn gemm_each<'a>(
    cpu: &Cpu,
    x: Rows<'_>,
    products: impl IntoIterator<Item = Product<'a>>,
    narrow: &mut NarrowRows,
) {
    each(cpu, x, products, narrow, false);
}

/// A matrix and where its outputs go.
#[derive(Clone, Copy)]
struct Target<'a> {
    w: Panels<'a>,
    form: Form,
    out: Shards<'a, f32>,
    /// The column of its first output, and the values from one row to the next.
    column: usize,
    stride: usize,
}

/// Inputs of `w` that `rows` rows go over at a time.
fn block(cpu: &Cpu, w: Panels<'_>, rows: usize) -> usize {
    match w {
        Panels::Stored(stored) if Form::of(cpu, w) == Form::Stored => block_inputs(rows, stored),
        w => w.cols(),
    }
}

fn each<'a>(
    cpu: &Cpu,
    x: Rows<'_>,
    products: impl IntoIterator<Item = Product<'a>>,
    narrow: &mut NarrowRows,
    add: bool,
) {
    let mut targets = [const { None }; MOST_MATRICES];
    let mut places = targets.iter_mut();
    for Product { w: matrices, out } in products {
        assert_eq!(x.count(), out.count(), "x and out do not fit each other");
        let (width, stride) = (out.width(), out.stride());
        let shards = Shards::new(out.into_data());
        let mut column = 0;
        for &w in matrices {
            assert_eq!(x.width(), w.cols(), "x does not fit the weights");
            cpu.count_product();
            let place = places.next().expect("a call of few matrices");
            *place = Some(Target { w, form: Form::of(cpu, w), out: shards, column, stride });
            column += w.rows();
        }
        assert_eq!(width, column, "out does not fit the weights");
    }
    for form in [Form::Stored, Form::Bf16, Form::Int8] {
        let targets = || targets.iter().flatten().filter(move |target| target.form == form);
        let panels = targets().map(|target| target.w.rows().div_ceil(PANEL_LEN)).sum();
        if x.count() == 0 || panels == 0 {
            continue;
        }
        let _timed = cpu.meter.time(name(x.count()), || work(cpu, x, targets().map(|t| t.w)));
        let inputs = match form {
            Form::Stored => Inputs::Stored(x),
            Form::Bf16 => Inputs::Bf16(narrow.round(cpu, x), form.per_row(x.width())),
            Form::Int8 => Inputs::Int8(narrow.quantize(cpu, x), form.per_row(x.width())),
        };
        let block = targets().map(|target| block(cpu, target.w, x.count())).max();
        let row_bytes = form.row_bytes(block.unwrap_or(x.width()));
        let cut = Cut::new(cpu, x.count(), row_bytes, panels, x.width());
        let tasks = |target: &Target<'_>| cut.tasks(x.count(), target.w.rows());
        cpu.gang.run(targets().map(tasks).sum(), |_, task| {
            let mut left = task;
            let target = targets().find(|target| {
                let of_others = left >= tasks(target);
                left -= if of_others { tasks(target) } else { 0 };
                !of_others
            });
            let target = target.expect("the task of one of the matrices");
            let (rows, outputs) = cut.task(left, x.count(), target.w.rows());
            let at = rows.start * target.stride + target.column + outputs.start;
            // SAFETY: the rows and outputs lie inside `out`, whose shape was compared above; each
            // task has outputs of its own.
            unsafe {
                let out = (target.out.as_mut_ptr().add(at), target.stride);
                inputs.multiply(cpu, rows, (target.w, outputs), out, add);
            }
        });
    }
}

/// One row, and few of them, are bound by the reads of weights.
fn name(rows: usize) -> &'static str {
    match rows {
        0..=1 => "gemm, 1 row",
        2..=8 => "gemm, 2 to 8 rows",
        9..=64 => "gemm, 9 to 64 rows",
        _ => "gemm, above 64 rows",
    }
}

/// That of products with matrices of one form; `x` is read once.
fn work<'a>(cpu: &Cpu, x: Rows<'_>, matrices: impl Iterator<Item = Panels<'a>> + Clone) -> Work {
    let outputs: usize = matrices.clone().map(|w| w.rows()).sum();
    let weights: usize = matrices.clone().map(|w| w.bytes()).sum();
    let values = x.count() * (outputs + x.width()) * size_of::<f32>();
    Work {
        operations: (2 * x.count() * outputs * x.width()) as f64,
        bytes: (weights + values) as f64,
        arithmetic: matrices.last().expect("a product has a matrix").arithmetic(cpu),
    }
}

/// Bytes of `x` that a task goes over once per panel: they stay in the second-level cache.
const X_BLOCK_BYTES: usize = 192 << 10;
/// Least bytes of weights per task: below this, taking a task costs more than it brings.
const LEAST_TASK_BYTES: usize = 32 << 10;
/// Panels of a task are a multiple of this, as far as there are enough of them.
const PANELS: usize = 4;
/// Rows of a task are a multiple of this, as far as there are enough of them.
const ROWS: usize = 30;

/// How products are cut into tasks; changes who computes an output, never how.
struct Cut {
    rows: usize,
    outputs: usize,
}

impl Cut {
    /// For `rows` rows of `row_bytes` bytes against `panels` panels of `inputs` inputs.
    fn new(cpu: &Cpu, rows: usize, row_bytes: usize, panels: usize, inputs: usize) -> Cut {
        let rows_per_task = (X_BLOCK_BYTES / row_bytes.max(1) / ROWS).max(1) * ROWS;
        let row_tasks = rows.div_ceil(rows_per_task);
        let wanted = (4 * cpu.gang.threads()).div_ceil(row_tasks);
        let panel_bytes = inputs * size_of::<f32>() * PANEL_LEN;
        let least = LEAST_TASK_BYTES.div_ceil((panel_bytes * rows.min(8)).max(1));
        let panels = panels.div_ceil(wanted).max(least).next_multiple_of(PANELS);
        Cut { rows: rows_per_task, outputs: panels * PANEL_LEN }
    }

    /// Tasks of a product.
    fn tasks(&self, rows: usize, outputs: usize) -> usize {
        rows.div_ceil(self.rows) * outputs.div_ceil(self.outputs)
    }

    /// Rows and outputs of one of them.
    fn task(&self, task: usize, rows: usize, outputs: usize) -> (Range<usize>, Range<usize>) {
        let row_tasks = rows.div_ceil(self.rows);
        let (i, j) = (task % row_tasks * self.rows, task / row_tasks * self.outputs);
        (i..rows.min(i + self.rows), j..outputs.min(j + self.outputs))
    }
}
