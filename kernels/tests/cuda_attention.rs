//! Paged attention on a device against its definitions: what is written to blocks byte for byte,
//! what is attended, and that a row's bits are its own.

mod cuda_support;

use cuda_support::{Device, Values, assert_caught, assert_close, device, sanitized, with_seeds};
use kernels::cuda::attention::DevicePaged;
use kernels::cuda::{Capacity, DeviceArena, DeviceBuffer, Step, StepTable, gqa, mla};
use kernels::mla as mla_shape;
use kernels::{
    Arena, BLOCK_LEN, Compute, Form, KvDtype, KvPlace, Matrix, NO_SLOT, Paged, Rows, RowsMut, Span,
    Spans, Values as Stored,
};

/// Start, rows, form, and rows that attend expanded.
type Piece = (usize, usize, Form, usize);

/// Single rows on both sides of a segment's border, replayed answers over it, prompts from the
/// start and from behind it, in one form and in both.
const MIXED: [Piece; 8] = [
    (5, 1, Form::Step, 0),
    (0, 70, Form::Chunk, 64),
    (1023, 1, Form::Step, 0),
    (1000, 40, Form::Chunk, 40),
    (1020, 7, Form::Step, 0),
    (0, 33, Form::Chunk, 0),
    (2047, 2, Form::Chunk, 1),
    (1024, 1, Form::Step, 0),
];
/// Generated rows only, of which the longest has three segments.
const STEPS: [Piece; 4] = [
    (0, 1, Form::Step, 0),
    (2048, 1, Form::Step, 0),
    (1023, 1, Form::Step, 0),
    (700, 1, Form::Step, 0),
];

/// Sequences whose positions before the step are written already.
struct Sequences {
    spans: Vec<Span>,
    tables: Vec<usize>,
    rows: usize,
    /// Values of a layer in a block, and where it lies there.
    layer: usize,
    place: KvPlace,
    bytes: usize,
}

const PADDING: usize = 2;

impl Sequences {
    fn new(pieces: &[Piece], layer: usize, dtype: KvDtype) -> Sequences {
        let place = KvPlace { at: 64, dtype };
        let mut sequences =
            Sequences { spans: Vec::new(), tables: Vec::new(), rows: 0, layer, place, bytes: 0 };
        let block = sequences.block_bytes();
        for &(start, rows, form, absorbed_from) in pieces {
            let blocks = (start + rows).div_ceil(BLOCK_LEN);
            let first = sequences.tables.len();
            sequences.tables.extend(first..first + blocks);
            sequences.spans.push(Span {
                first_row: sequences.rows,
                rows,
                start,
                form,
                absorbed_from,
                read: NO_SLOT,
                write: 64 * sequences.spans.len(),
                table: first..first + blocks,
                snapshots: 0..0,
            });
            sequences.rows += rows;
        }
        // Blocks in an order that is nobody's.
        let count = sequences.tables.len();
        let mut values = Values::new(11);
        for i in 0..count {
            sequences.tables.swap(i, values.below(count));
        }
        sequences.tables.iter_mut().for_each(|at| *at *= block);
        sequences.bytes = count * block;
        sequences
    }

    fn block_bytes(&self) -> usize {
        (self.place.at + self.layer * self.place.dtype.bytes()).next_multiple_of(64) + 64
    }

    fn longest(&self) -> usize {
        self.spans.iter().map(Span::end).max().expect("there are some")
    }

    /// The same with every position from the first as its rows.
    fn before(&self) -> Vec<Span> {
        let mut row = 0;
        let whole = |span: &Span| {
            row += span.start;
            Span { first_row: row - span.start, rows: span.start, start: 0, ..span.clone() }
        };
        self.spans.iter().filter(|span| span.start > 0).map(whole).collect()
    }

    /// An arena that is not-a-number wherever nobody wrote.
    fn arena(&self, write: impl FnOnce((&[Span], &[usize]), &mut Arena, usize)) -> Arena {
        let mut arena = Arena::new(self.bytes).expect("room");
        arena.f32s_mut(0, self.bytes / 4).fill(f32::from_bits(u32::MAX));
        let before = self.before();
        let rows = before.iter().map(|span| span.rows).sum();
        write((&before, &self.tables), &mut arena, rows);
        arena
    }

