//! Softmax attention over paged rows, on a device: what [`mla`](super::mla) and
//! [`gqa`](super::gqa) launch.
//!
//! A row's result is the same whether its segments are walked one after another or split over the
//! device and merged: which of the two is chosen by how many rows there are.

use super::launch::{Argument, Kernel};
use super::memory::Extent;
use super::{Cuda, CudaError, DeviceArena, DeviceSpans};
use crate::attention::{KvDtype, KvPlace};
use crate::span::SEGMENT_LEN;

const FILE: &str = "attention.cu";
const MMA: &str = "attention_mma.cu";
const ATTEND: Kernel<AttendArgument> = Kernel::new(FILE, "attend", 256).shared(165888);
const LATENTS: Kernel<AttendArgument> = Kernel::new(MMA, "attend_latents", 256).shared(154_624);
const FEW_HEADS: Kernel<AttendArgument> = Kernel::new(MMA, "attend_few_heads", 128).shared(73_728);
const MANY_HEADS: Kernel<AttendArgument> =
    Kernel::new(MMA, "attend_many_heads", 256).shared(131_072);
const EXPANDED: Kernel<AttendArgument> = Kernel::new(MMA, "attend_expanded", 256).shared(147_456);
const MERGE: Kernel<AttendArgument> = Kernel::new(FILE, "attend_merge", 128);
const WRITE: Kernel<KvArgument> = Kernel::new(FILE, "write_kv", 256);
const GATHER: Kernel<GatherArgument> = Kernel::new(FILE, "gather_latents", 256);

/// Queries of a block of threads, and of one of heads on tensor cores.
const QUERIES: usize = 32;
const FEW_QUERIES: usize = 16;
const MANY_QUERIES: usize = 128;
/// Widest keys and values of heads on tensor cores, and keys that are expanded.
const MOST_HEAD: usize = 128;
const MOST_EXPANDED: usize = 192;
/// Rows that a thread of `write_kv` has.
const KV_RUN: usize = 32;
/// Widest keys and values.
pub(super) const MOST_WIDTH: usize = 576;
pub(super) const MOST_VALUES: usize = 512;
/// Spans of a launch over expanded keys.
pub(super) const MOST_SPANS: usize = 32;

#[repr(C)]
#[derive(Clone, Copy)]
struct AttendArgument {
    q: u64,
    q_more: u64,
    expanded: u64,
    arena: u64,
    spans: u64,
    tables: u64,
    out: u64,
    parts: u64,
    q_stride: i64,
    q_head: i64,
    more_stride: i64,
    more_head: i64,
    out_stride: i64,
    out_head: i64,
    at: i64,
    heads: i32,
    key_heads: i32,
    group: i32,
    block_heads: i32,
    block_rows: i32,
    own: i32,
    more: i32,
    values: i32,
    rank: i32,
    source: i32,
    which: i32,
    narrow: i32,
    first_segment: i32,
    end_segment: i32,
    split: i32,
    segments: i32,
    scale: f32,
    bases: [i32; MOST_SPANS],
    unused: i32,
}
// SAFETY: the struct of the same name in attention.cuh.
unsafe impl Argument for AttendArgument {}

#[repr(C)]
#[derive(Clone, Copy)]
struct KvArgument {
    rows: u64,
    arena: u64,
    spans: u64,
    tables: u64,
    stride: i64,
    at: i64,
    total: i32,
    width: i32,
    columns: i32,
    narrow: i32,
}
// SAFETY: the struct of the same name in attention.cu.
unsafe impl Argument for KvArgument {}

#[repr(C)]
#[derive(Clone, Copy)]
struct GatherArgument {
    arena: u64,
    spans: u64,
    tables: u64,
    out: u64,
    at: i64,
    stride: i64,
    row: i32,
    width: i32,
    segment: i32,
    narrow: i32,
    rounded: i32,
    unused: i32,
    bases: [i32; MOST_SPANS],
}
// SAFETY: the struct of the same name in attention.cu.
unsafe impl Argument for GatherArgument {}

