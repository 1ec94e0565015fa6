//! The fast forms: rows shared among the threads, one pass for the sum and one to write.

use super::{GateKind, L2_EPS, Scale};
use crate::device::Cpu;
use crate::meter::{SPECIAL, Work};
use crate::rows::{Rows, RowsMut};
use crate::simd::{Kernel, Simd, load, math, store};
use crate::threads::Shards;

/// Values per task, so that a decode step's few rows stay on the calling thread.
const TASK_VALUES: usize = 16 << 10;

/// `out = x / sqrt(mean(x²) + eps) * w`, row by row.
///
/// # Panics
/// When the shapes do not fit.
pub fn rms_norm(cpu: &Cpu, x: Rows<'_>, scale: Scale<'_>, eps: f32, mut out: RowsMut<'_>) {
    let (weights, offset) = scale.weights();
    assert_eq!((x.count(), x.width()), (out.count(), out.width()));
    assert_eq!(weights.len(), x.width());
    let (stride, width) = (out.stride(), out.width());
    let _timed = cpu.meter.time("rms norm", || work(x.count() * width, 4, 2));
    let shards = Shards::new(out.data());
    for_each_row(cpu, x.count(), width, |i| {
        // SAFETY: row i belongs to one task.
        let out = unsafe { shards.slice_mut(i * stride..i * stride + width) };
        cpu.isa.run(Rms { x: x.row(i), weights, offset, eps, gate: None, out });
    });
}

/// [`rms_norm`] of rows where they lie.
///
/// # Panics
/// When the shapes do not fit.
pub fn rms_norm_in_place(cpu: &Cpu, mut x: RowsMut<'_>, scale: Scale<'_>, eps: f32) {
    let (weights, offset) = scale.weights();
    assert_eq!(weights.len(), x.width());
    let (count, stride, width) = (x.count(), x.stride(), x.width());
    let _timed = cpu.meter.time("rms norm", || work(count * width, 4, 2));
    let shards = Shards::new(x.data());
    for_each_row(cpu, count, width, |i| {
        // SAFETY: row i belongs to one task.
        let row = unsafe { shards.slice_mut(i * stride..i * stride + width) };
        cpu.isa.run(RmsInPlace { row, weights, offset, eps });
    });
}

/// [`rms_norm`] times `sigmoid(gate)` or `silu(gate)`.
///
/// # Panics
/// When the shapes do not fit.
pub fn rms_norm_gated(
    cpu: &Cpu,
    x: Rows<'_>,
    weights: &[f32],
    eps: f32,
    gate: Rows<'_>,
    kind: GateKind,
    mut out: RowsMut<'_>,
) {
    assert_eq!((x.count(), x.width()), (out.count(), out.width()));
    assert_eq!((x.count(), x.width()), (gate.count(), gate.width()));
    assert_eq!(weights.len(), x.width());
    let (stride, width) = (out.stride(), out.width());
    let _timed = cpu.meter.time("rms norm gated", || work(x.count() * width, 5 + SPECIAL, 3));
    let shards = Shards::new(out.data());
    for_each_row(cpu, x.count(), width, |i| {
        // SAFETY: row i belongs to one task.
        let out = unsafe { shards.slice_mut(i * stride..i * stride + width) };
        let gate = Some((gate.row(i), kind));
        cpu.isa.run(Rms { x: x.row(i), weights, offset: 0.0, eps, gate, out });
    });
}

/// `out = x / sqrt(Σx² + 1e-6) * scale`, row by row.
///
/// # Panics
/// When the shapes do not fit.
pub fn l2_norm(cpu: &Cpu, x: Rows<'_>, scale: f32, mut out: RowsMut<'_>) {
    assert_eq!((x.count(), x.width()), (out.count(), out.width()));
    let (stride, width) = (out.stride(), out.width());
    let _timed = cpu.meter.time("l2 norm", || work(x.count() * width, 3, 2));
    let shards = Shards::new(out.data());
    for_each_row(cpu, x.count(), width, |i| {
        // SAFETY: row i belongs to one task.
        let out = unsafe { shards.slice_mut(i * stride..i * stride + width) };
        cpu.isa.run(L2 { x: x.row(i), scale, out });
    });
}

/// `values` values with `operations` each, of which `touched` rows are read or written.
fn work(values: usize, operations: usize, touched: usize) -> Work {
    Work::f32(values * operations, values * touched * size_of::<f32>())
}

fn for_each_row(cpu: &Cpu, rows: usize, width: usize, body: impl Fn(usize) + Sync) {
    let per_task = (TASK_VALUES / width.max(1)).max(1);
    cpu.gang.run(rows.div_ceil(per_task), |_, task| {
        (task * per_task..rows.min((task + 1) * per_task)).for_each(&body);
    });
}

struct Rms<'a> {
    x: &'a [f32],
    weights: &'a [f32],
    offset: f32,
    eps: f32,
    gate: Option<(&'a [f32], GateKind)>,
    out: &'a mut [f32],
}

impl Kernel for Rms<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = self.x.len();
        let factor = s.splat(1.0 / (sum_of_squares(s, self.x) / width as f32 + self.eps).sqrt());
        let offset = s.splat(self.offset);
        let mut at = 0;
        while at < width {
            let n = (width - at).min(S::LANES);
            let w = s.add(load(s, &self.weights[at..], n), offset);
            let mut y = s.mul(s.mul(load(s, &self.x[at..], n), factor), w);
            if let Some((gate, kind)) = self.gate {
                let gate = load(s, &gate[at..], n);
                y = s.mul(
                    y,
                    match kind {
                        GateKind::Sigmoid => math::sigmoid(s, gate),
                        GateKind::Silu => math::silu(s, gate),
                    },
                );
            }
            store(s, &mut self.out[at..], n, y);
            at += n;
        }
    }
}

struct RmsInPlace<'a> {
    row: &'a mut [f32],
    weights: &'a [f32],
    offset: f32,
    eps: f32,
}

impl Kernel for RmsInPlace<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = self.row.len();
        let mean = sum_of_squares(s, self.row) / width as f32;
        let factor = s.splat(1.0 / (mean + self.eps).sqrt());
        let offset = s.splat(self.offset);
        let mut at = 0;
        while at < width {
            let n = (width - at).min(S::LANES);
            let w = s.add(load(s, &self.weights[at..], n), offset);
            let y = s.mul(s.mul(load(s, &self.row[at..], n), factor), w);
            store(s, &mut self.row[at..], n, y);
            at += n;
        }
    }
}

struct L2<'a> {
    x: &'a [f32],
    scale: f32,
    out: &'a mut [f32],
}

impl Kernel for L2<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        l2_norm_row(s, self.x, self.scale, self.out);
    }
}

/// `out = x / sqrt(Σx² + 1e-6) * scale` for one row.
#[inline(always)]
pub(crate) fn l2_norm_row<S: Simd>(s: S, x: &[f32], scale: f32, out: &mut [f32]) {
    let factor = s.splat(scale / (sum_of_squares(s, x) + L2_EPS).sqrt());
    let mut at = 0;
    while at < x.len() {
        let n = (x.len() - at).min(S::LANES);
        store(s, &mut out[at..], n, s.mul(load(s, &x[at..], n), factor));
        at += n;
    }
}

#[inline(always)]
fn sum_of_squares<S: Simd>(s: S, x: &[f32]) -> f32 {
    let mut acc = s.splat(0.0);
    let mut at = 0;
    while at < x.len() {
        let n = (x.len() - at).min(S::LANES);
        let v = load(s, &x[at..], n);
        acc = s.fma(v, v, acc);
        at += n;
    }
    s.sum(acc)
}
