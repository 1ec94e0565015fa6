//! Steps: F1, F6 to F11, F18, F20, F21, F24.

/// How prefill counts pairs of query and key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pairs {
    /// Those a causal mask lets through, `L^2 / 2`; lecture A.
    Causal,
    /// All, `L^2`; lecture B.
    Full,
}

/// F1: FLOPs per byte of a decode step, `2 P B / (W + B kv)`, where a sequence's rows take
/// `kv_sequence` bytes.
pub fn intensity(params: f64, weights: f64, batch: f64, kv_sequence: f64) -> f64 {
    2.0 * params * batch / (weights + batch * kv_sequence)
}

/// F1: sequences at which products stop waiting for weights, `pi / beta`, rows left out.
pub fn ridge_batch(flops: f64, bandwidth: f64) -> f64 {
    flops / bandwidth
}

/// F6: bytes of a decode step, `W + B (L kv + 2 V)`: a recurrent state is read and written.
pub fn decode_bytes(weights: f64, batch: f64, context: f64, kv: f64, state: f64) -> f64 {
    weights + batch * (context * kv + 2.0 * state)
}

/// F7: bytes of a step of decodes and one chunk as the lecture has them: what decodes read, and
/// the rows that the chunk writes.
pub fn mixed_bytes(decode_bytes: f64, chunk: f64, kv: f64) -> f64 {
    decode_bytes + chunk * kv
}

/// F7: FLOPs of such a step: `2 P` a row, and `attention` per pair of query and key: `context`
/// for each decode, `prefix + chunk / 2` for each row of the chunk. The lecture has no prefix.
pub fn mixed_flops(
    params: f64,
    attention: f64,
    (batch, context): (f64, f64),
    (prefix, chunk): (f64, f64),
) -> f64 {
    let pairs = batch * context + chunk * (prefix + chunk / 2.0);
    2.0 * params * (batch + chunk) + attention * pairs
}

/// F8: FLOPs of a prompt, `S(L) = 2 P L + attention L^2`, halved in the causal form.
pub fn prefill_flops(params: f64, attention: f64, tokens: f64, pairs: Pairs) -> f64 {
    let pairs = match pairs {
        Pairs::Causal => tokens * tokens / 2.0,
        Pairs::Full => tokens * tokens,
    };
    2.0 * params * tokens + attention * pairs
}

/// F9: length at which attention costs as much as the products.
pub fn parity_tokens(params: f64, attention: f64, pairs: Pairs) -> f64 {
    match pairs {
        Pairs::Causal => 4.0 * params / attention,
        Pairs::Full => 2.0 * params / attention,
    }
}

/// F10: the chunks of a prompt where decodes are served first: `budget - decodes` tokens, the
/// last one shorter. Empty if the decodes take the whole budget: the prompt never starts. All
/// chunks but the last end at multiples of `grid`, 1 in the lectures and 64 for models with
/// recurrent or MLA layers; the last takes what is left as soon as the budget holds it.
pub fn chunk_plan(tokens: usize, budget: usize, decodes: usize, grid: usize) -> Vec<usize> {
    let most = budget.saturating_sub(decodes);
    let chunk = most / grid * grid;
    let (mut plan, mut left) = (Vec::new(), tokens);
    while left > most {
        if chunk == 0 {
            return Vec::new();
        }
        plan.push(chunk);
        left -= chunk;
    }
    plan.extend((left > 0).then_some(left));
    plan
}

/// F11: bound on the time to a first token when each step gives the prompt at least `floor`
/// tokens: `ceil(L / f)` steps.
pub fn floor_ttft_bound(tokens: usize, floor: usize, step_seconds: f64) -> f64 {
    tokens.div_ceil(floor) as f64 * step_seconds
}

/// F18: rows that a batch of `batch` is padded with to fill the smallest bucket that holds it;
/// none if no bucket does.
pub fn padding(batch: usize, buckets: &[usize]) -> Option<usize> {
    buckets.iter().filter(|bucket| **bucket >= batch).min().map(|bucket| bucket - batch)
}

/// F18: mean and largest padding of batches that are uniform on `1..=most`; batches that no bucket
/// holds run unpadded.
pub fn mean_padding(most: usize, buckets: &[usize]) -> (f64, usize) {
    let rows: Vec<usize> = (1..=most).map(|batch| padding(batch, buckets).unwrap_or(0)).collect();
    let largest = rows.iter().copied().max().unwrap_or(0);
    (rows.iter().sum::<usize>() as f64 / most as f64, largest)
}

/// F20: most sequences whose decode step takes at most `seconds`,
/// `floor((seconds bandwidth - W) / (L kv + 2 V))`.
pub fn slo_batch(
    seconds: f64,
    bandwidth: f64,
    weights: f64,
    context_bytes: f64,
    state: f64,
) -> f64 {
    ((seconds * bandwidth - weights) / (context_bytes + 2.0 * state)).floor().max(0.0)
}

/// F21: the largest whole budget up to `most` whose step takes at most `seconds`, where
/// `step_seconds` grows with the budget; none if not even 1 does.
pub fn slo_budget(seconds: f64, most: usize, step_seconds: impl Fn(usize) -> f64) -> Option<usize> {
    let (mut fits, mut highest) = (0, most);
    while fits < highest {
        let middle = (fits + highest).div_ceil(2);
        match step_seconds(middle) <= seconds {
            true => fits = middle,
            false => highest = middle - 1,
        }
    }
    (fits > 0).then_some(fits)
}

/// F24: price of a million tokens, in the currency of the hour's price.
pub fn price_per_million(tokens_per_second: f64, price_per_hour: f64) -> f64 {
    1e6 / (tokens_per_second * 3600.0) * price_per_hour
}
