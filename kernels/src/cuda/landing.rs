//! Host memory that values of a device come down to.

use std::ops::Range;

use bytemuck::Pod;

use super::memory::{DeviceBuffer, HostBytes};
use super::{Cuda, CudaError};

/// What was read last from a device: in pinned memory, which copies reach at the link's rate, or
/// where the system pins no more in pageable memory. It grows to the most that was read at once.
#[derive(Debug)]
pub struct Landing<T> {
    bytes: HostBytes,
    /// Values it has room for.
    room: usize,
    values: std::marker::PhantomData<T>,
}

impl<T: Pod> Default for Landing<T> {
    fn default() -> Landing<T> {
        Landing { bytes: HostBytes::default(), room: 0, values: std::marker::PhantomData }
    }
}

impl<T: Pod> Landing<T> {
    /// Waits for the kernels given before and gives the values of `buffer` at `runs`, one run
    /// behind the other.
    ///
    /// # Errors
    /// When the device fails or the host has no room.
    ///
    /// # Panics
    /// When a run leaves the buffer.
    pub fn take(
        &mut self,
        cuda: &Cuda,
        buffer: &DeviceBuffer<T>,
        runs: impl Iterator<Item = Range<usize>> + Clone,
    ) -> Result<&[T], CudaError> {
        let len = runs.clone().map(|run| run.len()).sum::<usize>();
        if len > self.room {
            // Steps that read more than any before are few.
            self.room = len.next_power_of_two();
            self.bytes = HostBytes::pinned_or_not(cuda, self.room * size_of::<T>())?;
        }
        let mut at = 0;
        let copied = runs.filter(|run| !run.is_empty()).try_for_each(|run| {
            let bytes = self.bytes.part(at, run.len() * size_of::<T>());
            at += bytes.len();
            buffer.start_read(cuda, run.start, bytes)
        });
        // Also after a refusal: runs before it are on their way.
        let finished = cuda.finish();
        copied.and(finished)?;
        Ok(bytemuck::cast_slice(self.bytes.part(0, len * size_of::<T>())))
    }
}
