//! The fast expert products: tokens are sorted by expert, so that its weights are read once.

use std::ops::Range;

use super::Choice;
use crate::device::Cpu;
use crate::gemm::inputs::{Form, Inputs};
use crate::gemm::pairs::Pair;
use crate::meter::Work;
use crate::narrow::{Forms, NarrowRows, round_row};
use crate::panels::{PANEL_LEN, Panels};
use crate::quant::{GROUP_LEN, Group, quantize_row};
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
    /// Inputs and gates in fewer bits.
    narrow_x: NarrowRows,
    narrow_gate: NarrowRows,
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
            narrow_x: NarrowRows::default(),
            narrow_gate: NarrowRows::default(),
        }
    }

    /// The same with room for inputs in other forms.
    pub fn narrowed(mut self, forms: Forms, hidden: usize, inter: usize) -> Workspace {
        let pairs = self.pair_of.len();
        self.narrow_x = NarrowRows::new(forms, pairs, hidden);
        self.narrow_gate = NarrowRows::new(forms, pairs, inter);
        self
    }

    /// Overwrites all values: tests poison what kernels must not rely on.
    pub fn fill(&mut self, value: f32) {
        for buffer in [&mut self.x, &mut self.gate, &mut self.up, &mut self.y] {
            buffer.fill(value);
        }
        self.narrow_x.poison();
        self.narrow_gate.poison();
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
    let tokens = x.count();
    let top_k = choices.len() / tokens;
    assert_eq!(top_k * tokens, choices.len());
    let hidden = x.width();
    let inter = weights[0].gate.rows();
    let fits = |expert: &ExpertWeights<Panels<'_>>| {
        let sizes = [expert.gate, expert.up, expert.down].map(|w| (w.rows(), w.cols()));
        sizes == [(inter, hidden), (inter, hidden), (hidden, inter)]
    };
    assert!(weights.iter().all(fits), "experts of other shapes");
    work.sort(choices);
    let pairs = choices.len();
    let pair_of = work.pair_of[..pairs].iter().enumerate();
    let form = form(cpu, weights);
    let per_row = form.per_row(hidden);
    let x = match form {
        Form::Stored => {
            for (i, pair) in pair_of {
                work.x[pair * hidden..(pair + 1) * hidden].copy_from_slice(x.row(i / top_k));
            }
            Inputs::Stored(Rows::new(&work.x[..pairs * hidden], hidden))
        }
        Form::Bf16 => {
            let rows = work.narrow_x.reserve_pairs(pairs, hidden);
            for (i, pair) in pair_of {
                round_row(cpu, x.row(i / top_k), &mut rows[pair * per_row..][..per_row]);
            }
            Inputs::Bf16(rows, per_row)
        }
        Form::Int8 => {
            let rows = work.narrow_x.reserve_groups(pairs, hidden);
            for (i, pair) in pair_of {
                quantize_row(cpu, x.row(i / top_k), &mut rows[pair * per_row..][..per_row]);
            }
            Inputs::Int8(rows, per_row)
        }
    };
    let groups = Groups { starts: &work.starts, active: &work.active };
    let _timed = cpu.meter.time("moe experts", || {
        let ExpertWeights { gate, up, down } = weights[0];
        let weights =
            groups.active.len() * [gate, up, down].map(|w| w.bytes()).iter().sum::<usize>();
        let rows = 2 * tokens * hidden * size_of::<f32>();
        Work {
            operations: (2 * pairs * 3 * hidden * inter) as f64,
            bytes: (weights + rows) as f64,
            arithmetic: gate.arithmetic(cpu),
        }
    });
    let (gate, up) = (&mut work.gate[..pairs * inter], &mut work.up[..pairs * inter]);
    let narrow = match form {
        Form::Stored => Narrow::None,
        Form::Bf16 => Narrow::Bf16(work.narrow_gate.reserve_pairs(pairs, inter)),
        Form::Int8 => Narrow::Int8(work.narrow_gate.reserve_groups(pairs, inter)),
    };
    let gate = gate_and_up(cpu, &groups, weights, x, (gate, up), narrow);
    down(cpu, &groups, weights, gate, &mut work.y[..pairs * hidden]);
    let stride = out.stride();
    let shards = Shards::new(out.data());
    let (pair_of, y) = (&work.pair_of, &work.y);
    cpu.gang.run(tokens, |_, i| {
        // SAFETY: row i belongs to one task.
        let out = unsafe { shards.slice_mut(i * stride..i * stride + hidden) };
        let choices = &choices[i * top_k..(i + 1) * top_k];
        cpu.isa.run(Combine { choices, pairs: &pair_of[i * top_k..], y, out });
    });
}

