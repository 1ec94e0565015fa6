//! What bounds a step and a sequence, and what can never run.

use checkpoints::Placement;
use state_pool::PoolLayout;

use super::cost::Cost;
use crate::config::{Batching, Policy, Preempt};

/// Limits and rules of a scheduler, derived once.
#[derive(Debug, Clone, PartialEq)]
pub struct Limits {
    /// Tokens a step may compute.
    pub max_num_batched_tokens: usize,
    /// Tokens the first prompt span of a step may always take; a multiple of the grid.
    pub prefill_floor: usize,
    /// Sequences that may hold device memory at once.
    pub max_num_seqs: usize,
    /// Tokens a sequence may reach.
    pub max_model_len: usize,
    /// Pages that admission leaves free while anything runs.
    pub watermark_pages: usize,
    /// Positions at which prompt spans may end.
    pub grid: usize,
    /// Order of service.
    pub policy: Policy,
    /// Under `sjf`, by how many seconds the cost of a prompt that waits falls in a second.
    pub sjf_ageing: f64,
    /// When sequences join those that run.
    pub batching: Batching,
    /// Places that are kept for long prompts.
    pub reserve_long: Option<LongReserve>,
    /// How a sequence is pushed out.
    pub preempt: Preempt,
    /// What it costs.
    pub cost: Cost,
    /// What is kept of prompts and answers for those that begin alike; nothing with none.
    pub reuse: Option<Reuse>,
    /// Percent of exact states taken from the tree or back from the host that are derived again
    /// and compared.
    pub audit_percent: f64,
    /// In every Nth step a sequence that runs is parked, needed or not: a stress for tests.
    pub park_every: Option<u64>,
}

/// Places among the sequences that run which short prompts leave free while a long one waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LongReserve {
    /// So many, less the long ones that run.
    pub places: usize,
    /// Tokens of a long prompt, at least.
    pub prompt_tokens: usize,
}

/// What steps are held to beyond the limits, as the engine sees fit; nothing with none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Caps {
    /// Tokens of prompts that a step may compute beside all generated ones; the floor stays.
    pub max_prompt_tokens: Option<usize>,
    /// Sequences that may hold device memory at once; those that do stay.
    pub max_num_seqs: Option<usize>,
}

/// Rules of prefix reuse.
#[derive(Debug, Clone, PartialEq)]
pub struct Reuse {
    /// Go on from nothing but what has the bits of a cold run.
    pub exact_only: bool,
    /// Where prompts leave states.
    pub placement: Placement,
    /// The state of a sequence that ends is kept.
    pub keep_turn_ends: bool,
    /// Positions at which states are kept; a multiple of the model's grid.
    pub grid_tokens: usize,
    /// Tokens of prompts that wait and of what was lost, four bytes each.
    pub max_ghost_tokens: usize,
}

/// A request that can never run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// It is longer than the limit.
    #[error(
        "{tokens} tokens, prompt and answer together, do not fit: --max-model-len is \
         {max_model_len}, and the device memory holds one sequence of {device_tokens} tokens"
    )]
    TooLong {
        /// Prompt and answer together.
        tokens: usize,
        /// The limit.
        max_model_len: usize,
        /// What the device tier holds for one sequence.
        device_tokens: usize,
    },
    /// A priority where the policy has none.
    #[error("priority is {priority}, but --scheduling-policy is {policy}, which knows none")]
    NoPriorities {
        /// The priority.
        priority: i32,
        /// The policy.
        policy: Policy,
    },
}

/// The longest sequence that a device tier of this layout holds: its last token needs no block,
/// since nothing follows it.
pub fn device_tokens(device: &PoolLayout) -> usize {
    device.max_tokens().saturating_add(1)
}

impl Limits {
    /// Whether the model has recurrent layers, and its slots bytes.
    pub fn is_recurrent(&self) -> bool {
        self.cost.slot_bytes > 0
    }

    /// Whether a request of `tokens` tokens, prompt and answer together, can ever run.
    ///
    /// # Errors
    /// The reason it cannot.
    pub fn check(
        &self,
        tokens: usize,
        priority: Option<i32>,
        device: &PoolLayout,
    ) -> Result<(), Refused> {
        let (max_model_len, device_tokens) = (self.max_model_len, device_tokens(device));
        if tokens > max_model_len || tokens > device_tokens {
            return Err(Refused::TooLong { tokens, max_model_len, device_tokens });
        }
        match priority {
            Some(priority) if self.policy != Policy::Priority => {
                Err(Refused::NoPriorities { priority, policy: self.policy })
            }
            _ => Ok(()),
        }
    }
}
