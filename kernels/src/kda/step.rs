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

/// A row's pass over the state of a head.
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

/// Part of `N` value rows of the state: `n` key channels from `at` on.
struct Part<const N: usize> {
    source: *const f32,
    target: *mut f32,
    /// Values from one row to the next.
    dk: usize,
    at: usize,
    n: usize,
}

impl Pass<'_> {
    /// `N` value rows of the state at once, so that their sums overlap.
    #[inline(always)]
    fn value_rows<S: Simd, const N: usize>(&mut self, s: S, v: usize) {
        let dk = self.dk;
        let [q, k, decay] = self.vectors;
        let rows = v * dk..(v + N) * dk;
        let target = self.target[rows.clone()].as_mut_ptr();
        let source = self.source.map_or(target.cast_const(), |source| source[rows].as_ptr());
        let whole = dk - dk % S::LANES;
        let part = |at, n| Part { source, target, dk, at, n };
        let mut sums = [s.splat(0.0); N];
        // SAFETY: `source` and `target` hold N rows of dk values, by the slices above; parts end
        // at dk.
        unsafe {
            for at in (0..whole).step_by(S::LANES) {
                part(at, S::LANES).read(s, [k, decay], &mut sums);
            }
            if whole < dk {
                part(whole, dk - whole).read(s, [k, decay], &mut sums);
            }
        }
        let mut writes = [s.splat(0.0); N];
        for (i, write) in writes.iter_mut().enumerate() {
            *write = s.splat(self.beta * (self.values[v + i] - s.sum(sums[i])));
        }
        sums = [s.splat(0.0); N];
        // SAFETY: as above.
        unsafe {
            for at in (0..whole).step_by(S::LANES) {
                part(at, S::LANES).write(s, [q, k, decay], &writes, &mut sums);
            }
            if whole < dk {
                part(whole, dk - whole).write(s, [q, k, decay], &writes, &mut sums);
            }
        }
        for (i, sum) in sums.iter().enumerate() {
            self.out[v + i] = s.sum(*sum);
        }
    }
}

impl<const N: usize> Part<N> {
    /// Adds what the decayed state gives for the key.
    ///
    /// # Safety
    /// `source` is valid for reads of channels `at..at + n` of N rows.
    #[inline(always)]
    unsafe fn read<S: Simd>(&self, s: S, [k, decay]: [&[f32]; 2], sums: &mut [S::V; N]) {
        let (key, factor) = (load(s, &k[self.at..], self.n), load(s, &decay[self.at..], self.n));
        for (i, sum) in sums.iter_mut().enumerate() {
            let place = self.source.wrapping_add(i * self.dk + self.at);
            // The rows behind these come next.
            s.prefetch(place.wrapping_add(N * self.dk));
            // SAFETY: the caller's promise.
            let old = unsafe { load_at(s, place, self.n) };
            *sum = s.fma(s.mul(old, factor), key, *sum);
        }
    }

    /// Decays the state, adds what the row writes, and adds up what it gives for the query.
    ///
    /// # Safety
    /// As [`Part::read`], and `target` is valid for writes of the same.
    #[inline(always)]
    unsafe fn write<S: Simd>(
        &self,
        s: S,
        [q, k, decay]: [&[f32]; 3],
        writes: &[S::V; N],
        sums: &mut [S::V; N],
    ) {
        let [query, key, factor] = [q, k, decay].map(|x| &x[self.at..]);
        let (query, key) = (load(s, query, self.n), load(s, key, self.n));
        let factor = load(s, factor, self.n);
        for (i, sum) in sums.iter_mut().enumerate() {
            let place = i * self.dk + self.at;
            // SAFETY: the caller's promise.
            unsafe {
                let old = load_at(s, self.source.add(place), self.n);
                let new = s.fma(writes[i], key, s.mul(old, factor));
                *sum = s.fma(new, query, *sum);
                store_at(s, self.target.add(place), self.n, new);
            }
        }
    }
}

/// The first `n <= LANES` values at `p` as lanes, the rest zero.
///
/// # Safety
/// `p` is valid for reads of `n` values.
#[inline(always)]
unsafe fn load_at<S: Simd>(s: S, p: *const f32, n: usize) -> S::V {
    // SAFETY: the caller's promise.
    unsafe { if n == S::LANES { s.load(p) } else { s.load_head(p, n) } }
}

/// Writes the first `n <= LANES` lanes to `p`.
///
/// # Safety
/// `p` is valid for writes of `n` values.
#[inline(always)]
unsafe fn store_at<S: Simd>(s: S, p: *mut f32, n: usize, v: S::V) {
    // SAFETY: the caller's promise.
    unsafe { if n == S::LANES { s.store(p, v) } else { s.store_head(p, n, v) } }
}
