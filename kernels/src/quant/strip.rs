//! Quantised rows against panels of quantised weights, for one thread.
//!
//! Every output is one chain of products and additions over the groups of its inputs in order,
//! from zero; a group's integers are summed exactly. Which rows and panels are computed together
//! changes no output's chain, so no bit either.

use half::f16;

use super::{GROUP_LEN, Group, LINE_BYTES, QUAD_LEN, Quantization, QuantizedPanels, SCALES_BYTES};
use crate::gemm::ahead::Ahead;
use crate::gemm::strip::put;
use crate::panels::PANEL_LEN;
use crate::simd::{Int8, Int8Kernel, Kernel, Simd};

/// Most rows of a tile.
const MOST_HEIGHT: usize = 4;

/// Quads of a group.
const QUADS: usize = GROUP_LEN / QUAD_LEN;

/// `out = x wᵀ`, or `out += x wᵀ`, for some rows and all outputs of a matrix in panels.
pub(crate) struct MultiplyInt8<'a> {
    rows: usize,
    groups: usize,
    x: &'a [Group],
    w: QuantizedPanels<'a>,
    out: *mut f32,
    out_stride: usize,
    add: bool,
}

impl<'a> MultiplyInt8<'a> {
    /// `rows` rows of `x`, whole groups for each and row after row, against `w`; `out` comes with
    /// the values from one row to the next.
    ///
    /// # Panics
    /// When `x` has another length.
    ///
    /// # Safety
    /// Rows `0..rows` of `out` are valid for writes of `w.rows` values, reads too when `add`, and
    /// nothing else uses `out` until this has run or is dropped.
    #[inline(always)]
    pub(crate) unsafe fn new(
        rows: usize,
        x: &'a [Group],
        w: QuantizedPanels<'a>,
        (out, out_stride): (*mut f32, usize),
        add: bool,
    ) -> Self {
        let groups = w.cols().div_ceil(GROUP_LEN);
        assert_eq!(x.len(), rows * groups, "groups for {rows} rows of {} values", w.cols());
        MultiplyInt8 { rows, groups, x, w, out, out_stride, add }
    }
}

impl Kernel for MultiplyInt8<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        s.vectorize_int8(self);
    }
}

impl Int8Kernel for MultiplyInt8<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Int8>(self, s: S) {
        match self.w.quantization() {
            Quantization::Q8 => self.all::<S, 8>(s),
            Quantization::Q4 => self.all::<S, 4>(s),
        }
    }
}

/// Vectors of a panel.
const fn vectors<S: Int8>() -> usize {
    PANEL_LEN / <S::Floats as Simd>::LANES
}

