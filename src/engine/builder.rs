//! From a model's files and limits to an engine.

use std::sync::Arc;

use kernels::{Compute, Isa, KvDtype, Quantization};
use state_pool::{PoolLayout, StatePool, Tier};

use super::constraint::Grammars;
use super::core::Core;
use super::device::{AnyExecutor, OpenDevice, cpu_executor};
use super::door::Door;
use super::executor::{CpuExecutor, Executor};
use super::limits::EngineLimits;
use super::{Engine, EngineError, probe};
use crate::config::{Device, EngineConfig, MAX_GHOST_TOKENS, Preempt};
use crate::models::ModelFiles;
use crate::scheduler::{Cost, Limits, LongReserve, Placement, Reuse, Scheduler};
use crate::text::Tokenizer;

/// Builds an [`Engine`].
pub struct EngineBuilder<'p> {
    files: ModelFiles,
    tokenizer: Option<Arc<Tokenizer>>,
    config: EngineConfig,
    /// Derived once: what is free changes while we look.
    limits: Option<EngineLimits>,
    isa: Isa,
    /// Opened once, before the limits are derived.
    device: Option<OpenDevice>,
    progress: Box<dyn FnMut(usize, usize) + Send + 'p>,
    warn: Box<dyn FnMut(&str) + Send + 'p>,
}

impl<'p> EngineBuilder<'p> {
    pub(super) fn new(files: ModelFiles) -> EngineBuilder<'p> {
        EngineBuilder {
            files,
            tokenizer: None,
            config: EngineConfig::default(),
            limits: None,
            isa: Isa::best(),
            device: None,
            progress: Box::new(|_, _| {}),
            warn: Box::new(|_| {}),
        }
    }

    /// The tokenizer that events get their text from; without it they have none.
    pub fn tokenizer(mut self, tokenizer: Option<Arc<Tokenizer>>) -> Self {
        self.tokenizer = tokenizer;
        self
    }

    /// The limits; [`EngineConfig::default`] unless told otherwise.
    pub fn config(mut self, config: EngineConfig) -> Self {
        self.config = config;
        self.limits = None;
        self
    }

    /// Where it is computed, as [`EngineConfig::device`] says; on the processor unless told
    /// otherwise.
    pub fn device(mut self, device: Device) -> Self {
        self.config.device = device;
        (self.device, self.limits) = (None, None);
        self
    }

    /// A device that is open already, whatever the config says.
    pub fn on(mut self, device: OpenDevice) -> Self {
        (self.device, self.limits) = (Some(device), None);
        self
    }

    /// The instruction set; the best of this machine unless told otherwise.
    pub fn isa(mut self, isa: Isa) -> Self {
        self.isa = isa;
        self
    }

    /// How the large matrices are held in memory; as stored unless told otherwise. Routers, norms,
    /// convolutions, the embedding and the small projections of KDA and MLA stay as stored in any
    /// case.
    pub fn quantize(mut self, quantization: Option<Quantization>) -> Self {
        self.files.spec.quantize = quantization;
        self.limits = None;
        self
    }

    /// How bf16 weights are multiplied; in f32 unless told otherwise.
    pub fn compute(mut self, compute: Compute) -> Self {
        self.files.spec.compute = compute;
        self.limits = None;
        self
    }

    /// How per-token rows are kept; unless told otherwise, in bf16 where the weights are stored in
    /// 16 bits and in f32 elsewhere.
    pub fn kv_dtype(mut self, dtype: KvDtype) -> Self {
        self.files.spec.kv_dtype = dtype;
        self.limits = None;
        self
    }

    /// Who hears how many bytes of the weights are loaded, of how many.
    pub fn on_load(mut self, progress: impl FnMut(usize, usize) + Send + 'p) -> Self {
        self.progress = Box::new(progress);
        self
    }

    /// Who hears, while it is built, what works and is not as it should be.
    pub fn on_warning(mut self, warn: impl FnMut(&str) + Send + 'p) -> Self {
        self.warn = Box::new(warn);
        self
    }

    /// What the engine will work within, before any weight is loaded. [`EngineBuilder::build`]
    /// keeps to it.
    ///
    /// # Errors
    /// As [`EngineBuilder::build`], but for loading.
    pub fn limits(&mut self) -> Result<EngineLimits, EngineError> {
        if let Some(limits) = &self.limits {
            return Ok(limits.clone());
        }
        let device = match self.device.take() {
            Some(device) => device,
            None => OpenDevice::open(self.config.device)?,
        };
        let device = self.device.insert(device);
        let limits = device.limits(&self.files, &self.config)?;
        Ok(self.limits.insert(limits).clone())
    }

    /// Loads the weights and starts the engine's thread.
    ///
    /// # Errors
    /// A device that is not there, a limit that cannot work, more memory than there is, or weights
    /// that cannot be loaded.
    pub fn build(mut self) -> Result<Engine, EngineError> {
        let limits = self.limits()?;
        Engine::start(limits, self.build_loop()?).map_err(EngineError::Threads)
    }

    /// Loads the weights and makes the engine's loop without its thread: for who steps it.
    ///
    /// # Errors
    /// As [`EngineBuilder::build`].
    pub fn build_loop(self) -> Result<Core<AnyExecutor>, EngineError> {
        self.build_over(|executor| executor)
    }

    /// As [`EngineBuilder::build_loop`], over an executor that `wrap` makes of the device's.
    ///
    /// # Errors
    /// As [`EngineBuilder::build`].
    pub fn build_over<E: Executor>(
        mut self,
        wrap: impl FnOnce(AnyExecutor) -> E,
    ) -> Result<Core<E>, EngineError> {
        let limits = self.limits()?;
        let device = self.device.take().expect("limits are of an open device");
        let made = device.executor(&self.files, (&limits, self.isa), &mut self.progress)?;
        let (executor, warnings) = made;
        warnings.iter().for_each(|warning| (self.warn)(warning));
        let cost = self.cost(executor.cpu(), &limits)?;
        Ok(self.core(&limits, cost, wrap(executor)))
    }

    /// As [`EngineBuilder::build_loop`], on the processor, over an executor that `wrap` makes of
    /// the real one.
    ///
    /// # Errors
    /// As [`EngineBuilder::build`].
    pub fn build_core<E: Executor>(
        mut self,
        wrap: impl FnOnce(CpuExecutor) -> E,
    ) -> Result<Core<E>, EngineError> {
        self = self.on(OpenDevice::Cpu);
        let limits = self.limits()?;
        let executor = cpu_executor(&self.files, (&limits, self.isa), &mut self.progress)?;
        let cost = self.cost(Some(&executor), &limits)?;
        Ok(self.core(&limits, cost, wrap(executor)))
    }

    fn core<E: Executor>(self, limits: &EngineLimits, cost: Cost, executor: E) -> Core<E> {
        let (config, longest, grid) =
            (&limits.config, limits.max_model_len, self.files.spec.grid());
        let rules = scheduler_limits(config, &limits.device, longest, grid, cost);
        let door = self.door(rules, limits);
        let device = StatePool::new(Tier::Device, limits.device.clone());
        let host = StatePool::new(Tier::Host, limits.host.clone());
        let scheduler = Scheduler::new(door.limits.clone(), device, host);
        let mut core = Core::new(Arc::new(door), scheduler, executor);
        if let Some(time) = limits.config.slo_itl {
            core.hold_steps_to(time);
        }
        core
    }

    /// What `--preempt auto` weighs, measured on the processor where nobody gave it.
    fn cost(&self, on: Option<&CpuExecutor>, limits: &EngineLimits) -> Result<Cost, EngineError> {
        let config = &limits.config;
        // Only a host with memory leaves a choice.
        let measured = on.filter(|_| config.preempt == Preempt::Auto && limits.host.pages > 0);
        let link = match (config.link_bytes_per_second, measured) {
            (None, Some(_)) => probe::link_bytes_per_second()?,
            (given, _) => given.unwrap_or(f64::INFINITY),
        };
        let prefill = match (config.prefill_tokens_per_second, measured) {
            (None, Some(on)) => probe::prefill_tokens_per_second(on.cpu(), on.model().spec())?,
            (given, _) => given.unwrap_or(f64::INFINITY),
        };
        Ok(Cost {
            slot_bytes: limits.device.slot_bytes,
            block_bytes: limits.device.block_bytes,
            link_bytes_per_second: link,
            tokens_per_second: prefill,
            pair_seconds: config.pair_seconds.unwrap_or(0.0),
            overlaps: on.is_none(),
        })
    }

    fn door(&self, limits: Limits, engine: &EngineLimits) -> Door {
        let mut stop_tokens = self.files.defaults.stop_tokens.clone();
        // An answer also ends at the tokenizer's own end of sequence, where the model's files name
        // another (Kimi's `[EOS]` beside `<|im_end|>`).
        if let Some(eos) = self.tokenizer.as_deref().and_then(Tokenizer::eos)
            && !stop_tokens.contains(&eos.id)
        {
            stop_tokens.push(eos.id);
        }
        Door {
            limits,
            device: engine.device.clone(),
            vocab_size: self.files.spec.vocab_size,
            tokenizer: self.tokenizer.clone(),
            grammars: Grammars::new(self.tokenizer.clone(), &stop_tokens),
            stop_tokens,
        }
    }
}

