//! How long a device takes, by its own clock.

use cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT;

use super::error::Named;
use super::{Cuda, CudaError};

impl Cuda {
    /// Seconds from the start to the end of what `work` gives to the device, after all that was
    /// given before: kernels and graphs, and transfers that it follows ([`Cuda::follow`]). Waits
    /// for it. What it loads or uploads counts as well, so work is timed that ran before.
    ///
    /// # Errors
    /// Those of `work`, and when the device fails.
    pub fn time(&self, work: impl FnOnce() -> Result<(), CudaError>) -> Result<f64, CudaError> {
        let record =
            || self.stream.record_event(Some(CU_EVENT_DEFAULT)).named("recording an event");
        let start = record()?;
        work()?;
        let end = record()?;
        self.finish()?;
        let milliseconds = start.elapsed_ms(&end).named("asking for the time between events")?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}
