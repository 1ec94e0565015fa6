//! The control plane: which tokens of which sequence are computed in a step, and who holds memory.
//!
//! It sees token ids and units of memory, never a byte, a clock or a thread. What it decides it
//! writes down once per step, as a [`StepPlan`]; what comes back is a [`StepReport`].
//!
//! ```text
//! plan:    generated tokens of all running sequences, then running prompts, then sequences that
//!          return from the host, then waiting ones; a sequence that lacks a unit sits out while a
//!          victim leaves
//! commit:  lengths advance, tokens append, forks begin, transfers end, retired units are released
//! ```

mod admission;
pub mod cost;
pub mod plan;
mod preemption;
pub mod sequence;

use std::collections::{BTreeSet, HashMap};

use state_pool::{PoolStats, SequenceState, StatePool};

pub use cost::Cost;
pub use plan::{
    BlockCopy, Direction, Form, Lack, PlannedSpan, SampledToken, StepPlan, StepReport, TokenBudget,
    Transfer, TransferId, Wanted,
};
pub use sequence::{Counters, Place, Sequence, SequenceId};

/// Order in which sequences are served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// First come, first served.
    Fcfs,
    /// Lower priority number first, strictly; first come, first served within a number.
    Priority,
}

/// How a sequence is pushed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Preempt {
    /// Whichever costs less; see [`cost`].
    Auto,
    /// Copied to the host; computed again only when the host is full.
    Swap,
    /// Always computed again.
    Recompute,
}

/// Limits and rules of a scheduler, derived once.
#[derive(Debug, Clone, PartialEq)]
pub struct Limits {
    /// Tokens a step may compute.
    pub max_num_batched_tokens: usize,
    /// Tokens the first prompt span of a step may always take; a multiple of the grid.
    pub prefill_floor: usize,
    /// Sequences that may hold device memory at once.
    pub max_num_seqs: usize,
    /// Tokens a sequence may reach.
    pub max_model_len: usize,
    /// Pages that admission leaves free while anything runs.
    pub watermark_pages: usize,
    /// Positions at which prompt spans may end.
    pub grid: usize,
    /// Order of service.
    pub policy: Policy,
    /// How a sequence is pushed out.
    pub preempt: Preempt,
    /// What it costs.
    pub cost: Cost,
}

/// A request that can never run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// It is longer than the limit.
    #[error(
        "{tokens} tokens do not fit: --max-model-len is {max_model_len}, and the device memory \
         holds {device_tokens} tokens of one sequence"
    )]
    TooLong {
        /// Prompt and answer together.
        tokens: usize,
        /// The limit.
        max_model_len: usize,
        /// What the device tier holds for one sequence.
        device_tokens: usize,
    },
    /// A priority where the policy has none.
    #[error("priority {priority} is given, but --scheduling-policy is fcfs")]
    PriorityUnderFcfs {
        /// The priority.
        priority: i32,
    },
}

/// Counts since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SchedulerStats {
    /// Sequences parked on the host.
    pub parked: u64,
    /// Sequences that came back from it.
    pub returned: u64,
    /// Preemptions that dropped the state instead.
    pub recomputed: u64,
    /// Of those, because the host was full.
    pub host_full: u64,
    /// Transfers that failed.
    pub failed_transfers: u64,
    /// Steps in which a fork found no free slot.
    pub forks_without_slot: u64,
    /// Steps in which two sequences or more lacked a unit.
    pub lacking_together: u64,
    /// Prompt tokens computed.
    pub prompt_tokens: u64,
}

/// What the sequences of a step drew, for the engine to judge.
#[derive(Debug, Clone, PartialEq)]
pub struct Drawn {
    /// Who.
    pub sequence: SequenceId,
    /// The token, now the last of the sequence, or why there is none.
    pub token: Result<u32, String>,
}

/// Place in a queue: class first, then who came first.
type Rank = (i32, SequenceId);

/// A transfer that has not been reported yet.
#[derive(Debug, Clone, Copy)]
struct InFlight {
    id: TransferId,
    sequence: SequenceId,
    direction: Direction,
}

/// Decides. Owns the pools and the sequences.
#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    device: StatePool,
    host: StatePool,
    sequences: HashMap<SequenceId, Sequence>,
    /// Sequences on the device, in order of admission.
    running: Vec<SequenceId>,
    waiting: BTreeSet<Rank>,
    parked: BTreeSet<Rank>,
    in_flight: Vec<InFlight>,
    /// Sequences admitted past a waiting one that did not fit.
    skipped: usize,
    next_sequence: u64,
    next_transfer: u64,
    stats: SchedulerStats,
}

