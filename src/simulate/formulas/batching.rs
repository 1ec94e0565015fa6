//! Static against continuous batching: F2 to F5, F25.

/// Euler's constant, the limit of `H_n - ln n`.
pub const EULER_GAMMA: f64 = 0.577_215_664_901_532_9;

/// Terms of a sum over lengths below this do not change it.
const NEGLIGIBLE: f64 = 1e-15;

/// `H_n`, the n-th harmonic number.
pub fn harmonic(n: usize) -> f64 {
    (1..=n).rev().map(|i| 1.0 / i as f64).sum()
}

/// F2: share of slot-steps that a static batch uses, `eta = mean / E[longest]`.
pub fn static_efficiency(mean: f64, mean_longest: f64) -> f64 {
    mean / mean_longest
}

/// F3: mean of the longest of `batch` exponential lengths, `mean H_B`, exactly.
pub fn longest_exponential(batch: usize, mean: f64) -> f64 {
    mean * harmonic(batch)
}

/// F3: the same for geometric lengths of at least 1, `sum over k >= 0 of 1 - (1 - q^k)^B` with
/// `q = 1 - 1 / mean`.
pub fn longest_geometric(batch: usize, mean: f64) -> f64 {
    above(batch, mean).sum()
}

/// Mean square of the longest of `batch` geometric lengths, `sum of (2k + 1) P(longest > k)`.
pub fn longest_geometric_square(batch: usize, mean: f64) -> f64 {
    above(batch, mean).enumerate().map(|(k, above)| (2 * k + 1) as f64 * above).sum()
}

/// Chances that the longest of `batch` geometric lengths exceeds 0, 1, 2 and so on.
fn above(batch: usize, mean: f64) -> impl Iterator<Item = f64> {
    let stay = 1.0 - 1.0 / mean;
    let tails = std::iter::successors(Some(1.0), move |tail| Some(tail * stay));
    let any = move |tail: f64| -(batch as f64 * (-tail).ln_1p()).exp_m1();
    tails.map(any).take_while(|chance| *chance > NEGLIGIBLE)
}

/// F3: the approximation `mean (ln B + gamma)`; 2.3 % above the exact value of exponential lengths
/// at `B = 8`.
pub fn longest_approximate(batch: usize, mean: f64) -> f64 {
    mean * ((batch as f64).ln() + EULER_GAMMA)
}

/// Mean of the longest of `batch` lengths that are `long` with a chance of `share`, else `short`.
pub fn longest_bimodal(batch: usize, share: f64, short: f64, long: f64) -> f64 {
    let none = (1.0 - share).powi(batch as i32);
    none * short + (1.0 - none) * long
}

/// F4: slots of a static batch that are alive in a mean step.
pub fn effective_batch(batch: f64, efficiency: f64) -> f64 {
    batch * efficiency
}

/// F4: how much faster continuous batching is if the slots of finished sequences cost their
/// reads: a static step then takes as long as a full one.
pub fn gain_dead_slots_pay(efficiency: f64) -> f64 {
    1.0 / efficiency
}

/// F4: the same if dead slots are free: `(B / t(B)) / (b / t(b))` with `b = eta B`, where
/// `seconds` is the time of a step with so many sequences.
pub fn gain_dead_slots_free(batch: f64, efficiency: f64, seconds: impl Fn(f64) -> f64) -> f64 {
    let alive = effective_batch(batch, efficiency);
    (batch / seconds(batch)) / (alive / seconds(alive))
}

/// F5: mean wait of an arrival at a random moment for the end of the batch that runs,
/// `E[T^2] / (2 E[T])`: long batches are met more often.
pub fn static_wait(mean_time: f64, mean_square: f64) -> f64 {
    mean_square / (2.0 * mean_time)
}

/// F25: seconds of a loop that plans while the device works, else one after the other.
pub fn loop_seconds(cpu: f64, device: f64, is_async: bool) -> f64 {
    if is_async { cpu.max(device) } else { cpu + device }
}

/// F25: seconds a loop that plans ahead leaves the device idle, per step.
pub fn idle_gap(cpu: f64, device: f64) -> f64 {
    (cpu - device).max(0.0)
}

/// F25: share of slot-steps computed for nothing when each request that ends by a token runs one
/// step too far, `1 / (mean + 1)`.
pub fn lookahead_waste(mean: f64) -> f64 {
    1.0 / (mean + 1.0)
}