/// The spans of a step and the per-token rows of one layer.
#[derive(Debug, Clone, Copy)]
pub struct DevicePaged<'a> {
    /// The spans.
    pub spans: &'a DeviceSpans<'a>,
    /// Where blocks lie: the arena the step was uploaded for.
    pub arena: &'a DeviceArena,
    /// Where the layer's rows lie in a block.
    pub place: KvPlace,
    /// Positions that the longest sequence has after the step, at least; a graph can be replayed
    /// with sequences of up to as many.
    pub most_positions: usize,
}

impl DevicePaged<'_> {
    fn segments(&self) -> usize {
        self.most_positions.div_ceil(SEGMENT_LEN).max(1)
    }

    /// Asserts that a layer's part of a block, `values` values, lies inside it, and that segments
    /// are counted for every position.
    pub(super) fn check(&self, values: usize) {
        let (most, seen) = (self.most_positions, self.spans.positions_seen);
        assert!(seen <= most, "{seen} positions, at most {most} were told of");
        check_place(self.spans, self.arena, self.place, values);
    }
}

fn check_place(spans: &DeviceSpans<'_>, arena: &DeviceArena, place: KvPlace, values: usize) {
    assert_eq!(spans.arena, arena.address(), "the step is of another arena");
    assert!(place.at.is_multiple_of(16), "a layer at {} of a block", place.at);
    let end = place.at + values * place.dtype.bytes();
    assert!(end <= spans.block_bytes, "{values} values at {} leave the block", place.at);
    assert!(spans.has_tables, "a block table that is shorter than its sequence");
}

/// Which spans a launch is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Over {
    /// Those of form Step, padding among them.
    Steps,
    /// Those of form Chunk, all rows.
    Chunks,
    /// Those of form Chunk, rows from `absorbed_from` on, at most as many of a span.
    Absorbed(usize),
}

/// Where keys and values come from.
#[derive(Debug, Clone, Copy)]
pub(super) enum Source {
    /// Latent rows of `rank` values and a shared part.
    Latents,
    /// Key columns and value rows of heads.
    Heads,
}

/// A part of the queries: address, values from row to row and from head to head.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    pub at: u64,
    pub stride: usize,
    pub head: usize,
    pub width: usize,
}

/// What is attended to what.
#[derive(Debug, Clone, Copy)]
pub(super) struct Attention<'a> {
    pub paged: DevicePaged<'a>,
    pub source: Source,
    pub heads: usize,
    pub key_heads: usize,
    pub q: Part,
    pub more: Part,
    pub out: Part,
    pub scale: f32,
    /// Whether products may be of values rounded to bf16.
    pub rounds: bool,
    /// Address and length of working memory for parts.
    pub parts: (u64, usize),
}

/// Values of the parts of a row in a segment.
pub(super) fn parts_len(heads: usize, values: usize) -> usize {
    heads * (values + 2)
}

