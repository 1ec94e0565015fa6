//! One chunk of one head: the chunkwise form (MODELS.md section 4).
//!
//! With `G` the running sum of log-decays inside the chunk, `S` the state that enters it,
//! `A[i][j] = beta_i Σ_d k_i k_j e^(G_i - G_j)` for `j < i` and `P[i][j]` the same with `q_i`,
//! without `beta`, for `j <= i`:
//!
//! ```text
//! D  = solve (I + A) D = beta (V - (e^G k) Sᵀ)         what each row writes
//! O  = (e^G q) Sᵀ + P D
//! S' = e^(G_last) S + Dᵀ (e^(G_last - G) k)
//! ```
//!
//! No exponent is ever positive, so nothing overflows however strong the gate, and none is the
//! difference of two long sums: after a strong gate that difference would have lost the low bits of
//! a weak one. Rows and columns of different 16-row blocks meet where the later block begins: the
//! exponent is the row's sum from there (`prefix`), plus the column's sum to the end of its own
//! block (`suffix`), plus the sums of the blocks between. Inside a block keys are decayed step by
//! step (`k_j` times `e^(g_i)` for each further row `i`).

use super::step::decay_row;
use super::{Inputs, Shape};
use crate::gemm::tile::{Nn, Nt};
use crate::norm::l2_norm_row;
use crate::scratch::take;
use crate::simd::{Kernel, Simd, load, math, store};
use crate::span::CELL_LEN;

/// Rows of a block: within one, pairs of rows are decayed step by step.
const BLOCK: usize = 16;

pub(super) fn chunk_scratch(shape: Shape) -> usize {
    CELL_LEN * (7 * shape.key_dim + shape.value_dim + 2 * CELL_LEN) + shape.key_dim
}

/// Rows `row..row + rows` of head `head`.
pub(super) struct Chunk<'a> {
    pub shape: Shape,
    pub inputs: Inputs<'a>,
    pub head: usize,
    pub row: usize,
    /// 1 to 64.
    pub rows: usize,
    /// The state before the chunk; none when it is in `target`.
    pub source: Option<&'a [f32]>,
    pub target: &'a mut [f32],
    /// The head's output: `rows` rows of `value_dim`, one every `.1` values, writable by this task
    /// alone.
    pub out: (*mut f32, usize),
    pub scratch: &'a mut [f32],
}

/// The scratch of a chunk; every matrix is `[64][..]`.
struct Work<'a> {
    /// Queries, normed and scaled; then times `e^G`.
    q: &'a mut [f32],
    /// Keys, normed.
    k: &'a mut [f32],
    /// Log-decays from a row's block's first row to the row, both included.
    prefix: &'a mut [f32],
    /// Log-decays from a row, not included, to the end of its block.
    suffix: &'a mut [f32],
    /// Log-decays of whole blocks on the way.
    between: &'a mut [f32],
    /// Rows of a block times their decay since its first row: queries, then keys; later `e^G k`.
    rows: &'a mut [f32],
    /// Earlier keys decayed to a block's first row; keys of a block decayed to the current row;
    /// later keys decayed to the end of the chunk.
    columns: &'a mut [f32],
    /// Decay factors of each row.
    factors: &'a mut [f32],
    /// What each row writes.
    delta: &'a mut [f32],
    /// `-A`, 64 columns.
    a: &'a mut [f32],
    /// `P`, 64 columns.
    p: &'a mut [f32],
}

impl Kernel for Chunk<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut chunk = self;
        let (dk, dv) = (chunk.shape.key_dim, chunk.shape.value_dim);
        let mut rest = std::mem::take(&mut chunk.scratch);
        let mut work = Work {
            q: take(&mut rest, CELL_LEN * dk),
            k: take(&mut rest, CELL_LEN * dk),
            prefix: take(&mut rest, CELL_LEN * dk),
            suffix: take(&mut rest, CELL_LEN * dk),
            between: take(&mut rest, dk),
            rows: take(&mut rest, CELL_LEN * dk),
            columns: take(&mut rest, CELL_LEN * dk),
            factors: take(&mut rest, CELL_LEN * dk),
            delta: take(&mut rest, CELL_LEN * dv),
            a: take(&mut rest, CELL_LEN * CELL_LEN),
            p: take(&mut rest, CELL_LEN * CELL_LEN),
        };
        chunk.prepare(s, &mut work);
        let mut first = 0;
        while first < chunk.rows {
            let n = (chunk.rows - first).min(BLOCK);
            chunk.earlier_blocks(s, &mut work, first, n);
            chunk.own_block(s, &mut work, first, n);
            first += n;
        }
        chunk.read_state(s, &mut work);
        chunk.solve(s, &mut work);
        chunk.outputs(s, &work);
        chunk.write_state(s, &mut work);
    }
}

