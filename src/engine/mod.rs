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

use kernels::{Arena, Cpu, Isa};
use state_pool::{PoolLayout, SequenceState, StatePool, Tier, TierSizes};

pub use error::EngineError;
use executor::CpuExecutor;
pub use generation::{Generation, Timings};

use crate::config::{EngineConfig, LEAST_MAX_NUM_BATCHED_TOKENS, available_memory};
use crate::models::layout::StateLayout;
use crate::models::{GenerationDefaults, Model, Workspace};
use crate::request::Request;
use crate::scheduler::{Sequence, SequenceId};
use crate::text::Tokenizer;

/// Why a plan for one sequence always finds its units.
const FITS: &str = "the pool was made for this sequence";

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
        mut defaults: GenerationDefaults,
        tokenizer: Option<Arc<Tokenizer>>,
        isa: Isa,
        config: EngineConfig,
    ) -> Result<Engine, EngineError> {
        config.check()?;
        let layout = one_sequence(model.layout(), config.max_model_len)?;
        // No step is longer than the one sequence there is.
        let longest = config.max_model_len.next_multiple_of(LEAST_MAX_NUM_BATCHED_TOKENS);
        let rows = config.max_num_batched_tokens.min(longest);
        let bytes = layout.arena_bytes();
        // Scoring asks for the logits of every row of a cell.
        let logit_rows = LEAST_MAX_NUM_BATCHED_TOKENS;
        let work = Workspace::bytes(model.spec(), rows, logit_rows, config.threads);
        let needed = bytes.saturating_add(work);
        check_memory(model.layout(), config.max_model_len, needed, available_memory())?;
        let cpu = Cpu::new(isa, config.threads).map_err(EngineError::Threads)?;
        // What is made below cannot fail half-way: the system is asked for all of it first.
        drop(Arena::new(needed)?);
        let executor = CpuExecutor::new(cpu, model, (bytes, 0), rows)?;
        add_tokenizers_eos(&mut defaults, tokenizer.as_deref());
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
        Ok(Sequence::on_device(SequenceId(self.next_id), prompt, state))
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
    // The page's size does not depend on the memory, so any layout tells how many are needed; this
    // memory holds two of the largest pages there can be.
    let some_pages = 2 * (16 * model.slot_bytes + model.block_bytes + 4096);
    let page = PoolLayout::new(sizes(some_pages))?;
    let blocks = match model.block_bytes {
        0 => 0,
        _ => tokens.div_ceil(state_pool::BLOCK_LEN),
    };
    let pages = blocks.div_ceil(page.blocks_per_page.max(1)) + usize::from(model.slot_bytes > 0);
    let memory = pages.max(2).checked_mul(page.page_bytes);
    let memory =
        memory.ok_or(EngineError::TooLong { tokens, limit: usize::MAX / page.page_bytes * 64 })?;
    Ok(PoolLayout::new(sizes(memory))?)
}

/// An answer also ends at the tokenizer's own end of sequence, where the model's files name another
/// (Kimi's `[EOS]` beside `<|im_end|>`).
fn add_tokenizers_eos(defaults: &mut GenerationDefaults, tokenizer: Option<&Tokenizer>) {
    if let Some(eos) = tokenizer.and_then(Tokenizer::eos)
        && !defaults.stop_tokens.contains(&eos.id)
    {
        defaults.stop_tokens.push(eos.id);
    }
}

/// Refuses a sequence of `tokens` tokens whose memory, `needed` bytes, is not `available`.
fn check_memory(
    model: &StateLayout,
    tokens: usize,
    needed: usize,
    available: Option<usize>,
) -> Result<(), EngineError> {
    let Some(available) = available else { return Ok(()) };
    if needed <= available {
        return Ok(());
    }
    let per_block = model.block_bytes.max(1);
    let blocks = available.saturating_sub(model.slot_bytes) / per_block;
    let would_fit = blocks * state_pool::BLOCK_LEN;
    Err(EngineError::Memory { tokens, needed, available, would_fit })
}

#[cfg(test)]
mod tests {
    use kernels::Dtype;

    use super::*;

    fn layout() -> StateLayout {
        StateLayout {
            slot_bytes: 8_192,
            block_bytes: 1_024,
            layers: Vec::new(),
            hidden_row: Some(8_000),
            window_dtype: Dtype::F32,
            kv_dtype: Dtype::F32,
        }
    }

    #[test]
    fn a_sequence_beyond_the_machines_memory_is_refused_with_what_would_fit() {
        let pool = one_sequence(&layout(), 6_400).expect("a hundred blocks");
        assert!(pool.pages_for(100, 1).is_some_and(|pages| pages <= pool.pages));
        let check = |available| check_memory(&layout(), 6_400, pool.arena_bytes(), available);
        assert!(check(None).is_ok() && check(Some(pool.arena_bytes())).is_ok());
        let error = check(Some(20_000)).unwrap_err().to_string();
        let needed = pool.arena_bytes();
        assert_eq!(
            error,
            format!(
                "a sequence of 6400 tokens takes {needed} bytes of memory, and 20000 are free; \
                 704 tokens would fit"
            )
        );
    }

    #[test]
    fn a_sequence_beyond_all_memories_is_refused() {
        let huge = StateLayout { block_bytes: 1 << 30, ..layout() };
        let error = one_sequence(&huge, usize::MAX).unwrap_err().to_string();
        assert!(error.contains("18446744073709551615 tokens do not fit"), "{error}");
    }
}
