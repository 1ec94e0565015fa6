//! The executor over a CUDA device.
//!
//! A step's kernels run on one stream and copies between the tiers on two others, beside them. A
//! copy is reported in the first step that ends after it, so its units stay held until then; what
//! a step computes never waits for one. Draws are made on the host, from as much of their logits as
//! they look at: a greedy one from the likeliest token, one of the first few from those.

use std::time::{Duration, Instant};

use kernels::cuda::sampling::{MOST_FIRST, Verdict};
use kernels::cuda::{
    Cuda, CudaError, DeviceArena, Direction as Way, HostArena, NotPinned, Piece, Transfer,
};

use super::executor::{Executor, PlannedDraw, take_scores};
use super::lower::Job;
use super::sampler::{Needed, SampleError, Sampled, Sampler};
use crate::config::LEAST_MAX_NUM_BATCHED_TOKENS;
use crate::models::cuda::{CudaModel, LoadError, Most, Wanted};
use crate::models::{Batch, LayerFiles, LogitSource, ModelFiles};
use crate::scheduler::{Direction, SampledToken, StepReport, TransferId};

/// Runs batches on a CUDA device. Owns the model and the arenas of both tiers.
#[derive(Debug)]
pub struct CudaExecutor {
    model: CudaModel,
    arena: DeviceArena,
    host: HostArena,
    sampler: Sampler,
    /// Copies between the tiers that are under way.
    transfers: Vec<(TransferId, Transfer)>,
    start: Instant,
    /// What the device said when it failed: nothing that it holds can be trusted then.
    fault: Option<String>,
}

