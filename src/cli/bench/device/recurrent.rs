//! KDA of generated tokens and of prompts, and the convolution before it.

use kernels::cuda::kda::{DecayGate, Inputs, Output, kda, work_len};
use kernels::cuda::{
    Capacity, Cuda, CudaError, DeviceArena, DeviceBuffer, DeviceSpans, Slots, Step, StepTable, conv,
};
use kernels::kda::{Gate, Shape};
use kernels::norm::GateKind;
use kernels::{CELL_LEN, Form, NO_SLOT, Span, Spans};

use super::lab::Lab;
use super::report::{Bench, Cost, Target};
use super::shapes::Shapes;

/// Least share of the copy rate at which states are read and written.
const STEP_SHARE: f64 = 0.8;

/// Sequences from which on it is asked for; fewer take what a launch takes.
const STEP_SHARE_FROM: usize = 32;

/// Most microseconds of a layer of 32 heads of 128, for so many sequences.
const STEP_MICROS: [(usize, f64); 2] = [(32, 40.0), (128, 158.0)];

/// The rows of a layer, and all that stands around it.
struct Layer {
    shape: Shape,
    rows: usize,
    qkv: DeviceBuffer<f32>,
    decay: DeviceBuffer<f32>,
    beta: DeviceBuffer<f32>,
    gate: DeviceBuffer<f32>,
    a_log: DeviceBuffer<f32>,
    bias: DeviceBuffer<f32>,
    norm: DeviceBuffer<f32>,
    out: DeviceBuffer<f32>,
    work: DeviceBuffer<f32>,
}

impl Layer {
    fn new(lab: &Lab, (heads, dim): (usize, usize), rows: usize) -> Result<Layer, CudaError> {
        let shape = Shape { key_heads: heads, value_heads: heads, key_dim: dim, value_dim: dim };
        let inner = heads * dim;
        Ok(Layer {
            shape,
            rows,
            qkv: lab.floats(rows * shape.qkv_width(), (0.0, 1.0))?,
            decay: lab.floats(rows * inner, (-2.0, 2.0))?,
            beta: lab.floats(rows * heads, (0.0, 2.0))?,
            gate: lab.floats(rows * inner, (0.0, 2.0))?,
            a_log: lab.floats(heads, (0.0, 1.0))?,
            bias: lab.floats(inner, (0.0, 1.0))?,
            norm: lab.floats(dim, (1.0, 0.1))?,
            out: lab.floats(rows * inner, (0.0, 1.0))?,
            work: lab.floats(0, (0.0, 1.0))?,
        })
    }

    fn run(
        &mut self,
        cuda: &Cuda,
        (spans, arena, at): (&DeviceSpans<'_>, &mut DeviceArena, usize),
    ) -> Result<(), CudaError> {
        let Layer { shape, rows, work, out, .. } = self;
        let (shape, rows, inner) = (*shape, *rows, shape.value_heads * shape.value_dim);
        let inputs = Inputs {
            qkv: self.qkv.rows(rows, shape.qkv_width()),
            decay: self.decay.rows(rows, inner),
            gate: Some(DecayGate {
                kind: Gate::Softplus,
                a_log: self.a_log.slice(),
                bias: self.bias.slice(),
            }),
            beta: self.beta.rows(rows, shape.value_heads),
        };
        let output = Output {
            gate: self.gate.rows(rows, inner),
            kind: GateKind::Sigmoid,
            weights: self.norm.slice(),
            eps: 1e-5,
        };
        let slots = Slots { spans, arena, at };
        kda(cuda, shape, inputs, slots, Some(output), work, out.rows_mut(rows, inner))
    }

    /// Bytes of the rows: queries, keys, values, decays, gates, write strengths, outputs.
    fn row_bytes(&self) -> usize {
        let inner = self.shape.value_heads * self.shape.value_dim;
        4 * self.rows * (self.shape.qkv_width() + 3 * inner + self.shape.value_heads)
    }

    fn state_bytes(&self) -> usize {
        4 * self.shape.value_heads * self.shape.head_state()
    }
}

/// A table with spans of slots and no blocks.
fn upload<'a>(
    cuda: &Cuda,
    (spans, slot): (&[Span], usize),
    table: &'a mut StepTable,
    arena: &DeviceArena,
) -> Result<DeviceSpans<'a>, CudaError> {
    let rows = spans.last().map_or(0, |span| span.batch_rows().end);
    let step = Step {
        spans: Spans::new(spans, &[], rows, slot),
        tables: &[],
        block_bytes: 0,
        tokens: &vec![0; rows],
        padded_rows: rows,
        arena,
    };
    table.upload(cuda, step)
}

fn table(cuda: &Cuda, spans: usize, rows: usize) -> Result<StepTable, CudaError> {
    StepTable::new(cuda, Capacity { spans, rows, snapshots: 0, blocks: 0 })
}

