//! The device, its memory and its streams: what is refused, what is kept, and what may run beside
//! what, with every order of streams that events allow.

mod cuda_support;

use std::fs;
use std::path::Path;

use cuda_support::{Values, assert_caught, device, emulated, options, with_seeds};
use kernels::cuda::{
    Capacity, Cuda, CudaError, DeviceArena, DeviceBuffer, DeviceSpans, Direction, HostArena,
    NotPinned, Options, Piece, Slots, Step, StepTable, conv, dense,
};
use kernels::{Arena, NO_SLOT, Rows, RowsMut, Span, Spans};

#[test]
fn a_machine_that_cannot_serve_is_told() {
    let Some((_device, stand_in)) = emulated() else { return };
    let opened = || Cuda::open(options()).map(|_| ()).expect_err("it cannot").to_string();
    stand_in.machine(0, 13000, 1 << 30, 1 << 30);
    assert_eq!(opened(), "no CUDA device 0: the driver has 0");
    stand_in.machine(1, 12020, 1 << 30, 1 << 30);
    assert_eq!(opened(), "the CUDA driver is for CUDA 12.2, at least 12.8 is needed");
    // As much as devices of compute capability 8.6 have.
    stand_in.machine(1, 13000, 1 << 30, 1 << 30);
    stand_in.shared(99 << 10);
    assert_eq!(
        opened(),
        "emulated device gives a block of threads 101376 bytes of shared memory, 165888 are \
         needed: devices of compute capability 8.0, 8.7, 9.0 and 10.0 have as many"
    );
    stand_in.usual_machine();
    let second = Cuda::open(Options { ordinal: 1, ..options() });
    assert_eq!(second.map(|_| ()), Err(CudaError::NoDevice { ordinal: 1, found: 1 }));
    let cuda = Cuda::open(options()).expect("it is usual again");
    let properties = cuda.properties();
    assert_eq!((properties.capability, properties.driver), ((9, 0), 13000));
    assert_eq!(properties.memory_bytes, 8 << 30);
}

/// Devices of compute capability 12.0 give a block of threads 99 KiB. What takes more is most of
/// every layer: products of bf16 weights, prompts of KDA, all attention. So the door refuses them,
/// though every file compiles for them (cuda_compiled.rs).
#[test]
fn these_kernels_cannot_be_launched_with_99_kib() {
    let Some((_device, stand_in)) = emulated() else { return };
    let over = stand_in.kernels_over(99 << 10);
    let without = [
        "attend",
        "attend_expanded",
        "attend_latents",
        "attend_many_heads",
        "gemm_mma_few",
        "gemm_mma_many",
        "gemm_mma_some",
        "kda_prepare",
        "kda_scan",
        "kda_scan_tf32",
    ];
    assert_eq!(over, without);
}

#[test]
fn memory_that_is_not_there_is_told() {
    let Some((device, stand_in)) = emulated() else { return };
    let cuda = &device.cuda;
    let free = cuda.free_bytes().expect("it answers");
    match DeviceArena::new(cuda, free + 1) {
        Err(error) => assert_eq!(error, CudaError::OutOfMemory { bytes: free + 1, free }),
        Ok(_) => panic!("more than there is"),
    }
    // Pinned if it may be and can be; else pageable, and told.
    let (arena, warning) = HostArena::new(cuda, 1 << 20, 1 << 20).expect("it is little");
    assert!(arena.is_pinned() && warning.is_none());
    let (arena, warning) = HostArena::new(cuda, 1 << 20, 1 << 19).expect("it is little");
    assert!(!arena.is_pinned() && arena.bytes() == 1 << 20);
    assert_eq!(warning, Some(NotPinned::Budget { bytes: 1 << 20, budget: 1 << 19 }));
    stand_in.machine(1, 13000, 8 << 30, 1 << 10);
    let (arena, warning) = HostArena::new(cuda, 1 << 20, 1 << 20).expect("it is little");
    let told = warning.expect("it is told").to_string();
    assert!(!arena.is_pinned() && told.starts_with("host memory of 1048576 bytes is not pinned: "));
    stand_in.usual_machine();
}

