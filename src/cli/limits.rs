//! The flags of an engine that runs many requests, written once for all commands that have one, and
//! what was derived from them, for people.

use std::fmt;
use std::time::Duration;

use clap::builder::PossibleValue;
use clap::{Args, ValueEnum};

use super::output::grouped;
use crate::config::{
    Batching, CheckpointDtype, DEFAULT_LONG_PROMPT, DEFAULT_PREFILL_FLOOR, DEFAULT_SJF_AGEING,
    DEFAULT_WATERMARK_PERCENT, Device, EngineConfig, MemorySize, Policy, Preempt,
};
use crate::engine::EngineLimits;
use crate::scheduler::Cost;

/// Rules of the scheduler: the same for an engine and for a simulation.
#[derive(Debug, Args)]
#[command(next_help_heading = "Memory and scheduling")]
pub struct RuleArgs {
    /// Most sequences on the device at once; default: 256, or the tokens of a step.
    #[arg(long, value_name = "N")]
    pub max_num_seqs: Option<usize>,
    /// Tokens that the first prompt of a step may take whatever the others take; a multiple of 64.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_PREFILL_FLOOR)]
    pub prefill_floor: usize,
    /// Who is served first.
    #[arg(long, value_enum, value_name = "POLICY", default_value_t = Policy::Fcfs)]
    pub scheduling_policy: Policy,
    /// Under sjf, seconds of prefill that a prompt is forgiven for each second it waits; 0: none.
    #[arg(
        long,
        value_name = "X",
        alias = "sjf-ageing",
        default_value_t = DEFAULT_SJF_AGEING,
        allow_negative_numbers = true
    )]
    pub sjf_aging: f64,
    /// When sequences join those that run.
    #[arg(long, value_enum, value_name = "HOW", default_value_t = Batching::Continuous)]
    pub batching: Batching,
    /// Places that short prompts leave free while a long one waits.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub reserve_long: usize,
    /// Tokens from which on a prompt is long, for --reserve-long.
    #[arg(
        long,
        value_name = "N",
        value_parser = parse_tokens,
        default_value_t = DEFAULT_LONG_PROMPT
    )]
    pub long_prompt: usize,
    /// Keep steps so small, and sequences so few, that a next token comes within so many
    /// milliseconds, as far as can be told from the steps so far.
    #[arg(
        long,
        value_name = "MS",
        value_parser = parse_milliseconds,
        allow_negative_numbers = true
    )]
    pub slo_itl_ms: Option<Duration>,
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
    /// Keep nothing for later requests that begin alike.
    #[arg(long)]
    pub no_prefix_cache: bool,
    /// Keep a state after every N tokens of a prompt besides, a multiple of 64.
    #[arg(long, value_name = "N")]
    pub checkpoint_every: Option<usize>,
}

impl RuleArgs {
    /// `config` with these rules.
    pub fn apply(&self, config: EngineConfig) -> EngineConfig {
        EngineConfig {
            max_num_seqs: self.max_num_seqs,
            prefill_floor: self.prefill_floor,
            policy: self.scheduling_policy,
            sjf_ageing: self.sjf_aging,
            batching: self.batching,
            reserve_long: self.reserve_long,
            long_prompt: self.long_prompt,
            slo_itl: self.slo_itl_ms,
            preempt: self.preempt,
            watermark_percent: self.watermark,
            prefix_cache: !self.no_prefix_cache,
            checkpoint_every: self.checkpoint_every,
            ..config
        }
    }
}

