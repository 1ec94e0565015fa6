//! Probabilities of given tokens.

use super::lower::lower;
use super::sampler::{SampleError, refuse_broken};
use super::{Engine, EngineError, FITS};
use crate::config::LEAST_MAX_NUM_BATCHED_TOKENS;
use crate::request::InvalidParam;
use crate::scheduler::{Sequence, StepPlan, TokenBudget, Wanted};

impl Engine {
    /// The natural-log probability of each token after the first, given those before it.
    ///
    /// Tokens are computed in spans of 64, so that the logits at hand are bounded whatever the
    /// length. `progress` hears the tokens done.
    ///
    /// # Errors
    /// Fewer than two tokens, a token beyond the vocabulary, more tokens than the engine's limit,
    /// or cancellation.
    pub fn score(
        &mut self,
        tokens: Vec<u32>,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Vec<f64>, EngineError> {
        self.check_scored(&tokens)?;
        let mut sequence = self.begin(tokens)?;
        let scored = self.score_sequence(&mut sequence, progress);
        sequence.release(&mut self.pool);
        self.pool.check();
        scored
    }

    fn check_scored(&self, tokens: &[u32]) -> Result<(), EngineError> {
        let refuse = |value: String, allowed: String| {
            Err(EngineError::Param(InvalidParam { field: "tokens", value, allowed }))
        };
        if tokens.len() < 2 {
            return refuse(tokens.len().to_string(), "two or more to score".to_owned());
        }
        let vocab = self.model().spec().vocab_size;
        if let Some(id) = tokens.iter().find(|id| **id as usize >= vocab) {
            return refuse(format!("token {id}"), format!("tokens 0 to {}", vocab - 1));
        }
        self.check_length(tokens.len())
    }

    fn score_sequence(
        &mut self,
        sequence: &mut Sequence,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Vec<f64>, EngineError> {
        let vocab = self.model().spec().vocab_size;
        let grid = self.model().spec().grid();
        let mut logprobs = Vec::with_capacity(sequence.tokens().len() - 1);
        while sequence.computed() < sequence.tokens().len() {
            if self.is_cancelled() {
                return Err(EngineError::Cancelled);
            }
            let mut plan = StepPlan::default();
            let mut budget = TokenBudget::new(LEAST_MAX_NUM_BATCHED_TOKENS, 0);
            plan.add(sequence, &mut self.pool, &mut budget, grid).expect(FITS);
            plan.spans.iter_mut().for_each(|span| span.wanted = Wanted::All);
            let batch = lower(&plan, |_| sequence, self.pool.layout());
            let logits = self.executor.forward(&batch);
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
