//! Limits of an engine as a caller gives them, and what the machine has.

use std::fmt;
use std::fs;
use std::str::FromStr;
use std::thread;
use std::time::Duration;

/// Rows of a step by default on a CPU.
pub const DEFAULT_MAX_NUM_BATCHED_TOKENS: usize = 512;

/// Below this a prompt could not advance from one grid position to the next.
pub const LEAST_MAX_NUM_BATCHED_TOKENS: usize = 64;

/// Tokens that the first prompt span of a step may take by default.
pub const DEFAULT_PREFILL_FLOOR: usize = 64;

/// Sequences on the device at once by default.
pub const DEFAULT_MAX_NUM_SEQS: usize = 256;

/// Percent of the free memory that each tier takes by default.
pub const DEFAULT_MEMORY_PERCENT: f64 = 25.0;

/// Percent of the pages that admission leaves free by default.
pub const DEFAULT_WATERMARK_PERCENT: f64 = 2.0;

/// Under `sjf`, by how many seconds the cost of a prompt that waits falls in a second by default: a
/// prompt of ten seconds waits for a minute at most.
pub const DEFAULT_SJF_AGEING: f64 = 0.2;

/// Tokens from which on a prompt is long by default, where places are kept for such.
pub const DEFAULT_LONG_PROMPT: usize = 4096;

/// Most threads a gang may have.
pub const MOST_THREADS: usize = 1024;

/// Rows of a step by default on a CUDA device.
pub const DEFAULT_MAX_NUM_BATCHED_TOKENS_CUDA: usize = 2048;

/// Where a model is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device {
    /// On the processor.
    Cpu,
    /// On a CUDA device, or not at all.
    Cuda,
    /// On a CUDA device where there is one that serves, or else on the processor.
    Auto,
}

impl Device {
    /// The word callers see.
    pub fn as_str(self) -> &'static str {
        match self {
            Device::Cpu => "cpu",
            Device::Cuda => "cuda",
            Device::Auto => "auto",
        }
    }

    /// Tokens of a step unless told otherwise.
    pub fn default_max_num_batched_tokens(self) -> usize {
        match self {
            Device::Cpu => DEFAULT_MAX_NUM_BATCHED_TOKENS,
            Device::Cuda | Device::Auto => DEFAULT_MAX_NUM_BATCHED_TOKENS_CUDA,
        }
    }
}

/// Order in which sequences are served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// First come, first served.
    Fcfs,
    /// Lower priority number first, strictly; first come, first served within a number.
    Priority,
    /// The prompt that takes the least to compute first, unless one has waited long enough.
    Sjf,
    /// The programs by turns, each by the tokens that it was served.
    Fair,
}

impl Policy {
    /// All of them.
    pub const ALL: [Policy; 4] = [Policy::Fcfs, Policy::Priority, Policy::Sjf, Policy::Fair];

    /// The word callers see.
    pub fn as_str(self) -> &'static str {
        match self {
            Policy::Fcfs => "fcfs",
            Policy::Priority => "priority",
            Policy::Sjf => "sjf",
            Policy::Fair => "fair",
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// When sequences join those that run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Batching {
    /// At the next step.
    Continuous,
    /// When all that run have ended: the baseline to compare with.
    Static,
}

impl Batching {
    /// The word callers see.
    pub fn as_str(self) -> &'static str {
        match self {
            Batching::Continuous => "continuous",
            Batching::Static => "static",
        }
    }
}

/// How a sequence is pushed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Preempt {
    /// Whichever costs less; see `scheduler::cost`.
    Auto,
    /// Copied to the host; computed again only when the host is full.
    Swap,
    /// Always computed again.
    Recompute,
}

impl Preempt {
    /// The word callers see.
    pub fn as_str(self) -> &'static str {
        match self {
            Preempt::Auto => "auto",
            Preempt::Swap => "swap",
            Preempt::Recompute => "recompute",
        }
    }
}

/// Tokens of prompts that wait and of prefixes that were lost, four bytes each: 64 MiB.
pub const MAX_GHOST_TOKENS: usize = 1 << 24;

/// How the recurrent states of checkpoints on the host are stored. Those on the device and those
/// of parked sequences are f32 always.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckpointDtype {
    /// As they are computed: what comes back is exact.
    F32,
    /// 16 bits: half the bytes, within one part in 256 of each value.
    Bf16,
    /// 8 bits with a scale per head and key channel: about a quarter of the bytes, within one part
    /// in 254 of the channel's largest value.
    Int8,
}

