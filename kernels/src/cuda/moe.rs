//! Mixture of experts on a device: routing, and the products of the chosen experts.
//!
//! The definitions are [`moe::naive`](crate::moe::naive)'s. Rows are sorted by expert on the
//! device, so that nothing is waited for, and a launch has room for every way in which they can
//! fall to experts.
//!
//! ```text
//! route -> choices -> sort -> gate, up -> silu(gate) up -> down -> combine
//! ```

use bytemuck::{Pod, Zeroable};

use super::dense::silu_mul;
use super::gemm::{Groups, Inputs, Products, RoundedRows, Side, few_rows, many_rows};
use super::launch::{Argument, Kernel};
use super::{Cuda, CudaError, DeviceBuffer, DeviceRows, DeviceRowsMut, DeviceSlice};
use crate::matrix::{Dtype, Matrix};
use crate::moe::{ExpertWeights, MOST_EXPERTS, Router, Score};

const FILE: &str = "moe.cu";
const ROUTE: Kernel<RouteArgument> = Kernel::new(FILE, "route", 128).shared(49_664);
const SORT: Kernel<SortArgument> = Kernel::new(FILE, "sort_choices", 1024).shared(16_384);
const COMBINE: Kernel<CombineArgument> = Kernel::new(FILE, "combine", 256);

/// Most experts chosen for a row: one for each lane of a warp.
pub const MOST_CHOSEN: usize = 32;

#[repr(C)]
#[derive(Clone, Copy)]
struct RouteArgument {
    logits: u64,
    bias: u64,
    choices: u64,
    stride: i64,
    rows: i32,
    experts: i32,
    top_k: i32,
    is_softmax: i32,
    groups: i32,
    top_groups: i32,
    renormalize: i32,
    scale: f32,
}
// SAFETY: the struct of the same name in moe.cu.
unsafe impl Argument for RouteArgument {}

#[repr(C)]
#[derive(Clone, Copy)]
struct SortArgument {
    choices: u64,
    gather: u64,
    place: u64,
    offsets: u64,
    tiles: u64,
    choices_len: i32,
    top_k: i32,
    experts: i32,
    tile_rows: i32,
    most_tiles: i32,
    unused: i32,
}
// SAFETY: the struct of the same name in moe.cu.
unsafe impl Argument for SortArgument {}

#[repr(C)]
#[derive(Clone, Copy)]
struct CombineArgument {
    choices: u64,
    place: u64,
    y: u64,
    out: u64,
    out_stride: i64,
    width: i32,
    top_k: i32,
}
// SAFETY: the struct of the same name in moe.cu.
unsafe impl Argument for CombineArgument {}

/// An expert chosen for a row, as [`moe::Choice`](crate::moe::Choice).
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct Choice {
    /// The expert.
    pub expert: u32,
    /// Its weight.
    pub weight: f32,
}

/// Chooses `top_k` experts for each row of `logits` `[rows][experts]`: `choices` becomes
/// `[rows][top_k]`, by ascending expert. `bias` is `[experts]` where the router has one.
///
/// # Errors
/// When the launch fails.
///
/// # Panics
/// When the shapes do not fit, or there are more than 1,024 experts or [`MOST_CHOSEN`] chosen.
pub fn route(
    cuda: &Cuda,
    router: &Router,
    logits: DeviceRows<'_>,
    bias: Option<DeviceSlice<'_, f32>>,
    choices: &mut DeviceBuffer<Choice>,
) -> Result<(), CudaError> {
    let logits = logits.extent;
    assert!(router.experts <= MOST_EXPERTS && router.top_k <= router.experts.min(MOST_CHOSEN));
    assert_eq!(logits.width, router.experts);
    assert_eq!(bias.map(|bias| bias.len()), router.has_bias().then_some(router.experts));
    assert!(choices.len() >= logits.count * router.top_k, "choices of {} rows", logits.count);
    assert!(router.experts.is_multiple_of(router.groups) && router.top_groups <= router.groups);
    let argument = RouteArgument {
        logits: logits.at,
        bias: bias.map_or(0, |bias| bias.at),
        choices: choices.address(),
        stride: logits.stride as i64,
        rows: logits.count as i32,
        experts: router.experts as i32,
        top_k: router.top_k as i32,
        is_softmax: (router.score == Score::Softmax).into(),
        groups: router.groups as i32,
        top_groups: router.top_groups as i32,
        renormalize: router.renormalize.into(),
        scale: router.scale,
    };
    // SAFETY: a warp reads its row's logits and the bias, and writes its row's choices.
    unsafe { cuda.launch(&ROUTE, [logits.count.div_ceil(4), 1, 1], argument) }
}

