//! The step's table: what kernels know of a batch, uploaded once a step.
//!
//! One block of bytes at a fixed place, so that a graph captured for a number of rows can be
//! replayed with other sequences in it:
//!
//! ```text
//! | spans          | snapshots | tokens | positions | block tables     |
//! | Step .. Chunk  |           |        |           | the used part    |
//! ```
//!
//! Step spans come first, then Chunk spans, so that a kernel of one form is launched over those
//! alone. Rows that only fill a graph up are Step spans of one row that read [`NO_SLOT`] and write
//! nowhere: kernels give zeros for them and touch no state.

use bytemuck::{Pod, Zeroable};
use cudarc::driver::{CudaEvent, result};

use super::error::Named;
use super::memory::Pinned;
use super::{Cuda, CudaError, DeviceArena, DeviceBuffer, DeviceSlice};
use crate::span::{BLOCK_LEN, CELL_LEN, Form, NO_SLOT, Snapshot, Span, Spans};

/// What [`NO_SLOT`] is on the device, and where padding is written.
const NOWHERE: i64 = -1;

/// [`Span`](crate::Span) as kernels read it (common.cuh has the same).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
struct DeviceSpan {
    read: i64,
    write: i64,
    first_row: i32,
    rows: i32,
    start: i32,
    absorbed_from: i32,
    table: i32,
    table_len: i32,
    snapshots: i32,
    snapshots_len: i32,
    first_chunk: i32,
    unused: i32,
}

/// [`Snapshot`] as kernels read it (common.cuh has the same).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
struct DeviceSnapshot {
    slot: i64,
    after_rows: i32,
    unused: i32,
}

/// The most a step may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Spans, padding among them.
    pub spans: usize,
    /// Rows.
    pub rows: usize,
    /// Snapshots.
    pub snapshots: usize,
    /// Entries of all block tables together.
    pub blocks: usize,
}

/// What is uploaded.
#[derive(Debug, Clone, Copy)]
pub struct Step<'a> {
    /// The spans.
    pub spans: Spans<'a>,
    /// Block tables: byte offsets in the arena, a part of them for each span.
    pub tables: &'a [usize],
    /// Bytes of a block.
    pub block_bytes: usize,
    /// A token for each row.
    pub tokens: &'a [u32],
    /// Rows to compute, at least those of the spans: the rest is padding.
    pub padded_rows: usize,
    /// Where slots and blocks lie.
    pub arena: &'a DeviceArena,
}

/// The table and the memory it is written in before it goes up.
#[derive(Debug)]
pub struct StepTable {
    capacity: Capacity,
    bytes: DeviceBuffer<u8>,
    /// Two, so that a step is written while the one before is on its way.
    staging: [Staging; 2],
    next: usize,
}

#[derive(Debug)]
struct Staging {
    memory: Pinned,
    uploaded: Option<CudaEvent>,
}

/// The spans of the step whose table is on the device.
#[derive(Debug, Clone, Copy)]
pub struct DeviceSpans<'a> {
    /// Addresses of the table's parts.
    pub(super) spans: u64,
    pub(super) snapshots: u64,
    pub(super) tables: u64,
    /// Spans of form Step, padding among them; they come first.
    pub(super) steps: usize,
    /// Spans of form Chunk.
    pub(super) chunks: usize,
    /// Rows of the longest span.
    pub(super) longest: usize,
    /// Chunks of all spans of form Chunk, and of the one that has most.
    pub(super) cells: usize,
    pub(super) most_cells: usize,
    /// Rows of the longest of form Step.
    pub(super) longest_step: usize,
    /// Snapshots of the span that has most.
    pub(super) most_snapshots: usize,
    pub(super) rows: usize,
    pub(super) slot_bytes: usize,
    pub(super) block_bytes: usize,
    /// Positions of the longest sequence, and whether every span's table has its own.
    pub(super) positions_seen: usize,
    pub(super) has_tables: bool,
    pub(super) arena: u64,
    /// A token for each row.
    pub tokens: DeviceSlice<'a, u32>,
    /// The position of each row in its sequence.
    pub positions: DeviceSlice<'a, i32>,
}

impl DeviceSpans<'_> {
    /// Where the spans of form Chunk begin.
    pub(super) fn chunk_spans(&self) -> u64 {
        self.spans + (self.steps * size_of::<DeviceSpan>()) as u64
    }

    /// Chunks of its spans of form Chunk: what working memory is taken for.
    pub fn cells(&self) -> usize {
        self.cells
    }

    /// Rows of the step, padding among them.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Where span `index` is.
    pub(super) fn span_address(&self, index: usize) -> u64 {
        self.spans + (index * size_of::<DeviceSpan>()) as u64
    }
}

