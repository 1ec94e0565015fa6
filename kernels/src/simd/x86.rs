//! AVX2 (8 lanes, 16 registers) and AVX-512 (16 lanes, 32 registers).
//!
//! A value of these types is made by `detect` alone, after the processor was asked: that is what
//! makes the intrinsics below safe to execute, and every `SAFETY` comment of this file that says
//! "the set is there" means it.

use std::arch::is_x86_feature_detected;
use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{Bf16, Bf16Kernel, Int8, Int8Kernel, Kernel, Simd};

/// AVX2 with FMA and F16C.
#[derive(Debug, Clone, Copy)]
pub struct Avx2(());

impl Avx2 {
    /// The set, when the processor has it.
    #[inline]
    pub fn detect() -> Option<Avx2> {
        let there = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        there.then_some(Avx2(()))
    }
}

/// A mask with the first `n < 8` lanes set, for `maskload` and `maskstore`.
#[inline(always)]
fn head8(n: usize) -> __m256i {
    const ONES_THEN_ZEROS: [i32; 16] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];
    debug_assert!(n < 8);
    // SAFETY: 8 - n..16 - n lies inside the 16 values for n < 8; the set is there.
    unsafe { _mm256_loadu_si256(ONES_THEN_ZEROS.as_ptr().add(8 - (n & 7)).cast()) }
}

/// Sum of eight lanes: halves, then quarters, then pairs.
#[inline(always)]
fn sum8(v: __m256) -> f32 {
    // SAFETY: the set is there.
    unsafe {
        let four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<0b01>(two, two)))
    }
}

/// [`sum8`] of four vectors.
#[inline(always)]
fn sums8([a, b, c, d]: [__m256; 4]) -> [f32; 4] {
    let (ab, cd) = (halves8(a, b), halves8(c, d));
    // SAFETY: the set is there, and `out` holds four values.
    unsafe {
        let quarters = _mm256_add_ps(_mm256_unpacklo_ps(ab, cd), _mm256_unpackhi_ps(ab, cd));
        let sums = _mm256_add_ps(quarters, _mm256_permute_ps::<0b1110>(quarters));
        let (ac, bd) = (_mm256_castps256_ps128(sums), _mm256_extractf128_ps::<1>(sums));
        let mut out = [0.0; 4];
        _mm_storeu_ps(out.as_mut_ptr(), _mm_unpacklo_ps(ac, bd));
        out
    }
}

/// The lower half plus the upper half of `a`, then of `b`.
#[inline(always)]
fn halves8(a: __m256, b: __m256) -> __m256 {
    // SAFETY: the set is there.
    unsafe { _mm256_add_ps(_mm256_blend_ps::<0xf0>(a, b), _mm256_permute2f128_ps::<0x21>(a, b)) }
}

/// A square of eight by eight values with rows and columns swapped.
///
/// # Safety
/// Eight rows, `.1` values from one to the next, are valid for reads at `from` and for writes at
/// `to`.
#[inline(always)]
unsafe fn transpose8(from: (*const f32, usize), to: (*mut f32, usize)) {
    for right in [0, 4] {
        // SAFETY: the caller vouches for eight values in each of eight rows; the set is there.
        unsafe {
            let from = (from.0.add(right), from.1);
            let (a, b) = (four_and_four(from, 0), four_and_four(from, 1));
            let (c, d) = (four_and_four(from, 2), four_and_four(from, 3));
            let to = (to.0.add(right * to.1), to.1);
            let (ab, cd) = (_mm256_unpacklo_ps(a, b), _mm256_unpacklo_ps(c, d));
            _mm256_storeu_ps(to.0, _mm256_shuffle_ps::<0b01_00_01_00>(ab, cd));
            _mm256_storeu_ps(to.0.add(to.1), _mm256_shuffle_ps::<0b11_10_11_10>(ab, cd));
            let (ab, cd) = (_mm256_unpackhi_ps(a, b), _mm256_unpackhi_ps(c, d));
            _mm256_storeu_ps(to.0.add(2 * to.1), _mm256_shuffle_ps::<0b01_00_01_00>(ab, cd));
            _mm256_storeu_ps(to.0.add(3 * to.1), _mm256_shuffle_ps::<0b11_10_11_10>(ab, cd));
        }
    }
}

