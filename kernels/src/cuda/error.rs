//! What can go wrong with a device.

use cudarc::driver::DriverError;
use cudarc::driver::sys::CUresult;
use thiserror::Error;

/// A device that is not there, or that did not do what it was asked.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
pub enum CudaError {
    /// The driver's library cannot be loaded.
    #[error("no CUDA driver: libcuda cannot be loaded")]
    NoDriver,
    /// The driver is older than the calls made of it.
    #[error("the CUDA driver is for CUDA {}.{}, at least {}.{} is needed",
            found / 1000, found % 1000 / 10, needed / 1000, needed % 1000 / 10)]
    OldDriver {
        /// Version of the driver, 1000 for each major and 10 for each minor one.
        found: i32,
        /// The least one.
        needed: i32,
    },
    /// There is no device of this number.
    #[error("no CUDA device {ordinal}: the driver has {found}")]
    NoDevice {
        /// The number asked for.
        ordinal: usize,
        /// How many there are.
        found: usize,
    },
    /// The device lacks instructions the kernels use.
    #[error("{name} has compute capability {}.{}, at least 8.0 is needed",
            capability.0, capability.1)]
    OldDevice {
        /// The device's name.
        name: String,
        /// Its compute capability.
        capability: (i32, i32),
    },
    /// The device has too little shared memory for the kernels, as those of compute capability 8.6,
    /// 8.9 and 12.0 do.
    #[error(
        "{name} gives a block of threads {found} bytes of shared memory, {needed} are needed: \
             devices of compute capability 8.0, 8.7, 9.0 and 10.0 have as many"
    )]
    LittleShared {
        /// The device's name.
        name: String,
        /// Bytes that a block of threads may have.
        found: usize,
        /// Bytes needed.
        needed: usize,
    },
    /// A host application's context is not the one of this device that all share.
    #[error("the context is not the primary context of CUDA device {ordinal}")]
    OtherContext {
        /// The number asked for.
        ordinal: usize,
    },
    /// The device has no room.
    #[error("no room for {bytes} bytes on the device, {free} are free")]
    OutOfMemory {
        /// Bytes asked for.
        bytes: usize,
        /// Bytes free when it was asked.
        free: usize,
    },
    /// Kernels have to be compiled and no compiler is there.
    #[error(
        "{file} has to be compiled and libnvrtc cannot be loaded; with nvcc there when the \
             program is built it need not be"
    )]
    NoCompiler {
        /// The kernel file.
        file: String,
    },
    /// A kernel file that the compiler refuses.
    #[error("{file} does not compile for {arch}:\n{log}")]
    Compile {
        /// The kernel file.
        file: String,
        /// The target.
        arch: String,
        /// What the compiler says.
        log: String,
    },
    /// A kernel whose argument is not what the launch code passes.
    #[error("kernel {kernel} takes an argument of {device} bytes, {host} are passed")]
    Argument {
        /// The kernel.
        kernel: &'static str,
        /// Bytes by the compiled kernel.
        device: usize,
        /// Bytes by the launch code.
        host: usize,
    },
    /// A kernel that could not be started.
    #[error("kernel {kernel} cannot be launched: {reason}")]
    Launch {
        /// The kernel.
        kernel: &'static str,
        /// What the driver says.
        reason: String,
    },
    /// Work that was started and failed. The device is of no use to the process afterwards.
    #[error("the device failed at or before kernel {last}: {reason}")]
    Fault {
        /// The last kernel launched.
        last: &'static str,
        /// What the driver says.
        reason: String,
    },
    /// A call that failed.
    #[error("{call} failed: {reason}")]
    Driver {
        /// What was asked of the driver.
        call: &'static str,
        /// What it says.
        reason: String,
    },
}

/// What the driver says of an error, in its words.
pub(super) fn reason(error: DriverError) -> String {
    // A lookup by number that knows every number it gives.
    match (error.error_name(), error.error_string()) {
        (Ok(name), Ok(text)) => format!("{} ({})", text.to_string_lossy(), name.to_string_lossy()),
        _ => format!("{:?}", error.0),
    }
}

/// Names the call that a driver's error came from.
pub(super) trait Named<T> {
    fn named(self, call: &'static str) -> Result<T, CudaError>;
}

impl<T> Named<T> for Result<T, DriverError> {
    fn named(self, call: &'static str) -> Result<T, CudaError> {
        self.map_err(|error| CudaError::Driver { call, reason: reason(error) })
    }
}

pub(super) fn is_out_of_memory(error: DriverError) -> bool {
    error.0 == CUresult::CUDA_ERROR_OUT_OF_MEMORY
}
