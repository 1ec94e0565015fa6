//! The loop: what runs is stepped, tokens become events.
//!
//! ```text
//! submit -> [ plan -> lower -> forward -> sample -> commit ] -> events
//! ```
//!
//! A request's life is here: its parameters, its text so far, why it ends. Where its memory is,
//! only the scheduler knows.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use checkpoints::TreeStats;
use state_pool::PoolStats;

use super::constraint::{Matcher, beside};
use super::door::Door;
use super::executor::{Executor, PlannedDraw};
use super::lower::{lower, lower_transfers};
use super::mask::PendingMask;
use super::record::{Record, take_scores};
use super::sampler::Draw;
use super::slo::{StepControl, StepLoad};
use super::steps::{StepRecord, StepTotals};
use super::text::AnswerText;
use super::view::{EngineView, SequenceState};
use crate::request::{Event, Figures, Finish, FinishReason, Request, StopCause};
use crate::scheduler::{
    End, MissReason, Occupancy, Prompt, SampledToken, Scheduler, SchedulerStats, SequenceId,
    StepPlan, StepReport,
};

/// A request's name within an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// What an engine has done and holds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EngineStats {
    /// Counts of the scheduler since the start.
    pub scheduler: SchedulerStats,
    /// Sequences by where they are now.
    pub occupancy: Occupancy,
    /// The device pool now.
    pub device: PoolStats,
    /// The host pool now.
    pub host: PoolStats,
    /// The prefix tree: what it holds now, and what has happened to it. All zero without one.
    pub tree: TreeStats,
    /// Answers that ended, for whatever reason.
    pub finished: u64,
    /// Sequences on the device, summed over all steps: divided by the steps, the mean occupancy.
    pub running_sum: u64,
    /// Most sequences that were on the device in one step.
    pub most_running: usize,
    /// Most pages of the device that held something in one step.
    pub most_pages: usize,
    /// Most pages of the device that packing would have freed in one step.
    pub most_stranded_pages: usize,
    /// How long the steps took, and how many tokens they computed.
    pub steps: StepTotals,
}

impl EngineStats {
    /// Pages of both tiers that hold something now.
    pub fn pages_held(&self) -> usize {
        let held = |pool: &PoolStats| pool.pages - pool.free_pages;
        held(&self.device) + held(&self.host)
    }
}

/// Runs requests over an executor, one step at a time.
pub struct Core<E> {
    door: Arc<Door>,
    scheduler: Scheduler,
    executor: E,
    records: HashMap<SequenceId, Record>,
    requests: HashMap<RequestId, Vec<SequenceId>>,
    events: Vec<(RequestId, Event)>,
    stats: EngineStats,
    last_step: StepRecord,
    /// Holds steps to a time, if they are to be.
    control: Option<StepControl>,
}

impl<E: Executor> Core<E> {
    /// A loop over `scheduler` and `executor`, whose limits are those of `door`.
    pub fn new(door: Arc<Door>, scheduler: Scheduler, executor: E) -> Core<E> {
        let (device, host) = scheduler.pools();
        let stats = EngineStats {
            scheduler: SchedulerStats::default(),
            occupancy: Occupancy::default(),
            device,
            host,
            tree: TreeStats::default(),
            finished: 0,
            running_sum: 0,
            most_running: 0,
            most_pages: 0,
            most_stranded_pages: 0,
            steps: StepTotals::default(),
        };
        Core {
            door,
            scheduler,
            executor,
            records: HashMap::new(),
            requests: HashMap::new(),
            events: Vec::new(),
            stats,
            last_step: StepRecord::default(),
            control: None,
        }
    }

    /// Holds steps to `time`, as far as can be told from those before.
    pub fn hold_steps_to(&mut self, time: Duration) {
        self.control = Some(StepControl::new(time));
    }

