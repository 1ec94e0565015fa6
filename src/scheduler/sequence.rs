//! One stream of tokens, how much of it is computed, and where its state is.

use std::ops::Range;

use state_pool::{BLOCK_LEN, SequenceState, StatePool, Tier};

use super::plan::Form;

/// A sequence's name within an engine; a later submit has a larger one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(pub u64);

/// Where the state of a sequence is.
///
/// ```text
///            admit                    park                 transfer done
/// Waiting ----------> Device ----------------> Leaving ----------------> Host
///    ^  ^               | ^                       |                       |
///    |  |  recompute    | |      transfer done    | failed: back          | return
///    |  +---------------+ +---- Returning <-------+-----------------------+
///    |                             |  failed three times: computed again
///    +-----------------------------+
/// ```
#[derive(Debug)]
pub enum Place {
    /// Nowhere: nothing is computed.
    Waiting,
    /// Nowhere, until the sequence it is a fork of has computed the prompt.
    Forking {
        /// That sequence.
        leader: SequenceId,
    },
    /// On the device: it runs.
    Device(SequenceState),
    /// On the device, being copied to the host.
    Leaving {
        /// What is read.
        device: SequenceState,
        /// What is written.
        host: SequenceState,
    },
    /// On the host: it is parked.
    Host(SequenceState),
    /// On the host, being copied to the device.
    Returning {
        /// What is read.
        host: SequenceState,
        /// What is written.
        device: SequenceState,
    },
}

impl Place {
    /// The state that is in `tier` and not on its way.
    pub(super) fn settled(&self, tier: Tier) -> Option<&SequenceState> {
        match (self, tier) {
            (Place::Device(state), Tier::Device) | (Place::Host(state), Tier::Host) => Some(state),
            _ => None,
        }
    }
}

/// One stream of tokens: the prompt, then what was generated. Its tokens are the ground state; the
/// units it holds are derived from them.
#[derive(Debug)]
pub struct Sequence {
    pub(super) id: SequenceId,
    pub(super) tokens: Vec<u32>,
    pub(super) prompt_len: usize,
    /// Tokens it may reach.
    pub(super) max_len: usize,
    /// Lower is served first.
    pub(super) priority: i32,
    pub(super) place: Place,
    /// Sequences that draw their first token when this one has computed the prompt.
    pub(super) forks: Vec<SequenceId>,
    /// All choices of its request, itself too: they have the prompt in common.
    pub(super) siblings: Range<u64>,
    /// To be dropped as soon as no transfer holds its units.
    pub(super) cancelled: bool,
    /// The last step that computes something of it.
    pub(super) planned_in: u64,
    /// Length at which it last came back from the host.
    pub(super) returned_at: Option<usize>,
    /// Transfers that failed since one succeeded.
    pub(super) failed_transfers: u32,
    pub(super) counters: Counters,
}

/// What preemption cost a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Times it was pushed out.
    pub preemptions: u64,
    /// Bytes it was copied between tiers.
    pub swapped_bytes: u64,
    /// Tokens computed again after a preemption.
    pub recomputed_tokens: u64,
}

impl Sequence {
    /// A sequence of the tokens of `prompt`, of which `state` on the device has computed the first:
    /// for an engine that runs one at a time.
    ///
    /// # Panics
    /// When the state has computed more than the prompt.
    pub fn on_device(id: SequenceId, prompt: Vec<u32>, state: SequenceState) -> Sequence {
        assert!(state.len() <= prompt.len(), "a state ahead of its prompt");
        Sequence::new(id, prompt, 0, Place::Device(state))
    }

