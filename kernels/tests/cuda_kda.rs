//! Kimi Delta Attention on a device against its definition, and against itself under other
//! batches and other cuts.

mod cuda_support;

use cuda_support::with_seeds;
use cuda_support::{Device, Sequences, Values, assert_caught, assert_close, device, sanitized};
use kernels::cuda::kda::{DecayGate, Inputs, Output, kda, work_len};
use kernels::cuda::{Cuda, DeviceArena, DeviceBuffer, Slots};
use kernels::kda::{Gate, Shape};
use kernels::norm::GateKind;
use kernels::{Arena, Compute, Form, Rows, RowsMut};

const SHAPES: [Shape; 3] = [
    Shape { key_heads: 2, value_heads: 2, key_dim: 128, value_dim: 128 },
    Shape { key_heads: 2, value_heads: 4, key_dim: 32, value_dim: 72 },
    Shape { key_heads: 1, value_heads: 2, key_dim: 44, value_dim: 20 },
];

/// A layer's weights and the rows of a batch.
struct Layer {
    shape: Shape,
    gate: Option<Gate>,
    output: Option<GateKind>,
    a_log: Vec<f32>,
    bias: Vec<f32>,
    weights: Vec<f32>,
}

/// The rows of a batch.
#[derive(Clone)]
struct Batch {
    qkv: Vec<f32>,
    decay: Vec<f32>,
    beta: Vec<f32>,
    output_gate: Vec<f32>,
}

const EPS: f32 = 1e-5;
/// Byte offset of the state in a slot.
const AT: usize = 48;

impl Layer {
    fn new(shape: Shape, gate: Option<Gate>, per_head: bool, output: Option<GateKind>) -> Layer {
        let mut values = Values::new(5);
        let decays = shape.value_heads * if per_head { 1 } else { shape.key_dim };
        Layer {
            shape,
            gate,
            output,
            a_log: values.take(shape.value_heads),
            bias: values.take(decays),
            weights: values.take(shape.value_dim),
        }
    }

    fn decays(&self) -> usize {
        self.bias.len()
    }

    fn slot_bytes(&self) -> usize {
        (AT + 4 * self.shape.value_heads * self.shape.head_state()).next_multiple_of(64)
    }

    fn outputs(&self) -> usize {
        self.shape.value_heads * self.shape.value_dim
    }

    fn batch(&self, rows: usize, values: &mut Values) -> Batch {
        let mut take = |width: usize, scale: f32, shift: f32| -> Vec<f32> {
            values.take(rows * width).iter().map(|x| x * scale + shift).collect()
        };
        let (decay, beta) = match self.gate {
            // Some channels forget within a row, as a softplus gate lets them.
            Some(_) => (take(self.decays(), 6.0, -3.0), take(self.shape.value_heads, 2.0, 0.0)),
            None => (take(self.decays(), 0.2, -0.2), take(self.shape.value_heads, 0.5, 0.5)),
        };
        let qkv = take(self.shape.qkv_width(), 1.0, 0.0);
        Batch { qkv, decay, beta, output_gate: take(self.outputs(), 2.0, 0.0) }
    }

    /// The definition: outputs, and the arena changed.
    fn naive(&self, sequences: &Sequences, batch: &Batch, arena: &mut Arena) -> Vec<f32> {
        let (shape, rows) = (self.shape, sequences.rows);
        let mut decay = batch.decay[..rows * self.decays()].to_vec();
        let mut beta = batch.beta[..rows * shape.value_heads].to_vec();
        if let Some(gate) = self.gate {
            let raw = RowsMut::new(&mut decay, self.decays());
            kernels::kda::naive::gate(gate, &self.a_log, &self.bias, raw);
            let beta = RowsMut::new(&mut beta, shape.value_heads);
            kernels::activation::naive::sigmoid(beta);
        }
        let inputs = kernels::kda::Inputs {
            qkv: Rows::new(&batch.qkv[..rows * shape.qkv_width()], shape.qkv_width()),
            decay: Rows::new(&decay, self.decays()),
            beta: Rows::new(&beta, shape.value_heads),
        };
        let states = kernels::kda::States { spans: sequences.spans(), arena, at: AT };
        let mut out = vec![0.0; rows * self.outputs()];
        kernels::kda::naive::kda(shape, inputs, states, RowsMut::new(&mut out, self.outputs()));
        let Some(kind) = self.output else { return out };
        let mut normed = vec![0.0; out.len()];
        let gate = &batch.output_gate[..out.len()];
        kernels::norm::naive::rms_norm_gated(
            Rows::new(&out, shape.value_dim),
            &self.weights,
            EPS,
            Rows::new(gate, shape.value_dim),
            kind,
            RowsMut::new(&mut normed, shape.value_dim),
        );
        normed
    }