    /// Takes a request that the door let through, under a name that no other has; `seed` is used
    /// where it has none. Returns what it adds to the prompt tokens that wait.
    ///
    /// # Panics
    /// When the door would not have let it through, or the name is taken.
    pub fn submit(&mut self, id: RequestId, request: Arc<Request>, seed: u64) -> usize {
        let now = self.executor.now();
        let prompt = Prompt {
            tokens: &request.prompt,
            max_tokens: request.max_tokens,
            choices: request.n,
            priority: request.priority,
            submitted: now,
            program_id: request.program_id.as_deref(),
            cache_salt: request.cache_salt.as_deref(),
            checkpoint_at: &request.checkpoint_at,
            scored_with: request.prompt_logprobs,
        };
        let ids = self.scheduler.submit(&prompt).expect("the door has the scheduler's limits");
        let backlog = self.scheduler.sequence(ids[0]).map_or(0, |leader| leader.backlog());
        for (choice, sequence) in ids.iter().enumerate() {
            let matcher = request.constraint.as_ref().map(|constraint| {
                let matcher = self.door.grammars.matcher(constraint);
                matcher.unwrap_or_else(|error| Matcher::broken(&error))
            });
            let record = Record {
                matcher,
                request: Arc::clone(&request),
                id,
                choice,
                seed: request.sampling.seed.unwrap_or(seed),
                text: AnswerText::new(self.door.tokenizer.as_deref(), &request),
                submitted: now,
                last_token: now,
                figures: Figures { prompt_tokens: request.prompt.len(), ..Figures::default() },
                prompt_logprobs: Ok(Vec::new()),
            };
            self.records.insert(*sequence, record);
        }
        let before = self.requests.insert(id, ids);
        assert!(before.is_none(), "{id:?} is the name of another request");
        backlog
    }

    /// Ends a request: each of its unfinished answers ends as cancelled, in the events of the next
    /// [`Core::step`]. An unknown name is nothing.
    pub fn cancel(&mut self, id: RequestId) {
        self.end(id, &FinishReason::Cancelled);
    }

    /// Ends all requests, as [`Core::cancel`] does one.
    pub fn cancel_all(&mut self) {
        self.end_all(&FinishReason::Cancelled);
    }

    fn end(&mut self, id: RequestId, reason: &FinishReason) {
        for sequence in self.requests.remove(&id).unwrap_or_default() {
            if let Some(record) = self.records.remove(&sequence) {
                let last = record.event();
                self.finish(sequence, record, reason.clone(), last);
            }
        }
    }

    fn end_all(&mut self, reason: &FinishReason) {
        let mut ids: Vec<RequestId> = self.requests.keys().copied().collect();
        ids.sort_unstable();
        ids.into_iter().for_each(|id| self.end(id, reason));
    }

    /// Parks those answers of a request that run; see [`Scheduler::park`].
    pub fn park(&mut self, id: RequestId) {
        for sequence in self.requests.get(&id).into_iter().flatten() {
            self.scheduler.park(*sequence);
        }
    }

    /// Has those answers of a request that run computed again; see [`Scheduler::recompute`].
    pub fn recompute(&mut self, id: RequestId) {
        for sequence in self.requests.get(&id).into_iter().flatten() {
            self.scheduler.recompute(*sequence);
        }
    }

    /// Gives all that is kept for later requests back.
    pub fn clear_prefix_cache(&mut self) {
        self.scheduler.clear_prefix_cache();
    }

    /// Why the executor is of no use any more, once that is so: every request fails then.
    pub fn fault(&self) -> Option<&str> {
        self.executor.fault()
    }

    /// Whether nothing is left to do or to tell.
    pub fn is_idle(&self) -> bool {
        self.scheduler.is_idle() && self.events.is_empty()
    }

    /// What requests are held against.
    pub fn door(&self) -> &Arc<Door> {
        &self.door
    }

    /// The scheduler.
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// Time on the executor's clock.
    pub fn now(&self) -> Duration {
        self.executor.now()
    }

    /// The executor.
    pub fn executor_mut(&mut self) -> &mut E {
        &mut self.executor
    }

    /// What was done so far and is held now.
    pub fn stats(&self) -> EngineStats {
        let (device, host) = self.scheduler.pools();
        let (scheduler, occupancy) = (self.scheduler.stats(), self.scheduler.occupancy());
        let tree = self.scheduler.tree_stats().unwrap_or_default();
        EngineStats { scheduler, occupancy, device, host, tree, ..self.stats }
    }

    /// The last step; number 0 before the first.
    pub fn last_step(&self) -> StepRecord {
        self.last_step
    }