    fn upload(&self, device: &Device, arena: &Arena) -> (DeviceArena, StepTable) {
        let cuda = &device.cuda;
        let mut on = DeviceArena::new(cuda, self.bytes).expect("room");
        on.write(cuda, 0, bytemuck::cast_slice(arena.f32s(0, self.bytes / 4))).expect("it copies");
        let capacity = Capacity {
            spans: self.spans.len() + PADDING,
            rows: self.rows + PADDING,
            snapshots: 0,
            blocks: self.tables.len(),
        };
        (on, StepTable::new(cuda, capacity).expect("room"))
    }

    fn host_spans(&self) -> Spans<'_> {
        Spans::new(&self.spans, &[], self.rows, 0)
    }

    fn step<'a>(&'a self, arena: &'a DeviceArena, tokens: &'a [u32]) -> Step<'a> {
        Step {
            spans: self.host_spans(),
            tables: &self.tables,
            block_bytes: self.block_bytes(),
            tokens,
            padded_rows: self.rows + PADDING,
            arena,
        }
    }

    /// Asserts that the device's arena is the processor's.
    fn assert_same_bytes(&self, device: &Device, on: &DeviceArena, arena: &Arena) {
        let mut bytes = vec![0u8; self.bytes];
        on.read(&device.cuda, 0, &mut bytes).expect("it ran");
        let want: &[u8] = bytemuck::cast_slice(arena.f32s(0, self.bytes / 4));
        assert!(bytes == want, "blocks");
    }
}

/// The history of a sequence depends on its place in this list alone.
fn rows_of(pieces: &[Piece], which: &[usize], width: usize, current: bool) -> Vec<f32> {
    let mut all = Vec::new();
    for (&(start, rows, ..), i) in pieces.iter().zip(which) {
        let mut values = Values::new(100 + *i as u64);
        let whole = values.take((start + rows) * width);
        let at = if current { start * width..whole.len() } else { 0..start * width };
        all.extend_from_slice(&whole[at]);
    }
    all
}

/// Rows of `wide` values that begin with the given ones, and padding rows behind them.
fn padded(rows: &[f32], width: usize, wide: usize) -> Vec<f32> {
    let mut all = Vec::new();
    for row in rows.chunks_exact(width) {
        all.extend_from_slice(row);
        all.resize(all.len() + wide - width, 9.0);
    }
    all.resize(all.len() + PADDING * wide, 9.0);
    all
}

// ---- latent attention

struct Latent {
    shape: mla_shape::Shape,
    up: Vec<f32>,
    bf16: Option<Vec<half::bf16>>,
    compute: Compute,
}

impl Latent {
    fn new(shape: mla_shape::Shape, compute: Compute) -> Latent {
        let mut values = Values::new(77);
        let up = values.take(shape.heads * (shape.nope + shape.value_dim) * shape.rank);
        let bf16 = (compute == Compute::Bf16)
            .then(|| up.iter().map(|x| half::bf16::from_f32(*x)).collect());
        Latent { shape, up, bf16, compute }
    }

