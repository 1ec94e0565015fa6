//! The control plane: which tokens of which sequence are computed in a step, and who holds memory.
//!
//! It sees token ids and units of memory, never a byte, a clock or a thread. What it decides it
//! writes down once per step, as a [`StepPlan`]; what comes back is a [`StepReport`].
//!
//! ```text
//! plan:    generated tokens of all running sequences, then running prompts, then sequences that
//!          return from the host, then waiting ones; a sequence that lacks a unit takes it from a
//!          checkpoint, else sits out while a victim leaves; last, slots for snapshots
//! commit:  lengths advance, tokens append, forks begin, transfers end, retired units are released
//! ```

mod admission;
mod audit;
pub mod cost;
mod fairness;
#[cfg(feature = "faults")]
pub mod faults;
pub mod limits;
pub mod plan;
mod preemption;
pub mod prompt;
mod queue;
mod reuse;
pub mod sequence;
mod space;
mod stats;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use checkpoints::{Demotion, PrefixTree, TreeOptions, TreeStats};
use rustc_hash::FxHashMap;
use state_pool::{BlockHandle, PoolStats, SequenceState, StatePool, Tier};

use crate::config::Policy;
use audit::Audit;
use fairness::Fairness;
use queue::{Queue, Ticket, key_of};
use reuse::Follower;

pub use audit::{Comparison, Verdict};
pub use checkpoints::{MissReason, Placement};
pub use cost::Cost;
pub use limits::{Caps, Limits, LongReserve, Refused, Reuse};
pub use plan::{
    BlockCopy, Direction, Form, Hit, Lack, PlannedSpan, SampledToken, SlotCopy, StepPlan,
    StepReport, TokenBudget, Transfer, TransferId, Wanted,
};
pub use prompt::{End, Prompt, ReuseFigures};
pub use sequence::{Counters, HostSlot, Place, Sequence, SequenceId};
pub use stats::{Blocked, Occupancy, PoolUse, SchedulerStats, UnitUse};

/// Place among the parked: priority first, then who came first.
type ParkedRank = (i32, SequenceId);

/// A transfer that has not been reported yet.
#[derive(Debug, Clone, Copy)]
struct InFlight {
    id: TransferId,
    sequence: SequenceId,
    direction: Direction,
    bytes: u64,
}

/// Decides. Owns the pools and the sequences.
#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    device: StatePool,
    host: StatePool,
    sequences: FxHashMap<SequenceId, Sequence>,
    /// Sequences on the device, in order of priority, then of admission.
    running: Vec<SequenceId>,
    waiting: Queue,
    /// Tokens of prompts that wait for the first time, but for those that the tree covered when
    /// they came.
    waiting_tokens: usize,
    parked: BTreeSet<ParkedRank>,
    in_flight: Vec<InFlight>,
    /// None where nothing is to be reused.
    tree: Option<PrefixTree>,
    /// Checkpoints that are being copied to the host, and the bytes of each.
    demotions: Vec<(TransferId, Demotion, u64)>,
    /// The tree's uses and the bytes to be clean when there was nothing to demote.
    nothing_to_demote: (u64, usize),
    /// Shares of the programs, under the policy that knows them.
    fairness: Option<Fairness>,
    /// What steps are held to beyond the limits.
    caps: Caps,
    /// Under request-level batching: nobody comes in before all have left.
    is_closed: bool,
    /// Of those that wait, who waits for a snapshot: in the order in which they came.
    followers: Vec<Follower>,
    audit: Option<Audit>,
    /// States that could have been audited.
    audit_turns: u64,
    /// Sequences to be parked in the next plan.
    to_park: Vec<SequenceId>,
    /// Sequences whose states are to be given up in the next plan.
    to_drop: Vec<SequenceId>,
    /// Sequences admitted past a waiting one that did not fit.
    skipped: usize,
    /// What kept a sequence off the device in this step.
    blocked: Blocked,
    next_sequence: u64,
    next_transfer: u64,
    stats: SchedulerStats,
    /// Memory of the last plan, and of the list that a plan goes over, to be used again.
    spare: (StepPlan, Vec<SequenceId>),
    /// A fault to be caught by a test.
    #[cfg(feature = "faults")]
    pub fault: Option<faults::Fault>,
}

