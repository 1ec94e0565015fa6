//! The fast expert products: tokens are sorted by expert, so that its weights are read once.

use super::Choice;
use crate::device::Cpu;
use crate::gemm::strip::Multiply;
use crate::meter::Work;
use crate::panels::{PANEL_LEN, Panels};
use crate::rows::{Rows, RowsMut};
use crate::simd::{Kernel, Simd, load, math, store};
use crate::threads::Shards;

/// Weights of one expert: [`Panels`], or a [`Matrix`](crate::Matrix) for the definition.
#[derive(Debug, Clone, Copy)]
pub struct ExpertWeights<W> {
    /// `[inter, hidden]`.
    pub gate: W,
    /// `[inter, hidden]`.
    pub up: W,
    /// `[hidden, inter]`.
    pub down: W,
}

/// Working memory of [`experts`], made once for the largest batch.
#[derive(Debug)]
pub struct Workspace {
    /// For each expert, where its pairs start; one more than experts.
    starts: Vec<usize>,
    /// Experts with at least one pair.
    active: Vec<usize>,
    /// For each choice of each token, its pair.
    pair_of: Vec<usize>,
    /// Inputs, gates, ups and outputs of the pairs.
    x: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    y: Vec<f32>,
}

impl Workspace {
    /// For up to `rows` tokens with `top_k` of `experts` experts.
    pub fn new(
        rows: usize,
        top_k: usize,
        experts: usize,
        hidden: usize,
        inter: usize,
    ) -> Workspace {
        let pairs = rows * top_k;
        Workspace {
            starts: vec![0; experts + 1],
            active: Vec::with_capacity(experts),
            pair_of: vec![0; pairs],
            x: vec![0.0; pairs * hidden],
            gate: vec![0.0; pairs * inter],
            up: vec![0.0; pairs * inter],
            y: vec![0.0; pairs * hidden],
        }
    }

    /// Overwrites all values: tests poison what kernels must not rely on.
    pub fn fill(&mut self, value: f32) {
        for buffer in [&mut self.x, &mut self.gate, &mut self.up, &mut self.y] {
            buffer.fill(value);
        }
    }

    /// Sorts the choices by expert, tokens in order within one.
    fn sort(&mut self, choices: &[Choice]) {
        self.starts.fill(0);
        for choice in choices {
            self.starts[choice.expert as usize + 1] += 1;
        }
        self.active.clear();
        for e in 1..self.starts.len() {
            if self.starts[e] > 0 {
                self.active.push(e - 1);
            }
            self.starts[e] += self.starts[e - 1];
        }
        for (i, choice) in choices.iter().enumerate() {
            let next = &mut self.starts[choice.expert as usize];
            self.pair_of[i] = *next;
            *next += 1;
        }
        // Each start has moved to its end, which is the next one's start: move them back.
        self.starts.rotate_right(1);
        self.starts[0] = 0;
    }
}

/// `out = Σ weight · down(silu(gate x) · up x)` over each row's choices; `choices` is
/// `[rows][top_k]`, by ascending expert within a row.
///
/// # Panics
/// When the shapes do not fit or the workspace is too small.
pub fn experts(
    cpu: &Cpu,
    x: Rows<'_>,
    choices: &[Choice],
    weights: &[ExpertWeights<Panels<'_>>],
    work: &mut Workspace,
    mut out: RowsMut<'_>,
) {
    assert_eq!((x.count(), x.width()), (out.count(), out.width()));
    assert_eq!(weights.len() + 1, work.starts.len());
    if x.count() == 0 {
        return;
    }
    let top_k = choices.len() / x.count();
    assert_eq!(top_k * x.count(), choices.len());
    let hidden = x.width();
    let inter = weights[0].gate.rows();
    let fits = |expert: &ExpertWeights<Panels<'_>>| {
        let sizes = [expert.gate, expert.up, expert.down].map(|w| (w.rows(), w.cols()));
        sizes == [(inter, hidden), (inter, hidden), (hidden, inter)]
    };
    assert!(weights.iter().all(fits), "experts of other shapes");
    work.sort(choices);
    let pairs = choices.len();
    for (i, pair) in work.pair_of[..pairs].iter().enumerate() {
        work.x[pair * hidden..(pair + 1) * hidden].copy_from_slice(x.row(i / top_k));
    }
    let groups = Groups { starts: &work.starts, active: &work.active };
    let _timed = cpu.meter.time("moe experts", || {
        let expert = 3 * hidden * inter;
        let weights = groups.active.len() * expert * weights[0].gate.values().dtype().bytes();
        let rows = 2 * x.count() * hidden * size_of::<f32>();
        Work::f32(2 * pairs * expert, weights + rows)
    });
    gate_and_up(cpu, &groups, weights, &work.x[..pairs * hidden], &mut work.gate, &mut work.up);
    let (gate, y) = (&work.gate[..pairs * inter], &mut work.y[..pairs * hidden]);
    down(cpu, &groups, weights, gate, y);
    let stride = out.stride();
    let shards = Shards::new(out.data());
    let (pair_of, y) = (&work.pair_of, &work.y);
    cpu.gang.run(x.count(), |_, i| {
        // SAFETY: row i belongs to one task.
        let out = unsafe { shards.slice_mut(i * stride..i * stride + hidden) };
        let choices = &choices[i * top_k..(i + 1) * top_k];
        cpu.isa.run(Combine { choices, pairs: &pair_of[i * top_k..], y, out });
    });
}