    fn matrix(&self) -> Matrix<'_> {
        let values = match &self.bf16 {
            Some(values) => Stored::Bf16(values),
            None => Stored::F32(&self.up),
        };
        let rows = self.shape.heads * (self.shape.nope + self.shape.value_dim);
        Matrix::new(rows, self.shape.rank, values)
    }

    /// What the device gives for the sequences `which` of some, after what they wrote was compared,
    /// and what the definition gives.
    fn run(
        &self,
        device: &Device,
        pieces: &[Piece],
        which: &[usize],
        dtype: KvDtype,
    ) -> (Vec<f32>, Vec<f32>) {
        let (cuda, shape) = (&device.cuda, self.shape);
        let row = shape.row();
        let sequences = Sequences::new(pieces, BLOCK_LEN * row, dtype);
        let place = sequences.place;
        let before = rows_of(pieces, which, row, false);
        let mut arena = sequences.arena(|spans, arena, rows| {
            if rows > 0 {
                mla_shape::write(shape, spans, Rows::new(&before, row), arena, place);
            }
        });
        let (mut arena_on, mut table) = sequences.upload(device, &arena);
        let latents = rows_of(pieces, which, row, true);
        let q = rows_of(pieces, which, shape.heads * shape.query(), true);
        let spans = (&sequences.spans[..], &sequences.tables[..]);
        mla_shape::write(shape, spans, Rows::new(&latents, row), &mut arena, place);

        let width = shape.heads * shape.value_dim;
        let mut want = vec![0.0; (sequences.rows + PADDING) * width];
        let host = sequences.host_spans();
        let paged = Paged { spans: host, tables: &sequences.tables, arena: &arena, place };
        let inputs =
            mla_shape::Inputs { q: Rows::new(&q, shape.heads * shape.query()), up: self.matrix() };
        let out = RowsMut::new(&mut want[..sequences.rows * width], width);
        mla_shape::naive::attend(shape, inputs, paged, out);

        let rows = sequences.rows + PADDING;
        let most = mla::Most { rows, steps: 8, positions: 4096, expanded: 1100 };
        let mut work = mla::Workspace::new(cuda, shape, most).expect("room");
        let up = mla::Up::new(cuda, shape, self.matrix()).expect("room");
        let wide = row + 4;
        let latents_on = DeviceBuffer::of(cuda, &padded(&latents, row, wide)).expect("room");
        let q_width = shape.heads * shape.query();
        let q_on = DeviceBuffer::of(cuda, &padded(&q, q_width, q_width)).expect("room");
        let mut out_on = DeviceBuffer::of(cuda, &vec![f32::NAN; rows * width]).expect("room");
        let tokens = vec![0; sequences.rows];
        let spans = table.upload(cuda, sequences.step(&arena_on, &tokens)).expect("it fits");
        let latents_rows = latents_on.rows(rows, wide).columns(0, row);
        mla::write_rows(cuda, shape, &spans, latents_rows, &mut arena_on, place)
            .expect("it launches");
        sequences.assert_same_bytes(device, &arena_on, &arena);
        let paged = DevicePaged {
            spans: &spans,
            arena: &arena_on,
            place,
            most_positions: sequences.longest() + 100,
        };
        let q = (q_on.rows(rows, q_width), &up, self.compute);
        mla::attend(cuda, q, host, paged, &mut work, out_on.rows_mut(rows, width))
            .expect("it launches");
        (out_on.read(cuda).expect("it ran"), want)
    }
}

const SMALL: mla_shape::Shape =
    mla_shape::Shape { heads: 3, nope: 16, rope: 8, value_dim: 24, rank: 40 };
const REAL: mla_shape::Shape =
    mla_shape::Shape { heads: 2, nope: 128, rope: 64, value_dim: 128, rank: 512 };

/// Of whole fragments, as all real widths are.
const WHOLE: mla_shape::Shape =
    mla_shape::Shape { heads: 9, nope: 16, rope: 16, value_dim: 32, rank: 48 };

#[test]
fn latent_attention_is_its_definition() {
    let Some(device) = device() else { return };
    let all: Vec<usize> = (0..8).collect();
    with_seeds(&device, 2, |_| {
        for dtype in [KvDtype::F32, KvDtype::Bf16] {
            let layer = Latent::new(SMALL, Compute::F32);
            let (got, want) = layer.run(&device, &MIXED, &all, dtype);
            assert_close("both forms", &got, &want, 1e-5);
            let (got, want) = layer.run(&device, &STEPS, &all[..4], dtype);
            assert_close("split segments", &got, &want, 1e-5);
        }
    });
}

#[test]
fn latent_attention_of_wide_models_is_its_definition() {
    let Some(device) = device() else { return };
    let layer = Latent::new(REAL, Compute::F32);
    let pieces = [(1030, 1, Form::Step, 0), (64, 20, Form::Chunk, 18)];
    let (got, want) = layer.run(&device, &pieces, &[0, 1], KvDtype::F32);
    assert_close("real widths", &got, &want, 1e-5);
    // More heads than one block of threads has.
    let shape = mla_shape::Shape { heads: 40, nope: 8, rope: 8, value_dim: 8, rank: 16 };
    let layer = Latent::new(shape, Compute::F32);
    let pieces = [(100, 1, Form::Step, 0), (1027, 1, Form::Step, 0), (0, 3, Form::Chunk, 0)];
    let (got, want) = layer.run(&device, &pieces, &[0, 1, 2], KvDtype::F32);
    assert_close("many heads", &got, &want, 1e-5);
}

