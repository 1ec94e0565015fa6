//! The two inner products everything else is made of, on raw strided arrays, for one thread.
//!
//! [`Nt`]: both operands have the summed index contiguous (rows of KDA's chunks, MLA's queries and
//! latents). The sum runs over `k` in lanes: lane `l` adds the products at `l, l + LANES, ...` in
//! order, then the lanes are added in a fixed order. [`Nn`]: the second operand has the output
//! index contiguous (values as cached, the delta rows of KDA). Each output adds its products in
//! order of `k`.
//!
//! Tiles only choose which outputs are computed together. An output's own order of operations is
//! the same in every tile, so results do not depend on `m` or on an output's place.

use crate::simd::{Element, Kernel, Simd};

/// Bytes of a cache line.
const LINE_BYTES: usize = 64;

/// `out[i][j] = Σ_k x[i][k] w[j][k]`, or `+=`.
pub(crate) struct Nt<E> {
    m: usize,
    n: usize,
    k: usize,
    x: *const f32,
    x_stride: usize,
    w: *const E,
    w_stride: usize,
    out: *mut f32,
    out_stride: usize,
    add: bool,
}

impl<E: Element> Nt<E> {
    /// `m` rows of `x` against `n` rows of `w`, both `k` long.
    ///
    /// # Safety
    /// Rows `0..m` of `x` and `0..n` of `w` are valid for reads of `k` values, rows `0..m` of
    /// `out` for writes of `n`, reads too when `add`, and nothing else uses `out` meanwhile.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)]
    pub(crate) unsafe fn new(
        (m, n, k): (usize, usize, usize),
        (x, x_stride): (*const f32, usize),
        (w, w_stride): (*const E, usize),
        (out, out_stride): (*mut f32, usize),
        add: bool,
    ) -> Self {
        Nt { m, n, k, x, x_stride, w, w_stride, out, out_stride, add }
    }

    /// Rows `i..i + M` of all columns: the nearest cache keeps the rows.
    #[inline(always)]
    fn piece<S: Simd, const M: usize>(&self, s: S, i: usize) {
        let mut j = 0;
        if M == 1 {
            // One row is bound by the reads of `w`: more rows of it in flight.
            while j + 8 <= self.n {
                self.tile::<S, M, 8>(s, i, j);
                j += 8;
            }
        }
        while j + 4 <= self.n {
            self.tile::<S, M, 4>(s, i, j);
            j += 4;
        }
        while j < self.n {
            self.tile::<S, M, 1>(s, i, j);
            j += 1;
        }
    }

    #[inline(always)]
    fn tile<S: Simd, const M: usize, const N: usize>(&self, s: S, i: usize, j: usize) {
        debug_assert!(i + M <= self.m && j + N <= self.n);
        // SAFETY: rows i..i + M, columns j..j + N and indices below k are those the constructor's
        // caller vouched for.
        unsafe {
            let x = self.x.add(i * self.x_stride);
            let w = self.w.add(j * self.w_stride);
            let mut acc = [[s.splat(0.0); N]; M];
            let whole = self.k - self.k % S::LANES;
            let mut at = 0;
            while at < whole {
                if i == 0 && at.is_multiple_of(LINE_BYTES / size_of::<E>()) {
                    // Rows of `w` are too short for the processor to see a stream in each: the
                    // first rows of `x` ask for the next ones.
                    for c in N..2 * N {
                        s.prefetch(w.wrapping_add(c * self.w_stride + at));
                    }
                }
                let mut rows = [s.splat(0.0); M];
                for (r, row) in rows.iter_mut().enumerate() {
                    *row = s.load(x.add(r * self.x_stride + at));
                }
                for c in 0..N {
                    let column = E::load(s, w.add(c * self.w_stride + at));
                    for (acc, row) in acc.iter_mut().zip(rows) {
                        acc[c] = s.fma(row, column, acc[c]);
                    }
                }
                at += S::LANES;
            }
            if whole < self.k {
                let rest = self.k - whole;
                for c in 0..N {
                    let column = E::load_head(s, w.add(c * self.w_stride + whole), rest);
                    for (r, acc) in acc.iter_mut().enumerate() {
                        let row = s.load_head(x.add(r * self.x_stride + whole), rest);
                        acc[c] = s.fma(row, column, acc[c]);
                    }
                }
            }
            for (r, acc) in acc.iter().enumerate() {
                let out = self.out.add((i + r) * self.out_stride + j);
                let (fours, rest) = acc.as_chunks::<4>();
                for (c, four) in fours.iter().enumerate() {
                    for (l, sum) in s.sums(*four).into_iter().enumerate() {
                        let out = out.add(4 * c + l);
                        *out = if self.add { *out + sum } else { sum };
                    }
                }
                for (c, acc) in rest.iter().enumerate() {
                    let out = out.add(4 * fours.len() + c);
                    let sum = s.sum(*acc);
                    *out = if self.add { *out + sum } else { sum };
                }
            }
        }
    }
}

