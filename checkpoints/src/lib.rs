//! Remembers token prefixes and their states, and decides which of them to keep.
//!
//! A [`PrefixTree`] compares tokens, never hashes. A node of it owns the blocks of its own tokens
//! and at most one slot per tier, at its end; a node with a slot is a *checkpoint*, a position from
//! which a sequence can resume. The tree sees handles, never bytes: no I/O, no clock, no threads.
//!
//! # The contract
//!
//! - The tree holds what it was given until it is evicted, demoted or cleared, and only the
//!   [`StatePool`](state_pool::StatePool) of a tier mints and takes back its handles. What a
//!   sequence gets from it are shares: evicting a checkpoint takes nothing from who resumed.
//! - In each tier a checkpoint is whole: with its slot the tree holds the blocks of all its
//!   tokens there. Blocks that no checkpoint of a tier needs are given back at once.
//! - A model without recurrent layers has no slots here: what its nodes have blocks for can be
//!   resumed from, at every multiple of the grid but the last token.
//! - The same calls in the same order give the same answers.
//!
//! # Two turns of a chat, and another with the same system prompt
//!
//! ```text
//!  0 .. 127              128 .. 191       192 ..
//!
//!  [ b0, b1 | slot ] -+- [ b2 ] ------+- [ b3 | slot ]         turn 1 ends at 205, not exact
//!    exact            |    exact      |
//!                     |               +- [ b4 .. b7 | slot ]   turn 2 ends at 400, not exact;
//!                     |                                        b4 began as a copy of b3
//!                     +- [ b8, b9 | slot ]                     another chat, exact
//! ```
//!
//! The node of b2 has no slot: it is there as long as a deeper checkpoint needs b2.
//!
//! # The life of a prefix
//!
//! ```text
//!  submit: add_waiting       junctions say        plan: match_prefix, hold, note_resumed,
//!  (a ghost: tokens only) -> where to snapshot -> remove_waiting
//!                                                      |
//!  evicted, a ghost again <- evict_one, free <- insert, at every snapshot and the turn's end
//!                                                 |       ^
//!                                       demote, end_demotion (a copy on the host)
//! ```
//!
//! ```
//! use checkpoints::{MatchOptions, Prefix, PrefixTree, TreeOptions};
//! use state_pool::{PoolLayout, SequenceState, StatePool, Tier, TierSizes};
//!
//! let sizes = TierSizes {
//!     slot_bytes: 12_288,
//!     block_bytes: 4_096,
//!     packed_bytes: 0,
//!     memory_bytes: 8 * 12_288,
//!     max_zero_byte_slots: 0,
//! };
//! let mut pool = StatePool::new(Tier::Device, PoolLayout::new(sizes)?);
//! let mut tree = PrefixTree::new(TreeOptions::default());
//!
//! // A sequence of 151 tokens, the first 128 of them exact, ends its turn.
//! let tokens: Vec<u32> = (0..151).collect();
//! let mut state = SequenceState::allocate(&mut pool, 151)?;
//! state.advance(151);
//! let (table, slot, _) = state.into_parts();
//! let prefix = Prefix { salt: None, tokens: &tokens, exact_tokens: 128, histories: &[] };
//! tree.insert(&mut pool, prefix, table.as_slice(), Some(slot));
//! table.release(&mut pool);
//!
//! // The next turn goes on from there.
//! let next: Vec<u32> = (0..200).collect();
//! let found = tree.match_prefix(None, &next, MatchOptions::default());
//! let usable = found.usable.expect("the turn's end");
//! assert_eq!((found.matched_tokens, usable.position, found.miss), (151, 151, None));
//! let resumed = tree.hold(&usable, &mut pool)?;
//! tree.note_resumed(&usable);
//! assert_eq!((resumed.len(), resumed.table().len()), (151, 3));
//!
//! resumed.release(&mut pool);
//! tree.clear(&mut pool);
//! assert_eq!(pool.stats().free_pages, 8);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod placement;
mod policy;
mod tree;

pub use placement::Placement;
pub use tree::{
    Demotion, History, Lineage, Match, MatchOptions, MissReason, Prefix, PrefixTree, Room,
    SoleUnits, TierCounts, TreeOptions, TreeStats, Usable, common_tokens,
};