impl CheckpointDtype {
    /// The word callers see.
    pub fn as_str(self) -> &'static str {
        match self {
            CheckpointDtype::F32 => "f32",
            CheckpointDtype::Bf16 => "bf16",
            CheckpointDtype::Int8 => "int8",
        }
    }
}

/// How much memory a tier takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MemorySize {
    /// So many bytes.
    Bytes(usize),
    /// So many percent of what is free when the weights are loaded.
    Percent(f64),
    /// What one sequence of `max_model_len` tokens takes.
    OneSequence,
}

impl FromStr for MemorySize {
    type Err = String;

    fn from_str(text: &str) -> Result<MemorySize, String> {
        let Some(percent) = text.strip_suffix('%') else {
            // Other engines take a part of the memory so.
            let part = text.parse().ok().filter(|part: &f64| *part > 0.0 && *part <= 1.0);
            if let Some(part) = part.filter(|_| text.contains('.')) {
                let percent = (part * 1e4).round() / 100.0;
                return Err(format!("a part of what is free is a percentage: {percent}%"));
            }
            return parse_bytes(text).map(MemorySize::Bytes);
        };
        let percent: f64 =
            percent.trim().parse().map_err(|_| format!("{text:?} is no percentage"))?;
        if !(0.0..=100.0).contains(&percent) {
            return Err(format!("{text} of the free memory; 0% to 100% can be had"));
        }
        Ok(MemorySize::Percent(percent))
    }
}

impl fmt::Display for MemorySize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MemorySize::Bytes(bytes) => write!(f, "{bytes}"),
            MemorySize::Percent(percent) => write!(f, "{percent}%"),
            MemorySize::OneSequence => write!(f, "one sequence"),
        }
    }
}

/// A number of bytes as people write it: `80GB` is 80 * 1000^3, `80GiB` is 80 * 1024^3.
///
/// # Errors
/// A text that is not a number with one of these suffixes, or a number beyond all memories.
pub fn parse_bytes(text: &str) -> Result<usize, String> {
    if text.starts_with('-') {
        return Err(format!("{text} is less than nothing"));
    }
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(digits);
    let unit: u64 = match suffix.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kb" => 1000,
        "m" | "mb" => 1000_u64.pow(2),
        "g" | "gb" => 1000_u64.pow(3),
        "t" | "tb" => 1000_u64.pow(4),
        "kib" => 1 << 10,
        "mib" => 1 << 20,
        "gib" => 1 << 30,
        "tib" => 1 << 40,
        _ => return Err(format!("{suffix:?} is no unit of bytes; use e.g. 80GB or 24GiB")),
    };
    let bytes = match number.parse::<u64>() {
        Ok(whole) => whole.checked_mul(unit),
        Err(_) => {
            let value = number.parse::<f64>().map_err(|_| format!("{text:?} is no number"))?;
            Some((value * unit as f64) as u64).filter(|bytes| *bytes < 1 << 53)
        }
    };
    let bytes = bytes.and_then(|bytes| usize::try_from(bytes).ok());
    bytes.ok_or_else(|| format!("{text} is more than can be addressed"))
}