/// Limits of an engine, and what it does when memory runs short.
#[derive(Debug, Args)]
#[command(next_help_heading = "Memory and scheduling")]
pub struct EngineArgs {
    /// Memory of sequences that run: bytes (64MiB, 8GB), or a percentage of what is free after the
    /// weights, on a CUDA device of its own memory.
    #[arg(long, value_name = "SIZE", default_value = "25%")]
    pub device_memory: MemorySize,
    /// Memory of sequences that were pushed out; with 0 they are computed again instead.
    #[arg(long, value_name = "SIZE", default_value = "25%")]
    pub host_memory: MemorySize,
    /// Most tokens of a sequence, prompt and answer together; default: the model's context, or what
    /// the device memory holds for one. 32k is 32,000 and 32K is 32,768; m and M as well.
    #[arg(long, value_name = "N", value_parser = parse_tokens)]
    pub max_model_len: Option<usize>,
    /// Most tokens to compute in one step, 64 or more; default: 512, on a CUDA device 2048.
    #[arg(long, value_name = "N")]
    pub max_num_batched_tokens: Option<usize>,
    /// Who is served when, who leaves and what is kept.
    #[command(flatten)]
    pub rules: RuleArgs,
    /// GB per second between device and host, for --preempt auto; default: as `calibrate`
    /// found for this model, or else measured.
    #[arg(long, value_name = "GB/S", allow_negative_numbers = true)]
    pub link_gbps: Option<f64>,
    /// Prompt tokens computed per second, for --preempt auto; default: as `calibrate`
    /// found for this model, or else measured.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub prefill_tokens_per_second: Option<f64>,
    /// Go on from nothing but states that have the bits of a run from the start: not from the end
    /// of an earlier answer.
    #[arg(long)]
    pub exact_prefix: bool,
    /// How states kept for reuse are stored in the host memory; what comes back from less than f32
    /// is not exact.
    #[arg(long, value_enum, value_name = "DTYPE", default_value_t = CheckpointDtype::F32)]
    pub checkpoint_dtype: CheckpointDtype,
    /// Of the states that are used again, at most how many percent to derive anew in spare time and
    /// memory and to compare bit for bit.
    #[arg(
        long,
        value_name = "PERCENT",
        default_value = "0%",
        value_parser = parse_percent,
        allow_negative_numbers = true
    )]
    pub audit: f64,
    /// Park a sequence that runs in every Nth step, needed or not: a stress for tests.
    #[arg(long, value_name = "N", hide = true)]
    pub park_every: Option<u64>,
}

impl EngineArgs {
    /// The limits that were asked for, of an engine on `device`.
    pub fn config(&self, threads: usize, device: Device) -> EngineConfig {
        let tokens = self.max_num_batched_tokens;
        self.rules.apply(EngineConfig {
            max_num_batched_tokens: tokens.unwrap_or(device.default_max_num_batched_tokens()),
            max_model_len: self.max_model_len,
            device_memory: self.device_memory,
            host_memory: self.host_memory,
            link_bytes_per_second: self.link_gbps.map(|gb| gb * 1e9),
            prefill_tokens_per_second: self.prefill_tokens_per_second,
            park_every: self.park_every,
            exact_prefix: self.exact_prefix,
            checkpoint_dtype: self.checkpoint_dtype,
            audit_percent: self.audit,
            threads,
            device,
            ..EngineConfig::default()
        })
    }
}

/// A number of tokens, perhaps in thousands (k), times 1,024 (K), or the squares of these (m, M).
pub fn parse_tokens(text: &str) -> Result<usize, String> {
    let (number, unit) = match text.char_indices().next_back() {
        Some((at, 'k')) => (&text[..at], 1_000),
        Some((at, 'K')) => (&text[..at], 1 << 10),
        Some((at, 'm')) => (&text[..at], 1_000_000),
        Some((at, 'M')) => (&text[..at], 1 << 20),
        _ => (text, 1),
    };
    let number: usize = number.parse().map_err(|_| "a whole number, 8192 or 8K".to_owned())?;
    number.checked_mul(unit).ok_or_else(|| "more tokens than can be counted".to_owned())
}

/// As [`parse_tokens`], but not 0.
pub fn at_least_one_token(text: &str) -> Result<usize, String> {
    let tokens = parse_tokens(text)?;
    if tokens > 0 { Ok(tokens) } else { Err("1 or more".to_owned()) }
}

/// Milliseconds, above 0.
fn parse_milliseconds(text: &str) -> Result<Duration, String> {
    let milliseconds: f64 = text.parse().map_err(|_| format!("{text:?} is no number"))?;
    let duration = Duration::try_from_secs_f64(milliseconds / 1e3);
    let duration = duration.ok().filter(|duration| !duration.is_zero());
    duration.ok_or_else(|| format!("{text} ms; above 0, finite"))
}

/// A percentage, with or without its sign.
fn parse_percent(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix('%').unwrap_or(text).trim();
    number.parse().map_err(|_| format!("{text:?} is no percentage"))
}

impl ValueEnum for Policy {
    fn value_variants<'a>() -> &'a [Policy] {
        &Policy::ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let help = match self {
            Policy::Fcfs => "first come, first served",
            Policy::Priority => {
                "lower priority number first, first come, first served within a number"
            }
            Policy::Sjf => "the shortest prompt first, less what is kept of it; see --sjf-aging",
            Policy::Fair => "the programs (program_id) by turns, by the tokens they were served",
        };
        Some(PossibleValue::new(self.as_str()).help(help))
    }
}

impl ValueEnum for Batching {
    fn value_variants<'a>() -> &'a [Batching] {
        &[Batching::Continuous, Batching::Static]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let help = match self {
            Batching::Continuous => "at the next step",
            Batching::Static => "when all that run have ended: a baseline to compare with",
        };
        Some(PossibleValue::new(self.as_str()).help(help))
    }
}