impl MultiplyInt8<'_> {
    /// Weights of `BITS` bits.
    #[inline(always)]
    fn all<S: Int8, const BITS: usize>(&self, s: S) {
        let panels = self.w.rows().div_ceil(PANEL_LEN);
        let mut panel = 0;
        // As in `gemm::strip`: few rows are bound by the reads of weights, more rows want the
        // registers for themselves.
        while panel < panels {
            let j = panel * PANEL_LEN;
            let left = panels - panel;
            let wide = match self.rows {
                1 => 4,
                2 => 2,
                _ if <S::Floats as Simd>::WIDE => 4,
                _ => 1,
            }
            .min(S::SUMS / vectors::<S>());
            panel += if left >= 4 && wide == 4 {
                self.panels::<S, BITS, 4>(s, j)
            } else if left >= 2 && wide >= 2 {
                self.panels::<S, BITS, 2>(s, j)
            } else {
                self.panels::<S, BITS, 1>(s, j)
            };
        }
    }

    /// All rows against `PANELS` panels; returns how many these are.
    #[inline(always)]
    fn panels<S: Int8, const BITS: usize, const PANELS: usize>(&self, s: S, j: usize) -> usize {
        match PANELS * vectors::<S>() {
            1 => self.group::<S, BITS, 1>(s, j),
            2 => self.group::<S, BITS, 2>(s, j),
            4 => self.group::<S, BITS, 4>(s, j),
            _ => self.group::<S, BITS, 8>(s, j),
        }
        PANELS
    }

    /// All rows against `VECTORS` vectors of outputs, from output `j` on, the first of a panel.
    #[inline(always)]
    fn group<S: Int8, const BITS: usize, const VECTORS: usize>(&self, s: S, j: usize) {
        let most = (S::SUMS / VECTORS).clamp(1, MOST_HEIGHT);
        let panels = VECTORS / vectors::<S>();
        let mut left = self.rows;
        while left > 0 {
            let height = left.div_ceil(left.div_ceil(most));
            let i = self.rows - left;
            let ahead = Ahead::of(i, panels, self.panel_bytes::<BITS>());
            match height {
                1 => self.tile::<S, BITS, 1, VECTORS>(s, i, j, ahead),
                2 => self.tile::<S, BITS, 2, VECTORS>(s, i, j, ahead),
                3 => self.tile::<S, BITS, 3, VECTORS>(s, i, j, ahead),
                _ => self.tile::<S, BITS, 4, VECTORS>(s, i, j, ahead),
            }
            left -= height;
        }
    }

    #[inline(always)]
    fn panel_bytes<const BITS: usize>(&self) -> usize {
        self.groups * group_bytes::<BITS>()
    }

    #[inline(always)]
    fn tile<S: Int8, const BITS: usize, const M: usize, const VECTORS: usize>(
        &self,
        s: S,
        i: usize,
        j: usize,
        ahead: Ahead,
    ) {
        if M * VECTORS > S::SUMS {
            unreachable!("more sums than registers: not compiled");
        }
        debug_assert!(i + M <= self.rows && j < self.w.rows() && j.is_multiple_of(PANEL_LEN));
        let f = s.floats();
        let panel_bytes = self.panel_bytes::<BITS>();
        let of_panel = vectors::<S>();
        let lanes = <S::Floats as Simd>::LANES;
        let mut acc = [[f.splat(0.0); VECTORS]; M];
        // SAFETY: rows i..i + M have `groups` groups each, and the panels from output j on are
        // whole, as the constructor asserts.
        unsafe {
            let mut x: [*const Group; M] =
                std::array::from_fn(|r| self.x.as_ptr().add((i + r) * self.groups));
            let mut w = self.w.bytes().as_ptr().add(j / PANEL_LEN * panel_bytes);
            for group in 0..self.groups {
                let ahead = ahead.at(group * group_bytes::<BITS>());
                let mut sums = [[s.splat_bytes(0); VECTORS]; M];
                for c in (0..VECTORS).step_by(of_panel) {
                    f.prefetch(w.wrapping_add(c / of_panel * panel_bytes + ahead));
                }
                for line in 0..lines::<BITS>() {
                    for c in 0..VECTORS {
                        let at = SCALES_BYTES + line * LINE_BYTES + c / of_panel * panel_bytes;
                        let p = w.add(at + c % of_panel * lanes * QUAD_LEN);
                        if c % of_panel == 0 {
                            f.prefetch(p.wrapping_add(ahead));
                        }
                        let bytes = s.load_bytes(p);
                        for (sums, x) in sums.iter_mut().zip(x) {
                            let quads = (&raw const (*x).values).cast::<i32>();
                            if BITS == 8 {
                                let x = s.splat_bytes(*quads.add(line));
                                sums[c] = s.dot_i8(sums[c], bytes, x);
                            } else {
                                let (low, high) = s.nibbles(bytes);
                                let (first, second) = (
                                    s.splat_bytes(*quads.add(2 * line)),
                                    s.splat_bytes(*quads.add(2 * line + 1)),
                                );
                                sums[c] = s.dot_u4(sums[c], low, first);
                                sums[c] = s.dot_u4(sums[c], high, second);
                            }
                        }
                    }
                }
                for c in 0..VECTORS {
                    let at = c / of_panel * panel_bytes + c % of_panel * lanes * 2;
                    let scales = f.load_f16(w.add(at).cast::<f16>());
                    for r in 0..M {
                        let Group { sum, scale, .. } = *x[r];
                        let total = if BITS == 8 {
                            s.total_i8(sums[r][c], sum)
                        } else {
                            s.total_u4(sums[r][c], sum)
                        };
                        let scale = f.mul(scales, f.splat(scale));
                        acc[r][c] = f.add(acc[r][c], f.mul(total, scale));
                    }
                }
                w = w.wrapping_add(group_bytes::<BITS>());
                x = x.map(|x| x.wrapping_add(1));
            }
            for (r, acc) in acc.iter().enumerate() {
                let out = self.out.wrapping_add((i + r) * self.out_stride);
                for (c, acc) in acc.iter().enumerate() {
                    let j = j + c * lanes;
                    // Row i + r and outputs below `outputs` are those of the constructor.
                    put(f, out.wrapping_add(j), self.w.rows().saturating_sub(j), *acc, self.add);
                }
            }
        }
    }
}

const fn lines<const BITS: usize>() -> usize {
    QUADS * BITS / 8
}

const fn group_bytes<const BITS: usize>() -> usize {
    SCALES_BYTES + lines::<BITS>() * LINE_BYTES
}
