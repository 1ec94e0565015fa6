//! Activations, quantised for the products of an operator.

use super::{GROUP_LEN, Group, ROUNDING, naive};
use crate::device::Cpu;
use crate::rows::Rows;
use crate::simd::{Kernel, Simd};

/// Quantises values to whole groups.
///
/// # Panics
/// When they are more than the groups hold.
pub(crate) fn quantize_row(cpu: &Cpu, x: &[f32], groups: &mut [Group]) {
    assert_eq!(x.len().div_ceil(GROUP_LEN), groups.len(), "groups for another row");
    cpu.isa.run(Quantize { x, groups });
}

/// Quantises rows on this thread: whole groups for each, row after row.
///
/// # Panics
/// When there are not as many groups.
pub(crate) fn quantize_rows(cpu: &Cpu, x: Rows<'_>, groups: &mut [Group]) {
    let per_row = x.width().div_ceil(GROUP_LEN);
    assert_eq!(x.count() * per_row, groups.len(), "groups for other rows");
    for (i, groups) in groups.chunks_exact_mut(per_row).enumerate() {
        quantize_row(cpu, x.row(i), groups);
    }
}

struct Quantize<'a> {
    x: &'a [f32],
    groups: &'a mut [Group],
}

impl Kernel for Quantize<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (whole, rest) = self.x.as_chunks::<GROUP_LEN>();
        for (x, group) in whole.iter().zip(self.groups.iter_mut()) {
            *group = quantized(s, x);
        }
        if !rest.is_empty() {
            let mut x = [0.0; GROUP_LEN];
            x[..rest.len()].copy_from_slice(rest);
            self.groups[whole.len()] = quantized(s, &x);
        }
    }
}

#[inline(always)]
fn quantized<S: Simd>(s: S, x: &[f32; GROUP_LEN]) -> Group {
    const { assert!(GROUP_LEN.is_multiple_of(16), "whole vectors of any set") };
    let zero = s.splat(0.0);
    let (mut most, mut broken) = (zero, zero);
    for part in x.chunks_exact(S::LANES) {
        // SAFETY: the part has LANES values.
        let v = unsafe { s.load(part.as_ptr()) };
        most = s.max(most, s.max(v, s.sub(zero, v)));
        // Zero times what is not finite is not a number.
        broken = s.fma(v, zero, broken);
    }
    if s.sum(broken) != 0.0 || s.sum(broken).is_nan() {
        return Group { values: [0; GROUP_LEN], sum: 0, scale: f32::NAN };
    }
    let most = s.max_lane(most);
    if most < naive::LEAST {
        return Group::default();
    }
    let (inverse, rounding) = (s.splat(127.0 / most), s.splat(ROUNDING));
    let mut rounded = [0.0f32; GROUP_LEN];
    for (part, out) in x.chunks_exact(S::LANES).zip(rounded.chunks_exact_mut(S::LANES)) {
        // SAFETY: both parts have LANES values.
        unsafe {
            let v = s.load(part.as_ptr());
            s.store(out.as_mut_ptr(), s.add(s.mul(v, inverse), rounding));
        }
    }
    let mut group = Group { values: [0; GROUP_LEN], sum: 0, scale: most / 127.0 };
    for (value, rounded) in group.values.iter_mut().zip(rounded) {
        *value = rounded.to_bits() as i8;
    }
    group.sum = group.values.iter().map(|value| i32::from(*value)).sum();
    group
}
