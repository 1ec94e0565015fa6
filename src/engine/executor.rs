//! Executors: they take a batch and give a report.

use std::time::Instant;

use kernels::{Arena, ArenaError, Cpu};

use super::sampler::{Draw, SampleError, Sampler};
use crate::models::decoder::Observer;
use crate::models::{Batch, Model, Workspace};
use crate::scheduler::{SampledToken, SequenceId, StepReport};

/// Runs batches.
pub trait Executor {
    /// Runs `batch` and draws a token from each row of its logits: draw `i` belongs to row `i`.
    ///
    /// # Errors
    /// When a draw is impossible: the model's logits are broken.
    fn step(
        &mut self,
        batch: &Batch,
        draws: &[(SequenceId, Draw<'_>)],
    ) -> Result<StepReport, SampleError>;
}

/// Runs batches on the CPU. Owns the model and the device arena.
#[derive(Debug)]
pub struct CpuExecutor {
    cpu: Cpu,
    model: Model,
    arena: Arena,
    work: Workspace,
    sampler: Sampler,
}

impl CpuExecutor {
    /// An executor with an arena of `arena_bytes` for batches of up to `most_rows` rows.
    ///
    /// # Errors
    /// When the system refuses the arena.
    pub fn new(
        cpu: Cpu,
        model: Model,
        arena_bytes: usize,
        most_rows: usize,
    ) -> Result<CpuExecutor, ArenaError> {
        let work = Workspace::new(model.spec(), most_rows, cpu.gang.threads());
        let arena = Arena::new(arena_bytes)?;
        Ok(CpuExecutor { cpu, model, arena, work, sampler: Sampler::new() })
    }

    /// The model it runs.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The bytes behind the units: to read states in tests.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// The bytes behind the units and the working memory, to be poisoned by tests.
    pub fn memory_mut(&mut self) -> (&mut Arena, &mut Workspace) {
        (&mut self.arena, &mut self.work)
    }

    /// Runs `batch` and returns its logits, `[sources][vocab_size]`.
    pub fn forward(&mut self, batch: &Batch) -> &[f32] {
        self.forward_observed(batch, &mut |_, _| {})
    }

    /// [`CpuExecutor::forward`], while `observe` hears the residual stream after each layer.
    pub fn forward_observed(&mut self, batch: &Batch, observe: Observer<'_>) -> &[f32] {
        self.model.forward(&self.cpu, batch, &mut self.arena, &mut self.work, observe)
    }
}

impl Executor for CpuExecutor {
    fn step(
        &mut self,
        batch: &Batch,
        draws: &[(SequenceId, Draw<'_>)],
    ) -> Result<StepReport, SampleError> {
        let start = Instant::now();
        let vocab = self.model.spec().vocab_size;
        let logits =
            self.model.forward(&self.cpu, batch, &mut self.arena, &mut self.work, &mut |_, _| {});
        assert_eq!(logits.len(), draws.len() * vocab, "one draw per row of logits");
        let mut sampled = Vec::with_capacity(draws.len());
        for (logits, (sequence, draw)) in logits.chunks_exact(vocab).zip(draws) {
            let drawn = self.sampler.draw(logits, draw)?;
            let (id, logprobs) = (drawn.id, drawn.logprobs);
            sampled.push(SampledToken { sequence: *sequence, id, logprobs });
        }
        Ok(StepReport { sampled, duration: start.elapsed() })
    }
}
