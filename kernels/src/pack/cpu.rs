//! The fast form: the heads of a state shared among the threads.
//!
//! What is done to a value is written in plain `f32` and integers, without the vectors of
//! [`Simd`], which know no narrow stores: the loops are simple enough to be compiled to vectors for
//! each instruction set. A head is read row by row, so that memory is streamed; the second reading
//! that 8 bits need finds it in the cache.

use half::bf16;

use super::{MOST_STEPS, PackedDtype, Packing, Part};
use crate::arena::{Arena, ArenaParts};
use crate::device::Cpu;
use crate::meter::Work;
use crate::simd::{Kernel, Simd};

/// Packs the slot at byte `source` of `from` to the packed slot at byte `target` of `to`.
///
/// # Panics
/// When either leaves its arena or does not start at a multiple of 64 bytes.
pub fn pack(
    cpu: &Cpu,
    packing: &Packing,
    from: &Arena,
    source: usize,
    to: &mut Arena,
    target: usize,
) {
    packing.check((from, source), (to, target));
    let _timed = cpu.meter.time("pack", || work(packing));
    for (part, source, target) in packing.places(source, target) {
        let Part::State { heads, value_dim, key_dim } = part else {
            to.copy_from(target, from, source, part.slot_bytes());
            continue;
        };
        let place = Place { packed: target, slot: source, heads, value_dim, key_dim };
        let parts = to.parts();
        cpu.gang.run(heads, |_, head| {
            let state = from.f32s(place.state(head), place.head_values());
            match packing.dtype {
                PackedDtype::Bf16 => {
                    // SAFETY: a task is alone with its head.
                    let packed = unsafe { place.halves(&parts, head) };
                    cpu.isa.run(PackBf16 { state, packed });
                }
                PackedDtype::Int8 => {
                    // SAFETY: a task is alone with its head.
                    let (scales, steps) = unsafe { place.steps(&parts, head) };
                    cpu.isa.run(PackInt8 { state, scales, steps });
                }
            }
        });
    }
}

/// About one operation a value, and both slots once.
fn work(packing: &Packing) -> Work {
    let (slot, packed) = (packing.slot_bytes(), packing.packed_bytes());
    Work::f32(slot / size_of::<f32>(), slot + packed)
}

/// Unpacks the packed slot at byte `source` of `from` to the slot at byte `target` of `to`.
///
/// # Panics
/// As [`pack`].
pub fn unpack(
    cpu: &Cpu,
    packing: &Packing,
    from: &Arena,
    source: usize,
    to: &mut Arena,
    target: usize,
) {
    packing.check((to, target), (from, source));
    let _timed = cpu.meter.time("unpack", || work(packing));
    for (part, target, source) in packing.places(target, source) {
        let Part::State { heads, value_dim, key_dim } = part else {
            to.copy_from(target, from, source, part.slot_bytes());
            continue;
        };
        let place = Place { packed: source, slot: target, heads, value_dim, key_dim };
        let parts = to.parts();
        cpu.gang.run(heads, |_, head| {
            // SAFETY: a task is alone with its head.
            let state = unsafe { parts.f32s_mut(place.state(head), place.head_values()) };
            match packing.dtype {
                PackedDtype::Bf16 => {
                    let packed = from.values(place.half(head), place.head_values());
                    cpu.isa.run(UnpackBf16 { packed, state });
                }
                PackedDtype::Int8 => {
                    let scales = from.f32s(place.scale(head), key_dim);
                    let steps = from.values(place.step(head), place.head_values());
                    cpu.isa.run(UnpackInt8 { scales, steps, state });
                }
            }
        });
    }
}

/// Where a state lies, in a slot and packed.
#[derive(Clone, Copy)]
struct Place {
    slot: usize,
    packed: usize,
    heads: usize,
    value_dim: usize,
    key_dim: usize,
}

impl Place {
    fn head_values(&self) -> usize {
        self.value_dim * self.key_dim
    }

    /// Offset of a head in the slot.
    fn state(&self, head: usize) -> usize {
        self.slot + head * self.head_values() * size_of::<f32>()
    }

    /// Offset of a head's bf16 values.
    fn half(&self, head: usize) -> usize {
        self.packed + head * self.head_values() * size_of::<bf16>()
    }

    /// Offset of a head's scales.
    fn scale(&self, head: usize) -> usize {
        self.packed + head * self.key_dim * size_of::<f32>()
    }

    /// Offset of a head's 8-bit values, which follow the scales of all heads.
    fn step(&self, head: usize) -> usize {
        self.scale(self.heads) + head * self.head_values()
    }

