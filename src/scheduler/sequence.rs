//! One stream of tokens, how much of it is computed, and where its state is.

use std::ops::Range;
use std::sync::Arc;

use checkpoints::{History, Lineage, Match, MatchOptions, Prefix};
use state_pool::{
    BLOCK_LEN, BlockTable, PackedHandle, SequenceState, SlotHandle, SlotId, StatePool, Tier,
};

use super::plan::{Form, PlannedSpan, SlotCopy};
use super::prompt::ReuseFigures;
use super::queue::{Rank, Ticket};
use super::stats::Blocked;

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
    /// About to go on from a checkpoint on the host, which is being copied to the device.
    Promoting {
        /// The blocks that are read, those that the device has too among them.
        blocks: BlockTable,
        /// The slot that is read.
        slot: HostSlot,
        /// What is written.
        device: SequenceState,
    },
}

/// A share of a checkpoint's slot on the host.
#[derive(Debug)]
pub enum HostSlot {
    /// As it was on the device.
    Plain(SlotHandle),
    /// Packed.
    Packed(PackedHandle),
}

impl HostSlot {
    /// How it is copied to a slot on the device.
    pub(super) fn copy_to(&self, target: SlotId) -> SlotCopy {
        match self {
            HostSlot::Plain(slot) => SlotCopy::Plain(slot.id(), target),
            HostSlot::Packed(slot) => SlotCopy::Unpack(slot.id(), target),
        }
    }

    pub(super) fn release(self, host: &mut StatePool) {
        match self {
            HostSlot::Plain(slot) => host.release(slot),
            HostSlot::Packed(slot) => host.release(slot),
        };
    }
}

impl Place {
    /// Whether it is between the tiers.
    pub fn is_moving(&self) -> bool {
        matches!(self, Place::Leaving { .. } | Place::Returning { .. } | Place::Promoting { .. })
    }

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
    pub(super) cache_salt: Option<Arc<str>>,
    /// The chain of requests that it is a part of.
    pub(super) program: Option<Arc<str>>,
    /// What its place in the queue goes by.
    pub(super) ticket: Ticket,
    /// Positions its caller wants kept.
    pub(super) marks: Vec<usize>,
    /// How many likeliest tokens are wanted beside each token of the prompt, while these have not
    /// all been scored.
    pub(super) scored_with: Option<usize>,
    /// What the pool had got back, and uses of the tree, when it was refused, and what it did not
    /// find: while the first two stay it need not be looked at.
    pub(super) refused_at: Option<((u64, u64), Blocked)>,
    /// Its prompt is a ghost in the tree.
    pub(super) is_noted: bool,
    /// What it went on from.
    pub(super) origin: Origin,
    /// How the tokens behind the exact ones are computed: positions in order, and what holds from
    /// each on.
    pub(super) histories: Vec<(usize, History)>,
    /// Its answer began on a state that was not exact and is gone, and went on from another.
    pub(super) is_mixed: bool,
    /// Tokens that were computed when it lost its state.
    pub(super) lost_tokens: usize,
    /// Copies of states on the host did not arrive: it does without.
    pub(super) distrusts_host: bool,
    /// Positions ahead at which it is to leave a snapshot, in order.
    pub(super) wanted: Vec<usize>,
    /// Position of the last state on its path that the tree was given.
    pub(super) last_kept: usize,
    /// Tokens it adds to the backlog of those that wait.
    pub(super) backlog: usize,
    pub(super) reuse: ReuseFigures,
    pub(super) was_admitted: bool,
    /// What it was before it last went on from something.
    before: Before,
    /// It went on from a state that an audit found to differ, or from one like it.
    pub(super) is_suspect: bool,
    /// It is computed for an audit, and draws nothing.
    pub(super) is_shadow: bool,
}

/// What a sequence went on from, and so which bits it has (DESIGN.md rule 5).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Origin {
    /// Tokens that it did not compute.
    pub position: usize,
    pub lineage: Lineage,
    /// Tokens from the first on whose blocks have, or will have, the bits of a cold run.
    pub exact_tokens: usize,
}