impl Scheduler {
    /// A scheduler over the pools of two tiers of one model.
    ///
    /// # Panics
    /// When the limits contradict each other.
    pub fn new(limits: Limits, device: StatePool, host: StatePool) -> Scheduler {
        assert!(limits.max_num_seqs <= limits.max_num_batched_tokens);
        assert!(limits.prefill_floor.is_multiple_of(limits.grid));
        let tree = limits.reuse.as_ref().map(|reuse| {
            assert!(reuse.grid_tokens.is_multiple_of(limits.grid));
            PrefixTree::new(TreeOptions {
                is_recurrent: limits.is_recurrent(),
                grid_tokens: reuse.grid_tokens,
                max_ghost_tokens: reuse.max_ghost_tokens,
            })
        });
        Scheduler {
            fairness: (limits.policy == Policy::Fair).then(Fairness::default),
            limits,
            tree,
            demotions: Vec::new(),
            nothing_to_demote: (0, 0),
            followers: Vec::new(),
            audit: None,
            audit_turns: 0,
            device,
            host,
            sequences: FxHashMap::default(),
            running: Vec::new(),
            waiting: Queue::default(),
            caps: Caps::default(),
            is_closed: false,
            waiting_tokens: 0,
            parked: BTreeSet::new(),
            in_flight: Vec::new(),
            to_park: Vec::new(),
            to_drop: Vec::new(),
            skipped: 0,
            blocked: Blocked::default(),
            next_sequence: 0,
            next_transfer: 0,
            stats: SchedulerStats::default(),
            spare: Default::default(),
            #[cfg(feature = "faults")]
            fault: None,
        }
    }

    /// Takes a prompt; returns the names of its answers, the first choice's first.
    ///
    /// # Errors
    /// What can never run; see [`Limits::check`].
    ///
    /// # Panics
    /// When the prompt is empty or no choice is wanted.
    pub fn submit(&mut self, prompt: &Prompt<'_>) -> Result<Vec<SequenceId>, Refused> {
        let Prompt { tokens, choices, .. } = *prompt;
        assert!(!tokens.is_empty() && choices > 0, "a request asks for something");
        let max_len = tokens.len().saturating_add(prompt.max_tokens);
        self.limits.check(max_len, prompt.priority, self.device.layout())?;
        let priority = prompt.priority.unwrap_or(0);
        let siblings = self.next_sequence..self.next_sequence + choices as u64;
        self.next_sequence = siblings.end;
        let ids: Vec<SequenceId> = siblings.clone().map(SequenceId).collect();
        let program = prompt.program_id.map(Arc::from);
        let leader = ids[0];
        for id in &ids {
            let place = if *id == leader { Place::Waiting } else { Place::Forking { leader } };
            let mut sequence = Sequence::new(*id, tokens.to_vec(), priority, place);
            (sequence.siblings, sequence.max_len) = (siblings.clone(), max_len);
            sequence.cache_salt = prompt.cache_salt.map(Into::into);
            #[cfg(feature = "faults")]
            if self.fault == Some(faults::Fault::SaltIgnored) {
                sequence.cache_salt = None;
            }
            sequence.marks = prompt.checkpoint_at.to_vec();
            sequence.scored_with = prompt.scored_with;
            sequence.program.clone_from(&program);
            if *id == leader {
                sequence.forks = ids[1..].to_vec();
            }
            self.sequences.insert(*id, sequence);
        }
        self.announce(leader);
        let known = self.look_up(leader).usable.map_or(0, |usable| usable.position);
        self.sequence_mut(leader).backlog = tokens.len().saturating_sub(known);
        self.waiting_tokens += tokens.len().saturating_sub(known);
        let ticket = self.ticket(prompt, known, program.as_ref());
        self.sequence_mut(leader).ticket = ticket;
        self.start_waiting(leader);
        Ok(ids)
    }

