//! What became of the steps: a record of each of the last ones, and their spread since the start.

use std::time::Duration;

use crate::scheduler::{Blocked, Direction, Form, StepPlan};

/// Steps that are remembered one by one.
pub const STEPS_KEPT: usize = 512;

/// One step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StepRecord {
    /// Its number, the first's is 1.
    pub number: u64,
    /// From its plan to its last event.
    pub duration: Duration,
    /// Tokens of prompts that it computed.
    pub prompt_tokens: usize,
    /// Generated tokens that it computed.
    pub generated_tokens: usize,
    /// Sequences of which it computed generated tokens.
    pub decoding: usize,
    /// Copies of a sequence or a checkpoint to the host that it started.
    pub copies_out: usize,
    /// Copies from the host that it started.
    pub copies_in: usize,
    /// Blocks that it copied inside the device, since they were shared and about to be written.
    pub block_copies: usize,
    /// What a sequence that wanted onto the device did not find there.
    pub blocked: Blocked,
}

/// What a step computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepKind {
    /// Prompts alone.
    Prefill,
    /// Generated tokens alone.
    Decode,
    /// Both.
    Mixed,
    /// Nothing: it copied, or drew tokens from states that were there.
    Copy,
}

impl StepKind {
    /// All kinds, in the order of [`StepTotals::seconds`].
    pub const ALL: [StepKind; 4] =
        [StepKind::Prefill, StepKind::Decode, StepKind::Mixed, StepKind::Copy];

    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            StepKind::Prefill => "prefill",
            StepKind::Decode => "decode",
            StepKind::Mixed => "mixed",
            StepKind::Copy => "copy",
        }
    }
}

impl StepRecord {
    /// The record of a step that is about to run.
    pub(super) fn of(number: u64, plan: &StepPlan, blocked: Blocked) -> StepRecord {
        let block_copies = plan.copies.len();
        let mut record = StepRecord { number, blocked, block_copies, ..StepRecord::default() };
        for span in &plan.spans {
            match span.form {
                Form::Chunk => record.prompt_tokens += span.rows,
                Form::Step => {
                    record.generated_tokens += span.rows;
                    record.decoding += 1;
                }
            }
        }
        for transfer in &plan.transfers {
            match transfer.direction {
                Direction::Out => record.copies_out += 1,
                Direction::In => record.copies_in += 1,
            }
        }
        record
    }

    /// What it computed.
    pub fn kind(&self) -> StepKind {
        match (self.prompt_tokens > 0, self.generated_tokens > 0) {
            (true, false) => StepKind::Prefill,
            (false, true) => StepKind::Decode,
            (true, true) => StepKind::Mixed,
            (false, false) => StepKind::Copy,
        }
    }
}

/// How values are spread over fixed bounds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Distribution {
    /// How many were at most each bound and above the one before; last, those above all bounds.
    pub counts: [u64; BOUNDS + 1],
    /// All of them together.
    pub sum: f64,
}

const BOUNDS: usize = 13;

impl Distribution {
    fn note(&mut self, bounds: &[f64; BOUNDS], value: f64) {
        self.counts[bounds.partition_point(|bound| *bound < value)] += 1;
        self.sum += value;
    }
}

/// The steps since the start.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StepTotals {
    /// Tokens of a step, over [`StepTotals::TOKENS`].
    pub tokens: Distribution,
    /// Seconds of a step over [`StepTotals::SECONDS`], by [`StepKind::ALL`].
    pub seconds: [Distribution; StepKind::ALL.len()],
}

impl StepTotals {
    /// Bounds of the tokens of a step.
    pub const TOKENS: [f64; BOUNDS] =
        [1., 8., 16., 32., 64., 128., 256., 512., 1024., 2048., 4096., 8192., 16384.];

    /// Bounds of the duration of a step, in seconds.
    pub const SECONDS: [f64; BOUNDS] =
        [1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1., 3., 10.];

    pub(super) fn note(&mut self, record: &StepRecord) {
        let tokens = record.prompt_tokens + record.generated_tokens;
        self.tokens.note(&StepTotals::TOKENS, tokens as f64);
        let seconds = record.duration.as_secs_f64();
        self.seconds[record.kind() as usize].note(&StepTotals::SECONDS, seconds);
    }
}

/// The last steps, in a ring that takes no memory once it is made.
#[derive(Debug)]
pub(super) struct StepRing {
    records: Vec<StepRecord>,
    /// Steps so far.
    count: usize,
}

impl StepRing {
    pub(super) fn new() -> StepRing {
        StepRing { records: vec![StepRecord::default(); STEPS_KEPT], count: 0 }
    }

    pub(super) fn push(&mut self, record: StepRecord) {
        self.records[self.count % STEPS_KEPT] = record;
        self.count += 1;
    }

    /// Of the last `most` steps, those of a number above `after`, oldest first.
    pub(super) fn since(&self, after: u64, most: usize) -> Vec<StepRecord> {
        let first = self.count.saturating_sub(most.min(STEPS_KEPT));
        let kept = (first..self.count).map(|index| self.records[index % STEPS_KEPT]);
        kept.filter(|record| record.number > after).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(ring: &StepRing, after: u64, most: usize) -> Vec<u64> {
        ring.since(after, most).iter().map(|record| record.number).collect()
    }

    #[test]
    fn the_ring_keeps_the_last_steps_in_their_order() {
        let mut ring = StepRing::new();
        assert_eq!(numbers(&ring, 0, 10), [] as [u64; 0]);
        for number in 1..=(STEPS_KEPT as u64 + 3) {
            ring.push(StepRecord { number, ..StepRecord::default() });
        }
        let all = numbers(&ring, 0, usize::MAX);
        assert_eq!((all[0], all.len()), (4, STEPS_KEPT));
        assert_eq!(numbers(&ring, 0, 2), [514, 515]);
        assert_eq!(numbers(&ring, 513, 10), [514, 515]);
        assert_eq!(numbers(&ring, 515, 10), [] as [u64; 0]);
    }

    #[test]
    fn a_value_on_a_bound_counts_below_it() {
        let mut totals = StepTotals::default();
        let record = StepRecord {
            duration: Duration::from_secs(11),
            generated_tokens: 8,
            ..StepRecord::default()
        };
        totals.note(&record);
        assert_eq!((totals.tokens.counts[1], totals.tokens.sum), (1, 8.0));
        let decode = totals.seconds[StepKind::Decode as usize];
        assert_eq!((decode.counts[BOUNDS], decode.sum), (1, 11.0));
        let place = |kind: StepKind| StepKind::ALL.iter().position(|other| *other == kind);
        assert!(StepKind::ALL.iter().all(|kind| place(*kind) == Some(*kind as usize)));
    }
}
