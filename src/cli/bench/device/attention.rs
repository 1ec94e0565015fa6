//! MLA of generated tokens, absorbed, and of prompts, expanded.

use half::bf16;
use kernels::cuda::attention::DevicePaged;
use kernels::cuda::{Capacity, Cuda, CudaError, DeviceArena, DeviceSpans, Step, StepTable, mla};
use kernels::{
    BLOCK_LEN, CELL_LEN, Compute, Form, KvDtype, KvPlace, Matrix, NO_SLOT, SEGMENT_LEN, Span,
    Spans, Values,
};

use super::lab::{Lab, bf16_noise};
use super::report::{Bench, Cost, Target};
use super::shapes::Shapes;
use crate::models::cuda::EXPANDED;

/// Least share of the copy rate at which latents are read.
const STEP_SHARE: f64 = 0.8;

/// Sequences from which on it is asked for.
const STEP_SHARE_FROM: usize = 32;

fn up(lab: &Lab, shape: kernels::mla::Shape) -> Result<mla::Up, CudaError> {
    let rows = shape.heads * (shape.nope + shape.value_dim);
    let block = bf16_noise(rows * shape.rank, (3.0 / shape.rank as f32).sqrt());
    let values: Vec<bf16> = block.iter().copied().cycle().take(rows * shape.rank).collect();
    mla::Up::new(&lab.cuda, shape, Matrix::new(rows, shape.rank, Values::Bf16(&values)))
}

/// Spans over blocks that lie one behind the other.
struct Paged {
    spans: Vec<Span>,
    tables: Vec<usize>,
    block_bytes: usize,
    rows: usize,
}

impl Paged {
    fn new(spans: Vec<Span>, blocks: usize, block_bytes: usize) -> Paged {
        let rows = spans.last().map_or(0, |span| span.batch_rows().end);
        let tables = (0..blocks).map(|block| block * block_bytes).collect();
        Paged { spans, tables, block_bytes, rows }
    }

    fn host(&self) -> Spans<'_> {
        Spans::new(&self.spans, &[], self.rows, 0)
    }

    fn table(&self, cuda: &Cuda) -> Result<StepTable, CudaError> {
        let (spans, blocks) = (self.spans.len(), self.tables.len());
        StepTable::new(cuda, Capacity { spans, rows: self.rows, snapshots: 0, blocks })
    }

    fn upload<'a>(
        &self,
        cuda: &Cuda,
        table: &'a mut StepTable,
        arena: &DeviceArena,
    ) -> Result<DeviceSpans<'a>, CudaError> {
        let step = Step {
            spans: self.host(),
            tables: &self.tables,
            block_bytes: self.block_bytes,
            tokens: &vec![0; self.rows],
            padded_rows: self.rows,
            arena,
        };
        table.upload(cuda, step)
    }
}