    /// Ends a sequence. Its units are free at once, or when the transfer that holds them ends; what
    /// it computed stays for those that go on from there, as `end` says. An unknown name is
    /// nothing.
    pub fn end(&mut self, id: SequenceId, end: End) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        if sequence.place.is_moving() {
            sequence.cancelled = true;
            return;
        }
        self.forget_ghost(id);
        let mut sequence = self.sequences.remove(&id).expect("it was just there");
        self.hand_on_forks(&mut sequence);
        if let Some(fairness) = &mut self.fairness {
            fairness.end(sequence.program.as_ref(), sequence.unserved());
        }
        let (rank, ticket) = (sequence.rank(), sequence.ticket);
        match std::mem::replace(&mut sequence.place, Place::Waiting) {
            Place::Waiting => {
                self.waiting.remove(rank, ticket);
                self.forget_follower(id);
            }
            Place::Forking { leader } => {
                let leader = self.sequences.get_mut(&leader).expect("a fork has a leader");
                leader.forks.retain(|fork| *fork != id);
            }
            Place::Device(state) => {
                self.running.retain(|running| *running != id);
                #[cfg(feature = "faults")]
                let Some(state) = faults::keep_share(self, state) else { return };
                self.keep_end(&sequence, state, end);
            }
            Place::Host(state) => {
                self.parked.remove(&sequence.parked_rank());
                state.release(&mut self.host);
            }
            Place::Leaving { .. } | Place::Returning { .. } | Place::Promoting { .. } => {
                unreachable!("left above")
            }
        }
    }

    /// A sequence that ends before its forks have begun hands its place in the queue to the first
    /// of them; what it has computed of the prompt is computed again.
    fn hand_on_forks(&mut self, sequence: &mut Sequence) {
        let forks = std::mem::take(&mut sequence.forks);
        let Some((&leader, rest)) = forks.split_first() else { return };
        for fork in rest {
            self.sequence_mut(*fork).place = Place::Forking { leader };
        }
        let heir = self.sequence_mut(leader);
        heir.forks = rest.to_vec();
        heir.place = Place::Waiting;
        heir.ticket = sequence.ticket;
        self.start_waiting(leader);
    }

    /// Parks a sequence in the next plan, if it runs then and the host has room: what preemption
    /// does when memory is short, at a moment of the caller's choice.
    pub fn park(&mut self, id: SequenceId) {
        self.to_park.push(id);
    }

    /// Gives the state of a sequence up in the next plan, if it runs then: it waits, and is
    /// computed again. What preemption by recomputation does, at a moment of the caller's choice.
    pub fn recompute(&mut self, id: SequenceId) {
        self.to_drop.push(id);
    }

    /// Holds the steps to come to less than the limits, or to these again.
    pub fn set_caps(&mut self, caps: Caps) {
        self.caps = caps;
    }

    /// Plans a step at `now`, on the clock of [`Prompt::submitted`]: ageing alone looks at it.
    pub fn plan(&mut self, now: Duration) -> StepPlan {
        self.stats.steps += 1;
        self.blocked = Blocked::default();
        self.is_closed &= self.on_device() > 0;
        self.promote(now);
        let (plan, mut order) = std::mem::take(&mut self.spare);
        let tokens = match self.caps.max_prompt_tokens {
            None => self.limits.max_num_batched_tokens,
            Some(prompts) => {
                let generates = |id: &&SequenceId| self.sequences[*id].next_form() == Form::Step;
                let generating = self.running.iter().filter(generates).count();
                self.limits.max_num_batched_tokens.min(prompts.saturating_add(generating))
            }
        };
        let budget = TokenBudget::new(tokens, self.limits.prefill_floor);
        let mut step = Planning { plan, budget, lacking: 0, fork_without_slot: false };
        if self.limits.park_every.is_some_and(|n| self.stats.steps.is_multiple_of(n)) {
            self.to_park.extend(self.running.iter().find(|id| self.has_moved(**id)));
        }
        while let Some(id) = self.to_park.pop() {
            self.park_now(id, &mut step);
        }
        while let Some(id) = self.to_drop.pop() {
            self.drop_now(id);
        }
        if self.limits.policy == Policy::Priority {
            self.make_way(&mut step);
        }
        order.clear();
        order.extend_from_slice(&self.running);
        for (i, id) in order.iter().enumerate() {
            // Whoever replays its answer leaves a token to each of those behind it.
            step.budget.reserve(order.len() - i - 1);
            self.run(*id, Form::Step, &mut step);
        }
        self.release_followers();
        self.stats.lacking_together += u64::from(step.lacking > 1);
        self.stats.forks_without_slot += u64::from(step.fork_without_slot);
        for id in &order {
            // A prompt that runs gives way to those of lower numbers that do not run yet.
            if self.limits.policy == Policy::Priority {
                self.take_in(self.sequences.get(id).map(|s| s.priority), &mut step);
            }
            self.run(*id, Form::Chunk, &mut step);
        }
        self.spare.1 = order;
        self.take_in(None, &mut step);
        self.count_blocked();
        self.run_audit(&mut step);
        self.plan_snapshots(&mut step);
        self.demote_ahead(&mut step);
        step.plan
    }

    /// Whether a sequence has computed something since it came onto the device.
    fn has_moved(&self, id: SequenceId) -> bool {
        let sequence = &self.sequences[&id];
        sequence.computed() > sequence.returned_at.unwrap_or(0)
    }

    /// Plans the next span of a sequence whose next token is of `form`, if it has its units.
    fn run(&mut self, id: SequenceId, form: Form, step: &mut Planning) {
        let mut lacks = false;
        loop {
            let sequence = self.sequences.get_mut(&id).expect("a running sequence is known");
            // It may have left in this very plan.
            if sequence.state().is_none() || sequence.next_form() != form {
                break;
            }
            if sequence.computed() == sequence.tokens.len() {
                step.plan.add_hit(sequence);
                sequence.planned_in = self.stats.steps;
                self.stats.full_hits += 1;
                break;
            }
            let (pool, grid) = (&mut self.device, self.limits.grid);
            let lack = match step.plan.add(sequence, pool, &mut step.budget, grid) {
                Ok(0) => return,
                Ok(_) => {
                    sequence.planned_in = self.stats.steps;
                    #[cfg(feature = "faults")]
                    faults::free_at_plan(self, &mut step.plan);
                    return;
                }
                Err(lack) => lack,
            };
            lacks = true;
            step.fork_without_slot |= lack.slots > 0 && !self.device.fits(0, 1);
            if !self.make_room(id, &lack, step) {
                break;
            }
        }
        step.lacking += usize::from(lacks);
    }

    /// Takes in what became of `plan`. The engine then ends the sequences whose token was their
    /// last.
    ///
    /// # Panics
    /// When the report names what was not planned.
    pub fn commit(&mut self, mut plan: StepPlan, report: &StepReport) {
        if let Some(fairness) = &mut self.fairness {
            fairness.serve(plan.spans.iter().map(|span| span.rows).sum());
        }
        for span in &plan.spans {
            if self.advance_shadow(span.sequence, span.rows) {
                continue;
            }
            match span.form {
                Form::Chunk => self.stats.prompt_tokens += span.rows as u64,
                Form::Step => self.stats.generated_tokens += span.rows as u64,
            }
            let Some(sequence) = self.sequences.get_mut(&span.sequence) else { continue };
            sequence.state_mut().advance(span.rows);
            if span.wanted == Wanted::Last {
                // What is computed again later was scored before.
                sequence.scored_with = None;
            }
            if !sequence.forks.is_empty() && span.wanted == Wanted::Last {
                self.begin_forks(span.sequence);
            }
        }
        for hit in &plan.hits {
            if self.sequences.contains_key(&hit.sequence) {
                self.begin_forks(hit.sequence);
            }
        }
        self.end_audit(&plan, report.verdict);
        self.stats.second_slots += plan.second_slots() as u64;
        self.stats.copied_blocks += plan.copies.len() as u64;
        plan.retire(&mut self.device);
        self.spare.0 = plan;
        for sample in &report.sampled {
            let Some(sequence) = self.sequences.get_mut(&sample.sequence) else { continue };
            if let Ok(token) = sample.drawn {
                sequence.tokens.push(token);
            }
        }
        for id in &report.finished {
            self.transfer_done(*id);
        }
        for id in &report.failed {
            self.transfer_failed(*id);
        }
        self.check();
    }

    /// The forks of a sequence that has just computed its prompt share its state from here. One
    /// that finds no place waits, and computes the prompt again.
    fn begin_forks(&mut self, id: SequenceId) {
        let leader = self.sequence_mut(id);
        let (origin, reuse, histories) = (leader.origin, leader.reuse, leader.histories.clone());
        for fork in std::mem::take(&mut leader.forks) {
            let sequence = self.sequence_mut(fork);
            (sequence.origin, sequence.reuse, sequence.was_admitted) = (origin, reuse, true);
            sequence.scored_with = None;
            sequence.ticket = sequence.ticket.first();
            sequence.histories.clone_from(&histories);
            if self.on_device() < self.limits.max_num_seqs {
                let state = self.sequences[&id].state().expect("it ran").fork(&mut self.device);
                self.sequence_mut(fork).place = Place::Device(state);
                self.start_running(fork);
            } else {
                self.sequence_mut(fork).place = Place::Waiting;
                self.start_waiting(fork);
            }
        }
    }

    /// What a prompt of which `known` tokens are kept is ranked by.
    fn ticket(&mut self, prompt: &Prompt<'_>, known: usize, program: Option<&Arc<str>>) -> Ticket {
        let tokens = prompt.tokens.len();
        let is_long = self.limits.reserve_long.is_some_and(|long| tokens >= long.prompt_tokens);
        match self.limits.policy {
            Policy::Fcfs | Policy::Priority => Ticket::by_key(0, is_long),
            Policy::Sjf => {
                let cost = self.limits.cost.prefill_seconds(known..tokens);
                Ticket::by_cost(cost, self.limits.sjf_ageing, prompt.submitted, is_long)
            }
            Policy::Fair => {
                let tokens = (tokens + prompt.max_tokens).saturating_mul(prompt.choices);
                let fairness = self.fairness.as_mut().expect("the policy has programs");
                let start = fairness.submit(program, prompt.choices, tokens);
                Ticket::by_key(key_of(start / 1e3), is_long)
            }
        }
    }

    /// Puts a sequence that has no state into the queue.
    fn start_waiting(&mut self, id: SequenceId) {
        let sequence = &self.sequences[&id];
        self.waiting.insert(sequence.rank(), sequence.ticket);
    }

    /// Those that have waited long enough stand among the cheapest.
    fn promote(&mut self, now: Duration) {
        while let Some((rank, cheapest)) = self.waiting.to_promote(self.limits.sjf_ageing, now) {
            let sequence = self.sequence_mut(rank.id);
            let promoted = sequence.ticket.promoted_to(cheapest);
            let ticket = std::mem::replace(&mut sequence.ticket, promoted);
            self.waiting.remove(rank, ticket);
            self.start_waiting(rank.id);
        }
    }

    fn sequence_mut(&mut self, id: SequenceId) -> &mut Sequence {
        self.sequences.get_mut(&id).expect("a sequence in a list is known")
    }

    /// The sequence of that name, unless it has ended; of a span it may be an audit's.
    pub fn sequence(&self, id: SequenceId) -> Option<&Sequence> {
        self.sequences.get(&id).or_else(|| self.shadow(id))
    }

    /// Whether nothing is left to do: no sequence, no copy on its way, no audit.
    pub fn is_idle(&self) -> bool {
        self.sequences.is_empty() && self.demotions.is_empty() && self.audit.is_none()
    }

    /// Its limits.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The pool of the device tier.
    pub fn device(&self) -> &StatePool {
        &self.device
    }

    /// The pool of the host tier.
    pub fn host(&self) -> &StatePool {
        &self.host
    }

    /// Counts since the start.
    pub fn stats(&self) -> SchedulerStats {
        self.stats
    }

    /// What is where, now.
    pub fn occupancy(&self) -> Occupancy {
        let left = |id: &SequenceId| {
            let sequence = &self.sequences[id];
            sequence.prompt_len.saturating_sub(sequence.computed())
        };
        Occupancy {
            running: self.running.len(),
            waiting: self.waiting.len() + self.followers.len(),
            following: self.followers.len(),
            parked: self.parked.len(),
            in_flight: self.in_flight.len(),
            prompt_backlog: self.waiting_tokens + self.running.iter().map(left).sum::<usize>(),
        }
    }

    /// Counts of both pools now: device, host.
    pub fn pools(&self) -> (PoolStats, PoolStats) {
        (self.device.stats(), self.host.stats())
    }

    /// Counts of the prefix tree, if there is one.
    pub fn tree_stats(&self) -> Option<TreeStats> {
        self.tree.as_ref().map(PrefixTree::stats)
    }

    /// Invariants that hold between steps: the pools' counters, and one handle of a slot for each
    /// sequence on the device beside those of checkpoints. Debug builds scan everything.
    fn check(&self) {
        let on_device = self.on_device();
        let in_tree = self.tree.as_ref().map_or(0, |tree| tree.slots(Tier::Device));
        let copied = self.demotions.iter().filter(|(_, d, _)| d.source_slot.is_some()).count();
        let handles = self.device.stats().slots.handles;
        let held = on_device + in_tree + copied + self.audit_slots();
        assert_eq!(handles, held, "a sequence has one slot");
        assert!(on_device <= self.limits.max_num_seqs, "more sequences than there are places");
        self.device.check_counts();
        self.host.check_counts();
        if cfg!(debug_assertions) {
            self.device.check();
            self.host.check();
            self.tree.iter().for_each(PrefixTree::check);
        }
    }

    /// A state of `len` computed tokens with room for `tokens` tokens on a tier, above a watermark:
    /// the `shared` blocks, then fresh units. None when the tier lacks one; then the shares are
    /// given back.
    fn fresh_state(
        &mut self,
        tier: Tier,
        watermark: usize,
        (tokens, len): (usize, usize),
        shared: Vec<BlockHandle>,
    ) -> Option<SequenceState> {
        let missing = blocks_for(tokens) - shared.len();
        let has_space = self.make_space(tier, watermark, missing, 1);
        let pool = if tier == Tier::Device { &mut self.device } else { &mut self.host };
        if !has_space {
            for block in shared {
                pool.put_back(block);
            }
            return None;
        }
        let fresh = pool.allocate(missing, 1).expect("room was made");
        let mut blocks = shared;
        blocks.extend(fresh.blocks);
        let slot = fresh.slots.into_iter().next().expect("a transaction gives what was asked for");
        Some(SequenceState::from_parts(blocks.into(), slot, len))
    }
}

impl Drop for Scheduler {
    /// The tree gives its units back; sequences that have not ended hold theirs.
    fn drop(&mut self) {
        if let Some(audit) = self.audit.take() {
            self.release_audit(audit);
        }
        while let Some((id, ..)) = self.demotions.first() {
            self.end_demotion(*id, false);
        }
        self.clear_prefix_cache();
    }
}

/// A plan in the making.
#[derive(Debug)]
struct Planning {
    plan: StepPlan,
    budget: TokenBudget,
    /// Sequences that sit out for want of a unit.
    lacking: usize,
    /// A fork's first step found no free slot.
    fork_without_slot: bool,
}

/// The blocks of `tokens` tokens.
fn blocks_for(tokens: usize) -> usize {
    tokens.div_ceil(state_pool::BLOCK_LEN)
}