/// The spans of a step and the slots they carry, for one part of a slot.
#[derive(Debug)]
pub struct Slots<'a> {
    /// The spans.
    pub spans: &'a DeviceSpans<'a>,
    /// Where slots lie: the arena the step was uploaded for.
    pub arena: &'a mut DeviceArena,
    /// Byte offset of the part in a slot.
    pub at: usize,
}

impl Slots<'_> {
    /// Asserts that the part, `bytes` long, lies inside every slot, and every slot in the arena.
    pub(super) fn check_part(&self, bytes: usize) {
        let (at, slot) = (self.at, self.spans.slot_bytes);
        assert!(at + bytes <= slot, "{bytes} bytes at {at} leave the slot");
        assert!(at.is_multiple_of(16), "a part of a slot at {at} is not aligned to 16 bytes");
        assert_eq!(self.spans.arena, self.arena.address(), "the step is of another arena");
    }
}

/// Byte offsets of the table's parts.
struct Layout {
    snapshots: usize,
    tokens: usize,
    positions: usize,
    tables: usize,
    end: usize,
}

impl Capacity {
    fn layout(&self) -> Layout {
        let after = |at: usize, bytes: usize| (at + bytes).next_multiple_of(64);
        let snapshots = after(0, self.spans * size_of::<DeviceSpan>());
        let tokens = after(snapshots, self.snapshots * size_of::<DeviceSnapshot>());
        let positions = after(tokens, self.rows * size_of::<u32>());
        let tables = after(positions, self.rows * size_of::<i32>());
        let end = after(tables, self.blocks * size_of::<i64>());
        Layout { snapshots, tokens, positions, tables, end }
    }
}

impl Capacity {
    /// Bytes of a table on the device.
    pub fn bytes(&self) -> usize {
        self.layout().end
    }
}

impl StepTable {
    /// A table for steps of at most `capacity`.
    ///
    /// # Errors
    /// When the device has no room or host memory cannot be pinned.
    pub fn new(cuda: &Cuda, capacity: Capacity) -> Result<StepTable, CudaError> {
        let bytes = capacity.layout().end.max(64);
        let staging = || Ok(Staging { memory: Pinned::new(cuda, bytes)?, uploaded: None });
        Ok(StepTable {
            capacity,
            bytes: DeviceBuffer::zeros(cuda, bytes)?,
            staging: [staging()?, staging()?],
            next: 0,
        })
    }