/// One token of each of some sequences that have a long context, a layer after another.
pub fn steps(bench: &mut Bench<'_>, shapes: &Shapes) -> Result<(), CudaError> {
    let (shape, layers, context) = (shapes.mla, shapes.mla_layers, shapes.context);
    let layer_bytes = BLOCK_LEN * shape.row() * size_of::<bf16>();
    let up = up(&bench.lab, shape)?;
    for &sequences in shapes.sequences {
        let blocks = context.div_ceil(BLOCK_LEN);
        let span =
            |i: usize| Span::step(i, context - 1, (NO_SLOT, NO_SLOT), i * blocks..(i + 1) * blocks);
        let paged = Paged::new(
            (0..sequences).map(span).collect(),
            sequences * blocks,
            layers * layer_bytes,
        );
        let lab = &bench.lab;
        let arena = lab.arena(sequences * blocks * layers * layer_bytes)?;
        let mut table = paged.table(&lab.cuda)?;
        let spans = paged.upload(&lab.cuda, &mut table, &arena)?;
        let (queries, values) = (shape.heads * shape.query(), shape.heads * shape.value_dim);
        let q = lab.floats(sequences * queries, (0.0, 1.0))?;
        let mut out = lab.floats(sequences * values, (0.0, 1.0))?;
        let most = mla::Most {
            rows: sequences,
            steps: sequences,
            positions: context,
            expanded: SEGMENT_LEN,
        };
        let mut work = mla::Workspace::new(&lab.cuda, shape, most)?;
        let micros = bench.lab.time(layers, |cuda, i| {
            let place = KvPlace { at: i * layer_bytes, dtype: KvDtype::Bf16 };
            let on = DevicePaged { spans: &spans, arena: &arena, place, most_positions: context };
            let inputs = (q.rows(sequences, queries), &up, Compute::Bf16);
            mla::attend(cuda, inputs, paged.host(), on, &mut work, out.rows_mut(sequences, values))
        })?;
        let up_values = shape.heads * (shape.nope + shape.value_dim) * shape.rank;
        let seen = sequences * context;
        let cost = Cost {
            bytes: 2 * (seen * shape.row() + up_values) + 4 * sequences * (queries + values),
            operations: 2 * seen * shape.heads * (shape.row() + shape.rank)
                + 2 * sequences * up_values,
        };
        let share = Target::CopyShare(STEP_SHARE);
        let targets = if sequences >= STEP_SHARE_FROM { vec![share] } else { Vec::new() };
        bench.row("mla step", format!("x{sequences} @{context}"), micros, cost, targets);
    }
    Ok(())
}

/// A prompt from its first token on.
pub fn prompts(bench: &mut Bench<'_>, shapes: &Shapes) -> Result<(), CudaError> {
    let shape = shapes.mla;
    let block_bytes = BLOCK_LEN * shape.row() * size_of::<bf16>();
    let up = up(&bench.lab, shape)?;
    for &tokens in shapes.prompts {
        let blocks = tokens.div_ceil(BLOCK_LEN);
        let span = Span {
            first_row: 0,
            rows: tokens,
            start: 0,
            form: Form::Chunk,
            absorbed_from: (tokens - 1) / CELL_LEN * CELL_LEN,
            read: NO_SLOT,
            write: NO_SLOT,
            table: 0..blocks,
            snapshots: 0..0,
        };
        let paged = Paged::new(vec![span], blocks, block_bytes);
        let lab = &bench.lab;
        let arena = lab.arena(blocks * block_bytes)?;
        let mut table = paged.table(&lab.cuda)?;
        let spans = paged.upload(&lab.cuda, &mut table, &arena)?;
        let (queries, values) = (shape.heads * shape.query(), shape.heads * shape.value_dim);
        let q = lab.floats(tokens * queries, (0.0, 1.0))?;
        let mut out = lab.floats(tokens * values, (0.0, 1.0))?;
        let most = mla::Most { rows: tokens, steps: 1, positions: tokens, expanded: EXPANDED };
        let mut work = mla::Workspace::new(&lab.cuda, shape, most)?;
        let micros = bench.lab.time(1, |cuda, _| {
            let place = KvPlace { at: 0, dtype: KvDtype::Bf16 };
            let on = DevicePaged { spans: &spans, arena: &arena, place, most_positions: tokens };
            let inputs = (q.rows(tokens, queries), &up, Compute::Bf16);
            mla::attend(cuda, inputs, paged.host(), on, &mut work, out.rows_mut(tokens, values))
        })?;
        let up_values = shape.heads * (shape.nope + shape.value_dim) * shape.rank;
        let pairs = tokens * (tokens + 1) / 2;
        let cost = Cost {
            bytes: 2 * (tokens * shape.row() + up_values) + 4 * tokens * (queries + values),
            operations: 2 * tokens * up_values
                + 2 * pairs * shape.heads * (shape.query() + shape.value_dim),
        };
        bench.row("mla prompt", format!("{tokens}"), micros, cost, Vec::new());
    }
    Ok(())
}