    /// Fills in who is where now, and who holds what.
    pub fn view(&self, view: &mut EngineView) {
        let now = self.executor.now();
        view.take(&self.scheduler, |id| {
            let record = self.records.get(&id)?;
            Some(((record.id, record.choice), now.saturating_sub(record.submitted)))
        });
    }

    /// The answers that are under way: those on the device first, those in the queue last.
    pub fn answers(&self) -> impl Iterator<Item = (RequestId, SequenceState)> {
        let answers = self.scheduler.by_place();
        answers.filter_map(|sequence| {
            let record = self.records.get(&sequence.id())?;
            Some((record.id, SequenceState::of(sequence)))
        })
    }

    /// One step; returns what happened in it and since the last.
    pub fn step(&mut self) -> Vec<(RequestId, Event)> {
        self.step_seen(|_, _| {})
    }

    /// As [`Core::step`]; `see` is shown the plan before it runs, and tells whose answer a sequence
    /// is by its second argument.
    pub fn step_seen(
        &mut self,
        see: impl FnOnce(&StepPlan, &dyn Fn(SequenceId) -> Option<RequestId>),
    ) -> Vec<(RequestId, Event)> {
        if !self.scheduler.is_idle() {
            let start = self.executor.now();
            let plan = self.scheduler.plan(start);
            see(&plan, &|sequence| self.records.get(&sequence).map(|record| record.id));
            let number = self.last_step.number + 1;
            let mut record = StepRecord::of(number, &plan, self.scheduler.blocked());
            let load = self.control.as_ref().map(|_| StepLoad::of(&plan));
            let mut report = self.run(&plan);
            take_scores(&mut report, &plan, &self.scheduler, &mut self.records);
            self.note_occupancy();
            self.scheduler.commit(plan, &report);
            let now = self.executor.now();
            match self.executor.fault().map(str::to_owned) {
                None => report.sampled.into_iter().for_each(|sample| self.take_token(sample, now)),
                Some(fault) => self.end_all(&FinishReason::Failed(fault)),
            }
            record.duration = self.executor.now().saturating_sub(start);
            if let (Some(control), Some(load)) = (&mut self.control, load) {
                self.scheduler.set_caps(control.note(load, record.duration));
            }
            self.stats.steps.note(&record);
            self.last_step = record;
        }
        std::mem::take(&mut self.events)
    }

    /// Lowers and runs a plan.
    fn run(&mut self, plan: &StepPlan) -> StepReport {
        let hits = plan.hits.iter().map(|hit| hit.sequence);
        for sequence in plan.spans.iter().map(|span| span.sequence).chain(hits) {
            self.note_start(sequence);
        }
        let device = self.scheduler.device().layout();
        let jobs = lower_transfers(plan, device, self.scheduler.host().layout());
        let scheduler = &self.scheduler;
        let find = |id| scheduler.sequence(id).expect("a planned sequence is known");
        let batch = lower(plan, find, device);
        let (owners, mut matchers) = take_matchers(plan, &mut self.records);
        let masks: Vec<PendingMask> = matchers.iter().map(|_| PendingMask::default()).collect();
        let mut waiting = owners.iter().zip(&masks).peekable();
        let mut draws = Vec::with_capacity(plan.draws.len());
        for (row, (sequence, who)) in plan.drawing().enumerate() {
            let sequence = find(sequence);
            for id in who {
                let record = &self.records[id];
                let draw = Draw {
                    choice: record.choice,
                    ruled_out: record.ruled_out(&self.door.stop_tokens),
                    ..Draw::new(
                        &record.request.sampling,
                        record.seed,
                        sequence.tokens(),
                        sequence.prompt_len(),
                    )
                };
                let mask = waiting.next_if(|(owner, _)| *owner == id).map(|(_, mask)| mask);
                draws.push(PlannedDraw { sequence: *id, row, draw, mask });
            }
        }
        let report = beside(&mut matchers, &masks, || self.executor.step(&batch, jobs, &draws));
        for (id, matcher) in owners.iter().zip(matchers) {
            let record = self.records.get_mut(id).expect("who draws has a record");
            record.matcher = Some(matcher);
        }
        report
    }

