//! Elementary functions on vectors: off by about one unit in the last place, and the same for a
//! value in any lane.
//!
//! Coefficients of `exp` and `ln` are those of the Cephes library's single-precision functions.

use super::Simd;

/// `e^x`. Below -87.33 it is 0 (no subnormal results); above 88.37 it stays at its value there.
/// Not-a-number stays so.
#[inline(always)]
pub fn exp<S: Simd>(s: S, x: S::V) -> S::V {
    const LOWEST: f32 = -87.336_54;
    // Operand order matters: the bound comes first, so that a NaN in `x` passes through.
    let clamped = s.min(s.splat(88.376_26), s.max(s.splat(LOWEST), x));
    let n = s.round(s.mul(clamped, s.splat(std::f32::consts::LOG2_E)));
    // ln 2 in two parts, the first exact in few bits: n * high is exact.
    let r = s.fma(n, s.splat(-0.693_359_4), clamped);
    let r = s.fma(n, s.splat(2.121_944_4e-4), r);
    let mut p = s.splat(1.987_569_1e-4);
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = s.fma(p, r, s.splat(c));
    }
    let p = s.fma(s.mul(p, r), r, s.add(r, s.splat(1.0)));
    s.select(s.less(x, s.splat(LOWEST)), s.splat(0.0), s.mul(p, s.pow2(n)))
}

/// `ln x` for positive normal `x`.
#[inline(always)]
pub fn ln<S: Simd>(s: S, x: S::V) -> S::V {
    let (e, m) = s.frexp(x);
    // Mantissas below sqrt(1/2) are doubled so that the polynomial's argument stays small.
    let low = s.less(m, s.splat(std::f32::consts::FRAC_1_SQRT_2));
    let e = s.select(low, s.sub(e, s.splat(1.0)), e);
    let m = s.select(low, s.add(m, m), m);
    let f = s.sub(m, s.splat(1.0));
    let mut p = s.splat(7.037_683_6e-2);
    for c in [
        -1.151_461e-1,
        1.167_699_8e-1,
        -1.242_014_1e-1,
        1.424_932_3e-1,
        -1.666_805_7e-1,
        2.000_071_4e-1,
        -2.499_999_4e-1,
        0.333_333_3,
    ] {
        p = s.fma(p, f, s.splat(c));
    }
    let square = s.mul(f, f);
    let p = s.mul(s.mul(p, f), square);
    let p = s.fma(e, s.splat(-2.121_944_4e-4), p);
    let p = s.fma(s.splat(-0.5), square, p);
    s.fma(e, s.splat(0.693_359_4), s.add(f, p))
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub fn sigmoid<S: Simd>(s: S, x: S::V) -> S::V {
    let one = s.splat(1.0);
    s.div(one, s.add(one, exp(s, s.sub(s.splat(0.0), x))))
}

/// `x * sigmoid(x)`.
#[inline(always)]
pub fn silu<S: Simd>(s: S, x: S::V) -> S::V {
    s.div(x, s.add(s.splat(1.0), exp(s, s.sub(s.splat(0.0), x))))
}

/// `ln(1 + e^x)`, as `max(x, 0) + ln(1 + e^-|x|)`.
#[inline(always)]
pub fn softplus<S: Simd>(s: S, x: S::V) -> S::V {
    let zero = s.splat(0.0);
    let one = s.splat(1.0);
    let u = exp(s, s.sub(zero, s.max(s.sub(zero, x), x)));
    // ln(1 + u) loses the low bits of a small u in the sum; u / ((1 + u) - 1) puts them back.
    let w = s.add(one, u);
    let lost = s.sub(w, one);
    let tiny = s.less(lost, s.splat(f32::MIN_POSITIVE));
    let log = s.mul(ln(s, w), s.div(u, s.select(tiny, one, lost)));
    s.add(s.max(zero, x), s.select(tiny, u, log))
}