/// Experts are quantised all or none, and rounded to bf16 only where all their weights are.
fn form(cpu: &Cpu, experts: &[ExpertWeights<Panels<'_>>]) -> Form {
    let mut forms = experts.iter().flat_map(|e| [e.gate, e.up, e.down].map(|w| Form::of(cpu, w)));
    let first = forms.next().expect("a layer has experts");
    if forms.all(|form| form == first) { first } else { Form::Stored }
}

/// Where gates go in fewer bits.
enum Narrow<'a> {
    None,
    Bf16(&'a mut [Pair]),
    Int8(&'a mut [Group]),
}

/// The same, shared by tasks.
enum NarrowShards<'a> {
    None,
    Bf16(Shards<'a, Pair>),
    Int8(Shards<'a, Group>),
}

/// Pairs by expert.
struct Groups<'a> {
    starts: &'a [usize],
    active: &'a [usize],
}

/// Outputs of an expert's matrix per task.
const COLUMNS: usize = 8 * PANEL_LEN;

impl Groups<'_> {
    /// Calls `body(expert, pairs, columns)` for every tile of every active expert.
    fn for_each_tile(
        &self,
        cpu: &Cpu,
        outputs: usize,
        body: impl Fn(usize, Range<usize>, Range<usize>) + Sync,
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

/// `gate = silu(gate x) · (up x)` for all pairs; `up` is overwritten. Returns the gates as they go
/// on, in fewer bits where `narrow` has room for that.
fn gate_and_up<'a>(
    cpu: &Cpu,
    groups: &Groups<'_>,
    weights: &[ExpertWeights<Panels<'_>>],
    x: Inputs<'_>,
    (gate, up): (&'a mut [f32], &mut [f32]),
    mut narrow: Narrow<'a>,
) -> Inputs<'a> {
    const { assert!(COLUMNS.is_multiple_of(GROUP_LEN), "a group belongs to one tile") };
    let inter = weights[0].gate.rows();
    {
        let (gate, up) = (Shards::new(&mut *gate), Shards::new(up));
        let narrow = match &mut narrow {
            Narrow::None => NarrowShards::None,
            Narrow::Bf16(pairs) => NarrowShards::Bf16(Shards::new(pairs)),
            Narrow::Int8(groups) => NarrowShards::Int8(Shards::new(groups)),
        };
        groups.for_each_tile(cpu, inter, |expert, pairs, columns| {
            for (out, w) in [(&gate, weights[expert].gate), (&up, weights[expert].up)] {
                // SAFETY: tiles are disjoint; this task alone writes its columns of its pairs.
                unsafe { tile(cpu, x, pairs.clone(), w, columns.clone(), out) };
            }
            for pair in pairs {
                let at = pair * inter + columns.start..pair * inter + columns.end;
                // SAFETY: as above.
                let (gate, up) = unsafe { (gate.slice_mut(at.clone()), up.slice(at)) };
                cpu.isa.run(SiluMul { gate: &mut *gate, up });
                // The columns are whole pairs and groups, or a row's last ones.
                let place = |form: Form| {
                    let first = pair * form.per_row(inter) + form.per_row(columns.start);
                    first..first + form.per_row(columns.len())
                };
                match &narrow {
                    NarrowShards::None => {}
                    // SAFETY: as above.
                    NarrowShards::Bf16(rows) => unsafe {
                        round_row(cpu, gate, rows.slice_mut(place(Form::Bf16)));
                    },
                    // SAFETY: as above.
                    NarrowShards::Int8(rows) => unsafe {
                        quantize_row(cpu, gate, rows.slice_mut(place(Form::Int8)));
                    },
                }
            }
        });
    }
    match narrow {
        Narrow::None => Inputs::Stored(Rows::new(gate, inter)),
        Narrow::Bf16(pairs) => Inputs::Bf16(pairs, Form::Bf16.per_row(inter)),
        Narrow::Int8(groups) => Inputs::Int8(groups, Form::Int8.per_row(inter)),
    }
}

/// `y = down gate` for all pairs.
fn down(
    cpu: &Cpu,
    groups: &Groups<'_>,
    weights: &[ExpertWeights<Panels<'_>>],
    gate: Inputs<'_>,
    y: &mut [f32],
) {
    let y = Shards::new(y);
    groups.for_each_tile(cpu, weights[0].down.rows(), |expert, pairs, columns| {
        // SAFETY: tiles are disjoint; this task alone writes its columns of its pairs.
        unsafe { tile(cpu, gate, pairs, weights[expert].down, columns, &y) };
    });
}

/// Columns `columns` of `x wᵀ` for some pairs, to their rows in `out`, which has all columns of all
/// pairs.
///
/// # Safety
/// The caller alone touches those columns of those rows.
unsafe fn tile(
    cpu: &Cpu,
    x: Inputs<'_>,
    pairs: Range<usize>,
    w: Panels<'_>,
    columns: Range<usize>,
    out: &Shards<'_, f32>,
) {
    let stride = w.rows();
    assert!(pairs.end * stride <= out.len() && columns.end <= stride);
    for from in pairs.clone().step_by(ROWS) {
        let rows = from..pairs.end.min(from + ROWS);
        // SAFETY: in bounds by the assertion; the caller vouches for the rest.
        unsafe {
            let out = (out.as_mut_ptr().add(from * stride + columns.start), stride);
            x.multiply(cpu, rows, (w, columns.clone()), out, false);
        }
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
