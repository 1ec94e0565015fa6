//! An executor whose steps and copies take the time that a profile says, on a clock of its own: the
//! same scheduler, pools and tree decide as with a real one, and nothing is computed.
//!
//! ```text
//! step:  | spans of the batch ............................ | now + step_cost
//! out:   | copies to the host, one behind the other | ...
//! in:    | copies from the host ... |
//! ```
//!
//! Copies overlap the spans, each way on a link of its own. One is reported in the first step that
//! ends after it, so that its units stay held until then. A step with nothing to compute lasts
//! until the next copy ends.

use std::time::Duration;

use rustc_hash::FxHashMap;

use super::hardware::HardwareProfile;
use super::model::ModelProfile;
use super::step::{StepCost, StepModel, StepWork, step_cost};
use crate::engine::executor::{Executor, PlannedDraw};
use crate::engine::link::{Link, way};
use crate::engine::lower::Job;
use crate::models::batch::Batch;
use crate::scheduler::{Direction, SampledToken, SequenceId, StepReport};

/// The token that ends an answer: beyond those of the workloads.
pub const END_OF_ANSWER: u32 = 160_000;

/// Time that only moves when it is told to, in whole nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct VirtualClock(Duration);

impl VirtualClock {
    /// The time.
    pub fn now(self) -> Duration {
        self.0
    }

    /// Lets `seconds` pass.
    pub fn advance(&mut self, seconds: f64) {
        self.0 += nanoseconds(seconds);
    }

    /// Goes to a time that is not past.
    pub fn advance_to(&mut self, time: Duration) {
        self.0 = self.0.max(time);
    }
}

/// How steps and copies are timed.
#[derive(Debug, Clone, PartialEq)]
pub struct Timing {
    /// What runs.
    pub model: ModelProfile,
    /// On what.
    pub hardware: HardwareProfile,
    /// How reads and arithmetic of a step share its time.
    pub step_model: StepModel,
    /// Whether copies run beside the spans; without it, a step waits for them.
    pub overlap_copies: bool,
    /// Whether the contexts of answers that have ended are read until all of their batch have, as
    /// in a request-level batch of fixed shape.
    pub dead_slots_pay: bool,
    /// Numbers of generated rows that a step may have, ascending; each is filled up to the next
    /// one. Empty: any.
    pub buckets: Vec<usize>,
    /// Whether a row that only fills up reads the mean context.
    pub padding_reads: bool,
}

/// What an executor has done.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Totals {
    /// Seconds of steps that computed something, by what they waited for: the device's memory, its
    /// arithmetic, what every step costs.
    pub bound_seconds: [f64; 3],
    /// Bytes that they read and wrote.
    pub bytes: f64,
    /// FLOPs.
    pub flops: f64,
    /// Seconds in which each way of the link copied: out, in.
    pub link_seconds: [f64; 2],
    /// Rows that only filled a bucket.
    pub padding_rows: u64,
}

/// Times what a scheduler plans.
#[derive(Debug)]
pub struct ModelledExecutor {
    timing: Timing,
    clock: VirtualClock,
    link: Link,
    /// A step without work does not last beyond this.
    wake_at: Option<Duration>,
    /// The answer of each request, by its seed.
    answers: FxHashMap<u64, Vec<u32>>,
    /// Contexts of a batch's answers that have ended, in tokens.
    dead_context: f64,
    chunks: Vec<(usize, usize)>,
    last: Option<StepCost>,
    totals: Totals,
}

impl ModelledExecutor {
    /// One at time 0.
    pub fn new(timing: Timing) -> ModelledExecutor {
        ModelledExecutor {
            timing,
            clock: VirtualClock::default(),
            link: Link::default(),
            wake_at: None,
            answers: FxHashMap::default(),
            dead_context: 0.0,
            chunks: Vec::new(),
            last: None,
            totals: Totals::default(),
        }
    }

    /// The answer that the request of this seed will get: its last token is
    /// [`END_OF_ANSWER`], whatever the request allows.
    pub fn expect(&mut self, seed: u64, answer: Vec<u32>) {
        self.answers.insert(seed, answer);
    }

    /// The request of this seed has ended.
    pub fn forget(&mut self, seed: u64) {
        self.answers.remove(&seed);
    }

    /// Goes to a time at which something arrives, with nothing to do before.
    pub fn advance_to(&mut self, time: Duration) {
        self.clock.advance_to(time);
    }

    /// Says when the next request arrives, if one is to come.
    pub fn wake_at(&mut self, time: Option<Duration>) {
        self.wake_at = time;
    }

    /// What the last step cost, if it computed something.
    pub fn last_cost(&self) -> Option<StepCost> {
        self.last
    }