impl CudaExecutor {
    /// An executor with arenas of so many bytes on the device and on the host; the host's is pinned
    /// if it has at most `pinned_budget` bytes and the system agrees, or else the reason is told.
    /// Whether graphs can be relied on is tested; if not, [`CudaModel::graphs_off`] says why.
    ///
    /// # Errors
    /// When the weights cannot be loaded, or the device or the system has no room.
    pub fn new(
        cuda: Cuda,
        (files, weights): (&ModelFiles, LayerFiles<'_>),
        (device_bytes, host_bytes): (usize, usize),
        pinned_budget: usize,
        most: Most,
    ) -> Result<(CudaExecutor, Option<NotPinned>), LoadError> {
        let mut model = CudaModel::new(cuda, files, weights, most)?;
        let mut arena = DeviceArena::new(model.cuda(), device_bytes)?;
        model.test_graphs(&mut arena)?;
        let (host, not_pinned) = HostArena::new(model.cuda(), host_bytes, pinned_budget)?;
        let (sampler, transfers, start) = (Sampler::new(), Vec::new(), Instant::now());
        let fault = None;
        Ok((CudaExecutor { model, arena, host, sampler, transfers, start, fault }, not_pinned))
    }

    /// The model it runs.
    pub fn model(&self) -> &CudaModel {
        &self.model
    }

    /// The model it runs, to turn its graphs off.
    pub fn model_mut(&mut self) -> &mut CudaModel {
        &mut self.model
    }

    /// Makes all bytes of the device's tier those of numbers that are none: for measurements, which
    /// would not notice what was not copied or computed.
    ///
    /// # Errors
    /// When the device fails.
    pub fn poison(&mut self) -> Result<(), CudaError> {
        self.arena.fill(self.model.cuda(), 0xff)
    }

    /// Runs `batch` and returns its logits, `[sources][vocab_size]`.
    ///
    /// # Errors
    /// When the device fails.
    pub fn forward(&mut self, batch: &Batch) -> Result<&[f32], CudaError> {
        self.model.forward(batch, &mut self.arena)
    }

    fn run(
        &mut self,
        batch: &Batch,
        jobs: Vec<Job>,
        draws: &[PlannedDraw<'_>],
    ) -> Result<StepReport, CudaError> {
        let start = Instant::now();
        let mut report = StepReport::default();
        for job in jobs {
            self.begin(job)?;
        }
        if batch.rows() > 0 || !batch.logits.is_empty() {
            let vocab = self.model.spec().vocab_size;
            self.model.run(batch, &mut self.arena)?;
            self.draw(draws, &mut report)?;
            for scores in batch.scores.chunks(LEAST_MAX_NUM_BATCHED_TOKENS) {
                let rows: Vec<_> = scores.iter().map(|score| LogitSource::Row(score.row)).collect();
                let logits = self.model.logits(&rows, &self.arena)?;
                take_scores(scores, logits, vocab, &mut self.sampler, &mut report);
            }
        } else if let Some((_, first)) = self.transfers.first() {
            first.wait()?;
        }
        let mut under_way = Vec::with_capacity(self.transfers.len());
        for (id, transfer) in self.transfers.drain(..) {
            match transfer.is_done()? {
                true => report.finished.push(id),
                false => under_way.push((id, transfer)),
            }
        }
        self.transfers = under_way;
        report.duration = start.elapsed();
        Ok(report)
    }

    /// Makes draws, which are in the order of their rows of logits. Of a row as much comes down as
    /// its draws look at.
    fn draw(
        &mut self,
        draws: &[PlannedDraw<'_>],
        report: &mut StepReport,
    ) -> Result<(), CudaError> {
        let vocab = self.model.spec().vocab_size;
        let needed = |planned: &PlannedDraw<'_>| match planned.draw.needed(vocab) {
            _ if planned.mask.is_some() => Needed::All,
            Needed::First(count) if count > MOST_FIRST => Needed::All,
            needed => needed,
        };
        let needed: Vec<Needed> = draws.iter().map(needed).collect();
        let (mut verdicts, mut first, mut rows) = (false, 0, Vec::new());
        for (planned, needed) in draws.iter().zip(&needed) {
            match *needed {
                Needed::Likeliest => verdicts = true,
                Needed::First(count) => (verdicts, first) = (true, first.max(count)),
                Needed::All => rows.push(planned.row),
            }
        }
        rows.dedup();
        let taken = self.model.take(Wanted { verdicts, first, rows: &rows })?;
        for (planned, needed) in draws.iter().zip(needed) {
            let row = planned.row;
            let likeliest = || match Verdict::from(taken.verdicts[row]) {
                Verdict::Likeliest(id) => Ok(id),
                Verdict::NotANumber(id) => Err(SampleError::NotANumber { id: id as usize }),
                Verdict::Infinite(id) => Err(SampleError::Infinite { id: id as usize }),
                Verdict::NothingLeft => Err(SampleError::NothingLeft),
            };
            let told = |sampled: Result<Sampled, SampleError>| {
                planned.told(sampled.map_err(|error| error.to_string()))
            };
            report.sampled.push(match needed {
                Needed::All => {
                    let at = rows.binary_search(&row).expect("the row was taken");
                    planned.from(&taken.rows[at * vocab..][..vocab], &mut self.sampler)
                }
                Needed::Likeliest => told(likeliest().map(|id| Sampled { id, logprobs: None })),
                Needed::First(count) => told(likeliest().map(|_| {
                    let first = taken.first[row * first..][..count].iter();
                    let first = first.map(|candidate| (candidate.id, candidate.score));
                    self.sampler.draw_first(first, &planned.draw)
                })),
            });
        }
        Ok(())
    }

    /// Starts a copy between the tiers.
    fn begin(&mut self, job: Job) -> Result<(), CudaError> {
        let piece = |piece: &super::lower::Piece| {
            let (device, host) = match job.direction {
                Direction::Out => (piece.source, piece.target),
                Direction::In => (piece.target, piece.source),
            };
            Piece { device, host, bytes: piece.bytes }
        };
        let pieces: Vec<Piece> = job.pieces.iter().map(piece).collect();
        let way = match job.direction {
            Direction::Out => Way::ToHost,
            Direction::In => Way::ToDevice,
        };
        let (arena, host) = (&mut self.arena, &mut self.host);
        let transfer = self.model.cuda().transfer(way, &pieces, arena, host)?;
        self.transfers.push((job.id, transfer));
        Ok(())
    }
}

impl Executor for CudaExecutor {
    fn step(&mut self, batch: &Batch, jobs: Vec<Job>, draws: &[PlannedDraw<'_>]) -> StepReport {
        assert!(batch.compare.is_none(), "states on a device are not audited");
        assert!(jobs.iter().all(|job| job.packed.is_none()), "states of a device are not packed");
        // A step that fails reports none of its transfers itself.
        let under_way = self.transfers.iter().map(|(id, _)| *id);
        let transfers: Vec<TransferId> = under_way.chain(jobs.iter().map(|job| job.id)).collect();
        if self.fault.is_none() {
            match self.run(batch, jobs, draws) {
                Ok(report) => return report,
                Err(error) => self.fault = Some(error.to_string()),
            }
        }
        self.transfers.clear();
        let reason = self.fault.as_deref().unwrap_or_default();
        failed(reason, transfers, batch.scores.len(), draws)
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    fn fault(&self) -> Option<&str> {
        self.fault.as_deref()
    }
}

/// The report of a step in which nothing was done.
fn failed(
    reason: &str,
    transfers: Vec<TransferId>,
    scores: usize,
    draws: &[PlannedDraw<'_>],
) -> StepReport {
    let failed = |draw: &PlannedDraw<'_>| SampledToken {
        sequence: draw.sequence,
        drawn: Err(reason.to_owned()),
        logprobs: None,
    };
    StepReport {
        sampled: draws.iter().map(failed).collect(),
        scored: (0..scores).map(|_| Err(reason.to_owned())).collect(),
        failed: transfers,
        ..StepReport::default()
    }
}