/// The limits of a scheduler over a device of this layout, for a model with this grid.
pub fn scheduler_limits(
    config: &EngineConfig,
    device: &PoolLayout,
    max_model_len: usize,
    grid: usize,
    cost: Cost,
) -> Limits {
    Limits {
        max_num_batched_tokens: config.max_num_batched_tokens,
        prefill_floor: config.prefill_floor,
        max_num_seqs: config.max_num_seqs(),
        max_model_len,
        watermark_pages: config.watermark_pages(device.pages),
        grid,
        policy: config.policy,
        sjf_ageing: config.sjf_ageing,
        batching: config.batching,
        reserve_long: (config.reserve_long > 0).then_some(LongReserve {
            places: config.reserve_long,
            prompt_tokens: config.long_prompt,
        }),
        preempt: config.preempt,
        cost,
        reuse: config.prefix_cache.then(|| Reuse {
            exact_only: config.exact_prefix,
            placement: Placement { every: config.checkpoint_every, ..Placement::default() },
            keep_turn_ends: true,
            grid_tokens: grid,
            max_ghost_tokens: MAX_GHOST_TOKENS,
        }),
        audit_percent: config.audit_percent,
        park_every: config.park_every,
    }
}

impl std::fmt::Debug for EngineBuilder<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineBuilder")
            .field("files", &self.files)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}
