//! Token ids for prompts of measurements: the same ones in every run.

/// A generator of token ids, SplitMix64.
#[derive(Debug, Clone)]
pub struct TokenIds {
    state: u64,
    vocab: u64,
}

impl TokenIds {
    /// Ids below `vocab_size`, the same ones for the same `seed`.
    pub fn new(seed: u64, vocab_size: usize) -> TokenIds {
        TokenIds { state: seed, vocab: vocab_size as u64 }
    }

    /// The next `count` ids.
    pub fn take(&mut self, count: usize) -> Vec<u32> {
        (0..count).map(|_| (self.next() % self.vocab) as u32).collect()
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}