/// Four values of row `i`, then of row `i + 4`.
///
/// # Safety
/// They are valid for reads.
#[inline(always)]
unsafe fn four_and_four((from, stride): (*const f32, usize), i: usize) -> __m256 {
    // SAFETY: the caller vouches for the values; the set is there.
    unsafe {
        let lower = _mm256_castps128_ps256(_mm_loadu_ps(from.add(i * stride)));
        _mm256_insertf128_ps::<1>(lower, _mm_loadu_ps(from.add((i + 4) * stride)))
    }
}

#[inline(always)]
fn max8(v: __m256) -> f32 {
    // SAFETY: the set is there.
    unsafe {
        let four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<0b01>(two, two)))
    }
}

const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

// One-line bodies below are `unsafe` for one reason: the intrinsic needs the set, and `self` proves
// that it is there.
macro_rules! op {
    ($(fn $name:ident($($arg:ident: $type:ty),*) -> $out:ty = $body:expr;)*) => {$(
        #[inline(always)]
        fn $name(self $(, $arg: $type)*) -> $out {
            // SAFETY: the set is there.
            unsafe { $body }
        }
    )*};
}

impl Simd for Avx2 {
    type V = __m256;
    type Mask = __m256;
    const LANES: usize = 8;
    const WIDE: bool = false;

    #[inline(always)]
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Out {
        #[inline(never)]
        #[target_feature(enable = "avx2,fma,f16c")]
        fn own<K: Kernel>(set: Avx2, kernel: K) -> K::Out {
            kernel.run(set)
        }
        // SAFETY: the set is there.
        unsafe { own(self, kernel) }
    }

    #[inline(always)]
    fn vectorize_int8<K: Int8Kernel>(self, kernel: K) -> K::Out {
        #[inline(never)]
        #[target_feature(enable = "avx2,fma,f16c")]
        fn own<K: Int8Kernel>(set: Avx2, kernel: K) -> K::Out {
            kernel.run(set)
        }
        // SAFETY: the set is there.
        unsafe { own(self, kernel) }
    }

    #[inline(always)]
    fn prefetch<T>(self, p: *const T) {
        // SAFETY: a prefetch touches no memory that a program can see.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m256 {
        // SAFETY: the caller vouches for 8 values; the set is there.
        unsafe { _mm256_loadu_ps(p) }
    }

    #[inline(always)]
    unsafe fn load_head(self, p: *const f32, n: usize) -> __m256 {
        // SAFETY: masked lanes are not read, the caller vouches for n; the set is there.
        unsafe { _mm256_maskload_ps(p, head8(n)) }
    }

