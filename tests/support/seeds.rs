//! Which seeds a randomised test runs.

use std::ops::Range;

/// `count` seeds, `DELTAPOOL_TIMES` times as many, or only `DELTAPOOL_SEED`.
pub fn seeds(count: u64) -> Range<u64> {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    match number("DELTAPOOL_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..count * number("DELTAPOOL_TIMES").unwrap_or(1),
    }
}
