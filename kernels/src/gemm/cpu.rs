//! The fast form: strips of the product shared among the threads.

use super::strip::Multiply;
use crate::device::Cpu;
use crate::meter::Work;
use crate::panels::{PANEL_LEN, Panels};
use crate::rows::{Rows, RowsMut};
use crate::threads::Shards;

/// `out = x wᵀ`.
///
/// # Panics
/// When the shapes do not fit.
pub fn gemm(cpu: &Cpu, x: Rows<'_>, w: Panels<'_>, out: RowsMut<'_>) {
    any_dtype(cpu, x, w, out, false);
}

/// `out += x wᵀ`.
///
/// # Panics
/// When the shapes do not fit.
pub fn gemm_add(cpu: &Cpu, x: Rows<'_>, w: Panels<'_>, out: RowsMut<'_>) {
    any_dtype(cpu, x, w, out, true);
}

fn any_dtype(cpu: &Cpu, x: Rows<'_>, w: Panels<'_>, out: RowsMut<'_>, add: bool) {
    assert_eq!((x.width(), out.width()), (w.cols(), w.rows()), "x or out does not fit the weights");
    assert_eq!(x.count(), out.count(), "x and out do not fit each other");
    cpu.count_product();
    let _timed = cpu.meter.time(name(x.count()), || work(x, w));
    product(cpu, x, w, out, add);
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

fn work(x: Rows<'_>, w: Panels<'_>) -> Work {
    let (rows, weights) = (x.count(), w.rows() * w.cols());
    let values = rows * (w.rows() + w.cols()) * size_of::<f32>();
    Work::f32(2 * rows * weights, weights * w.values().dtype().bytes() + values)
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
    fn new(cpu: &Cpu, rows: usize, panels: usize, inputs: usize) -> Cut {
        let bytes_per_row = inputs * size_of::<f32>();
        let rows_per_task = (X_BLOCK_BYTES / bytes_per_row.max(1) / ROWS).max(1) * ROWS;
        let row_tasks = rows.div_ceil(rows_per_task);
        let wanted = (4 * cpu.gang.threads()).div_ceil(row_tasks);
        let least = LEAST_TASK_BYTES.div_ceil((bytes_per_row * PANEL_LEN * rows.min(8)).max(1));
        let panels = panels.div_ceil(wanted).max(least).next_multiple_of(PANELS);
        Cut { rows: rows_per_task, panels }
    }
}

fn product(cpu: &Cpu, x: Rows<'_>, w: Panels<'_>, mut out: RowsMut<'_>, add: bool) {
    let (rows, outputs) = (x.count(), out.width());
    if rows == 0 || outputs == 0 {
        return;
    }
    let panels = outputs.div_ceil(PANEL_LEN);
    let cut = Cut::new(cpu, rows, panels, x.width());
    let (row_tasks, panel_tasks) = (rows.div_ceil(cut.rows), panels.div_ceil(cut.panels));
    let out_stride = out.stride();
    let out = Shards::new(out.data());
    cpu.gang.run(row_tasks * panel_tasks, |_, task| {
        let (i, j) = (task % row_tasks * cut.rows, task / row_tasks * cut.panels * PANEL_LEN);
        let (rows, outputs) = (cut.rows.min(rows - i), (cut.panels * PANEL_LEN).min(outputs - j));
        // SAFETY: rows i.. and outputs j.. lie inside x, w and out, whose shapes were compared
        // above; tasks have disjoint outputs, and only these are touched.
        let multiply = unsafe {
            let x = (x.data().as_ptr().add(i * x.stride()), x.stride());
            let out = (out.as_mut_ptr().add(i * out_stride + j), out_stride);
            Multiply::new(rows, x, w.slice_rows(j, outputs), out, add)
        };
        cpu.isa.run(multiply);
    });
}
