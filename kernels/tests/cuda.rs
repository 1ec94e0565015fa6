//! The operators of the CUDA backend against their definitions, on the emulated device or, with
//! `DELTAPOOL_TEST_GPU=1`, on a real one.

mod cuda_support;

use cuda_support::{Sequences, Values, assert_caught, assert_close, device, sanitized, with_seeds};
use kernels::cuda::{Cuda, DeviceArena, DeviceBuffer, Slots, conv, dense};
use kernels::norm::GateKind;
use kernels::rope::{Rope, RopeScaling};
use kernels::{Arena, Dtype, Form, Matrix, Rows, RowsMut, activation, norm, rope};

/// Starts and lengths that a batch can have: single rows, replayed answers, prompts that begin on
/// and off the grid, end on and off it, and pass over it.
const MIXED: [(usize, usize, Form); 9] = [
    (70, 1, Form::Step),
    (0, 2, Form::Chunk),
    (127, 3, Form::Step),
    (64, 64, Form::Chunk),
    (0, 131, Form::Chunk),
    (63, 1, Form::Step),
    (40, 90, Form::Chunk),
    (0, 1, Form::Chunk),
    (64, 5, Form::Chunk),
];

#[test]
fn element_wise_functions_are_their_definitions() {
    let Some(device) = device() else { return };
    with_seeds(&device, 2, |seed| element_wise(&device.cuda, seed));
}

fn element_wise(cuda: &Cuda, seed: u64) {
    {
        // Four at a time, one at a time, and parts of wider rows.
        for (rows, width, from, part) in [(3, 1028, 0, 1028), (2, 37, 0, 37), (5, 96, 32, 40)] {
            let mut values = Values::new(seed);
            let (x, y) = (values.take(rows * width), values.take(rows * width));
            let x: Vec<f32> = x.iter().map(|x| x * 20.0).collect();
            let y_on = DeviceBuffer::of(cuda, &y).expect("room");
            for (name, tolerance) in [("add", 0.0), ("silu_mul", 1e-6), ("sigmoid", 1e-6)] {
                let mut want = x.clone();
                let want_rows = RowsMut::new(&mut want, width).columns(from, part);
                let other = Rows::new(&y, width).columns(from, part);
                let mut on = DeviceBuffer::of(cuda, &x).expect("room");
                let rows_on = on.rows_mut(rows, width).columns(from, part);
                let other_on = y_on.rows(rows, width).columns(from, part);
                let ran = match name {
                    "add" => {
                        activation::naive::add(want_rows, other);
                        dense::add(cuda, rows_on, other_on)
                    }
                    "silu_mul" => {
                        activation::naive::silu_mul(want_rows, other);
                        dense::silu_mul(cuda, rows_on, other_on)
                    }
                    _ => {
                        activation::naive::sigmoid(want_rows);
                        dense::sigmoid(cuda, rows_on)
                    }
                };
                ran.expect("it launches");
                let got = on.read(cuda).expect("it ran");
                assert_close(name, &got, &want, tolerance);
            }
        }
    }
}

#[test]
fn the_convolution_is_its_definition() {
    let Some(device) = device() else { return };
    with_seeds(&device, 2, |seed| convolution(&device.cuda, seed));
}

fn convolution(cuda: &Cuda, seed: u64) {
    {
        for (channels, width, at) in [(200, 4, 64), (130, 2, 0), (5, 8, 16)] {
            let mut values = Values::new(seed);
            let sequences = Sequences::new(&MIXED, 64 + at + 4 * (width - 1) * channels);
            let sequences = Sequences::new(&MIXED, sequences.slot_bytes.next_multiple_of(64));
            let padding = 2;
            let rows = sequences.rows + padding;
            let x = values.take(rows * (channels + 3));
            let taps = values.take(width * channels);
            let mut arena = Arena::new(sequences.bytes).expect("room");
            let before = values.take(sequences.bytes / 4);
            arena.f32s_mut(0, before.len()).copy_from_slice(&before);
            let mut arena_on = DeviceArena::new(cuda, sequences.bytes).expect("room");
            arena_on.write(cuda, 0, bytemuck::cast_slice(&before)).expect("it copies");

            let mut want = vec![0.0; rows * channels];
            let x_rows = Rows::new(&x[..sequences.rows * (channels + 3)], channels + 3);
            kernels::conv::naive::conv(
                x_rows.columns(3, channels),
                kernels::conv::Taps { channels, width, values: &taps },
                kernels::conv::Windows { spans: sequences.spans(), arena: &mut arena, at },
                RowsMut::new(&mut want[..sequences.rows * channels], channels),
            );

            let x_on = DeviceBuffer::of(cuda, &x).expect("room");
            let taps_on = DeviceBuffer::of(cuda, &taps).expect("room");
            let mut out_on = DeviceBuffer::of(cuda, &vec![7.0; rows * channels]).expect("room");
            let mut table = sequences.table(cuda, padding);
            let spans = &sequences.upload(cuda, &mut table, &arena_on, padding);
            conv::conv(
                cuda,
                x_on.rows(rows, channels + 3).columns(3, channels),
                conv::Taps { channels, width, values: taps_on.slice() },
                Slots { spans, arena: &mut arena_on, at },
                out_on.rows_mut(rows, channels),
            )
            .expect("it launches");
            let got = out_on.read(cuda).expect("it ran");
            assert_close("rows", &got, &want, 1e-6);
            let mut after = vec![0.0; before.len()];
            arena_on.read(cuda, 0, bytemuck::cast_slice_mut(&mut after)).expect("it ran");
            // Windows are copies, and nothing else is touched.
            assert!(after == arena.f32s(0, after.len()), "windows");
        }
    }
}

