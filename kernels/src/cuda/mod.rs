//! The CUDA backend: the same operators on a device, held to the same naive forms.
//!
//! A kernel file in `cuda/` has a module here with the same name: the struct each kernel takes, its
//! threads and shared memory, and one safe function that checks shapes and launches it.
//!
//! ```text
//! Options -> Cuda::open       driver, device, streams
//! DeviceArena, DeviceBuffer   what operators work on      HostArena   the tier behind it, pinned
//! StepTable::upload           spans, tokens, block tables of a step, once
//!
//!  conv::conv(&cuda, x, taps, windows, out)                            safe, checks shapes
//!      |  Argument { x, spans, ... }                                   addresses and strides
//!      v
//!  Cuda::launch(&Kernel, grid, argument)                               the one launch
//!      |  Modules::function   first time: fatbin | kept cubin | NVRTC, then size of the argument
//!      v
//!  cuLaunchKernel on the compute stream                                nothing waits here
//!
//! Cuda::capture / replay      the same calls as one graph, for a fixed number of rows
//! Cuda::transfer / follow     copies between the tiers beside the kernels, ordered by events
//! Cuda::time                  what any of it takes, by the device's clock
//! ```
//!
//! Numbers are those of the CPU: activations and states are f32, rounded only where the operator's
//! definition rounds. A slot has the same layout on both, so a state that one wrote the other can
//! read. A row's result depends on its own sequence alone: no kernel chooses its arithmetic or the
//! order of a sum by how many rows or spans stand beside it.
//!
//! A device that is not there, too old or out of memory is an error that says so.

pub mod attention;
mod clock;
pub mod conv;
pub mod dense;
mod device;
mod error;
pub mod gemm;
pub mod gqa;
#[cfg(feature = "cust")]
mod interop_cust;
pub mod kda;
mod landing;
mod launch;
mod memory;
pub mod mla;
mod module;
pub mod moe;
pub mod rows;
pub mod sampling;
mod spans;
mod survey;

pub use device::{Cuda, Graph, Options, Properties};
pub use error::CudaError;
pub use landing::Landing;
pub use memory::{
    DeviceArena, DeviceBuffer, DeviceRows, DeviceRowsMut, DeviceSlice, Direction, HostArena,
    NotPinned, Piece, Transfer,
};
pub use module::{Compiled, SOURCES, Source, arch_of, compile, default_cache};
pub use spans::{Capacity, DeviceSpans, Slots, Step, StepTable};
pub use survey::{KernelsFrom, Survey, Surveyed, survey};