    #[inline(always)]
    unsafe fn load_bf16_pairs(self, p: *const bf16) -> (__m256, __m256) {
        // SAFETY: the caller vouches for 16 values of 2 bytes; the set is there.
        unsafe {
            let pairs = _mm256_loadu_si256(p.cast());
            let upper = _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff_0000_u32 as i32));
            (_mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)), _mm256_castsi256_ps(upper))
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const bf16) -> __m256 {
        // SAFETY: the caller vouches for 8 values of 2 bytes; the set is there.
        unsafe {
            let values = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(values))
        }
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const f16) -> __m256 {
        // SAFETY: the caller vouches for 8 values of 2 bytes; the set is there.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: __m256) {
        // SAFETY: the caller vouches for 8 values; the set is there.
        unsafe { _mm256_storeu_ps(p, v) }
    }

    #[inline(always)]
    unsafe fn store_head(self, p: *mut f32, n: usize, v: __m256) {
        // SAFETY: masked lanes are not written, the caller vouches for n; the set is there.
        unsafe { _mm256_maskstore_ps(p, head8(n), v) }
    }

    #[inline(always)]
    unsafe fn stream(self, p: *mut f32, v: __m256) {
        // SAFETY: the caller vouches for 8 values and their alignment; the set is there.
        unsafe { _mm256_stream_ps(p, v) }
    }

    #[inline(always)]
    fn fence(self) {
        // SAFETY: a fence touches no memory; every x86-64 has it.
        unsafe { _mm_sfence() }
    }

    op! {
        fn splat(x: f32) -> __m256 = _mm256_set1_ps(x);
        fn add(a: __m256, b: __m256) -> __m256 = _mm256_add_ps(a, b);
        fn sub(a: __m256, b: __m256) -> __m256 = _mm256_sub_ps(a, b);
        fn mul(a: __m256, b: __m256) -> __m256 = _mm256_mul_ps(a, b);
        fn div(a: __m256, b: __m256) -> __m256 = _mm256_div_ps(a, b);
        fn fma(a: __m256, b: __m256, c: __m256) -> __m256 = _mm256_fmadd_ps(a, b, c);
        fn max(a: __m256, b: __m256) -> __m256 = _mm256_max_ps(a, b);
        fn min(a: __m256, b: __m256) -> __m256 = _mm256_min_ps(a, b);
        fn round(v: __m256) -> __m256 = _mm256_round_ps::<NEAREST>(v);
        fn pow2(n: __m256) -> __m256 = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(
            _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)),
        ));
        fn frexp(v: __m256) -> (__m256, __m256) = {
            let bits = _mm256_castps_si256(v);
            let e = _mm256_sub_epi32(_mm256_srli_epi32::<23>(bits), _mm256_set1_epi32(126));
            let m = _mm256_and_si256(bits, _mm256_set1_epi32(0x007f_ffff));
            let m = _mm256_or_si256(m, _mm256_set1_epi32(0x3f00_0000));
            (_mm256_cvtepi32_ps(e), _mm256_castsi256_ps(m))
        };
        fn less(a: __m256, b: __m256) -> __m256 = _mm256_cmp_ps::<_CMP_LT_OQ>(a, b);
        fn select(mask: __m256, a: __m256, b: __m256) -> __m256 = _mm256_blendv_ps(b, a, mask);
    }

    #[inline(always)]
    fn sum(self, v: __m256) -> f32 {
        sum8(v)
    }

    #[inline(always)]
    unsafe fn transpose(self, from: (*const f32, usize), to: (*mut f32, usize)) {
        // SAFETY: the caller's promise.
        unsafe { transpose8(from, to) }
    }

    #[inline(always)]
    fn sums(self, v: [__m256; 4]) -> [f32; 4] {
        sums8(v)
    }

    #[inline(always)]
    fn max_lane(self, v: __m256) -> f32 {
        max8(v)
    }
}

impl Int8 for Avx2 {
    type Floats = Avx2;
    type I = __m256i;
    const SUMS: usize = 8;

    #[inline(always)]
    fn floats(self) -> Avx2 {
        self
    }

    #[inline(always)]
    unsafe fn load_bytes(self, p: *const u8) -> __m256i {
        // SAFETY: the caller vouches for 32 bytes; the set is there.
        unsafe { _mm256_loadu_si256(p.cast()) }
    }

    op! {
        fn splat_bytes(bytes: i32) -> __m256i = _mm256_set1_epi32(bytes);
        fn nibbles(bytes: __m256i) -> (__m256i, __m256i) = {
            let low = _mm256_set1_epi8(0x0f);
            let high = _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), low);
            (_mm256_and_si256(bytes, low), high)
        };
        // The instruction wants one side without sign: |w| · (x with the sign of w). A pair is at
        // most 2 · 127², which 16 bits hold.
        fn dot_i8(sum: __m256i, w: __m256i, x: __m256i) -> __m256i = {
            let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
            _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        };
        // Pairs are summed in 16 bits: eight of at most 2 · 15 · 127 fit.
        fn dot_u4(sum: __m256i, w: __m256i, x: __m256i) -> __m256i =
            _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x));
        fn total_i8(sum: __m256i, _x_sum: i32) -> __m256 = _mm256_cvtepi32_ps(sum);
        fn total_u4(sum: __m256i, x_sum: i32) -> __m256 = {
            let sum = _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
            _mm256_cvtepi32_ps(_mm256_sub_epi32(sum, _mm256_set1_epi32(8 * x_sum)))
        };
    }
}