impl ValueEnum for CheckpointDtype {
    fn value_variants<'a>() -> &'a [CheckpointDtype] {
        &[CheckpointDtype::F32, CheckpointDtype::Bf16, CheckpointDtype::Int8]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let help = match self {
            CheckpointDtype::F32 => "as they are computed",
            CheckpointDtype::Bf16 => "16 bits a value, half the memory",
            CheckpointDtype::Int8 => "8 bits a value, about a quarter of the memory",
        };
        Some(PossibleValue::new(self.as_str()).help(help))
    }
}

impl ValueEnum for Preempt {
    fn value_variants<'a>() -> &'a [Preempt] {
        &[Preempt::Auto, Preempt::Swap, Preempt::Recompute]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let help = match self {
            Preempt::Auto => "whichever of the two takes less time",
            Preempt::Swap => "copied to the host memory; computed again only when that is full",
            Preempt::Recompute => "computed again",
        };
        Some(PossibleValue::new(self.as_str()).help(help))
    }
}

/// The limits for people: each derived figure with what it comes from.
#[derive(Debug)]
pub struct Shown<'a>(pub &'a EngineLimits);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let limits = self.0;
        let length = match (limits.config.max_model_len, limits.max_model_len == limits.context) {
            (Some(_), _) => "--max-model-len",
            (None, true) => "the model's context",
            (None, false) => "what --device-memory holds for one",
        };
        writeln!(
            f,
            "sequences  up to {} tokens each ({length}), {} at once, {} tokens a step",
            grouped(limits.max_model_len),
            grouped(limits.max_num_seqs),
            grouped(limits.config.max_num_batched_tokens),
        )?;
        write_tier(f, limits, Tier::Device)?;
        write_tier(f, limits, Tier::Host)?;
        write!(f, "together  ")?;
        let longest = limits.max_model_len;
        for (comma, tokens) in [("", longest), (",", longest.div_ceil(4))] {
            let (sequences, limit) = limits.concurrency(tokens);
            let (sequences, tokens) = (grouped(sequences), grouped(tokens));
            write!(f, "{comma} {sequences} of {tokens} tokens (bound by {limit})")?;
        }
        Ok(())
    }
}

#[derive(Clone, Copy)]
enum Tier {
    Device,
    Host,
}

fn write_tier(f: &mut fmt::Formatter<'_>, limits: &EngineLimits, tier: Tier) -> fmt::Result {
    let (name, tier, asked) = match tier {
        Tier::Device => ("device", &limits.device, limits.config.device_memory),
        Tier::Host => ("host", &limits.host, limits.config.host_memory),
    };
    if tier.pages == 0 {
        return writeln!(f, "{name:<10} no memory: what is pushed out is computed again");
    }
    let asked = match asked {
        MemorySize::Bytes(bytes) => grouped(bytes),
        other => other.to_string(),
    };
    let slots = match tier.slots_per_page {
        0 => String::new(),
        1 => "1 slot or ".to_owned(),
        slots => format!("{slots} slots or "),
    };
    let blocks = match tier.blocks_per_page {
        1 => "1 block".to_owned(),
        blocks => format!("{blocks} blocks"),
    };
    writeln!(
        f,
        "{name:<10} {} bytes ({asked}): {} pages of {} bytes, each {slots}{blocks} of 64 tokens",
        grouped(tier.pages * tier.page_bytes),
        grouped(tier.pages),
        grouped(tier.page_bytes),
    )
}

/// What `--preempt auto` weighs, for people.
#[derive(Debug)]
pub struct Weighed(pub Cost);

impl fmt::Display for Weighed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Cost { link_bytes_per_second: link, tokens_per_second: prefill, .. } = self.0;
        if link.is_infinite() || prefill.is_infinite() {
            return write!(f, "preempt    no host memory: what is pushed out is computed again");
        }
        let (link, prefill) = (link / 1e9, grouped(prefill as usize));
        write!(f, "preempt    auto: {link:.1} GB/s to the host, {prefill} prompt tokens a second")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_of_tokens_may_be_short() {
        for (text, tokens) in
            [("8192", 8192), ("32k", 32_000), ("32K", 32_768), ("1m", 1_000_000), ("1M", 1 << 20)]
        {
            assert_eq!(parse_tokens(text), Ok(tokens), "{text}");
        }
        for wrong in ["", "k", "-1", "1.5k", "1kk", "99999999999999999M", "é"] {
            assert!(parse_tokens(wrong).is_err(), "{wrong}");
        }
    }
}
