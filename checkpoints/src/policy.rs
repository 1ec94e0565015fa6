//! What a checkpoint is worth (rule 12); the least worthy goes first.
//!
//! ```text
//!  value = tokens saved per byte freed x (1 + prompts known to pass)
//!  worth = value / (uses of the tree since its last one + IDLE_USES)
//! ```
//!
//! Time is counted in uses of the tree. A state that has lain idle for long is used next with a
//! chance that falls like one over that time; before a next turn is due idle time tells nothing:
//! `IDLE_USES`. Under pressure all that is there was used lately and the value decides: tokens
//! saved per byte. With room idle times differ by more than values do and decide: recency. A
//! state that one path passes by for long is used only by a prompt that parts in between, and a
//! spent one is worth nothing.

/// Idle time, in uses of the tree, that tells nothing.
const IDLE_USES: u64 = 600;
/// The part of its value that is left to a state which one path passes by for long.
const INNER_PART: u64 = 10;
/// The most prompts that are counted.
const MAX_PASSES: u32 = 1000;
/// The value of one token saved per byte.
const SCALE: u128 = 1 << 40;

/// A checkpoint of one tier.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Candidate {
    pub is_spent: bool,
    /// One path goes on from it, for long.
    pub is_inner: bool,
    /// Prompts known to pass it, but for the one that left it.
    pub passes: u32,
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
    let value = density.saturating_mul(1 + u64::from(candidate.passes.min(MAX_PASSES)));
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

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: UnitBytes = UnitBytes { slot_bytes: 48 << 20, block_bytes: 512 << 10 };
    const USUAL: Candidate = Candidate {
        is_spent: false,
        is_inner: false,
        passes: 0,
        saved_tokens: 4_096,
        slots: 1,
        blocks: 64,
    };

    /// What one is worth that was last used so many uses ago.
    fn idle(uses: u64, candidate: Candidate) -> u128 {
        worth(value(&candidate, SIZES), 1_000_000 - uses, 1_000_000)
    }

    #[test]
    fn under_pressure_tokens_saved_per_byte_decide() {
        let short = Candidate { saved_tokens: 640, blocks: 10, ..USUAL };
        assert!(idle(0, short) < idle(300, USUAL), "used later, saves less per byte");
    }

    #[test]
    fn with_room_recency_decides() {
        let short = Candidate { saved_tokens: 640, blocks: 10, ..USUAL };
        assert!(idle(0, short) > idle(10_000, USUAL));
    }

    #[test]
    fn what_many_pass_outlives_what_nobody_was_seen_to() {
        assert!(idle(2_000, Candidate { passes: 5, ..USUAL }) > idle(0, USUAL));
    }

    #[test]
    fn a_state_that_a_path_passes_by_gives_way_to_the_end_of_the_path() {
        let end = Candidate { saved_tokens: 640, blocks: 10, ..USUAL };
        assert!(idle(0, Candidate { is_inner: true, blocks: 0, ..USUAL }) < idle(0, end));
    }

    #[test]
    fn a_spent_state_goes_first() {
        let spent = Candidate { is_spent: true, passes: 9, ..USUAL };
        assert!(idle(0, spent) < idle(999_999, Candidate { saved_tokens: 1, ..USUAL }));
    }

    #[test]
    fn like_values_share_a_class_and_greater_ones_come_later() {
        assert_eq!((class(0), class(1), class(4), class(5)), (0, 1, 9, 10));
        assert_eq!(class(1_000), class(1_023));
        assert!((0..4_096).is_sorted_by_key(class));
        assert!(class(u64::MAX) < 260);
    }

    #[test]
    fn extremes_neither_overflow_nor_divide_by_zero() {
        let bare = Candidate { slots: 0, blocks: 0, saved_tokens: usize::MAX, ..USUAL };
        let many = Candidate { passes: u32::MAX, ..bare };
        let value = value(&many, UnitBytes { slot_bytes: 0, block_bytes: 1 });
        assert!(worth(value, 0, 0) > 0 && worth(value, 0, u64::MAX - IDLE_USES) > 0);
    }
}