    /// The device: outputs with those of `padding` rows, and the arena changed.
    fn on_device(
        &self,
        cuda: &Cuda,
        sequences: &Sequences,
        padding: usize,
        batch: &Batch,
        arena: &mut DeviceArena,
    ) -> Vec<f32> {
        let (shape, rows) = (self.shape, sequences.rows + padding);
        let on = |values: &[f32]| DeviceBuffer::of(cuda, values).expect("room");
        let (qkv, decay, beta) = (on(&batch.qkv), on(&batch.decay), on(&batch.beta));
        let (a_log, bias, weights) = (on(&self.a_log), on(&self.bias), on(&self.weights));
        let output_gate = on(&batch.output_gate);
        let mut out = on(&vec![7.0; rows * self.outputs()]);
        let mut table = sequences.table(cuda, padding);
        let spans = &sequences.upload(cuda, &mut table, arena, padding);
        let len = work_len(shape, spans.cells());
        let mut work = on(&vec![f32::NAN; len]);
        let gate =
            self.gate.map(|kind| DecayGate { kind, a_log: a_log.slice(), bias: bias.slice() });
        let inputs = Inputs {
            qkv: qkv.rows(rows, shape.qkv_width()),
            decay: decay.rows(rows, self.decays()),
            gate,
            beta: beta.rows(rows, shape.value_heads),
        };
        let output = self.output.map(|kind| Output {
            gate: output_gate.rows(rows, self.outputs()),
            kind,
            weights: weights.slice(),
            eps: EPS,
        });
        let slots = Slots { spans, arena, at: AT };
        let out_rows = out.rows_mut(rows, self.outputs());
        kda(cuda, shape, inputs, slots, output, &mut work, out_rows).expect("it launches");
        out.read(cuda).expect("it ran")
    }

    fn compare(&self, device: &Device, list: &[(usize, usize, Form)], tolerance: f32) {
        let cuda = &device.cuda;
        let (sequences, padding) = (Sequences::new(list, self.slot_bytes()), 2);
        let mut values = Values::new(11);
        let batch = self.batch(sequences.rows + padding, &mut values);
        let before = values.take(sequences.bytes / 4);
        let mut arena = Arena::new(sequences.bytes).expect("room");
        arena.f32s_mut(0, before.len()).copy_from_slice(&before);
        let mut on = DeviceArena::new(cuda, sequences.bytes).expect("room");
        on.write(cuda, 0, bytemuck::cast_slice(&before)).expect("it copies");
        let want = self.naive(&sequences, &batch, &mut arena);
        let got = self.on_device(cuda, &sequences, padding, &batch, &mut on);
        let (rows, padded) = got.split_at(want.len());
        assert!(padded.iter().all(|x| *x == 0.0), "padding rows are zero");
        assert_close("outputs", rows, &want, tolerance);
        let after = read(cuda, &on, sequences.bytes);
        let want = arena.f32s(0, after.len());
        for (i, (got, want)) in after.iter().zip(want).enumerate() {
            let near = (got - want).abs() <= tolerance * (1.0 + want.abs());
            assert!(near, "state value {i}: {got} for {want}");
        }
        // What no span writes has its bits.
        let untouched = (0..after.len()).filter(|i| want[*i].to_bits() == before[*i].to_bits());
        assert!(untouched.clone().count() > 64);
        assert!(untouched.clone().all(|i| after[i].to_bits() == before[i].to_bits()));
    }
}

fn read(cuda: &Cuda, arena: &DeviceArena, bytes: usize) -> Vec<f32> {
    let mut values = vec![0.0; bytes / 4];
    arena.read(cuda, 0, bytemuck::cast_slice_mut(&mut values)).expect("it ran");
    values
}

const BOUNDED: Gate = Gate::Bounded { lower: -5.0 };

#[test]
fn steps_are_their_definition() {
    let Some(device) = device() else { return };
    let list = [(70, 1, Form::Step), (0, 3, Form::Step), (126, 4, Form::Step)];
    with_seeds(&device, 2, |_| {
        for shape in SHAPES {
            for (gate, per_head, output) in [
                (Some(Gate::Softplus), false, Some(GateKind::Sigmoid)),
                (Some(BOUNDED), false, Some(GateKind::Sigmoid)),
                (Some(Gate::Softplus), true, Some(GateKind::Silu)),
                (None, false, None),
            ] {
                Layer::new(shape, gate, per_head, output).compare(&device, &list, 2e-5);
            }
        }
    });
}

