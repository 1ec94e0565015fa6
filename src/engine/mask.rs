//! Which tokens may be drawn.

use std::sync::OnceLock;

/// Which tokens may be drawn: a bit each, the lowest of the first word for token 0. Tokens beyond
/// its words may not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenMask {
    words: Vec<u32>,
}

impl TokenMask {
    /// A mask of these bits.
    pub fn new(words: Vec<u32>) -> TokenMask {
        TokenMask { words }
    }

    /// Whether a token may be drawn.
    pub fn allows(&self, id: u32) -> bool {
        let word = self.words.get(id as usize / 32);
        word.is_some_and(|word| word >> (id % 32) & 1 == 1)
    }

    /// Sets the scores of all others to minus infinity.
    pub(super) fn apply(&self, scores: &mut [f32]) {
        for (scores, &word) in scores.chunks_mut(32).zip(&self.words) {
            if word == u32::MAX {
                continue;
            }
            for (bit, score) in scores.iter_mut().enumerate() {
                if word >> bit & 1 == 0 {
                    *score = f32::NEG_INFINITY;
                }
            }
        }
        let covered = scores.len().min(self.words.len() * 32);
        scores[covered..].fill(f32::NEG_INFINITY);
    }
}

/// A mask that is being computed.
#[derive(Debug, Default)]
pub struct PendingMask(OnceLock<Result<TokenMask, String>>);

impl PendingMask {
    /// Is told the mask, or why there is none. Only the first is heard.
    pub(super) fn set(&self, mask: Result<TokenMask, String>) {
        let _ = self.0.set(mask);
    }

    /// Waits for it.
    ///
    /// # Errors
    /// Why there is none.
    pub fn wait(&self) -> Result<&TokenMask, &str> {
        self.0.wait().as_ref().map_err(String::as_str)
    }
}