#[test]
fn rounded_latent_attention_is_near_its_definition() {
    let Some(device) = device() else { return };
    let all: Vec<usize> = (0..8).collect();
    with_seeds(&device, 2, |_| {
        let layer = Latent::new(WHOLE, Compute::Bf16);
        let (got, want) = layer.run(&device, &MIXED, &all, KvDtype::Bf16);
        assert_close("both forms", &got, &want, 0.02);
        let (got, want) = layer.run(&device, &STEPS, &all[..4], KvDtype::Bf16);
        assert_close("split segments", &got, &want, 0.02);
    });
    let pieces = [(1030, 1, Form::Step, 0), (64, 20, Form::Chunk, 18)];
    let layer = Latent::new(REAL, Compute::Bf16);
    let (got, want) = layer.run(&device, &pieces, &[0, 1], KvDtype::Bf16);
    assert_close("real widths", &got, &want, 0.02);
    // A prompt of more rows than a block of threads has, over a segment's border.
    let layer = Latent::new(mla_shape::Shape { heads: 2, ..WHOLE }, Compute::Bf16);
    let (got, want) = layer.run(&device, &[(950, 140, Form::Chunk, 130)], &[0], KvDtype::Bf16);
    assert_close("a long prompt", &got, &want, 0.02);
    // Widths that tensor cores do not take.
    let layer = Latent::new(SMALL, Compute::Bf16);
    let (got, want) = layer.run(&device, &MIXED[..2], &all[..2], KvDtype::Bf16);
    assert_close("odd widths", &got, &want, 0.02);
    if let Some(stand_in) = device.stand_in {
        assert_eq!(stand_in.matrix_load_conflicts(), 0, "loads of matrices that share a bank");
    }
}

/// Each sequence alone has the bits it has beside others, where its segments are split or walked,
/// its rows share blocks of threads with others, and its products are of more rows.
#[test]
fn a_row_of_latent_attention_has_the_same_bits_in_every_batch() {
    let Some(device) = device() else { return };
    let all: Vec<usize> = (0..8).collect();
    let cases = [(SMALL, Compute::F32, KvDtype::F32), (WHOLE, Compute::Bf16, KvDtype::Bf16)];
    for (shape, compute, dtype) in cases {
        let layer = Latent::new(shape, compute);
        let width = shape.heads * shape.value_dim;
        let (together, _) = layer.run(&device, &MIXED, &all, dtype);
        let mut row = 0;
        for (i, piece) in MIXED.iter().enumerate() {
            let (alone, _) = layer.run(&device, &[*piece], &[i], dtype);
            let values = piece.1 * width;
            let of_batch = &together[row * width..][..values];
            assert!(alone[..values] == *of_batch, "sequence {i} of {dtype:?}");
            row += piece.1;
        }
    }
}

/// Chunk rows that are computed in two steps have the bits of one.
#[test]
fn a_prompt_cut_in_two_has_the_bits_of_one() {
    let Some(device) = device() else { return };
    let few = mla_shape::Shape { heads: 2, ..WHOLE };
    let cases = [(SMALL, Compute::F32, KvDtype::F32), (few, Compute::Bf16, KvDtype::Bf16)];
    for (shape, compute, dtype) in cases {
        let layer = Latent::new(shape, compute);
        let width = shape.heads * shape.value_dim;
        let (whole, _) = layer.run(&device, &[(960, 192, Form::Chunk, 128)], &[0], dtype);
        let (tail, _) = layer.run(&device, &[(1024, 128, Form::Chunk, 64)], &[0], dtype);
        assert!(whole[64 * width..192 * width] == tail[..128 * width], "{compute:?}");
    }
}

// ---- grouped queries

struct Grouped {
    shape: kernels::gqa::Shape,
    compute: Compute,
}

impl Grouped {
    fn new((heads, kv_heads, head_dim): (usize, usize, usize), compute: Compute) -> Grouped {
        Grouped { shape: kernels::gqa::Shape { heads, kv_heads, head_dim }, compute }
    }

