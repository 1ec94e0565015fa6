//! From what a caller asks for to pools: everything is derived here, once, before any weight is
//! loaded.

use kernels::{Arena, ArenaError, Cpu, PackedDtype};
use state_pool::{LayoutError, PoolLayout, TierSizes};

use super::EngineError;
use super::executor::CpuExecutor;
use crate::config::{
    CheckpointDtype, EngineConfig, InvalidLimit, LEAST_MAX_NUM_BATCHED_TOKENS, MemorySize, Policy,
    available_memory,
};
#[cfg(feature = "cuda")]
use crate::models::cuda::{CudaModel, Most};
use crate::models::layout::StateLayout;
use crate::models::spec::ModelSpec;
use crate::models::{Model, ModelFiles, Workspace};
use crate::scheduler::limits::device_tokens;

/// Memory that the weights leave, in bytes, where that is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FreeMemory {
    /// Both tiers and what computes are in one memory.
    Shared(Option<usize>),
    /// The device has its own, and the host tier is in the system's.
    #[cfg(feature = "cuda")]
    Apart {
        /// Of the device.
        device: usize,
        /// Of the system.
        host: Option<usize>,
    },
}

impl FreeMemory {
    fn of_device(self) -> Option<usize> {
        match self {
            FreeMemory::Shared(free) => free,
            #[cfg(feature = "cuda")]
            FreeMemory::Apart { device, .. } => Some(device),
        }
    }

    fn of_host(self) -> Option<usize> {
        match self {
            FreeMemory::Shared(free) => free,
            #[cfg(feature = "cuda")]
            FreeMemory::Apart { host, .. } => host,
        }
    }
}

/// Parked sequences of a model without recurrent layers, whose slots have no bytes.
const MOST_PARKED: usize = 1 << 20;

/// What an engine works within.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineLimits {
    /// What was asked for.
    pub config: EngineConfig,
    /// Sequences that may hold device memory at once.
    pub max_num_seqs: usize,
    /// Tokens a sequence may reach, prompt and answer together.
    pub max_model_len: usize,
    /// The model's context.
    pub context: usize,
    /// Pages of the device that admission leaves free while anything runs.
    pub watermark_pages: usize,
    /// Rows of the largest step.
    pub most_rows: usize,
    /// Pages of the device tier.
    pub device: PoolLayout,
    /// Pages of the host tier; none when it has no memory.
    pub host: PoolLayout,
}

impl EngineLimits {
    /// The limits of `config` for a model, with `free` bytes of memory left after its weights, if
    /// that is known.
    ///
    /// # Errors
    /// A limit that cannot work, with a value that would; more memory than there is.
    pub fn derive(
        spec: &ModelSpec,
        config: &EngineConfig,
        free: Option<usize>,
    ) -> Result<EngineLimits, EngineError> {
        EngineLimits::derive_in(spec, config, FreeMemory::Shared(free))
    }

    /// As [`EngineLimits::derive`], with the memory of each tier.
    pub(super) fn derive_in(
        spec: &ModelSpec,
        config: &EngineConfig,
        free: FreeMemory,
    ) -> Result<EngineLimits, EngineError> {
        config.check()?;
        let (model, context) = (Model::layout_of(spec), spec.context);
        let max_num_seqs = config.max_num_seqs();
        if let Some(len) = config.max_model_len.filter(|len| *len > context) {
            let reason = format!("the model's context is {context} tokens");
            return Err(InvalidLimit::new("--max-model-len", len, reason).into());
        }
        // A fork may read a slot of no bytes beside the one it writes.
        let sizes = |bytes| tier_sizes(&model, bytes, 2 * max_num_seqs);
        let device = match bytes(config.device_memory, free.of_device(), "--device-memory")? {
            Some(bytes) => layout(sizes(bytes), "--device-memory")?,
            None => one_sequence(&model, config.max_model_len.unwrap_or(context))?,
        };
        let longest = device_tokens(&device);
        if let Some(len) = config.max_model_len.filter(|len| *len > longest) {
            let needed = one_sequence(&model, len)?.arena_bytes();
            let reason = format!(
                "--device-memory holds one sequence of {longest} tokens; this length takes \
                 {needed} bytes"
            );
            return Err(InvalidLimit::new("--max-model-len", len, reason).into());
        }
        let host = match bytes(config.host_memory, free.of_host(), "--host-memory")? {
            Some(0) | None => device.without_memory(),
            Some(bytes) => {
                let packed_bytes =
                    packed_dtype(config).map_or(0, |dtype| model.packed_slot_bytes(dtype));
                let sizes = tier_sizes(&model, bytes, MOST_PARKED);
                layout(TierSizes { packed_bytes, ..sizes }, "--host-memory")?
            }
        };
        let max_model_len = config.max_model_len.unwrap_or(context.min(longest));
        let limits = EngineLimits {
            config: *config,
            max_num_seqs,
            max_model_len,
            context,
            watermark_pages: config.watermark_pages(device.pages),
            most_rows: most_rows(config, max_num_seqs, max_model_len),
            device,
            host,
        };
        match free {
            FreeMemory::Shared(free) => limits.check_memory(spec, free)?,
            #[cfg(feature = "cuda")]
            FreeMemory::Apart { device, host } => limits.check_apart(spec, device, host)?,
        }
        Ok(limits)
    }

