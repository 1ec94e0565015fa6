//! The engine: requests in, events out.
//!
//! ```text
//! generate(request) -> [ plan -> lower -> forward -> sample -> commit ] -> Event, Event, ...
//! ```
//!
//! It owns the executor with the bytes, the pool that accounts for them, and the text machinery.
//! One sequence runs at a time; it holds one slot and the blocks of its tokens, and gives them back
//! when its [`Generation`] ends or is dropped.

mod error;
pub mod executor;
mod generation;
pub mod lower;
pub mod sampler;
mod score;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kernels::{Cpu, Isa};
use state_pool::{PoolLayout, SequenceState, StatePool, Tier, TierSizes};

pub use error::EngineError;
use executor::CpuExecutor;
pub use generation::{Generation, Timings};

use crate::config::{EngineConfig, available_memory};
use crate::models::layout::StateLayout;
use crate::models::{GenerationDefaults, Model};
use crate::request::Request;
use crate::scheduler::{Sequence, SequenceId};
use crate::text::Tokenizer;

/// Runs a model.
pub struct Engine {
    executor: CpuExecutor,
    pool: StatePool,
    config: EngineConfig,
    defaults: GenerationDefaults,
    tokenizer: Option<Arc<Tokenizer>>,
    cancelled: Arc<AtomicBool>,
    next_id: u64,
}

impl Engine {
    /// An engine for `model` with memory for one sequence of `config.max_model_len` tokens. Without
    /// a tokenizer events have no text.
    ///
    /// # Errors
    /// A limit that cannot work, or too little memory.
    pub fn new(
        model: Model,
        defaults: GenerationDefaults,
        tokenizer: Option<Arc<Tokenizer>>,
        isa: Isa,
        config: EngineConfig,
    ) -> Result<Engine, EngineError> {
        config.check()?;
        let layout = one_sequence(model.layout(), config.max_model_len)?;
        let bytes = layout.arena_bytes();
        check_memory(model.layout(), &config, bytes)?;
        let cpu = Cpu::new(isa, config.threads);
        let executor = CpuExecutor::new(cpu, model, bytes, config.max_num_batched_tokens)?;
        Ok(Engine {
            executor,
            pool: StatePool::new(Tier::Device, layout),
            config,
            defaults,
            tokenizer,
            cancelled: Arc::new(AtomicBool::new(false)),
            next_id: 0,
        })
    }

    /// The model it runs.
    pub fn model(&self) -> &Model {
        self.executor.model()
    }

    /// Bytes a sequence of `tokens` tokens holds: a slot and whole blocks.
    pub fn state_bytes(&self, tokens: usize) -> usize {
        let layout = self.model().layout();
        layout.slot_bytes + tokens.div_ceil(state_pool::BLOCK_LEN) * layout.block_bytes
    }

    /// A flag that ends what is running, before its next step, when it is set.
    pub fn cancel_flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.cancelled)
    }

    /// Generates an answer. `seed` is used where the request has none.
    ///
    /// # Errors
    /// A request that no engine could honour, or one beyond this engine's limits.
    pub fn generate(&mut self, request: Request, seed: u64) -> Result<Generation<'_>, EngineError> {
        request.check(self.model().spec().vocab_size)?;
        // Of the last token only the id is needed, not its state; the limit counts it all the same.
        self.check_length(request.prompt.len().saturating_add(request.max_tokens))?;
        Generation::new(self, request, seed)
    }

    fn check_length(&self, tokens: usize) -> Result<(), EngineError> {
        let limit = self.config.max_model_len;
        if tokens > limit { Err(EngineError::TooLong { tokens, limit }) } else { Ok(()) }
    }

    fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    fn begin(&mut self, prompt: Vec<u32>) -> Result<Sequence, EngineError> {
        let state = SequenceState::allocate(&mut self.pool, 0)?;
        self.next_id += 1;
        Ok(Sequence::new(SequenceId(self.next_id), prompt, state))
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("model", &self.model().spec().family)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

/// The layout of a pool that just holds one sequence of `tokens` tokens.
fn one_sequence(model: &StateLayout, tokens: usize) -> Result<PoolLayout, EngineError> {
    let sizes = |memory_bytes| TierSizes {
        slot_bytes: model.slot_bytes,
        block_bytes: model.block_bytes,
        memory_bytes,
        // Two: the one a step reads and the one it writes may differ.
        max_zero_byte_slots: 2,
    };
    // The page's size does not depend on the memory, so a first layout tells how many are needed.
    let unit = PoolLayout::new(sizes(usize::MAX >> 20))?;
    let blocks = tokens.div_ceil(state_pool::BLOCK_LEN);
    let too_long = EngineError::TooLong { tokens, limit: unit.max_tokens() };
    let pages = unit.pages_for(blocks, 1).ok_or(too_long)?;
    Ok(PoolLayout::new(sizes(pages.max(2) * unit.page_bytes))?)
}

fn check_memory(
    model: &StateLayout,
    config: &EngineConfig,
    needed: usize,
) -> Result<(), EngineError> {
    let Some(available) = available_memory() else { return Ok(()) };
    if needed <= available {
        return Ok(());
    }
    let per_block = model.block_bytes.max(1);
    let blocks = available.saturating_sub(model.slot_bytes) / per_block;
    let would_fit = blocks * state_pool::BLOCK_LEN;
    Err(EngineError::Memory { tokens: config.max_model_len, needed, available, would_fit })
}
