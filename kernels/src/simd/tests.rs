//! Vector operations against plain `f32`, on every set of this processor.

use super::math::{exp, ln, sigmoid, silu, softplus};
use super::*;

#[derive(Clone, Copy)]
enum Function {
    Exp,
    Ln,
    Sigmoid,
    Silu,
    Softplus,
}

/// Applies a function to each value, `n` lanes of a vector at a time.
struct Map<'a> {
    function: Function,
    lanes: usize,
    x: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for Map<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let n = self.lanes.min(S::LANES);
        let mut at = 0;
        while at < self.x.len() {
            let count = n.min(self.x.len() - at);
            let full = count == S::LANES;
            let p = self.x[at..].as_ptr();
            // SAFETY: `count` values remain from `at` on.
            let v = unsafe { if full { s.load(p) } else { s.load_head(p, count) } };
            let v = match self.function {
                Function::Exp => exp(s, v),
                Function::Ln => ln(s, v),
                Function::Sigmoid => sigmoid(s, v),
                Function::Silu => silu(s, v),
                Function::Softplus => softplus(s, v),
            };
            let p = self.out[at..].as_mut_ptr();
            // SAFETY: as above; the slices are of one length.
            unsafe { if full { s.store(p, v) } else { s.store_head(p, count, v) } };
            at += count;
        }
    }
}

fn map(isa: Isa, function: Function, lanes: usize, x: &[f32]) -> Vec<f32> {
    let mut out = vec![f32::NAN; x.len()];
    isa.run(Map { function, lanes, x, out: &mut out });
    out
}

fn reference(function: Function, x: f32) -> f64 {
    let x = f64::from(x);
    match function {
        Function::Exp => x.exp(),
        Function::Ln => x.ln(),
        Function::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        Function::Silu => x / (1.0 + (-x).exp()),
        Function::Softplus => x.max(0.0) + (-x.abs()).exp().ln_1p(),
    }
}

#[test]
fn functions_are_within_a_few_units_of_the_last_place() {
    for isa in Isa::available() {
        for function in
            [Function::Exp, Function::Ln, Function::Sigmoid, Function::Silu, Function::Softplus]
        {
            let mut x: Vec<f32> = (-87_000..=88_000).map(|i| i as f32 * 1e-3).collect();
            if matches!(function, Function::Ln) {
                x = (1..200_000).map(|i| i as f32 * 1e-2).collect();
                x.extend((1..100_000).map(|i| 1.0 + i as f32 * 1e-7));
            }
            let y = map(isa, function, usize::MAX, &x);
            for (x, y) in x.iter().zip(&y) {
                let r = reference(function, *x);
                let error = (f64::from(*y) - r).abs();
                // Sigmoid and SiLU saturate with exp, at 88.37: absolute there.
                assert!(error <= 4e-7 * r.abs() + 2e-38, "{} of {x}: {y} for {r}", isa.name());
            }
        }
    }
}

#[test]
fn limits_and_nan_come_out_as_expected() {
    for isa in Isa::available() {
        let x = [f32::NEG_INFINITY, -1e30, -88.0, f32::INFINITY, f32::NAN, 0.0];
        let y = map(isa, Function::Exp, usize::MAX, &x);
        assert_eq!(&y[..3], &[0.0, 0.0, 0.0], "{}", isa.name());
        assert!(y[3] > 1e38 && y[4].is_nan() && y[5] == 1.0, "{}: {y:?}", isa.name());
        let y = map(isa, Function::Softplus, usize::MAX, &[-80.0, -30.0, 30.0, 1e6, f32::NAN]);
        assert!(y[0] > 0.0 && y[1] > 9e-14 && y[2] == 30.0 && y[3] == 1e6 && y[4].is_nan());
    }
}

/// Element-wise code must treat a value alike wherever its row lies in a batch.
#[test]
fn a_value_gives_the_same_bits_in_any_lane_and_any_tail() {
    let x: Vec<f32> = (0..97).map(|i| (i as f32 - 48.0) * 0.37).collect();
    for isa in Isa::available() {
        for function in [Function::Exp, Function::Sigmoid, Function::Silu, Function::Softplus] {
            let whole = map(isa, function, usize::MAX, &x);
            for lanes in 1..16 {
                assert_eq!(map(isa, function, lanes, &x), whole, "{} by {lanes}", isa.name());
            }
        }
    }
}