#[test]
fn norms_are_their_definitions() {
    let Some(device) = device() else { return };
    with_seeds(&device, 2, |seed| norms(&device.cuda, seed));
}

fn norms(cuda: &Cuda, seed: u64) {
    // A row to a warp and to a block, whole and part of wider rows.
    for (rows, width, stride) in [(11, 128, 128), (3, 20, 24), (2, 512, 512), (3, 1300, 1301)] {
        let mut values = Values::new(seed);
        let (x, gate) = (values.take(rows * stride), values.take(rows * stride));
        let weights = values.take(width);
        let (x_on, gate_on) = (on(cuda, &x), on(cuda, &gate));
        let weights_on = on(cuda, &weights);
        let x_rows = Rows::new(&x, stride).columns(0, width);
        let gate_rows = Rows::new(&gate, stride).columns(0, width);
        let x_on = x_on.rows(rows, stride).columns(0, width);
        let gate_on = gate_on.rows(rows, stride).columns(0, width);
        let mut want = vec![0.0; rows * width];
        let mut out = on(cuda, &want);
        for offset in [false, true] {
            let scale = if offset { norm::Scale::OnePlus } else { norm::Scale::Plain };
            let scale_on = if offset { dense::Scale::OnePlus } else { dense::Scale::Plain };
            norm::naive::rms_norm(x_rows, scale(&weights), 1e-5, RowsMut::new(&mut want, width));
            let to = out.rows_mut(rows, width);
            dense::rms_norm(cuda, x_on, scale_on(weights_on.slice()), 1e-5, to).expect("launched");
            assert_close("norm", &out.read(cuda).expect("it ran"), &want, 2e-6);
            let mut in_place = on(cuda, &x);
            let at = in_place.rows_mut(rows, stride).columns(0, width);
            dense::rms_norm_in_place(cuda, at, scale_on(weights_on.slice()), 1e-5)
                .expect("launched");
            let got = in_place.read(cuda).expect("it ran");
            for (i, got) in got.chunks(stride).enumerate() {
                assert!(got[..width] == out.read(cuda).expect("it ran")[i * width..][..width]);
                assert!(got[width..] == x[i * stride + width..(i + 1) * stride]);
            }
        }
        for kind in [GateKind::Sigmoid, GateKind::Silu] {
            let to = RowsMut::new(&mut want, width);
            norm::naive::rms_norm_gated(x_rows, &weights, 1e-5, gate_rows, kind, to);
            let to = out.rows_mut(rows, width);
            let gate = (gate_on, kind);
            dense::rms_norm_gated(cuda, x_on, weights_on.slice(), 1e-5, gate, to)
                .expect("launched");
            assert_close("gated norm", &out.read(cuda).expect("it ran"), &want, 2e-6);
        }
    }
}

fn on<T: bytemuck::Pod>(cuda: &Cuda, values: &[T]) -> DeviceBuffer<T> {
    DeviceBuffer::of(cuda, values).expect("room")
}

#[test]
fn rotary_positions_are_their_definition() {
    let Some(device) = device() else { return };
    with_seeds(&device, 2, |seed| rotary(&device.cuda, seed));
}