/// What a sequence is again when the state that it was to go on from does not arrive.
#[derive(Debug, Clone, Copy)]
struct Before {
    origin: Origin,
    is_mixed: bool,
    lost_tokens: usize,
    recomputed_tokens: u64,
    was_admitted: bool,
}

/// What preemption cost a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Times it was pushed out.
    pub preemptions: u64,
    /// Bytes copied between the tiers when it was pushed out and came back.
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
        let origin = Origin { position: 0, lineage: Lineage::Exact, exact_tokens: 0 };
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
            cache_salt: None,
            program: None,
            ticket: Ticket::default(),
            marks: Vec::new(),
            scored_with: None,
            refused_at: None,
            is_noted: false,
            origin,
            histories: Vec::new(),
            is_mixed: false,
            lost_tokens: 0,
            distrusts_host: false,
            wanted: Vec::new(),
            last_kept: 0,
            backlog: 0,
            reuse: ReuseFigures::default(),
            was_admitted: false,
            before: Before {
                origin,
                is_mixed: false,
                lost_tokens: 0,
                recomputed_tokens: 0,
                was_admitted: false,
            },
            is_suspect: false,
            is_shadow: false,
        }
    }

    /// Its name.
    pub fn id(&self) -> SequenceId {
        self.id
    }

    /// Tokens of its prompt that were to be computed when it came, while it waits.
    pub fn backlog(&self) -> usize {
        self.backlog
    }

    /// All tokens so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// How many of them are the prompt.
    pub fn prompt_len(&self) -> usize {
        self.prompt_len
    }

    /// The scores that a span of it is asked for: how many likeliest tokens beside each of its
    /// own, and the positions of those, which the rows before them tell of.
    pub fn scores(&self, span: &PlannedSpan) -> Option<(usize, Range<usize>)> {
        let end = (span.start + span.rows + 1).min(self.prompt_len);
        let top = self.scored_with.filter(|_| span.form == Form::Chunk)?;
        Some((top, span.start + 1..end))
    }

    /// Where its state is.
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// Lower is served first.
    pub fn priority(&self) -> i32 {
        self.priority
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
            Place::Leaving { device, .. } | Place::Promoting { device, .. } => device.len(),
            Place::Returning { host, .. } => host.len(),
        }
    }

    /// Its state of `computed` tokens is lost. What came before is forgotten.
    pub(super) fn starts_over(&mut self, computed: usize) {
        self.lost_tokens = computed;
        self.wanted.clear();
        (self.returned_at, self.failed_transfers) = (None, 0);
    }

    /// Goes on from what was found, whose rows have these `histories`; of what it had lost, the
    /// rest is computed again. True the first time: what it finds later may be its own.
    pub(super) fn resumes(&mut self, found: &Match, histories: Vec<(usize, History)>) -> bool {
        let known = self.prompt_len / BLOCK_LEN * BLOCK_LEN;
        let origin = match &found.usable {
            None => Origin { position: 0, lineage: Lineage::Exact, exact_tokens: known },
            Some(usable) => Origin {
                position: usable.position,
                lineage: usable.lineage,
                exact_tokens: match usable.lineage {
                    Lineage::Exact => known,
                    Lineage::NonExact => usable.exact_tokens,
                },
            },
        };
        self.before = Before {
            origin: self.origin,
            is_mixed: self.is_mixed,
            lost_tokens: self.lost_tokens,
            recomputed_tokens: self.counters.recomputed_tokens,
            was_admitted: self.was_admitted,
        };
        self.histories = histories;
        let non_exact = found.usable.filter(|usable| usable.lineage == Lineage::NonExact);
        let mut history = History::EXACT;
        if let Some(usable) = non_exact {
            history = self.histories.last().map_or(history, |(_, last)| *last);
            history = if usable.is_packed { history.packed() } else { history };
            history = history.resumed_at(usable.position);
            self.histories.push((usable.position, history));
        }
        let behind = (known.max(origin.position), history.past_border(self.prompt_len));
        self.histories.push(behind);
        let before = std::mem::replace(&mut self.origin, origin);
        let is_other = before.lineage == Lineage::NonExact && before != origin;
        self.is_mixed |= is_other && self.has_answer();
        let again = self.lost_tokens.saturating_sub(before.position.max(origin.position));
        self.counters.recomputed_tokens += again as u64;
        self.lost_tokens = 0;
        self.last_kept = self.origin.position;
        let is_first = !std::mem::replace(&mut self.was_admitted, true);
        if is_first {
            self.reuse = ReuseFigures::of(found);
        }
        is_first
    }

    /// The state that it was to go on from did not arrive: it is as before. Returns what the tree
    /// was said to have given it, if that was the first time.
    pub(super) fn did_not_resume(&mut self) -> Option<ReuseFigures> {
        let Before { origin, is_mixed, lost_tokens, recomputed_tokens, was_admitted } = self.before;
        (self.origin, self.is_mixed, self.lost_tokens) = (origin, is_mixed, lost_tokens);
        self.counters.recomputed_tokens = recomputed_tokens;
        self.was_admitted = was_admitted;
        self.wanted.clear();
        (!was_admitted).then(|| std::mem::take(&mut self.reuse))
    }

    /// Whether a token was drawn: from then on its bits are settled.
    pub(super) fn has_answer(&self) -> bool {
        self.tokens.len() > self.prompt_len
    }

    /// Which states it may go on from. One that has drawn a token must get the bits it had: an
    /// exact one those of a cold run, below the border of its own prompt; another one those of
    /// the state it came from.
    pub(super) fn match_options(&self, exact_only: bool) -> MatchOptions {
        let border = self.prompt_len / BLOCK_LEN * BLOCK_LEN;
        let device_only = self.distrusts_host;
        if self.scored_with.is_some() {
            return MatchOptions { exact_only: true, limit_tokens: 0, device_only };
        }
        match (self.has_answer(), self.origin.lineage) {
            (false, _) => MatchOptions { exact_only, limit_tokens: self.prompt_len, device_only },
            (true, Lineage::Exact) => {
                MatchOptions { exact_only: true, limit_tokens: border, device_only }
            }
            (true, Lineage::NonExact) => {
                let limit_tokens = border.max(self.origin.position);
                MatchOptions { exact_only, limit_tokens, device_only }
            }
        }
    }

    /// Whether it has the bits of a cold run: it started as one, or from an exact state.
    pub fn is_exact(&self) -> bool {
        self.origin.lineage == Lineage::Exact && !self.is_mixed
    }

    /// Whether the state behind its first `len` tokens may be given to the tree. One that came back
    /// from being packed stands behind exact blocks alone, and would pass for exact there.
    pub(super) fn may_keep(&self, len: usize) -> bool {
        let is_exact = self.origin.lineage == Lineage::Exact;
        !self.is_suspect && len > 0 && (is_exact || len > self.origin.exact_tokens)
    }

    /// The tree's name for its first `len` tokens.
    pub(super) fn prefix(&self, len: usize) -> Prefix<'_> {
        let exact_tokens = self.origin.exact_tokens.min(len / BLOCK_LEN * BLOCK_LEN);
        Prefix {
            salt: self.salt(),
            tokens: &self.tokens[..len],
            exact_tokens,
            histories: &self.histories,
        }
    }

    /// Of its computed tokens, those whose blocks have the bits of a cold run.
    pub(super) fn exact_tokens(&self) -> &[u32] {
        &self.tokens[..self.origin.exact_tokens.min(self.computed())]
    }

    pub(super) fn salt(&self) -> Option<&str> {
        self.cache_salt.as_deref()
    }

    /// Tokens that it did not compute since it last started or went on from a kept state.
    pub fn resumed_at(&self) -> usize {
        self.origin.position
    }

    /// Its place in the queue.
    pub(super) fn rank(&self) -> Rank {
        self.ticket.rank(self.priority, self.id)
    }

    /// Its place among the parked, whose order no policy changes.
    pub(super) fn parked_rank(&self) -> (i32, SequenceId) {
        (self.priority, self.id)
    }

    /// Of the tokens that it could reach, those that it did not need to have computed.
    pub(super) fn unserved(&self) -> usize {
        self.max_len - self.tokens.len() + self.reuse.cached_tokens
    }

    /// How much of its prompt was there already.
    pub fn reuse(&self) -> ReuseFigures {
        self.reuse
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
            packed_bytes: 0,
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