    /// The limits of `config` for a model on this machine, as its weights will leave it.
    ///
    /// # Errors
    /// As [`EngineLimits::derive`], and weight files that cannot be read.
    pub fn of_machine(
        files: &ModelFiles,
        config: &EngineConfig,
    ) -> Result<EngineLimits, EngineError> {
        let weights = files.weight_bytes()?.map_or(0, |bytes| bytes.held);
        let free = available_memory().map(|free| free.saturating_sub(weights));
        EngineLimits::derive(&files.spec, config, free)
    }

    /// Whether requests are served by their priorities.
    pub fn has_priorities(&self) -> bool {
        self.config.policy == Policy::Priority
    }

    /// Bytes of the working memory.
    fn work_bytes(&self, spec: &ModelSpec) -> usize {
        // A row of logits for each sequence; scoring asks for those of a whole cell.
        let logit_rows = self.max_num_seqs.max(LEAST_MAX_NUM_BATCHED_TOKENS);
        Workspace::bytes(spec, self.most_rows, logit_rows, self.config.threads)
    }

    /// An executor with the memory of these limits. The system is asked for all of it at once
    /// before any of it is taken, so that nothing fails half-way.
    pub(super) fn executor(&self, cpu: Cpu, model: Model) -> Result<CpuExecutor, ArenaError> {
        let (device, host) = (self.device.arena_bytes(), self.host.arena_bytes());
        let work = self.work_bytes(model.spec());
        drop(Arena::new(device.saturating_add(host).saturating_add(work))?);
        let executor = CpuExecutor::new(cpu, model, (device, host), self.most_rows)?;
        Ok(match packed_dtype(&self.config) {
            Some(dtype) => executor.packing(dtype),
            None => executor,
        })
    }

    /// Refuses limits whose memory is not there.
    fn check_memory(&self, spec: &ModelSpec, free: Option<usize>) -> Result<(), EngineError> {
        let Some(available) = free else { return Ok(()) };
        let (device, host) = (self.device.arena_bytes(), self.host.arena_bytes());
        let work = self.work_bytes(spec);
        let needed = device.saturating_add(host).saturating_add(work);
        if needed <= available {
            return Ok(());
        }
        let what = format!("device {device}, host {host}, working memory {work}");
        let advice = match self.config.device_memory {
            MemorySize::OneSequence => {
                let model = Model::layout_of(spec);
                let rest = available.saturating_sub(work).saturating_sub(model.slot_bytes);
                let blocks = rest / model.block_bytes.max(1);
                let tokens = blocks.saturating_mul(state_pool::BLOCK_LEN);
                format!("a sequence of {tokens} tokens would fit")
            }
            _ if work > device.saturating_add(host) => {
                "give --max-num-batched-tokens or --max-num-seqs less".to_owned()
            }
            _ => {
                let left = available.saturating_sub(work);
                format!("give --device-memory and --host-memory {left} bytes together, or less")
            }
        };
        Err(EngineError::Memory { needed, what, available, advice })
    }

    /// The most that batches of a model on a CUDA device have.
    #[cfg(feature = "cuda")]
    pub fn most(&self) -> Most {
        // Parts of segments take no more than if the sequences shared the device's memory evenly.
        let even = device_tokens(&self.device).div_ceil(self.max_num_seqs);
        Most {
            rows: self.most_rows,
            sequences: self.max_num_seqs,
            positions: self.max_model_len,
            split: even.min(self.max_model_len),
            // A graph of generated tokens has the logits of all its rows, padding too.
            logits: self.max_num_seqs.next_multiple_of(8).max(LEAST_MAX_NUM_BATCHED_TOKENS),
        }
    }