    pub(super) fn new(id: SequenceId, prompt: Vec<u32>, priority: i32, place: Place) -> Sequence {
        Sequence {
            id,
            prompt_len: prompt.len(),
            max_len: prompt.len(),
            tokens: prompt,
            priority,
            place,
            forks: Vec::new(),
            siblings: id.0..id.0 + 1,
            cancelled: false,
            planned_in: 0,
            returned_at: None,
            failed_transfers: 0,
            counters: Counters::default(),
        }
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

    /// Where its state is.
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// What preemption cost it.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// How many tokens are computed.
    pub fn computed(&self) -> usize {
        match &self.place {
            Place::Waiting | Place::Forking { .. } => 0,
            Place::Device(state) | Place::Host(state) => state.len(),
            Place::Leaving { device, .. } => device.len(),
            Place::Returning { host, .. } => host.len(),
        }
    }

    /// Counts that `computed` tokens have to be computed again. What came before is forgotten.
    pub(super) fn starts_over(&mut self, computed: usize) {
        self.counters.recomputed_tokens += computed as u64;
        (self.returned_at, self.failed_transfers) = (None, 0);
    }

    /// Full blocks of the prompt that are computed: nothing writes them again, and they have the
    /// same bits in all choices of a request.
    pub(super) fn prompt_blocks(&self) -> usize {
        self.computed().min(self.prompt_len) / BLOCK_LEN
    }

    /// What it holds on the device while it runs.
    pub fn state(&self) -> Option<&SequenceState> {
        match &self.place {
            Place::Device(state) => Some(state),
            _ => None,
        }
    }

    /// Counts `rows` more tokens as computed: part of commit.
    ///
    /// # Panics
    /// When it is not on the device or has no such tokens.
    pub fn advance(&mut self, rows: usize) {
        assert!(self.computed() + rows <= self.tokens.len());
        self.state_mut().advance(rows);
    }

    /// Appends a generated token: part of commit.
    pub fn push(&mut self, token: u32) {
        self.tokens.push(token);
    }

    /// Gives its units on the device back.
    ///
    /// # Panics
    /// When it is not on the device.
    pub fn release(self, pool: &mut StatePool) {
        match self.place {
            Place::Device(state) => state.release(pool),
            other => panic!("a sequence on the device is released, not {other:?}"),
        }
    }

    pub(super) fn state_mut(&mut self) -> &mut SequenceState {
        match &mut self.place {
            Place::Device(state) => state,
            other => unreachable!("a sequence that runs is on the device, not {other:?}"),
        }
    }

    /// The form of the next token to compute.
    pub fn next_form(&self) -> Form {
        if self.computed() < self.prompt_len { Form::Chunk } else { Form::Step }
    }

    /// Length of the next span of at most `budget` tokens; 0 when the budget holds none. A prompt
    /// span ends on the grid or with the prompt.
    pub fn next_rows(&self, budget: usize, grid: usize) -> usize {
        let start = self.computed();
        if start >= self.prompt_len {
            return budget.min(self.tokens.len() - start);
        }
        if budget >= self.prompt_len - start {
            return self.prompt_len - start;
        }
        ((start + budget) / grid * grid).saturating_sub(start)
    }
}

#[cfg(test)]
mod tests {
    use state_pool::{PoolLayout, TierSizes};

    use super::*;

    #[test]
    fn prompt_spans_end_on_the_grid_or_with_the_prompt() {
        let sizes = TierSizes {
            slot_bytes: 4096,
            block_bytes: 1024,
            memory_bytes: 1 << 20,
            max_zero_byte_slots: 0,
        };
        let mut pool = StatePool::new(Tier::Device, PoolLayout::new(sizes).expect("a layout"));
        let state = SequenceState::allocate(&mut pool, 200).expect("room");
        let mut sequence = Sequence::on_device(SequenceId(0), vec![7; 150], state);
        assert_eq!(sequence.next_form(), Form::Chunk);
        assert_eq!(
            [63, 64, 149, 150].map(|budget| sequence.next_rows(budget, 64)),
            [0, 64, 128, 150]
        );
        assert_eq!(sequence.next_rows(63, 1), 63);
        // Off the grid, as after a turn end: the next span ends on it.
        sequence.advance(70);
        assert_eq!([57, 60, 80].map(|budget| sequence.next_rows(budget, 64)), [0, 58, 80]);
        sequence.advance(80);
        sequence.push(1);
        sequence.push(2);
        assert_eq!(sequence.next_form(), Form::Step);
        assert_eq!([0, 1, 9].map(|budget| sequence.next_rows(budget, 64)), [0, 1, 2]);
        sequence.release(&mut pool);
        pool.check();
    }
}