    fn run(
        &self,
        device: &Device,
        pieces: &[Piece],
        which: &[usize],
        dtype: KvDtype,
    ) -> (Vec<f32>, Vec<f32>) {
        let (cuda, shape) = (&device.cuda, self.shape);
        let (kv, width) = (shape.kv_heads * shape.head_dim, shape.heads * shape.head_dim);
        let sequences = Sequences::new(pieces, 2 * BLOCK_LEN * kv, dtype);
        let place = sequences.place;
        let halves = |rows: &[f32]| {
            let rows = Rows::new(rows, 2 * kv);
            let part = |from| -> Vec<f32> {
                let rows = rows.columns(from, kv);
                (0..rows.count()).flat_map(|i| rows.row(i).to_vec()).collect()
            };
            [part(0), part(kv)]
        };
        let before = rows_of(pieces, which, 2 * kv, false);
        let mut arena = sequences.arena(|spans, arena, rows| {
            if rows > 0 {
                let [keys, values] = halves(&before);
                let (keys, values) = (Rows::new(&keys, kv), Rows::new(&values, kv));
                kernels::gqa::write(shape, spans, keys, values, arena, place);
            }
        });
        let (mut arena_on, mut table) = sequences.upload(device, &arena);
        let both = rows_of(pieces, which, 2 * kv, true);
        let [keys, values] = halves(&both);
        let spans = (&sequences.spans[..], &sequences.tables[..]);
        let (keys, values) = (Rows::new(&keys, kv), Rows::new(&values, kv));
        kernels::gqa::write(shape, spans, keys, values, &mut arena, place);

        let q = rows_of(pieces, which, width, true);
        let mut want = vec![0.0; (sequences.rows + PADDING) * width];
        let paged = Paged {
            spans: sequences.host_spans(),
            tables: &sequences.tables,
            arena: &arena,
            place,
        };
        let out = RowsMut::new(&mut want[..sequences.rows * width], width);
        kernels::gqa::naive::attend(shape, Rows::new(&q, width), paged, out);

        let rows = sequences.rows + PADDING;
        let mut work = gqa::Workspace::new(cuda, shape, 8, 4096).expect("room");
        let both_on = DeviceBuffer::of(cuda, &padded(&both, 2 * kv, 2 * kv)).expect("room");
        let q_on = DeviceBuffer::of(cuda, &padded(&q, width, width)).expect("room");
        let mut out_on = DeviceBuffer::of(cuda, &vec![f32::NAN; rows * width]).expect("room");
        let tokens = vec![0; sequences.rows];
        let spans = table.upload(cuda, sequences.step(&arena_on, &tokens)).expect("it fits");
        let both_rows = both_on.rows(rows, 2 * kv);
        let both_rows = (both_rows.columns(0, kv), both_rows.columns(kv, kv));
        gqa::write_rows(cuda, shape, &spans, both_rows, &mut arena_on, place).expect("it launches");
        sequences.assert_same_bytes(device, &arena_on, &arena);
        let most_positions = sequences.longest();
        let paged = DevicePaged { spans: &spans, arena: &arena_on, place, most_positions };
        let out = out_on.rows_mut(rows, width);
        let q = (q_on.rows(rows, width), self.compute);
        gqa::attend(cuda, shape, q, paged, &mut work, out).expect("it launches");
        (out_on.read(cuda).expect("it ran"), want)
    }
}

#[test]
fn grouped_attention_is_its_definition() {
    let Some(device) = device() else { return };
    let all: Vec<usize> = (0..8).collect();
    with_seeds(&device, 2, |seed| {
        let dtype = [KvDtype::F32, KvDtype::Bf16][seed as usize % 2];
        for shape in [(6, 2, 24), (2, 2, 10)] {
            let layer = Grouped::new(shape, Compute::F32);
            let (got, want) = layer.run(&device, &MIXED, &all, dtype);
            assert_close("both forms", &got, &want, 1e-5);
            let (got, want) = layer.run(&device, &STEPS, &all[..4], dtype);
            assert_close("split segments", &got, &want, 1e-5);
        }
    });
    let layer = Grouped::new((4, 1, 128), Compute::F32);
    let pieces = [(1030, 1, Form::Step, 0), (64, 20, Form::Chunk, 0)];
    let (got, want) = layer.run(&device, &pieces, &[0, 1], KvDtype::F32);
    assert_close("real widths", &got, &want, 1e-5);
}

#[test]
fn rounded_grouped_attention_is_near_its_definition() {
    let Some(device) = device() else { return };
    let all: Vec<usize> = (0..8).collect();
    with_seeds(&device, 2, |_| {
        // Groups that share a fragment of queries with others, and one that has more than one.
        for shape in [(6, 2, 48), (17, 1, 16)] {
            let layer = Grouped::new(shape, Compute::Bf16);
            let (got, want) = layer.run(&device, &MIXED, &all, KvDtype::Bf16);
            assert_close("both forms", &got, &want, 0.005);
            let (got, want) = layer.run(&device, &STEPS, &all[..4], KvDtype::Bf16);
            assert_close("split segments", &got, &want, 0.005);
        }
    });
    let layer = Grouped::new((4, 1, 128), Compute::Bf16);
    let pieces = [(1030, 1, Form::Step, 0), (64, 20, Form::Chunk, 0)];
    let (got, want) = layer.run(&device, &pieces, &[0, 1], KvDtype::Bf16);
    assert_close("real widths", &got, &want, 0.005);
    if let Some(stand_in) = device.stand_in {
        assert_eq!(stand_in.matrix_load_conflicts(), 0, "loads of matrices that share a bank");
    }
}

