//! Traffic through the real engine loop on a virtual clock: what this scheduler would do on other
//! hardware.
//!
//! ```text
//! arrivals -> Core [ plan -> lower -> ModelledExecutor (time passes) -> commit ] -> events
//!                                                                             -> Report
//! ```

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use state_pool::{BLOCK_LEN, LayoutError, PoolLayout, StatePool, Tier, TierSizes};

use super::figures::{
    Fairness, Goodput, Latencies, Occupied, Pools, Preempted, Reused, Stalls, Steps, Throughput,
};
use super::ledger::Ledger;
use super::modelled::{END_OF_ANSWER, ModelledExecutor, Timing};
use super::traffic::Traffic;
use super::watch::{StepLine, Watcher};
use crate::config::{EngineConfig, InvalidLimit};
use crate::engine::RequestId;
use crate::engine::builder::scheduler_limits;
use crate::engine::constraint::Grammars;
use crate::engine::core::Core;
use crate::engine::door::Door;
use crate::request::Request;
use crate::scheduler::limits::device_tokens;
use crate::scheduler::{Cost, Limits, Scheduler};

/// Steps in a row in which nothing happens and no time passes.
const MOST_IDLE_STEPS: usize = 100;

/// Slots of no bytes, where nothing else bounds them.
const MOST_SEQUENCES: usize = 1 << 20;

/// What sets the memory of either tier.
const DEVICE: &str = "--device-memory or --device-tokens";
const HOST: &str = "--host-memory, or host_memory_bytes of --hardware";

/// Traffic, and on what it runs.
#[derive(Debug, Clone, PartialEq)]
pub struct Simulation {
    /// How steps and copies are timed.
    pub timing: Timing,
    /// Rules of the scheduler; its memories are those below.
    pub config: EngineConfig,
    /// Bytes of slots and blocks on the device.
    pub device_bytes: usize,
    /// On the host; 0 for none.
    pub host_bytes: usize,
    /// Seconds to the first token that a request should keep to.
    pub slo_ttft: Option<f64>,
    /// Seconds of a token after it.
    pub slo_tpot: Option<f64>,
}

/// Why traffic cannot be simulated.
#[derive(Debug, thiserror::Error)]
pub enum SimulationError {
    /// A limit that cannot work.
    #[error(transparent)]
    Limit(#[from] InvalidLimit),
    /// A tier's memory does not suit the model.
    #[error("{flag}: {source}")]
    Layout {
        /// The flag that sets it.
        flag: &'static str,
        /// Why.
        source: LayoutError,
    },
    /// A request is longer than the device holds.
    #[error(
        "request {index}: {tokens} tokens, prompt and answer together, do not fit: \
         the device's memory ({DEVICE}) holds one sequence of {device_tokens} tokens"
    )]
    TooLong {
        /// Its place in the order of arrival, from 0.
        index: usize,
        /// Prompt and answer together.
        tokens: usize,
        /// What the device holds for one sequence.
        device_tokens: usize,
    },
    /// A request is longer than the model's context.
    #[error(
        "request {index}: {tokens} tokens, prompt and answer together, are more than the context \
         of {model}: {context}"
    )]
    Context {
        /// Its place in the order of arrival, from 0.
        index: usize,
        /// Prompt and answer together.
        tokens: usize,
        /// The model.
        model: String,
        /// Its context in tokens.
        context: usize,
    },
    /// A fault of this program.
    #[error("the scheduler stands still with {open} requests open at {seconds} s")]
    Stuck {
        /// Requests without a complete answer.
        open: usize,
        /// When.
        seconds: f64,
    },
}

