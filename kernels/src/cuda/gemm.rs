//! Products with weight matrices on a device: `out = x wᵀ`.
//!
//! The definitions are [`gemm::naive`](crate::gemm::naive)'s. Inputs are cut into at most eight
//! slices by their number alone, and every kernel adds up a slice from its first input to its last
//! and the slices in order: a row has the same bits whatever stands beside it.

use half::bf16;

use super::launch::{Argument, Kernel};
use super::memory::Extent;
use super::{Cuda, CudaError, DeviceBuffer, DeviceRows, DeviceRowsMut, DeviceSlice};
use crate::matrix::Dtype;

const FILE: &str = "gemm.cu";
const FEW: Kernel<GemmArgument> = Kernel::new(FILE, "gemm_few", 256).shared(54_272);
const MANY: Kernel<GemmArgument> = Kernel::new(FILE, "gemm_many", 256).shared(18_432);
const MMA_FEW: Kernel<GemmArgument> = Kernel::new(FILE, "gemm_mma_few", 256).shared(107_008);
const MMA_SOME: Kernel<GemmArgument> = Kernel::new(FILE, "gemm_mma_some", 256).shared(164_864);
const MMA_MANY: Kernel<GemmArgument> = Kernel::new(FILE, "gemm_mma_many", 256).shared(163_840);
const ROUND: Kernel<RoundArgument> = Kernel::new(FILE, "round_rows", 256);

/// Slices that inputs are cut into at most, and what their length is a multiple of.
const SLICES: usize = 8;
const SLICE_UNIT: usize = 64;

#[repr(C)]
#[derive(Clone, Copy)]
struct GemmArgument {
    x: u64,
    w: u64,
    out: u64,
    gather: u64,
    tiles: u64,
    offsets: u64,
    table: u64,
    x_stride: i64,
    out_stride: i64,
    x_batch: i64,
    w_batch: i64,
    out_batch: i64,
    rows: i32,
    n: i32,
    k: i32,
    slice: i32,
    add: i32,
    dtype: i32,
    by_four: i32,
    rounded: i32,
    narrow: i32,
    unused: i32,
}
// SAFETY: the struct of the same name in gemm.cu.
unsafe impl Argument for GemmArgument {}

#[repr(C)]
#[derive(Clone, Copy)]
struct RoundArgument {
    x: u64,
    out: u64,
    x_stride: i64,
    out_stride: i64,
    width: i32,
    unused: i32,
}
// SAFETY: the struct of the same name in gemm.cu.
unsafe impl Argument for RoundArgument {}

/// A weight matrix `[rows, cols]` on the device as stored: `rows` outputs, inputs contiguous.
#[derive(Debug, Clone, Copy)]
pub struct DeviceMatrix<'a> {
    bytes: DeviceSlice<'a, u8>,
    dtype: Dtype,
    rows: usize,
    cols: usize,
}

impl<'a> DeviceMatrix<'a> {
    /// A view of `bytes` as `[rows, cols]` values of `dtype`.
    ///
    /// # Panics
    /// When the bytes are not as many, or not aligned to 16.
    pub fn new(rows: usize, cols: usize, dtype: Dtype, bytes: DeviceSlice<'a, u8>) -> Self {
        assert_eq!(bytes.len(), rows * cols * dtype.bytes(), "a [{rows}, {cols}] matrix");
        assert!(bytes.at.is_multiple_of(16), "weights are aligned to 16 bytes");
        DeviceMatrix { bytes, dtype, rows, cols }
    }

    /// Outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// How a value is encoded.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    pub(super) fn address(&self) -> u64 {
        self.bytes.at
    }
}

/// Rows rounded to bf16, to be multiplied by several matrices: working memory made once.
#[derive(Debug)]
pub struct RoundedRows {
    values: DeviceBuffer<bf16>,
}

/// Rows in a [`RoundedRows`].
#[derive(Debug, Clone, Copy)]
pub struct Rounded<'a> {
    values: DeviceSlice<'a, bf16>,
    count: usize,
    width: usize,
}

impl RoundedRows {
    /// For up to `count` rows of up to `width` values.
    ///
    /// # Errors
    /// When the device has no room.
    pub fn new(cuda: &Cuda, count: usize, width: usize) -> Result<RoundedRows, CudaError> {
        Ok(RoundedRows { values: DeviceBuffer::zeros(cuda, count * stride_of(width))? })
    }