/// Heads that tensor cores do not take, and rows that are kept as they are, have the bits of f32
/// arithmetic; what they do take is rounded.
#[test]
fn grouped_attention_is_rounded_only_where_rows_are() {
    let Some(device) = device() else { return };
    let pieces = [(100, 1, Form::Step, 0), (64, 20, Form::Chunk, 0)];
    let cases = [
        ((2, 1, 24), KvDtype::Bf16, false),
        ((2, 1, 144), KvDtype::Bf16, false),
        ((2, 1, 32), KvDtype::F32, false),
        ((2, 1, 32), KvDtype::Bf16, true),
    ];
    for (shape, dtype, rounds) in cases {
        let of = |compute| Grouped::new(shape, compute).run(&device, &pieces, &[0, 1], dtype).0;
        let [plain, rounded] = [of(Compute::F32), of(Compute::Bf16)];
        for rows in [0..1, 1..21] {
            let values =
                |all: &[f32]| all[rows.start * 2 * shape.2..rows.end * 2 * shape.2].to_vec();
            let differs = values(&plain) != values(&rounded);
            assert_eq!(differs, rounds, "rows {rows:?} of {shape:?} in {dtype:?}");
        }
    }
}

/// Rows of a prompt share blocks of 128 queries, generated ones have blocks of their own, and
/// segments of a single one are split: the bits are the same.
#[test]
fn a_generated_row_of_grouped_attention_has_the_bits_of_a_prompts_row() {
    let Some(device) = device() else { return };
    let width = 6 * 48;
    for (compute, dtype) in [(Compute::F32, KvDtype::F32), (Compute::Bf16, KvDtype::Bf16)] {
        let layer = Grouped::new((6, 2, 48), compute);
        let run = |start, rows, form| {
            let (all, _) = layer.run(&device, &[(start, rows, form, 0)], &[0], dtype);
            all[..rows * width].to_vec()
        };
        let whole = run(1000, 60, Form::Chunk);
        assert!(run(1059, 1, Form::Step) == whole[59 * width..], "the last of {compute:?}");
        assert!(run(1020, 1, Form::Step) == whole[20 * width..21 * width], "one of {compute:?}");
        let replayed = run(1021, 7, Form::Step);
        assert!(replayed == whole[21 * width..28 * width], "replayed of {compute:?}");
    }
}

#[test]
fn a_row_of_grouped_attention_has_the_same_bits_in_every_batch() {
    let Some(device) = device() else { return };
    let all: Vec<usize> = (0..8).collect();
    for (head_dim, compute) in [(24, Compute::F32), (48, Compute::Bf16)] {
        let layer = Grouped::new((6, 2, head_dim), compute);
        let width = 6 * head_dim;
        let (together, _) = layer.run(&device, &MIXED, &all, KvDtype::Bf16);
        let mut row = 0;
        for (i, piece) in MIXED.iter().enumerate() {
            let (alone, _) = layer.run(&device, &[*piece], &[i], KvDtype::Bf16);
            let values = piece.1 * width;
            let of_batch = &together[row * width..][..values];
            assert!(alone[..values] == *of_batch, "sequence {i} of {compute:?}");
            row += piece.1;
        }
    }
}

#[test]
fn sanitizers_find_nothing() {
    let Some(device) = device() else { return };
    sanitized(&device, || {
        let latent = Latent::new(SMALL, Compute::F32);
        let pieces = [(1020, 6, Form::Chunk, 4), (3, 1, Form::Step, 0)];
        latent.run(&device, &pieces, &[0, 1], KvDtype::Bf16);
        let latent = Latent::new(WHOLE, Compute::Bf16);
        latent.run(&device, &[(1120, 1, Form::Step, 0)], &[0], KvDtype::Bf16);
        latent.run(&device, &[(1010, 20, Form::Chunk, 18)], &[0], KvDtype::Bf16);
        let grouped = Grouped::new((2, 2, 10), Compute::F32);
        grouped.run(&device, &[(1024, 1, Form::Step, 0)], &[0], KvDtype::F32);
        let grouped = Grouped::new((4, 1, 32), Compute::Bf16);
        let pieces = [(1030, 1, Form::Step, 0), (100, 20, Form::Chunk, 0)];
        grouped.run(&device, &pieces, &[0, 1], KvDtype::Bf16);
    });
}

