//! The one place from which kernels are launched.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ptr;

use cudarc::driver::result;

use super::error::{Named, reason};
use super::{Cuda, CudaError};

/// Bytes of shared memory that the kernel with most of it takes: what a device has to give.
pub(super) const MOST_SHARED: usize = 165_888;

/// A kernel by name, and how it is launched. `A` is the struct it takes.
#[derive(Debug)]
pub(super) struct Kernel<A> {
    /// The file it is in, as `kda.cu`.
    pub file: &'static str,
    /// Its name there.
    pub name: &'static str,
    /// Threads of a block, as its `__launch_bounds__` say.
    pub threads: u32,
    /// Bytes of its shared struct; 0 if it has none.
    pub shared_bytes: usize,
    argument: PhantomData<fn(A)>,
}

impl<A> Kernel<A> {
    pub const fn new(file: &'static str, name: &'static str, threads: u32) -> Kernel<A> {
        Kernel { file, name, threads, shared_bytes: 0, argument: PhantomData }
    }

    /// The same with a shared struct of `bytes` bytes, at most [`MOST_SHARED`].
    pub const fn shared(self, bytes: usize) -> Kernel<A> {
        assert!(bytes <= MOST_SHARED, "a device may have less shared memory");
        Kernel { shared_bytes: bytes, ..self }
    }
}

/// A struct that a kernel takes.
///
/// # Safety
/// It is `repr(C)`, has the fields of the kernel's own in the same order, and no padding but what
/// `repr(C)` puts there.
pub(super) unsafe trait Argument: Copy {}

impl Cuda {
    /// Launches `kernel` with a grid of blocks after all that was given to the stream before. A
    /// grid of no blocks is no launch.
    ///
    /// # Safety
    /// Every address in `argument` names memory of this device that is long enough for what the
    /// kernel reads and writes through it with this grid, until the kernel is done: memory is
    /// freed only after the work given before ([`Owner::free`](super::device::Owner::free)).
    pub(super) unsafe fn launch<A: Argument>(
        &self,
        kernel: &Kernel<A>,
        grid: [usize; 3],
        argument: A,
    ) -> Result<(), CudaError> {
        if grid.contains(&0) {
            return Ok(());
        }
        let refused = |reason| CudaError::Launch { kernel: kernel.name, reason };
        if grid[0] > i32::MAX as usize || grid[1].max(grid[2]) > 65535 {
            return Err(refused(format!("a grid of {grid:?} blocks")));
        }
        let context = &self.owner.context;
        context.bind_to_thread().named("entering the device's context")?;
        let function = self.modules.function(context, kernel)?;
        *self.last.lock().expect("nobody panics while naming a kernel") = kernel.name;
        let [x, y, z] = grid.map(|blocks| blocks as u32);
        let argument: *const c_void = ptr::from_ref(&argument).cast();
        // SAFETY: the function is loaded and takes one argument of this size, which the driver
        // copies; what it does with the addresses in it is the caller's promise.
        let launched = unsafe {
            result::launch_kernel(
                function,
                (x, y, z),
                (kernel.threads, 1, 1),
                kernel.shared_bytes as u32,
                self.stream.cu_stream(),
                &mut [argument.cast_mut()],
            )
        };
        launched.map_err(|error| refused(reason(error)))
    }
}
