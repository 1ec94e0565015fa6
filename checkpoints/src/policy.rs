//! What a checkpoint is worth (rule 12); the least worthy goes first.
//!
//! ```text
//!  value = tokens saved per byte freed x how likely its place makes a use
//!  worth = value / (uses of the tree since its last one + IDLE_USES)
//! ```
//!
//! Time is counted in uses of the tree. A state that has lain idle for long is used next with a
//! chance that falls like one over that time, and no sooner than a turn takes: `IDLE_USES`. Under
//! pressure all that is there was used lately and the value decides: tokens saved per byte. With
//! room idle times differ by more than values do and decide: recency. A spent state is worth
//! nothing.

/// The idle time, in uses of the tree, up to which states are told apart by their value.
const IDLE_USES: u64 = 600;
/// The part of its value that is left to a state which one path passes by for long: it is used
/// only by a prompt that parts between it and the next.
const INNER_PART: u64 = 10;
/// What a turn before it adds to the value of a state, in tenths: a chat that went on goes on.
const TURN_TENTHS: u64 = 3;
const MAX_TURNS: u32 = 8;
/// What a sequence that resumed from it adds to the value of a state at which paths part.
const RESUME_TENTHS: u64 = 3;
const MAX_RESUMES: u32 = 1000;
/// The value of one token saved per byte.
const SCALE: u128 = 1 << 40;

/// A checkpoint of one tier.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Candidate {
    pub is_spent: bool,
    /// Several paths go on from it.
    pub is_branch: bool,
    /// One path goes on from it, for long.
    pub is_inner: bool,
    /// Turns of the same chat before it.
    pub turns: u32,
    /// Sequences that resumed from it.
    pub resumes: u32,
    /// Tokens from the next checkpoint above to this one: what a resume would compute again.
    pub saved_tokens: usize,
    /// Slots freed with it: one, or none without recurrent layers.
    pub slots: usize,
    /// Blocks freed with it.
    pub blocks: usize,
}

/// Bytes of the units of a tier.
#[derive(Debug, Clone, Copy)]
pub(crate) struct UnitBytes {
    pub slot_bytes: usize,
    pub block_bytes: usize,
}

impl UnitBytes {
    pub fn of(self, slots: usize, blocks: usize) -> usize {
        slots * self.slot_bytes + blocks * self.block_bytes
    }
}

/// What a use of it would save, and how likely one is.
pub(crate) fn value(candidate: &Candidate, sizes: UnitBytes) -> u64 {
    if candidate.is_spent {
        return 0;
    }
    let bytes = sizes.of(candidate.slots, candidate.blocks).max(1) as u128;
    let density = SCALE * candidate.saved_tokens as u128 / bytes;
    let density = u64::try_from(density).unwrap_or(u64::MAX);
    let resumes = if candidate.is_branch { candidate.resumes.min(MAX_RESUMES) } else { 0 };
    let tenths = 10 + TURN_TENTHS * u64::from(candidate.turns.min(MAX_TURNS));
    let value = density.saturating_mul(tenths) / 10;
    let value = value.saturating_mul(10 + RESUME_TENTHS * u64::from(resumes)) / 10;
    let part = if candidate.is_inner { INNER_PART } else { 1 };
    (value / part).max(1)
}

/// A class of like values, 0 for what is worth nothing: four to an octave.
pub(crate) fn class(value: u64) -> usize {
    let Some(octave) = value.checked_ilog2() else { return 0 };
    let quarter = if octave < 2 { 0 } else { (value >> (octave - 2)) & 3 };
    1 + 4 * octave as usize + quarter as usize
}

/// What it is worth to keep at the time `now`.
pub(crate) fn worth(value: u64, last_used: u64, now: u64) -> u128 {
    (u128::from(value) << 32) / u128::from(now - last_used + IDLE_USES)
}
