//! Copies between the tiers beside graphs: what is reported to be over is over.

use std::path::Path;

use deltapool::engine::cuda::CudaExecutor;
use deltapool::engine::executor::Executor;
use deltapool::engine::lower::{Job, Piece};
use deltapool::models::cuda::Most;
use deltapool::models::{Batch, ModelFiles, Score};
use deltapool::request::PromptLogprobs;
use deltapool::scheduler::{Direction, StepReport, TransferId};
use kernels::{NO_SLOT, Span};

use super::cuda_support::{Device, assert_caught, device, with_seeds};
use super::{files, open};

/// Steps in which a copy that was given must be reported.
const PATIENCE: usize = 1000;

/// An executor over four places, each a slot and a block.
struct Places {
    executor: CudaExecutor,
    slot_bytes: usize,
    block_bytes: usize,
}

/// A row: its place, its position and its token.
type Row = (usize, usize, u32);

impl Places {
    fn new(device: &Device, files: &ModelFiles) -> Places {
        let most = Most { rows: 4, sequences: 2, positions: 64, split: 64, logits: 4 };
        let weights = files.rows().expect("it is sound");
        let bytes = 4 << 20;
        let made = CudaExecutor::new(open(device), (files, weights), (bytes, bytes), bytes, most);
        let (executor, _) = made.expect("there is room");
        let layout = executor.model().layout();
        let (slot_bytes, block_bytes) = (layout.slot_bytes, layout.block_bytes);
        Places { executor, slot_bytes, block_bytes }
    }

    fn slot(&self, place: usize) -> usize {
        place * (self.slot_bytes.next_multiple_of(64) + self.block_bytes.next_multiple_of(64))
    }

    fn block(&self, place: usize) -> usize {
        self.slot(place) + self.slot_bytes.next_multiple_of(64)
    }

    fn step(&mut self, rows: &[Row], jobs: Vec<Job>) -> StepReport {
        let mut batch = Batch::default();
        for (row, &(place, start, token)) in rows.iter().enumerate() {
            let write = self.slot(place);
            batch.tokens.push(token);
            batch.tables.push(self.block(place));
            batch.scores.push(Score { row, token, top: 8 });
            let read = if start == 0 { NO_SLOT } else { write };
            batch.spans.push(Span::step(row, start, (read, write), row..row + 1));
        }
        self.executor.step(&batch, jobs, &[])
    }

    /// Copies between a place and the host, while another sequence decodes, until it is reported.
    fn copy(&mut self, direction: Direction, place: usize) {
        let host = [0, self.slot_bytes.next_multiple_of(64)];
        let on = [self.slot(place), self.block(place)];
        let piece = |i: usize, bytes| match direction {
            Direction::Out => Piece { source: on[i], target: host[i], bytes },
            Direction::In => Piece { source: host[i], target: on[i], bytes },
        };
        let pieces = vec![piece(0, self.slot_bytes), piece(1, self.block_bytes)];
        let mut jobs = vec![Job { id: TransferId(7), direction, pieces, packed: None }];
        let over = (0..PATIENCE).any(|_| {
            let report = self.step(&[(1, 0, 9)], std::mem::take(&mut jobs));
            report.finished.contains(&TransferId(7))
        });
        assert!(over, "a copy is never reported");
    }

    /// Scores of a sequence's second token, which may be on the host in between, while its place is
    /// another's, and come back to a third place.
    fn second(&mut self, leaves: bool) -> PromptLogprobs {
        self.step(&[(0, 0, 5), (1, 0, 9)], Vec::new());
        if leaves {
            self.copy(Direction::Out, 0);
            self.step(&[(0, 0, 77), (1, 0, 9)], Vec::new());
            self.step(&[(0, 1, 78), (1, 0, 9)], Vec::new());
            self.copy(Direction::In, 2);
        }
        let place = if leaves { 2 } else { 0 };
        let report = self.step(&[(place, 1, 6), (1, 0, 9)], Vec::new());
        report.scored[0].clone().expect("it is a distribution")
    }
}

#[test]
fn a_sequence_comes_back_as_it_left_whatever_order_events_allow() {
    let Some(device) = device() else { return };
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/models");
    let files = files(&models.join("kimi_linear_tiny"));
    let stayed = Places::new(&device, &files).second(false);
    with_seeds(&device, 4, |seed| {
        let mut places = Places::new(&device, &files);
        assert_eq!(places.second(true), stayed, "order {seed}");
        assert!(places.executor.model().graph_replays() > 4);
    });
}

/// The next graph would read what has not arrived, or write over what has not left.
#[test]
fn a_copy_that_is_reported_too_early_is_caught() {
    let right = "if (event->reached >= event->recorded) return SUCCESS;";
    let name = "transfers::a_sequence_comes_back_as_it_left_whatever_order_events_allow";
    assert_caught(name, ("emu/driver.cpp", right, "return SUCCESS;"), "order ");
}
