//! What `--preempt auto` weighs against each other, measured on this machine in some milliseconds.

use std::time::{Duration, Instant};

use half::bf16;
use kernels::{
    Arena, ArenaError, Compute, Cpu, Matrix, NarrowRows, PackedMatrix, Rows, RowsMut, Values, gemm,
};

use crate::models::spec::ModelSpec;

/// How long each measurement takes.
const PROBE: Duration = Duration::from_millis(5);

/// Bytes of a copy: more than a cache holds, as a sequence's state is.
const COPY_BYTES: usize = 16 << 20;

/// Bytes per second of copies between two arenas.
///
/// # Errors
/// When the system refuses the arenas.
pub fn link_bytes_per_second() -> Result<f64, ArenaError> {
    let (mut source, mut target) = (Arena::new(COPY_BYTES)?, Arena::new(COPY_BYTES)?);
    // The system gives pages when they are written first; that does not count.
    source.f32s_mut(0, COPY_BYTES / size_of::<f32>()).fill(1.0);
    target.copy_from(0, &source, 0, COPY_BYTES);
    Ok(COPY_BYTES as f64 * per_second(|| target.copy_from(0, &source, 0, COPY_BYTES)))
}

/// Tokens per second of a prompt, by the rate of a matrix product of one cell with as many weights
/// as are active in `spec`: what attention and states cost is left out, so computing again looks a
/// little cheaper than it is.
///
/// # Errors
/// When the system refuses the memory.
pub fn prefill_tokens_per_second(cpu: &Cpu, spec: &ModelSpec) -> Result<f64, ArenaError> {
    let flops = product_flops(cpu, spec, kernels::CELL_LEN)?;
    Ok(flops / 2.0 / spec.active_weights().max(1) as f64)
}

/// FLOP per second of products of `rows` rows with weights that are held as those of `spec`.
///
/// # Errors
/// When the system refuses the memory.
pub fn product_flops(cpu: &Cpu, spec: &ModelSpec, rows: usize) -> Result<f64, ArenaError> {
    const WIDTH: usize = 512;
    let x = vec![0.5_f32; rows * WIDTH];
    let (single, half) = (vec![0.25_f32; WIDTH * WIDTH], vec![bf16::ONE; WIDTH * WIDTH]);
    let values = match spec.compute {
        Compute::F32 => Values::F32(&single),
        Compute::Bf16 => Values::Bf16(&half),
    };
    let matrix = Matrix::new(WIDTH, WIDTH, values);
    let weights = match spec.quantize {
        None => PackedMatrix::new(matrix)?,
        Some(quantization) => PackedMatrix::quantized(matrix, quantization)?,
    };
    let mut narrowed = NarrowRows::new(spec.forms(), rows, WIDTH);
    let mut out = vec![0.0_f32; rows * WIDTH];
    let mut product = || {
        let (x, out) = (Rows::new(&x, WIDTH), RowsMut::new(&mut out, WIDTH));
        gemm::gemm(cpu, x, weights.panels(), &mut narrowed, out);
    };
    product();
    Ok((2 * rows * WIDTH * WIDTH) as f64 * per_second(product))
}

/// How often a second `work` can be done.
fn per_second(mut work: impl FnMut()) -> f64 {
    let start = Instant::now();
    let mut times = 0;
    while times == 0 || start.elapsed() < PROBE {
        work();
        times += 1;
    }
    f64::from(times) / start.elapsed().as_secs_f64().max(1e-9)
}
