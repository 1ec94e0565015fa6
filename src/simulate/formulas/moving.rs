//! Swap, recompute, replay, and the two pools: F12 to F17, F19.

use crate::scheduler::cost;

/// F12: seconds to recompute `tokens` tokens, `S(L) / pi`, with the chip to itself.
pub fn recompute_seconds(params: f64, attention: f64, tokens: f64, compute: f64) -> f64 {
    cost::prefill_seconds(0.0..tokens, compute / (2.0 * params), attention / compute)
}

/// SEEDS.md section 5, point 31: the same, but no step is faster than its read of the weights.
pub fn recompute_alone_seconds(recompute: f64, weights: f64, bandwidth: f64) -> f64 {
    recompute.max(weights / bandwidth)
}

/// F13, F16: seconds to swap out and in, `2 (V + L kv) / link`.
pub fn swap_seconds(state: f64, tokens: f64, kv: f64, link: f64) -> f64 {
    cost::swap_seconds(state + tokens * kv, link)
}

/// F14: the longest length at which recompute beats swap without a recurrent state,
/// `L* = (s - a) / c` with `s = 2 kv / link`, `a = 2 P / pi`, `c = attention / (2 pi)`; 0 when swap
/// always wins. Recompute wins **below** it.
pub fn dense_crossover(params: f64, attention: f64, kv: f64, link: f64, compute: f64) -> f64 {
    let (swap, linear) = (2.0 * kv / link, 2.0 * params / compute);
    let square = attention / (2.0 * compute);
    ((swap - linear) / square).max(0.0)
}

/// F14: the link above which swap wins at every length, `kv pi / P`.
pub fn dense_threshold_link(params: f64, kv: f64, compute: f64) -> f64 {
    kv * compute / params
}

/// F15, and its hybrid form: the link at which swap takes as long as `recompute` seconds,
/// `2 (V + L kv) / T`.
pub fn break_even_link(state: f64, tokens: f64, kv: f64, recompute: f64) -> f64 {
    2.0 * (state + tokens * kv) / recompute
}

/// F16: seconds to replay `tokens` tokens at `rate` tokens a second.
pub fn replay_seconds(tokens: f64, rate: f64) -> f64 {
    tokens / rate
}

/// F16: the length from which on swap beats replay with a recurrent state,
/// `L* = (2 V / link) / (1 / R - 2 kv / link)`; infinite where the link never catches up. Swap
/// wins **above** it: the other side than in F14.
pub fn hybrid_crossover(state: f64, kv: f64, link: f64, rate: f64) -> f64 {
    let gained = 1.0 / rate - 2.0 * kv / link;
    if gained > 0.0 { 2.0 * state / link / gained } else { f64::INFINITY }
}

/// F17: seconds to bring back the nearest checkpoint that the host holds, and replay the rest:
/// `(V + K kv) / link + (L - K) / R` with the checkpoint at `kept` tokens.
pub fn checkpoint_seconds(
    (state, kv): (f64, f64),
    (kept, tokens): (f64, f64),
    link: f64,
    rate: f64,
) -> f64 {
    (state + kept * kv) / link + replay_seconds(tokens - kept, rate)
}

/// Two pools that share one memory by a fixed ratio (F19).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PoolSplit {
    /// Bytes for slots.
    pub state_bytes: f64,
    /// Bytes for blocks.
    pub kv_bytes: f64,
}

impl PoolSplit {
    /// `memory` bytes, slots to blocks as `ratio` to 1: `M r / (1 + r)` for slots.
    pub fn by_ratio(memory: f64, ratio: f64) -> PoolSplit {
        let state_bytes = memory * ratio / (1.0 + ratio);
        PoolSplit { state_bytes, kv_bytes: memory - state_bytes }
    }

    /// Slots of `state` bytes.
    pub fn slots(&self, state: f64) -> f64 {
        (self.state_bytes / state).floor()
    }

    /// Most sequences of `context` tokens that both pools hold at once.
    pub fn sequences(&self, state: f64, kv: f64, context: f64) -> f64 {
        self.slots(state).min((self.kv_bytes / (context * kv)).floor())
    }
}

/// F19: the ratio at which both pools run full together, `V / (L kv)`.
pub fn balanced_ratio(state: f64, kv: f64, context: f64) -> f64 {
    state / (context * kv)
}

/// F19: the mean context below which the slots of a pool of that ratio run out first,
/// `V / (r kv)`.
pub fn slot_bound_context(state: f64, kv: f64, ratio: f64) -> f64 {
    state / (ratio * kv)
}
