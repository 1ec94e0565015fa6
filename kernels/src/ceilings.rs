//! What a processor can do at most: memory streamed with nothing computed, and arithmetic on
//! registers with no memory touched. The loops only; who times them decides how long.
//!
//! Each loop keeps enough independent chains of one instruction in flight to hide its latency, and
//! the chains start from different values, so that a compiler may not make one of them. Nothing is
//! rounded away: the results are returned and depend on every step.

use std::hint::black_box;

use crate::simd::{Int8, Int8Kernel, Isa, Kernel, Simd};

/// Arithmetic that has a peak of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Arithmetic {
    /// Fused multiply-add of f32 (`vfmadd`).
    F32,
    /// Products of bf16 pairs summed in f32 (`vdpbf16ps`).
    Bf16,
    /// Products of 8-bit integers summed in 32 bits (`vpdpbusd`, or what a set has for it).
    Int8,
    /// Products of 4-bit and 8-bit integers, summed likewise.
    Int4,
}

impl Arithmetic {
    /// All of them.
    pub const ALL: [Arithmetic; 4] =
        [Arithmetic::F32, Arithmetic::Bf16, Arithmetic::Int8, Arithmetic::Int4];

    /// The name people see.
    pub fn as_str(self) -> &'static str {
        match self {
            Arithmetic::F32 => "f32",
            Arithmetic::Bf16 => "bf16",
            Arithmetic::Int8 => "int8",
            Arithmetic::Int4 => "int4",
        }
    }

    /// Whether set `isa` of this processor can do it.
    pub fn is_available(self, isa: Isa) -> bool {
        match self {
            Arithmetic::F32 | Arithmetic::Int8 | Arithmetic::Int4 => true,
            Arithmetic::Bf16 => isa.name().starts_with("avx512") && has_bf16(),
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn has_bf16() -> bool {
    is_x86_feature_detected!("avx512bf16")
}

#[cfg(not(target_arch = "x86_64"))]
fn has_bf16() -> bool {
    false
}

/// Reads all of `data` once; returns a sum of it.
///
/// # Panics
/// When its length is no multiple of 128 values.
pub fn read(isa: Isa, data: &[f32]) -> f32 {
    assert!(data.len().is_multiple_of(128), "{} values are not whole rounds", data.len());
    isa.run(Read { data })
}

/// Copies `from` to `to` past the caches where the set can; `to` starts at a multiple of 64 bytes.
///
/// # Panics
/// When the lengths differ, or are no multiple of 64 values, or `to` is not aligned.
pub fn copy(isa: Isa, from: &[f32], to: &mut [f32]) {
    assert_eq!(from.len(), to.len(), "a copy of other length");
    assert!(to.len().is_multiple_of(64), "{} values are not whole lines", to.len());
    assert!(to.as_ptr().addr().is_multiple_of(64), "streamed lines are aligned");
    isa.run(Copy { from, to });
}

/// Does `rounds` rounds of `arithmetic` on registers; returns how many operations that is, a
/// multiply-add being two.
///
/// # Panics
/// When the processor lacks it; see [`Arithmetic::is_available`].
pub fn compute(isa: Isa, arithmetic: Arithmetic, rounds: usize) -> f64 {
    assert!(arithmetic.is_available(isa), "{} is not there", arithmetic.as_str());
    match arithmetic {
        Arithmetic::F32 => isa.run(MultiplyAdd { rounds }),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the processor was asked, by the assertion.
        Arithmetic::Bf16 => unsafe { dot_bf16(rounds) },
        #[cfg(not(target_arch = "x86_64"))]
        Arithmetic::Bf16 => unreachable!("never available here"),
        Arithmetic::Int8 => isa.run(Dot::<8> { rounds }),
        Arithmetic::Int4 => isa.run(Dot::<4> { rounds }),
    }
}

struct Read<'a> {
    data: &'a [f32],
}

impl Kernel for Read<'_> {
    type Out = f32;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        const CHAINS: usize = 8;
        let mut sums = [s.splat(0.0); CHAINS];
        for part in self.data.chunks_exact(CHAINS * S::LANES) {
            for (i, sum) in sums.iter_mut().enumerate() {
                // SAFETY: the part has CHAINS vectors.
                *sum = s.add(*sum, unsafe { s.load(part.as_ptr().add(i * S::LANES)) });
            }
        }
        s.sum(sums.into_iter().fold(s.splat(0.0), |a, b| s.add(a, b)))
    }
}

struct Copy<'a> {
    from: &'a [f32],
    to: &'a mut [f32],
}