/// The convolution and KDA of one token of each of some sequences, a layer after another: states
/// lie in slots as the engine's do.
pub fn steps(bench: &mut Bench<'_>, shapes: &Shapes) -> Result<(), CudaError> {
    for &sequences in shapes.sequences {
        let mut layer = Layer::new(&bench.lab, (shapes.heads, shapes.head_dim), sequences)?;
        let channels = layer.shape.qkv_width();
        let window = (4 * (shapes.conv_width - 1) * channels).next_multiple_of(64);
        let part = layer.state_bytes() + window;
        let slot = shapes.kda_layers * part;
        let spans: Vec<Span> =
            (0..sequences).map(|i| Span::step(i, 1000, (i * slot, i * slot), 0..0)).collect();
        let mut arena = DeviceArena::new(&bench.lab.cuda, sequences * slot)?;
        let mut table = table(&bench.lab.cuda, sequences, sequences)?;
        let spans = upload(&bench.lab.cuda, (&spans, slot), &mut table, &arena)?;
        let layers = shapes.kda_layers;
        let bytes = 2 * sequences * layer.state_bytes() + layer.row_bytes();
        let micros =
            bench.lab.time(layers, |cuda, i| layer.run(cuda, (&spans, &mut arena, i * part)))?;
        let mut targets = Vec::new();
        if sequences >= STEP_SHARE_FROM {
            targets.push(Target::CopyShare(STEP_SHARE));
        }
        let most = STEP_MICROS.iter().find(|(of, _)| *of == sequences);
        targets.extend(most.map(|(_, micros)| Target::Micros(*micros, "80 % of 4.3 TB/s")));
        // The products of a state with a key and a query, and its update.
        let operations = 7 * sequences * layer.shape.value_heads * layer.shape.head_state();
        let case = format!("x{sequences}");
        bench.row("kda step", case.clone(), micros, Cost { bytes, operations }, targets);

        let taps = bench.lab.floats(shapes.conv_width * channels, (0.0, 0.5))?;
        let at = layer.state_bytes();
        let (x, out) = (&layer.qkv, &mut bench.lab.floats(sequences * channels, (0.0, 1.0))?);
        let micros = bench.lab.time(layers, |cuda, i| {
            let taps = conv::Taps { channels, width: shapes.conv_width, values: taps.slice() };
            let slots = Slots { spans: &spans, arena: &mut arena, at: i * part + at };
            let out = out.rows_mut(sequences, channels);
            conv::conv(cuda, x.rows(sequences, channels), taps, slots, out)
        })?;
        let bytes = sequences * 4 * channels * (2 * (shapes.conv_width - 1) + 2);
        let operations = 2 * sequences * channels * shapes.conv_width;
        bench.row("conv step", case, micros, Cost { bytes, operations }, Vec::new());
    }
    Ok(())
}

/// KDA of prompts: those of the model's own heads, and those that others have published.
pub fn prompts(bench: &mut Bench<'_>, shapes: &Shapes) -> Result<(), CudaError> {
    for &tokens in shapes.prompts {
        prompt(bench, (tokens, shapes.heads, 1), shapes.head_dim, Vec::new())?;
    }
    for published in shapes.published {
        let target = Target::Micros(published.micros, published.source);
        let case = (published.tokens, published.heads, published.prompts);
        prompt(bench, case, shapes.head_dim, vec![target])?;
    }
    Ok(())
}

fn prompt(
    bench: &mut Bench<'_>,
    (tokens, heads, prompts): (usize, usize, usize),
    dim: usize,
    targets: Vec<Target>,
) -> Result<(), CudaError> {
    let mut layer = Layer::new(&bench.lab, (heads, dim), tokens)?;
    let (slot, each) = (layer.state_bytes(), tokens / prompts);
    let span = |i: usize| Span {
        first_row: i * each,
        rows: each,
        start: 0,
        form: Form::Chunk,
        absorbed_from: 0,
        read: NO_SLOT,
        write: i * slot,
        table: 0..0,
        snapshots: 0..0,
    };
    let spans: Vec<Span> = (0..prompts).map(span).collect();
    let cuda = &bench.lab.cuda;
    let mut arena = DeviceArena::new(cuda, prompts * slot)?;
    let mut table = table(cuda, prompts, tokens)?;
    let spans = upload(cuda, (&spans, slot), &mut table, &arena)?;
    layer.work = DeviceBuffer::zeros(cuda, work_len(layer.shape, spans.cells()))?;
    let micros = bench.lab.time(1, |cuda, _| layer.run(cuda, (&spans, &mut arena, 0)))?;
    // States with keys, queries and updates; products of rows of a chunk with each other.
    let of_row = 6 * dim * dim + CELL_LEN * 10 * dim;
    let cost = Cost {
        bytes: prompts * layer.state_bytes() + layer.row_bytes(),
        operations: tokens * heads * of_row,
    };
    let case = format!("{prompts} x {each}, {heads} heads");
    bench.row("kda prompt", case, micros, cost, targets);
    Ok(())
}
