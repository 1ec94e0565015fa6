//! Traffic through the real engine loop on a virtual clock: what this scheduler would do on other
//! hardware.
//!
//! ```text
//! arrivals -> Core [ plan -> lower -> ModelledExecutor (time passes) -> commit ] -> events
//!                                                                             -> Report
//! ```

mod running;

use serde::Serialize;
use state_pool::{BLOCK_LEN, LayoutError, PoolLayout, TierSizes};

use super::figures::{
    Fairness, Goodput, Latencies, Occupied, Pools, Preempted, Reused, Stalls, Steps, Throughput,
};
use super::modelled::Timing;
use super::setup::MOST_SEQUENCES;
use super::traffic::Traffic;
use super::watch::{StepLine, Watcher};
use crate::config::{EngineConfig, InvalidLimit};
use crate::scheduler::Cost;
use running::Running;

/// Steps in a row in which nothing happens and no time passes.
const MOST_IDLE_STEPS: usize = 100;

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
                let seconds = run.now().as_secs_f64();
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
            overlaps: self.timing.overlap_copies,
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