impl<E: Element> Kernel for Nt<E> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // Pieces of nearly equal height.
        let most = if S::WIDE { 6 } else { 3 };
        let mut left = self.m;
        while left > 0 {
            let height = left.div_ceil(left.div_ceil(most));
            let i = self.m - left;
            match height {
                1 => self.piece::<S, 1>(s, i),
                2 => self.piece::<S, 2>(s, i),
                3 => self.piece::<S, 3>(s, i),
                4 => self.piece::<S, 4>(s, i),
                5 => self.piece::<S, 5>(s, i),
                _ => self.piece::<S, 6>(s, i),
            }
            left -= height;
        }
    }
}

/// `out[i][j] = start + Σ_k a[i][k] b[k][j]`, where `start` is `out[i][j]` or 0.
pub(crate) struct Nn<E, const FETCH: bool> {
    m: usize,
    n: usize,
    k: usize,
    a: *const f32,
    a_strides: (usize, usize),
    b: *const E,
    b_stride: usize,
    out: *mut f32,
    out_stride: usize,
    add: bool,
    fetch: Fetch,
}

/// Memory that is asked for on the way, because the next product reads it.
#[derive(Clone, Copy)]
struct Fetch {
    at: *const u8,
    /// The last line asked for.
    last: *const u8,
    /// Bytes further with each step.
    step: usize,
}

impl<E: Element> Nn<E, false> {
    /// `m` rows of `a`, whose value `[i][k]` lies at `i * a_strides.0 + k * a_strides.1`, against
    /// `k` rows of `b`, `n` long.
    ///
    /// # Safety
    /// Those values of `a` are valid for reads, rows `0..k` of `b` for reads of `n` values, rows
    /// `0..m` of `out` for writes of `n`, reads too when `add`, and nothing else uses `out`
    /// meanwhile.
    #[inline(always)]
    pub(crate) unsafe fn new(
        (m, n, k): (usize, usize, usize),
        (a, a_strides): (*const f32, (usize, usize)),
        (b, b_stride): (*const E, usize),
        (out, out_stride): (*mut f32, usize),
        add: bool,
    ) -> Self {
        let fetch = Fetch { at: b.cast(), last: b.cast(), step: 0 };
        Nn { m, n, k, a, a_strides, b, b_stride, out, out_stride, add, fetch }
    }

    /// The same, which asks for `memory` on its way, so that the next product finds it.
    #[inline(always)]
    pub(crate) fn fetching<S: Simd>(self, memory: &[u8]) -> Nn<E, true> {
        let Nn { m, n, k, a, a_strides, b, b_stride, out, out_stride, add, .. } = self;
        let columns = n / S::LANES;
        let pieces =
            m.div_ceil(most_rows::<S>(vectors::<S>(m))) * columns.div_ceil(vectors::<S>(m));
        let range = memory.as_ptr_range();
        let step = memory.len().div_ceil((pieces * k).max(1)).min(2 * LINE_BYTES);
        let fetch = Fetch { at: range.start, last: range.end, step };
        Nn { m, n, k, a, a_strides, b, b_stride, out, out_stride, add, fetch }
    }
}

/// Vectors of columns of a piece that has all of its kind.
const fn vectors<S: Simd>(rows: usize) -> usize {
    match rows {
        // Few rows want more columns, or their sums would wait for each other.
        0..=1 => 8,
        2..=3 => 4,
        _ if S::WIDE => 4,
        _ => 2,
    }
}

/// Most rows of a piece, of which the registers hold all sums.
const fn most_rows<S: Simd>(vectors: usize) -> usize {
    match vectors {
        1 => 8,
        2 => 6,
        4 if S::WIDE => 5,
        4 => 3,
        _ => 1,
    }
}

