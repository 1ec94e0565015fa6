//! Rotary positions.

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