/// The weights of a layer's experts.
#[derive(Debug)]
pub struct Experts {
    /// All gates, all ups, all downs, each aligned to 16 bytes.
    bytes: DeviceBuffer<u8>,
    /// Where gates, ups and downs begin, and how far behind that each expert's is.
    tables: [(usize, DeviceBuffer<i64>); 3],
    count: usize,
    inter: usize,
    hidden: usize,
    dtype: Dtype,
}

impl Experts {
    /// Copies of `experts`, which all have one shape and type.
    ///
    /// # Errors
    /// When the device has no room.
    ///
    /// # Panics
    /// When there are none, or they differ.
    pub fn new(cuda: &Cuda, experts: &[ExpertWeights<Matrix<'_>>]) -> Result<Experts, CudaError> {
        let first = experts.first().expect("a layer has experts").gate;
        let (inter, hidden, dtype) = (first.rows, first.cols, first.values.dtype());
        for ExpertWeights { gate, up, down } in experts {
            let sizes = [gate, up, down].map(|w| (w.rows, w.cols, w.values.dtype()));
            let (wide, narrow) = ((inter, hidden, dtype), (hidden, inter, dtype));
            assert_eq!(sizes, [wide, wide, narrow], "experts of other shapes");
        }
        let each = (inter * hidden * dtype.bytes()).next_multiple_of(16);
        let part = each * experts.len();
        let mut bytes = DeviceBuffer::zeros(cuda, 3 * part)?;
        for (i, ExpertWeights { gate, up, down }) in experts.iter().enumerate() {
            for (kind, matrix) in [gate, up, down].into_iter().enumerate() {
                bytes.write(cuda, kind * part + i * each, matrix.values.bytes())?;
            }
        }
        let behind: Vec<i64> = (0..experts.len()).map(|i| (i * each) as i64).collect();
        let table = |kind: usize| Ok((kind * part, DeviceBuffer::of(cuda, &behind)?));
        let tables = [table(0)?, table(1)?, table(2)?];
        Ok(Experts { bytes, tables, count: experts.len(), inter, hidden, dtype })
    }
}

impl Experts {
    /// How the weights are encoded.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Whether [`experts`] takes rounded rows for them.
    pub fn takes_rounded(&self) -> bool {
        self.dtype == Dtype::Bf16 && [self.inter, self.hidden].iter().all(|w| w.is_multiple_of(8))
    }
}

/// Working memory of [`experts`], made once for the largest batch.
#[derive(Debug)]
pub struct Workspace {
    gather: DeviceBuffer<i32>,
    place: DeviceBuffer<i32>,
    offsets: DeviceBuffer<i32>,
    tiles: DeviceBuffer<i32>,
    gate: DeviceBuffer<f32>,
    up: DeviceBuffer<f32>,
    y: DeviceBuffer<f32>,
    rounded: RoundedRows,
    most_pairs: usize,
}

impl Workspace {
    /// For up to `rows` rows of such experts, `top_k` chosen for each.
    ///
    /// # Errors
    /// When the device has no room.
    pub fn new(
        cuda: &Cuda,
        experts: &Experts,
        rows: usize,
        top_k: usize,
    ) -> Result<Workspace, CudaError> {
        let pairs = rows * top_k;
        let index = |len| DeviceBuffer::zeros(cuda, len);
        let value = |len| DeviceBuffer::zeros(cuda, len);
        Ok(Workspace {
            gather: index(pairs)?,
            place: index(pairs)?,
            offsets: index(experts.count + 1)?,
            tiles: index(2 * most_tiles(pairs, experts.count, few_rows(false)))?,
            gate: value(pairs * experts.inter)?,
            up: value(pairs * experts.inter)?,
            y: value(pairs * experts.hidden)?,
            rounded: RoundedRows::new(cuda, pairs, experts.inter)?,
            most_pairs: pairs,
        })
    }
}

/// Tiles that so many pairs fill at most: each expert's last one may be short.
fn most_tiles(pairs: usize, experts: usize, tile_rows: usize) -> usize {
    pairs / tile_rows + experts.min(pairs)
}

/// `out = Σ weight · down(silu(gate x) · up x)` over each row's choices; `choices` is
/// `[rows][top_k]`, by ascending expert within a row. Rounded rows are for bf16 weights and widths
/// that are multiples of 8.
///
/// # Errors
/// When a launch fails.
///
/// # Panics
/// When the shapes do not fit or the workspace is too small.
pub fn experts(
    cuda: &Cuda,
    (x, choices, top_k): (Inputs<'_>, &DeviceBuffer<Choice>, usize),
    experts: &Experts,
    work: &mut Workspace,
    out: DeviceRowsMut<'_>,
) -> Result<(), CudaError> {
    let (x, out) = (x.side(), out.extent);
    let (rows, pairs, inter, hidden) = (x.count, x.count * top_k, experts.inter, experts.hidden);
    assert_eq!((out.count, out.width), (rows, hidden));
    assert_eq!(x.width, hidden);
    assert!(choices.len() >= pairs && work.most_pairs >= pairs, "{pairs} pairs");
    assert!(experts.count <= MOST_EXPERTS && work.offsets.len() == experts.count + 1);
    let whole = [inter, hidden].iter().all(|width| width.is_multiple_of(8));
    assert!(!x.rounded || whole, "rounded rows of {hidden} and {inter}");
    if rows == 0 {
        return Ok(());
    }
    // Tiles for many rows pay once most of their rows are there.
    let many = pairs >= experts.count * many_rows(x.rounded) / 2;
    let tile_rows = if many { many_rows(x.rounded) } else { few_rows(x.rounded) };
    let most_tiles = most_tiles(pairs, experts.count, tile_rows);
    let sort = SortArgument {
        choices: choices.address(),
        gather: work.gather.address(),
        place: work.place.address(),
        offsets: work.offsets.address(),
        tiles: work.tiles.address(),
        choices_len: pairs as i32,
        top_k: top_k as i32,
        experts: experts.count as i32,
        tile_rows: tile_rows as i32,
        most_tiles: most_tiles as i32,
        unused: 0,
    };
    // SAFETY: choices are of these experts, and the tables have room for so many pairs and tiles.
    unsafe { cuda.launch(&SORT, [1, 1, 1], sort)? }
    let grouped = |x: Side, gather: bool, weights: usize, n: usize, out: &DeviceBuffer<f32>| {
        let products = Products {
            x,
            w: experts.bytes.address() + experts.tables[weights].0 as u64,
            dtype: experts.dtype,
            size: (pairs, n, x.width),
            out: (out.address(), n),
            add: false,
            narrow: false,
            batch: super::gemm::Batch::ONE,
            groups: Some(Groups {
                gather: if gather { work.gather.address() } else { 0 },
                tiles: work.tiles.address(),
                offsets: work.offsets.address(),
                table: experts.tables[weights].1.address(),
                most_tiles,
                many,
            }),
        };
        // SAFETY: sorted rows name rows of x; out has room for all pairs; weights are as wide.
        unsafe { products.launch(cuda) }
    };
    grouped(x, true, 0, inter, &work.gate)?;
    grouped(x, true, 1, inter, &work.up)?;
    silu_mul(cuda, work.gate.rows_mut(pairs, inter), work.up.rows(pairs, inter))?;
    let gate = work.gate.rows(pairs, inter);
    let gate = match x.rounded {
        true => work.rounded.round_extent(cuda, gate.extent)?,
        false => Side::f32(gate.extent),
    };
    grouped(gate, false, 2, hidden, &work.y)?;
    let argument = CombineArgument {
        choices: choices.address(),
        place: work.place.address(),
        y: work.y.address(),
        out: out.at,
        out_stride: out.stride as i64,
        width: hidden as i32,
        top_k: top_k as i32,
    };
    // SAFETY: places are below `pairs`, rows below those of out.
    unsafe { cuda.launch(&COMBINE, [hidden.div_ceil(256), rows, 1], argument) }
}