impl Scheduler {
    /// A scheduler over the pools of two tiers of one model.
    pub fn new(limits: Limits, device: StatePool, host: StatePool) -> Scheduler {
        assert!(limits.max_num_seqs <= limits.max_num_batched_tokens);
        assert!(limits.prefill_floor.is_multiple_of(limits.grid));
        Scheduler {
            limits,
            device,
            host,
            sequences: HashMap::new(),
            running: Vec::new(),
            waiting: BTreeSet::new(),
            parked: BTreeSet::new(),
            in_flight: Vec::new(),
            skipped: 0,
            next_sequence: 0,
            next_transfer: 0,
            stats: SchedulerStats::default(),
        }
    }

    /// Takes a prompt of which `choices` answers of up to `max_tokens` tokens are wanted; returns
    /// their names, the first choice's first.
    ///
    /// # Errors
    /// What can never run.
    ///
    /// # Panics
    /// When the prompt is empty or no choice is wanted.
    pub fn submit(
        &mut self,
        prompt: &[u32],
        max_tokens: usize,
        choices: usize,
        priority: Option<i32>,
    ) -> Result<Vec<SequenceId>, Refused> {
        assert!(!prompt.is_empty() && choices > 0, "a request asks for something");
        self.check_length(prompt.len().saturating_add(max_tokens))?;
        let priority = match (self.limits.policy, priority) {
            (Policy::Fcfs, Some(priority)) => return Err(Refused::PriorityUnderFcfs { priority }),
            (_, priority) => priority.unwrap_or(0),
        };
        let ids: Vec<SequenceId> =
            (0..choices as u64).map(|i| SequenceId(self.next_sequence + i)).collect();
        self.next_sequence += choices as u64;
        for id in &ids {
            let place = if *id == ids[0] { Place::Waiting } else { Place::Forking };
            let mut sequence = Sequence::new(*id, prompt.to_vec(), priority, place);
            if *id == ids[0] {
                sequence.forks = ids[1..].to_vec();
            }
            self.sequences.insert(*id, sequence);
        }
        self.waiting.insert((priority, ids[0]));
        Ok(ids)
    }

    /// Of the last token only the id is needed, not its state.
    fn check_length(&self, tokens: usize) -> Result<(), Refused> {
        let max_model_len = self.limits.max_model_len;
        let layout = self.device.layout();
        let blocks = (tokens - 1).div_ceil(state_pool::BLOCK_LEN);
        if tokens > max_model_len || layout.pages_for(blocks, 1).is_none() {
            let device_tokens = layout.max_tokens();
            return Err(Refused::TooLong { tokens, max_model_len, device_tokens });
        }
        Ok(())
    }

