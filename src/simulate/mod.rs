//! Workloads, and the real scheduler run over them without a model: units have no bytes behind
//! them, tokens come from the workload.
//!
//! What a step would cost is a matter of three tables: [`HardwareProfile`], [`ModelProfile`] and
//! what is in the step ([`step_cost`]).

mod cache;
pub mod claims;
pub mod formulas;
pub mod hardware;
pub mod model;
mod named;
pub mod policy;
pub mod reuse;
mod runs;
pub mod setup;
pub mod step;
pub mod trace;
pub mod workload;

pub use cache::CacheFigures;
pub use hardware::{HardwareProfile, ProfileError};
pub use model::{Experts, ModelConfigError, ModelProfile, Weights};
pub use policy::Policy;
pub use reuse::{Outcome, Share, TierFigures, replay};
pub use runs::{Run, Runs};
pub use setup::{DeviceMemory, ReplayError, Setup};
pub use step::{Bound, StepCost, StepModel, StepWork, step_cost};
pub use trace::TraceError;
pub use workload::{NAMED, Outline, Workload};