    /// Refuses limits whose memory is not there, on a device with memory of its own.
    #[cfg(feature = "cuda")]
    fn check_apart(
        &self,
        spec: &ModelSpec,
        available: usize,
        of_host: Option<usize>,
    ) -> Result<(), EngineError> {
        let (device, host) = (self.device.arena_bytes(), self.host.arena_bytes());
        let work = CudaModel::work_bytes(spec, self.most());
        let needed = device.saturating_add(work);
        if needed > available {
            let what = format!("on the CUDA device: sequences {device}, working memory {work}");
            let advice = match available.checked_sub(work) {
                Some(left) => format!("give --device-memory {left} bytes, or less"),
                None => "give --max-num-batched-tokens or --max-num-seqs less".to_owned(),
            };
            return Err(EngineError::Memory { needed, what, available, advice });
        }
        if let Some(available) = of_host.filter(|available| host > *available) {
            let what = "on the host: sequences that were pushed out".to_owned();
            let advice = format!("give --host-memory {available} bytes, or less");
            return Err(EngineError::Memory { needed: host, what, available, advice });
        }
        Ok(())
    }

    /// How many sequences of `tokens` tokens run together at most, and which limit says so.
    pub fn concurrency(&self, tokens: usize) -> (usize, &'static str) {
        let by_memory = self.device.max_sequences(tokens, self.watermark_pages).max(1);
        if by_memory < self.max_num_seqs {
            (by_memory, "--device-memory")
        } else {
            (self.max_num_seqs, "--max-num-seqs")
        }
    }
}

/// Bytes of a tier's memory; none for what one sequence takes.
fn bytes(
    size: MemorySize,
    free: Option<usize>,
    flag: &'static str,
) -> Result<Option<usize>, EngineError> {
    match (size, free) {
        (MemorySize::Bytes(bytes), _) => Ok(Some(bytes)),
        (MemorySize::OneSequence, _) => Ok(None),
        (MemorySize::Percent(percent), Some(free)) => {
            Ok(Some((free as f64 * percent / 100.0) as usize))
        }
        (MemorySize::Percent(percent), None) => {
            let reason = "this system does not say how much memory is free; give bytes";
            Err(InvalidLimit::new(flag, format!("{percent}%"), reason).into())
        }
    }
}

/// How states of checkpoints are packed on the host, if they are.
fn packed_dtype(config: &EngineConfig) -> Option<PackedDtype> {
    match config.checkpoint_dtype {
        CheckpointDtype::F32 => None,
        CheckpointDtype::Bf16 => Some(PackedDtype::Bf16),
        CheckpointDtype::Int8 => Some(PackedDtype::Int8),
    }
}

fn tier_sizes(model: &StateLayout, memory_bytes: usize, max_zero_byte_slots: usize) -> TierSizes {
    TierSizes {
        slot_bytes: model.slot_bytes,
        block_bytes: model.block_bytes,
        packed_bytes: 0,
        memory_bytes,
        max_zero_byte_slots,
    }
}

fn layout(sizes: TierSizes, flag: &'static str) -> Result<PoolLayout, EngineError> {
    PoolLayout::new(sizes).map_err(|source| EngineError::Layout { flag, source })
}

/// The layout of a pool that just holds one sequence of `tokens` tokens.
pub(super) fn one_sequence(model: &StateLayout, tokens: usize) -> Result<PoolLayout, EngineError> {
    const FLAG: &str = "--max-model-len";
    // Two slots of no bytes: the one a step reads and the one it writes may differ.
    let sizes = |memory_bytes| tier_sizes(model, memory_bytes, 2);
    // The page's size does not depend on the memory.
    let page = match PoolLayout::new(sizes(0)) {
        Err(LayoutError::TooSmall { needed_bytes, .. }) => layout(sizes(needed_bytes), FLAG)?,
        other => other.map_err(|source| EngineError::Layout { flag: FLAG, source })?,
    };
    let blocks = if model.block_bytes == 0 { 0 } else { tokens.div_ceil(state_pool::BLOCK_LEN) };
    let pages = blocks.div_ceil(page.blocks_per_page.max(1)) + usize::from(model.slot_bytes > 0);
    let memory = pages.checked_mul(page.page_bytes).ok_or(EngineError::TooLong {
        tokens,
        limit: usize::MAX / page.page_bytes * page.blocks_per_page * state_pool::BLOCK_LEN,
    })?;
    layout(sizes(memory), FLAG)
}