impl Chunk<'_> {
    /// Normed queries and keys, decay factors, and sums of log-decays inside each block.
    #[inline(always)]
    fn prepare<S: Simd>(&self, s: S, work: &mut Work<'_>) {
        let dk = self.shape.key_dim;
        let [q_at, k_at, _] = self.shape.columns(self.head);
        let scale = 1.0 / (dk as f32).sqrt();
        for i in 0..self.rows {
            let qkv = self.inputs.qkv.row(self.row + i);
            let at = i * dk;
            l2_norm_row(s, &qkv[q_at..q_at + dk], scale, &mut work.q[at..at + dk]);
            l2_norm_row(s, &qkv[k_at..k_at + dk], 1.0, &mut work.k[at..at + dk]);
            // The log-decays themselves, until they are summed up below.
            let g = &mut work.suffix[at..at + dk];
            decay_row(s, &self.inputs, &self.shape, self.row + i, self.head, g);
            let begins = i % BLOCK == 0;
            let mut c = 0;
            while c < dk {
                let n = (dk - c).min(S::LANES);
                let g = load(s, &work.suffix[at + c..], n);
                let sum = match begins {
                    true => g,
                    false => s.add(load(s, &work.prefix[at - dk + c..], n), g),
                };
                store(s, &mut work.prefix[at + c..], n, sum);
                store(s, &mut work.factors[at + c..], n, math::exp(s, g));
                c += n;
            }
        }
        for first in (0..self.rows).step_by(BLOCK) {
            self.sum_to_the_end(s, work, first, (self.rows - first).min(BLOCK));
        }
    }

    /// Replaces the log-decays of a block by their sums from behind each row to the block's end.
    #[inline(always)]
    fn sum_to_the_end<S: Simd>(&self, s: S, work: &mut Work<'_>, first: usize, n: usize) {
        let dk = self.shape.key_dim;
        let mut c = 0;
        while c < dk {
            let m = (dk - c).min(S::LANES);
            let mut sum = s.splat(0.0);
            for i in (first..first + n).rev() {
                let place = &mut work.suffix[i * dk + c..];
                let g = load(s, place, m);
                store(s, place, m, sum);
                sum = s.add(sum, g);
            }
            c += m;
        }
    }

    /// Rows `first..first + n` against all rows of earlier blocks.
    #[inline(always)]
    fn earlier_blocks<S: Simd>(&self, s: S, work: &mut Work<'_>, first: usize, n: usize) {
        if first == 0 {
            return;
        }
        let dk = self.shape.key_dim;
        let (q_rows, k_rows) = work.rows.split_at_mut(BLOCK * dk);
        for i in 0..n {
            let (at, to) = ((first + i) * dk, i * dk);
            let sums = &work.prefix[at..at + dk];
            decayed(s, &work.q[at..at + dk], sums, None, &mut q_rows[to..to + dk]);
            decayed(s, &work.k[at..at + dk], sums, None, &mut k_rows[to..to + dk]);
        }
        self.decay_to_block(s, work, first);
        let (q_rows, k_rows) = work.rows.split_at(BLOCK * dk);
        let columns = (work.columns.as_ptr(), dk);
        // SAFETY: n <= 16 rows of dk lie in either half of `rows`, `first` < 64 rows of dk in
        // `columns`, and rows first..first + n of 64 columns in `p` and `a`.
        unsafe {
            let p = (work.p.as_mut_ptr().add(first * CELL_LEN), CELL_LEN);
            s.vectorize(Nt::new((n, first, dk), (q_rows.as_ptr(), dk), columns, p, false));
            let a = (work.a.as_mut_ptr().add(first * CELL_LEN), CELL_LEN);
            s.vectorize(Nt::new((n, first, dk), (k_rows.as_ptr(), dk), columns, a, false));
        }
        for i in first..first + n {
            let beta = self.beta(i);
            for a in &mut work.a[i * CELL_LEN..i * CELL_LEN + first] {
                *a *= -beta;
            }
        }
    }

    /// Rows `first..first + n` against each other; `P` above the diagonal is set to zero.
    #[inline(always)]
    fn own_block<S: Simd>(&self, s: S, work: &mut Work<'_>, first: usize, n: usize) {
        let dk = self.shape.key_dim;
        for i in 0..n {
            let at = (first + i) * dk;
            let (q, k) = (&work.q[at..at + dk], &work.k[at..at + dk]);
            let factors = &work.factors[at..at + dk];
            let place = (first + i) * CELL_LEN + first;
            let beta = self.beta(first + i);
            for j in 0..i {
                let column = &mut work.columns[j * dk..(j + 1) * dk];
                let (mut with_q, mut with_k) = (s.splat(0.0), s.splat(0.0));
                let mut c = 0;
                while c < dk {
                    let m = (dk - c).min(S::LANES);
                    let key = s.mul(load(s, &column[c..], m), load(s, &factors[c..], m));
                    store(s, &mut column[c..], m, key);
                    with_q = s.fma(load(s, &q[c..], m), key, with_q);
                    with_k = s.fma(load(s, &k[c..], m), key, with_k);
                    c += m;
                }
                work.p[place + j] = s.sum(with_q);
                work.a[place + j] = -beta * s.sum(with_k);
            }
            let mut own = s.splat(0.0);
            let mut c = 0;
            while c < dk {
                let m = (dk - c).min(S::LANES);
                let key = load(s, &k[c..], m);
                store(s, &mut work.columns[i * dk + c..], m, key);
                own = s.fma(load(s, &q[c..], m), key, own);
                c += m;
            }
            work.p[place + i] = s.sum(own);
            work.p[place + i + 1..place + n].fill(0.0);
        }
    }

    /// `columns`: the keys of all rows before `end`, the start of a block or the end of the chunk,
    /// decayed to there. `between` is then the log-decay of the whole way.
    #[inline(always)]
    fn decay_to_block<S: Simd>(&self, s: S, work: &mut Work<'_>, end: usize) {
        let dk = self.shape.key_dim;
        work.between.fill(0.0);
        for first in (0..end).step_by(BLOCK).rev() {
            let last = end.min(first + BLOCK) - 1;
            for j in first..=last {
                let at = j * dk;
                let (key, sums) = (&work.k[at..at + dk], &work.suffix[at..at + dk]);
                decayed(s, key, sums, Some(work.between), &mut work.columns[at..at + dk]);
            }
            add_row(s, &work.prefix[last * dk..(last + 1) * dk], work.between);
        }
    }

    /// What the entering state gives: `(e^G q) Sᵀ` into the output, `beta (V - (e^G k) Sᵀ)` into
    /// `delta`.
    #[inline(always)]
    fn read_state<S: Simd>(&self, s: S, work: &mut Work<'_>) {
        let (dk, dv, n) = (self.shape.key_dim, self.shape.value_dim, self.rows);
        let v_at = self.shape.columns(self.head)[2];
        work.between.fill(0.0);
        for i in 0..n {
            let at = i * dk;
            if i > 0 && i % BLOCK == 0 {
                add_row(s, &work.prefix[at - dk..at], work.between);
            }
            let mut c = 0;
            while c < dk {
                let m = (dk - c).min(S::LANES);
                let before = load(s, &work.between[c..], m);
                let e = math::exp(s, s.add(before, load(s, &work.prefix[at + c..], m)));
                let q = s.mul(load(s, &work.q[at + c..], m), e);
                store(s, &mut work.q[at + c..], m, q);
                store(s, &mut work.rows[at + c..], m, s.mul(load(s, &work.k[at + c..], m), e));
                c += m;
            }
        }
        let state = (self.source.map_or(self.target.as_ptr(), <[f32]>::as_ptr), dk);
        let delta = (work.delta.as_mut_ptr(), dv);
        // SAFETY: the state is dv rows of dk, `q`, `rows` and `delta` hold n <= 64 rows, and the
        // output is the field's promise.
        unsafe {
            s.vectorize(Nt::new((n, dv, dk), (work.q.as_ptr(), dk), state, self.out, false));
            s.vectorize(Nt::new((n, dv, dk), (work.rows.as_ptr(), dk), state, delta, false));
        }
        for i in 0..n {
            let values = &self.inputs.qkv.row(self.row + i)[v_at..v_at + dv];
            let beta = s.splat(self.beta(i));
            let delta = &mut work.delta[i * dv..(i + 1) * dv];
            let mut c = 0;
            while c < dv {
                let m = (dv - c).min(S::LANES);
                let new = s.sub(load(s, &values[c..], m), load(s, &delta[c..], m));
                store(s, &mut delta[c..], m, s.mul(beta, new));
                c += m;
            }
        }
    }

    /// Forward substitution: earlier blocks as one product, a block's own rows one by one.
    #[inline(always)]
    fn solve<S: Simd>(&self, s: S, work: &mut Work<'_>) {
        let dv = self.shape.value_dim;
        for first in (0..self.rows).step_by(BLOCK) {
            let n = (self.rows - first).min(BLOCK);
            for (i, known) in std::iter::once((0, first)).chain((1..n).map(|i| (i, i))) {
                // The block's rows against all earlier rows, then row i against its block's.
                let (rows, from) = if i == 0 { (n, 0) } else { (1, first) };
                let (done, open) = work.delta.split_at_mut((first + i) * dv);
                // SAFETY: `known` rows of dv from row `from` on are in `done`, `rows` rows start
                // `open`, and `a` has 64 columns in each of its 64 rows.
                unsafe {
                    let a = work.a.as_ptr().add((first + i) * CELL_LEN + from);
                    let b = (done.as_ptr().add(from * dv), dv);
                    let out = (open.as_mut_ptr(), dv);
                    let size = (rows, dv, known);
                    s.vectorize(Nn::new(size, (a, (CELL_LEN, 1)), b, out, true));
                }
            }
        }
    }

    /// Adds `P D` to the output.
    #[inline(always)]
    fn outputs<S: Simd>(&self, s: S, work: &Work<'_>) {
        let dv = self.shape.value_dim;
        for first in (0..self.rows).step_by(BLOCK) {
            let n = (self.rows - first).min(BLOCK);
            // SAFETY: rows first..first + n of `p` have first + n columns set, `delta` has as many
            // rows, and the output is the field's promise.
            unsafe {
                let p = (work.p.as_ptr().add(first * CELL_LEN), (CELL_LEN, 1));
                let out = (self.out.0.add(first * self.out.1), self.out.1);
                let delta = (work.delta.as_ptr(), dv);
                s.vectorize(Nn::new((n, dv, first + n), p, delta, out, true));
            }
        }
    }

    /// Decays the state to the end of the chunk and adds what the rows write.
    #[inline(always)]
    fn write_state<S: Simd>(&mut self, s: S, work: &mut Work<'_>) {
        let (dk, dv, n) = (self.shape.key_dim, self.shape.value_dim, self.rows);
        self.decay_to_block(s, work, n);
        let mut c = 0;
        while c < dk {
            let m = (dk - c).min(S::LANES);
            let factor = math::exp(s, load(s, &work.between[c..], m));
            for v in 0..dv {
                let at = v * dk + c;
                let old = match self.source {
                    Some(source) => load(s, &source[at..], m),
                    None => load(s, &self.target[at..], m),
                };
                store(s, &mut self.target[at..], m, s.mul(old, factor));
            }
            c += m;
        }
        let state = (self.target.as_mut_ptr(), dk);
        // SAFETY: the state is dv rows of dk, `delta` n rows of dv read by columns, `columns` n
        // rows of dk.
        unsafe {
            let delta = (work.delta.as_ptr(), (1, dv));
            s.vectorize(Nn::new((dv, dk, n), delta, (work.columns.as_ptr(), dk), state, true));
        }
    }

    fn beta(&self, i: usize) -> f32 {
        self.inputs.beta.row(self.row + i)[self.head]
    }
}

/// `out = x e^(sums + more)`.
#[inline(always)]
fn decayed<S: Simd>(s: S, x: &[f32], sums: &[f32], more: Option<&[f32]>, out: &mut [f32]) {
    let mut c = 0;
    while c < x.len() {
        let n = (x.len() - c).min(S::LANES);
        let mut sum = load(s, &sums[c..], n);
        if let Some(more) = more {
            sum = s.add(sum, load(s, &more[c..], n));
        }
        store(s, &mut out[c..], n, s.mul(load(s, &x[c..], n), math::exp(s, sum)));
        c += n;
    }
}

/// `to += x`.
#[inline(always)]
fn add_row<S: Simd>(s: S, x: &[f32], to: &mut [f32]) {
    let mut c = 0;
    while c < x.len() {
        let n = (x.len() - c).min(S::LANES);
        let sum = s.add(load(s, &to[c..], n), load(s, &x[c..], n));
        store(s, &mut to[c..], n, sum);
        c += n;
    }
}
