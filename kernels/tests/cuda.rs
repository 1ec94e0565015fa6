//! The operators of the CUDA backend against their definitions, on the emulated device or, with
//! `DELTAPOOL_TEST_GPU=1`, on a real one.

mod cuda_support;

use cuda_support::{Sequences, Values, assert_close, device, with_seeds};
use kernels::cuda::{DeviceArena, DeviceBuffer, Slots, conv, dense};
use kernels::{Arena, Form, Rows, RowsMut, activation};

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
    let cuda = &device.cuda;
    with_seeds(&device, 2, |seed| {
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
    });
}

#[test]
fn the_convolution_is_its_definition() {
    let Some(device) = device() else { return };
    let cuda = &device.cuda;
    with_seeds(&device, 2, |seed| {
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
    });
}
