//! Rows against panels of weights, for one thread.
//!
//! Every output is one chain of fused products and additions over the inputs in order, from zero.
//! Which rows and panels are computed together changes no output's chain, so no bit either. Many
//! rows go over a block of the inputs after the other, so that the caches hold what they use again;
//! a chain waits in `out` meanwhile.

use std::ops::Range;

use half::{bf16, f16};

use super::ahead::Ahead;
use crate::matrix::Values;
use crate::panels::{PANEL_LEN, PanelValue, StoredPanels};
use crate::simd::{Kernel, Simd};

/// Most rows that read weights only once: they go over all inputs at a time.
const FEW_ROWS: usize = 8;

/// Bytes of a block of a panel, at most.
const PANEL_BYTES: usize = 32 << 10;

/// Inputs that `rows` rows go over at a time.
pub(crate) fn block_inputs(rows: usize, w: StoredPanels<'_>) -> usize {
    if rows <= FEW_ROWS {
        return w.cols().max(1);
    }
    let most = PANEL_BYTES / (PANEL_LEN * w.values().dtype().bytes());
    let blocks = w.cols().div_ceil(most).max(1);
    // Pairs stay together.
    w.cols().div_ceil(blocks).next_multiple_of(2)
}

/// A stored value that panels of weights are made of.
trait Weight: PanelValue + Send + Sync + 'static {
    /// The weights of `LANES` outputs for the inputs that lie beside each other; the second vector
    /// counts where these are two.
    ///
    /// # Safety
    /// `p` is valid for reads of `LANES * INPUTS` values.
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> (S::V, S::V);
}

impl Weight for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> (S::V, S::V) {
        // SAFETY: the caller's promise is that of the function called.
        let values = unsafe { s.load(p) };
        (values, values)
    }
}

impl Weight for f16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> (S::V, S::V) {
        // SAFETY: the caller's promise is that of the function called.
        let values = unsafe { s.load_f16(p) };
        (values, values)
    }
}

impl Weight for bf16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> (S::V, S::V) {
        // SAFETY: the caller's promise is that of the function called.
        unsafe { s.load_bf16_pairs(p) }
    }
}

/// `out = x wᵀ`, or `out += x wᵀ`, for some rows and all outputs of a matrix in panels.
pub(crate) struct Multiply<'w> {
    rows: usize,
    x: (*const f32, usize),
    w: StoredPanels<'w>,
    out: (*mut f32, usize),
    add: bool,
}

impl<'w> Multiply<'w> {
    /// `rows` rows of `x` against `w`; pointers come with the values from one row to the next.
    ///
    /// # Panics
    /// When something is to be added to and the inputs are cut into blocks.
    ///
    /// # Safety
    /// Rows `0..rows` of `x` are valid for reads of `w.cols` values, rows `0..rows` of `out` for
    /// writes and reads of `w.rows` values, and nothing else uses `out` until this has run or is
    /// dropped.
    #[inline(always)]
    pub(crate) unsafe fn new(
        rows: usize,
        x: (*const f32, usize),
        w: StoredPanels<'w>,
        out: (*mut f32, usize),
        add: bool,
    ) -> Self {
        assert!(!add || block_inputs(rows, w) >= w.cols(), "a chain that waits in its sum");
        Multiply { rows, x, w, out, add }
    }

    #[inline(always)]
    fn strip<E: Weight>(&self, w: &[E]) -> Strip<E> {
        Strip {
            rows: self.rows,
            outputs: self.w.rows(),
            inputs: self.w.cols(),
            block: block_inputs(self.rows, self.w),
            panel_values: self.w.panel_values(),
            x: self.x.0,
            x_stride: self.x.1,
            w: w.as_ptr(),
            out: self.out.0,
            out_stride: self.out.1,
            add: self.add,
        }
    }
}

impl Kernel for Multiply<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.w.values() {
            Values::F32(w) => s.vectorize(self.strip(w)),
            Values::Bf16(w) => s.vectorize(self.strip(w)),
            Values::F16(w) => s.vectorize(self.strip(w)),
        }
    }
}

/// A [`Multiply`] of one type of weights: [`StoredPanels`] holds all values of the panels of
/// `outputs` outputs.
struct Strip<E> {
    rows: usize,
    outputs: usize,
    inputs: usize,
    /// Inputs that the rows go over at a time.
    block: usize,
    panel_values: usize,
    x: *const f32,
    x_stride: usize,
    w: *const E,
    out: *mut f32,
    out_stride: usize,
    add: bool,
}