#[test]
fn chunks_are_their_definition() {
    let Some(device) = device() else { return };
    let list = [(0, 65, Form::Chunk), (64, 1, Form::Chunk), (40, 90, Form::Chunk)];
    with_seeds(&device, 2, |_| {
        for shape in SHAPES {
            for (gate, per_head, output) in [
                (Some(Gate::Softplus), false, Some(GateKind::Sigmoid)),
                (Some(BOUNDED), false, None),
                (Some(Gate::Softplus), true, Some(GateKind::Silu)),
                (None, false, None),
            ] {
                Layer::new(shape, gate, per_head, output).compare(&device, &list, 2e-5);
            }
        }
    });
}

/// 10 bits of mantissa: a product is off by up to 1e-3, a sum of many by less.
#[test]
fn chunks_on_tensor_cores_are_their_definition_to_tf32() {
    let Some(mut device) = device() else { return };
    device.cuda.compute = Compute::Bf16;
    let list = [(0, 65, Form::Chunk), (64, 1, Form::Chunk), (40, 90, Form::Chunk)];
    with_seeds(&device, 2, |_| {
        for shape in SHAPES {
            let gate = Some(Gate::Softplus);
            Layer::new(shape, gate, false, None).compare(&device, &list, 2e-3);
        }
    });
}

#[test]
fn both_forms_in_a_step_are_their_definition() {
    let Some(device) = device() else { return };
    let list = [
        (70, 1, Form::Step),
        (128, 64, Form::Chunk),
        (10, 2, Form::Step),
        (63, 5, Form::Chunk),
        (0, 1, Form::Step),
        (0, 20, Form::Chunk),
    ];
    let gate = Some(Gate::Softplus);
    let layer = Layer::new(SHAPES[0], gate, false, Some(GateKind::Sigmoid));
    with_seeds(&device, 3, |_| layer.compare(&device, &list, 2e-5));
}

/// Without the bound on the exponents these overflow: the softplus gate has none. The sums of
/// log-decays reach thousands here, and are rounded as such.
#[test]
fn a_gate_that_forgets_everything_gives_numbers() {
    let Some(device) = device() else { return };
    let mut layer = Layer::new(SHAPES[1], Some(Gate::Softplus), false, None);
    layer.a_log.fill(4.0);
    layer.bias.fill(3.0);
    layer.compare(&device, &[(0, 130, Form::Chunk)], 1e-4);
}

/// A sequence alone and cut at each grid position it passes has the bits it has among others and
/// uncut; a row of form Step those it has when it is replayed in a run.
#[test]
fn bits_depend_on_nothing_but_the_sequence() {
    let Some(mut device) = device() else { return };
    for compute in [Compute::F32, Compute::Bf16] {
        device.cuda.compute = compute;
        same_bits(&device.cuda);
    }
}

fn same_bits(cuda: &Cuda) {
    let gate = Some(Gate::Softplus);
    let layer = Layer::new(SHAPES[0], gate, false, Some(GateKind::Sigmoid));
    let (start, rows, steps) = (40, 24 + 64 + 30, 3);
    let mut values = Values::new(3);
    let own = layer.batch(rows + steps, &mut values);

    // Among others, prompt and answer in one step each.
    let crowd = [(0, 70, Form::Chunk), (start, rows, Form::Chunk), (5, 2, Form::Step)];
    let whole = run(cuda, &layer, &own, &crowd, 1, 0, None);
    let answer = (start + rows, steps, Form::Step);
    let replayed = run(cuda, &layer, &own, &[answer], 0, rows, Some(&whole.state));

    // Alone, cut on the grid, and row by row.
    let mut state = None;
    let mut outputs = Vec::new();
    for (from, len) in [(0, 24), (24, 64), (88, 30)] {
        let span = (start + from, len, Form::Chunk);
        let part = run(cuda, &layer, &own, &[span], 0, from, state.as_deref());
        outputs.extend(part.outputs);
        state = Some(part.state);
    }
    assert!(outputs == whole.outputs, "a prompt's outputs");
    assert!(state.as_ref() == Some(&whole.state), "a prompt's state");
    let mut outputs = Vec::new();
    for i in 0..steps {
        let span = (start + rows + i, 1, Form::Step);
        let part = run(cuda, &layer, &own, &[span], 0, rows + i, state.as_deref());
        outputs.extend(part.outputs);
        state = Some(part.state);
    }
    assert!(outputs == replayed.outputs, "an answer's outputs");
    assert!(state == Some(replayed.state), "an answer's state");
}

