//! From a plan to a batch: the last place that knows sequences.

use kernels::{BLOCK_LEN, NO_SLOT, Snapshot, Span};
use state_pool::{PoolLayout, SlotId};

use crate::models::{Batch, LogitSource};
use crate::scheduler::{Form, PlannedSpan, Sequence, SequenceId, StepPlan, Wanted};

const _: () = assert!(BLOCK_LEN == state_pool::BLOCK_LEN, "one block length");

/// The plan as row numbers and byte offsets; `sequence` finds a planned sequence.
///
/// # Panics
/// When the plan breaks a rule of [`Batch::check`], or a span leaves its sequence's blocks.
pub fn lower<'a>(
    plan: &StepPlan,
    sequence: impl Fn(SequenceId) -> &'a Sequence,
    layout: &PoolLayout,
) -> Batch {
    let mut batch = Batch::default();
    for span in &plan.spans {
        add_span(&mut batch, span, sequence(span.sequence), layout);
    }
    batch.check(layout.slot_bytes);
    batch
}

fn add_span(batch: &mut Batch, span: &PlannedSpan, sequence: &Sequence, layout: &PoolLayout) {
    let (start, end) = (span.start, span.start + span.rows);
    let first_row = batch.rows();
    batch.tokens.extend_from_slice(&sequence.tokens()[start..end]);
    let table = batch.tables.len()..batch.tables.len() + end.div_ceil(BLOCK_LEN);
    let blocks = sequence.state().table().ids().take(table.len());
    batch.tables.extend(blocks.map(|id| layout.block_offset(id)));
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
            batch.logits.extend((first_row..first_row + span.rows).map(LogitSource::Row))
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