/// What was simulated: enough to do it again.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Header {
    /// Version of this program.
    pub version: &'static str,
    /// The traffic.
    pub traffic: String,
    /// Its requests.
    pub requests: usize,
    /// Name of the hardware.
    pub hardware: String,
    /// Name of the model.
    pub model: String,
    /// How reads and arithmetic share a step.
    pub step_model: String,
    /// Order of service.
    pub scheduling_policy: &'static str,
    /// When sequences join.
    pub batching: &'static str,
    /// How a sequence is pushed out.
    pub preempt: &'static str,
    /// Tokens of a step.
    pub max_num_batched_tokens: usize,
    /// Sequences on the device.
    pub max_num_seqs: usize,
    /// Positions at which prompt spans end.
    pub grid: usize,
    /// Bytes of slots and blocks on the device.
    pub device_bytes: usize,
    /// On the host.
    pub host_bytes: usize,
    /// Percent of the device's pages that admission leaves free.
    pub watermark_percent: f64,
    /// Bytes a second to the host, and from it.
    pub link: [f64; 2],
    /// Seconds that each step costs whatever is in it.
    pub step_overhead: f64,
    /// Whether copies run beside steps.
    pub overlap_copies: bool,
    /// Whether answers that have ended are read on.
    pub dead_slots_pay: bool,
    /// Numbers of sequences that steps are filled up to.
    pub buckets: Vec<usize>,
    /// Whether a row that only fills up reads the mean context.
    pub padding_reads: bool,
    /// Seconds that steps are held to.
    pub slo_itl: Option<f64>,
    /// Seconds of prefill that a prompt is forgiven for each second it waits, under sjf.
    pub sjf_ageing: f64,
    /// Places kept for long prompts.
    pub reserve_long: usize,
    /// From how many tokens on a prompt is long.
    pub long_prompt: usize,
    /// Tokens that the first prompt of a step may take.
    pub prefill_floor: usize,
    /// Whether prompts find what was computed before.
    pub prefix_cache: bool,
    /// Whether they go on from states of cold runs alone.
    pub exact_prefix: bool,
    /// Tokens between the states that are kept.
    pub checkpoint_every: Option<usize>,
}

/// What became of the traffic.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// What was simulated.
    pub header: Header,
    /// Virtual seconds until the last token.
    pub seconds: f64,
    /// Rates over them.
    pub throughput: Throughput,
    /// Of all requests.
    pub latency: Latencies,
    /// Of those with a short prompt, where some are long.
    pub latency_short: Option<Latencies>,
    /// Of those with a long one, where some are short.
    pub latency_long: Option<Latencies>,
    /// Long gaps.
    pub stalls: Stalls,
    /// Requests that kept to the targets, if there are any.
    pub goodput: Option<Goodput>,
    /// The steps.
    pub steps: Steps,
    /// How full they were.
    pub occupancy: Occupied,
    /// The pools.
    pub pools: Pools,
    /// What was pushed out.
    pub preempted: Preempted,
    /// What was there already.
    pub reuse: Reused,
    /// Who was served, where there are programs.
    pub fairness: Option<Fairness>,
}

impl Simulation {
    /// Runs the traffic to its end; tells `progress` how many requests have ended, and `observe`
    /// each step, if somebody does. Two runs of the same give the same report.
    ///
    /// # Errors
    /// Limits that cannot work, memory that does not suit the model, a request that it does not
    /// hold, or a fault of the scheduler that keeps an answer from its end.
    pub fn run(
        &self,
        traffic: &Traffic,
        progress: &mut dyn FnMut(usize),
        mut observe: Option<&mut dyn FnMut(&StepLine)>,
    ) -> Result<Report, SimulationError> {
        let mut run = Running::new(self, traffic)?;
        run.watcher = observe.is_some().then(Watcher::default);
        let mut idle_steps = 0;
        while run.submit() {
            let line = run.step();
            idle_steps = if run.stood_still() { idle_steps + 1 } else { 0 };
            if idle_steps == MOST_IDLE_STEPS {
                let seconds = run.core.now().as_secs_f64();
                return Err(SimulationError::Stuck { open: run.ledger.open(), seconds });
            }
            if let (Some(observe), Some(line)) = (&mut observe, line) {
                observe(&line);
            }
            progress(run.ledger.ended());
        }
        Ok(run.report())
    }

