//! From a plan to a batch and its copies: the last place that knows sequences.

use kernels::{BLOCK_LEN, NO_SLOT, Snapshot, Span};
use state_pool::{PoolLayout, SlotId};

use crate::models::{Batch, BlockMove, LogitSource, Score, StatePair};
use crate::scheduler::{
    Direction, Form, PlannedSpan, Sequence, SequenceId, SlotCopy, StepPlan, Transfer, TransferId,
    Wanted,
};

const _: () = assert!(BLOCK_LEN == state_pool::BLOCK_LEN, "one block length");

/// A transfer as pieces of bytes, from one arena to the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Job {
    /// The transfer.
    pub id: TransferId,
    /// Which way.
    pub direction: Direction,
    /// Its pieces.
    pub pieces: Vec<Piece>,
    /// Offsets of a slot that is packed or unpacked on the way: source, target.
    pub packed: Option<(usize, usize)>,
}

impl Job {
    /// Bytes of its pieces; a slot that is packed on the way is none of them.
    pub fn bytes(&self) -> usize {
        self.pieces.iter().map(|piece| piece.bytes).sum()
    }
}

/// Bytes copied from one arena to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Offset in the arena that is read.
    pub source: usize,
    /// Offset in the arena that is written.
    pub target: usize,
    /// Bytes.
    pub bytes: usize,
}

/// The plan's spans as row numbers and byte offsets; `sequence` finds a planned sequence.
///
/// # Panics
/// When the plan breaks a rule of [`Batch::check`], or a span leaves its sequence's blocks.
pub fn lower<'a>(
    plan: &StepPlan,
    sequence: impl Fn(SequenceId) -> &'a Sequence,
    layout: &PoolLayout,
) -> Batch {
    let mut batch = Batch::default();
    batch.copies.extend(plan.copies.iter().map(|copy| BlockMove {
        source: layout.block_offset(copy.source),
        target: layout.block_offset(copy.target),
    }));
    for span in &plan.spans {
        add_span(&mut batch, span, sequence(span.sequence), layout);
    }
    batch.compare = plan.comparison.as_ref().map(|comparison| StatePair {
        blocks: comparison
            .blocks
            .iter()
            .map(|(one, other)| (layout.block_offset(*one), layout.block_offset(*other)))
            .collect(),
        tokens: comparison.tokens,
        slots: (layout.slot_bytes > 0).then(|| {
            let (one, other) = comparison.slot;
            (layout.slot_offset(one), layout.slot_offset(other))
        }),
    });
    for hit in &plan.hits {
        batch.logits.push(LogitSource::Slot(layout.slot_offset(hit.slot)));
    }
    batch.check(layout.slot_bytes);
    batch
}

/// The plan's transfers between an arena of layout `device` and one of layout `host`.
pub fn lower_transfers(plan: &StepPlan, device: &PoolLayout, host: &PoolLayout) -> Vec<Job> {
    plan.transfers.iter().map(|transfer| lower_transfer(transfer, device, host)).collect()
}

fn lower_transfer(transfer: &Transfer, device: &PoolLayout, host: &PoolLayout) -> Job {
    let (from, to) = match transfer.direction {
        Direction::Out => (device, host),
        Direction::In => (host, device),
    };
    let blocks = transfer.blocks.iter().map(|(source, target)| Piece {
        source: from.block_offset(*source),
        target: to.block_offset(*target),
        bytes: device.block_bytes,
    });
    let mut packed = None;
    let slot = match transfer.slot.filter(|_| device.slot_bytes > 0) {
        Some(SlotCopy::Plain(source, target)) => Some(Piece {
            source: from.slot_offset(source),
            target: to.slot_offset(target),
            bytes: device.slot_bytes,
        }),
        Some(SlotCopy::Pack(source, target)) => {
            packed = Some((from.slot_offset(source), to.packed_offset(target)));
            None
        }
        Some(SlotCopy::Unpack(source, target)) => {
            packed = Some((from.packed_offset(source), to.slot_offset(target)));
            None
        }
        None => None,
    };
    let pieces = slot.into_iter().chain(blocks).collect();
    Job { id: transfer.id, direction: transfer.direction, pieces, packed }
}

fn add_span(batch: &mut Batch, span: &PlannedSpan, sequence: &Sequence, layout: &PoolLayout) {
    let (start, end) = (span.start, span.start + span.rows);
    let first_row = batch.rows();
    batch.tokens.extend_from_slice(&sequence.tokens()[start..end]);
    if let Some((top, positions)) = sequence.scores(span) {
        let tokens = sequence.tokens()[positions].iter().enumerate();
        batch.scores.extend(tokens.map(|(i, &token)| Score { row: first_row + i, token, top }));
    }
    let table = batch.tables.len()..batch.tables.len() + end.div_ceil(BLOCK_LEN);
    let state = sequence.state().expect("a planned sequence is on the device");
    batch.tables.extend(state.table().ids().take(table.len()).map(|id| layout.block_offset(id)));
    assert_eq!(batch.tables.len(), table.end, "a span leaves its blocks");
    let snapshots = batch.snapshots.len()..batch.snapshots.len() + span.snapshots.len();
    batch.snapshots.extend(span.snapshots.iter().map(|(after_rows, slot)| Snapshot {
        after_rows: *after_rows,
        slot: slot_offset(layout, *slot),
    }));
    match span.wanted {
        Wanted::None => {}
        Wanted::Last => batch.logits.push(LogitSource::Row(first_row + span.rows - 1)),
        Wanted::All => {
            batch.logits.extend((first_row..first_row + span.rows).map(LogitSource::Row));
        }
    }
    batch.spans.push(Span {
        first_row,
        rows: span.rows,
        start,
        form: match span.form {
            Form::Chunk => kernels::Form::Chunk,
            Form::Step => kernels::Form::Step,
        },
        absorbed_from: absorbed_from(span, sequence.prompt_len()),
        read: span.read.map_or(NO_SLOT, |slot| slot_offset(layout, slot)),
        write: slot_offset(layout, span.write),
        table,
        snapshots,
    });
}

/// Where a slot lies; nowhere when it has no bytes.
fn slot_offset(layout: &PoolLayout, slot: SlotId) -> usize {
    if layout.slot_bytes == 0 { NO_SLOT } else { layout.slot_offset(slot) }
}

/// A prompt row below the last cell border of its prompt is computed expanded, every other row
/// absorbed (DESIGN.md rule 3).
fn absorbed_from(span: &PlannedSpan, prompt_len: usize) -> usize {
    match span.form {
        Form::Step => 0,
        Form::Chunk => {
            let border = prompt_len / kernels::CELL_LEN * kernels::CELL_LEN;
            border.saturating_sub(span.start).min(span.rows)
        }
    }
}
