//! What a caller asks the scheduler for, how it ends, and what was there already: plain data.

use std::time::Duration;

use checkpoints::{Match, MissReason};

/// What is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prompt<'a> {
    /// The tokens, at least one.
    pub tokens: &'a [u32],
    /// Tokens of an answer, at most.
    pub max_tokens: usize,
    /// Answers, at least one.
    pub choices: usize,
    /// Lower is served first, where the policy knows priorities.
    pub priority: Option<i32>,
    /// When it is submitted, on the clock of [`super::Scheduler::plan`].
    pub submitted: Duration,
    /// The chain or bundle of requests whose share it is served from, under the policy `fair`.
    pub program_id: Option<&'a str>,
    /// Prompts of different salts share nothing.
    pub cache_salt: Option<&'a str>,
    /// Tokens after which a state is to be kept, each at the grid position at or below it.
    pub checkpoint_at: &'a [usize],
    /// How many likeliest tokens are wanted beside each of the prompt's own, if these are to be
    /// scored: then none of it is skipped.
    pub scored_with: Option<usize>,
}

impl<'a> Prompt<'a> {
    /// One answer, and nothing special.
    pub fn new(tokens: &'a [u32], max_tokens: usize) -> Prompt<'a> {
        Prompt {
            tokens,
            max_tokens,
            choices: 1,
            priority: None,
            submitted: Duration::ZERO,
            program_id: None,
            cache_salt: None,
            checkpoint_at: &[],
            scored_with: None,
        }
    }
}

/// Why a sequence ends, and so what becomes of its state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// It has its last token: the state is kept for what goes on from there.
    Finished,
    /// It is not wanted any more; what is computed is kept all the same.
    Cancelled,
    /// Its text ends inside what the state has absorbed: nobody can go on from there.
    Cut,
    /// Nothing could be drawn from its state: neither that nor what it left on the way is kept.
    Failed,
}

/// How much of a prompt was there already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReuseFigures {
    /// The longest match of its tokens in the tree.
    pub matched_tokens: usize,
    /// Tokens that were not computed, thanks to it.
    pub cached_tokens: usize,
    /// Tokens of the match that were computed again.
    pub replayed_tokens: usize,
    /// Why the state was not deeper, if a deeper one could have helped.
    pub miss_reason: Option<MissReason>,
    /// Where the deepest state is that it left for others on the way; 0 when it left none.
    pub kept_tokens: usize,
}

impl ReuseFigures {
    /// What a match gave.
    pub(super) fn of(found: &Match) -> ReuseFigures {
        let cached_tokens = found.usable.map_or(0, |usable| usable.position);
        ReuseFigures {
            matched_tokens: found.matched_tokens,
            cached_tokens,
            replayed_tokens: found.matched_tokens - cached_tokens,
            miss_reason: found.miss,
            kept_tokens: 0,
        }
    }
}