/// Every kernel of the file, with a shape that fills its tiles and one that does not, the last
/// state at the very end of the arena.
#[test]
fn sanitizers_find_nothing() {
    let Some(mut device) = device() else { return };
    let list = [(70, 2, Form::Step), (63, 70, Form::Chunk), (9, 1, Form::Step)];
    for compute in [Compute::F32, Compute::Bf16] {
        device.cuda.compute = compute;
        let cuda = &device.cuda;
        sanitized(&device, || {
            for (key_dim, value_dim) in [(64, 32), (44, 20)] {
                let shape = Shape { key_heads: 1, value_heads: 1, key_dim, value_dim };
                let gate = Some(Gate::Softplus);
                let layer = Layer::new(shape, gate, false, Some(GateKind::Sigmoid));
                let sequences = Sequences::new(&list, layer.slot_bytes());
                let batch = layer.batch(sequences.rows, &mut Values::new(1));
                let mut arena = DeviceArena::new(cuda, sequences.bytes - 64).expect("room");
                layer.on_device(cuda, &sequences, 0, &batch, &mut arena);
            }
        });
    }
}

#[test]
fn a_missing_barrier_is_caught() {
    let change = ("cuda/kda.cu", "__syncthreads();  // vectors are there", "");
    assert_caught("steps_are_their_definition", change, "apart");
}

/// The numbers can be right by luck: only the race detector is sure to see it.
#[test]
fn a_barrier_missing_before_memory_is_used_again_is_caught() {
    let change = ("cuda/kda.cu", "__syncthreads();  // factors are read", "");
    assert_caught("sanitizers_find_nothing", change, "data race");
}

#[test]
fn a_copy_that_is_not_waited_for_is_caught() {
    let change = ("cuda/kda.cu", "copy_async_wait(1);", "copy_async_wait(2);");
    assert_caught("chunks_are_their_definition", change, "apart");
}

#[test]
fn a_buffer_filled_again_too_early_is_caught() {
    let early = "__syncthreads();  // the state is there; the rest is read";
    let change = ("cuda/kda.cu", early, "");
    assert_caught("sanitizers_find_nothing", change, "data race");
}

/// What is read there is used by nobody, so only the bounds detector sees it.
#[test]
fn a_read_past_the_end_is_caught() {
    let right = "bool there = state && v < a.value_dim && c < a.key_dim;";
    let change = ("cuda/kda.cu", right, "bool there = state && c < a.key_dim;");
    assert_caught("sanitizers_find_nothing", change, "heap-buffer-overflow");
}

#[test]
fn a_state_one_place_off_is_caught() {
    let right = "return (float*)(a.arena + slot + a.at) + (int64_t)head";
    let change =
        ("cuda/kda.cu", right, "return (float*)(a.arena + slot + a.at) + 4 + (int64_t)head");
    assert_caught("steps_are_their_definition", change, "apart");
}

/// Reading before decaying still gives fluent text.
#[test]
fn a_read_before_the_decay_is_caught() {
    let right = "x[i] = mul4(x[i], decay[i]);\n      read = dot4(x[i], k[i], read);";
    let wrong = "read = dot4(x[i], k[i], read);\n      x[i] = mul4(x[i], decay[i]);";
    let change = ("cuda/kda.cu", right, wrong);
    assert_caught("steps_are_their_definition", change, "apart");
}

struct Ran {
    outputs: Vec<u32>,
    state: Vec<u32>,
}

/// Runs a step in which span `which` takes the rows of `own` from `from` on and starts from
/// `state`, or from nothing.
fn run(
    cuda: &Cuda,
    layer: &Layer,
    own: &Batch,
    list: &[(usize, usize, Form)],
    which: usize,
    from: usize,
    state: Option<&[u32]>,
) -> Ran {
    let mut sequences = Sequences::new(list, layer.slot_bytes());
    let mut values = Values::new(77 + list.len() as u64);
    let mut batch = layer.batch(sequences.rows, &mut values);
    let mut on = DeviceArena::new(cuda, sequences.bytes).expect("room");
    let span = &mut sequences.spans[which];
    span.read = kernels::NO_SLOT;
    if let Some(state) = state {
        span.read = span.write;
        on.write(cuda, span.write, bytemuck::cast_slice(state)).expect("it copies");
    }
    let (first, rows, write) = (span.first_row, span.rows, span.write);
    let place = |to: &mut [f32], values: &[f32], width: usize| {
        let values = &values[from * width..(from + rows) * width];
        to[first * width..(first + rows) * width].copy_from_slice(values);
    };
    place(&mut batch.qkv, &own.qkv, layer.shape.qkv_width());
    place(&mut batch.decay, &own.decay, layer.decays());
    place(&mut batch.beta, &own.beta, layer.shape.value_heads);
    place(&mut batch.output_gate, &own.output_gate, layer.outputs());
    let out = layer.on_device(cuda, &sequences, 0, &batch, &mut on);
    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect();
    let all = read(cuda, &on, sequences.bytes);
    Ran {
        outputs: bits(&out[first * layer.outputs()..(first + rows) * layer.outputs()]),
        state: bits(&all[write / 4..(write + layer.slot_bytes()) / 4]),
    }
}