impl<E: Weight> Strip<E> {
    /// All rows against `VECTORS` vectors of outputs, from output `j` on, the first of a panel.
    #[inline(always)]
    fn group<S: Simd, const VECTORS: usize>(&self, s: S, j: usize, inputs: Range<usize>) {
        // Pieces of nearly equal height: a low last one would read the weights for little.
        // Two vectors of weights at a time take registers from the sums.
        let sums = if S::WIDE { 24 } else { 14 - 2 * E::INPUTS };
        let most = (sums / VECTORS).clamp(1, 6);
        let panels = VECTORS * S::LANES / PANEL_LEN;
        let mut left = self.rows;
        while left > 0 {
            let height = left.div_ceil(left.div_ceil(most));
            let i = self.rows - left;
            let ahead = Ahead::of(i, panels, self.panel_values * size_of::<E>());
            match height {
                1 => self.tile::<S, 1, VECTORS>(s, i, j, inputs.clone(), ahead),
                2 => self.tile::<S, 2, VECTORS>(s, i, j, inputs.clone(), ahead),
                3 => self.tile::<S, 3, VECTORS>(s, i, j, inputs.clone(), ahead),
                4 => self.tile::<S, 4, VECTORS>(s, i, j, inputs.clone(), ahead),
                5 => self.tile::<S, 5, VECTORS>(s, i, j, inputs.clone(), ahead),
                _ => self.tile::<S, 6, VECTORS>(s, i, j, inputs.clone(), ahead),
            }
            left -= height;
        }
    }

    #[inline(always)]
    fn tile<S: Simd, const M: usize, const VECTORS: usize>(
        &self,
        s: S,
        i: usize,
        j: usize,
        inputs: Range<usize>,
        ahead: Ahead,
    ) {
        debug_assert!(i + M <= self.rows && j < self.outputs && j.is_multiple_of(PANEL_LEN));
        debug_assert!(inputs.end <= self.inputs && inputs.start.is_multiple_of(E::INPUTS));
        let panel_values = self.panel_values;
        let whole = inputs.end - inputs.end % E::INPUTS;
        // SAFETY: rows i..i + M and the inputs below `inputs` are those that
        // `Multiply::new`'s caller vouched for; the panels from output j on are whole.
        unsafe {
            let x = std::array::from_fn(|r| self.x.add((i + r) * self.x_stride));
            let mut w = self.w.add(j / PANEL_LEN * panel_values + inputs.start * PANEL_LEN);
            let mut acc = [[s.splat(0.0); VECTORS]; M];
            if inputs.start > 0 {
                for (r, acc) in acc.iter_mut().enumerate() {
                    let out = self.out.wrapping_add((i + r) * self.out_stride);
                    for (c, acc) in acc.iter_mut().enumerate() {
                        let j = j + c * S::LANES;
                        let n = self.outputs.saturating_sub(j);
                        *acc = get(s, out.wrapping_add(j), n);
                    }
                }
            }
            let mut at = inputs.start;
            while at < whole {
                let ahead = ahead.at(at * PANEL_LEN * size_of::<E>());
                let (first, second) = load_line::<S, E, VECTORS>(s, w, panel_values, ahead);
                add_input::<S, M, VECTORS>(s, &x, at, first, &mut acc);
                if E::INPUTS == 2 {
                    add_input::<S, M, VECTORS>(s, &x, at + 1, second, &mut acc);
                }
                at += E::INPUTS;
                w = w.wrapping_add(PANEL_LEN * E::INPUTS);
            }
            if at < inputs.end {
                let ahead = ahead.at(at * PANEL_LEN * size_of::<E>());
                let (first, _) = load_line::<S, E, VECTORS>(s, w, panel_values, ahead);
                add_input::<S, M, VECTORS>(s, &x, at, first, &mut acc);
            }
            for (r, acc) in acc.iter().enumerate() {
                let out = self.out.wrapping_add((i + r) * self.out_stride);
                for (c, acc) in acc.iter().enumerate() {
                    let j = j + c * S::LANES;
                    // Row i + r and outputs below `outputs` are those of `Multiply::new`.
                    put(s, out.wrapping_add(j), self.outputs.saturating_sub(j), *acc, self.add);
                }
            }
        }
    }
}

/// The first `n` values at `out`, or as many as a vector has.
///
/// # Safety
/// They are valid for reads.
#[inline(always)]
unsafe fn get<S: Simd>(s: S, out: *const f32, n: usize) -> S::V {
    // SAFETY: the caller's promise.
    unsafe {
        match n {
            0 => s.splat(0.0),
            n if n < S::LANES => s.load_head(out, n),
            _ => s.load(out),
        }
    }
}