/// Limits of an engine. What is none is derived from the model and the memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EngineConfig {
    /// Tokens a step may compute.
    pub max_num_batched_tokens: usize,
    /// Tokens the first prompt span of a step may always take, a multiple of 64: a step exceeds
    /// its budget by at most this.
    pub prefill_floor: usize,
    /// Sequences that may hold device memory at once; 256 or the budget of a step.
    pub max_num_seqs: Option<usize>,
    /// Tokens a sequence may reach, prompt and answer together; the smaller of the model's context
    /// and what the device memory holds for one.
    pub max_model_len: Option<usize>,
    /// Slots and blocks of sequences that run.
    pub device_memory: MemorySize,
    /// Slots and blocks of parked sequences; with none, what is pushed out is computed again.
    pub host_memory: MemorySize,
    /// Percent of the device's pages, rounded down, that admission leaves free while anything
    /// runs.
    pub watermark_percent: f64,
    /// Order of service.
    pub policy: Policy,
    /// Under `sjf`, by how many seconds the cost of a prompt that waits falls in a second; 0 never
    /// lets a long one pass shorter ones.
    pub sjf_ageing: f64,
    /// When sequences join those that run.
    pub batching: Batching,
    /// Places that short prompts leave free while a long one waits.
    pub reserve_long: usize,
    /// Tokens from which on a prompt is long.
    pub long_prompt: usize,
    /// The longest that a sequence that generates should wait for its next token: steps are kept
    /// so small, and sequences so few, that a step takes no longer.
    pub slo_itl: Option<Duration>,
    /// How a sequence is pushed out.
    pub preempt: Preempt,
    /// Bytes copied between the tiers per second, for [`Preempt::Auto`]; measured.
    pub link_bytes_per_second: Option<f64>,
    /// Prompt tokens computed per second, for [`Preempt::Auto`]; measured.
    pub prefill_tokens_per_second: Option<f64>,
    /// Seconds of attention for each pair of a token and one before it, for [`Preempt::Auto`];
    /// left out.
    pub pair_seconds: Option<f64>,
    /// Park a sequence that runs in every Nth step, needed or not: a stress for tests.
    pub park_every: Option<u64>,
    /// Keep what was computed for later requests that begin alike.
    pub prefix_cache: bool,
    /// Go on from nothing but what has the bits of a run from the start.
    pub exact_prefix: bool,
    /// Keep a state after every so many tokens of a prompt besides, a multiple of 64.
    pub checkpoint_every: Option<usize>,
    /// How states of checkpoints are stored on the host.
    pub checkpoint_dtype: CheckpointDtype,
    /// Percent of exact states taken from the prefix cache or back from the host that are derived
    /// again in spare time and compared bit for bit.
    pub audit_percent: f64,
    /// Threads that compute.
    pub threads: usize,
    /// Where the model is computed.
    pub device: Device,
}

impl Default for EngineConfig {
    fn default() -> EngineConfig {
        EngineConfig {
            max_num_batched_tokens: DEFAULT_MAX_NUM_BATCHED_TOKENS,
            prefill_floor: DEFAULT_PREFILL_FLOOR,
            max_num_seqs: None,
            max_model_len: None,
            device_memory: MemorySize::Percent(DEFAULT_MEMORY_PERCENT),
            host_memory: MemorySize::Percent(DEFAULT_MEMORY_PERCENT),
            watermark_percent: DEFAULT_WATERMARK_PERCENT,
            policy: Policy::Fcfs,
            sjf_ageing: DEFAULT_SJF_AGEING,
            batching: Batching::Continuous,
            reserve_long: 0,
            long_prompt: DEFAULT_LONG_PROMPT,
            slo_itl: None,
            preempt: Preempt::Auto,
            link_bytes_per_second: None,
            prefill_tokens_per_second: None,
            pair_seconds: None,
            park_every: None,
            prefix_cache: true,
            exact_prefix: false,
            checkpoint_every: None,
            checkpoint_dtype: CheckpointDtype::F32,
            audit_percent: 0.0,
            threads: default_threads(),
            device: Device::Cpu,
        }
    }
}

/// A limit that cannot work.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{flag}{}{value}: {reason}", if .value.is_empty() { "" } else { " " })]
pub struct InvalidLimit {
    /// The flag that sets it.
    pub flag: &'static str,
    /// What it was; empty for a switch.
    pub value: String,
    /// Why it cannot work, with a value that would.
    pub reason: String,
}

impl InvalidLimit {
    /// The fault of `flag`.
    pub fn new(
        flag: &'static str,
        value: impl fmt::Display,
        reason: impl Into<String>,
    ) -> InvalidLimit {
        InvalidLimit { flag, value: value.to_string(), reason: reason.into() }
    }
}

impl EngineConfig {
    /// The limits for one sequence at a time of up to `max_model_len` tokens, and memory for no
    /// more.
    pub fn one_sequence(max_model_len: usize) -> EngineConfig {
        EngineConfig {
            max_num_seqs: Some(1),
            max_model_len: Some(max_model_len),
            device_memory: MemorySize::OneSequence,
            host_memory: MemorySize::Bytes(0),
            ..EngineConfig::default()
        }
    }

    /// Sequences that may hold device memory at once.
    pub fn max_num_seqs(&self) -> usize {
        self.max_num_seqs.unwrap_or(DEFAULT_MAX_NUM_SEQS.min(self.max_num_batched_tokens))
    }