#[test]
fn what_is_freed_while_a_graph_may_name_it_stays() {
    let Some(device) = device() else { return };
    let cuda = &device.cuda;
    let mut x = DeviceBuffer::of(cuda, &[1.0f32; 64]).expect("room");
    // A driver tells of memory that comes and goes in pieces of some MiB.
    let y = DeviceBuffer::of(cuda, &vec![2.0f32; 4 << 20]).expect("room");
    // Loads the kernel, which cannot be recorded.
    dense::add(cuda, x.rows_mut(1, 64), y.rows(1, 64)).expect("launched");
    let graph = cuda.capture(|| dense::add(cuda, x.rows_mut(1, 64), y.rows(1, 64)));
    let graph = graph.expect("it is recorded");
    let free = cuda.free_bytes().expect("it answers");
    drop(y);
    assert_eq!(cuda.free_bytes().expect("it answers"), free);
    cuda.replay(&graph).expect("it is replayed");
    assert_eq!(x.read(cuda).expect("it ran"), [5.0; 64]);
    drop(graph);
    assert!(cuda.free_bytes().expect("it answers") > free);
}

#[test]
fn a_capture_that_fails_leaves_the_stream_as_it_was() {
    let Some(device) = device() else { return };
    let cuda = &device.cuda;
    let failed = CudaError::Driver { call: "nothing", reason: "asked for".into() };
    let result = cuda.capture(|| Err(failed.clone()));
    assert_eq!(result.map(|_| ()).expect_err("it failed"), failed);
    let mut x = DeviceBuffer::of(cuda, &[1.0f32; 4]).expect("room");
    dense::sigmoid(cuda, x.rows_mut(1, 4)).expect("launched");
    assert!(x.read(cuda).expect("it ran")[0] > 0.7);
}

#[test]
fn compiled_kernels_are_kept_and_a_broken_one_is_compiled_again() {
    let Some((_device, stand_in)) = emulated() else { return };
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("kept-kernels");
    let _ = fs::remove_dir_all(&cache);
    let run = || {
        let before = stand_in.compiled();
        let cuda = Cuda::open(Options { cache: Some(cache.clone()), ..options() }).expect("opens");
        let mut x = DeviceBuffer::of(&cuda, &[0.0f32; 4]).expect("room");
        dense::sigmoid(&cuda, x.rows_mut(1, 4)).expect("launched");
        dense::sigmoid(&cuda, x.rows_mut(1, 4)).expect("launched");
        x.read(&cuda).expect("it ran");
        stand_in.compiled() - before
    };
    assert_eq!((run(), run()), (1, 0));
    let kept: Vec<_> = fs::read_dir(&cache).expect("it is there").collect();
    let kept = kept.into_iter().next().expect("one file").expect("it is there").path();
    let whole = fs::read(&kept).expect("it is there");
    // Cut short, and with a byte of the code changed.
    fs::write(&kept, &whole[..whole.len() - 9]).expect("it can be written");
    assert_eq!((run(), run()), (1, 0));
    let mut changed = whole.clone();
    let at = changed.len() - 12;
    changed[at] ^= 1;
    fs::write(&kept, changed).expect("it can be written");
    assert_eq!((run(), run()), (1, 0));
    assert_eq!(fs::read(&kept).expect("it is there"), whole);
    assert_eq!(fs::read_dir(&cache).expect("it is there").count(), 1, "nothing unfinished stays");
}

/// Sequences of one convolution layer that decode a row a step.
struct Decode {
    channels: usize,
    taps: Vec<f32>,
    slot_bytes: usize,
}

const WIDTH: usize = 4;

impl Decode {
    fn new() -> Decode {
        let channels = 40;
        let slot_bytes = (4 * (WIDTH - 1) * channels).next_multiple_of(64);
        Decode { channels, taps: Values::new(9).take(WIDTH * channels), slot_bytes }
    }

    /// A step of one row for each slot.
    fn spans(slots: &[usize], step: usize) -> Vec<Span> {
        let span = |(row, slot): (usize, &usize)| {
            let read = if step == 0 { NO_SLOT } else { *slot };
            Span::step(row, step, (read, *slot), 0..0)
        };
        slots.iter().enumerate().map(span).collect()
    }

    fn naive(&self, x: &[f32], slots: &[usize], step: usize, arena: &mut Arena) -> Vec<f32> {
        let spans = Decode::spans(slots, step);
        let spans = Spans::new(&spans, &[], slots.len(), self.slot_bytes);
        let taps =
            kernels::conv::Taps { channels: self.channels, width: WIDTH, values: &self.taps };
        let mut out = vec![0.0; x.len()];
        let windows = kernels::conv::Windows { spans, arena, at: 0 };
        let to = RowsMut::new(&mut out, self.channels);
        kernels::conv::naive::conv(Rows::new(x, self.channels), taps, windows, to);
        out
    }