/// Writes or adds the first `n` lanes to `out`, all of them where there are so many.
///
/// # Safety
/// `out` is valid for writes of `n` values, or of `LANES` if these are fewer; reads too when `add`.
#[inline(always)]
pub(crate) unsafe fn put<S: Simd>(s: S, out: *mut f32, n: usize, sum: S::V, add: bool) {
    // SAFETY: the caller's promise.
    unsafe {
        if n >= S::LANES {
            let sum = if add { s.add(s.load(out), sum) } else { sum };
            s.store(out, sum);
        } else if n > 0 {
            let sum = if add { s.add(s.load_head(out, n), sum) } else { sum };
            s.store_head(out, n, sum);
        }
    }
}

/// A line of each panel: the weights of the inputs that lie beside each other. What lies `ahead`
/// bytes behind each is asked for.
///
/// # Safety
/// `w` is valid for reads of a line, and so is what lies `panel_values` behind it, for each panel
/// that the vectors belong to.
#[inline(always)]
unsafe fn load_line<S: Simd, E: Weight, const VECTORS: usize>(
    s: S,
    w: *const E,
    panel_values: usize,
    ahead: usize,
) -> ([S::V; VECTORS], [S::V; VECTORS]) {
    let vectors_of_panel = PANEL_LEN / S::LANES;
    let (mut first, mut second) = ([s.splat(0.0); VECTORS], [s.splat(0.0); VECTORS]);
    for c in 0..VECTORS {
        let line = w.wrapping_add(c / vectors_of_panel * panel_values);
        if c % vectors_of_panel == 0 {
            s.prefetch(line.cast::<u8>().wrapping_add(ahead));
        }
        // SAFETY: the caller's promise.
        unsafe {
            let part = line.add(c % vectors_of_panel * S::LANES * E::INPUTS);
            (first[c], second[c]) = E::load(s, part);
        }
    }
    (first, second)
}

/// Adds what input `at` of each row gives.
///
/// # Safety
/// Each row is valid for a read of that input.
#[inline(always)]
unsafe fn add_input<S: Simd, const M: usize, const VECTORS: usize>(
    s: S,
    x: &[*const f32; M],
    at: usize,
    weights: [S::V; VECTORS],
    acc: &mut [[S::V; VECTORS]; M],
) {
    for (acc, x) in acc.iter_mut().zip(x) {
        // SAFETY: the caller's promise.
        let value = s.splat(unsafe { *x.add(at) });
        for (acc, weights) in acc.iter_mut().zip(weights) {
            *acc = s.fma(value, weights, *acc);
        }
    }
}

impl<E: Weight> Kernel for Strip<E> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut from = 0;
        loop {
            let to = self.inputs.min(from + self.block);
            self.all_panels(s, from..to);
            from = to;
            if from == self.inputs {
                return;
            }
        }
    }
}

impl<E: Weight> Strip<E> {
    #[inline(always)]
    fn all_panels<S: Simd>(&self, s: S, inputs: Range<usize>) {
        let panels = self.outputs.div_ceil(PANEL_LEN);
        let mut panel = 0;
        // Few rows are bound by the reads of weights: panels beside each other, each a stream of
        // its own. More rows want the registers for themselves.
        while panel < panels {
            let j = panel * PANEL_LEN;
            let left = panels - panel;
            let wide = match self.rows {
                1 => 4,
                2 => 2,
                _ if S::WIDE => 4,
                _ => 1,
            };
            panel += if left >= 4 && wide == 4 {
                self.panels::<S, 4>(s, j, inputs.clone())
            } else if left >= 2 && wide >= 2 {
                self.panels::<S, 2>(s, j, inputs.clone())
            } else {
                self.panels::<S, 1>(s, j, inputs.clone())
            };
        }
    }

    /// All rows against `PANELS` panels; returns how many these are.
    #[inline(always)]
    fn panels<S: Simd, const PANELS: usize>(&self, s: S, j: usize, inputs: Range<usize>) -> usize {
        match PANELS * (PANEL_LEN / S::LANES) {
            1 => self.group::<S, 1>(s, j, inputs),
            2 => self.group::<S, 2>(s, j, inputs),
            4 => self.group::<S, 4>(s, j, inputs),
            _ => self.group::<S, 8>(s, j, inputs),
        }
        PANELS
    }
}
