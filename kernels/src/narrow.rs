//! Working memory of products: their rows in fewer bits, made once for the operator.

use half::bf16;

use crate::device::Cpu;
use crate::gemm::pairs::Pair;
use crate::quant::{GROUP_LEN, Group, quantize_row};
use crate::rows::Rows;
use crate::simd::{Kernel, Simd};
use crate::threads::Shards;

/// Rows per task.
const ROWS: usize = 8;

/// What products want of activations beside f32.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Forms {
    /// Groups of 8-bit integers, for quantised weights.
    pub int8: bool,
    /// Pairs of bf16 values, where bf16 weights are multiplied as such.
    pub bf16: bool,
}

/// Working memory of products: the rows they multiply, in fewer bits, and sums that wait. Made once
/// for the largest batch; a larger product makes it grow.
#[derive(Debug, Default)]
pub struct NarrowRows {
    groups: Vec<Group>,
    pairs: Vec<Pair>,
    sums: Vec<f32>,
}

impl NarrowRows {
    /// For `rows` rows of up to `width` values.
    pub fn new(forms: Forms, rows: usize, width: usize) -> NarrowRows {
        let (groups, pairs) = lengths(forms, rows, width);
        NarrowRows {
            groups: vec![Group::default(); groups],
            pairs: vec![Pair::default(); pairs],
            sums: Vec::new(),
        }
    }

    /// The same with room for sums of `rows` rows of `outputs` outputs that wait to be added.
    pub fn with_sums(mut self, rows: usize, outputs: usize) -> NarrowRows {
        self.sums = vec![0.0; rows * outputs];
        self
    }

    /// Bytes of [`NarrowRows::new`].
    pub fn bytes(forms: Forms, rows: usize, width: usize) -> usize {
        let (groups, pairs) = lengths(forms, rows, width);
        let of_groups = groups.saturating_mul(size_of::<Group>());
        of_groups.saturating_add(pairs.saturating_mul(size_of::<Pair>()))
    }

    /// Overwrites everything: tests poison what kernels must not rely on.
    pub fn poison(&mut self) {
        self.groups.fill(Group::POISON);
        self.pairs.fill([bf16::NAN; 2]);
        self.sums.fill(f32::NAN);
    }

    /// Memory for so many sums, to be given back.
    pub(crate) fn take_sums(&mut self, len: usize) -> Vec<f32> {
        reserve(&mut self.sums, len);
        std::mem::take(&mut self.sums)
    }

    /// Takes back what [`NarrowRows::take_sums`] gave.
    pub(crate) fn give_sums(&mut self, sums: Vec<f32>) {
        self.sums = sums;
    }

    /// Groups for `rows` rows of `width` values, to write.
    pub(crate) fn reserve_groups(&mut self, rows: usize, width: usize) -> &mut [Group] {
        reserve(&mut self.groups, rows * width.div_ceil(GROUP_LEN))
    }

    /// Pairs for `rows` rows of `width` values, to write.
    pub(crate) fn reserve_pairs(&mut self, rows: usize, width: usize) -> &mut [Pair] {
        reserve(&mut self.pairs, rows * width.div_ceil(2))
    }

    /// The rows of `x`, quantised: whole groups for each, row after row.
    pub(crate) fn quantize(&mut self, cpu: &Cpu, x: Rows<'_>) -> &[Group] {
        let groups = self.reserve_groups(x.count(), x.width());
        each_row(cpu, x, groups, |x, groups| quantize_row(cpu, x, groups));
        &*groups
    }

    /// The rows of `x`, rounded: whole pairs for each, row after row.
    pub(crate) fn round(&mut self, cpu: &Cpu, x: Rows<'_>) -> &[Pair] {
        let pairs = self.reserve_pairs(x.count(), x.width());
        each_row(cpu, x, pairs, |x, pairs| round_row(cpu, x, pairs));
        &*pairs
    }
}

fn reserve<T: Clone + Default>(memory: &mut Vec<T>, len: usize) -> &mut [T] {
    if memory.len() < len {
        memory.resize(len, T::default());
    }
    &mut memory[..len]
}

fn lengths(forms: Forms, rows: usize, width: usize) -> (usize, usize) {
    let of = |wanted: bool, len: usize| if wanted { rows.saturating_mul(len) } else { 0 };
    (of(forms.int8, width.div_ceil(GROUP_LEN)), of(forms.bf16, width.div_ceil(2)))
}

/// Calls `body` with each row of `x` and its part of `out`.
fn each_row<T: Send + Sync>(
    cpu: &Cpu,
    x: Rows<'_>,
    out: &mut [T],
    body: impl Fn(&[f32], &mut [T]) + Sync,
) {
    let per_row = out.len() / x.count().max(1);
    let shards = Shards::new(out);
    cpu.gang.run(x.count().div_ceil(ROWS), |_, task| {
        for i in task * ROWS..x.count().min((task + 1) * ROWS) {
            // SAFETY: row i belongs to one task.
            body(x.row(i), unsafe { shards.slice_mut(i * per_row..(i + 1) * per_row) });
        }
    });
}

/// Rounds values to whole pairs, to the nearest, ties to even; the second of an odd last pair is
/// zero. What is not a number stays so.
///
/// # Panics
/// When they are more than the pairs hold.
pub(crate) fn round_row(cpu: &Cpu, x: &[f32], pairs: &mut [Pair]) {
    assert_eq!(x.len().div_ceil(2), pairs.len(), "pairs for another row");
    cpu.isa.run(Round { x, pairs });
}

struct Round<'a> {
    x: &'a [f32],
    pairs: &'a mut [Pair],
}

impl Kernel for Round<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let (whole, rest) = self.x.as_chunks::<2>();
        for (x, pair) in whole.iter().zip(self.pairs.iter_mut()) {
            *pair = [rounded(x[0]), rounded(x[1])];
        }
        if let [last] = rest {
            self.pairs[whole.len()] = [rounded(*last), bf16::ZERO];
        }
    }
}

/// As `bf16::from_f32`, without a branch.
#[inline(always)]
pub(crate) fn rounded(x: f32) -> bf16 {
    let bits = x.to_bits();
    let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    // A payload that loses its bits would be an infinity.
    let quiet = bits >> 16 | 0x40;
    bf16::from_bits(if x.is_nan() { quiet } else { nearest } as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_is_that_of_bf16() {
        let exponents = (0..=255u32).flat_map(|e| {
            [0, 1, 0x7fff, 0x8000, 0x8001, 0x1_7fff, 0x1_8000, 0x7f_7fff, 0x7f_8000, 0x7f_ffff]
                .map(|mantissa| e << 23 | mantissa)
        });
        for bits in exponents.flat_map(|bits| [bits, bits | 1 << 31]) {
            let x = f32::from_bits(bits);
            assert_eq!(rounded(x).to_bits(), bf16::from_f32(x).to_bits(), "{bits:#010x}");
        }
    }
}
