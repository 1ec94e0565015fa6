//! The control plane alone: a scheduler over pools of no bytes, and a report that answers each plan
//! at once.

use deltapool::config::{Policy, Preempt};
use deltapool::scheduler::{Cost, Limits, SampledToken, Scheduler, StepPlan, StepReport};
use state_pool::{PoolLayout, StatePool, Tier, TierSizes};

/// Kimi-Linear's slot and block with bf16 windows, hidden row and KV.
pub const SLOT_BYTES: usize = 43_422_208;
pub const BLOCK_BYTES: usize = 516_096;

/// A scheduler whose device holds `running` sequences of `tokens` tokens each, and a page more.
pub fn scheduler(running: usize, tokens: usize) -> Scheduler {
    let sizes = |memory_bytes| TierSizes {
        slot_bytes: SLOT_BYTES,
        block_bytes: BLOCK_BYTES,
        memory_bytes,
        max_zero_byte_slots: 1,
    };
    let page = PoolLayout::new(sizes(1 << 40)).expect("a layout");
    let blocks = running * tokens.div_ceil(state_pool::BLOCK_LEN);
    let pages = running.div_ceil(page.slots_per_page) + blocks.div_ceil(page.blocks_per_page) + 1;
    let layout = PoolLayout::new(sizes(pages * page.page_bytes)).expect("a layout");
    let limits = Limits {
        max_num_batched_tokens: 2_048,
        prefill_floor: 64,
        max_num_seqs: running,
        max_model_len: tokens,
        watermark_pages: 0,
        grid: 64,
        policy: Policy::Fcfs,
        preempt: Preempt::Swap,
        cost: Cost {
            slot_bytes: SLOT_BYTES,
            block_bytes: BLOCK_BYTES,
            link_bytes_per_second: 1e10,
            tokens_per_second: 1e4,
        },
        park_every: None,
    };
    let host = StatePool::new(Tier::Host, layout.clone());
    Scheduler::new(limits, StatePool::new(Tier::Device, layout), host)
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
        let plan = scheduler.plan();
        let decoding = plan.draws.len();
        answer(&plan, &mut report);
        scheduler.commit(plan, &report);
        if decoding == running {
            return;
        }
    }
}
