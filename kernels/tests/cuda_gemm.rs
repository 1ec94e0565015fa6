//! Products with weights on a device against their definitions.

mod cuda_support;

use bytemuck::cast_slice;
use cuda_support::{Device, Values, assert_caught, assert_close, device, sanitized, with_seeds};
use half::{bf16, f16};
use kernels::cuda::gemm::{DeviceMatrix, Inputs, RoundedRows, gemm, gemm_add};
use kernels::cuda::{DeviceArena, DeviceBuffer};
use kernels::gemm::naive;
use kernels::{Dtype, Matrix, Rows, RowsMut};

/// Weights as a file has them, and their values.
struct Weights {
    bytes: Vec<u8>,
    dtype: Dtype,
    rows: usize,
    cols: usize,
}

impl Weights {
    fn new(values: &mut Values, rows: usize, cols: usize, dtype: Dtype) -> Weights {
        let values = values.take(rows * cols);
        let bytes = match dtype {
            Dtype::F32 => cast_slice(&values).to_vec(),
            Dtype::Bf16 => {
                let values: Vec<_> = values.into_iter().map(bf16::from_f32).collect();
                cast_slice(&values).to_vec()
            }
            Dtype::F16 => {
                let values: Vec<_> = values.into_iter().map(f16::from_f32).collect();
                cast_slice(&values).to_vec()
            }
        };
        Weights { bytes, dtype, rows, cols }
    }

    /// Products with `x` by the definition.
    fn naive(&self, x: Rows<'_>, rounded: bool) -> Vec<f32> {
        let mut out = vec![0.0; x.count() * self.rows];
        let values = kernels::Values::of_bytes(&self.bytes, self.dtype);
        let matrix = Matrix::new(self.rows, self.cols, values);
        let form = if rounded { naive::gemm_bf16 } else { naive::gemm };
        form(x, matrix, RowsMut::new(&mut out, self.rows));
        out
    }

    fn upload(&self, device: &Device) -> DeviceArena {
        let mut arena = DeviceArena::new(&device.cuda, self.bytes.len()).expect("room");
        arena.write(&device.cuda, 0, &self.bytes).expect("it copies");
        arena
    }

    fn matrix<'a>(&self, arena: &'a DeviceArena) -> DeviceMatrix<'a> {
        let bytes = arena.slice(0, self.bytes.len());
        DeviceMatrix::new(self.rows, self.cols, self.dtype, bytes)
    }
}

/// What the device gives for the first `rows` rows of `x`, whose rows have three more values
/// before them, or for four a run when there is one.
fn on_device(
    device: &Device,
    (x, width, from): (&[f32], usize, usize),
    rows: usize,
    weights: &Weights,
    rounded: bool,
    add: Option<f32>,
) -> Vec<f32> {
    let cuda = &device.cuda;
    let arena = weights.upload(device);
    let x_on = DeviceBuffer::of(cuda, x).expect("room");
    let x_rows = x_on.rows(rows, width).columns(from, weights.cols);
    let mut room = RoundedRows::new(cuda, rows, weights.cols).expect("room");
    let inputs = match rounded {
        true => Inputs::Bf16(room.round(cuda, x_rows).expect("it launches")),
        false => Inputs::F32(x_rows),
    };
    let before = vec![add.unwrap_or(f32::NAN); rows * weights.rows];
    let mut out = DeviceBuffer::of(cuda, &before).expect("room");
    let product = if add.is_some() { gemm_add } else { gemm };
    product(cuda, inputs, weights.matrix(&arena), out.rows_mut(rows, weights.rows))
        .expect("it launches");
    out.read(cuda).expect("it ran")
}

/// Rows, outputs, inputs: one row, edges of every tile, fewer inputs than a slice, several slices,
/// and inputs that no vector divides.
const SHAPES: [(usize, usize, usize); 6] =
    [(1, 33, 64), (9, 40, 200), (17, 70, 520), (65, 130, 36), (130, 65, 1032), (70, 9, 7)];

#[test]
fn products_are_their_definition() {
    let Some(device) = device() else { return };
    with_seeds(&device, 2, |seed| {
        for (i, (rows, n, k)) in SHAPES.into_iter().enumerate() {
            let mut values = Values::new(seed + 10 * i as u64);
            let from = [0, 4, 3][i % 3];
            let x = values.take(rows * (k + from));
            let x_rows = Rows::new(&x, k + from).columns(from, k);
            for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
                let weights = Weights::new(&mut values, n, k, dtype);
                let got = on_device(&device, (&x, k + from, from), rows, &weights, false, None);
                let what = format!("{rows} x {k}, {n} outputs of {dtype:?}");
                assert_close(&what, &got, &weights.naive(x_rows, false), 1e-5);
            }
        }
    });
}

