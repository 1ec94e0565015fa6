//! What it costs to push a sequence out: two copies, or computing it again.
//!
//! Swap: its bytes go out and come in over a link of `link_bytes_per_second` each way. Recompute:
//! its tokens are computed again at `tokens_per_second`. Both are constants measured once.

/// Constants of the choice.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cost {
    /// Bytes of a slot.
    pub slot_bytes: usize,
    /// Bytes of a block.
    pub block_bytes: usize,
    /// Bytes copied between the tiers per second.
    pub link_bytes_per_second: f64,
    /// Tokens computed again per second.
    pub tokens_per_second: f64,
}

impl Cost {
    /// Bytes of a slot and `blocks` blocks.
    pub fn bytes(&self, blocks: usize) -> u64 {
        (self.slot_bytes + blocks * self.block_bytes) as u64
    }

    /// Whether copying a sequence of `tokens` computed tokens in `blocks` blocks out and in takes
    /// no longer than computing it again.
    pub fn prefers_swap(&self, tokens: usize, blocks: usize) -> bool {
        let swap = 2.0 * self.bytes(blocks) as f64 / self.link_bytes_per_second;
        swap <= tokens as f64 / self.tokens_per_second
    }
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
        };
        // 2 x 43.9 MB over 10 GB/s are 8.8 ms; a token takes 10 ms.
        assert!(kimi.prefers_swap(1, 1));
        for (tokens_per_second, crossover) in [(20_000.0, 180), (100_000.0, 1_044)] {
            let cost = Cost { tokens_per_second, ..kimi };
            let prefers = |tokens: usize| cost.prefers_swap(tokens, tokens.div_ceil(64));
            let first = (1..10_000).find(|tokens| prefers(*tokens)).expect("it is reached");
            assert_eq!(first, crossover, "at {tokens_per_second} tokens per second");
            assert!(!prefers(crossover / 2) && prefers(crossover * 2));
        }
        let slow = Cost { link_bytes_per_second: 1e6, tokens_per_second: 1e6, ..kimi };
        assert!(!slow.prefers_swap(100_000, 1_563));
    }
}