    fn upload<'a>(
        &self,
        cuda: &Cuda,
        table: &'a mut StepTable,
        slots: &[usize],
        step: usize,
        arena: &DeviceArena,
    ) -> DeviceSpans<'a> {
        let spans = Decode::spans(slots, step);
        let step = Step {
            spans: Spans::new(&spans, &[], slots.len(), self.slot_bytes),
            tables: &[],
            block_bytes: 0,
            tokens: &vec![0; slots.len()],
            padded_rows: slots.len(),
            arena,
        };
        table.upload(cuda, step).expect("it fits")
    }
}

/// Two sequences decode through one graph. After each step the first is copied to the host, its
/// slot is filled with junk, and it comes back into another slot, all without a wait of the host:
/// whatever order events allow, the numbers are those of a plain run.
#[test]
fn a_swap_beside_kernels_gives_the_numbers_of_a_plain_run() {
    let Some(device) = device() else { return };
    let cuda = &device.cuda;
    with_seeds(&device, 12, |seed| swap(cuda, seed));
}

fn swap(cuda: &Cuda, seed: u64) {
    let decode = Decode::new();
    let (slot, channels, steps) = (decode.slot_bytes, decode.channels, 6);
    let mut values = Values::new(seed);
    let mut plain = Arena::new(2 * slot).expect("room");
    let mut arena = DeviceArena::new(cuda, 4 * slot).expect("room");
    let (mut host, _) = HostArena::new(cuda, slot, slot).expect("room");
    let capacity = Capacity { spans: 2, rows: 2, snapshots: 0, blocks: 0 };
    let mut table = StepTable::new(cuda, capacity).expect("room");
    let zeros = |len| DeviceBuffer::of(cuda, &vec![0.0; len]).expect("room");
    let taps = DeviceBuffer::of(cuda, &decode.taps).expect("room");
    let (mut x, mut out) = (zeros(2 * channels), zeros(2 * channels));
    // Outputs of all steps, those of a step in columns of their own.
    let mut all = zeros(2 * steps * channels);
    let mut want = vec![0.0; 2 * steps * channels];
    let junk = vec![0xffu8; slot];
    // Three, so that the table of a step is never by chance that of two steps later.
    let place = |step: usize| [0, 2 * slot, 3 * slot][step % 3];
    let mut graph = None;
    for step in 0..steps {
        let rows = values.take(2 * channels);
        let expected = decode.naive(&rows, &[0, slot], step, &mut plain);
        for (i, row) in expected.chunks(channels).enumerate() {
            want[(i * steps + step) * channels..][..channels].copy_from_slice(row);
        }
        x.write(cuda, 0, &rows).expect("it copies");
        let spans = decode.upload(cuda, &mut table, &[place(step), slot], step, &arena);
        let mut run = || {
            let taps = conv::Taps { channels, width: WIDTH, values: taps.slice() };
            let slots = Slots { spans: &spans, arena: &mut arena, at: 0 };
            conv::conv(cuda, x.rows(2, channels), taps, slots, out.rows_mut(2, channels))
        };
        // The first loads the kernel, the second is recorded, and replayed from then on.
        if step == 0 {
            run().expect("launched");
        } else {
            let graph = graph.get_or_insert_with(|| cuda.capture(run).expect("it is recorded"));
            cuda.replay(graph).expect("it is replayed");
        }
        let column = all.rows_mut(2, steps * channels).columns(step * channels, channels);
        dense::add(cuda, column, out.rows(2, channels)).expect("launched");

        let piece = |device| [Piece { device, host: 0, bytes: slot }];
        let leaving = cuda.transfer(Direction::ToHost, &piece(place(step)), &mut arena, &mut host);
        cuda.follow(&leaving.expect("it starts")).expect("it waits");
        arena.write(cuda, place(step), &junk).expect("it copies");
        let coming =
            cuda.transfer(Direction::ToDevice, &piece(place(step + 1)), &mut arena, &mut host);
        cuda.follow(&coming.expect("it starts")).expect("it waits");
    }
    let got = all.read(cuda).expect("it ran");
    cuda_support::assert_close("outputs", &got, &want, 1e-6);
    let mut state = vec![0u8; slot];
    arena.read(cuda, place(steps), &mut state).expect("it ran");
    assert_eq!(host.read().expect("it is over"), state, "the host has what the device has");
    assert_eq!(state, plain.values::<u8>(0, slot), "the state itself");
}

#[test]
fn a_missing_wait_for_an_event_is_caught() {
    let right = "return push(handle, Work{nullptr, event, event->recorded});";
    let name = "a_swap_beside_kernels_gives_the_numbers_of_a_plain_run";
    assert_caught(name, ("emu/driver.cpp", right, "return SUCCESS;"), "apart");
}