/// AVX-512 F, BW, DQ and VL; VNNI and BF16 where they were asked for.
#[derive(Debug, Clone, Copy)]
pub struct Avx512 {
    has_vnni: bool,
    has_bf16: bool,
}

impl Avx512 {
    /// The set, when the processor has it.
    #[inline]
    pub fn detect() -> Option<Avx512> {
        let there = Avx2::detect().is_some()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        there.then_some(Avx512 { has_vnni: false, has_bf16: false })
    }

    /// The set with VNNI, when the processor has both.
    #[inline]
    pub fn detect_vnni() -> Option<Avx512> {
        let there = Avx512::detect().is_some() && is_x86_feature_detected!("avx512vnni");
        there.then_some(Avx512 { has_vnni: true, has_bf16: false })
    }

    /// The set with VNNI and BF16, when the processor has all three.
    #[inline]
    pub fn detect_bf16() -> Option<Avx512> {
        let there = Avx512::detect_vnni().is_some() && is_x86_feature_detected!("avx512bf16");
        there.then_some(Avx512 { has_vnni: true, has_bf16: true })
    }
}

/// A mask with the first `n < 16` lanes set.
#[inline(always)]
fn head16(n: usize) -> __mmask16 {
    debug_assert!(n < 16);
    (1u16 << (n & 15)) - 1
}

/// The lower eight lanes plus the upper eight.
#[inline(always)]
fn folded(v: __m512) -> __m256 {
    // SAFETY: the set is there.
    unsafe { _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v)) }
}

impl Simd for Avx512 {
    type V = __m512;
    type Mask = __mmask16;
    const LANES: usize = 16;
    const WIDE: bool = true;

    #[inline(always)]
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Out {
        #[inline(never)]
        #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
        fn own<K: Kernel>(set: Avx512, kernel: K) -> K::Out {
            kernel.run(set)
        }
        // SAFETY: the set is there.
        unsafe { own(self, kernel) }
    }

    #[inline(always)]
    fn vectorize_bf16<K: Bf16Kernel>(self, kernel: K) -> K::Out {
        #[inline(never)]
        #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
        fn own<K: Bf16Kernel>(set: Avx512, kernel: K) -> K::Out {
            kernel.run(set)
        }
        #[inline(never)]
        #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
        fn own_bf16<K: Bf16Kernel>(set: Avx512Bf16, kernel: K) -> K::Out {
            kernel.run(set)
        }
        if self.has_bf16 {
            // SAFETY: the set is there, and BF16.
            unsafe { own_bf16(Avx512Bf16(self), kernel) }
        } else {
            // SAFETY: the set is there.
            unsafe { own(self, kernel) }
        }
    }

    #[inline(always)]
    fn vectorize_int8<K: Int8Kernel>(self, kernel: K) -> K::Out {
        #[inline(never)]
        #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
        fn own<K: Int8Kernel>(set: Avx512, kernel: K) -> K::Out {
            kernel.run(set)
        }
        #[inline(never)]
        #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
        fn own_vnni<K: Int8Kernel>(set: Avx512Vnni, kernel: K) -> K::Out {
            kernel.run(set)
        }
        if self.has_vnni {
            // SAFETY: the set is there, and VNNI.
            unsafe { own_vnni(Avx512Vnni(self), kernel) }
        } else {
            // SAFETY: the set is there.
            unsafe { own(self, kernel) }
        }
    }

    #[inline(always)]
    fn prefetch<T>(self, p: *const T) {
        // SAFETY: a prefetch touches no memory that a program can see.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m512 {
        // SAFETY: the caller vouches for 16 values; the set is there.
        unsafe { _mm512_loadu_ps(p) }
    }

    #[inline(always)]
    unsafe fn load_head(self, p: *const f32, n: usize) -> __m512 {
        // SAFETY: masked lanes are not read, the caller vouches for n; the set is there.
        unsafe { _mm512_maskz_loadu_ps(head16(n), p) }
    }

