//! Rows of bf16 pairs against panels of bf16 weights, for one thread.
//!
//! As in [`strip`](super::strip), every output is one chain over its inputs in order, here two
//! inputs at a time, and which rows and panels are computed together changes no bit.

use half::bf16;

use super::ahead::Ahead;
use super::strip::put;
use crate::panels::PANEL_LEN;
use crate::simd::{Bf16, Bf16Kernel, Kernel, Simd};

/// Two inputs of a row.
pub(crate) type Pair = [bf16; 2];

/// `out = x wᵀ`, or `out += x wᵀ`, for some rows and all outputs of a matrix in panels.
pub(crate) struct MultiplyPairs<'a> {
    rows: usize,
    outputs: usize,
    x: &'a [Pair],
    w: &'a [bf16],
    out: *mut f32,
    out_stride: usize,
    add: bool,
}

impl<'a> MultiplyPairs<'a> {
    /// `rows` rows of `x`, row after row, against `w`, whole panels of `outputs` outputs; `out`
    /// comes with the values from one row to the next.
    ///
    /// # Panics
    /// When `x` and `w` have other lengths.
    ///
    /// # Safety
    /// Rows `0..rows` of `out` are valid for writes of `outputs` values, reads too when `add`, and
    /// nothing else uses `out` until this has run or is dropped.
    #[inline(always)]
    pub(crate) unsafe fn new(
        rows: usize,
        x: &'a [Pair],
        (w, outputs): (&'a [bf16], usize),
        (out, out_stride): (*mut f32, usize),
        add: bool,
    ) -> Self {
        let pairs = x.len() / rows.max(1);
        assert_eq!(pairs * rows, x.len(), "rows of other lengths");
        assert_eq!(
            w.len(),
            outputs.next_multiple_of(PANEL_LEN) * pairs * 2,
            "panels of other rows"
        );
        MultiplyPairs { rows, outputs, x, w, out, out_stride, add }
    }

    fn pairs(&self) -> usize {
        self.x.len() / self.rows
    }
}

impl Kernel for MultiplyPairs<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        s.vectorize_bf16(self);
    }
}

/// Vectors of a panel.
const fn vectors<S: Bf16>() -> usize {
    PANEL_LEN / <S::Floats as Simd>::LANES
}

impl Bf16Kernel for MultiplyPairs<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Bf16>(self, s: S) {
        if self.rows == 0 {
            return;
        }
        let panels = self.outputs.div_ceil(PANEL_LEN);
        let mut panel = 0;
        while panel < panels {
            let (j, left) = (panel * PANEL_LEN, panels - panel);
            let wide = match self.rows {
                1 => 4,
                2 => 2,
                _ if <S::Floats as Simd>::WIDE => 4,
                _ => 1,
            };
            panel += if left >= 4 && wide == 4 {
                self.panels::<S, 4>(s, j)
            } else if left >= 2 && wide >= 2 {
                self.panels::<S, 2>(s, j)
            } else {
                self.panels::<S, 1>(s, j)
            };
        }
    }
}

impl MultiplyPairs<'_> {
    /// All rows against `PANELS` panels; returns how many these are.
    #[inline(always)]
    fn panels<S: Bf16, const PANELS: usize>(&self, s: S, j: usize) -> usize {
        match PANELS * vectors::<S>() {
            1 => self.group::<S, 1>(s, j),
            2 => self.group::<S, 2>(s, j),
            4 => self.group::<S, 4>(s, j),
            _ => self.group::<S, 8>(s, j),
        }
        PANELS
    }

    /// All rows against `VECTORS` vectors of outputs, from output `j` on, the first of a panel.
    #[inline(always)]
    fn group<S: Bf16, const VECTORS: usize>(&self, s: S, j: usize) {
        let registers = if <S::Floats as Simd>::WIDE { 24 } else { 10 };
        let most = (registers / VECTORS).clamp(1, 6);
        let panels = VECTORS / vectors::<S>();
        let mut left = self.rows;
        while left > 0 {
            let height = left.div_ceil(left.div_ceil(most));
            let i = self.rows - left;
            let panel_bytes = self.pairs() * PANEL_LEN * size_of::<Pair>();
            let ahead = Ahead::of(i, panels, panel_bytes);
            match height {
                1 => self.tile::<S, 1, VECTORS>(s, i, j, ahead),
                2 => self.tile::<S, 2, VECTORS>(s, i, j, ahead),
                3 => self.tile::<S, 3, VECTORS>(s, i, j, ahead),
                4 => self.tile::<S, 4, VECTORS>(s, i, j, ahead),
                5 => self.tile::<S, 5, VECTORS>(s, i, j, ahead),
                _ => self.tile::<S, 6, VECTORS>(s, i, j, ahead),
            }
            left -= height;
        }
    }

    #[inline(always)]
    fn tile<S: Bf16, const M: usize, const VECTORS: usize>(
        &self,
        s: S,
        i: usize,
        j: usize,
        ahead: Ahead,
    ) {
        debug_assert!(i + M <= self.rows && j < self.outputs && j.is_multiple_of(PANEL_LEN));
        let f = s.floats();
        let (pairs, of_panel) = (self.pairs(), vectors::<S>());
        let lanes = <S::Floats as Simd>::LANES;
        let panel_values = pairs * 2 * PANEL_LEN;
        let mut acc = [[f.splat(0.0); VECTORS]; M];
        // SAFETY: rows i..i + M have `pairs` pairs each, and the panels from output j on are whole,
        // as the constructor asserts; rows and outputs of `out` are its caller's promise.
        unsafe {
            let x: [*const Pair; M] = std::array::from_fn(|r| self.x.as_ptr().add((i + r) * pairs));
            let mut w = self.w.as_ptr().add(j / PANEL_LEN * panel_values);
            for at in 0..pairs {
                let ahead = ahead.at(at * PANEL_LEN * size_of::<Pair>());
                let weights: [S::P; VECTORS] = std::array::from_fn(|c| {
                    let line = w.wrapping_add(c / of_panel * panel_values);
                    if c % of_panel == 0 {
                        f.prefetch(line.cast::<u8>().wrapping_add(ahead));
                    }
                    s.load_pairs(line.add(c % of_panel * lanes * 2))
                });
                for (acc, x) in acc.iter_mut().zip(x) {
                    let x = s.splat_pair(*x.add(at));
                    for (acc, weights) in acc.iter_mut().zip(weights) {
                        *acc = s.dot_pairs(*acc, weights, x);
                    }
                }
                w = w.wrapping_add(PANEL_LEN * 2);
            }
            for (r, acc) in acc.iter().enumerate() {
                for (c, acc) in acc.iter().enumerate() {
                    let column = j + c * lanes;
                    let out = self.out.wrapping_add((i + r) * self.out_stride + column);
                    put(f, out, self.outputs.saturating_sub(column), *acc, self.add);
                }
            }
        }
    }
}
