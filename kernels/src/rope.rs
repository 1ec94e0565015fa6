//! Rotary positions, in the half-split form, over all or the first channels of a head.

use crate::device::Cpu;
use crate::meter::Work;
use crate::rows::{Rows, RowsMut};
use crate::simd::{Kernel, Simd, load, store};
use crate::threads::Shards;

/// The rotation of a head: half-split pairs `(i, i + dim / 2)` over the first `dim` channels.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Channels that rotate; the rest of a head passes through.
    pub dim: usize,
    /// Angle per position of each pair, `dim / 2` values. Kept in f64: `position * frequency`
    /// loses the angle in f32 beyond a few thousand positions.
    pub frequencies: Vec<f64>,
}

/// Scaling of the frequencies to longer contexts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// Frequencies as they are.
    None,
    /// All frequencies divided by a factor.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3.1 and later (MODELS.md section 11).
    Llama3 {
        /// Divisor of low frequencies.
        factor: f64,
        /// Context over wavelength below which a frequency counts as low.
        low_freq_factor: f64,
        /// Context over wavelength above which a frequency counts as high.
        high_freq_factor: f64,
        /// The context the model was first trained on.
        original_context: f64,
    },
}

impl Rope {
    /// The rotation of `dim` channels with base `theta`.
    ///
    /// # Panics
    /// When `dim` is odd.
    pub fn new(dim: usize, theta: f64, scaling: RopeScaling) -> Rope {
        assert!(dim.is_multiple_of(2), "rotary channels come in pairs, not {dim}");
        let plain = (0..dim / 2).map(|i| theta.powf(-((2 * i) as f64) / dim as f64));
        let frequencies = plain.map(|f| scaling.apply(f)).collect();
        Rope { dim, frequencies }
    }
}

impl RopeScaling {
    fn apply(self, frequency: f64) -> f64 {
        match self {
            RopeScaling::None => frequency,
            RopeScaling::Linear { factor } => frequency / factor,
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                let wavelength = 2.0 * std::f64::consts::PI / frequency;
                let turns = original_context / wavelength;
                if turns > high_freq_factor {
                    frequency
                } else if turns < low_freq_factor {
                    frequency / factor
                } else {
                    let share = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    (1.0 - share) * frequency / factor + share * frequency
                }
            }
        }
    }
}

/// Cosines and sines of one batch's positions: `[rows][dim]`, a row's `dim / 2` cosines, then its
/// `dim / 2` sines. Made once per batch and used by every layer.
///
/// # Panics
/// When `out` is not `positions.len()` rows of `dim`.
pub fn angles(rope: &Rope, positions: &[usize], out: &mut [f32]) {
    assert_eq!(out.len(), positions.len() * rope.dim);
    let half = rope.dim / 2;
    for (position, row) in positions.iter().zip(out.chunks_exact_mut(rope.dim.max(1))) {
        for (i, frequency) in rope.frequencies.iter().enumerate() {
            let (sin, cos) = (*position as f64 * frequency).sin_cos();
            row[i] = cos as f32;
            row[half + i] = sin as f32;
        }
    }
}

/// The definition of [`rotate`].
pub mod naive {
    use crate::rows::{Rows, RowsMut};

    /// Rotates the first channels of every head of every row by the row's angles.
    pub fn rotate(mut x: RowsMut<'_>, head_dim: usize, angles: Rows<'_>) {
        let half = angles.width() / 2;
        for i in 0..x.count() {
            let (cos, sin) = angles.row(i).split_at(half);
            for head in x.row(i).chunks_exact_mut(head_dim) {
                for c in 0..half {
                    let (a, b) = (head[c], head[half + c]);
                    head[c] = a * cos[c] - b * sin[c];
                    head[half + c] = b * cos[c] + a * sin[c];
                }
            }
        }
    }
}

/// Rotates the first `angles.width()` channels of every head of every row: pairs `(i, i + dim / 2)`
/// by the row's angles, the form of Llama and Qwen. Further channels pass through.
///
/// # Panics
/// When the shapes do not fit.
pub fn rotate(cpu: &Cpu, mut x: RowsMut<'_>, head_dim: usize, angles: Rows<'_>) {
    assert_eq!(x.count(), angles.count());
    assert!(angles.width() <= head_dim && x.width().is_multiple_of(head_dim));
    let (count, width, stride) = (x.count(), x.width(), x.stride());
    let _timed = cpu.meter.time("rope", || {
        let rotated = count * width / head_dim * angles.width();
        Work::f32(3 * rotated, (2 * rotated + count * angles.width()) * size_of::<f32>())
    });
    let shards = Shards::new(x.data());
    let per_task = (TASK_VALUES / width).max(1);
    cpu.gang.run(count.div_ceil(per_task), |_, task| {
        for i in task * per_task..count.min((task + 1) * per_task) {
            // SAFETY: row i belongs to one task.
            let row = unsafe { shards.slice_mut(i * stride..i * stride + width) };
            cpu.isa.run(RotateRow { row, head_dim, angles: angles.row(i) });
        }
    });
}

/// Values per task.
const TASK_VALUES: usize = 16 << 10;

struct RotateRow<'a> {
    row: &'a mut [f32],
    head_dim: usize,
    angles: &'a [f32],
}

impl Kernel for RotateRow<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let half = self.angles.len() / 2;
        let (cos, sin) = self.angles.split_at(half);
        let mut head = 0;
        while head < self.row.len() {
            let mut c = 0;
            while c < half {
                let n = (half - c).min(S::LANES);
                let (cos, sin) = (load(s, &cos[c..], n), load(s, &sin[c..], n));
                let a = load(s, &self.row[head + c..], n);
                let b = load(s, &self.row[head + half + c..], n);
                let minus_sin = s.sub(s.splat(0.0), sin);
                let first = s.fma(b, minus_sin, s.mul(a, cos));
                let second = s.fma(a, sin, s.mul(b, cos));
                store(s, &mut self.row[head + c..], n, first);
                store(s, &mut self.row[head + half + c..], n, second);
                c += n;
            }
            head += self.head_dim;
        }
    }
}