    #[inline(always)]
    unsafe fn load_bf16_pairs(self, p: *const bf16) -> (__m512, __m512) {
        // SAFETY: the caller vouches for 32 values of 2 bytes; the set is there.
        unsafe {
            let pairs = _mm512_loadu_si512(p.cast());
            let upper = _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000_u32 as i32));
            (_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)), _mm512_castsi512_ps(upper))
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const bf16) -> __m512 {
        // SAFETY: the caller vouches for 16 values of 2 bytes; the set is there.
        unsafe {
            let values = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(values))
        }
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const f16) -> __m512 {
        // SAFETY: the caller vouches for 16 values of 2 bytes; the set is there.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: __m512) {
        // SAFETY: the caller vouches for 16 values; the set is there.
        unsafe { _mm512_storeu_ps(p, v) }
    }

    #[inline(always)]
    unsafe fn store_head(self, p: *mut f32, n: usize, v: __m512) {
        // SAFETY: masked lanes are not written, the caller vouches for n; the set is there.
        unsafe { _mm512_mask_storeu_ps(p, head16(n), v) }
    }

    #[inline(always)]
    unsafe fn stream(self, p: *mut f32, v: __m512) {
        // SAFETY: the caller vouches for 16 values and their alignment; the set is there.
        unsafe { _mm512_stream_ps(p, v) }
    }

    #[inline(always)]
    fn fence(self) {
        // SAFETY: a fence touches no memory; every x86-64 has it.
        unsafe { _mm_sfence() }
    }

    #[inline(always)]
    unsafe fn transpose(self, from: (*const f32, usize), to: (*mut f32, usize)) {
        for (i, j) in [(0, 0), (0, 8), (8, 0), (8, 8)] {
            // SAFETY: a quarter of the square that the caller vouches for.
            unsafe {
                transpose8((from.0.add(i * from.1 + j), from.1), (to.0.add(j * to.1 + i), to.1));
            }
        }
    }

    #[inline(always)]
    fn sum(self, v: __m512) -> f32 {
        sum8(folded(v))
    }

    #[inline(always)]
    fn sums(self, [a, b, c, d]: [__m512; 4]) -> [f32; 4] {
        sums8([folded(a), folded(b), folded(c), folded(d)])
    }

    op! {
        fn splat(x: f32) -> __m512 = _mm512_set1_ps(x);
        fn add(a: __m512, b: __m512) -> __m512 = _mm512_add_ps(a, b);
        fn sub(a: __m512, b: __m512) -> __m512 = _mm512_sub_ps(a, b);
        fn mul(a: __m512, b: __m512) -> __m512 = _mm512_mul_ps(a, b);
        fn div(a: __m512, b: __m512) -> __m512 = _mm512_div_ps(a, b);
        fn fma(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
        fn max(a: __m512, b: __m512) -> __m512 = _mm512_max_ps(a, b);
        fn min(a: __m512, b: __m512) -> __m512 = _mm512_min_ps(a, b);
        fn round(v: __m512) -> __m512 = _mm512_roundscale_ps::<NEAREST>(v);
        fn pow2(n: __m512) -> __m512 = _mm512_castsi512_ps(_mm512_slli_epi32::<23>(
            _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)),
        ));
        fn frexp(v: __m512) -> (__m512, __m512) = {
            let bits = _mm512_castps_si512(v);
            let e = _mm512_sub_epi32(_mm512_srli_epi32::<23>(bits), _mm512_set1_epi32(126));
            let m = _mm512_and_si512(bits, _mm512_set1_epi32(0x007f_ffff));
            let m = _mm512_or_si512(m, _mm512_set1_epi32(0x3f00_0000));
            (_mm512_cvtepi32_ps(e), _mm512_castsi512_ps(m))
        };
        fn less(a: __m512, b: __m512) -> __mmask16 = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b);
        fn select(mask: __mmask16, a: __m512, b: __m512) -> __m512 =
            _mm512_mask_blend_ps(mask, b, a);
        fn max_lane(v: __m512) -> f32 =
            max8(_mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v)));
    }
}

impl Int8 for Avx512 {
    type Floats = Avx512;
    type I = __m512i;
    const SUMS: usize = 16;

    #[inline(always)]
    fn floats(self) -> Avx512 {
        self
    }

