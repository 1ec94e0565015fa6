//! Rows that outlive their step, and rows that logits are asked for, on a device.

mod cuda_support;

use cuda_support::{Sequences, Values, assert_caught, device, sanitized, with_seeds};
use kernels::cuda::rows::{Origin, Origins, gather, keep_last};
use kernels::cuda::{Cuda, DeviceArena, DeviceBuffer, Slots};
use kernels::{CELL_LEN, Form};

const WIDTH: usize = 300;
const AT: usize = 64;

#[test]
fn the_last_row_of_each_span_and_snapshot_is_kept_in_its_slot() {
    let Some(device) = device() else { return };
    with_seeds(&device, 2, |seed| kept(&device.cuda, seed));
}

fn kept(cuda: &Cuda, seed: u64) {
    let list = [(0, 2 * CELL_LEN + 5, Form::Chunk), (7, 1, Form::Step), (9, 1, Form::Step)];
    let sequences = Sequences::new(&list, AT + WIDTH * 4 + 16);
    let (padding, padded) = (2, sequences.rows + 2);
    let x = Values::new(seed).take(padded * WIDTH);
    let mut arena = DeviceArena::new(cuda, sequences.bytes).expect("room");
    let mut table = sequences.table(cuda, padding);
    let spans = sequences.upload(cuda, &mut table, &arena, padding);
    let on = DeviceBuffer::of(cuda, &x).expect("room");
    let slots = Slots { spans: &spans, arena: &mut arena, at: AT };
    keep_last(cuda, on.rows(padded, WIDTH), slots).expect("it launches");
    let mut all = vec![0; sequences.bytes];
    arena.read(cuda, 0, &mut all).expect("it ran");
    let mut want = vec![0; sequences.bytes];
    let mut put = |slot: usize, row: usize| {
        let bytes = bytemuck::cast_slice(&x[row * WIDTH..(row + 1) * WIDTH]);
        want[slot + AT..slot + AT + bytes.len()].copy_from_slice(bytes);
    };
    for span in &sequences.spans {
        put(span.write, span.first_row + span.rows - 1);
        for snapshot in &sequences.snapshots[span.snapshots.clone()] {
            put(snapshot.slot, span.first_row + snapshot.after_rows - 1);
        }
    }
    assert!(all == want, "the rows of the spans, and nothing else");
}

#[test]
fn rows_are_gathered_from_the_step_and_from_slots() {
    let Some(device) = device() else { return };
    gathered(&device.cuda);
}

fn gathered(cuda: &Cuda) {
    let (x, stored) = (Values::new(3).take(5 * WIDTH), Values::new(4).take(WIDTH));
    let mut arena = DeviceArena::new(cuda, 64 + WIDTH * 4).expect("room");
    arena.write(cuda, 64, bytemuck::cast_slice(&stored)).expect("it copies");
    let on = DeviceBuffer::of(cuda, &x).expect("room");
    let mut out = DeviceBuffer::of(cuda, &vec![7.0; 4 * WIDTH]).expect("room");
    let mut places = Origins::new(cuda, 4).expect("room");
    let origins = [Origin::Row(4), Origin::Arena(64), Origin::Row(0)];
    let rows = (on.rows(5, WIDTH), &arena);
    gather(cuda, rows, &origins, &mut places, out.rows_mut(3, WIDTH)).expect("it launches");
    let row = |i: usize| &x[i * WIDTH..(i + 1) * WIDTH];
    let want = [row(4), &stored, row(0), &[7.0; WIDTH]].concat();
    assert!(out.read(cuda).expect("it ran") == want);
}

#[test]
fn sanitizers_find_nothing() {
    let Some(device) = device() else { return };
    sanitized(&device, || {
        kept(&device.cuda, 1);
        gathered(&device.cuda);
    });
}

#[test]
fn a_row_one_off_is_caught() {
    let change = ("cuda/rows.cu", "span.first_row + rows - 1", "span.first_row + rows");
    let name = "the_last_row_of_each_span_and_snapshot_is_kept_in_its_slot";
    assert_caught(name, change, "nothing else");
}
