//! Traffic on its way: requests come in at their times, the engine's loop steps, and what it did is
//! taken down.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use state_pool::{BLOCK_LEN, PoolLayout, StatePool, Tier};

use super::{Report, Simulation, SimulationError};
use crate::engine::RequestId;
use crate::engine::builder::scheduler_limits;
use crate::engine::constraint::Grammars;
use crate::engine::core::Core;
use crate::engine::door::Door;
use crate::request::Request;
use crate::scheduler::limits::device_tokens;
use crate::scheduler::{Limits, Scheduler};
use crate::simulate::figures::{Pools, Reused};
use crate::simulate::ledger::Ledger;
use crate::simulate::modelled::{END_OF_ANSWER, ModelledExecutor};
use crate::simulate::traffic::Traffic;
use crate::simulate::watch::{StepLine, Watcher};

/// Traffic on its way.
pub(super) struct Running<'s> {
    simulation: &'s Simulation,
    traffic: &'s Traffic,
    core: Core<ModelledExecutor>,
    /// Requests that arrive at a known time, the next on top.
    due: BinaryHeap<Reverse<(Duration, usize)>>,
    /// Those that wait until another has ended, where a number is kept open.
    begins: VecDeque<usize>,
    /// Of the requests that follow none, those of which something is still to come.
    open: usize,
    /// Who follows each request.
    followers: Vec<Option<usize>>,
    pub ledger: Ledger,
    /// Follows the steps, if somebody asks.
    pub watcher: Option<Watcher>,
    max_tokens: usize,
    tokens: Vec<u32>,
}

impl<'s> Running<'s> {
    /// Before its first step.
    pub fn new(simulation: &'s Simulation, traffic: &'s Traffic) -> Result<Self, SimulationError> {
        simulation.config.check()?;
        let (device, host) = simulation.layouts()?;
        let device_tokens = device_tokens(&device);
        let model = &simulation.timing.model;
        if let (Some((tokens, index)), Some(context)) = (traffic.longest(), model.max_context)
            && tokens > context
        {
            let model = model.name.clone();
            return Err(SimulationError::Context { index, tokens, model, context });
        }
        if let Some((tokens, index)) = traffic.longest()
            && tokens > device_tokens
        {
            return Err(SimulationError::TooLong { index, tokens, device_tokens });
        }
        let (cost, grid) = (simulation.cost(&device), simulation.timing.model.grid);
        let config = &simulation.config;
        let limits = scheduler_limits(config, &device, device_tokens, grid, cost);
        let door = door(limits.clone(), device.clone());
        let pools = (StatePool::new(Tier::Device, device), StatePool::new(Tier::Host, host));
        let scheduler = Scheduler::new(limits, pools.0, pools.1);
        let executor = ModelledExecutor::new(simulation.timing.clone());
        let mut core = Core::new(Arc::new(door), scheduler, executor);
        if let Some(time) = config.slo_itl {
            core.hold_steps_to(time);
        }
        let ledger = Ledger::new(traffic, config.long_prompt);
        let mut run = Running {
            simulation,
            traffic,
            core,
            due: BinaryHeap::new(),
            begins: VecDeque::new(),
            open: 0,
            followers: vec![None; traffic.requests.len()],
            ledger,
            watcher: None,
            max_tokens: traffic.most_answer(),
            tokens: Vec::new(),
        };
        for (index, request) in traffic.requests.iter().enumerate() {
            match request.follows {
                Some(before) => run.followers[before] = Some(index),
                None if traffic.open.is_some() => run.begins.push_back(index),
                None => run.due.push(Reverse((request.at, index))),
            }
        }
        Ok(run)
    }

    /// The virtual time.
    pub fn now(&self) -> Duration {
        self.core.now()
    }

    /// Submits what has arrived, and waits for something when nothing is to do. False when all have
    /// ended.
    pub fn submit(&mut self) -> bool {
        while self.traffic.open.is_some_and(|most| self.open < most)
            && let Some(first) = self.begins.pop_front()
        {
            self.open += 1;
            self.due.push(Reverse((self.core.now(), first)));
        }
        loop {
            match self.due.peek().copied() {
                Some(Reverse((at, index))) if at <= self.core.now() => {
                    self.due.pop();
                    self.enter(index, at);
                }
                Some(Reverse((at, _))) if self.core.is_idle() => {
                    self.core.executor_mut().advance_to(at);
                }
                due => {
                    self.core.executor_mut().wake_at(due.map(|Reverse((at, _))| at));
                    return !self.core.is_idle();
                }
            }
        }
    }

    /// Submits a request, which came at `at`.
    fn enter(&mut self, index: usize, at: Duration) {
        let request = &self.traffic.requests[index];
        request.prompt.expand(&mut self.tokens);
        let seed = index as u64;
        self.core.executor_mut().expect(seed, request.answer.to_tokens());
        let longest = self.core.door().limits.max_model_len;
        let mut asked =
            Request::new(self.tokens.clone(), self.max_tokens.min(longest - self.tokens.len()));
        asked.sampling.seed = Some(seed);
        asked.program_id = request.program.map(|program| program.to_string());
        asked.tells_start = true;
        self.ledger.enter(index, at);
        if let Some(watcher) = &mut self.watcher {
            watcher.arrive(seed, at);
        }
        self.core.submit(RequestId(seed), Arc::new(asked), seed);
    }