/// Pairs by expert.
struct Groups<'a> {
    starts: &'a [usize],
    active: &'a [usize],
}

/// Outputs of an expert's matrix per task.
const COLUMNS: usize = 6 * PANEL_LEN;

impl Groups<'_> {
    /// Calls `body(expert, pairs, columns)` for every tile of every active expert.
    fn for_each_tile(
        &self,
        cpu: &Cpu,
        outputs: usize,
        body: impl Fn(usize, std::ops::Range<usize>, std::ops::Range<usize>) + Sync,
    ) {
        let tiles = outputs.div_ceil(COLUMNS);
        cpu.gang.run(self.active.len() * tiles, |_, task| {
            let expert = self.active[task / tiles];
            let pairs = self.starts[expert]..self.starts[expert + 1];
            let from = task % tiles * COLUMNS;
            body(expert, pairs, from..outputs.min(from + COLUMNS));
        });
    }
}

/// `gate = silu(gate x) · (up x)` for all pairs; `up` is overwritten.
fn gate_and_up(
    cpu: &Cpu,
    groups: &Groups<'_>,
    weights: &[ExpertWeights<Panels<'_>>],
    x: &[f32],
    gate: &mut [f32],
    up: &mut [f32],
) {
    let (inter, hidden) = (weights[0].gate.rows(), weights[0].gate.cols());
    let (gate, up) = (Shards::new(gate), Shards::new(up));
    groups.for_each_tile(cpu, inter, |expert, pairs, columns| {
        let x = Rows::new(&x[pairs.start * hidden..pairs.end * hidden], hidden);
        for (out, w) in [(&gate, weights[expert].gate), (&up, weights[expert].up)] {
            // SAFETY: tiles are disjoint; this task alone writes its columns of its pairs.
            unsafe { tile(cpu, x, w, columns.clone(), out, pairs.start * inter, inter) };
        }
        for pair in pairs {
            let at = pair * inter + columns.start..pair * inter + columns.end;
            // SAFETY: as above.
            let (gate, up) = unsafe { (gate.slice_mut(at.clone()), up.slice(at)) };
            cpu.isa.run(SiluMul { gate, up });
        }
    });
}

/// `y = down gate` for all pairs.
fn down(
    cpu: &Cpu,
    groups: &Groups<'_>,
    weights: &[ExpertWeights<Panels<'_>>],
    gate: &[f32],
    y: &mut [f32],
) {
    let (hidden, inter) = (weights[0].down.rows(), weights[0].down.cols());
    let y = Shards::new(y);
    groups.for_each_tile(cpu, hidden, |expert, pairs, columns| {
        let x = Rows::new(&gate[pairs.start * inter..pairs.end * inter], inter);
        // SAFETY: tiles are disjoint; this task alone writes its columns of its pairs.
        unsafe { tile(cpu, x, weights[expert].down, columns, &y, pairs.start * hidden, hidden) };
    });
}

/// Columns `columns` of `x wᵀ`, to rows of `stride` values from `at` on.
///
/// # Safety
/// The caller alone touches those columns of those rows.
unsafe fn tile(
    cpu: &Cpu,
    x: Rows<'_>,
    w: Panels<'_>,
    columns: std::ops::Range<usize>,
    out: &Shards<'_, f32>,
    at: usize,
    stride: usize,
) {
    assert!(at + x.count() * stride <= out.len() && columns.end <= stride);
    assert_eq!(w.cols(), x.width());
    let w = w.slice_rows(columns.start, columns.len());
    // SAFETY: in bounds by the assertion.
    let out = unsafe { (out.as_mut_ptr().add(at + columns.start), stride) };
    for from in (0..x.count()).step_by(ROWS) {
        let rows = ROWS.min(x.count() - from);
        // SAFETY: rows from..from + rows of x exist, and of `out` by the caller's promise.
        let multiply = unsafe {
            let x = (x.data().as_ptr().add(from * w.cols()), w.cols());
            let out = (out.0.add(from * out.1), out.1);
            Multiply::new(rows, x, w, out, false)
        };
        cpu.isa.run(multiply);
    }
}

/// Rows that stay in the second-level cache while the panels of `w` go over them.
const ROWS: usize = 60;

struct SiluMul<'a> {
    gate: &'a mut [f32],
    up: &'a [f32],
}

impl Kernel for SiluMul<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut at = 0;
        while at < self.gate.len() {
            let n = (self.gate.len() - at).min(S::LANES);
            let gate = math::silu(s, load(s, &self.gate[at..], n));
            let up = load(s, &self.up[at..], n);
            store(s, &mut self.gate[at..], n, s.mul(gate, up));
            at += n;
        }
    }
}

/// One token's sum over its experts, ascending.
struct Combine<'a> {
    choices: &'a [Choice],
    pairs: &'a [usize],
    y: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for Combine<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = self.out.len();
        let mut at = 0;
        while at < width {
            let n = (width - at).min(S::LANES);
            let mut sum = s.splat(0.0);
            for (choice, pair) in self.choices.iter().zip(self.pairs) {
                let y = load(s, &self.y[pair * width + at..], n);
                sum = s.fma(s.splat(choice.weight), y, sum);
            }
            store(s, &mut self.out[at..], n, sum);
            at += n;
        }
    }
}
