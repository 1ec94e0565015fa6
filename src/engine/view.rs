//! What an engine shows of itself to those who watch it: who is where, and who holds what.

use std::time::Duration;

use super::core::RequestId;
use crate::scheduler::{Place, PoolUse, Scheduler, Sequence, SequenceId};

/// Sequences that are shown one by one.
pub const SEQUENCES_SHOWN: usize = 256;

/// How old a view may be while the engine works. It is taken between two steps, so with steps that
/// take longer it is as old as the step.
pub(super) const VIEW_AGE: Duration = Duration::from_millis(50);

/// What an engine holds and does at one moment.
#[derive(Debug, Clone, Default)]
pub struct EngineView {
    /// Who holds the units of the device.
    pub device: PoolUse,
    /// Who holds the units of the host.
    pub host: PoolUse,
    /// Of the sequences that run, those whose prompt is not computed yet.
    pub prefilling: usize,
    /// The sequences, those that run first: up to [`SEQUENCES_SHOWN`].
    pub sequences: Vec<SequenceView>,
}

/// Which answer of which request a sequence is, and for how long.
type Origin = ((RequestId, usize), Duration);

impl EngineView {
    /// Fills in the present moment; `origin` knows the sequences that are answers.
    pub(super) fn take(
        &mut self,
        scheduler: &Scheduler,
        origin: impl Fn(SequenceId) -> Option<Origin>,
    ) {
        (self.device, self.host) = scheduler.pool_use();
        self.sequences.clear();
        // One that was cancelled on its way between the tiers is nobody's any more.
        let answers = scheduler.by_place().filter_map(|sequence| {
            let (name, age) = origin(sequence.id())?;
            Some(SequenceView::of(sequence, name, age))
        });
        self.sequences.extend(answers.take(SEQUENCES_SHOWN));
        let prefills = |shown: &&SequenceView| shown.state == SequenceState::Prefill;
        self.prefilling = self.sequences.iter().filter(prefills).count();
    }
}

/// Where a sequence is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SequenceState {
    /// In the queue.
    Waiting,
    /// It runs, and its prompt is being computed.
    Prefill,
    /// It runs, and tokens are being generated.
    Decode,
    /// It is being copied between the device and the host.
    Moving,
    /// On the host.
    Parked,
}

impl SequenceState {
    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            SequenceState::Waiting => "waiting",
            SequenceState::Prefill => "prefill",
            SequenceState::Decode => "decode",
            SequenceState::Moving => "moving",
            SequenceState::Parked => "parked",
        }
    }

    pub(super) fn of(sequence: &Sequence) -> SequenceState {
        match sequence.place() {
            Place::Waiting | Place::Forking { .. } => SequenceState::Waiting,
            Place::Device(state) if state.len() < sequence.prompt_len() => SequenceState::Prefill,
            Place::Device(_) => SequenceState::Decode,
            Place::Host(_) => SequenceState::Parked,
            Place::Leaving { .. } | Place::Returning { .. } | Place::Promoting { .. } => {
                SequenceState::Moving
            }
        }
    }
}

/// One sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceView {
    /// The request it answers.
    pub request: RequestId,
    /// Which of the request's answers it is, from 0.
    pub choice: usize,
    /// Where it is.
    pub state: SequenceState,
    /// Tokens of its prompt.
    pub prompt_tokens: usize,
    /// Tokens computed.
    pub computed_tokens: usize,
    /// Tokens generated.
    pub generated_tokens: usize,
    /// Blocks that it holds on the device while it runs.
    pub blocks: usize,
    /// Lower is served first.
    pub priority: i32,
    /// Times it was pushed out.
    pub preemptions: u64,
    /// Since it was submitted.
    pub age: Duration,
}

impl SequenceView {
    fn of(
        sequence: &Sequence,
        (request, choice): (RequestId, usize),
        age: Duration,
    ) -> SequenceView {
        SequenceView {
            request,
            choice,
            state: SequenceState::of(sequence),
            prompt_tokens: sequence.prompt_len(),
            computed_tokens: sequence.computed(),
            generated_tokens: sequence.tokens().len() - sequence.prompt_len(),
            blocks: sequence.state().map_or(0, |state| state.table().as_slice().len()),
            priority: sequence.priority(),
            preemptions: sequence.counters().preemptions,
            age,
        }
    }
}
