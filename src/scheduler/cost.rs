//! What it costs to compute a prompt, and to push a sequence out: two copies, or computing it
//! again. All constants are measured once (`deltapool calibrate`, or a probe at the start).

use std::ops::Range;

/// Constants of the choice.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cost {
    /// Bytes of a slot.
    pub slot_bytes: usize,
    /// Bytes of a block.
    pub block_bytes: usize,
    /// Bytes copied between the tiers per second, each way.
    pub link_bytes_per_second: f64,
    /// Tokens computed per second, but for attention.
    pub tokens_per_second: f64,
    /// Seconds of attention for each pair of a token and one before it.
    pub pair_seconds: f64,
    /// Copies run beside steps, which go on meanwhile.
    pub overlaps: bool,
}

impl Cost {
    /// Bytes of a slot and `blocks` blocks.
    pub fn bytes(&self, blocks: usize) -> u64 {
        (self.slot_bytes + blocks * self.block_bytes) as u64
    }

    /// Seconds to compute the tokens at these positions of a prompt.
    pub fn prefill_seconds(&self, tokens: Range<usize>) -> f64 {
        let tokens = tokens.start as f64..tokens.end as f64;
        prefill_seconds(tokens, self.tokens_per_second, self.pair_seconds)
    }

    /// Seconds to copy a slot and `blocks` blocks out and in.
    pub fn swap_seconds(&self, blocks: usize) -> f64 {
        swap_seconds(self.bytes(blocks) as f64, self.link_bytes_per_second)
    }

    /// Whether copying a sequence in `blocks` blocks out and in costs no more than computing the
    /// tokens at these positions of it again, while `running` sequences are on the device.
    /// Computing takes its time of all of them, and so do copies that hold steps up. Beside steps
    /// the copy out takes its time of two, the one that leaves and the one that waits for its
    /// memory, and the copy in of the one that returns.
    pub fn prefers_swap(&self, tokens: Range<usize>, blocks: usize, running: usize) -> bool {
        let of_all = running.max(1) as f64;
        let waiting = if self.overlaps { 1.5 } else { of_all };
        waiting * self.swap_seconds(blocks) <= of_all * self.prefill_seconds(tokens)
    }
}

/// Seconds to compute the tokens at these positions of a prompt at so many a second, and
/// `pair_seconds` more for each pair of one of them and a token before it (SEEDS.md F12, for a part
/// that attends to what comes before it too).
pub fn prefill_seconds(tokens: Range<f64>, tokens_per_second: f64, pair_seconds: f64) -> f64 {
    let pairs = (tokens.end * tokens.end - tokens.start * tokens.start) / 2.0;
    (tokens.end - tokens.start) / tokens_per_second + pairs * pair_seconds
}

/// Seconds to copy so many bytes out **and** in, at so many a second each way (SEEDS.md F13, F16).
pub fn swap_seconds(bytes: f64, bytes_per_second: f64) -> f64 {
    2.0 * bytes / bytes_per_second
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Kimi-Linear's bytes (f32 state, bf16 windows and rows) at 100 computed tokens per second,
    /// and a K3-like state behind a slow link: on either side of where the two cost the same.
    #[test]
    fn the_cheaper_way_is_taken_on_both_sides_of_the_crossover() {
        let kimi = Cost {
            slot_bytes: 43_422_208,
            block_bytes: 516_096,
            link_bytes_per_second: 10e9,
            tokens_per_second: 100.0,
            pair_seconds: 0.0,
            overlaps: false,
        };
        // 2 x 43.9 MB over 10 GB/s are 8.8 ms; a token takes 10 ms.
        assert!(kimi.prefers_swap(0..1, 1, 8));
        for (tokens_per_second, crossover) in [(20_000.0, 180), (100_000.0, 1_044)] {
            let cost = Cost { tokens_per_second, ..kimi };
            let prefers = |tokens: usize| cost.prefers_swap(0..tokens, tokens.div_ceil(64), 8);
            let first = (1..10_000).find(|tokens| prefers(*tokens)).expect("it is reached");
            assert_eq!(first, crossover, "at {tokens_per_second} tokens per second");
            assert!(!prefers(crossover / 2) && prefers(crossover * 2));
        }
        let slow = Cost { link_bytes_per_second: 1e6, tokens_per_second: 1e6, ..kimi };
        assert!(!slow.prefers_swap(0..100_000, 1_563, 8));
    }

    #[test]
    fn a_copy_beside_steps_costs_those_its_time_who_wait_for_it() {
        let cost = Cost {
            slot_bytes: 0,
            block_bytes: 1_000,
            link_bytes_per_second: 1_000.0,
            tokens_per_second: 64.0,
            pair_seconds: 0.0,
            overlaps: true,
        };
        // A second a block each way, for one of computing.
        let prefers = |cost: Cost, running| cost.prefers_swap(0..640, 10, running);
        assert_eq!([0, 1, 2, 3].map(|running| prefers(cost, running)), [false, false, false, true]);
        assert!(!prefers(Cost { overlaps: false, ..cost }, 100));
    }

    /// Parts of a prompt take together what the whole takes, wherever it is cut (SEEDS.md G4).
    #[test]
    fn a_prompt_costs_the_same_however_it_is_cut() {
        let cost = Cost {
            slot_bytes: 0,
            block_bytes: 1,
            link_bytes_per_second: 1.0,
            tokens_per_second: 3_535.0,
            pair_seconds: 5e-9,
            overlaps: false,
        };
        let whole = cost.prefill_seconds(0..8_192);
        for chunk in [64, 480, 2_016] {
            let starts = (0..8_192).step_by(chunk);
            let parts = starts.map(|at| cost.prefill_seconds(at..(at + chunk).min(8_192)));
            assert!((parts.sum::<f64>() / whole - 1.0).abs() < 1e-12, "{chunk}");
        }
    }
}