    /// Uploads a step, after the kernels given before.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Panics
    /// When the step is more than the table's capacity, or names what is not in the arena.
    pub fn upload(&mut self, cuda: &Cuda, step: Step<'_>) -> Result<DeviceSpans<'_>, CudaError> {
        let written = Written::new(&self.capacity, step);
        let layout = self.capacity.layout();
        let staging = &mut self.staging[self.next];
        self.next = 1 - self.next;
        if let Some(uploaded) = staging.uploaded.take() {
            uploaded.synchronize().named("waiting for an upload")?;
        }
        let bytes = staging.memory.all();
        let mut put = |at: usize, part: &[u8]| bytes[at..at + part.len()].copy_from_slice(part);
        put(0, bytemuck::cast_slice(&written.spans));
        put(layout.snapshots, bytemuck::cast_slice(&written.snapshots));
        put(layout.tokens, bytemuck::cast_slice(&written.tokens));
        put(layout.positions, bytemuck::cast_slice(&written.positions));
        put(layout.tables, bytemuck::cast_slice(&written.tables));
        let used = layout.tables + size_of_val(written.tables.as_slice());
        cuda.owner.context.bind_to_thread().named("entering the device's context")?;
        let (at, stream) = (self.bytes.address(), cuda.stream.cu_stream());
        // SAFETY: both sides have `layout.end` bytes or more. The staging memory is written again
        // only after the event below.
        let copied = unsafe { result::memcpy_htod_async(at, &bytes[..used], stream) };
        copied.named("uploading a step")?;
        staging.uploaded = Some(cuda.stream.record_event(None).named("recording an event")?);
        Ok(self.spans(step, &written))
    }

    fn spans(&self, step: Step<'_>, written: &Written) -> DeviceSpans<'_> {
        let (at, layout) = (self.bytes.address(), self.capacity.layout());
        let all = self.bytes.slice();
        let longest =
            |spans: &[DeviceSpan]| spans.iter().map(|span| span.rows as usize).max().unwrap_or(0);
        let most_snapshots = written.spans.iter().map(|span| span.snapshots_len as usize).max();
        DeviceSpans {
            spans: at,
            snapshots: at + layout.snapshots as u64,
            tables: at + layout.tables as u64,
            steps: written.steps,
            chunks: written.spans.len() - written.steps,
            cells: written.cells,
            most_cells: written.most_cells,
            longest: longest(&written.spans),
            most_snapshots: most_snapshots.unwrap_or(0),
            longest_step: longest(&written.spans[..written.steps]),
            rows: step.padded_rows,
            slot_bytes: step.spans.slot_bytes(),
            block_bytes: step.block_bytes,
            positions_seen: step.spans.all().iter().map(Span::end).max().unwrap_or(0),
            has_tables: step.spans.all().iter().all(has_table),
            arena: step.arena.address(),
            tokens: all.part(layout.tokens..layout.positions).cast(step.padded_rows),
            positions: all.part(layout.positions..layout.tables).cast(step.padded_rows),
        }
    }
}

impl Drop for StepTable {
    fn drop(&mut self) {
        for staging in &self.staging {
            if let Some(uploaded) = &staging.uploaded {
                // A device that failed has stopped, so it reads nothing any more.
                let _ = uploaded.synchronize();
            }
        }
    }
}

/// A step in the table's form.
struct Written {
    spans: Vec<DeviceSpan>,
    steps: usize,
    cells: usize,
    most_cells: usize,
    snapshots: Vec<DeviceSnapshot>,
    tokens: Vec<u32>,
    positions: Vec<i32>,
    tables: Vec<i64>,
}

impl Written {
    fn new(capacity: &Capacity, step: Step<'_>) -> Written {
        let (rows, arena, slot) = (step.spans.rows(), step.arena.bytes(), step.spans.slot_bytes());
        assert_eq!(rows, step.tokens.len(), "a token for each row");
        assert!(rows <= step.padded_rows, "{rows} rows in {}", step.padded_rows);
        let inside = |at: usize, bytes: usize| {
            let end = at.checked_add(bytes);
            assert!(end.is_some_and(|end| end <= arena), "{bytes} bytes at {at} leave {arena}");
            assert!(at.is_multiple_of(16), "a slot or block at {at} is not aligned to 16 bytes");
            at as i64
        };
        // Slots of no bytes are no places, and nobody asks where they are.
        let place = |at: usize| if slot == 0 { 0 } else { inside(at, slot) };
        let mut positions = vec![0; step.padded_rows];
        let mut of_form = [Vec::new(), Vec::new()];
        let mut snapshots = Vec::new();
        let (mut cells, mut most_cells) = (0, 0);
        for span in step.spans.all() {
            for row in span.batch_rows() {
                positions[row] = index(span.start + row - span.first_row);
            }
            let first = snapshots.len();
            snapshots.extend(step.spans.snapshots(span).iter().map(|snapshot| DeviceSnapshot {
                slot: place(snapshot.slot),
                after_rows: index(snapshot.after_rows),
                unused: 0,
            }));
            assert!(span.table.end <= step.tables.len(), "a block table that is not there");
            let first_chunk = cells;
            if span.form == Form::Chunk {
                let on_grid = |s: &Snapshot| (span.start + s.after_rows).is_multiple_of(CELL_LEN);
                assert!(step.spans.snapshots(span).iter().all(on_grid), "a snapshot off the grid");
                let own = (span.start % CELL_LEN + span.rows).div_ceil(CELL_LEN);
                cells += own;
                most_cells = most_cells.max(own);
            }
            of_form[usize::from(span.form == Form::Chunk)].push(DeviceSpan {
                read: if span.read == NO_SLOT { NOWHERE } else { place(span.read) },
                write: place(span.write),
                first_row: index(span.first_row),
                rows: index(span.rows),
                start: index(span.start),
                absorbed_from: index(span.absorbed_from),
                table: index(span.table.start),
                table_len: index(span.table.len()),
                snapshots: index(first),
                snapshots_len: index(snapshots.len() - first),
                first_chunk: index(first_chunk),
                unused: 0,
            });
        }
        let [mut spans, chunks] = of_form;
        spans.extend((rows..step.padded_rows).map(padding));
        let steps = spans.len();
        spans.extend(chunks);
        let mut tokens = step.tokens.to_vec();
        tokens.resize(step.padded_rows, 0);
        let tables: Vec<_> = step.tables.iter().map(|at| inside(*at, step.block_bytes)).collect();
        let used = [spans.len(), step.padded_rows, snapshots.len(), tables.len()];
        let most = [capacity.spans, capacity.rows, capacity.snapshots, capacity.blocks];
        assert!(used.iter().zip(most).all(|(used, most)| *used <= most), "{used:?} of {most:?}");
        Written { spans, steps, cells, most_cells, snapshots, tokens, positions, tables }
    }
}

/// A row that only fills a graph up.
fn padding(row: usize) -> DeviceSpan {
    let (first_row, rows) = (index(row), 1);
    DeviceSpan { read: NOWHERE, write: NOWHERE, first_row, rows, ..DeviceSpan::zeroed() }
}

/// Whether a span's table has a block for each position.
fn has_table(span: &Span) -> bool {
    span.table.len() * BLOCK_LEN >= span.end()
}

fn index(value: usize) -> i32 {
    i32::try_from(value).expect("a step has fewer than 2^31 rows, positions and blocks")
}
