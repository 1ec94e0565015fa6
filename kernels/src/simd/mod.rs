//! One vector interface, one dispatch table.
//!
//! A kernel is written once, generic over [`Simd`], as a struct that implements [`Kernel`];
//! [`Isa::run`] is the only place that picks an instruction set. A value of an instruction set's
//! type (`Avx2`, `Avx512`) exists only after the processor was asked, so it is a proof that its
//! methods may be executed.
//!
//! Everything a kernel calls with a `Simd` value is `#[inline(always)]`, and closures are not used
//! around vector code: only then is it compiled with the instruction set's features. A part that
//! is used from several places goes through [`Simd::vectorize`] instead, once per set.

mod scalar;
#[cfg(target_arch = "x86_64")]
mod x86;

pub mod math;

use bytemuck::Pod;
use half::{bf16, f16};

use crate::narrow::rounded;

use self::scalar::Scalar;
#[cfg(target_arch = "x86_64")]
use self::x86::{Avx2, Avx512};

/// Lanes of the widest vectors.
const MOST_LANES: usize = 16;

/// A piece of work that is compiled once per instruction set.
pub trait Kernel {
    /// What the work returns.
    type Out;

    /// Does the work. Implementations are `#[inline(always)]`.
    fn run<S: Simd>(self, simd: S) -> Self::Out;
}

/// As [`Kernel`], for work on pairs of bf16 values.
pub trait Bf16Kernel {
    /// What the work returns.
    type Out;

    /// Does the work. Implementations are `#[inline(always)]`.
    fn run<S: Bf16>(self, simd: S) -> Self::Out;
}

/// As [`Kernel`], for work on 8-bit integers.
pub trait Int8Kernel {
    /// What the work returns.
    type Out;

    /// Does the work. Implementations are `#[inline(always)]`.
    fn run<S: Int8>(self, simd: S) -> Self::Out;
}