    /// `x`, rounded to the nearest, ties to even.
    ///
    /// # Errors
    /// When the launch fails.
    ///
    /// # Panics
    /// When there are more rows, or wider ones, than there is room for.
    pub fn round(&mut self, cuda: &Cuda, x: DeviceRows<'_>) -> Result<Rounded<'_>, CudaError> {
        let Extent { count, width, .. } = x.extent;
        self.round_extent(cuda, x.extent)?;
        Ok(Rounded { values: self.values.slice(), count, width })
    }

    pub(super) fn round_extent(&mut self, cuda: &Cuda, x: Extent) -> Result<Side, CudaError> {
        let stride = stride_of(x.width);
        assert!(x.count * stride <= self.values.len(), "{} rows of {}", x.count, x.width);
        let argument = RoundArgument {
            x: x.at,
            out: self.values.address(),
            x_stride: x.stride as i64,
            out_stride: stride as i64,
            width: x.width as i32,
            unused: 0,
        };
        // SAFETY: block (i, r) reads columns below `width` of row r, and writes as many of row r
        // here, for which there is room by the assertion.
        unsafe { cuda.launch(&ROUND, [x.width.div_ceil(256), x.count, 1], argument)? }
        let Extent { count, width, .. } = x;
        Ok(Side { at: self.values.address(), count, width, stride, rounded: true })
    }
}

/// Values from a rounded row to the next: rows begin at multiples of 16 bytes.
fn stride_of(width: usize) -> usize {
    width.next_multiple_of(8)
}

/// The rows of a product, in the form that chooses its arithmetic.
#[derive(Debug, Clone, Copy)]
pub enum Inputs<'a> {
    /// Single precision, whatever the weights.
    F32(DeviceRows<'a>),
    /// Rounded, for bf16 weights; products are exact, sums single precision.
    Bf16(Rounded<'a>),
}

/// `out = x wᵀ`.
///
/// # Errors
/// When the launch fails.
///
/// # Panics
/// When the shapes do not fit, or rounded rows meet other weights than bf16.
pub fn gemm(
    cuda: &Cuda,
    x: Inputs<'_>,
    w: DeviceMatrix<'_>,
    out: DeviceRowsMut<'_>,
) -> Result<(), CudaError> {
    plain(cuda, x, w, out, false)
}

/// `out += x wᵀ`: the product is summed first, then added.
///
/// # Errors
/// When the launch fails.
///
/// # Panics
/// As [`gemm`].
pub fn gemm_add(
    cuda: &Cuda,
    x: Inputs<'_>,
    w: DeviceMatrix<'_>,
    out: DeviceRowsMut<'_>,
) -> Result<(), CudaError> {
    plain(cuda, x, w, out, true)
}

fn plain(
    cuda: &Cuda,
    x: Inputs<'_>,
    w: DeviceMatrix<'_>,
    out: DeviceRowsMut<'_>,
    add: bool,
) -> Result<(), CudaError> {
    let (x, out) = (x.side(), out.extent);
    assert_eq!(x.width, w.cols, "x does not fit the weights");
    assert_eq!((x.count, w.rows), (out.count, out.width), "out does not fit");
    let products = Products {
        x,
        w: w.address(),
        dtype: w.dtype,
        size: (out.count, w.rows, w.cols),
        out: (out.at, out.stride),
        add,
        narrow: false,
        batch: Batch::ONE,
        groups: None,
    };
    // SAFETY: x has `count` rows of `cols` values, w `rows` such, out `count` rows of `rows`.
    unsafe { products.launch(cuda) }
}

/// One side of a product.
#[derive(Debug, Clone, Copy)]
pub(super) struct Side {
    pub at: u64,
    pub count: usize,
    pub width: usize,
    pub stride: usize,
    pub rounded: bool,
}

impl Side {
    pub(super) fn f32(rows: Extent) -> Side {
        let Extent { at, count, stride, width } = rows;
        Side { at, count, width, stride, rounded: false }
    }
}

impl Inputs<'_> {
    pub(super) fn side(self) -> Side {
        match self {
            Inputs::F32(rows) => Side::f32(rows.extent),
            Inputs::Bf16(Rounded { values, count, width }) => {
                Side { at: values.at, count, width, stride: stride_of(width), rounded: true }
            }
        }
    }
}

/// Products of the same shape side by side: values from one to the next.
#[derive(Debug, Clone, Copy)]
pub(super) struct Batch {
    pub count: usize,
    pub x: usize,
    pub w: usize,
    pub out: usize,
}

impl Batch {
    pub(super) const ONE: Batch = Batch { count: 1, x: 0, w: 0, out: 0 };
}

/// Rows in groups that have weights of their own: device addresses of what gemm.cu names so.
#[derive(Debug, Clone, Copy)]
pub(super) struct Groups {
    pub gather: u64,
    pub tiles: u64,
    pub offsets: u64,
    pub table: u64,
    /// Tiles at most, of [`few_rows`] or [`many_rows`] rows each.
    pub most_tiles: usize,
    /// Which of the two.
    pub many: bool,
}

/// Products of rows with weights.
#[derive(Debug, Clone, Copy)]
pub(super) struct Products {
    pub x: Side,
    /// Where the weights are; those of groups are so many bytes behind as their table says.
    pub w: u64,
    pub dtype: Dtype,
    /// Rows, outputs, inputs.
    pub size: (usize, usize, usize),
    /// Where rows of outputs are, and the values from one to the next.
    pub out: (u64, usize),
    pub add: bool,
    /// Whether outputs are rounded to bf16; such rows are not added to, and of one product.
    pub narrow: bool,
    pub batch: Batch,
    pub groups: Option<Groups>,
}

/// Rows of a tile of the kernels for few rows.
pub(super) fn few_rows(tensor_cores: bool) -> usize {
    if tensor_cores { 16 } else { 8 }
}

/// Rows of a tile of the kernels for many rows.
pub(super) fn many_rows(tensor_cores: bool) -> usize {
    if tensor_cores { 128 } else { 64 }
}

/// Whether rows rounded to bf16 go through tensor cores: their copies are of eight inputs.
pub(super) fn has_tensor_cores(rounded: bool, inputs: usize) -> bool {
    rounded && inputs.is_multiple_of(8)
}

impl Products {
    /// Launches the kernel for so many rows.
    ///
    /// # Safety
    /// `x`, the weights and `out` have rows of the size, each product of the batch, at their
    /// strides; where there are groups, their tables are of this size.
    pub(super) unsafe fn launch(self, cuda: &Cuda) -> Result<(), CudaError> {
        let Products { x, w, dtype, size, out, add, narrow, batch, groups } = self;
        let (rows, n, k) = size;
        assert!(!x.rounded || dtype == Dtype::Bf16, "rounded rows are for bf16 weights");
        assert!(!narrow || !add && batch.count == 1, "rounded sums are of one product");
        let aligned = batch.x.is_multiple_of(8) && batch.w.is_multiple_of(8);
        let tensor_cores = has_tensor_cores(x.rounded, k) && aligned && w.is_multiple_of(16);
        let many = groups.map_or(rows > 64, |groups| groups.many);
        let (kernel, tile) = match (tensor_cores, many) {
            (false, false) => (&FEW, [32, few_rows(false)]),
            (false, true) => (&MANY, [64, many_rows(false)]),
            (true, false) if groups.is_none() && rows > 16 => (&MMA_SOME, [16, 32]),
            (true, false) => (&MMA_FEW, [16, few_rows(true)]),
            (true, true) => (&MMA_MANY, [128, many_rows(true)]),
        };
        let four_bytes = 4 * dtype.bytes();
        let by_four = x.at.is_multiple_of(16)
            && [x.stride, x.width, batch.x].iter().all(|len| len.is_multiple_of(4))
            && (w as usize).is_multiple_of(four_bytes)
            && batch.w.is_multiple_of(4);
        let argument = GemmArgument {
            x: x.at,
            w,
            out: out.0,
            gather: groups.map_or(0, |groups| groups.gather),
            tiles: groups.map_or(0, |groups| groups.tiles),
            offsets: groups.map_or(0, |groups| groups.offsets),
            table: groups.map_or(0, |groups| groups.table),
            x_stride: x.stride as i64,
            out_stride: out.1 as i64,
            x_batch: batch.x as i64,
            w_batch: batch.w as i64,
            out_batch: batch.out as i64,
            rows: rows as i32,
            n: n as i32,
            k: k as i32,
            slice: k.div_ceil(SLICES).next_multiple_of(SLICE_UNIT) as i32,
            add: add.into(),
            dtype: match dtype {
                Dtype::F32 => 0,
                Dtype::Bf16 => 1,
                Dtype::F16 => 2,
            },
            by_four: by_four.into(),
            rounded: x.rounded.into(),
            narrow: narrow.into(),
            unused: 0,
        };
        let tiles = groups.map_or(rows.div_ceil(tile[1]), |groups| groups.most_tiles);
        let grid = [n.div_ceil(tile[0]), tiles, batch.count];
        // SAFETY: kernels touch rows below `rows` and outputs below `n`, inputs below `k`, by the
        // caller's promise.
        unsafe { cuda.launch(kernel, grid, argument) }
    }
}
