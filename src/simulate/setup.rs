//! On what a workload is replayed, and the scheduler for it.

use state_pool::{LayoutError, PoolLayout, StatePool, Tier, TierSizes};

use super::cache;
use super::policy::Policy;
use super::workload::Workload;
use crate::config::{Batching, Policy as Order, Preempt};
use crate::config::{DEFAULT_MAX_NUM_SEQS, DEFAULT_PREFILL_FLOOR, DEFAULT_WATERMARK_PERCENT};
use crate::scheduler::limits::device_tokens;
use crate::scheduler::{Cost, Limits, Scheduler};

/// Tokens of a step, as the engines had that the tables compare with.
const MAX_NUM_BATCHED_TOKENS: usize = 8192;

/// Slots of no bytes, where nothing else bounds them.
pub(super) const MOST_SEQUENCES: usize = 1 << 20;

/// Memory of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceMemory {
    /// So many bytes.
    Bytes(usize),
    /// As much as the workload can fill.
    Unlimited,
}

/// What a workload is replayed on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Setup {
    /// Bytes of a slot.
    pub slot_bytes: usize,
    /// Bytes of a block.
    pub block_bytes: usize,
    /// Positions at which prompt spans may end: the model's grid.
    pub span_grid: usize,
    /// Memory of the device.
    pub device_memory: DeviceMemory,
    /// Bytes of the host tier; 0 for none.
    pub host_memory: usize,
    /// Where states are kept.
    pub policy: Policy,
    /// States are kept at multiples of so many tokens.
    pub state_grid: usize,
    /// Requests that are open at a time; by default one, and all of a burst.
    pub concurrency: Option<usize>,
}

/// Why a workload cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
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
        "{place}: {tokens} tokens, prompt and answer together, do not fit: --device-memory \
         {device_bytes} holds one sequence of {device_tokens} tokens"
    )]
    TooLong {
        /// Where the request comes from.
        place: String,
        /// Prompt and answer together.
        tokens: usize,
        /// The memory.
        device_bytes: usize,
        /// What it holds for one sequence.
        device_tokens: usize,
    },
    /// A fault of this program.
    #[error("the scheduler stands still with {open} requests open, the first of them {place}")]
    Stuck {
        /// Requests without a complete answer.
        open: usize,
        /// Where the first of them comes from.
        place: String,
    },
}

impl Setup {
    /// A scheduler over pools without bytes that can run each request of the workload.
    pub(super) fn scheduler(&self, workload: &Workload) -> Result<Scheduler, ReplayError> {
        let device_bytes = match self.device_memory {
            DeviceMemory::Bytes(bytes) => bytes,
            DeviceMemory::Unlimited => self.most_bytes(workload)?,
        };
        let device = self.layout(device_bytes, "--device-memory")?;
        let host = match self.host_memory {
            0 => device.without_memory(),
            bytes => self.layout(bytes, "--host-memory")?,
        };
        let device_tokens = device_tokens(&device);
        if let Some(long) =
            workload.requests.iter().find(|request| request.tokens() > device_tokens)
        {
            let (place, tokens) = (long.place.clone(), long.tokens());
            return Err(ReplayError::TooLong { place, tokens, device_bytes, device_tokens });
        }
        let limits = Limits {
            max_num_batched_tokens: MAX_NUM_BATCHED_TOKENS,
            prefill_floor: DEFAULT_PREFILL_FLOOR,
            max_num_seqs: DEFAULT_MAX_NUM_SEQS,
            max_model_len: device_tokens,
            watermark_pages: (device.pages as f64 * DEFAULT_WATERMARK_PERCENT / 100.0) as usize,
            grid: self.span_grid,
            policy: Order::Fcfs,
            sjf_ageing: 0.0,
            batching: Batching::Continuous,
            reserve_long: None,
            preempt: Preempt::Swap,
            cost: Cost {
                slot_bytes: self.slot_bytes,
                block_bytes: self.block_bytes,
                link_bytes_per_second: f64::INFINITY,
                tokens_per_second: f64::INFINITY,
                pair_seconds: 0.0,
                overlaps: true,
            },
            audit_percent: 0.0,
            park_every: None,
            reuse: Some(cache::rules(self)),
        };
        let pools = (StatePool::new(Tier::Device, device), StatePool::new(Tier::Host, host));
        Ok(Scheduler::new(limits, pools.0, pools.1))
    }

    fn layout(&self, memory_bytes: usize, flag: &'static str) -> Result<PoolLayout, ReplayError> {
        let sizes = TierSizes {
            slot_bytes: self.slot_bytes,
            block_bytes: self.block_bytes,
            memory_bytes,
            max_zero_byte_slots: MOST_SEQUENCES,
            packed_bytes: 0,
        };
        PoolLayout::new(sizes).map_err(|source| ReplayError::Layout { flag, source })
    }

    /// Bytes for the blocks of all requests and for a state at each position of the grid of each,
    /// none of them shared; twice that, so that free memory is never short.
    fn most_bytes(&self, workload: &Workload) -> Result<usize, ReplayError> {
        const FLAG: &str = "--device-memory";
        // The page's size does not depend on the memory.
        let page = match self.layout(0, FLAG) {
            Err(ReplayError::Layout {
                source: LayoutError::TooSmall { needed_bytes, .. }, ..
            }) => self.layout(needed_bytes, FLAG)?,
            other => other?,
        };
        let pages =
            |units: usize, per_page: usize| units.checked_div(per_page).map_or(0, |n| n + 1);
        let (mut blocks, mut slots) = (0, 0);
        for request in &workload.requests {
            blocks += request.tokens().div_ceil(state_pool::BLOCK_LEN) + 1;
            slots += request.tokens() / self.state_grid + 2;
        }
        let pages = pages(blocks, page.blocks_per_page) + pages(slots, page.slots_per_page);
        Ok((2 * pages).saturating_mul(page.page_bytes))
    }
}