    /// Of so many pages of the device, those that admission leaves free while anything runs.
    pub fn watermark_pages(&self, pages: usize) -> usize {
        (pages as f64 * self.watermark_percent / 100.0) as usize
    }

    /// Refuses limits that cannot work, whatever the model and the machine.
    ///
    /// # Errors
    /// The first such limit, with a value that would work.
    pub fn check(&self) -> Result<(), InvalidLimit> {
        let rows = self.max_num_batched_tokens;
        if rows < LEAST_MAX_NUM_BATCHED_TOKENS {
            let reason = "a step must hold one cell of a prompt, 64 tokens or more";
            return Err(InvalidLimit::new("--max-num-batched-tokens", rows, reason));
        }
        let floor = self.prefill_floor;
        if floor < LEAST_MAX_NUM_BATCHED_TOKENS || !floor.is_multiple_of(64) || floor > rows {
            let most = rows / 64 * 64;
            let reason = format!("a multiple of 64 from 64 to {most}, the tokens of a step");
            return Err(InvalidLimit::new("--prefill-floor", floor, reason));
        }
        let sequences = self.max_num_seqs();
        if !(1..=rows).contains(&sequences) {
            let reason = format!(
                "1 to {rows}, the tokens of a step (--max-num-batched-tokens): each sequence that \
                 runs takes one of them"
            );
            return Err(InvalidLimit::new("--max-num-seqs", sequences, reason));
        }
        if let Some(len) = self.max_model_len.filter(|len| *len < 2) {
            let reason = "2 or more: a prompt and an answer of a token each";
            return Err(InvalidLimit::new("--max-model-len", len, reason));
        }
        if !(0.0..=50.0).contains(&self.watermark_percent) {
            let reason = "0 to 50 percent of the pages";
            return Err(InvalidLimit::new("--watermark", self.watermark_percent, reason));
        }
        self.check_order()?;
        for (flag, rate) in [
            ("--link-gbps", self.link_bytes_per_second.map(|bytes| bytes / 1e9)),
            ("--prefill-tokens-per-second", self.prefill_tokens_per_second),
        ] {
            if let Some(rate) = rate.filter(|rate| !rate.is_finite() || *rate <= 0.0) {
                return Err(InvalidLimit::new(flag, rate, "above 0, finite"));
            }
        }
        if self.park_every == Some(0) {
            return Err(InvalidLimit::new("--park-every", 0, "1 or more"));
        }
        if let Some(every) = self.checkpoint_every
            && (every == 0 || !every.is_multiple_of(64))
        {
            let reason = "a multiple of 64, the grid on which states are kept";
            return Err(InvalidLimit::new("--checkpoint-every", every, reason));
        }
        self.check_reuse()?;
        if !(0.0..=100.0).contains(&self.audit_percent) {
            let reason = "0 to 100 percent of the states that are used again";
            return Err(InvalidLimit::new("--audit", self.audit_percent, reason));
        }
        if !(1..=MOST_THREADS).contains(&self.threads) {
            return Err(InvalidLimit::new("--threads", self.threads, "1 to 1024"));
        }
        Ok(())
    }
}

impl EngineConfig {
    /// The limits of what is kept for later requests.
    fn check_reuse(&self) -> Result<(), InvalidLimit> {
        if !self.prefix_cache {
            let every =
                self.checkpoint_every.map(|every| ("--checkpoint-every", every.to_string()));
            let exact = self.exact_prefix.then(|| ("--exact-prefix", String::new()));
            // An audit looks at what comes back from being pushed out as well.
            let dtype = self.checkpoint_dtype.as_str();
            let packed = (self.checkpoint_dtype != CheckpointDtype::F32)
                .then(|| ("--checkpoint-dtype", dtype.to_owned()));
            if let Some((flag, value)) = every.or(exact).or(packed) {
                let reason = "nothing to act on with --no-prefix-cache";
                return Err(InvalidLimit::new(flag, value, reason));
            }
        }
        if self.checkpoint_dtype != CheckpointDtype::F32 {
            let dtype = self.checkpoint_dtype.as_str();
            if self.exact_prefix {
                let reason = "what comes back from it is not exact, and --exact-prefix uses none";
                return Err(InvalidLimit::new("--checkpoint-dtype", dtype, reason));
            }
            if self.host_memory == MemorySize::Bytes(0) {
                let reason = "--host-memory is 0, and only the host packs";
                return Err(InvalidLimit::new("--checkpoint-dtype", dtype, reason));
            }
        }
        Ok(())
    }