/// The memory a step's table goes up from is written again two steps later.
#[test]
fn a_table_overwritten_on_its_way_is_caught() {
    let right = "run_until([=] { return event->reached >= number; });";
    let name = "a_swap_beside_kernels_gives_the_numbers_of_a_plain_run";
    assert_caught(name, ("emu/driver.cpp", right, "(void)number;"), "apart");
}

#[test]
fn a_transfer_is_done_when_it_is_done() {
    let Some(device) = device() else { return };
    let cuda = &device.cuda;
    let mut arena = DeviceArena::new(cuda, 1 << 12).expect("room");
    let (mut host, _) = HostArena::new(cuda, 1 << 12, 1 << 12).expect("room");
    host.write().expect("nothing is on its way").fill(7);
    let piece = [Piece { device: 64, host: 128, bytes: 256 }];
    let transfer = cuda.transfer(Direction::ToDevice, &piece, &mut arena, &mut host);
    let transfer = transfer.expect("it starts");
    let asked = (0..1_000_000).find(|_| transfer.is_done().expect("it answers"));
    assert!(asked.is_some(), "it is never done");
    let mut bytes = vec![0u8; 1 << 12];
    arena.read(cuda, 0, &mut bytes).expect("it ran");
    let places = |byte| bytes.iter().enumerate().filter(move |(_, b)| **b == byte).map(|(i, _)| i);
    assert_eq!(places(7).collect::<Vec<_>>(), (64..320).collect::<Vec<_>>());
    // Without an order between them, and with nothing to copy.
    arena.copy_within(cuda, 64, 1024, 256).expect("it copies");
    let back = cuda.transfer(Direction::ToHost, &[], &mut arena, &mut host).expect("it starts");
    cuda.follow(&back).expect("it waits");
    arena.read(cuda, 1024, &mut bytes[..256]).expect("it ran");
    assert!(bytes[..256].iter().all(|byte| *byte == 7));
}

/// The clock runs from the first to the last of what was given, whatever lies between.
#[test]
fn what_takes_longer_takes_longer_by_the_devices_clock() {
    let Some(device) = device() else { return };
    let cuda = &device.cuda;
    let bytes = 16 << 20;
    let mut arena = DeviceArena::new(cuda, 2 * bytes).expect("room");
    let (mut host, _) = HostArena::new(cuda, bytes, bytes).expect("room");
    let mut copies = |count: usize| {
        cuda.time(|| (0..count).try_for_each(|_| arena.copy_within(cuda, 0, bytes, bytes)))
    };
    copies(1).expect("it ran");
    let (none, few, many) = (copies(0), copies(2), copies(64));
    let [none, few, many] = [none, few, many].map(|seconds| seconds.expect("it ran"));
    assert!(0.0 <= none && none < few && 4.0 * few < many, "{none}, {few}, {many}");
    let piece = [Piece { device: 0, host: 0, bytes }];
    let swap = cuda.time(|| {
        let transfer = cuda.transfer(Direction::ToHost, &piece, &mut arena, &mut host)?;
        cuda.follow(&transfer)
    });
    // A link of 16 MiB in less than this would be of 16 TB a second.
    assert!(swap.expect("it ran") > 1e-6, "the transfer was not waited for");
    let failed = CudaError::Driver { call: "nothing", reason: "asked for".into() };
    assert_eq!(cuda.time(|| Err(failed.clone())), Err(failed));
}

#[test]
fn an_arena_is_filled_to_its_last_byte() {
    let Some(device) = device() else { return };
    let mut arena = DeviceArena::new(&device.cuda, 1000).expect("room");
    arena.fill(&device.cuda, 0xff).expect("it runs");
    let mut bytes = vec![0u8; 1000];
    arena.read(&device.cuda, 0, &mut bytes).expect("it ran");
    assert!(bytes.iter().all(|byte| *byte == 0xff));
    DeviceArena::new(&device.cuda, 0).and_then(|mut a| a.fill(&device.cuda, 1)).expect("nothing");
}

#[test]
#[should_panic(expected = "256 bytes at 3900 leave 4096 bytes")]
fn a_piece_beyond_the_end_is_refused() {
    let Some(device) = device() else { panic!("256 bytes at 3900 leave 4096 bytes: skipped") };
    let cuda = &device.cuda;
    let mut arena = DeviceArena::new(cuda, 1 << 12).expect("room");
    let (mut host, _) = HostArena::new(cuda, 1 << 12, 1 << 12).expect("room");
    let piece = [Piece { device: 0, host: 3900, bytes: 256 }];
    let _ = cuda.transfer(Direction::ToHost, &piece, &mut arena, &mut host);
}
