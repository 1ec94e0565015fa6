//! Token ids as runs of endless streams, so that a workload of millions of tokens takes little
//! memory until one of its requests is submitted.

use std::ops::Range;

/// Ids are below this.
const VOCABULARY: u64 = 160_000;

/// Spreads the numbers of the streams over all of u64.
const STREAM_STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// First of the streams of what a prompt has for itself; what several have in common, a trace's ids
/// or a group's number, is below.
pub(super) const UNIQUE: u64 = 1_000_000_000;

/// First of the streams of answers.
pub(super) const ANSWER: u64 = 2_000_000_000;

/// A part of a stream. Token i of stream s is `mix(s * STREAM_STEP + i) mod VOCABULARY`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Which stream.
    pub stream: u64,
    /// Index of the first token in it.
    pub start: u32,
    /// Number of tokens.
    pub len: u32,
}

impl Run {
    /// The first `len` tokens of a stream.
    pub fn new(stream: u64, len: usize) -> Run {
        let len = u32::try_from(len).expect("a run is shorter than 4 billion tokens");
        Run { stream, start: 0, len }
    }

    fn tokens(self) -> impl Iterator<Item = u32> {
        let first = self.stream.wrapping_mul(STREAM_STEP).wrapping_add(u64::from(self.start));
        // The remainder is below the vocabulary, so below 2^32.
        (0..u64::from(self.len)).map(move |i| (mix(first.wrapping_add(i)) % VOCABULARY) as u32)
    }
}

/// The finalizer of MurmurHash3.
fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 33)).wrapping_mul(0xFF51_AFD7_ED55_8CCD);
    let x = (x ^ (x >> 33)).wrapping_mul(0xC4CE_B9FE_1A85_EC53);
    x ^ (x >> 33)
}

/// Runs, one behind the other.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Runs {
    runs: Vec<Run>,
    len: usize,
}

impl Runs {
    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Appends a run; one of no tokens is nothing.
    pub fn push(&mut self, run: Run) {
        if run.len > 0 {
            self.runs.push(run);
            self.len += run.len as usize;
        }
    }

    /// Appends other runs.
    pub fn extend(&mut self, other: &Runs) {
        self.runs.extend_from_slice(&other.runs);
        self.len += other.len;
    }

    /// The tokens at the positions of `range`.
    ///
    /// # Panics
    /// When there are no such positions.
    pub fn slice(&self, range: Range<usize>) -> Runs {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        let mut out = Runs::default();
        let mut at = 0;
        for run in &self.runs {
            let len = run.len as usize;
            let skip = range.start.saturating_sub(at).min(len);
            let keep = (range.end.saturating_sub(at)).min(len).saturating_sub(skip);
            // Both are at most `run.len`.
            out.push(Run { start: run.start + skip as u32, len: keep as u32, ..*run });
            at += len;
        }
        out
    }

    /// Puts the tokens into `tokens`, in place of what is there.
    pub fn expand(&self, tokens: &mut Vec<u32>) {
        tokens.clear();
        tokens.reserve(self.len);
        for run in &self.runs {
            tokens.extend(run.tokens());
        }
    }

    /// The tokens.
    pub fn to_tokens(&self) -> Vec<u32> {
        let mut tokens = Vec::new();
        self.expand(&mut tokens);
        tokens
    }
}

impl FromIterator<Run> for Runs {
    fn from_iter<I: IntoIterator<Item = Run>>(iter: I) -> Runs {
        let mut runs = Runs::default();
        iter.into_iter().for_each(|run| runs.push(run));
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of an independent computation of the same formula.
    #[test]
    fn a_stream_has_its_tokens() {
        let tokens = |run: Run| Runs::from_iter([run]).to_tokens();
        assert_eq!(tokens(Run::new(0, 3)), [0, 66_604, 41_447]);
        assert_eq!(tokens(Run::new(2_000_000_000, 3)), [86_971, 151_137, 130_588]);
        let late = Run { stream: (1 << 63) + 5, start: 7, len: 4 };
        assert_eq!(tokens(late), [106_955, 23_494, 25_364, 131_300]);
    }

    #[test]
    fn a_slice_has_the_tokens_of_its_positions_wherever_it_cuts() {
        let runs: Runs = [Run::new(1, 5), Run::new(2, 0), Run::new(3, 4)].into_iter().collect();
        let tokens = runs.to_tokens();
        assert_eq!((runs.len(), tokens.len()), (9, 9));
        for start in 0..=9 {
            for end in start..=9 {
                let slice = runs.slice(start..end);
                assert_eq!(slice.to_tokens(), tokens[start..end], "{start}..{end}");
                assert_eq!(slice.len(), end - start);
            }
        }
    }
}
