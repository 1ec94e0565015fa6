//! Plain Rust vectors: sixteen lanes in an array, for processors without a set of their own.

use half::{bf16, f16};

use super::{Int8, Int8Kernel, Kernel, Simd};

const LANES: usize = 16;

/// Sixteen lanes of plain Rust.
#[derive(Debug, Clone, Copy)]
pub struct Scalar;

macro_rules! lanes {
    ($i:ident => $value:expr) => {{
        let mut out = [0.0f32; LANES];
        let mut $i = 0;
        while $i < LANES {
            out[$i] = $value;
            $i += 1;
        }
        out
    }};
}

impl Simd for Scalar {
    type V = [f32; LANES];
    type Mask = [bool; LANES];
    const LANES: usize = LANES;
    const WIDE: bool = false;

    #[inline(always)]
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Out {
        #[inline(never)]
        fn own<K: Kernel>(kernel: K) -> K::Out {
            kernel.run(Scalar)
        }
        own(kernel)
    }

    #[inline(always)]
    fn vectorize_int8<K: Int8Kernel>(self, kernel: K) -> K::Out {
        #[inline(never)]
        fn own<K: Int8Kernel>(kernel: K) -> K::Out {
            kernel.run(Scalar)
        }
        own(kernel)
    }

    #[inline(always)]
    fn prefetch<T>(self, _: *const T) {}

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        [x; LANES]
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Self::V {
        // SAFETY: the caller vouches for LANES values; an array has no alignment beyond f32's.
        unsafe { p.cast::<[f32; LANES]>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn load_head(self, p: *const f32, n: usize) -> Self::V {
        // SAFETY: only lanes below n, which the caller vouches for, are read.
        lanes!(i => if i < n { unsafe { *p.add(i) } } else { 0.0 })
    }

    #[inline(always)]
    unsafe fn load_bf16_pairs(self, p: *const bf16) -> (Self::V, Self::V) {
        // SAFETY: the caller vouches for 2 * LANES values.
        unsafe {
            (lanes!(i => (*p.add(2 * i)).to_f32()), lanes!(i => (*p.add(2 * i + 1)).to_f32()))
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const bf16) -> Self::V {
        // SAFETY: the caller vouches for LANES values.
        lanes!(i => unsafe { *p.add(i) }.to_f32())
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const f16) -> Self::V {
        // SAFETY: the caller vouches for LANES values.
        lanes!(i => unsafe { *p.add(i) }.to_f32())
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: Self::V) {
        // SAFETY: the caller vouches for LANES values.
        unsafe { p.cast::<[f32; LANES]>().write_unaligned(v) }
    }

    #[inline(always)]
    unsafe fn store_head(self, p: *mut f32, n: usize, v: Self::V) {
        for (i, x) in v.into_iter().enumerate().take(n) {
            // SAFETY: i < n, which the caller vouches for.
            unsafe { *p.add(i) = x }
        }
    }

    #[inline(always)]
    unsafe fn stream(self, p: *mut f32, v: Self::V) {
        // SAFETY: the caller's promise is that of the function called.
        unsafe { self.store(p, v) }
    }

    #[inline(always)]
    fn fence(self) {}

    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        lanes!(i => a[i] + b[i])
    }

    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        lanes!(i => a[i] - b[i])
    }

    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        lanes!(i => a[i] * b[i])
    }

    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        lanes!(i => a[i] / b[i])
    }

    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        lanes!(i => a[i] * b[i] + c[i])
    }

    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        lanes!(i => if a[i] > b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn min(self, a: Self::V, b: Self::V) -> Self::V {
        lanes!(i => if a[i] < b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn round(self, v: Self::V) -> Self::V {
        // Adding and taking away 1.5 * 2^23 rounds to a whole number, ties to even, for
        // |v| < 2^22; larger values are returned as they are (they come only from non-finite
        // inputs here), and `round_ties_even` would call the C library.
        const MAGIC: f32 = 12_582_912.0;
        lanes!(i => if v[i].abs() < 4_194_304.0 { (v[i] + MAGIC) - MAGIC } else { v[i] })
    }

    #[inline(always)]
    fn pow2(self, n: Self::V) -> Self::V {
        lanes!(i => f32::from_bits((((n[i] as i32) + 127) as u32) << 23))
    }

    #[inline(always)]
    fn frexp(self, v: Self::V) -> (Self::V, Self::V) {
        let e = lanes!(i => ((v[i].to_bits() >> 23) as i32 - 126) as f32);
        let m = lanes!(i => f32::from_bits((v[i].to_bits() & 0x007f_ffff) | 0x3f00_0000));
        (e, m)
    }

    #[inline(always)]
    fn less(self, a: Self::V, b: Self::V) -> Self::Mask {
        let mut out = [false; LANES];
        for i in 0..LANES {
            out[i] = a[i] < b[i];
        }
        out
    }

    #[inline(always)]
    fn select(self, mask: Self::Mask, a: Self::V, b: Self::V) -> Self::V {
        lanes!(i => if mask[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn sum(self, v: Self::V) -> f32 {
        let mut half = LANES / 2;
        let mut v = v;
        while half > 0 {
            for i in 0..half {
                v[i] += v[i + half];
            }
            half /= 2;
        }
        v[0]
    }

    #[inline(always)]
    fn sums(self, v: [Self::V; 4]) -> [f32; 4] {
        v.map(|v| self.sum(v))
    }

    #[inline(always)]
    fn max_lane(self, v: Self::V) -> f32 {
        let mut best = v[0];
        for x in v {
            best = if best > x { best } else { x };
        }
        best
    }
}

/// `sum + w · x` of the four signed bytes of each lane; where `w` has no sign its bytes are small.
#[inline(always)]
fn dot(mut sum: [i32; LANES], w: [i32; LANES], x: [i32; LANES]) -> [i32; LANES] {
    for (sum, (w, x)) in sum.iter_mut().zip(w.into_iter().zip(x)) {
        for shift in [24, 16, 8, 0] {
            *sum += ((w << shift) >> 24) * ((x << shift) >> 24);
        }
    }
    sum
}

impl Int8 for Scalar {
    type Floats = Scalar;
    type I = [i32; LANES];
    const SUMS: usize = 1;

    #[inline(always)]
    fn floats(self) -> Scalar {
        self
    }

    #[inline(always)]
    unsafe fn load_bytes(self, p: *const u8) -> Self::I {
        // SAFETY: the caller vouches for four bytes for each lane.
        let bytes = unsafe { p.cast::<[[u8; 4]; LANES]>().read_unaligned() };
        bytes.map(i32::from_le_bytes)
    }

    #[inline(always)]
    fn splat_bytes(self, bytes: i32) -> Self::I {
        [bytes; LANES]
    }

    #[inline(always)]
    fn nibbles(self, bytes: Self::I) -> (Self::I, Self::I) {
        (bytes.map(|b| b & 0x0f0f_0f0f), bytes.map(|b| (b >> 4) & 0x0f0f_0f0f))
    }

    #[inline(always)]
    fn dot_i8(self, sum: Self::I, w: Self::I, x: Self::I) -> Self::I {
        dot(sum, w, x)
    }

    #[inline(always)]
    fn dot_u4(self, sum: Self::I, w: Self::I, x: Self::I) -> Self::I {
        dot(sum, w, x)
    }

    #[inline(always)]
    fn total_i8(self, sum: Self::I, _: i32) -> [f32; LANES] {
        lanes!(i => sum[i] as f32)
    }

    #[inline(always)]
    fn total_u4(self, sum: Self::I, x_sum: i32) -> [f32; LANES] {
        lanes!(i => (sum[i] - 8 * x_sum) as f32)
    }
}