/// Loads of values, whole and partial, and the sums over lanes; loads of narrow values.
struct Loads<'a> {
    x: &'a [f32],
    bf16s: &'a [bf16],
    f16s: &'a [f16],
}

impl Kernel for Loads<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut lanes = vec![0.0; S::LANES];
        for n in 0..=S::LANES {
            let p = self.x.as_ptr();
            // SAFETY: the test passes at least 16 values.
            let v = unsafe { if n == S::LANES { s.load(p) } else { s.load_head(p, n) } };
            // SAFETY: `lanes` has LANES values.
            unsafe { s.store(lanes.as_mut_ptr(), v) };
            for (i, lane) in lanes.iter().enumerate() {
                assert_eq!(*lane, if i < n { self.x[i] } else { 0.0 });
            }
            let total: f32 = lanes.iter().sum();
            assert!((s.sum(v) - total).abs() <= 1e-5 * total.abs());
            let best = lanes.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            assert_eq!(s.max_lane(v), best);
        }
        // SAFETY: the test passes 16 f16 values and 16 pairs of bf16 values.
        let (f16s, (first, second)) =
            unsafe { (s.load_f16(self.f16s.as_ptr()), s.load_bf16_pairs(self.bf16s.as_ptr())) };
        for (v, step, from) in [(f16s, 1, 0), (first, 2, 0), (second, 2, 1)] {
            // SAFETY: `lanes` has LANES values.
            unsafe { s.store(lanes.as_mut_ptr(), v) };
            let expected = self.x[from..].iter().step_by(step);
            assert!(lanes.iter().zip(expected).all(|(lane, x)| lane == x));
        }
    }
}

#[test]
fn values_load_whole_and_in_part_and_narrow_ones_widen_exactly() {
    let wide: Vec<f32> = (0..32).map(|i| 1.5 + i as f32 * 0.25).collect();
    let bf16s: Vec<bf16> = wide.iter().map(|x| bf16::from_f32(*x)).collect();
    let f16s: Vec<f16> = wide.iter().map(|x| f16::from_f32(*x)).collect();
    for isa in Isa::available() {
        isa.run(Loads { x: &wide, bf16s: &bf16s, f16s: &f16s });
    }
}

/// Four sums at once, and squares turned over, from `LANES` rows of values.
struct Squares<'a> {
    x: &'a [f32],
}

impl Kernel for Squares<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        const STRIDE: usize = 19;
        let mut turned = vec![f32::NAN; 16 * STRIDE];
        // SAFETY: both hold 16 rows of 19 values, and no set has more lanes than 16.
        unsafe { s.transpose((self.x.as_ptr(), STRIDE), (turned.as_mut_ptr(), STRIDE)) };
        for i in 0..S::LANES {
            for j in 0..STRIDE {
                let value = turned[i * STRIDE + j];
                match j < S::LANES {
                    true => assert_eq!(value, self.x[j * STRIDE + i], "row {i}, column {j}"),
                    false => assert!(value.is_nan(), "row {i}, column {j} is not of the square"),
                }
            }
        }
        let mut rows = [s.splat(0.0); 4];
        for (i, row) in rows.iter_mut().enumerate() {
            *row = load(s, &self.x[i * STRIDE..], S::LANES);
        }
        let alone = [s.sum(rows[0]), s.sum(rows[1]), s.sum(rows[2]), s.sum(rows[3])];
        assert_eq!(s.sums(rows).map(f32::to_bits), alone.map(f32::to_bits));
    }
}

#[test]
fn four_sums_have_the_bits_of_one_and_a_transposed_square_stays_within_its_own() {
    // Of mixed size and sign, so that another order of the sum gives other bits.
    let x: Vec<f32> = (0..16 * 19).map(|i| ((i * 37 % 101) as f32 - 50.0).powi(3) * 1e-3).collect();
    for isa in Isa::available() {
        isa.run(Squares { x: &x });
    }
}

#[test]
fn a_set_the_processor_lacks_is_refused_by_name() {
    let error = Isa::by_name("neon9000").unwrap_err();
    assert!(error.starts_with("instruction set 'neon9000' is not one of this processor's: scalar"));
    for isa in Isa::available() {
        assert_eq!(Isa::by_name(isa.name()), Ok(isa));
    }
}
