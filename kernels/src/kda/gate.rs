//! The decay gate.

use super::Gate;
use crate::device::Cpu;
use crate::meter::{SPECIAL, Work};
use crate::rows::RowsMut;
use crate::simd::{Kernel, Simd, load, math, store};
use crate::threads::Shards;

/// Turns the raw gate into log-decays where it lies: `raw` is `[rows][heads * group]`, `a_log`
/// `[heads]`, `bias` `[heads * group]`; `group` is the key width, or 1 for one decay a head.
///
/// # Panics
/// When the shapes do not fit.
pub fn gate(cpu: &Cpu, kind: Gate, a_log: &[f32], bias: &[f32], mut raw: RowsMut<'_>) {
    let group = bias.len() / a_log.len();
    assert_eq!((bias.len(), raw.width()), (a_log.len() * group, bias.len()));
    let (heads, stride) = (a_log.len(), raw.stride());
    let tasks = raw.count() * heads;
    let _timed = cpu.meter.time("kda gate", || {
        let values = tasks * group;
        Work::f32(values * (2 + SPECIAL), 2 * values * size_of::<f32>())
    });
    let shards = Shards::new(raw.data());
    // A task is a few heads of a row: enough work to be worth taking.
    let per_task = (2048 / group).max(1);
    cpu.gang.run(tasks.div_ceil(per_task), |_, task| {
        for i in task * per_task..tasks.min((task + 1) * per_task) {
            let (row, head) = (i / heads, i % heads);
            let at = row * stride + head * group;
            // SAFETY: this head of this row belongs to one task.
            let raw = unsafe { shards.slice_mut(at..at + group) };
            let bias = &bias[head * group..(head + 1) * group];
            cpu.isa.run(GateHead { kind, rate: a_log[head].exp(), bias, raw });
        }
    });
}

struct GateHead<'a> {
    kind: Gate,
    rate: f32,
    bias: &'a [f32],
    raw: &'a mut [f32],
}

impl Kernel for GateHead<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut at = 0;
        while at < self.raw.len() {
            let n = (self.raw.len() - at).min(S::LANES);
            let z = s.add(load(s, &self.raw[at..], n), load(s, &self.bias[at..], n));
            let g = match self.kind {
                Gate::Softplus => s.mul(s.splat(-self.rate), math::softplus(s, z)),
                Gate::Bounded { lower } => {
                    s.mul(s.splat(lower), math::sigmoid(s, s.mul(s.splat(self.rate), z)))
                }
            };
            store(s, &mut self.raw[at..], n, g);
            at += n;
        }
    }
}