#[test]
fn rounded_products_are_their_definition() {
    let Some(device) = device() else { return };
    with_seeds(&device, 2, |seed| {
        for (i, (rows, n, k)) in SHAPES.into_iter().enumerate() {
            let mut values = Values::new(seed + 10 * i as u64);
            let x = values.take(rows * k);
            let weights = Weights::new(&mut values, n, k, Dtype::Bf16);
            let got = on_device(&device, (&x, k, 0), rows, &weights, true, None);
            let want = weights.naive(Rows::new(&x, k), true);
            assert_close(&format!("{rows} x {k}, {n} outputs"), &got, &want, 1e-5);
        }
    });
    if let Some(stand_in) = device.stand_in {
        assert_eq!(stand_in.matrix_load_conflicts(), 0, "loads of matrices that share a bank");
    }
}

#[test]
fn adding_a_product_is_the_product_then_the_sum() {
    let Some(device) = device() else { return };
    let mut values = Values::new(3);
    for (rows, n, k) in [(3, 40, 200), (70, 40, 200)] {
        let x = values.take(rows * k);
        let weights = Weights::new(&mut values, n, k, Dtype::Bf16);
        for rounded in [false, true] {
            let x = (&x[..], k, 0);
            let product = on_device(&device, x, rows, &weights, rounded, None);
            let added = on_device(&device, x, rows, &weights, rounded, Some(2.5));
            assert!(product.iter().zip(&added).all(|(product, added)| product + 2.5 == *added));
        }
    }
}

/// One row alone, in a few, and among so many that other kernels compute it.
#[test]
fn a_row_has_the_same_bits_in_every_batch() {
    let Some(device) = device() else { return };
    let (n, k, most) = (72, 1208, 140);
    let mut values = Values::new(5);
    let x = values.take(most * k);
    for (dtype, rounded) in [(Dtype::F32, false), (Dtype::Bf16, false), (Dtype::Bf16, true)] {
        let weights = Weights::new(&mut values, n, k, dtype);
        let all = on_device(&device, (&x, k, 0), most, &weights, rounded, None);
        for rows in [1, 8, 20, 64, 65] {
            let some = on_device(&device, (&x, k, 0), rows, &weights, rounded, None);
            assert!(some == all[..rows * n], "{rows} rows of {dtype:?}, rounded: {rounded}");
        }
    }
}

#[test]
fn sanitizers_find_nothing() {
    let Some(device) = device() else { return };
    sanitized(&device, || {
        let mut values = Values::new(1);
        let x = values.take(130 * 520);
        for (rows, k, rounded) in
            [(3, 200, false), (70, 36, false), (3, 520, true), (30, 264, true), (130, 264, true)]
        {
            let weights = Weights::new(&mut values, 17, k, Dtype::Bf16);
            on_device(&device, (&x[..rows * k], k, 0), rows, &weights, rounded, None);
        }
    });
}

/// The numbers stay right, whatever the order of threads: only the race detector sees it.
#[test]
fn a_buffer_that_is_filled_while_it_is_read_is_caught() {
    let change = ("cuda/gemm.cu", "    __syncthreads();\n    int ahead", "    int ahead");
    assert_caught("sanitizers_find_nothing", change, "data race");
}

#[test]
fn a_stage_that_is_read_before_it_has_landed_is_caught() {
    let wait = "copy_async_wait(STAGES - 2);\n    // The copies of this stage";
    let changed = wait.replace("- 2", "- 1");
    let change = ("cuda/gemm.cu", wait, changed.as_str());
    assert_caught("rounded_products_are_their_definition", change, "in flight");
}

#[test]
fn slices_added_out_of_order_are_caught() {
    let change = (
        "cuda/gemm.cu",
        "for (int i = 1; i * a.slice < a.k; i++) total",
        "for (int i = SLICES - 1; i > 0; i--) if (i * a.slice < a.k) total",
    );
    assert_caught("a_row_has_the_same_bits_in_every_batch", change, "rows of");
}

#[test]
fn rows_that_share_a_bank_are_caught() {
    let change = ("cuda/gemm.cu", "chunk ^ (row & 7)", "chunk");
    assert_caught("rounded_products_are_their_definition", change, "share a bank");
}
