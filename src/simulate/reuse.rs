//! A workload through the real scheduler with fake bytes: what is computed, what is not.
//!
//! ```text
//! submit -> [ plan -> answer at once -> commit ] until the answer is complete -> end
//! ```
//!
//! Every draw gets the next token of the workload's answer and every transfer is done when it was
//! planned. What a request did not have to compute is read off the plans: its first span begins
//! behind it.

use std::time::{Duration, Instant};

use serde::Serialize;
use state_pool::{PoolLayout, StatePool};

use super::cache::{self, CacheFigures};
use super::setup::{ReplayError, Setup};
use super::workload::{Outline, Workload};
use crate::scheduler::{
    Direction, SampledToken, Scheduler, SchedulerStats, SequenceId, StepPlan, StepReport,
};

/// Steps in a row that may do nothing.
const MOST_IDLE_STEPS: usize = 100;

/// What some of the requests did not have to compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Share {
    /// Requests.
    pub requests: usize,
    /// Tokens of their prompts.
    pub prompt_tokens: usize,
    /// Of these, what was not computed.
    pub cached_tokens: usize,
    /// Of these, what an endless memory of perfect states would save.
    pub ideal_tokens: usize,
    /// Requests with cached tokens.
    pub hits: usize,
}

impl Share {
    fn add(&mut self, request: &Outline, cached_tokens: usize) {
        self.requests += 1;
        self.prompt_tokens += request.prompt.len();
        self.cached_tokens += cached_tokens;
        self.ideal_tokens += request.ideal_tokens;
        self.hits += usize::from(cached_tokens > 0);
    }

    /// Percent of the prompt tokens that were cached.
    pub fn cached_percent(&self) -> f64 {
        percent(self.cached_tokens, self.prompt_tokens)
    }

    /// Percent of the prompt tokens that could be.
    pub fn ideal_percent(&self) -> f64 {
        percent(self.ideal_tokens, self.prompt_tokens)
    }

    /// Cached tokens in percent of those that could be.
    pub fn of_ideal_percent(&self) -> f64 {
        percent(self.cached_tokens, self.ideal_tokens)
    }
}

/// 0 of nothing.
fn percent(part: usize, whole: usize) -> f64 {
    100.0 * part as f64 / whole.max(1) as f64
}

/// A tier and what it held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct TierFigures {
    /// Pages.
    pub pages: usize,
    /// Bytes of a page.
    pub page_bytes: usize,
    /// Slots that a page holds.
    pub slots_per_page: usize,
    /// Blocks that a page holds.
    pub blocks_per_page: usize,
    /// Most pages that held something when an answer was complete.
    pub most_pages: usize,
    /// Most slots held then, besides those of open requests.
    pub most_states: usize,
}

impl TierFigures {
    fn new(layout: &PoolLayout) -> TierFigures {
        TierFigures {
            pages: layout.pages,
            page_bytes: layout.page_bytes,
            slots_per_page: layout.slots_per_page,
            blocks_per_page: layout.blocks_per_page,
            most_pages: 0,
            most_states: 0,
        }
    }

    fn look(&mut self, pool: &StatePool, sequences: usize) {
        let stats = pool.stats();
        self.most_pages = self.most_pages.max(stats.pages - stats.free_pages);
        self.most_states = self.most_states.max(stats.slots.held.saturating_sub(sequences));
    }
}

/// What became of a workload.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Outcome {
    /// All requests.
    pub all: Share,
    /// The first half of them.
    pub first_half: Share,
    /// The rest.
    pub second_half: Share,
    /// The device.
    pub device: TierFigures,
    /// The host.
    pub host: TierFigures,
    /// What the cache did.
    pub cache: CacheFigures,
    /// The scheduler's counts.
    pub scheduler: SchedulerStats,
    /// Transfers from the device to the host.
    pub transfers_out: u64,
    /// Transfers from the host to the device.
    pub transfers_in: u64,
    /// Time of the whole replay.
    pub time: Duration,
}

/// Replays a workload; tells `progress` of each request that has ended.
///
/// # Errors
/// Memory that does not suit the model, the first request that is longer than it holds, or a fault
/// of the scheduler that keeps an answer from its end.
pub fn replay(
    workload: &Workload,
    setup: &Setup,
    progress: &mut dyn FnMut(&Share),
) -> Result<Outcome, ReplayError> {
    let start = Instant::now();
    let scheduler = setup.scheduler(workload)?;
    let concurrency = setup.concurrency.unwrap_or(if workload.is_burst { usize::MAX } else { 1 });
    let mut replay = Replay::new(workload, scheduler);
    let mut idle_steps = 0;
    loop {
        replay.submit(concurrency);
        if replay.open.is_empty() {
            break;
        }
        idle_steps = if replay.step(progress) { 0 } else { idle_steps + 1 };
        if idle_steps == MOST_IDLE_STEPS {
            let (open, first) = (replay.open.len(), replay.open[0].request);
            return Err(ReplayError::Stuck { open, place: workload.requests[first].place.clone() });
        }
    }
    let mut outcome = replay.outcome;
    outcome.cache.read(&replay.scheduler);
    outcome.scheduler = replay.scheduler.stats();
    outcome.time = start.elapsed();
    Ok(outcome)
}