    /// The limits of who is served when.
    fn check_order(&self) -> Result<(), InvalidLimit> {
        let ageing = self.sjf_ageing;
        if !ageing.is_finite() || ageing < 0.0 {
            return Err(InvalidLimit::new("--sjf-aging", ageing, "0 or more, finite"));
        }
        let most = self.max_num_seqs() - 1;
        if self.reserve_long > most {
            let reason = format!("0 to {most}: one place at least is for all (--max-num-seqs)");
            return Err(InvalidLimit::new("--reserve-long", self.reserve_long, reason));
        }
        if self.long_prompt == 0 {
            return Err(InvalidLimit::new("--long-prompt", 0, "1 token or more"));
        }
        if self.slo_itl == Some(Duration::ZERO) {
            return Err(InvalidLimit::new("--slo-itl-ms", 0, "above 0"));
        }
        Ok(())
    }
}

/// Threads to compute with when nobody says: one for each core this process may use.
pub fn default_threads() -> usize {
    thread::available_parallelism().map_or(1, usize::from).min(MOST_THREADS)
}

/// Bytes of memory that are free for new allocations, where the system says so.
pub fn available_memory() -> Option<usize> {
    let meminfo = fs::read_to_string("/proc/meminfo").ok()?;
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_that_cannot_work_are_refused_with_one_that_would() {
        let good = EngineConfig { threads: 1, ..EngineConfig::default() };
        assert_eq!(good.check(), Ok(()));
        for (config, message) in [
            (
                EngineConfig { max_num_batched_tokens: 63, ..good },
                "--max-num-batched-tokens 63: a step must hold one cell of a prompt, 64 tokens or \
                 more",
            ),
            (EngineConfig { threads: 0, ..good }, "--threads 0: 1 to 1024"),
            (
                EngineConfig { prefill_floor: 65, ..good },
                "--prefill-floor 65: a multiple of 64 from 64 to 512, the tokens of a step",
            ),
            (
                EngineConfig { max_num_seqs: Some(513), ..good },
                "--max-num-seqs 513: 1 to 512, the tokens of a step (--max-num-batched-tokens): \
                 each sequence that runs takes one of them",
            ),
            (
                EngineConfig { max_model_len: Some(1), ..good },
                "--max-model-len 1: 2 or more: a prompt and an answer of a token each",
            ),
            (
                EngineConfig { watermark_percent: f64::NAN, ..good },
                "--watermark NaN: 0 to 50 percent of the pages",
            ),
            (
                EngineConfig { link_bytes_per_second: Some(0.0), ..good },
                "--link-gbps 0: above 0, finite",
            ),
            (
                EngineConfig {
                    checkpoint_dtype: CheckpointDtype::Int8,
                    exact_prefix: true,
                    ..good
                },
                "--checkpoint-dtype int8: what comes back from it is not exact, and \
                 --exact-prefix uses none",
            ),
            (
                EngineConfig {
                    checkpoint_dtype: CheckpointDtype::Bf16,
                    host_memory: MemorySize::Bytes(0),
                    ..good
                },
                "--checkpoint-dtype bf16: --host-memory is 0, and only the host packs",
            ),
            (
                EngineConfig { exact_prefix: true, prefix_cache: false, ..good },
                "--exact-prefix: nothing to act on with --no-prefix-cache",
            ),
        ] {
            assert_eq!(config.check().unwrap_err().to_string(), message);
        }
        let few = EngineConfig { max_num_batched_tokens: 64, ..good };
        assert_eq!((few.check(), few.max_num_seqs()), (Ok(()), 64));
    }

    #[test]
    fn a_memory_is_bytes_or_a_percentage() {
        let parse = |text: &str| text.parse::<MemorySize>();
        assert_eq!(parse("2GiB"), Ok(MemorySize::Bytes(2 << 30)));
        assert_eq!(parse("0"), Ok(MemorySize::Bytes(0)));
        assert_eq!(parse("12.5%"), Ok(MemorySize::Percent(12.5)));
        for wrong in ["101%", "-1%", "NaN%", "x%", "%", "lots"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
