//! One stream of tokens and how much of it is computed.

use state_pool::{SequenceState, StatePool};

use super::plan::Form;

/// A sequence's name within an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(pub u64);

/// One stream of tokens: the prompt, then what was generated. Its tokens are the ground state; the
/// units it holds are derived from them.
#[derive(Debug)]
pub struct Sequence {
    id: SequenceId,
    tokens: Vec<u32>,
    prompt_len: usize,
    state: SequenceState,
}

impl Sequence {
    /// A sequence of the tokens of `prompt`, of which `state` has computed the first.
    ///
    /// # Panics
    /// When the state has computed more than the prompt.
    pub fn new(id: SequenceId, prompt: Vec<u32>, state: SequenceState) -> Sequence {
        assert!(state.len() <= prompt.len(), "a state ahead of its prompt");
        Sequence { id, prompt_len: prompt.len(), tokens: prompt, state }
    }

    /// Its name.
    pub fn id(&self) -> SequenceId {
        self.id
    }

    /// All tokens so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// How many of them are the prompt.
    pub fn prompt_len(&self) -> usize {
        self.prompt_len
    }

    /// How many of them are computed.
    pub fn computed(&self) -> usize {
        self.state.len()
    }

    /// What it holds.
    pub fn state(&self) -> &SequenceState {
        &self.state
    }

    pub(super) fn state_mut(&mut self) -> &mut SequenceState {
        &mut self.state
    }

    /// Form and length of the next span of at most `budget` tokens: a prompt span ends on the grid
    /// or with the prompt, so it may be none at all.
    ///
    /// # Panics
    /// When every token is computed.
    pub fn next_span(&self, budget: usize, grid: usize) -> Option<(Form, usize)> {
        let start = self.computed();
        assert!(start < self.tokens.len(), "nothing left to compute");
        if start >= self.prompt_len {
            let rows = budget.min(self.tokens.len() - start);
            return (rows > 0).then_some((Form::Step, rows));
        }
        let end = if budget >= self.prompt_len - start {
            self.prompt_len
        } else {
            (start + budget) / grid * grid
        };
        (end > start).then(|| (Form::Chunk, end - start))
    }

    /// Counts `rows` more tokens as computed: part of commit.
    ///
    /// # Panics
    /// When there are no such tokens.
    pub fn advance(&mut self, rows: usize) {
        assert!(self.computed() + rows <= self.tokens.len());
        self.state.advance(rows);
    }

    /// Appends a generated token.
    pub fn push(&mut self, token: u32) {
        self.tokens.push(token);
    }

    /// Gives its units back.
    pub fn release(self, pool: &mut StatePool) {
        self.state.release(pool);
    }
}

#[cfg(test)]
mod tests {
    use state_pool::{PoolLayout, Tier, TierSizes};

    use super::*;

    fn pool() -> StatePool {
        let sizes = TierSizes {
            slot_bytes: 4096,
            block_bytes: 1024,
            memory_bytes: 1 << 20,
            max_zero_byte_slots: 0,
        };
        StatePool::new(Tier::Device, PoolLayout::new(sizes).expect("a layout"))
    }

    #[test]
    fn prompt_spans_end_on_the_grid_or_with_the_prompt() {
        let mut pool = pool();
        let state = SequenceState::allocate(&mut pool, 200).expect("room");
        let mut sequence = Sequence::new(SequenceId(0), vec![7; 150], state);
        let chunk = |rows| Some((Form::Chunk, rows));
        assert_eq!(sequence.next_span(63, 64), None);
        assert_eq!(sequence.next_span(64, 64), chunk(64));
        assert_eq!(sequence.next_span(149, 64), chunk(128));
        assert_eq!(sequence.next_span(150, 64), chunk(150));
        assert_eq!(sequence.next_span(63, 1), chunk(63));
        // Off the grid, as after a turn end: the next span ends on it.
        sequence.advance(70);
        assert_eq!(sequence.next_span(57, 64), None);
        assert_eq!(sequence.next_span(60, 64), chunk(58));
        assert_eq!(sequence.next_span(80, 64), chunk(80));
        sequence.advance(80);
        sequence.push(1);
        sequence.push(2);
        assert_eq!(sequence.next_span(0, 64), None);
        assert_eq!(sequence.next_span(1, 64), Some((Form::Step, 1)));
        assert_eq!(sequence.next_span(9, 64), Some((Form::Step, 2)));
        sequence.release(&mut pool);
        pool.check();
    }
}