    fn sizes(&self, memory_bytes: usize, max_zero_byte_slots: usize) -> TierSizes {
        let model = &self.timing.model;
        TierSizes {
            // A slot is what a model keeps, to the byte; parts of it have no padding here.
            slot_bytes: model.state() as usize,
            block_bytes: (model.kv_bytes * BLOCK_LEN as f64).round() as usize,
            memory_bytes,
            max_zero_byte_slots,
            packed_bytes: 0,
        }
    }

    /// The layouts of device and host.
    fn layouts(&self) -> Result<(PoolLayout, PoolLayout), SimulationError> {
        let layout = |bytes, slots, flag| {
            let sizes = self.sizes(bytes, slots);
            PoolLayout::new(sizes).map_err(|source| SimulationError::Layout { flag, source })
        };
        // A fork may read a slot of no bytes beside the one it writes.
        let slots = 2 * self.config.max_num_seqs();
        let device = layout(self.device_bytes, slots, DEVICE)?;
        let host = match self.host_bytes {
            0 => device.without_memory(),
            bytes => layout(bytes, MOST_SEQUENCES, HOST)?,
        };
        Ok((device, host))
    }

    /// What `--preempt auto` weighs, by the same constants that time the copies and the steps.
    fn cost(&self, device: &PoolLayout) -> Cost {
        let Timing { model, hardware, .. } = &self.timing;
        let (token_seconds, pair_seconds) = hardware.prefill_seconds(model);
        Cost {
            slot_bytes: device.slot_bytes,
            block_bytes: device.block_bytes,
            link_bytes_per_second: hardware.link(),
            tokens_per_second: 1.0 / token_seconds,
            pair_seconds,
        }
    }

    fn header(&self, traffic: &Traffic) -> Header {
        let Timing { model, hardware, step_model, .. } = &self.timing;
        Header {
            version: env!("CARGO_PKG_VERSION"),
            traffic: traffic.name.clone(),
            requests: traffic.requests.len(),
            hardware: hardware.name.clone(),
            model: model.name.clone(),
            step_model: step_model.to_string(),
            scheduling_policy: self.config.policy.as_str(),
            batching: self.config.batching.as_str(),
            preempt: self.config.preempt.as_str(),
            max_num_batched_tokens: self.config.max_num_batched_tokens,
            max_num_seqs: self.config.max_num_seqs(),
            grid: model.grid,
            device_bytes: self.device_bytes,
            host_bytes: self.host_bytes,
            watermark_percent: self.config.watermark_percent,
            link: [hardware.link_out, hardware.link_in],
            step_overhead: hardware.step_overhead,
            overlap_copies: self.timing.overlap_copies,
            dead_slots_pay: self.timing.dead_slots_pay,
            buckets: self.timing.buckets.clone(),
            padding_reads: self.timing.padding_reads,
            slo_itl: self.config.slo_itl.map(|time| time.as_secs_f64()),
            sjf_ageing: self.config.sjf_ageing,
            reserve_long: self.config.reserve_long,
            long_prompt: self.config.long_prompt,
            prefill_floor: self.config.prefill_floor,
            prefix_cache: self.config.prefix_cache,
            exact_prefix: self.config.exact_prefix,
            checkpoint_every: self.config.checkpoint_every,
        }
    }
}

/// Traffic on its way.
struct Running<'s> {
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
    ledger: Ledger,
    /// Follows the steps, if somebody asks.
    watcher: Option<Watcher>,
    max_tokens: usize,
    tokens: Vec<u32>,
}

impl<'s> Running<'s> {
    fn new(simulation: &'s Simulation, traffic: &'s Traffic) -> Result<Self, SimulationError> {
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

    /// Submits what has arrived, and waits for something when nothing is to do. False when all have
    /// ended.
    fn submit(&mut self) -> bool {
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
    fn step(&mut self) -> Option<StepLine> {
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
    fn stood_still(&self) -> bool {
        let step = self.core.last_step();
        step.duration.is_zero() && step.prompt_tokens + step.generated_tokens == 0
    }

    fn report(mut self) -> Report {
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