impl Attention<'_> {
    /// Attends the rows of some spans.
    ///
    /// # Safety
    /// Addresses have rows of the step at their strides; the block tables have every position.
    pub(super) unsafe fn launch(self, cuda: &Cuda, over: Over) -> Result<(), CudaError> {
        let spans = self.paged.spans;
        let (first, count, longest) = match over {
            Over::Steps => (0, spans.steps, spans.longest_step),
            Over::Chunks => (spans.steps, spans.chunks, spans.longest),
            Over::Absorbed(most) => (spans.steps, spans.chunks, most),
        };
        let segments = self.paged.segments();
        let room = count * segments * parts_len(self.heads, self.out.width) <= self.parts.1;
        let split = over == Over::Steps && longest == 1 && segments > 1 && room;
        let group = self.heads / self.key_heads;
        let (kernel, queries) = self.kernel(longest * group);
        let blocks = |heads: usize| {
            let runs = group.div_ceil(heads);
            let rows = longest.div_ceil(queries / heads);
            count * rows * self.key_heads * runs * if split { segments } else { 1 }
        };
        // Few blocks of threads are made more by fewer heads in each.
        let mut block_heads = group.min(queries);
        let enough = cuda.properties().multiprocessors;
        while block_heads > 8 && blocks(block_heads) < enough {
            block_heads = block_heads.div_ceil(2);
        }
        let runs = group.div_ceil(block_heads);
        let block_rows = if longest == 1 { 1 } else { queries / block_heads };
        let mut argument = self.argument(first);
        argument.group = group as i32;
        argument.block_heads = block_heads as i32;
        argument.block_rows = block_rows as i32;
        argument.which = if let Over::Absorbed(_) = over { 2 } else { 0 };
        argument.split = split.into();
        argument.segments = segments as i32;
        argument.end_segment = i32::MAX;
        let z = longest.div_ceil(block_rows) * self.key_heads * runs;
        let grid = [if split { segments } else { 1 }, count, z];
        // SAFETY: a block of threads reads queries and writes results of rows of its span below
        // `rows`, and blocks of its table up to its last position, by the caller's promise; parts
        // are `count * segments` by `room`.
        unsafe { cuda.launch(kernel, grid, argument)? }
        if split {
            // SAFETY: as above; the parts read are those written of the same rows.
            unsafe { cuda.launch(&MERGE, [self.heads, count, 1], argument)? }
        }
        Ok(())
    }

    /// The kernel for spans of up to so many queries of a key head, and the queries of a block of
    /// threads. Which of two for heads it is changes no bit.
    fn kernel(&self, queries: usize) -> (&'static Kernel<AttendArgument>, usize) {
        // Latents are read two fragments at a time.
        let by_two = (self.q.width + self.more.width).is_multiple_of(32);
        match self.source {
            Source::Latents if by_two && self.on_cores(MOST_WIDTH, MOST_VALUES) => {
                (&LATENTS, QUERIES)
            }
            Source::Heads if self.on_cores(MOST_HEAD, MOST_HEAD) => match queries {
                ..=64 => (&FEW_HEADS, FEW_QUERIES),
                _ => (&MANY_HEADS, MANY_QUERIES),
            },
            _ => (&ATTEND, QUERIES),
        }
    }

    /// Whether products are on tensor cores: of values rounded to bf16, as the cache has them, in
    /// widths of whole fragments for which there is room.
    fn on_cores(&self, most_width: usize, most_values: usize) -> bool {
        let [own, more, values] = [self.q.width, self.more.width, self.out.width];
        let whole = [own, more, values].iter().all(|width| width.is_multiple_of(16));
        let fits = own + more <= most_width && values <= most_values;
        self.rounds && self.paged.place.dtype == KvDtype::Bf16 && whole && fits
    }

    /// Whether [`launch_expanded`](Attention::launch_expanded) reads keys and values that are
    /// rounded to bf16; shared parts behind latents of `rank` values are copied by eights.
    pub(super) fn expands_rounded(&self, rank: usize) -> bool {
        rank.is_multiple_of(8) && self.on_cores(MOST_EXPANDED, MOST_HEAD)
    }

    fn argument(&self, first_span: usize) -> AttendArgument {
        let Attention { paged, q, more, out, .. } = self;
        assert!(q.width + more.width <= MOST_WIDTH, "keys of {} values", q.width + more.width);
        assert!(out.width <= MOST_VALUES, "values of {}", out.width);
        AttendArgument {
            q: q.at,
            q_more: more.at,
            expanded: 0,
            arena: paged.arena.address(),
            spans: paged.spans.span_address(first_span),
            tables: paged.spans.tables,
            out: out.at,
            parts: self.parts.0,
            q_stride: q.stride as i64,
            q_head: q.head as i64,
            more_stride: more.stride as i64,
            more_head: more.head as i64,
            out_stride: out.stride as i64,
            out_head: out.head as i64,
            at: paged.place.at as i64,
            heads: self.heads as i32,
            key_heads: self.key_heads as i32,
            group: 1,
            block_heads: 1,
            block_rows: QUERIES as i32,
            own: q.width as i32,
            more: more.width as i32,
            values: out.width as i32,
            rank: 0,
            source: match self.source {
                Source::Latents => 0,
                Source::Heads => 1,
            },
            which: 0,
            narrow: (paged.place.dtype == KvDtype::Bf16).into(),
            first_segment: 0,
            end_segment: 0,
            split: 0,
            segments: 1,
            scale: self.scale,
            bases: [0; MOST_SPANS],
            unused: 0,
        }
    }
}