fn rotary(cuda: &Cuda, seed: u64) {
    let (head_dim, heads) = (96, 3);
    for dim in [96, 64] {
        let rope = Rope::new(dim, 1e4, RopeScaling::None);
        let positions = [0, 1, 70_000, 1_000_000];
        let mut angles = vec![0.0; positions.len() * dim];
        rope::angles(&rope, &positions, &mut angles);
        let frequencies = dense::Frequencies::new(cuda, &rope).expect("room");
        let positions = on(cuda, &positions.map(|position| position as i32));
        let mut angles_on = on(cuda, &vec![0.0; angles.len()]);
        let rows = positions.len();
        dense::angles(cuda, &frequencies, positions.slice(), angles_on.rows_mut(rows, dim))
            .expect("launched");
        assert_close("angles", &angles_on.read(cuda).expect("it ran"), &angles, 1e-7);
        let mut x = Values::new(seed).take(rows * (heads * head_dim + 5));
        let mut x_on = on(cuda, &x);
        let columns = |x| RowsMut::columns(x, 5, heads * head_dim);
        let x_rows = columns(RowsMut::new(&mut x, heads * head_dim + 5));
        rope::naive::rotate(x_rows, head_dim, Rows::new(&angles, dim));
        let x_rows = x_on.rows_mut(rows, heads * head_dim + 5).columns(5, heads * head_dim);
        dense::rotate(cuda, x_rows, head_dim, angles_on.rows(rows, dim)).expect("launched");
        assert_close("rotated", &x_on.read(cuda).expect("it ran"), &x, 1e-6);
    }
}

#[test]
fn the_embedding_is_its_rows() {
    let Some(device) = device() else { return };
    with_seeds(&device, 2, |seed| embedding(&device.cuda, seed));
}

fn embedding(cuda: &Cuda, seed: u64) {
    let (vocabulary, width, tokens) = (40, 300, [3u32, 39, 0, 3]);
    let values = Values::new(seed).take(vocabulary * width);
    let bf16: Vec<_> = values.iter().map(|x| half::bf16::from_f32(*x)).collect();
    let f16: Vec<_> = values.iter().map(|x| half::f16::from_f32(*x)).collect();
    let tables: [(Dtype, &[u8]); 3] = [
        (Dtype::F32, bytemuck::cast_slice(&values)),
        (Dtype::Bf16, bytemuck::cast_slice(&bf16)),
        (Dtype::F16, bytemuck::cast_slice(&f16)),
    ];
    for (dtype, bytes) in tables {
        let matrix = Matrix::new(vocabulary, width, kernels::Values::of_bytes(bytes, dtype));
        let mut want = vec![0.0; tokens.len() * width];
        for (token, row) in tokens.iter().zip(want.chunks_mut(width)) {
            matrix.copy_row(*token as usize, row);
        }
        let (bytes, tokens_on) = (on(cuda, bytes), on(cuda, &tokens));
        let mut out = on(cuda, &want.iter().map(|_| 7.0).collect::<Vec<f32>>());
        let table = dense::Embedding { bytes: bytes.slice(), dtype, width };
        dense::embed(cuda, tokens_on.slice(), table, out.rows_mut(4, width)).expect("launched");
        assert!(out.read(cuda).expect("it ran") == want, "{dtype:?}");
        let wrong = on(cuda, &[40u32]);
        dense::embed(cuda, wrong.slice(), table, out.rows_mut(1, width)).expect("launched");
        assert!(out.read(cuda).expect("it ran")[..width].iter().all(|x| x.is_nan()));
    }
}

#[test]
fn sanitizers_find_nothing() {
    let Some(device) = device() else { return };
    sanitized(&device, || {
        let cuda = &device.cuda;
        element_wise(cuda, 1);
        convolution(cuda, 1);
        norms(cuda, 1);
        rotary(cuda, 1);
        embedding(cuda, 1);
    });
}

#[test]
fn a_missing_barrier_in_a_sum_is_caught() {
    let change = (
        "cuda/common.cuh",
        "scratch[threadIdx.x / 32] = x;\n  __syncthreads();",
        "scratch[threadIdx.x / 32] = x;",
    );
    assert_caught("norms_are_their_definitions", change, "apart");
}

#[test]
fn a_window_one_row_off_is_caught() {
    let change = ("cuda/conv.cu", "int at = rows + j - (W - 1);", "int at = rows + j - W;");
    assert_caught("the_convolution_is_its_definition", change, "windows");
}

#[test]
fn a_write_past_the_end_is_caught() {
    let change = ("cuda/dense.cu", "if (c >= a.width) return;\n    float4 p", "float4 p");
    let name = "element_wise_functions_are_their_definitions";
    assert_caught(name, change, "writes past the end");
}
