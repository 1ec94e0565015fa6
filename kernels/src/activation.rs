//! Element-wise functions of the feed-forward parts.

use crate::device::Cpu;
use crate::meter::{SPECIAL, Work};
use crate::rows::{Rows, RowsMut};
use crate::simd::{Kernel, Simd, load, math, store};
use crate::threads::Shards;

/// Values per task.
const TASK_VALUES: usize = 16 << 10;

/// The definitions.
pub mod naive {
    use crate::rows::{Rows, RowsMut};

    /// `gate = gate * sigmoid(gate) * up`.
    pub fn silu_mul(mut gate: RowsMut<'_>, up: Rows<'_>) {
        for i in 0..gate.count() {
            for (g, u) in gate.row(i).iter_mut().zip(up.row(i)) {
                *g = *g / (1.0 + (-*g).exp()) * u;
            }
        }
    }

    /// `x = 1 / (1 + e^-x)`.
    pub fn sigmoid(mut x: RowsMut<'_>) {
        for i in 0..x.count() {
            x.row(i).iter_mut().for_each(|x| *x = 1.0 / (1.0 + (-*x).exp()));
        }
    }

    /// `x += y`.
    pub fn add(mut x: RowsMut<'_>, y: Rows<'_>) {
        for i in 0..x.count() {
            x.row(i).iter_mut().zip(y.row(i)).for_each(|(x, y)| *x += y);
        }
    }
}

/// `gate = silu(gate) * up` (SwiGLU, MODELS.md section 6).
///
/// # Panics
/// When the shapes differ.
pub fn silu_mul(cpu: &Cpu, gate: RowsMut<'_>, up: Rows<'_>) {
    in_place(cpu, gate, Some(up), Function::SiluMul);
}

/// `x = 1 / (1 + e^-x)`.
pub fn sigmoid(cpu: &Cpu, x: RowsMut<'_>) {
    in_place(cpu, x, None, Function::Sigmoid);
}

/// `x += y`.
///
/// # Panics
/// When the shapes differ.
pub fn add(cpu: &Cpu, x: RowsMut<'_>, y: Rows<'_>) {
    in_place(cpu, x, Some(y), Function::Add);
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Function {
    SiluMul,
    Sigmoid,
    Add,
}

impl Function {
    fn name(self) -> &'static str {
        match self {
            Function::SiluMul => "silu mul",
            Function::Sigmoid => "sigmoid",
            Function::Add => "add",
        }
    }

    /// What it takes for so many values.
    fn work(self, values: usize) -> Work {
        let (operations, touched) = match self {
            Function::SiluMul => (1 + SPECIAL, 3),
            Function::Sigmoid => (SPECIAL, 2),
            Function::Add => (1, 3),
        };
        Work::f32(values * operations, values * touched * size_of::<f32>())
    }
}

fn in_place(cpu: &Cpu, mut x: RowsMut<'_>, other: Option<Rows<'_>>, function: Function) {
    if let Some(other) = other {
        assert_eq!((x.count(), x.width()), (other.count(), other.width()), "shapes differ");
    }
    let (count, width, stride) = (x.count(), x.width(), x.stride());
    let _timed = cpu.meter.time(function.name(), || function.work(count * width));
    let per_task = (TASK_VALUES / width.max(1)).max(1);
    let shards = Shards::new(x.data());
    cpu.gang.run(count.div_ceil(per_task), |_, task| {
        for i in task * per_task..count.min((task + 1) * per_task) {
            // SAFETY: row i belongs to one task.
            let x = unsafe { shards.slice_mut(i * stride..i * stride + width) };
            cpu.isa.run(InPlace { x, other: other.map(|o| o.row(i)), function });
        }
    });
}

/// One row of a function.
struct InPlace<'a> {
    x: &'a mut [f32],
    other: Option<&'a [f32]>,
    function: Function,
}

impl Kernel for InPlace<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut at = 0;
        while at < self.x.len() {
            let n = (self.x.len() - at).min(S::LANES);
            let x = load(s, &self.x[at..], n);
            let other = match self.other {
                Some(other) => load(s, &other[at..], n),
                None => x,
            };
            let y = match self.function {
                Function::SiluMul => s.mul(math::silu(s, x), other),
                Function::Sigmoid => math::sigmoid(s, x),
                Function::Add => s.add(x, other),
            };
            store(s, &mut self.x[at..], n, y);
            at += n;
        }
    }
}