    /// Ends a sequence: it has its last token, failed, or is not wanted any more. Its units are
    /// free at once, or when the transfer that holds them ends. An unknown name is nothing.
    pub fn end(&mut self, id: SequenceId) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        if matches!(sequence.place, Place::Leaving { .. } | Place::Returning { .. }) {
            sequence.cancelled = true;
            return;
        }
        let mut sequence = self.sequences.remove(&id).expect("it was just there");
        self.hand_on_forks(&mut sequence);
        let rank = (sequence.priority, id);
        match sequence.place {
            Place::Waiting => {
                self.waiting.remove(&rank);
            }
            Place::Forking => {
                for other in self.sequences.values_mut() {
                    other.forks.retain(|fork| *fork != id);
                }
            }
            Place::Device(state) => {
                self.running.retain(|running| *running != id);
                state.release(&mut self.device);
            }
            Place::Host(state) => {
                self.parked.remove(&rank);
                state.release(&mut self.host);
            }
            Place::Leaving { .. } | Place::Returning { .. } => unreachable!("left above"),
        }
    }

    /// A sequence that ends before its forks have begun hands its place in the queue to the first
    /// of them; what it has computed of the prompt is computed again.
    fn hand_on_forks(&mut self, sequence: &mut Sequence) {
        let forks = std::mem::take(&mut sequence.forks);
        let Some((heir, rest)) = forks.split_first() else { return };
        let heir = self.sequences.get_mut(heir).expect("a fork lives as long as it is wanted");
        heir.forks = rest.to_vec();
        heir.place = Place::Waiting;
        self.waiting.insert((heir.priority, heir.id));
    }

    /// Plans a step.
    pub fn plan(&mut self) -> StepPlan {
        let budget =
            TokenBudget::new(self.limits.max_num_batched_tokens, self.limits.prefill_floor);
        let mut step = Planning { plan: StepPlan::default(), budget, lacking: 0 };
        let running = self.running.clone();
        for form in [Form::Step, Form::Chunk] {
            for id in &running {
                self.run(*id, form, &mut step);
            }
        }
        if step.lacking > 1 {
            self.stats.lacking_together += 1;
        }
        if step.lacking == 0 {
            self.bring_back(&mut step);
            self.admit(&mut step);
        }
        step.plan
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
            let (pool, grid) = (&mut self.device, self.limits.grid);
            let Err(lack) = step.plan.add(sequence, pool, &mut step.budget, grid) else {
                return;
            };
            if !lacks {
                self.stats.forks_without_slot += u64::from(lack.fork);
                lacks = true;
            }
            if !self.make_room(id, &lack, step) {
                break;
            }
        }
        step.lacking += usize::from(lacks);
    }

    /// Takes in what became of `plan`; returns what was drawn. The engine then ends the sequences
    /// whose token was their last.
    ///
    /// # Panics
    /// When the report names what was not planned.
    pub fn commit(&mut self, plan: StepPlan, report: &StepReport) -> Vec<Drawn> {
        for span in &plan.spans {
            if span.form == Form::Chunk {
                self.stats.prompt_tokens += span.rows as u64;
            }
            let Some(sequence) = self.sequences.get_mut(&span.sequence) else { continue };
            sequence.state_mut().advance(span.rows);
            if span.wanted == Wanted::Last {
                self.begin_forks(span.sequence);
            }
        }
        plan.retire(&mut self.device);
        let mut drawn = Vec::with_capacity(report.sampled.len());
        for sample in &report.sampled {
            let Some(sequence) = self.sequences.get_mut(&sample.sequence) else { continue };
            if let Ok(token) = sample.drawn {
                sequence.tokens.push(token);
            }
            let token = sample.drawn.clone();
            drawn.push(Drawn { sequence: sample.sequence, token });
        }
        for id in &report.finished {
            self.transfer_done(*id);
        }
        for id in &report.failed {
            self.transfer_failed(*id);
        }
        self.check();
        drawn
    }

    /// The forks of a sequence that has just computed its prompt share its state from here.
    fn begin_forks(&mut self, id: SequenceId) {
        let sequence = self.sequences.get_mut(&id).expect("a committed sequence is known");
        let forks = std::mem::take(&mut sequence.forks);
        for fork in forks {
            let state = self.sequences[&id].state().expect("it ran").fork(&mut self.device);
            let sequence = self.sequences.get_mut(&fork).expect("a fork that is wanted is known");
            sequence.place = Place::Device(state);
            self.running.push(fork);
        }
    }

    /// The sequence of that name, unless it has ended.
    pub fn sequence(&self, id: SequenceId) -> Option<&Sequence> {
        self.sequences.get(&id)
    }

    /// Whether anything is left to do.
    pub fn is_idle(&self) -> bool {
        self.sequences.is_empty()
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

    /// Counts of both pools now: device, host.
    pub fn pools(&self) -> (PoolStats, PoolStats) {
        (self.device.stats(), self.host.stats())
    }

    /// Invariants that hold between steps. Everything is counted in debug builds; the pools'
    /// counters always are.
    fn check(&self) {
        self.device.check();
        self.host.check();
        debug_assert!(self.running.iter().all(|id| self.sequences[id].state().is_some()));
        // One slot per running sequence: shares of a fork's first step do not count as slots.
        let held = self.device.stats().slots.held;
        debug_assert!(held <= self.running.len() + self.in_flight.len());
    }
}

/// A plan in the making.
#[derive(Debug)]
struct Planning {
    plan: StepPlan,
    budget: TokenBudget,
    /// Sequences that sit out for want of a unit.
    lacking: usize,
}

impl Planning {
    fn has(&self, id: SequenceId) -> bool {
        self.plan.spans.iter().any(|span| span.sequence == id)
    }
}

/// The blocks of `tokens` tokens.
fn blocks_for(tokens: usize) -> usize {
    tokens.div_ceil(state_pool::BLOCK_LEN)
}

/// A state of `len` computed tokens made of fresh units for `tokens` tokens.
fn fresh_state(pool: &mut StatePool, tokens: usize, len: usize) -> Option<SequenceState> {
    let state = SequenceState::allocate(pool, tokens).ok()?;
    let (table, slot, _) = state.into_parts();
    Some(SequenceState::from_parts(table, slot, len))
}
