//! The flags of an engine that runs many requests, written once for all commands that have one.

use clap::builder::PossibleValue;
use clap::{Args, ValueEnum};

use crate::config::{
    DEFAULT_MAX_NUM_BATCHED_TOKENS, DEFAULT_PREFILL_FLOOR, DEFAULT_WATERMARK_PERCENT, EngineConfig,
    MemorySize, Policy, Preempt,
};

/// Limits of an engine, and what it does when memory runs short.
#[derive(Debug, Args)]
#[command(next_help_heading = "Memory and scheduling")]
pub struct EngineArgs {
    /// Memory of sequences that run: bytes (64MiB, 8GB), or a percentage of what is free after the
    /// weights.
    #[arg(long, value_name = "SIZE", default_value = "25%")]
    pub device_memory: MemorySize,
    /// Memory of sequences that were pushed out; with 0 they are computed again instead.
    #[arg(long, value_name = "SIZE", default_value = "25%")]
    pub host_memory: MemorySize,
    /// Most sequences on the device at once; default: 256, or the tokens of a step.
    #[arg(long, value_name = "N")]
    pub max_num_seqs: Option<usize>,
    /// Most tokens of a sequence, prompt and answer together; default: the model's context, or what
    /// the device memory holds for one.
    #[arg(long, value_name = "N")]
    pub max_model_len: Option<usize>,
    /// Most tokens to compute in one step, 64 or more.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_MAX_NUM_BATCHED_TOKENS)]
    pub max_num_batched_tokens: usize,
    /// Tokens that the first prompt of a step may take whatever the others take; a multiple of 64.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_PREFILL_FLOOR)]
    pub prefill_floor: usize,
    /// Who is served first.
    #[arg(long, value_enum, value_name = "POLICY", default_value_t = Policy::Fcfs)]
    pub scheduling_policy: Policy,
    /// What happens to a sequence that is pushed out of the device memory.
    #[arg(long, value_enum, value_name = "HOW", default_value_t = Preempt::Auto)]
    pub preempt: Preempt,
    /// Percent of the device's pages that are kept free for sequences that run.
    #[arg(
        long,
        value_name = "PERCENT",
        default_value_t = DEFAULT_WATERMARK_PERCENT,
        allow_negative_numbers = true
    )]
    pub watermark: f64,
    /// GB per second between device and host, for --preempt auto; default: measured.
    #[arg(long, value_name = "GB/S", allow_negative_numbers = true)]
    pub link_gbps: Option<f64>,
    /// Prompt tokens computed per second, for --preempt auto; default: measured.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub prefill_tokens_per_second: Option<f64>,
}

impl EngineArgs {
    /// The limits that were asked for.
    pub fn config(&self, threads: usize) -> EngineConfig {
        EngineConfig {
            max_num_batched_tokens: self.max_num_batched_tokens,
            prefill_floor: self.prefill_floor,
            max_num_seqs: self.max_num_seqs,
            max_model_len: self.max_model_len,
            device_memory: self.device_memory,
            host_memory: self.host_memory,
            watermark_percent: self.watermark,
            policy: self.scheduling_policy,
            preempt: self.preempt,
            link_bytes_per_second: self.link_gbps.map(|gb| gb * 1e9),
            prefill_tokens_per_second: self.prefill_tokens_per_second,
            threads,
        }
    }
}

impl ValueEnum for Policy {
    fn value_variants<'a>() -> &'a [Policy] {
        &[Policy::Fcfs, Policy::Priority]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(match self {
            Policy::Fcfs => PossibleValue::new("fcfs").help("first come, first served"),
            Policy::Priority => PossibleValue::new("priority")
                .help("lower priority number first, first come, first served within a number"),
        })
    }
}

impl ValueEnum for Preempt {
    fn value_variants<'a>() -> &'a [Preempt] {
        &[Preempt::Auto, Preempt::Swap, Preempt::Recompute]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(match self {
            Preempt::Auto => {
                PossibleValue::new("auto").help("whichever of the two takes less time")
            }
            Preempt::Swap => PossibleValue::new("swap")
                .help("copied to the host memory; computed again only when that is full"),
            Preempt::Recompute => PossibleValue::new("recompute").help("computed again"),
        })
    }
}
