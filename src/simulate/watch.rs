//! What a simulation tells of each step to those who follow it.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use serde::Serialize;

use crate::engine::{PoolStats, RequestId, SequenceState, StepRecord};
use crate::request::Event;
use crate::scheduler::{Form, Occupancy, SequenceId, StepPlan};

/// One step. Requests are named by their place in the traffic, from 0.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct StepLine {
    /// Virtual second at which it began.
    pub t: f64,
    /// Seconds it took.
    pub seconds: f64,
    /// Sequences that generated.
    pub decodes: usize,
    /// Tokens of prompts.
    pub prompt_tokens: usize,
    /// Sequences on the device.
    pub running: usize,
    /// In the queue.
    pub waiting: usize,
    /// On the host.
    pub parked: usize,
    /// Pages of the device that hold nothing.
    pub free_pages: usize,
    /// Pages that hold slots.
    pub slot_pages: usize,
    /// Pages that hold blocks.
    pub block_pages: usize,
    /// Copies to the host that began.
    pub copies_out: usize,
    /// Copies from the host that began.
    pub copies_in: usize,
    /// The requests that generated.
    pub decode: Vec<u64>,
    /// The parts of prompts.
    pub chunks: Vec<Chunk>,
    /// The requests that got a token: at the end of the step.
    pub tokens: Vec<u64>,
    /// What became of requests since the step before, and in this one.
    pub events: Vec<Happening>,
}

/// Tokens of a prompt that were computed in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Chunk {
    /// Of which request.
    pub id: u64,
    /// Position of the first.
    pub start: usize,
    /// How many.
    pub tokens: usize,
}

/// Something that happened to a request.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Happening {
    /// The request.
    pub id: u64,
    /// What.
    pub what: What,
    /// Virtual second.
    pub t: f64,
}

/// What can happen to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum What {
    /// It came.
    Arrive,
    /// It came onto the device, with nothing computed or a state of the prefix tree.
    Admit,
    /// It went on from a state of the prefix tree.
    Restore,
    /// Its state was kept in passing.
    Checkpoint,
    /// Its first token came.
    First,
    /// It began to be copied to the host.
    SwapOut,
    /// It is on the host.
    Parked,
    /// It began to be copied back.
    SwapIn,
    /// It is on the device again.
    Resume,
    /// It lost its place and is to be computed again.
    Preempt,
    /// Its answer is complete.
    Finish,
}

/// Follows requests from step to step.
#[derive(Debug, Default)]
pub(super) struct Watcher {
    line: StepLine,
    /// Requests that are on the device, on the host or between, as of the last step.
    states: BTreeMap<u64, SequenceState>,
    /// Requests that came onto the device and did not lose their place since.
    admitted: HashSet<u64>,
    /// Those of them that came in this step.
    new: Vec<u64>,
    /// Requests that have a first token.
    started: HashSet<u64>,
}

impl Watcher {
    /// A request came at `at`.
    pub fn arrive(&mut self, id: u64, at: Duration) {
        self.happen(id, What::Arrive, at);
    }

    /// Takes the plan of a step that begins at `start`.
    pub fn plan(
        &mut self,
        plan: &StepPlan,
        request_of: &dyn Fn(SequenceId) -> Option<RequestId>,
        start: Duration,
    ) {
        for span in &plan.spans {
            let Some(RequestId(id)) = request_of(span.sequence) else { continue };
            match span.form {
                Form::Step => self.line.decode.push(id),
                Form::Chunk => {
                    self.line.chunks.push(Chunk { id, start: span.start, tokens: span.rows });
                }
            }
            if self.comes_in(id) {
                self.happen(id, What::Admit, start);
                if span.start > 0 {
                    self.happen(id, What::Restore, start);
                }
            }
            if !span.snapshots.is_empty() {
                self.happen(id, What::Checkpoint, start);
            }
        }
        for hit in &plan.hits {
            let Some(RequestId(id)) = request_of(hit.sequence) else { continue };
            if self.comes_in(id) {
                self.happen(id, What::Admit, start);
                self.happen(id, What::Restore, start);
            }
        }
    }

    /// Whether a request that is computed now was not on the device before.
    fn comes_in(&mut self, id: u64) -> bool {
        let is_new = self.admitted.insert(id);
        if is_new {
            self.new.push(id);
        }
        is_new
    }

    /// Takes an event of a step that ended at `now`.
    pub fn event(&mut self, id: u64, event: &Event, now: Duration) {
        if event.token.is_some() {
            self.line.tokens.push(id);
            if self.started.insert(id) {
                self.happen(id, What::First, now);
            }
        }
        if event.finish.is_some() {
            self.states.remove(&id);
            self.admitted.remove(&id);
            self.started.remove(&id);
            self.happen(id, What::Finish, now);
        }
    }

    /// Takes where the `answers` are after the step, those in the queue last.
    pub fn places(
        &mut self,
        answers: impl Iterator<Item = (RequestId, SequenceState)>,
        (start, now): (Duration, Duration),
    ) {
        let mut gone = std::mem::take(&mut self.states);
        for (RequestId(id), state) in answers {
            if state == SequenceState::Waiting {
                break;
            }
            // One that is not admitted yet waits for a checkpoint's copy.
            let before = gone.remove(&id).filter(|_| !self.new.contains(&id));
            if let Some(before) = before.filter(|_| self.admitted.contains(&id)) {
                for (what, at) in moved(before, state).into_iter().zip([start, now]) {
                    if let Some(what) = what {
                        self.happen(id, what, at);
                    }
                }
            }
            self.states.insert(id, state);
        }
        for id in gone.into_keys() {
            if self.admitted.remove(&id) {
                self.happen(id, What::Preempt, now);
            }
        }
        self.new.clear();
    }

    /// The step, which took from `start` to `now`, as it is told.
    pub fn take(
        &mut self,
        step: &StepRecord,
        (occupancy, device): (&Occupancy, &PoolStats),
        (start, now): (Duration, Duration),
    ) -> StepLine {
        StepLine {
            t: start.as_secs_f64(),
            seconds: (now - start).as_secs_f64(),
            decodes: step.decoding,
            prompt_tokens: step.prompt_tokens,
            running: occupancy.running,
            waiting: occupancy.waiting,
            parked: occupancy.parked,
            free_pages: device.free_pages,
            slot_pages: device.slots.pages,
            block_pages: device.blocks.pages,
            copies_out: step.copies_out,
            copies_in: step.copies_in,
            ..std::mem::take(&mut self.line)
        }
    }

    fn happen(&mut self, id: u64, what: What, at: Duration) {
        self.line.events.push(Happening { id, what, t: at.as_secs_f64() });
    }
}

/// What a change of place over a step was: at its start, and at its end.
fn moved(before: SequenceState, now: SequenceState) -> [Option<What>; 2] {
    use SequenceState::{Decode, Moving, Parked, Prefill};
    match (before, now) {
        (Prefill | Decode, Moving) => [Some(What::SwapOut), None],
        (Prefill | Decode, Parked) => [Some(What::SwapOut), Some(What::Parked)],
        (Moving, Parked) => [None, Some(What::Parked)],
        (Parked, Moving) => [Some(What::SwapIn), None],
        (Parked, Prefill | Decode) => [Some(What::SwapIn), Some(What::Resume)],
        (Moving, Prefill | Decode) => [None, Some(What::Resume)],
        _ => [None, None],
    }
}
