//! The control plane: which tokens of which sequence are computed in a step.
//!
//! It sees token ids and units of memory, never a byte, a clock or a thread. What it decides it
//! writes down once per step, as a [`StepPlan`]; what comes back is a [`StepReport`].

pub mod plan;
pub mod sequence;

pub use plan::{Form, PlannedSpan, SampledToken, StepPlan, StepReport, TokenBudget, Wanted};
pub use sequence::{Sequence, SequenceId};