/// Some chunk spans side by side in working memory, in one segment.
#[derive(Debug, Clone, Copy)]
pub(super) struct Together {
    /// The first, among those of form Chunk, and how many.
    pub first: usize,
    pub count: usize,
    /// First row of each.
    pub bases: [i32; MOST_SPANS],
    pub segment: usize,
}

/// Copies latents of a segment, `width` of `row` values each, side by side.
///
/// # Safety
/// `out` has room for the rows of each span at its base, `stride` values each, bf16 if `rounded`.
pub(super) unsafe fn gather(
    cuda: &Cuda,
    paged: DevicePaged<'_>,
    together: Together,
    (row, width): (usize, usize),
    (out, stride, rounded): (u64, usize, bool),
) -> Result<(), CudaError> {
    let spans = paged.spans;
    let argument = GatherArgument {
        arena: paged.arena.address(),
        spans: spans.span_address(spans.steps + together.first),
        tables: spans.tables,
        out,
        at: paged.place.at as i64,
        stride: stride as i64,
        row: row as i32,
        width: width as i32,
        segment: together.segment as i32,
        narrow: (paged.place.dtype == KvDtype::Bf16).into(),
        rounded: rounded.into(),
        unused: 0,
        bases: together.bases,
    };
    // SAFETY: reads positions that spans see, and writes to `out` by the caller's promise.
    unsafe { cuda.launch(&GATHER, [width.div_ceil(256), together.count, SEGMENT_LEN], argument) }
}

impl Attention<'_> {
    /// Attends rows before `absorbed_from` of some chunk spans, at most `longest` of each, to one
    /// segment of keys and values at `expanded`, in the type that
    /// [`expands_rounded`](Attention::expands_rounded) says. Parts hold what is known of rows that
    /// see more.
    ///
    /// # Safety
    /// As [`launch`](Attention::launch); `expanded` has the rows of `together`, and parts are those
    /// of all rows of the step.
    pub(super) unsafe fn launch_expanded(
        self,
        cuda: &Cuda,
        together: Together,
        (expanded, rank): (u64, usize),
        longest: usize,
    ) -> Result<(), CudaError> {
        let mut argument = self.argument(self.paged.spans.steps + together.first);
        argument.expanded = expanded;
        argument.rank = rank as i32;
        argument.source = 2;
        argument.which = 1;
        argument.bases = together.bases;
        argument.first_segment = together.segment as i32;
        argument.end_segment = together.segment as i32 + 1;
        let (kernel, queries) = match self.expands_rounded(rank) {
            true => (&EXPANDED, MANY_QUERIES),
            false => (&ATTEND, QUERIES),
        };
        argument.block_rows = queries as i32;
        let grid = [1, together.count, longest.div_ceil(queries) * self.heads];
        // SAFETY: as in `launch`.
        unsafe { cuda.launch(kernel, grid, argument) }
    }
}

/// Writes rows of all spans to their places in blocks, in groups of `width` values: `[group][64]
/// [width]`, or `[values][64]` in columns.
pub(super) fn write(
    cuda: &Cuda,
    spans: &DeviceSpans<'_>,
    rows: Extent,
    (width, columns): (usize, bool),
    arena: &mut DeviceArena,
    place: KvPlace,
) -> Result<(), CudaError> {
    assert_eq!(rows.count, spans.rows);
    assert!(rows.width.is_multiple_of(width));
    check_place(spans, arena, place, rows.width * crate::span::BLOCK_LEN);
    let argument = KvArgument {
        rows: rows.at,
        arena: arena.address(),
        spans: spans.spans,
        tables: spans.tables,
        stride: rows.stride as i64,
        at: place.at as i64,
        total: rows.width as i32,
        width: width as i32,
        columns: columns.into(),
        narrow: (place.dtype == KvDtype::Bf16).into(),
    };
    let count = spans.steps + spans.chunks;
    let grid = [rows.width.div_ceil(256), count, spans.longest.div_ceil(KV_RUN)];
    // SAFETY: reads rows of the step, and writes inside blocks of the arena by `check_place`; the
    // tables have a block for each position of their spans, as the upload asserts.
    unsafe { cuda.launch(&WRITE, grid, argument) }
}
