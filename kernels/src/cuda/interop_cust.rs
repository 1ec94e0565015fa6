//! For a host application that uses cust: its context and its stream, adopted. Everything else of
//! the backend is cudarc's.

use cudarc::driver::sys;
use cust::context::Context;
use cust::stream::Stream;

use super::{Cuda, CudaError, Options};

impl Cuda {
    /// Opens the device of `context` with kernels on `stream`: after what the host has given to it
    /// before, and before what it gives to it later. Copies between the tiers have streams of
    /// their own. `options` name the device of the context.
    ///
    /// # Errors
    /// As [`Cuda::open`], and when `context` is not the primary context of the device that
    /// `options` name.
    ///
    /// # Safety
    /// `stream` belongs to `context` and outlives what is returned, and all that is made with it.
    pub unsafe fn adopt(
        context: &Context,
        stream: &Stream,
        options: Options,
    ) -> Result<Cuda, CudaError> {
        let ordinal = options.ordinal;
        // Both crates have bindings of their own to the same opaque handles.
        let (theirs, stream): (sys::CUcontext, sys::CUstream) =
            (context.as_raw().cast(), stream.as_inner().cast());
        Cuda::open_with(options, |ours| {
            if ours.cu_ctx() != theirs {
                return Err(CudaError::OtherContext { ordinal });
            }
            // SAFETY: the caller's promise; a borrowed stream is not destroyed when it is dropped.
            Ok(unsafe { ours.wrap_borrowed_stream(stream) })
        })
    }
}