/// Rows of the largest step: a budget, which one cell of a prompt may exceed, or all the tokens
/// that all sequences can have.
fn most_rows(config: &EngineConfig, max_num_seqs: usize, max_model_len: usize) -> usize {
    let cell = LEAST_MAX_NUM_BATCHED_TOKENS;
    let all = max_model_len.next_multiple_of(cell).saturating_mul(max_num_seqs);
    // One sequence alone never has generated tokens beside its prompt.
    let beyond = if max_num_seqs == 1 { 0 } else { config.prefill_floor };
    all.min(config.max_num_batched_tokens.saturating_add(beyond))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> ModelSpec {
        let config = include_str!("../../assets/tiny-model/config.json");
        ModelFiles::of_texts(config, None, &[]).expect("the embedded config").spec
    }

    fn derive(config: EngineConfig, free: Option<usize>) -> Result<EngineLimits, String> {
        EngineLimits::derive(&spec(), &config, free).map_err(|error| error.to_string())
    }

    fn base() -> EngineConfig {
        EngineConfig { threads: 1, ..EngineConfig::default() }
    }

    #[test]
    fn a_percentage_is_of_what_is_free_after_the_weights() {
        let limits = derive(base(), Some(1 << 30)).expect("it fits");
        let quarter = (1 << 30) / 4;
        for tier in [&limits.device, &limits.host] {
            assert!(tier.arena_bytes() <= quarter);
            assert!(tier.arena_bytes() > quarter - tier.page_bytes);
        }
        assert_eq!(limits.watermark_pages, limits.device.pages * 2 / 100);
        assert_eq!((limits.max_num_seqs, limits.max_model_len), (256, limits.context));
        let error = derive(base(), None).unwrap_err();
        assert!(error.starts_with("--device-memory 25%: this system does not say"), "{error}");
    }

    #[test]
    fn limits_that_cannot_work_name_a_value_that_would() {
        let small = EngineConfig { device_memory: MemorySize::Bytes(1000), ..base() };
        let error = derive(small, Some(1 << 30)).unwrap_err();
        assert!(error.starts_with("--device-memory: a memory budget of 1000 bytes"), "{error}");
        let needed = error.split_whitespace().rev().nth(1).expect("bytes at the end");
        let needed = needed.parse().expect("a number");
        let least = EngineConfig { device_memory: MemorySize::Bytes(needed), ..base() };
        let limits = derive(least, Some(1 << 30)).expect("the value that works");
        let longest = limits.max_model_len;
        assert!(longest < limits.context);
        let long = EngineConfig { max_model_len: Some(longest + 1), ..least };
        let error = derive(long, Some(1 << 30)).unwrap_err();
        assert!(error.contains(&format!("holds one sequence of {longest} tokens")), "{error}");
        let beyond = EngineConfig { max_model_len: Some(1 << 20), ..base() };
        let error = derive(beyond, Some(1 << 30)).unwrap_err();
        assert!(error.starts_with("--max-model-len 1048576: the model's context is"), "{error}");
        let error = derive(
            EngineConfig { host_memory: MemorySize::Bytes(1 << 40), ..base() },
            Some(1 << 30),
        )
        .unwrap_err();
        assert!(error.contains("are free after the weights"), "{error}");
        assert!(error.contains("give --device-memory and --host-memory"), "{error}");
        let wide = EngineConfig { max_num_batched_tokens: usize::MAX, ..base() };
        let error = derive(wide, Some(1 << 30)).unwrap_err();
        assert!(error.ends_with("give --max-num-batched-tokens or --max-num-seqs less"), "{error}");
    }

    #[test]
    fn memory_for_one_sequence_holds_just_that() {
        let one = EngineConfig { threads: 1, ..EngineConfig::one_sequence(640) };
        let limits = derive(one, Some(1 << 30)).expect("it fits");
        assert!(limits.device.pages_for(10, 1).is_some());
        assert!(limits.device.pages_for(10 + limits.device.blocks_per_page, 1).is_none());
        assert_eq!((limits.host.pages, limits.most_rows, limits.max_num_seqs), (0, 512, 1));
        assert_eq!(limits.concurrency(640), (1, "--max-num-seqs"));
        let error = derive(one, Some(1 << 20)).unwrap_err();
        assert!(error.ends_with("tokens would fit"), "{error}");
        let model = Model::layout_of(&spec());
        let huge = one_sequence(&model, usize::MAX).unwrap_err().to_string();
        assert!(huge.contains("18446744073709551615"), "{huge}");
    }
}
