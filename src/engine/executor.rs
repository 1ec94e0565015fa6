//! Executors: they take a batch and give a report.

use std::time::{Duration, Instant};

use kernels::pack::{pack, unpack};
use kernels::{Arena, ArenaError, Cpu, PackedDtype, Packing};

use super::lower::Job;
use super::mask::PendingMask;
use super::sampler::{Draw, Sampled, Sampler};
use crate::config::LEAST_MAX_NUM_BATCHED_TOKENS;
use crate::models::decoder::Observer;
use crate::models::{Batch, LogitSource, Model, Score, Workspace};
use crate::scheduler::{Direction, SampledToken, SequenceId, StepReport, Verdict};

/// Runs batches and transfers.
pub trait Executor {
    /// Starts `jobs`, runs `batch`, and makes `draws` from its logits. A transfer may be reported
    /// in a later step than the one that started it.
    fn step(&mut self, batch: &Batch, jobs: Vec<Job>, draws: &[PlannedDraw<'_>]) -> StepReport;

    /// Time on its clock, which never goes back: all durations that the engine tells are of it.
    fn now(&self) -> Duration;

    /// Why it is of no use any more, once that is so. What its steps report is worth nothing from
    /// then on, but they end: every draw with an error, every transfer as failed.
    fn fault(&self) -> Option<&str> {
        None
    }
}

/// A draw from a row of a batch's logits.
#[derive(Debug, Clone, Copy)]
pub struct PlannedDraw<'a> {
    /// Who draws.
    pub sequence: SequenceId,
    /// The row of logits; several may draw from one.
    pub row: usize,
    /// What the draw depends on besides; its mask is still to come.
    pub draw: Draw<'a>,
    /// What a constraint allows, if there is one: being computed while the step runs.
    pub mask: Option<&'a PendingMask>,
}

impl PlannedDraw<'_> {
    /// Draws from the row's logits, once the mask is there.
    pub(super) fn from(&self, logits: &[f32], sampler: &mut Sampler) -> SampledToken {
        let mask = self.mask.map(PendingMask::wait).transpose();
        let sampled = mask.map_err(str::to_owned).and_then(|mask| {
            let draw = Draw { mask, ..self.draw };
            sampler.draw(logits, &draw).map_err(|error| error.to_string())
        });
        self.told(sampled)
    }

    /// What is reported of it.
    pub(super) fn told(&self, sampled: Result<Sampled, String>) -> SampledToken {
        let (drawn, logprobs) = match sampled {
            Ok(sampled) => (Ok(sampled.id), sampled.logprobs),
            Err(error) => (Err(error), None),
        };
        SampledToken { sequence: self.sequence, drawn, logprobs }
    }
}

/// Scores tokens by their rows of logits.
pub(super) fn take_scores(
    scores: &[Score],
    logits: &[f32],
    vocab: usize,
    sampler: &mut Sampler,
    report: &mut StepReport,
) {
    for (score, logits) in scores.iter().zip(logits.chunks_exact(vocab)) {
        let scored = sampler.score(logits, score.token, score.top);
        report.scored.push(scored.map_err(|error| error.to_string()));
    }
}

/// Runs batches on the CPU. Owns the model and the arenas of both tiers; a transfer is a copy
/// between them, done before the step computes.
#[derive(Debug)]
pub struct CpuExecutor {
    cpu: Cpu,
    model: Model,
    arena: Arena,
    host: Arena,
    work: Workspace,
    sampler: Sampler,
    /// How checkpoints are packed on the host, if they are.
    packing: Option<Packing>,
    /// When its clock began.
    start: Instant,
}

impl CpuExecutor {
    /// An executor with arenas of so many bytes for batches of up to `most_rows` rows.
    ///
    /// # Errors
    /// When the system refuses an arena.
    pub fn new(
        mut cpu: Cpu,
        model: Model,
        (device_bytes, host_bytes): (usize, usize),
        most_rows: usize,
    ) -> Result<CpuExecutor, ArenaError> {
        cpu.compute = model.spec().compute;
        let work = Workspace::new(model.spec(), most_rows, cpu.gang.threads());
        let (arena, host) = (Arena::new(device_bytes)?, Arena::new(host_bytes)?);
        let (sampler, packing, start) = (Sampler::new(), None, Instant::now());
        Ok(CpuExecutor { cpu, model, arena, host, work, sampler, packing, start })
    }

    /// Packs the states of checkpoints on the host.
    pub fn packing(mut self, dtype: PackedDtype) -> CpuExecutor {
        self.packing = Some(self.model.layout().packing(dtype));
        self
    }

    /// The model it runs.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// What it computes with.
    pub fn cpu(&self) -> &Cpu {
        &self.cpu
    }

    /// The bytes behind the units: to read states in tests.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// The bytes behind the units of device and host, and the working memory, to be poisoned where
    /// something is to prove that it reads none of them.
    pub fn memory_mut(&mut self) -> (&mut Arena, &mut Arena, &mut Workspace) {
        (&mut self.arena, &mut self.host, &mut self.work)
    }

    /// Scores the tokens of prompts that a batch names, a cell of rows at a time: logits of all of
    /// them at once would take more memory than the step itself.
    fn score(&mut self, batch: &Batch, report: &mut StepReport) {
        let vocab = self.model.spec().vocab_size;
        for scores in batch.scores.chunks(LEAST_MAX_NUM_BATCHED_TOKENS) {
            let rows: Vec<_> = scores.iter().map(|score| LogitSource::Row(score.row)).collect();
            let logits = self.model.logits(&self.cpu, &rows, &self.arena, &mut self.work);
            take_scores(scores, logits, vocab, &mut self.sampler, report);
        }
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
    fn step(&mut self, batch: &Batch, jobs: Vec<Job>, draws: &[PlannedDraw<'_>]) -> StepReport {
        let start = Instant::now();
        let mut report = StepReport::default();
        for job in jobs {
            for piece in &job.pieces {
                match job.direction {
                    Direction::Out => {
                        self.host.copy_from(piece.target, &self.arena, piece.source, piece.bytes);
                    }
                    Direction::In => {
                        self.arena.copy_from(piece.target, &self.host, piece.source, piece.bytes);
                    }
                }
            }
            if let Some((source, target)) = job.packed {
                let packing = self.packing.as_ref().expect("only a host that packs is asked to");
                match job.direction {
                    Direction::Out => {
                        pack(&self.cpu, packing, &self.arena, source, &mut self.host, target);
                    }
                    Direction::In => {
                        unpack(&self.cpu, packing, &self.host, source, &mut self.arena, target);
                    }
                }
            }
            report.finished.push(job.id);
        }
        if batch.rows() > 0 || !batch.logits.is_empty() {
            let (cpu, arena, work) = (&self.cpu, &mut self.arena, &mut self.work);
            let logits = self.model.forward(cpu, batch, arena, work, &mut |_, _| {});
            let vocab = self.model.spec().vocab_size;
            for planned in draws {
                let logits = &logits[planned.row * vocab..(planned.row + 1) * vocab];
                report.sampled.push(planned.from(logits, &mut self.sampler));
            }
            self.score(batch, &mut report);
        }
        report.verdict = batch.compare.as_ref().map(|pair| {
            match self.model.first_difference(&self.arena, pair) {
                None => Verdict::Same,
                Some(layer) => Verdict::Differs { layer },
            }
        });
        report.duration = start.elapsed();
        report
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }
}