    #[inline(always)]
    unsafe fn load_bytes(self, p: *const u8) -> __m512i {
        // SAFETY: the caller vouches for 64 bytes; the set is there.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }

    // As `Avx2`, but for the change of sign.
    op! {
        fn splat_bytes(bytes: i32) -> __m512i = _mm512_set1_epi32(bytes);
        fn nibbles(bytes: __m512i) -> (__m512i, __m512i) = {
            let low = _mm512_set1_epi8(0x0f);
            let high = _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), low);
            (_mm512_and_si512(bytes, low), high)
        };
        fn dot_i8(sum: __m512i, w: __m512i, x: __m512i) -> __m512i = {
            let x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
            let pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w), x);
            _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
        };
        fn dot_u4(sum: __m512i, w: __m512i, x: __m512i) -> __m512i =
            _mm512_add_epi16(sum, _mm512_maddubs_epi16(w, x));
        fn total_i8(sum: __m512i, _x_sum: i32) -> __m512 = _mm512_cvtepi32_ps(sum);
        fn total_u4(sum: __m512i, x_sum: i32) -> __m512 = {
            let sum = _mm512_madd_epi16(sum, _mm512_set1_epi16(1));
            _mm512_cvtepi32_ps(_mm512_sub_epi32(sum, _mm512_set1_epi32(8 * x_sum)))
        };
    }
}

/// AVX-512 whose products of 8-bit integers are those of VNNI: made where both are there.
#[derive(Debug, Clone, Copy)]
pub struct Avx512Vnni(Avx512);

impl Int8 for Avx512Vnni {
    type Floats = Avx512;
    type I = __m512i;
    const SUMS: usize = 16;

    #[inline(always)]
    fn floats(self) -> Avx512 {
        self.0
    }

    #[inline(always)]
    unsafe fn load_bytes(self, p: *const u8) -> __m512i {
        // SAFETY: the caller's promise is that of the function called.
        unsafe { self.0.load_bytes(p) }
    }

    #[inline(always)]
    fn splat_bytes(self, bytes: i32) -> __m512i {
        self.0.splat_bytes(bytes)
    }

    #[inline(always)]
    fn nibbles(self, bytes: __m512i) -> (__m512i, __m512i) {
        self.0.nibbles(bytes)
    }

    op! {
        // The instruction wants one side without sign: w + 128, and the total gives it back.
        fn dot_i8(sum: __m512i, w: __m512i, x: __m512i) -> __m512i =
            _mm512_dpbusd_epi32(sum, _mm512_xor_si512(w, _mm512_set1_epi8(-128)), x);
        fn dot_u4(sum: __m512i, w: __m512i, x: __m512i) -> __m512i =
            _mm512_dpbusd_epi32(sum, w, x);
        fn total_i8(sum: __m512i, x_sum: i32) -> __m512 =
            _mm512_cvtepi32_ps(_mm512_sub_epi32(sum, _mm512_set1_epi32(128 * x_sum)));
        fn total_u4(sum: __m512i, x_sum: i32) -> __m512 =
            _mm512_cvtepi32_ps(_mm512_sub_epi32(sum, _mm512_set1_epi32(8 * x_sum)));
    }
}

/// AVX-512 whose products of bf16 values are those of BF16: made where both are there.
#[derive(Debug, Clone, Copy)]
pub struct Avx512Bf16(Avx512);

impl Bf16 for Avx512Bf16 {
    type Floats = Avx512;
    type P = __m512bh;

    #[inline(always)]
    fn floats(self) -> Avx512 {
        self.0
    }

    #[inline(always)]
    unsafe fn load_pairs(self, p: *const bf16) -> __m512bh {
        // SAFETY: the caller vouches for 64 bytes; a vector of pairs has as many, of any bits.
        unsafe { p.cast::<__m512bh>().read_unaligned() }
    }

    #[inline(always)]
    fn splat_pair(self, pair: [bf16; 2]) -> __m512bh {
        let pairs = [pair; 16];
        // SAFETY: both are 64 bytes, of any bits.
        unsafe { std::mem::transmute(pairs) }
    }

    op! {
        fn dot_pairs(sum: __m512, w: __m512bh, x: __m512bh) -> __m512 =
            _mm512_dpbf16_ps(sum, w, x);
    }
}