    /// A head's bf16 values, to write.
    ///
    /// # Safety
    /// The caller is alone with this head of the state.
    unsafe fn halves<'a>(&self, parts: &ArenaParts<'a>, head: usize) -> &'a mut [bf16] {
        // SAFETY: heads lie apart, and the caller is alone with this one.
        unsafe { parts.values_mut(self.half(head), self.head_values()) }
    }

    /// A head's scales and 8-bit values, to write.
    ///
    /// # Safety
    /// The caller is alone with this head of the state.
    unsafe fn steps<'a>(
        &self,
        parts: &ArenaParts<'a>,
        head: usize,
    ) -> (&'a mut [f32], &'a mut [i8]) {
        // SAFETY: scales and values lie apart, those of heads too, and the caller is alone with
        // this head.
        unsafe {
            (
                parts.f32s_mut(self.scale(head), self.key_dim),
                parts.values_mut(self.step(head), self.head_values()),
            )
        }
    }
}

struct PackBf16<'a> {
    state: &'a [f32],
    packed: &'a mut [bf16],
}

impl Kernel for PackBf16<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (packed, x) in self.packed.iter_mut().zip(self.state) {
            *packed = bf16::from_bits(round_to_bf16(*x));
        }
    }
}

/// The upper half of the bits after half a unit of the lower was added, a little less where that
/// makes a tie even. The sum carries into the exponent where it must; a NaN is kept from it.
#[inline(always)]
fn round_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let quiet = bits >> 16 | 0x40;
    (if bits & 0x7fff_ffff > 0x7f80_0000 { quiet } else { rounded }) as u16
}

struct UnpackBf16<'a> {
    packed: &'a [bf16],
    state: &'a mut [f32],
}

impl Kernel for UnpackBf16<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (x, packed) in self.state.iter_mut().zip(self.packed) {
            *x = f32::from_bits(u32::from(packed.to_bits()) << 16);
        }
    }
}

/// One head: `state` and `steps` are rows as wide as `scales`.
struct PackInt8<'a> {
    state: &'a [f32],
    scales: &'a mut [f32],
    steps: &'a mut [i8],
}

impl Kernel for PackInt8<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let key_dim = self.scales.len();
        self.scales.fill(0.0);
        for row in self.state.chunks_exact(key_dim) {
            for (largest, x) in self.scales.iter_mut().zip(row) {
                // x * 0 is 0 for every number, and NaN, which stays, for an infinity or a NaN.
                let size = x.abs();
                *largest = (if size > *largest { size } else { *largest }) + x * 0.0;
            }
        }
        for scale in self.scales.iter_mut() {
            *scale = scale_of(*scale);
        }
        for (row, steps) in
            self.state.chunks_exact(key_dim).zip(self.steps.chunks_exact_mut(key_dim))
        {
            for ((steps, x), scale) in steps.iter_mut().zip(row).zip(self.scales.iter()) {
                *steps = steps_of(*x, *scale);
            }
        }
    }
}

/// The scale for a largest size; every NaN becomes the same one.
#[inline(always)]
fn scale_of(largest: f32) -> f32 {
    let scale = largest / MOST_STEPS;
    let scale = if scale < f32::MIN_POSITIVE { f32::MIN_POSITIVE } else { scale };
    let scale = if largest == 0.0 { 0.0 } else { scale };
    if largest.is_nan() { f32::NAN } else { scale }
}

/// The nearest whole number of scales. The sum with 1.5 * 2^23 has a unit of 1 in its last place,
/// so it rounds, ties to even, and its low byte is the whole number in two's complement.
#[inline(always)]
fn steps_of(x: f32, scale: f32) -> i8 {
    const WHOLE: f32 = 12_582_912.0;
    let steps = if scale > 0.0 { x / scale } else { 0.0 };
    let steps = if steps < MOST_STEPS { steps } else { MOST_STEPS };
    let steps = if steps > -MOST_STEPS { steps } else { -MOST_STEPS };
    (steps + WHOLE).to_bits() as i8
}

/// One head: `steps` and `state` are rows as wide as `scales`.
struct UnpackInt8<'a> {
    scales: &'a [f32],
    steps: &'a [i8],
    state: &'a mut [f32],
}

impl Kernel for UnpackInt8<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let key_dim = self.scales.len();
        for (row, steps) in
            self.state.chunks_exact_mut(key_dim).zip(self.steps.chunks_exact(key_dim))
        {
            for ((x, steps), scale) in row.iter_mut().zip(steps).zip(self.scales) {
                *x = f32::from(*steps) * scale;
            }
        }
    }
}
