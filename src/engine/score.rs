//! Probabilities of given tokens: one sequence, without a scheduler.

use std::sync::atomic::{AtomicBool, Ordering};

use kernels::Isa;
use state_pool::{SequenceState, StatePool, Tier};

use super::EngineError;
use super::device::{AnyExecutor, OpenDevice};
use super::lower::lower;
use super::sampler::{SampleError, refuse_broken};
use crate::config::{EngineConfig, LEAST_MAX_NUM_BATCHED_TOKENS};
use crate::models::ModelFiles;
use crate::request::InvalidParam;
use crate::scheduler::{Sequence, SequenceId, StepPlan, TokenBudget, Wanted};

/// Why a plan for the one sequence finds its units.
const FITS: &str = "the pool was made for this sequence";

/// Tells how likely texts are.
#[derive(Debug)]
pub struct Scorer {
    executor: AnyExecutor,
    pool: StatePool,
    limit: usize,
}

impl Scorer {
    /// A scorer on the processor of up to `limit` tokens, with memory for as many.
    ///
    /// # Errors
    /// Too little memory, or weights that cannot be loaded.
    pub fn new(
        files: &ModelFiles,
        (isa, threads): (Isa, usize),
        limit: usize,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Scorer, EngineError> {
        Scorer::on(OpenDevice::Cpu, files, (isa, threads), limit, progress)
    }

    /// As [`Scorer::new`], on an open device.
    ///
    /// # Errors
    /// As [`Scorer::new`], and what a CUDA device does not do.
    pub fn on(
        device: OpenDevice,
        files: &ModelFiles,
        (isa, threads): (Isa, usize),
        limit: usize,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Scorer, EngineError> {
        let config = EngineConfig {
            max_num_batched_tokens: LEAST_MAX_NUM_BATCHED_TOKENS,
            threads,
            ..EngineConfig::one_sequence(limit)
        };
        let limits = device.limits(files, &config)?;
        // There is no host tier to warn of.
        let (executor, _) = device.executor(files, (&limits, isa), progress)?;
        Ok(Scorer { executor, pool: StatePool::new(Tier::Device, limits.device), limit })
    }

    /// The natural-log probability of each token after the first, given those before it.
    ///
    /// Tokens are computed in spans of 64, so that the logits at hand are bounded whatever the
    /// length. `progress` hears the tokens done; `cancel` ends it before its next span.
    ///
    /// # Errors
    /// Fewer than two tokens, a token beyond the vocabulary, more tokens than the limit, broken
    /// logits, or cancellation.
    pub fn score(
        &mut self,
        tokens: Vec<u32>,
        cancel: &AtomicBool,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Vec<f64>, EngineError> {
        self.check(&tokens)?;
        let state = SequenceState::allocate(&mut self.pool, 0).expect(FITS);
        let mut sequence = Sequence::on_device(SequenceId(0), tokens, state);
        let scored = self.score_sequence(&mut sequence, cancel, progress);
        sequence.release(&mut self.pool);
        self.pool.check();
        scored
    }

    fn check(&self, tokens: &[u32]) -> Result<(), EngineError> {
        let refuse = |value: String, allowed: String| {
            Err(EngineError::Param(InvalidParam { field: "tokens", value, allowed }))
        };
        if tokens.len() < 2 {
            return refuse(tokens.len().to_string(), "two or more to score".to_owned());
        }
        let vocab = self.executor.spec().vocab_size;
        if let Some(id) = tokens.iter().find(|id| **id as usize >= vocab) {
            return refuse(format!("token {id}"), format!("tokens 0 to {}", vocab - 1));
        }
        match tokens.len() {
            tokens if tokens > self.limit => {
                Err(EngineError::TooLong { tokens, limit: self.limit })
            }
            _ => Ok(()),
        }
    }

    fn score_sequence(
        &mut self,
        sequence: &mut Sequence,
        cancel: &AtomicBool,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Vec<f64>, EngineError> {
        let spec = self.executor.spec();
        let (vocab, grid) = (spec.vocab_size, spec.grid());
        let mut logprobs = Vec::with_capacity(sequence.tokens().len() - 1);
        let mut plan = StepPlan::default();
        while sequence.computed() < sequence.tokens().len() {
            if cancel.load(Ordering::Relaxed) {
                return Err(EngineError::Cancelled);
            }
            let mut budget = TokenBudget::new(LEAST_MAX_NUM_BATCHED_TOKENS, 0);
            plan.add(sequence, &mut self.pool, &mut budget, grid).expect(FITS);
            plan.spans.iter_mut().for_each(|span| span.wanted = Wanted::All);
            let batch = lower(&plan, |_| sequence, self.pool.layout());
            let logits = self.executor.forward(&batch)?;
            let next = &sequence.tokens()[sequence.computed() + 1..];
            let rows = logits.chunks_exact(vocab).zip(next);
            let start = sequence.computed();
            for (i, (logits, token)) in rows.enumerate() {
                refuse_broken(logits).map_err(|error| broken(start + i + 1, error))?;
                logprobs.push(logprob(logits, *token));
            }
            plan.spans.iter().for_each(|span| sequence.advance(span.rows));
            plan.retire(&mut self.pool);
            progress(sequence.computed());
        }
        Ok(logprobs)
    }
}

fn broken(position: usize, error: SampleError) -> EngineError {
    EngineError::Sample { position, reason: error.to_string() }
}

/// Natural-log probability of `token`: its logit less the logarithm of the sum of exponentials.
fn logprob(logits: &[f32], token: u32) -> f64 {
    let max = logits.iter().fold(f32::NEG_INFINITY, |max, x| max.max(*x));
    let sum: f64 = logits.iter().map(|x| f64::from(x - max).exp()).sum();
    f64::from(logits[token as usize]) - f64::from(max) - sum.ln()
}
