//! One chunk of one head: the chunkwise form (MODELS.md section 4).
//!
//! With `E[i]` the product of the decay factors `e^g` of a chunk's rows up to `i`, `E[i/j]` that of
//! rows `j + 1..=i`, `S` the state that enters the chunk, `A[i][j] = beta_i Σ_d k_i k_j E[i/j]` for
//! `j < i` and `P[i][j]` the same with `q_i`, without `beta`, for `j <= i`:
//!
//! ```text
//! D  = solve (I + A) D = beta (V - (E k) Sᵀ)         what each row writes
//! O  = (E q) Sᵀ + P D
//! S' = E[last] S + Dᵀ (E[last/i] k)
//! ```
//!
//! A decay over several rows is the product of their factors, each at most 1 and computed once:
//! nothing overflows however strong the gate, and a weak decay after a strong one keeps its bits,
//! which the difference of two long sums of log-decays would have lost. Inside a block of 16 rows
//! keys are decayed row by row, as the recurrence does. Where the next block begins they have come
//! to the end of their own, and each further block decays them by its whole product; the later
//! block's rows carry the rest of the way (`block`).

use super::step::decay_row;
use super::{Inputs, Shape};
use crate::gemm::tile::{Nn, Nt};
use crate::norm::l2_norm_row;
use crate::scratch::take;
use crate::simd::{Kernel, Simd, load, math, store};
use crate::span::CELL_LEN;

/// Rows of a block: within one, pairs of rows are decayed row by row.
const BLOCK: usize = 16;

/// Values behind each row of a matrix that is walked down its columns: rows of 2^n values alone
/// would meet in few sets of the first cache.
const PAD: usize = 16;

/// Rows between the one worked on and the one whose inputs are asked for. A head's part of a row
/// is too short, and rows are too far apart, for the processor to see a stream.
const AHEAD: usize = 3;

pub(super) fn chunk_scratch(shape: Shape) -> usize {
    let (dk, dv) = (shape.key_dim, shape.value_dim);
    CELL_LEN * (5 * dk + (dk + PAD) + (dv + PAD) + 2 * CELL_LEN) + dk * (dv + PAD) + 2 * dk
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

/// The scratch of a chunk; matrices are `[64][key_dim]` where nothing else is said.
struct Work<'a> {
    /// Queries, normed and scaled.
    q: &'a mut [f32],
    /// Keys, normed.
    k: &'a mut [f32],
    /// Decay factors of each row.
    factors: &'a mut [f32],
    /// Queries times the factors since their block's first row; then since the chunk's.
    q_rows: &'a mut [f32],
    /// Keys times the same.
    k_rows: &'a mut [f32],
    /// Product of the factors of a block, up to the row last reached.
    block: &'a mut [f32],
    /// Product of the factors of all blocks done.
    before: &'a mut [f32],
    /// Keys decayed to the row last reached, `[64][key_dim + PAD]`.
    columns: &'a mut [f32],
    /// What each row writes, `[64][value_dim + PAD]`.
    delta: &'a mut [f32],
    /// The entering state, `[key_dim][value_dim + PAD]`.
    state: &'a mut [f32],
    /// `-A`, `[64][64]`.
    a: &'a mut [f32],
    /// `P`, `[64][64]`.
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
            factors: take(&mut rest, CELL_LEN * dk),
            q_rows: take(&mut rest, CELL_LEN * dk),
            k_rows: take(&mut rest, CELL_LEN * dk),
            block: take(&mut rest, dk),
            before: take(&mut rest, dk),
            columns: take(&mut rest, CELL_LEN * (dk + PAD)),
            delta: take(&mut rest, CELL_LEN * (dv + PAD)),
            state: take(&mut rest, dk * (dv + PAD)),
            a: take(&mut rest, CELL_LEN * CELL_LEN),
            p: take(&mut rest, CELL_LEN * CELL_LEN),
        };
        work.before.fill(1.0);
        for first in (0..chunk.rows).step_by(BLOCK) {
            let n = (chunk.rows - first).min(BLOCK);
            chunk.prepare(s, &mut work, first, n);
            chunk.earlier_blocks(s, &mut work, first, n);
            chunk.own_block(s, &mut work, first, n);
            chunk.decay(s, &mut work, first, n);
        }
        chunk.read_state(s, &mut work);
        chunk.solve(s, &mut work);
        chunk.outputs(s, &work);
        chunk.write_state(s, &mut work);
    }
}