#[test]
fn segments_merged_out_of_order_are_caught() {
    let change = (
        "cuda/attention.cu",
        "int segment = 0; segment <= last; segment++",
        "int segment = last; segment >= 0; segment--",
    );
    assert_caught(
        "a_row_of_grouped_attention_has_the_same_bits_in_every_batch",
        change,
        "sequence",
    );
}

/// What stands behind a sequence's end in its last block is not a number in these tests.
#[test]
fn values_behind_the_end_that_are_read_are_caught() {
    let change = ("cuda/attention.cu", "place < seen && first + column", "first + column");
    assert_caught("grouped_attention_is_its_definition", change, "apart");
}

#[test]
fn a_row_that_sees_one_position_less_is_caught() {
    let change = (
        "cuda/attention.cu",
        "tile_at + part + i * 8 <= position ?",
        "tile_at + part + i * 8 < position ?",
    );
    assert_caught("latent_attention_of_wide_models_is_its_definition", change, "apart");
}

#[test]
fn a_missing_barrier_before_a_tile_is_read_is_caught() {
    let change =
        ("cuda/attention.cu", "seen, c, false);\n    __syncthreads();", "seen, c, false);");
    assert_caught("latent_attention_of_wide_models_is_its_definition", change, "apart");
}

/// The numbers stay right in most orders of threads: the race detector sees it in all.
#[test]
fn a_tile_of_latents_that_is_filled_while_it_is_read_is_caught() {
    let right = "    __syncthreads();\n    int ahead = at + (LATENT";
    let change = ("cuda/attention_mma.cu", right, "    int ahead = at + (LATENT");
    assert_caught("sanitizers_find_nothing", change, "data race");
}

#[test]
fn latents_that_share_a_bank_are_caught() {
    let right = "row * CHUNKS + (chunk ^ (row & 7))";
    let change = ("cuda/attention_mma.cu", right, "row * CHUNKS + chunk");
    assert_caught("rounded_latent_attention_is_near_its_definition", change, "share a bank");
}

// ---- heads on tensor cores

const NEAR: &str = "rounded_grouped_attention_is_near_its_definition";

#[test]
fn a_tile_of_heads_that_is_read_before_it_is_there_is_caught() {
    let right = "    __syncthreads();\n    int ahead = at + TILE;";
    let change = ("cuda/attention_mma.cu", right, "    int ahead = at + TILE;");
    assert_caught(NEAR, change, "apart");
}

#[test]
fn a_tile_of_heads_that_is_filled_while_it_is_read_is_caught() {
    let change = ("cuda/attention_mma.cu", "[ahead / TILE % 2]", "[at / TILE % 2]");
    assert_caught(NEAR, change, "apart");
}

#[test]
fn a_query_of_heads_that_sees_one_position_more_is_caught() {
    let right = "at + place <= position[half] ?";
    let change = ("cuda/attention_mma.cu", right, "at + place <= position[half] + 1 ?");
    assert_caught(NEAR, change, "apart");
}

#[test]
fn values_of_heads_behind_the_end_that_are_read_are_caught() {
    let change = ("cuda/attention_mma.cu", "    if (row < seen)\n", "    if (true)\n");
    assert_caught(NEAR, change, "apart");
}

/// The numbers stay right: the largest score is only what weights are relative to.
#[test]
fn a_largest_score_of_another_query_is_caught() {
    let change = ("cuda/attention_mma.cu", "largest[half], 2)", "largest[half], 6)");
    let name = "a_generated_row_of_grouped_attention_has_the_bits_of_a_prompts_row";
    assert_caught(name, change, "of Bf16");
}

#[test]
fn keys_of_heads_that_share_a_bank_are_caught() {
    let change =
        ("cuda/attention_mma.cu", "row * PITCH + (chunk ^ (row & 7))", "row * PITCH + chunk");
    assert_caught(NEAR, change, "share a bank");
}
