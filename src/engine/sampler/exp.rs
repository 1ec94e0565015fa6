//! The exponential function that draws are made with: the same bits on every system.

/// Sum of `exp((score - max) * rate)`, in eight lanes of fixed order.
pub(super) fn sum_exp(scores: &[f32], max: f64, rate: f64) -> f64 {
    const LANES: usize = 8;
    let mut lanes = [0.0; LANES];
    let chunks = scores.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, &score) in lanes.iter_mut().zip(chunk) {
            *lane += exp_nonpositive((f64::from(score) - max) * rate);
        }
    }
    for (lane, &score) in lanes.iter_mut().zip(rest) {
        *lane += exp_nonpositive((f64::from(score) - max) * rate);
    }
    lanes.iter().sum()
}

/// `exp(x)` for `x <= 0` to about one unit in the last place; 0 below -708.
///
/// Written out because the C library's differs in the last bit between systems, which would move
/// draws that fall on a border. `x = k ln 2 + r` with `|r| <= ln 2 / 2`, a polynomial for `exp(r)`,
/// then `k` is added to the exponent.
pub(super) fn exp_nonpositive(x: f64) -> f64 {
    /// Adding it leaves the nearest integer in the low bits of the sum.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    /// The upper bits of ln 2, so that `k * LN_2_HIGH` is exact, and the rest.
    const LN_2_HIGH: f64 = 6.931_471_803_691_238e-1;
    const LN_2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    /// 1/n!, from n = 13 down to 0.
    const COEFFICIENTS: [f64; 14] = [
        1.0 / 6_227_020_800.0,
        1.0 / 479_001_600.0,
        1.0 / 39_916_800.0,
        1.0 / 3_628_800.0,
        1.0 / 362_880.0,
        1.0 / 40_320.0,
        1.0 / 5_040.0,
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
        1.0,
    ];
    let clamped = if x < -708.0 { -708.0 } else { x };
    let shifted = clamped * std::f64::consts::LOG2_E + ROUND;
    let k = shifted - ROUND;
    let r = (clamped - k * LN_2_HIGH) - k * LN_2_LOW;
    let series = COEFFICIENTS.iter().fold(0.0, |sum, c| sum * r + c);
    let scaled = f64::from_bits(series.to_bits().wrapping_add(shifted.to_bits() << 52));
    if x < -708.0 { 0.0 } else { scaled }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_agrees_with_the_c_library() {
        assert_eq!(exp_nonpositive(0.0), 1.0);
        assert_eq!(exp_nonpositive(-0.0), 1.0);
        assert_eq!(exp_nonpositive(f64::NEG_INFINITY), 0.0);
        assert_eq!(exp_nonpositive(-709.0), 0.0);
        for i in 0..70_800 {
            let x = -f64::from(i) * 0.009_999_7;
            let error = (exp_nonpositive(x) / x.exp() - 1.0).abs();
            assert!(error < 5e-16, "exp({x}) is off by {error:e}");
        }
    }
}
