//! Accounts for who holds which block and which slot of a tier, without touching a byte.
//!
//! A *block* is the per-token memory of [`BLOCK_LEN`] tokens, all attention layers together. A
//! *slot* is one sequence's recurrent state; a *packed slot* is such a state in fewer bytes, for
//! tiers that keep what nobody computes with. A *unit* is any of them. They lie on *pages* of one
//! arena per tier; a page holds units of one kind and changes kind when it is empty. The arena
//! itself belongs to somebody else: this crate knows sizes and offsets, never contents, and does no
//! I/O, reads no clock and starts no threads.
//!
//! # The contract
//!
//! - A unit is held through [`Handle`]s. They move and are never copied; only a [`StatePool`]
//!   mints them and takes them back.
//! - **Sole holder writes.** A unit may be written only while one handle to it exists
//!   ([`StatePool::is_sole`]). Whoever must write a shared slot takes a fresh one and reads the
//!   old one by its id; whoever must write a shared block copies it first.
//! - **All or nothing.** [`StatePool::fits`] says exactly what [`StatePool::allocate`] will do,
//!   and a refusal touches nothing.
//! - **What is still read is not free.** A plan carries ids ([`BlockId`], [`SlotId`],
//!   [`PackedId`]), which are plain numbers and hold nothing. Whoever makes the plan keeps the
//!   handles behind these ids until the plan is committed, and releases them then.
//! - The same calls in the same order give the same ids. Nothing here depends on addresses,
//!   hashing or time.
//!
//! # Two sequences that share a prefix
//!
//! ```text
//!  tokens        0 .. 63    64 .. 127   128 ..
//!
//!  sequence A    [ b0    ,  b1       ,  b2 ]   slot s0   len 151
//!                  |        |
//!  sequence B    [ b0    ,  b1       ,  b3 ]   slot s1   len 140
//!
//!  handles         2        2           1 each      1 each
//!                  full: read by both,  written by  rewritten by
//!                  written by nobody    its holder  its holder in every step
//!
//!  arena         | b0 b1 b2 |    s0    | b3 -- -- |    s1    |   free   |   free   |
//!                  page 0     page 1     page 2     page 3     page 4     page 5
//!
//!  host arena    | b0 b1 -- |  p0  --  |   free   |   A's first 128 tokens kept: p0 is packed
//! ```
//!
//! When A is released, b0 and b1 stay (B holds them), b2 and s0 are free; page 1 is empty and may
//! hold units of any kind next. A page here takes three blocks, one slot or two packed slots;
//! [`PoolLayout`] says how many it is for given sizes.
//!
//! # The life of a handle
//!
//! ```text
//!  alloc_block, alloc_slot, allocate,       release, not the last
//!  alloc_packed, allocate_packed
//!            |                                  +-------+
//!            v              share               |       v
//!     sole (1 handle) -----------------> shared (n handles)
//!            |        <-----------------
//!            |         release, one is left
//!            v release
//!     the place is free; an empty page is free for any kind
//! ```
//!
//! A live handle that is dropped instead of released would leave its unit held for ever, so the
//! drop panics in builds with debug assertions (not while unwinding).
//!
//! ```
//! use state_pool::{PoolLayout, SequenceState, StatePool, Tier, TierSizes};
//!
//! let layout = PoolLayout::new(TierSizes {
//!     slot_bytes: 12_288,
//!     block_bytes: 4_096,
//!     packed_bytes: 0,
//!     memory_bytes: 6 * 12_288,
//!     max_zero_byte_slots: 0,
//! })?;
//! let mut pool = StatePool::new(Tier::Device, layout);
//! let mut first = SequenceState::allocate(&mut pool, 151)?;
//! first.advance(151);
//! let second = first.fork(&mut pool);
//! assert!(!first.is_slot_sole(&pool));
//! first.release(&mut pool);
//! assert!(second.is_slot_sole(&pool));
//! second.release(&mut pool);
//! pool.check();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod handle;
mod layout;
mod pool;
mod sequence_state;
mod units;

pub use handle::{
    Block, BlockHandle, BlockId, Handle, Id, Kind, Packed, PackedHandle, PackedId, Slot,
    SlotHandle, SlotId, Tier,
};
pub use layout::{BLOCK_LEN, LayoutError, PoolLayout, TierSizes};
pub use pool::{Allocation, PoolError, PoolStats, StatePool};
pub use sequence_state::{BlockTable, SequenceState};
pub use units::UnitStats;
