//! The control plane alone: a scheduler over pools of no bytes, and a report that answers each plan
//! at once.
#![allow(dead_code)] // each file uses its own part

use std::time::Duration;

use deltapool::config::{Batching, Policy, Preempt};
use deltapool::scheduler::{
    Cost, Limits, Placement, Reuse, SampledToken, Scheduler, StepPlan, StepReport,
};
use state_pool::{PoolLayout, StatePool, Tier, TierSizes};

/// Kimi-Linear's slot and block with bf16 windows, hidden row and KV.
pub const SLOT_BYTES: usize = 43_422_208;
pub const BLOCK_BYTES: usize = 516_096;

/// A scheduler over tiers of these bytes, the host without memory when it has none.
pub fn scheduler_of(
    (slot_bytes, block_bytes): (usize, usize),
    (device_bytes, host_bytes): (usize, usize),
    change: impl FnOnce(&mut Limits),
) -> Scheduler {
    let layout = |memory_bytes| {
        let sizes = TierSizes {
            slot_bytes,
            block_bytes,
            packed_bytes: 0,
            memory_bytes,
            max_zero_byte_slots: 1,
        };
        PoolLayout::new(sizes).expect("a layout")
    };
    let device = layout(device_bytes);
    let host = if host_bytes == 0 { device.without_memory() } else { layout(host_bytes) };
    let mut limits = Limits {
        max_num_batched_tokens: 512,
        prefill_floor: 64,
        max_num_seqs: 64,
        max_model_len: 100_000,
        watermark_pages: 0,
        grid: 64,
        policy: Policy::Fcfs,
        sjf_ageing: 0.0,
        batching: Batching::Continuous,
        reserve_long: None,
        preempt: Preempt::Swap,
        cost: Cost {
            slot_bytes,
            block_bytes,
            link_bytes_per_second: 1e10,
            tokens_per_second: 1e4,
            pair_seconds: 0.0,
            overlaps: true,
        },
        reuse: None,
        audit_percent: 0.0,
        park_every: None,
    };
    change(&mut limits);
    Scheduler::new(limits, StatePool::new(Tier::Device, device), StatePool::new(Tier::Host, host))
}

/// Everything is kept for reuse, states on a grid of so many tokens.
pub fn reuse(grid_tokens: usize) -> Reuse {
    Reuse {
        exact_only: false,
        placement: Placement::default(),
        keep_turn_ends: true,
        grid_tokens,
        max_ghost_tokens: 1 << 24,
    }
}

/// A scheduler whose device holds `running` sequences of `tokens` tokens each, and three pages more:
/// with less free, checkpoints are copied ahead of need.
pub fn scheduler(running: usize, tokens: usize) -> Scheduler {
    let (slots_per_page, blocks_per_page, page_bytes) = (1, 84, 43_425_792);
    let blocks: usize = running * tokens.div_ceil(state_pool::BLOCK_LEN);
    let pages = running.div_ceil(slots_per_page) + blocks.div_ceil(blocks_per_page) + 3;
    let bytes = pages * page_bytes;
    scheduler_of((SLOT_BYTES, BLOCK_BYTES), (bytes, bytes), |limits| {
        (limits.max_num_batched_tokens, limits.max_num_seqs) = (2_048, running);
        limits.reuse = Some(reuse(limits.grid));
        limits.max_model_len = tokens;
    })
}

/// Everything a plan asks for: a token for each draw, each transfer done. Reuses `report`.
pub fn answer(plan: &StepPlan, report: &mut StepReport) {
    report.sampled.clear();
    let token = |sequence| SampledToken { sequence, drawn: Ok(7), logprobs: None };
    report.sampled.extend(plan.draws.iter().map(|id| token(*id)));
    report.finished.clear();
    report.finished.extend(plan.transfers.iter().map(|transfer| transfer.id));
}

/// Runs steps until `running` sequences have computed their prompts.
pub fn until_all_decode(scheduler: &mut Scheduler, running: usize) {
    let mut report = StepReport::default();
    loop {
        let plan = scheduler.plan(Duration::ZERO);
        let decoding = plan.draws.len();
        answer(&plan, &mut report);
        scheduler.commit(plan, &report);
        if decoding == running {
            return;
        }
    }
}