/// A workload that is being replayed.
struct Replay<'w> {
    scheduler: Scheduler,
    workload: &'w Workload,
    /// Index of the request to submit next.
    next: usize,
    /// Requests that have no complete answer yet, in the order of their names.
    open: Vec<Open>,
    /// Memory of the prompt that is submitted and of the report.
    prompt: Vec<u32>,
    report: StepReport,
    outcome: Outcome,
}

/// A request that has no complete answer yet.
#[derive(Debug)]
struct Open {
    id: SequenceId,
    /// Its index in the workload.
    request: usize,
    /// Where its first span begins: what comes before is not computed.
    first_computed: Option<usize>,
    answer: Vec<u32>,
    /// Tokens of the answer that it has.
    drawn: usize,
}

impl<'w> Replay<'w> {
    fn new(workload: &'w Workload, scheduler: Scheduler) -> Replay<'w> {
        let outcome = Outcome {
            all: Share::default(),
            first_half: Share::default(),
            second_half: Share::default(),
            device: TierFigures::new(scheduler.device().layout()),
            host: TierFigures::new(scheduler.host().layout()),
            cache: CacheFigures::default(),
            scheduler: SchedulerStats::default(),
            transfers_out: 0,
            transfers_in: 0,
            time: Duration::ZERO,
        };
        let (open, prompt, report) = (Vec::new(), Vec::new(), StepReport::default());
        Replay { scheduler, workload, next: 0, open, prompt, report, outcome }
    }

    /// Submits requests until so many are open.
    fn submit(&mut self, concurrency: usize) {
        while self.open.len() < concurrency && self.next < self.workload.requests.len() {
            let request = &self.workload.requests[self.next];
            request.prompt.expand(&mut self.prompt);
            let id = cache::submit(&mut self.scheduler, &self.prompt, request.answer.len());
            let id = id.expect("the device holds each request");
            let answer = request.answer.to_tokens();
            let request = self.next;
            self.open.push(Open { id, request, first_computed: None, answer, drawn: 0 });
            self.next += 1;
        }
    }

    /// A step; whether it did anything.
    fn step(&mut self, progress: &mut dyn FnMut(&Share)) -> bool {
        let plan = self.scheduler.plan(Duration::ZERO);
        let has_work = !plan.is_empty() || !plan.draws.is_empty();
        self.answer(&plan);
        self.scheduler.commit(plan, &self.report);
        for i in 0..self.report.sampled.len() {
            let index = self.find(self.report.sampled[i].sequence);
            if self.open[index].drawn == self.open[index].answer.len() {
                self.close(index);
                progress(&self.outcome.all);
            }
        }
        has_work
    }

    /// A token for each draw, each transfer done.
    fn answer(&mut self, plan: &StepPlan) {
        self.report.sampled.clear();
        self.report.finished.clear();
        for span in &plan.spans {
            let index = self.find(span.sequence);
            self.open[index].first_computed.get_or_insert(span.start);
        }
        for id in &plan.draws {
            let index = self.find(*id);
            let open = &mut self.open[index];
            let token = open.answer[open.drawn];
            open.drawn += 1;
            let sample = SampledToken { sequence: *id, drawn: Ok(token), logprobs: None };
            self.report.sampled.push(sample);
        }
        for transfer in &plan.transfers {
            match transfer.direction {
                Direction::Out => self.outcome.transfers_out += 1,
                Direction::In => self.outcome.transfers_in += 1,
            }
            self.report.finished.push(transfer.id);
        }
    }

    /// Index of an open request.
    fn find(&self, id: SequenceId) -> usize {
        let found = self.open.binary_search_by_key(&id, |open| open.id);
        found.expect("only open requests are planned")
    }

    /// Counts a request that has its answer, and ends it.
    fn close(&mut self, index: usize) {
        let Open { id, request: number, first_computed, .. } = self.open.remove(index);
        self.look();
        self.outcome.cache.finish(&mut self.scheduler, id);
        let request = &self.workload.requests[number];
        let prompt_tokens = request.prompt.len();
        // Without a span the first token came from a state at the prompt's end.
        let cached_tokens = first_computed.map_or(prompt_tokens, |start| start.min(prompt_tokens));
        let outcome = &mut self.outcome;
        outcome.all.add(request, cached_tokens);
        if number < self.workload.requests.len() / 2 {
            outcome.first_half.add(request, cached_tokens);
        } else {
            outcome.second_half.add(request, cached_tokens);
        }
    }

    /// Looks at what is held now.
    fn look(&mut self) {
        let now = self.scheduler.occupancy();
        self.outcome.device.look(self.scheduler.device(), now.running + now.in_flight);
        self.outcome.host.look(self.scheduler.host(), now.parked + now.in_flight);
    }
}
