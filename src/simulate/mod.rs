//! Workloads, and the real scheduler run over them without a model: units have no bytes behind
//! them, tokens come from the workload.
//!
//! What a step would cost is a matter of three tables: [`HardwareProfile`], [`ModelProfile`] and
//! what is in the step ([`step_cost`]).

mod cache;
pub mod claims;
pub mod figures;
pub mod formulas;
pub mod hardware;
mod ledger;
pub mod model;
pub mod modelled;
mod named;
pub mod policy;
pub mod reuse;
mod runs;
pub mod sampling;
pub mod setup;
pub mod simulation;
pub mod step;
pub mod trace;
pub mod traffic;
mod watch;
pub mod workload;

pub use cache::CacheFigures;
pub use figures::{Latencies, Spread};
pub use hardware::{Calibration, HardwareProfile, ProfileError};
pub use model::{Experts, ModelConfigError, ModelProfile, Weights};
pub use modelled::{ModelledExecutor, Timing, VirtualClock};
pub use policy::Policy;
pub use reuse::{Outcome, Share, TierFigures, replay};
pub use runs::{Run, Runs};
pub use sampling::{Arrivals, Lengths};
pub use setup::{DeviceMemory, ReplayError, Setup};
pub use simulation::{Report, Simulation, SimulationError};
pub use step::{Bound, StepCost, StepModel, StepWork, step_cost};
pub use trace::TraceError;
pub use traffic::{MadeUp, Traffic};
pub use watch::{Chunk, Happening, StepLine, What};
pub use workload::{NAMED, Outline, Workload};