impl Kernel for Copy<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let lanes = S::LANES;
        for (from, to) in self.from.chunks_exact(lanes).zip(self.to.chunks_exact_mut(lanes)) {
            // SAFETY: both have a vector, and `to` is aligned: it started so, as `copy` asserts,
            // and advances by whole vectors.
            unsafe { s.stream(to.as_mut_ptr(), s.load(from.as_ptr())) }
        }
        s.fence();
    }
}

struct MultiplyAdd {
    rounds: usize,
}

impl Kernel for MultiplyAdd {
    type Out = f64;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f64 {
        // With two operands they fit the sixteen registers of the smaller sets.
        const CHAINS: usize = 12;
        let (x, y) = (s.splat(black_box(0.5)), s.splat(black_box(1.0)));
        let mut sums = [y; CHAINS];
        for (i, sum) in sums.iter_mut().enumerate() {
            *sum = s.splat(i as f32);
        }
        for _ in 0..self.rounds {
            for sum in &mut sums {
                *sum = s.fma(*sum, x, y);
            }
        }
        black_box(s.sum(sums.into_iter().fold(y, |a, b| s.add(a, b))));
        (self.rounds * CHAINS * S::LANES * 2) as f64
    }
}

#[cfg(target_arch = "x86_64")]
const DOT_CHAINS: usize = 16;

/// `rounds` rounds of `vdpbf16ps`: 32 products and as many sums each.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
fn dot_bf16(rounds: usize) -> f64 {
    use std::arch::x86_64::*;
    let one = _mm512_set1_ps(black_box(1.0));
    let x = _mm512_cvtne2ps_pbh(one, one);
    let mut sums = [one; DOT_CHAINS];
    for (i, sum) in sums.iter_mut().enumerate() {
        *sum = _mm512_set1_ps(i as f32);
    }
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm512_dpbf16_ps(*sum, x, x);
        }
    }
    black_box(sums.into_iter().fold(one, |a, b| _mm512_add_ps(a, b)));
    (rounds * DOT_CHAINS * 32 * 2) as f64
}

/// Products with weights of `BITS` bits. A sum is what its next products are made of: a set whose
/// form has several steps does all of them each time.
struct Dot<const BITS: usize> {
    rounds: usize,
}

impl<const BITS: usize> Kernel for Dot<BITS> {
    type Out = f64;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f64 {
        s.vectorize_int8(self)
    }
}

impl<const BITS: usize> Int8Kernel for Dot<BITS> {
    type Out = f64;

    #[inline(always)]
    fn run<S: Int8>(self, s: S) -> f64 {
        const CHAINS: usize = 12;
        let w = s.splat_bytes(black_box(0x0102_0304));
        let mut sums = [w; CHAINS];
        for (i, sum) in sums.iter_mut().enumerate() {
            *sum = s.splat_bytes(i as i32);
        }
        for _ in 0..self.rounds {
            for sum in &mut sums {
                *sum = if BITS == 8 { s.dot_i8(*sum, *sum, w) } else { s.dot_u4(*sum, w, *sum) };
            }
        }
        let f = s.floats();
        for sum in sums {
            black_box(f.sum(s.total_i8(sum, 0)));
        }
        (self.rounds * CHAINS * <S::Floats as Simd>::LANES * 4 * 2) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::Arena;

    #[test]
    fn every_set_reads_and_copies_all_of_it() {
        for isa in Isa::available() {
            let mut arena = Arena::new(2 * 4096 * size_of::<f32>()).expect("some memory");
            let values = arena.f32s_mut(0, 8192);
            let (from, to) = values.split_at_mut(4096);
            from.iter_mut().enumerate().for_each(|(i, x)| *x = (i % 7) as f32);
            copy(isa, from, to);
            assert_eq!(from, to, "{}", isa.name());
            assert_eq!(read(isa, to), from.iter().sum::<f32>(), "{}", isa.name());
        }
    }

    #[test]
    fn operations_are_counted_by_round() {
        for isa in Isa::available() {
            let there = Arithmetic::ALL.into_iter().filter(|a| a.is_available(isa));
            for arithmetic in there {
                let one = compute(isa, arithmetic, 1);
                assert!(one >= 192.0, "{}: {one}", arithmetic.as_str());
                assert_eq!(compute(isa, arithmetic, 10), 10.0 * one);
            }
        }
    }

    #[test]
    #[should_panic(expected = "bf16 is not there")]
    fn what_a_set_lacks_is_refused() {
        compute(Isa::SCALAR, Arithmetic::Bf16, 1);
    }
}
