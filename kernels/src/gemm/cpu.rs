//! The fast form: tiles of the product shared among the threads.

use crate::device::Cpu;
use crate::gemm::tile::Nt;
use crate::matrix::{Matrix, Values};
use crate::rows::{Rows, RowsMut};
use crate::simd::Element;
use crate::threads::Shards;

/// `out = x wᵀ`.
///
/// # Panics
/// When the shapes do not fit.
pub fn gemm(cpu: &Cpu, x: Rows<'_>, w: Matrix<'_>, out: RowsMut<'_>) {
    any_dtype(cpu, x, w, out, false);
}

/// `out += x wᵀ`.
///
/// # Panics
/// When the shapes do not fit.
pub fn gemm_add(cpu: &Cpu, x: Rows<'_>, w: Matrix<'_>, out: RowsMut<'_>) {
    any_dtype(cpu, x, w, out, true);
}

fn any_dtype(cpu: &Cpu, x: Rows<'_>, w: Matrix<'_>, out: RowsMut<'_>, add: bool) {
    assert_eq!((x.width(), out.width()), (w.cols, w.rows), "x or out does not fit the weights");
    cpu.count_product();
    match w.values {
        Values::F32(values) => product(cpu, x, values, out, add),
        Values::Bf16(values) => product(cpu, x, values, out, add),
        Values::F16(values) => product(cpu, x, values, out, add),
    }
}

/// Bytes of `x` that a task goes over once per strip of `w`: they stay in the second-level cache.
const X_BLOCK_BYTES: usize = 192 << 10;
/// Least bytes of weights per task: below this, taking a task costs more than it brings.
const LEAST_TASK_BYTES: usize = 32 << 10;
/// Rows and columns of a task are multiples of this, as far as there are enough of them.
const STEP: usize = 12;

/// How a product is cut into tasks; changes who computes an output, never how.
struct Cut {
    rows: usize,
    columns: usize,
}

impl Cut {
    fn new(cpu: &Cpu, m: usize, n: usize, k: usize) -> Cut {
        let bytes_per_row = k * size_of::<f32>();
        let rows = (X_BLOCK_BYTES / bytes_per_row.max(1) / STEP).max(1) * STEP;
        let row_tasks = m.div_ceil(rows);
        let wanted = (4 * cpu.gang.threads()).div_ceil(row_tasks);
        let least = LEAST_TASK_BYTES.div_ceil(bytes_per_row * m.min(8)).max(STEP);
        let columns = n.div_ceil(wanted).max(least).next_multiple_of(STEP);
        Cut { rows, columns }
    }
}

fn product<E: Element>(cpu: &Cpu, x: Rows<'_>, w: &[E], mut out: RowsMut<'_>, add: bool) {
    let (m, n, k) = (x.count(), out.width(), x.width());
    assert_eq!((m, n * k), (out.count(), w.len()), "x, w and out do not fit each other");
    if m == 0 || n == 0 {
        return;
    }
    let cut = Cut::new(cpu, m, n, k);
    let (row_tasks, column_tasks) = (m.div_ceil(cut.rows), n.div_ceil(cut.columns));
    let out_stride = out.stride();
    let out = Shards::new(out.data());
    cpu.gang.run(row_tasks * column_tasks, |_, task| {
        let (i, j) = (task % row_tasks * cut.rows, task / row_tasks * cut.columns);
        let (m, n) = (cut.rows.min(m - i), cut.columns.min(n - j));
        // SAFETY: the tile i..i + m, j..j + n lies inside x, w and out, whose shapes were compared
        // above; tasks have disjoint tiles, and only the tile's own values are touched.
        let tile = unsafe {
            let rows = (x.data().as_ptr().add(i * x.stride()), x.stride());
            let out = (out.as_mut_ptr().add(i * out_stride + j), out_stride);
            Nt::new((m, n, k), rows, (w.as_ptr().add(j * k), k), out, add)
        };
        cpu.isa.run(tile);
    });
}