    /// A request ended at `now`: who follows it comes after a thought.
    fn leave(&mut self, index: usize, now: Duration) {
        self.core.executor_mut().forget(index as u64);
        match self.followers[index] {
            Some(next) => self.due.push(Reverse((now + self.traffic.requests[next].at, next))),
            None => self.open = self.open.saturating_sub(1),
        }
    }

    /// One step; told if somebody follows.
    pub fn step(&mut self) -> Option<StepLine> {
        let start = self.core.now();
        let watcher = &mut self.watcher;
        let events = self.core.step_seen(|plan, request_of| {
            if let Some(watcher) = watcher {
                watcher.plan(plan, request_of, start);
            }
        });
        let now = self.core.now();
        let (step, occupancy) = (self.core.last_step(), self.core.scheduler().occupancy());
        let has_computed = self.core.executor_mut().last_cost().is_some();
        self.ledger.note_step(&step, &occupancy, now - start, has_computed);
        for (id, event) in events {
            if let Some(watcher) = &mut self.watcher {
                watcher.event(id.0, &event, now);
            }
            if self.ledger.note_event(id.0 as usize, &event, (start, now)) {
                self.leave(id.0 as usize, now);
            }
        }
        let watcher = self.watcher.as_mut()?;
        watcher.places(self.core.answers(), (start, now));
        let device = self.core.scheduler().device().stats();
        Some(watcher.take(&step, (&occupancy, &device), (start, now)))
    }

    /// Whether the last step took no time and computed nothing.
    pub fn stood_still(&self) -> bool {
        let step = self.core.last_step();
        step.duration.is_zero() && step.prompt_tokens + step.generated_tokens == 0
    }

    /// What became of it all.
    pub fn report(mut self) -> Report {
        self.core.clear_prefix_cache();
        let (stats, totals) = (self.core.stats(), self.core.executor_mut().totals());
        let Simulation { timing, config, .. } = self.simulation;
        let seconds = self.ledger.end().as_secs_f64();
        let device = self.core.scheduler().device().layout();
        let slots = config.max_num_seqs() * device.slot_bytes;
        let left = self.simulation.device_bytes.saturating_sub(slots);
        let scheduler = stats.scheduler;
        let pools = Pools {
            device_pages: device.pages,
            most_device_pages: stats.most_pages,
            most_stranded_pages: stats.most_stranded_pages,
            device_tokens: left / device.block_bytes.max(1) * BLOCK_LEN,
            host_pages: stats.host.pages,
            blocked_for_blocks: scheduler.blocked_for_blocks,
            blocked_for_slots: scheduler.blocked_for_slots,
            blocked_for_places: scheduler.blocked_for_places,
        };
        let reuse = Reused {
            prompt_tokens: scheduler.admitted_tokens,
            matched_tokens: scheduler.matched_tokens,
            cached_tokens: scheduler.cached_tokens,
            replayed_tokens: scheduler.matched_tokens - scheduler.cached_tokens,
            states_kept: stats.tree.inserted,
            states_left_out: stats.tree.left_out,
            states_evicted: stats.tree.device.evicted,
            full_hits: scheduler.full_hits,
            copied_blocks: scheduler.copied_blocks,
            kept_bytes: scheduler.demoted_bytes,
            restored_bytes: scheduler.promoted_bytes,
        };
        let mut preempted = self.ledger.preempted(&scheduler);
        [preempted.link_out_busy, preempted.link_in_busy] =
            totals.link_seconds.map(|busy| busy / seconds.max(f64::MIN_POSITIVE));
        let targets = (self.simulation.slo_ttft, self.simulation.slo_tpot);
        let occupancy = self.ledger.occupancy(stats.most_running, config.max_num_seqs());
        let latency = self.ledger.latencies();
        let (latency_short, latency_long) = self.ledger.latencies_by_length().unzip();
        Report {
            header: self.simulation.header(self.traffic),
            seconds,
            throughput: self.ledger.throughput(timing.hardware.price_per_hour),
            goodput: self.ledger.goodput(targets),
            steps: self.ledger.steps(&totals, &timing.hardware),
            occupancy,
            pools,
            preempted,
            reuse,
            fairness: self.ledger.fairness(self.traffic),
            stalls: self.ledger.stalls(latency.itl.p50),
            latency,
            latency_short,
            latency_long,
        }
    }
}

/// A door for requests of token ids alone.
fn door(limits: Limits, device: PoolLayout) -> Door {
    let stop_tokens = vec![END_OF_ANSWER];
    Door {
        limits,
        device,
        vocab_size: END_OF_ANSWER as usize + 1,
        tokenizer: None,
        grammars: Grammars::new(None, &stop_tokens),
        stop_tokens,
    }
}