impl Chunk<'_> {
    /// Rows `first..first + n`: normed queries and keys, decay factors, and queries and keys
    /// decayed since the block's first row.
    #[inline(always)]
    fn prepare<S: Simd>(&self, s: S, work: &mut Work<'_>, first: usize, n: usize) {
        let dk = self.shape.key_dim;
        let [q_at, k_at, _] = self.shape.columns(self.head);
        let scale = 1.0 / (dk as f32).sqrt();
        work.block.fill(1.0);
        for i in first..first + n {
            self.fetch(s, self.row + i + AHEAD);
            let qkv = self.inputs.qkv.row(self.row + i);
            let at = i * dk;
            l2_norm_row(s, &qkv[q_at..q_at + dk], scale, &mut work.q[at..at + dk]);
            l2_norm_row(s, &qkv[k_at..k_at + dk], 1.0, &mut work.k[at..at + dk]);
            let g = &mut work.factors[at..at + dk];
            decay_row(s, &self.inputs, &self.shape, self.row + i, self.head, g);
            let mut c = 0;
            while c < dk {
                let m = (dk - c).min(S::LANES);
                let factor = math::exp(s, load(s, &work.factors[at + c..], m));
                store(s, &mut work.factors[at + c..], m, factor);
                let e = s.mul(load(s, &work.block[c..], m), factor);
                store(s, &mut work.block[c..], m, e);
                store(s, &mut work.q_rows[at + c..], m, s.mul(load(s, &work.q[at + c..], m), e));
                store(s, &mut work.k_rows[at + c..], m, s.mul(load(s, &work.k[at + c..], m), e));
                c += m;
            }
        }
    }

    /// Asks for what this head reads of row `row` of the batch, if there is one.
    #[inline(always)]
    fn fetch<S: Simd>(&self, s: S, row: usize) {
        if row >= self.inputs.qkv.count() {
            return;
        }
        let (dk, dv) = (self.shape.key_dim, self.shape.value_dim);
        let [q_at, k_at, v_at] = self.shape.columns(self.head);
        let (qkv, decay) = (self.inputs.qkv.row(row), self.inputs.decay.row(row));
        fetch_all(s, &qkv[q_at..q_at + dk]);
        fetch_all(s, &qkv[k_at..k_at + dk]);
        fetch_all(s, &qkv[v_at..v_at + dv]);
        let width = decay.len() / self.shape.value_heads;
        fetch_all(s, &decay[self.head * width..(self.head + 1) * width]);
    }

    /// Rows `first..first + n` against all rows of earlier blocks.
    #[inline(always)]
    fn earlier_blocks<S: Simd>(&self, s: S, work: &mut Work<'_>, first: usize, n: usize) {
        if first == 0 {
            return;
        }
        let dk = self.shape.key_dim;
        let columns = (work.columns.as_ptr(), dk + PAD);
        // SAFETY: rows first..first + n <= 64 of dk lie in `q_rows` and `k_rows`, and of 64 columns
        // in `p` and `a`; `columns` has `first` rows before them.
        unsafe {
            let q = (work.q_rows.as_ptr().add(first * dk), dk);
            let p = (work.p.as_mut_ptr().add(first * CELL_LEN), CELL_LEN);
            s.vectorize(Nt::new((n, first, dk), q, columns, p, false));
            let k = (work.k_rows.as_ptr().add(first * dk), dk);
            let a = (work.a.as_mut_ptr().add(first * CELL_LEN), CELL_LEN);
            s.vectorize(Nt::new((n, first, dk), k, columns, a, false));
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
        let (dk, stride) = (self.shape.key_dim, self.shape.key_dim + PAD);
        for i in 0..n {
            let at = (first + i) * dk;
            let (q, k) = (&work.q[at..at + dk], &work.k[at..at + dk]);
            let row = [q, k, &work.factors[at..at + dk]];
            let place = (first + i) * CELL_LEN + first;
            let beta = self.beta(first + i);
            for j in (0..i).step_by(4) {
                let keys = &mut work.columns[(first + j) * stride..];
                let [p, a] = match i - j {
                    1 => pairs::<S, 1>(s, row, keys),
                    2 => pairs::<S, 2>(s, row, keys),
                    3 => pairs::<S, 3>(s, row, keys),
                    _ => pairs::<S, 4>(s, row, keys),
                };
                let m = (i - j).min(4);
                work.p[place + j..place + j + m].copy_from_slice(&p[..m]);
                for (to, a) in work.a[place + j..place + j + m].iter_mut().zip(a) {
                    *to = -beta * a;
                }
            }
            let mut own = s.splat(0.0);
            let mut c = 0;
            while c < dk {
                let m = (dk - c).min(S::LANES);
                let key = load(s, &k[c..], m);
                store(s, &mut work.columns[(first + i) * stride + c..], m, key);
                own = s.fma(load(s, &q[c..], m), key, own);
                c += m;
            }
            work.p[place + i] = s.sum(own);
            work.p[place + i + 1..place + n].fill(0.0);
        }
    }

    /// Takes earlier keys to the end of the block of rows `first..first + n`, and the block's
    /// decayed rows back to the start of the chunk.
    #[inline(always)]
    fn decay<S: Simd>(&self, s: S, work: &mut Work<'_>, first: usize, n: usize) {
        let (dk, stride) = (self.shape.key_dim, self.shape.key_dim + PAD);
        for j in 0..first {
            scale(s, work.block, &mut work.columns[j * stride..j * stride + dk]);
        }
        if first > 0 {
            for i in first..first + n {
                scale(s, work.before, &mut work.q_rows[i * dk..(i + 1) * dk]);
                scale(s, work.before, &mut work.k_rows[i * dk..(i + 1) * dk]);
            }
        }
        scale(s, work.block, work.before);
    }

    /// What the entering state gives: `(E q) Sᵀ` into the output, `beta (V - (E k) Sᵀ)` into
    /// `delta`.
    #[inline(always)]
    fn read_state<S: Simd>(&self, s: S, work: &mut Work<'_>) {
        let (dk, dv, n) = (self.shape.key_dim, self.shape.value_dim, self.rows);
        let stride = dv + PAD;
        transpose(s, self.source.unwrap_or(self.target), dk, work.state, stride);
        let state = (work.state.as_ptr(), stride);
        let delta = (work.delta.as_mut_ptr(), stride);
        // SAFETY: `state` is dk rows of dv, `q_rows`, `k_rows` and `delta` hold n <= 64 rows, and
        // the output is the field's promise.
        unsafe {
            let (q, k) = (work.q_rows.as_ptr(), work.k_rows.as_ptr());
            s.vectorize(Nn::new((n, dv, dk), (q, (dk, 1)), state, self.out, false));
            s.vectorize(Nn::new((n, dv, dk), (k, (dk, 1)), state, delta, false));
        }
        let v_at = self.shape.columns(self.head)[2];
        for i in 0..n {
            let values = &self.inputs.qkv.row(self.row + i)[v_at..v_at + dv];
            let beta = s.splat(self.beta(i));
            let delta = &mut work.delta[i * stride..i * stride + dv];
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
        let (dv, stride) = (self.shape.value_dim, self.shape.value_dim + PAD);
        for first in (0..self.rows).step_by(BLOCK) {
            let n = (self.rows - first).min(BLOCK);
            for (i, known) in std::iter::once((0, first)).chain((1..n).map(|i| (i, i))) {
                // The block's rows against all earlier rows, then row i against its block's.
                let (rows, from) = if i == 0 { (n, 0) } else { (1, first) };
                let (done, open) = work.delta.split_at_mut((first + i) * stride);
                // SAFETY: `known` rows of dv from row `from` on are in `done`, `rows` rows start
                // `open`, and `a` has 64 columns in each of its 64 rows.
                unsafe {
                    let a = work.a.as_ptr().add((first + i) * CELL_LEN + from);
                    let b = (done.as_ptr().add(from * stride), stride);
                    let out = (open.as_mut_ptr(), stride);
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
                let delta = (work.delta.as_ptr(), dv + PAD);
                s.vectorize(Nn::new((n, dv, first + n), p, delta, out, true));
            }
        }
    }

    /// Decays the state to the end of the chunk and adds what the rows write.
    #[inline(always)]
    fn write_state<S: Simd>(&mut self, s: S, work: &mut Work<'_>) {
        let (dk, dv, n) = (self.shape.key_dim, self.shape.value_dim, self.rows);
        if let Some(source) = self.source {
            self.target.copy_from_slice(source);
        }
        for row in self.target.chunks_exact_mut(dk) {
            scale(s, work.before, row);
        }
        let state = (self.target.as_mut_ptr(), dk);
        // SAFETY: the state is dv rows of dk, `delta` n rows of dv read by columns, `columns` n
        // rows of dk.
        unsafe {
            let delta = (work.delta.as_ptr(), (1, dv + PAD));
            let columns = (work.columns.as_ptr(), dk + PAD);
            s.vectorize(Nn::new((dv, dk, n), delta, columns, state, true));
        }
    }

    fn beta(&self, i: usize) -> f32 {
        self.inputs.beta.row(self.row + i)[self.head]
    }
}

/// Decays `N` keys, which lie one row of `columns` after the other, by a row's factors; returns
/// their inner products with the row's query and with its key, the first `N` of each.
#[inline(always)]
fn pairs<S: Simd, const N: usize>(
    s: S,
    [q, k, factors]: [&[f32]; 3],
    keys: &mut [f32],
) -> [[f32; 4]; 2] {
    let dk = q.len();
    let (mut with_q, mut with_k) = ([s.splat(0.0); 4], [s.splat(0.0); 4]);
    let mut c = 0;
    while c < dk {
        let m = (dk - c).min(S::LANES);
        let (q, k) = (load(s, &q[c..], m), load(s, &k[c..], m));
        let factor = load(s, &factors[c..], m);
        for j in 0..N {
            let place = &mut keys[j * (dk + PAD) + c..];
            let key = s.mul(load(s, place, m), factor);
            store(s, place, m, key);
            with_q[j] = s.fma(q, key, with_q[j]);
            with_k[j] = s.fma(k, key, with_k[j]);
        }
        c += m;
    }
    [s.sums(with_q), s.sums(with_k)]
}

/// `x`, rows of `width`, with rows and columns swapped; rows of `out` start every `stride` values.
#[inline(always)]
fn transpose<S: Simd>(s: S, x: &[f32], width: usize, out: &mut [f32], stride: usize) {
    let height = x.len() / width;
    assert!(height <= stride && width * stride <= out.len());
    for i in (0..height).step_by(S::LANES) {
        for j in (0..width).step_by(S::LANES) {
            if i + S::LANES <= height && j + S::LANES <= width {
                let from = (x[i * width + j..].as_ptr(), width);
                let to = (out[j * stride + i..].as_mut_ptr(), stride);
                // SAFETY: rows i..i + LANES and columns j..j + LANES lie inside `x`, and as rows
                // j.. and columns i.. inside `out`, by the assertion.
                unsafe { s.transpose(from, to) };
                continue;
            }
            for i in i..height.min(i + S::LANES) {
                for j in j..width.min(j + S::LANES) {
                    out[j * stride + i] = x[i * width + j];
                }
            }
        }
    }
}

/// Asks for every cache line of `x`.
#[inline(always)]
fn fetch_all<S: Simd>(s: S, x: &[f32]) {
    for c in (0..x.len()).step_by(16) {
        s.prefetch(&raw const x[c]);
    }
}

/// `to *= x`.
#[inline(always)]
fn scale<S: Simd>(s: S, x: &[f32], to: &mut [f32]) {
    let mut c = 0;
    while c < x.len() {
        let n = (x.len() - c).min(S::LANES);
        let product = s.mul(load(s, &to[c..], n), load(s, &x[c..], n));
        store(s, &mut to[c..], n, product);
        c += n;
    }
}
