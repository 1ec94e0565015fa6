//! Workloads, and the real scheduler run over them without a model: units have no bytes behind
//! them, tokens come from the workload, a step takes no time.

mod cache;
mod named;
pub mod policy;
pub mod reuse;
mod runs;
pub mod setup;
pub mod trace;
pub mod workload;

pub use cache::CacheFigures;
pub use policy::Policy;
pub use reuse::{Outcome, Share, TierFigures, replay};
pub use runs::{Run, Runs};
pub use setup::{DeviceMemory, ReplayError, Setup};
pub use trace::TraceError;
pub use workload::{NAMED, Outline, Workload};
