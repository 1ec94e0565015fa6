//! The fast form: strips of the product shared among the threads.

use std::ops::Range;

use half::bf16;

use super::pairs::{MultiplyPairs, Pair};
use super::strip::Multiply;
use crate::device::{Compute, Cpu};
use crate::matrix::Values;
use crate::meter::Work;
use crate::narrow::NarrowRows;
use crate::panels::{PANEL_LEN, Panels, StoredPanels};
use crate::quant::strip::MultiplyInt8;
use crate::quant::{Group, QuantizedPanels};
use crate::rows::{Rows, RowsMut};
use crate::threads::Shards;

/// `out = x wᵀ`; `narrow` is working memory for `x` in fewer bits.
///
/// # Panics
/// When the shapes do not fit.
pub fn gemm(cpu: &Cpu, x: Rows<'_>, w: Panels<'_>, narrow: &mut NarrowRows, out: RowsMut<'_>) {
    any(cpu, x, w, narrow, out, false);
}

/// `out += x wᵀ`; `narrow` is working memory for `x` in fewer bits.
///
/// # Panics
/// When the shapes do not fit.
pub fn gemm_add(cpu: &Cpu, x: Rows<'_>, w: Panels<'_>, narrow: &mut NarrowRows, out: RowsMut<'_>) {
    any(cpu, x, w, narrow, out, true);
}

fn any(
    cpu: &Cpu,
    x: Rows<'_>,
    w: Panels<'_>,
    narrow: &mut NarrowRows,
    out: RowsMut<'_>,
    add: bool,
) {
    assert_eq!((x.width(), out.width()), (w.cols(), w.rows()), "x or out does not fit the weights");
    assert_eq!(x.count(), out.count(), "x and out do not fit each other");
    cpu.count_product();
    let _timed = cpu.meter.time(name(x.count()), || work(cpu, x, w));
    match w {
        Panels::Stored(w) => match w.values() {
            Values::Bf16(values) if cpu.compute == Compute::Bf16 => {
                product_bf16(cpu, narrow.round(cpu, x), values, out, add);
            }
            _ => product(cpu, x, w, out, add),
        },
        Panels::Quantized(w) => product_int8(cpu, narrow.quantize(cpu, x), w, out, add),
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

fn work(cpu: &Cpu, x: Rows<'_>, w: Panels<'_>) -> Work {
    let (rows, weights) = (x.count(), w.rows() * w.cols());
    let values = rows * (w.rows() + w.cols()) * size_of::<f32>();
    Work {
        operations: (2 * rows * weights) as f64,
        bytes: (w.bytes() + values) as f64,
        arithmetic: w.arithmetic(cpu),
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

/// How a product is cut into tasks; changes who computes an output, never how.
struct Cut {
    rows: usize,
    panels: usize,
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
        Cut { rows: rows_per_task, panels }
    }

    /// Calls `body` with the rows and the outputs of each task.
    fn for_each_task(
        &self,
        cpu: &Cpu,
        (rows, outputs): (usize, usize),
        body: impl Fn(Range<usize>, Range<usize>) + Sync,
    ) {
        let row_tasks = rows.div_ceil(self.rows);
        let columns = self.panels * PANEL_LEN;
        cpu.gang.run(row_tasks * outputs.div_ceil(columns), |_, task| {
            let (i, j) = (task % row_tasks * self.rows, task / row_tasks * columns);
            body(i..rows.min(i + self.rows), j..outputs.min(j + columns));
        });
    }
}

fn product(cpu: &Cpu, x: Rows<'_>, w: StoredPanels<'_>, mut out: RowsMut<'_>, add: bool) {
    let (rows, outputs) = (x.count(), out.width());
    if rows == 0 || outputs == 0 {
        return;
    }
    let row_bytes = x.width() * size_of::<f32>();
    let cut = Cut::new(cpu, rows, row_bytes, outputs.div_ceil(PANEL_LEN), x.width());
    let out_stride = out.stride();
    let out = Shards::new(out.data());
    cut.for_each_task(cpu, (rows, outputs), |rows, outputs| {
        // SAFETY: the rows and outputs lie inside x, w and out, whose shapes were compared above;
        // tasks have disjoint outputs, and only these are touched.
        let multiply = unsafe {
            let x = (x.data().as_ptr().add(rows.start * x.stride()), x.stride());
            let out = out.as_mut_ptr().add(rows.start * out_stride + outputs.start);
            let w = w.slice_rows(outputs.start, outputs.len());
            Multiply::new(rows.len(), x, w, (out, out_stride), add)
        };
        cpu.isa.run(multiply);
    });
}

/// As [`product`], `x` being the groups of `out.count()` rows.
fn product_int8(cpu: &Cpu, x: &[Group], w: QuantizedPanels<'_>, mut out: RowsMut<'_>, add: bool) {
    let (rows, outputs) = (out.count(), out.width());
    if rows == 0 || outputs == 0 {
        return;
    }
    let groups = x.len() / rows;
    let row_bytes = groups * size_of::<Group>();
    let cut = Cut::new(cpu, rows, row_bytes, outputs.div_ceil(PANEL_LEN), w.cols());
    let out_stride = out.stride();
    let out = Shards::new(out.data());
    cut.for_each_task(cpu, (rows, outputs), |rows, outputs| {
        let x = &x[rows.start * groups..rows.end * groups];
        let w = w.slice_rows(outputs.start, outputs.len());
        // SAFETY: the rows and outputs lie inside out, whose shape was compared above; tasks have
        // disjoint outputs, and only these are touched.
        let multiply = unsafe {
            let out = out.as_mut_ptr().add(rows.start * out_stride + outputs.start);
            MultiplyInt8::new(rows.len(), x, w, (out, out_stride), add)
        };
        cpu.isa.run(multiply);
    });
}

/// As [`product`], `x` being the pairs of `out.count()` rows, `w` whole panels.
fn product_bf16(cpu: &Cpu, x: &[Pair], w: &[bf16], mut out: RowsMut<'_>, add: bool) {
    let (rows, outputs) = (out.count(), out.width());
    if rows == 0 || outputs == 0 {
        return;
    }
    let pairs = x.len() / rows;
    let row_bytes = pairs * size_of::<Pair>();
    let cut = Cut::new(cpu, rows, row_bytes, outputs.div_ceil(PANEL_LEN), 2 * pairs);
    let out_stride = out.stride();
    let out = Shards::new(out.data());
    cut.for_each_task(cpu, (rows, outputs), |rows, outputs| {
        let x = &x[rows.start * pairs..rows.end * pairs];
        let panels = outputs.start / PANEL_LEN..outputs.end.div_ceil(PANEL_LEN);
        let panel_values = 2 * pairs * PANEL_LEN;
        let w = &w[panels.start * panel_values..panels.end * panel_values];
        // SAFETY: the rows and outputs lie inside out, whose shape was compared above; tasks have
        // disjoint outputs, and only these are touched.
        let multiply = unsafe {
            let out = out.as_mut_ptr().add(rows.start * out_stride + outputs.start);
            MultiplyPairs::new(rows.len(), x, (w, outputs.len()), (out, out_stride), add)
        };
        cpu.isa.run(multiply);
    });
}
