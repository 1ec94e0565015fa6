//! One row of one head: one pass over the state.

use super::{Inputs, Shape};
use crate::norm::l2_norm_row;
use crate::scratch::take;
use crate::simd::{Kernel, Simd, load, math, store};

pub(super) fn step_scratch(shape: Shape) -> usize {
    3 * shape.key_dim
}

/// The recurrence for row `row`, head `head`.
pub(super) struct Step<'a> {
    pub shape: Shape,
    pub inputs: Inputs<'a>,
    pub head: usize,
    pub row: usize,
    /// The state before the row; none when it is in `target`.
    pub source: Option<&'a [f32]>,
    pub target: &'a mut [f32],
    /// The head's output, `value_dim` values writable by this task alone.
    pub out: (*mut f32, usize),
    pub scratch: &'a mut [f32],
}

impl Kernel for Step<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (dk, dv) = (self.shape.key_dim, self.shape.value_dim);
        let [q_at, k_at, v_at] = self.shape.columns(self.head);
        let qkv = self.inputs.qkv.row(self.row);
        let mut rest = self.scratch;
        let q = take(&mut rest, dk);
        let k = take(&mut rest, dk);
        let decay = take(&mut rest, dk);
        l2_norm_row(s, &qkv[q_at..q_at + dk], 1.0 / (dk as f32).sqrt(), q);
        l2_norm_row(s, &qkv[k_at..k_at + dk], 1.0, k);
        decay_row(s, &self.inputs, &self.shape, self.row, self.head, decay);
        let mut at = 0;
        while at < dk {
            let n = (dk - at).min(S::LANES);
            let g = math::exp(s, load(s, &decay[at..], n));
            store(s, &mut decay[at..], n, g);
            at += n;
        }
        let beta = self.inputs.beta.row(self.row)[self.head];
        // SAFETY: the field's promise.
        let out = unsafe { std::slice::from_raw_parts_mut(self.out.0, dv) };
        let mut pass = Pass {
            dk,
            beta,
            vectors: [q, k, decay],
            values: &qkv[v_at..v_at + dv],
            source: self.source,
            target: self.target,
            out,
        };
        let mut v = 0;
        while v + 4 <= dv {
            pass.value_rows::<S, 4>(s, v);
            v += 4;
        }
        while v < dv {
            pass.value_rows::<S, 1>(s, v);
            v += 1;
        }
    }
}

/// Log-decays of a head in a row, one per key channel.
#[inline(always)]
pub(super) fn decay_row<S: Simd>(
    s: S,
    inputs: &Inputs<'_>,
    shape: &Shape,
    row: usize,
    head: usize,
    out: &mut [f32],
) {
    let row = inputs.decay.row(row);
    let dk = shape.key_dim;
    let per_head = row.len() == shape.value_heads;
    let mut at = 0;
    while at < dk {
        let n = (dk - at).min(S::LANES);
        let g = if per_head { s.splat(row[head]) } else { load(s, &row[head * dk + at..], n) };
        store(s, &mut out[at..], n, g);
        at += n;
    }
}

struct Pass<'a> {
    dk: usize,
    beta: f32,
    /// Query, key and decay factors.
    vectors: [&'a [f32]; 3],
    values: &'a [f32],
    source: Option<&'a [f32]>,
    target: &'a mut [f32],
    out: &'a mut [f32],
}

impl Pass<'_> {
    /// `N` value rows of the state at once, so that their sums overlap.
    #[inline(always)]
    fn value_rows<S: Simd, const N: usize>(&mut self, s: S, v: usize) {
        let dk = self.dk;
        let [q, k, decay] = self.vectors;
        let mut sums = [s.splat(0.0); N];
        let mut at = 0;
        while at < dk {
            let n = (dk - at).min(S::LANES);
            let (factor, key) = (load(s, &decay[at..], n), load(s, &k[at..], n));
            for (i, sum) in sums.iter_mut().enumerate() {
                let place = (v + i) * dk + at;
                let old = match self.source {
                    Some(source) => load(s, &source[place..], n),
                    None => load(s, &self.target[place..], n),
                };
                let decayed = s.mul(old, factor);
                *sum = s.fma(decayed, key, *sum);
                store(s, &mut self.target[place..], n, decayed);
            }
            at += n;
        }
        let mut writes = [0.0; N];
        for (i, write) in writes.iter_mut().enumerate() {
            *write = self.beta * (self.values[v + i] - s.sum(sums[i]));
        }
        sums = [s.splat(0.0); N];
        let mut at = 0;
        while at < dk {
            let n = (dk - at).min(S::LANES);
            let (query, key) = (load(s, &q[at..], n), load(s, &k[at..], n));
            for (i, sum) in sums.iter_mut().enumerate() {
                let place = (v + i) * dk + at;
                let new = s.fma(s.splat(writes[i]), key, load(s, &self.target[place..], n));
                *sum = s.fma(new, query, *sum);
                store(s, &mut self.target[place..], n, new);
            }
            at += n;
        }
        for (i, sum) in sums.iter().enumerate() {
            self.out[v + i] = s.sum(*sum);
        }
    }
}