/// Vectors of `f32` of one instruction set, `LANES` wide.
///
/// `fma(a, b, c)` is `a * b + c`, rounded once where the set has it. A sum over lanes has one fixed
/// order, so equal inputs give equal bits.
pub trait Simd: Copy + Send + Sync + 'static {
    /// A vector.
    type V: Copy;
    /// The result of a comparison.
    type Mask: Copy;
    /// Values in a vector.
    const LANES: usize;
    /// Whether the set has 32 vector registers instead of 16.
    const WIDE: bool;

    /// Runs `kernel` in a function of its own that is compiled for this set.
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Out;
    /// As [`Simd::vectorize`], with the set's products of 8-bit integers.
    fn vectorize_int8<K: Int8Kernel>(self, kernel: K) -> K::Out;

    /// As [`Simd::vectorize`], with the set's products of pairs of bf16 values.
    fn vectorize_bf16<K: Bf16Kernel>(self, kernel: K) -> K::Out {
        self.vectorize(Widened(kernel))
    }

    /// Asks for the cache line at `p`, which need not be a valid address.
    fn prefetch<T>(self, p: *const T);

    /// All lanes `x`.
    fn splat(self, x: f32) -> Self::V;
    /// `LANES` values at `p`.
    ///
    /// # Safety
    /// `p` is valid for reads of `LANES` values.
    unsafe fn load(self, p: *const f32) -> Self::V;
    /// The first `n < LANES` lanes from `p`, the rest zero.
    ///
    /// # Safety
    /// `p` is valid for reads of `n` values.
    unsafe fn load_head(self, p: *const f32, n: usize) -> Self::V;
    /// `LANES` pairs at `p`, widened: the first of each, and the second of each.
    ///
    /// # Safety
    /// `p` is valid for reads of `2 * LANES` values.
    unsafe fn load_bf16_pairs(self, p: *const bf16) -> (Self::V, Self::V);
    /// `LANES` values at `p`, widened.
    ///
    /// # Safety
    /// As [`Simd::load`].
    unsafe fn load_bf16(self, p: *const bf16) -> Self::V;
    /// `LANES` values at `p`, widened.
    ///
    /// # Safety
    /// As [`Simd::load`].
    unsafe fn load_f16(self, p: *const f16) -> Self::V;
    /// Writes all lanes to `p`.
    ///
    /// # Safety
    /// `p` is valid for writes of `LANES` values.
    unsafe fn store(self, p: *mut f32, v: Self::V);
    /// Writes the first `n < LANES` lanes to `p`.
    ///
    /// # Safety
    /// `p` is valid for writes of `n` values.
    unsafe fn store_head(self, p: *mut f32, n: usize, v: Self::V);
    /// Writes all lanes to `p`, past the caches where the set can; others see it after
    /// [`Simd::fence`].
    ///
    /// # Safety
    /// As [`Simd::store`], and `p` is a multiple of the vector's bytes.
    unsafe fn stream(self, p: *mut f32, v: Self::V);
    /// Makes what was streamed seen before what is written next.
    fn fence(self);
    /// Writes the square of `LANES` rows of `LANES` values at `from` with rows and columns swapped.
    ///
    /// # Safety
    /// The rows, `.1` values from one to the next, are valid for reads at `from` and for writes
    /// at `to`.
    #[inline(always)]
    unsafe fn transpose(self, from: (*const f32, usize), to: (*mut f32, usize)) {
        for i in 0..Self::LANES {
            for j in 0..Self::LANES {
                // SAFETY: value j of row i of the one, i of row j of the other.
                unsafe { *to.0.add(j * to.1 + i) = *from.0.add(i * from.1 + j) }
            }
        }
    }

    /// `a + b`.
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a - b`.
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b`.
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a / b`.
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger; `b` when either is not a number.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// The smaller; `b` when either is not a number.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// The nearest whole number, ties to even.
    fn round(self, v: Self::V) -> Self::V;
    /// `2^n` for whole `n` in -126..=127.
    fn pow2(self, n: Self::V) -> Self::V;
    /// Exponent `e` and mantissa `m` of positive normal values: `v = m * 2^e`, `m` in `[0.5, 1)`.
    fn frexp(self, v: Self::V) -> (Self::V, Self::V);
    /// Lanes where `a < b`.
    fn less(self, a: Self::V, b: Self::V) -> Self::Mask;
    /// `a` where the mask is set, else `b`.
    fn select(self, mask: Self::Mask, a: Self::V, b: Self::V) -> Self::V;
    /// The sum of all lanes, in one fixed order.
    fn sum(self, v: Self::V) -> f32;
    /// The sums of four vectors, each in the order of [`Simd::sum`].
    fn sums(self, v: [Self::V; 4]) -> [f32; 4];
    /// The largest lane.
    fn max_lane(self, v: Self::V) -> f32;
}

/// Sums of products of bf16 values, two at a time: vectors of a pair for each of the lanes of a
/// set's `f32` vectors.
pub trait Bf16: Copy {
    /// The set's vectors of `f32`.
    type Floats: Simd;
    /// A pair for each lane.
    type P: Copy;

    /// The set's operations on `f32`.
    fn floats(self) -> Self::Floats;
    /// A pair for each lane at `p`.
    ///
    /// # Safety
    /// `p` is valid for reads of `2 * LANES` values.
    unsafe fn load_pairs(self, p: *const bf16) -> Self::P;
    /// The same pair for all lanes.
    fn splat_pair(self, pair: [bf16; 2]) -> Self::P;
    /// `sum + w[0] x[0] + w[1] x[1]` in `f32`. How often that is rounded is the set's: `f32` never
    /// sees more than its own rounding.
    fn dot_pairs(
        self,
        sum: <Self::Floats as Simd>::V,
        w: Self::P,
        x: Self::P,
    ) -> <Self::Floats as Simd>::V;
}

/// Where the processor does not multiply bf16 itself, pairs are widened.
impl<S: Simd> Bf16 for S {
    type Floats = S;
    type P = (S::V, S::V);

    #[inline(always)]
    fn floats(self) -> S {
        self
    }

    #[inline(always)]
    unsafe fn load_pairs(self, p: *const bf16) -> Self::P {
        // SAFETY: the caller's promise is that of the function called.
        unsafe { self.load_bf16_pairs(p) }
    }

    #[inline(always)]
    fn splat_pair(self, [first, second]: [bf16; 2]) -> Self::P {
        let widen = |value: bf16| f32::from_bits(u32::from(value.to_bits()) << 16);
        (self.splat(widen(first)), self.splat(widen(second)))
    }

    #[inline(always)]
    fn dot_pairs(self, sum: S::V, w: Self::P, x: Self::P) -> S::V {
        self.fma(x.1, w.1, self.fma(x.0, w.0, sum))
    }
}

/// A [`Bf16Kernel`] on widened pairs.
struct Widened<K>(K);

impl<K: Bf16Kernel> Kernel for Widened<K> {
    type Out = K::Out;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> K::Out {
        self.0.run(simd)
    }
}

/// Sums of products of 8-bit integers: vectors of four bytes for each of the lanes of a set's
/// `f32` vectors. They are exact, so equal in every set.
///
/// A sum is begun as `splat_bytes(0)`, takes up to eight products of one kind, and is read as a
/// total: a set is free to hold it in a form of its own meanwhile.
pub trait Int8: Copy {
    /// The set's vectors of `f32`.
    type Floats: Simd;
    /// Four bytes for each lane, or a sum for each lane.
    type I: Copy;
    /// Vectors of sums that registers hold beside what they are made of.
    const SUMS: usize;

    /// The set's operations on `f32`.
    fn floats(self) -> Self::Floats;
    /// Four bytes for each lane at `p`.
    ///
    /// # Safety
    /// `p` is valid for reads of `4 * LANES` bytes.
    unsafe fn load_bytes(self, p: *const u8) -> Self::I;
    /// The same four bytes for all lanes.
    fn splat_bytes(self, bytes: i32) -> Self::I;
    /// The low and the high four bits of each byte.
    fn nibbles(self, bytes: Self::I) -> (Self::I, Self::I);
    /// `sum + w · x` of four signed bytes in -127..=127 each.
    fn dot_i8(self, sum: Self::I, w: Self::I, x: Self::I) -> Self::I;
    /// `sum + w · x` of four bytes in 0..16 and four signed bytes in -127..=127.
    fn dot_u4(self, sum: Self::I, w: Self::I, x: Self::I) -> Self::I;
    /// A sum of [`Int8::dot_i8`] over bytes of `x` that are `x_sum` together.
    fn total_i8(self, sum: Self::I, x_sum: i32) -> <Self::Floats as Simd>::V;
    /// A sum of [`Int8::dot_u4`] with 8 taken from each byte of `w`, over bytes of `x` that are
    /// `x_sum` together.
    fn total_u4(self, sum: Self::I, x_sum: i32) -> <Self::Floats as Simd>::V;
}

/// A stored value of per-token rows. In a vector it is an `f32`.
pub(crate) trait Element: Pod + Send + Sync {
    /// The nearest of its values, ties to even.
    fn nearest(x: f32) -> Self;
    /// `LANES` values at `p`.
    ///
    /// # Safety
    /// `p` is valid for reads of `LANES` values.
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::V;
    /// The first `n < LANES` lanes from `p`, the rest zero.
    ///
    /// # Safety
    /// `p` is valid for reads of `n` values.
    unsafe fn load_head<S: Simd>(s: S, p: *const Self, n: usize) -> S::V;
}

impl Element for f32 {
    #[inline(always)]
    fn nearest(x: f32) -> f32 {
        x
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const f32) -> S::V {
        // SAFETY: the caller's promise is that of the function called.
        unsafe { s.load(p) }
    }

    #[inline(always)]
    unsafe fn load_head<S: Simd>(s: S, p: *const f32, n: usize) -> S::V {
        // SAFETY: the caller's promise is that of the function called.
        unsafe { s.load_head(p, n) }
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn nearest(x: f32) -> bf16 {
        rounded(x)
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const bf16) -> S::V {
        // SAFETY: the caller's promise is that of the function called.
        unsafe { s.load_bf16(p) }
    }

    #[inline(always)]
    unsafe fn load_head<S: Simd>(s: S, p: *const bf16, n: usize) -> S::V {
        let mut head = [bf16::ZERO; MOST_LANES];
        // SAFETY: the caller vouches for n values, `n < LANES <= MOST_LANES`; then all LANES are
        // there.
        unsafe {
            std::ptr::copy_nonoverlapping(p, head.as_mut_ptr(), n);
            s.load_bf16(head.as_ptr())
        }
    }
}

/// The first `n <= LANES` values of `x` as lanes, the rest zero.
#[inline(always)]
pub(crate) fn load<S: Simd>(s: S, x: &[f32], n: usize) -> S::V {
    assert!(n <= x.len());
    // SAFETY: `x` has n values by the assertion, and no more lanes than n are read.
    unsafe { if n >= S::LANES { s.load(x.as_ptr()) } else { s.load_head(x.as_ptr(), n) } }
}

/// Writes the first `n <= LANES` lanes to `out`.
#[inline(always)]
pub(crate) fn store<S: Simd>(s: S, out: &mut [f32], n: usize, v: S::V) {
    assert!(n <= out.len());
    // SAFETY: `out` has n values by the assertion, and no more lanes than n are written.
    unsafe {
        if n >= S::LANES {
            s.store(out.as_mut_ptr(), v)
        } else {
            s.store_head(out.as_mut_ptr(), n, v)
        }
    }
}

/// An instruction set of this processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Isa(Set);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Set {
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
}

impl Isa {
    /// Plain Rust: every processor has it.
    pub const SCALAR: Isa = Isa(Set::Scalar);

    /// The sets this processor has, slowest first.
    pub fn available() -> Vec<Isa> {
        let mut sets = vec![Isa::SCALAR];
        #[cfg(target_arch = "x86_64")]
        {
            if Avx2::detect().is_some() {
                sets.push(Isa(Set::Avx2));
            }
            if Avx512::detect().is_some() {
                sets.push(Isa(Set::Avx512));
            }
            if Avx512::detect_vnni().is_some() {
                sets.push(Isa(Set::Avx512Vnni));
            }
            if Avx512::detect_bf16().is_some() {
                sets.push(Isa(Set::Avx512Bf16));
            }
        }
        sets
    }

    /// The fastest set this processor has.
    pub fn best() -> Isa {
        *Isa::available().last().expect("the scalar set is always there")
    }

    /// The set called `name`: `scalar`, `avx2`, `avx512`, `avx512vnni` or `avx512bf16`.
    ///
    /// # Errors
    /// A sentence that lists the sets of this processor, when `name` is not one of them.
    pub fn by_name(name: &str) -> Result<Isa, String> {
        let sets = Isa::available();
        sets.iter().copied().find(|isa| isa.name() == name).ok_or_else(|| {
            let names: Vec<&str> = sets.iter().map(|isa| isa.name()).collect();
            format!("instruction set '{name}' is not one of this processor's: {}", names.join(", "))
        })
    }

    /// The set's name.
    pub fn name(self) -> &'static str {
        match self.0 {
            Set::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Set::Avx512Vnni => "avx512vnni",
            #[cfg(target_arch = "x86_64")]
            Set::Avx512Bf16 => "avx512bf16",
        }
    }

    /// Whether the set multiplies bf16 values itself, without widening them.
    pub fn has_bf16(self) -> bool {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Set::Avx512Bf16 => true,
            _ => false,
        }
    }

    /// Runs `kernel` compiled for this set: the dispatch table.
    #[inline]
    pub fn run<K: Kernel>(self, kernel: K) -> K::Out {
        match self.0 {
            Set::Scalar => Scalar.vectorize(kernel),
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => Avx2::detect().expect("an Isa is made after detection").vectorize(kernel),
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => {
                Avx512::detect().expect("an Isa is made after detection").vectorize(kernel)
            }
            #[cfg(target_arch = "x86_64")]
            Set::Avx512Vnni => {
                Avx512::detect_vnni().expect("an Isa is made after detection").vectorize(kernel)
            }
            #[cfg(target_arch = "x86_64")]
            Set::Avx512Bf16 => {
                Avx512::detect_bf16().expect("an Isa is made after detection").vectorize(kernel)
            }
        }
    }
}

#[cfg(test)]
mod tests;
