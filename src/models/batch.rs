//! A step as flat arrays for kernels: nothing here knows a request or a sequence.

use std::collections::HashSet;

use kernels::{NO_SLOT, Snapshot, Span};

/// The rows of one step and where their memory lies, in byte offsets of the device arena.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Batch {
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

    /// Position of each row in its sequence.
    pub fn positions(&self) -> Vec<usize> {
        self.spans.iter().flat_map(|span| span.start..span.end()).collect()
    }

    /// Asserts what every kernel relies on: spans cover the rows in order, written slots are
    /// pairwise distinct, and none is read by another span. Slots of zero bytes are no places:
    /// [`NO_SLOT`] stands for them.
    ///
    /// # Panics
    /// When one of these is false: `lower` has a fault.
    pub fn check(&self) {
        let mut row = 0;
        let mut written = HashSet::new();
        for span in &self.spans {
            assert!(span.first_row == row && span.rows > 0, "spans cover the rows in order");
            row += span.rows;
            let snapshots = &self.snapshots[span.snapshots.clone()];
            let kept = snapshots.iter().map(|s| s.slot);
            for slot in kept.chain([span.write]).filter(|slot| *slot != NO_SLOT) {
                assert!(written.insert(slot), "slot at {slot} is written twice");
            }
            let rows = snapshots.iter().map(|s| s.after_rows);
            assert!(rows.clone().is_sorted() && rows.clone().all(|r| (1..=span.rows).contains(&r)));
        }
        assert_eq!(row, self.rows(), "spans cover all rows");
        for span in &self.spans {
            let own = span.read == span.write || span.read == NO_SLOT;
            assert!(own || !written.contains(&span.read), "slot at {} is read late", span.read);
        }
        for source in &self.logits {
            match source {
                LogitSource::Row(row) => assert!(*row < self.rows()),
                LogitSource::Slot(slot) => assert!(!written.contains(slot), "a slot in use"),
            }
        }
    }
}
