//! Times pieces of work on a device, and fills its memory with what looks random.

use half::bf16;
use kernels::Dtype;
use kernels::cuda::gemm::DeviceMatrix;
use kernels::cuda::{Cuda, CudaError, DeviceArena, DeviceBuffer};

use crate::cli::bench::spread::Spread;

/// Values that are made and then written again and again; no power of two, so that no two rows are
/// alike.
const BLOCK: usize = (1 << 20) - 3;

/// A device, and how often everything is repeated there.
pub struct Lab {
    pub cuda: Cuda,
    repeats: usize,
    evict: DeviceArena,
}

impl Lab {
    /// A laboratory on `cuda` that copies `evict_bytes` before each repeat.
    pub fn new(cuda: Cuda, repeats: usize, evict_bytes: usize) -> Result<Lab, CudaError> {
        let evict = DeviceArena::new(&cuda, 2 * evict_bytes)?;
        Ok(Lab { cuda, repeats, evict })
    }

    /// Microseconds of one of `count` pieces of work that run one after another: recorded as a
    /// graph, after they ran once and loaded what they need, and replayed.
    pub fn time(
        &mut self,
        count: usize,
        mut work: impl FnMut(&Cuda, usize) -> Result<(), CudaError>,
    ) -> Result<Spread, CudaError> {
        let mut all = |cuda: &Cuda| (0..count).try_for_each(|i| work(cuda, i));
        all(&self.cuda)?;
        let graph = self.cuda.capture(|| all(&self.cuda))?;
        self.cuda.replay(&graph)?;
        self.repeat(|cuda| cuda.replay(&graph), count)
    }

    /// Microseconds of `work`, divided by `count`, which cannot be recorded.
    pub fn repeat(
        &mut self,
        mut work: impl FnMut(&Cuda) -> Result<(), CudaError>,
        count: usize,
    ) -> Result<Spread, CudaError> {
        let mut micros = Vec::with_capacity(self.repeats);
        let half = self.evict.bytes() / 2;
        for _ in 0..self.repeats {
            self.evict.copy_within(&self.cuda, 0, half, half)?;
            let seconds = self.cuda.time(|| work(&self.cuda))?;
            // What is shorter than the clock's tick has taken a nanosecond.
            micros.push((seconds * 1e6 / count as f64).max(1e-3));
        }
        Ok(Spread::of(micros).expect("everything is repeated once or more"))
    }

    /// Values in `middle - spread .. middle + spread`.
    pub fn floats(
        &self,
        len: usize,
        (middle, spread): (f32, f32),
    ) -> Result<DeviceBuffer<f32>, CudaError> {
        let block: Vec<f32> = noise(len).into_iter().map(|x| middle + spread * x).collect();
        self.repeated(len, &block)
    }

    /// A matrix of bf16 weights that keeps the size of what it multiplies.
    pub fn weights(&self, rows: usize, cols: usize) -> Result<Weights, CudaError> {
        let block = bf16_noise(rows * cols, (3.0 / cols as f32).sqrt());
        let bytes = self.repeated(2 * rows * cols, bytemuck::cast_slice::<bf16, u8>(&block))?;
        Ok(Weights { bytes, rows, cols })
    }

    fn repeated<T: bytemuck::Pod>(
        &self,
        len: usize,
        block: &[T],
    ) -> Result<DeviceBuffer<T>, CudaError> {
        let mut buffer = DeviceBuffer::zeros(&self.cuda, len)?;
        for at in (0..len).step_by(block.len().max(1)) {
            buffer.write(&self.cuda, at, &block[..block.len().min(len - at)])?;
        }
        Ok(buffer)
    }

    /// An arena of bf16 values.
    pub fn arena(&self, bytes: usize) -> Result<DeviceArena, CudaError> {
        let mut arena = DeviceArena::new(&self.cuda, bytes)?;
        let block = bf16_noise(bytes / 2, 1.0);
        let block: &[u8] = bytemuck::cast_slice(&block);
        arena.write(&self.cuda, 0, block)?;
        let mut done = block.len();
        while done < bytes {
            let more = done.min(bytes - done);
            arena.copy_within(&self.cuda, 0, done, more)?;
            done += more;
        }
        Ok(arena)
    }
}

/// A matrix on the device.
pub struct Weights {
    bytes: DeviceBuffer<u8>,
    rows: usize,
    cols: usize,
}

impl Weights {
    /// As products take it.
    pub fn matrix(&self) -> DeviceMatrix<'_> {
        DeviceMatrix::new(self.rows, self.cols, Dtype::Bf16, self.bytes.slice())
    }
}

/// Values in -1..1, at most a block of them; the same ones in every run.
pub fn noise(len: usize) -> Vec<f32> {
    let mut state = 0_u64;
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    };
    (0..len.min(BLOCK)).map(|_| next()).collect()
}

/// The same times `scale`, rounded.
pub fn bf16_noise(len: usize, scale: f32) -> Vec<bf16> {
    noise(len).into_iter().map(|x| bf16::from_f32(x * scale)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_fills_its_range_and_no_more() {
        let noise = noise(10_000);
        let mean = noise.iter().sum::<f32>() / 10_000.0;
        assert!(noise.iter().all(|x| (-1.0..1.0).contains(x)) && mean.abs() < 0.05, "{mean}");
        assert!(noise.iter().any(|x| *x < -0.99) && noise.iter().any(|x| *x > 0.99));
    }
}
