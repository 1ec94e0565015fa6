//! Which checkpoint goes first (rule 12), as a number: the least worthy goes.
//!
//! ```text
//!  worth = last use + CREDIT_USES x tokens saved / TYPICAL_TOKENS x typical bytes / bytes freed
//! ```
//!
//! Time is counted in uses of the tree. With room, uses lie thousands apart and the first term
//! decides: recency. Under pressure all that is there was used within the credit, so the second
//! does: tokens saved per byte, which ages as uses go on. A spent state, whose one continuation
//! is that of the sequence that resumed from it, is worth nothing.

/// Uses that a typical checkpoint may lie idle longer than one that saves nothing.
const CREDIT_USES: u128 = 256;
/// The tokens a typical checkpoint saves, and owns blocks for.
const TYPICAL_TOKENS: usize = 4096;
const TYPICAL_BLOCKS: usize = TYPICAL_TOKENS / state_pool::BLOCK_LEN;

/// A checkpoint of one tier that may go.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Candidate {
    /// The tree's count of uses at the last use of this one.
    pub last_used: u64,
    pub is_spent: bool,
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

/// How much it is worth to keep.
pub(crate) fn worth(candidate: &Candidate, sizes: UnitBytes) -> u64 {
    if candidate.is_spent {
        return 0;
    }
    let bytes = |slots: usize, blocks: usize| {
        (slots * sizes.slot_bytes) as u128 + (blocks * sizes.block_bytes) as u128
    };
    let freed = bytes(candidate.slots, candidate.blocks).max(1) * TYPICAL_TOKENS as u128;
    let typical = bytes(1, TYPICAL_BLOCKS) * candidate.saved_tokens as u128;
    let credit = u64::try_from(CREDIT_USES * typical / freed).unwrap_or(u64::MAX);
    candidate.last_used.saturating_add(credit)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: UnitBytes = UnitBytes { slot_bytes: 48 << 20, block_bytes: 512 << 10 };
    const USUAL: Candidate =
        Candidate { last_used: 1_000, is_spent: false, saved_tokens: 4_096, slots: 1, blocks: 64 };

    #[test]
    fn a_typical_checkpoint_has_the_credit() {
        assert_eq!(worth(&USUAL, SIZES), 1_256);
    }

    #[test]
    fn under_pressure_tokens_saved_per_byte_decide() {
        let short = Candidate { last_used: 1_100, saved_tokens: 640, blocks: 10, ..USUAL };
        assert!(worth(&short, SIZES) < worth(&USUAL, SIZES), "used later, saves less per byte");
    }

    #[test]
    fn with_room_recency_decides() {
        let short = Candidate { last_used: 5_000, saved_tokens: 640, blocks: 10, ..USUAL };
        assert!(worth(&short, SIZES) > worth(&USUAL, SIZES));
    }

    #[test]
    fn a_spent_state_goes_first() {
        let spent = Candidate { last_used: u64::MAX, is_spent: true, ..USUAL };
        assert!(worth(&spent, SIZES) < worth(&Candidate { last_used: 1, ..USUAL }, SIZES));
    }

    #[test]
    fn units_without_bytes_are_no_division_by_zero() {
        let bare = Candidate { slots: 0, blocks: 0, ..USUAL };
        assert!(worth(&bare, UnitBytes { slot_bytes: 0, block_bytes: 1 }) > USUAL.last_used);
    }
}