    /// The first span of a request is the start of all its answers: they have the prompt in common.
    fn note_start(&mut self, id: SequenceId) {
        // A shadow is nobody's answer.
        let Some(record) = self.records.get(&id) else { return };
        if record.figures.queue.is_some() {
            return;
        }
        let queue = self.executor.now().saturating_sub(record.submitted);
        for choice in &self.requests[&record.id] {
            let record = self.records.get_mut(choice).expect("an open answer has a record");
            record.figures.queue.get_or_insert(queue);
            if record.request.tells_start {
                self.events.push((record.id, record.event()));
            }
        }
    }

    fn note_occupancy(&mut self) {
        let running = self.scheduler.occupancy().running;
        let device = self.scheduler.device().stats();
        let stranded = device.blocks.stranded_pages + device.slots.stranded_pages;
        let stats = &mut self.stats;
        stats.running_sum += running as u64;
        stats.most_running = stats.most_running.max(running);
        stats.most_pages = stats.most_pages.max(device.pages - device.free_pages);
        stats.most_stranded_pages = stats.most_stranded_pages.max(stranded);
    }

    /// Takes a drawn token in: text, stop conditions, and whether the answer ends.
    fn take_token(&mut self, sample: SampledToken, now: Duration) {
        let id = sample.sequence;
        let record = self.records.get_mut(&id).expect("who draws has a record");
        let (request, mut event) = (record.id, record.event());
        let reason = match (record.scores(), sample.drawn) {
            (Err(reason), _) => Some(FinishReason::Failed(reason)),
            (Ok(scores), Ok(_)) if record.request.max_tokens == 0 => {
                event.prompt_logprobs = scores;
                Some(FinishReason::Length)
            }
            (Ok(scores), Ok(token)) => {
                event.prompt_logprobs = scores;
                let (text, reason) = record.advance(token, &self.door.stop_tokens, now);
                (event.token, event.text, event.logprobs) = (Some(token), text, sample.logprobs);
                reason
            }
            (Ok(_), Err(reason)) => {
                let position = record.figures.prompt_tokens + record.figures.generated_tokens;
                Some(FinishReason::Failed(format!("token {position}: {reason}")))
            }
        };
        let Some(reason) = reason else {
            self.events.push((request, event));
            return;
        };
        let record = self.records.remove(&id).expect("it was just there");
        let sequences = self.requests.get_mut(&request).expect("its request is known");
        sequences.retain(|sequence| *sequence != id);
        if sequences.is_empty() {
            self.requests.remove(&request);
        }
        self.finish(id, record, reason, event);
    }

    /// Ends an answer: its `last` event, of a new token or of none, says why.
    fn finish(
        &mut self,
        id: SequenceId,
        mut record: Record,
        reason: FinishReason,
        mut last: Event,
    ) {
        let sequence = self.scheduler.sequence(id);
        let counters = sequence.map(|s| s.counters()).unwrap_or_default();
        let reuse = sequence.map(|s| s.reuse()).unwrap_or_default();
        let figures = Figures {
            preemptions: counters.preemptions,
            swapped_bytes: counters.swapped_bytes,
            recomputed_tokens: counters.recomputed_tokens,
            matched_tokens: reuse.matched_tokens,
            cached_tokens: reuse.cached_tokens,
            replayed_tokens: reuse.replayed_tokens,
            cache_write_tokens: reuse.kept_tokens.saturating_sub(reuse.cached_tokens),
            miss_reason: reuse.miss_reason.map(MissReason::as_str),
            ..record.figures
        };
        self.scheduler.end(
            id,
            match &reason {
                FinishReason::Failed(_) => End::Failed,
                FinishReason::Cancelled => End::Cancelled,
                FinishReason::Stop(StopCause::Text(_)) if record.text.is_cut() => End::Cut,
                FinishReason::Stop(_) | FinishReason::Length => End::Finished,
            },
        );
        self.stats.finished += 1;
        last.text.push_str(&record.text.finish());
        last.finish = Some(Finish { reason, figures });
        self.events.push((record.id, last));
    }
}

/// The matchers of those who draw in a step, in the order of their draws, and whose they are.
fn take_matchers(
    plan: &StepPlan,
    records: &mut HashMap<SequenceId, Record>,
) -> (Vec<SequenceId>, Vec<Matcher>) {
    let who = plan.drawing().flat_map(|(_, who)| who);
    let taken = who.filter_map(|id| Some((*id, records.get_mut(id)?.matcher.take()?)));
    taken.unzip()
}
