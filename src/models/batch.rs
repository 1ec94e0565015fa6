//! A step as flat arrays for kernels: nothing here knows a request or a sequence.

use std::collections::HashSet;

use kernels::{Form, Snapshot, Span, Spans};

/// The rows of one step and where their memory lies, in byte offsets of the device arena.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Batch {
    /// Blocks that are copied inside the arena before anything is computed.
    pub copies: Vec<BlockMove>,
    /// Token of each row.
    pub tokens: Vec<u32>,
    /// Spans, in order of their rows; together they cover all rows.
    pub spans: Vec<Span>,
    /// Offsets of blocks; each span has its part.
    pub tables: Vec<usize>,
    /// Snapshots; each span has its part.
    pub snapshots: Vec<Snapshot>,
    /// Whose logits are wanted, in the order they come out.
    pub logits: Vec<LogitSource>,
    /// Tokens of prompts that are to be scored.
    pub scores: Vec<Score>,
    /// What is to be compared afterwards.
    pub compare: Option<StatePair>,
}

/// States to be compared once the rows are computed, by the offsets of their bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatePair {
    /// Blocks of either.
    pub blocks: Vec<(usize, usize)>,
    /// Tokens in them; in the last block only those before it count.
    pub tokens: usize,
    /// Slots of either, if they have bytes.
    pub slots: Option<(usize, usize)>,
}

/// A token to be scored by the logits of the row before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Score {
    /// The row of this batch.
    pub row: usize,
    /// The token.
    pub token: u32,
    /// How many of the likeliest tokens are wanted beside it.
    pub top: usize,
}

/// A block copied inside the arena, by the offsets of its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockMove {
    /// What is read.
    pub source: usize,
    /// What is written.
    pub target: usize,
}

/// A hidden row that logits are computed from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitSource {
    /// A row of this batch.
    Row(usize),
    /// The hidden row kept in the slot at this offset: no forward pass is needed.
    Slot(usize),
}

impl Batch {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Start and rows of each span, and whether they are tokens of a prompt.
    pub fn parts(&self) -> impl Iterator<Item = (usize, usize, bool)> {
        self.spans.iter().map(|span| (span.start, span.rows, span.form == Form::Chunk))
    }

    /// Position of each row in its sequence.
    pub fn positions(&self) -> Vec<usize> {
        self.spans.iter().flat_map(|span| span.start..span.end()).collect()
    }

    /// The spans, checked: what every kernel relies on. Slots have `slot_bytes` bytes; where that
    /// is 0 they are no places, and [`kernels::NO_SLOT`] stands for them.
    ///
    /// # Panics
    /// When spans or slots break a rule of [`Spans`], or logits are asked for that cannot be had:
    /// `lower` has a fault.
    pub fn check(&self, slot_bytes: usize) -> Spans<'_> {
        let spans = Spans::new(&self.spans, &self.snapshots, self.rows(), slot_bytes);
        let targets: HashSet<usize> = self.copies.iter().map(|copy| copy.target).collect();
        assert_eq!(targets.len(), self.copies.len(), "a block is copied to twice");
        assert!(self.copies.iter().all(|copy| !targets.contains(&copy.source)));
        assert!(self.scores.iter().all(|score| score.row < self.rows()));
        for source in &self.logits {
            match source {
                LogitSource::Row(row) => assert!(*row < self.rows()),
                LogitSource::Slot(slot) => {
                    assert!(self.spans.iter().all(|span| span.write != *slot), "a slot in use");
                }
            }
        }
        spans
    }
}