    /// What was done so far.
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// Puts copies on the link.
    fn start(&mut self, jobs: Vec<Job>) {
        for job in jobs {
            let (hardware, bytes) = (&self.timing.hardware, job.bytes() as f64);
            let seconds = match job.direction {
                Direction::Out => hardware.out_seconds(bytes),
                Direction::In => hardware.in_seconds(bytes),
            };
            self.totals.link_seconds[way(job.direction)] += seconds;
            let (time, now) = (nanoseconds(seconds), self.clock.now());
            let end = self.link.carry(job.id, job.direction, time, now);
            if !self.timing.overlap_copies {
                self.clock.advance_to(end);
            }
        }
    }

    /// Lets the time of the spans pass.
    fn compute(&mut self, batch: &Batch) {
        self.chunks.clear();
        let (mut decodes, mut context) = (0, 0.0);
        for (start, rows, is_prompt) in batch.parts() {
            if is_prompt {
                self.chunks.push((start, rows));
                continue;
            }
            decodes += rows;
            // Row i attends to all before it and to itself.
            let (start, rows) = (start as f64, rows as f64);
            context += rows * start + rows * (rows + 1.0) / 2.0;
        }
        // The prompts of the next batch, whatever is there of them already.
        if decodes == 0 && !self.chunks.is_empty() {
            self.dead_context = 0.0;
        }
        let padding = self.padding(decodes);
        self.totals.padding_rows += padding as u64;
        let read = if self.timing.padding_reads { padding as f64 } else { 0.0 };
        let mean = context / decodes.max(1) as f64;
        let work = StepWork {
            decodes,
            decode_context: context,
            chunks: &self.chunks,
            dead_context: self.dead_context + read * mean,
        };
        let Timing { step_model, hardware, model, .. } = &self.timing;
        let cost = step_cost(*step_model, hardware, model, &work);
        self.clock.advance(cost.seconds);
        self.totals.bound_seconds[cost.bound as usize] += cost.seconds;
        self.totals.bytes += cost.bytes;
        self.totals.flops += cost.flops;
        self.last = Some(cost);
    }

    /// Rows that fill up a step of so many generated ones.
    fn padding(&self, decodes: usize) -> usize {
        let buckets = &self.timing.buckets;
        let next = buckets.get(buckets.partition_point(|bucket| *bucket < decodes));
        next.filter(|_| decodes > 0).map_or(0, |bucket| bucket - decodes)
    }

    /// The next token of an answer.
    fn token(&mut self, draw: &PlannedDraw<'_>) -> (SequenceId, u32) {
        let at = draw.draw.tokens.len() - draw.draw.prompt_len;
        let answer = &self.answers[&draw.draw.seed];
        let is_last = at + 1 == answer.len();
        if is_last && self.timing.dead_slots_pay {
            self.dead_context += draw.draw.tokens.len() as f64;
        }
        (draw.sequence, if is_last { END_OF_ANSWER } else { answer[at] })
    }
}

impl Executor for ModelledExecutor {
    fn step(&mut self, batch: &Batch, jobs: Vec<Job>, draws: &[PlannedDraw<'_>]) -> StepReport {
        let start = self.clock.now();
        let mut report = StepReport::default();
        self.start(jobs);
        self.last = None;
        if batch.rows() > 0 {
            self.compute(batch);
        } else if let Some(end) = self.link.first_arrival() {
            self.clock.advance_to(self.wake_at.map_or(end, |wake| end.min(wake)));
        }
        let now = self.clock.now();
        report.finished.extend(self.link.arrived(now));
        report.sampled.reserve(draws.len());
        for draw in draws {
            let (sequence, token) = self.token(draw);
            report.sampled.push(SampledToken { sequence, drawn: Ok(token), logprobs: None });
        }
        report.duration = now - start;
        report
    }

    fn now(&self) -> Duration {
        self.clock.now()
    }
}

/// Whole nanoseconds, the time of more than 584 years being that.
fn nanoseconds(seconds: f64) -> Duration {
    // The cast saturates.
    Duration::from_nanos((seconds * 1e9).round() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::lower::Piece;
    use crate::scheduler::TransferId;

    /// It would be noticed only when the copy ends otherwise.
    #[test]
    fn a_step_that_waits_for_a_copy_ends_when_a_request_arrives() {
        let hardware = HardwareProfile::preset("h100-seed-a").expect("a preset").with_link(1e9);
        let mut executor = ModelledExecutor::new(Timing {
            model: ModelProfile::read("k3").expect("a preset"),
            hardware,
            step_model: StepModel::default(),
            overlap_copies: true,
            dead_slots_pay: false,
            buckets: Vec::new(),
            padding_reads: false,
        });
        let pieces = vec![Piece { source: 0, target: 0, bytes: 1_000_000_000 }];
        let (id, direction) = (TransferId(7), Direction::Out);
        let copy = Job { id, direction, pieces, packed: None };
        executor.wake_at(Some(Duration::from_millis(300)));
        let report = executor.step(&Batch::default(), vec![copy], &[]);
        assert_eq!((executor.now(), report.finished), (Duration::from_millis(300), vec![]));
        executor.wake_at(None);
        let report = executor.step(&Batch::default(), Vec::new(), &[]);
        assert_eq!(report.finished, [id]);
        assert!(executor.now() >= Duration::from_secs(1));
    }
}