impl<E: Element, const FETCH: bool> Nn<E, FETCH> {
    /// `N` vectors of columns from `j` on, all rows.
    #[inline(always)]
    fn strip<S: Simd, const N: usize>(&mut self, s: S, j: usize) {
        // Pieces of nearly equal height.
        let most = const { most_rows::<S>(N) };
        let mut left = self.m;
        while left > 0 {
            let height = left.div_ceil(left.div_ceil(most));
            let i = self.m - left;
            match height {
                1 => self.tile::<S, 1, N>(s, i, j),
                2 => self.tile::<S, 2, N>(s, i, j),
                3 => self.tile::<S, 3, N>(s, i, j),
                4 => self.tile::<S, 4, N>(s, i, j),
                5 => self.tile::<S, 5, N>(s, i, j),
                7 if N == 1 => self.tile::<S, 7, N>(s, i, j),
                8 if N == 1 => self.tile::<S, 8, N>(s, i, j),
                _ => self.tile::<S, 6, N>(s, i, j),
            }
            left -= height;
        }
    }

    #[inline(always)]
    fn tile<S: Simd, const M: usize, const N: usize>(&mut self, s: S, i: usize, j: usize) {
        debug_assert!(i + M <= self.m && j + N * S::LANES <= self.n);
        // SAFETY: rows i..i + M, columns j..j + N * LANES and indices below k are those the
        // constructor's caller vouched for.
        unsafe {
            let out = self.out.add(i * self.out_stride + j);
            let mut acc = [[s.splat(0.0); N]; M];
            if self.add {
                for (r, acc) in acc.iter_mut().enumerate() {
                    for (c, acc) in acc.iter_mut().enumerate() {
                        *acc = s.load(out.add(r * self.out_stride + c * S::LANES));
                    }
                }
            }
            let mut a = self.a.add(i * self.a_strides.0);
            let mut b = self.b.add(j);
            let mut fetch = self.fetch;
            for _ in 0..self.k {
                if FETCH {
                    s.prefetch(fetch.at);
                    s.prefetch(fetch.at.wrapping_add(LINE_BYTES));
                    fetch.at = fetch.at.wrapping_add(fetch.step).min(fetch.last);
                }
                let mut columns = [s.splat(0.0); N];
                for (c, column) in columns.iter_mut().enumerate() {
                    *column = E::load(s, b.add(c * S::LANES));
                }
                for (r, acc) in acc.iter_mut().enumerate() {
                    let factor = s.splat(*a.add(r * self.a_strides.0));
                    for (acc, column) in acc.iter_mut().zip(columns) {
                        *acc = s.fma(factor, column, *acc);
                    }
                }
                a = a.wrapping_add(self.a_strides.1);
                b = b.wrapping_add(self.b_stride);
            }
            self.fetch = fetch;
            for (r, acc) in acc.iter().enumerate() {
                for (c, acc) in acc.iter().enumerate() {
                    s.store(out.add(r * self.out_stride + c * S::LANES), *acc);
                }
            }
        }
    }

    /// The last `n - j < LANES` columns.
    #[inline(always)]
    fn edge<S: Simd>(&self, s: S, j: usize) {
        let rest = self.n - j;
        debug_assert!(rest < S::LANES);
        for i in 0..self.m {
            // SAFETY: row i, columns j..n and indices below k are those the constructor's caller
            // vouched for.
            unsafe {
                let out = self.out.add(i * self.out_stride + j);
                let mut acc = if self.add { s.load_head(out, rest) } else { s.splat(0.0) };
                for k in 0..self.k {
                    let factor = *self.a.add(i * self.a_strides.0 + k * self.a_strides.1);
                    let column = E::load_head(s, self.b.add(k * self.b_stride + j), rest);
                    acc = s.fma(s.splat(factor), column, acc);
                }
                s.store_head(out, rest, acc);
            }
        }
    }
}

impl<E: Element, const FETCH: bool> Kernel for Nn<E, FETCH> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let mut j = 0;
        let most = vectors::<S>(self.m);
        if most == 8 {
            while j + 8 * S::LANES <= self.n {
                self.strip::<S, 8>(s, j);
                j += 8 * S::LANES;
            }
        }
        if most >= 4 {
            while j + 4 * S::LANES <= self.n {
                self.strip::<S, 4>(s, j);
                j += 4 * S::LANES;
            }
        }
        while j + 2 * S::LANES <= self.n {
            self.strip::<S, 2>(s, j);
            j += 2 * S::LANES;
        }
        while j + S::LANES <= self.n {
            self.strip::<S, 1>(s, j);
            j += S::LANES;
        }
        if j < self.n {
            self.edge(s, j);
        }
    }
}
