//! Handles that hold a unit, and ids that only name one.
//!
//! A [`Handle`] cannot be copied, made or ended outside the pool, so the number of handles to a
//! unit is the number of its holders. An [`Id`] is a number for plans and tables; it holds
//! nothing, and whoever uses it must know that a handle lives.

use std::fmt;
use std::hash::Hash;
use std::marker::PhantomData;

use crate::pool::Kept;

/// Where a pool's arena lies. A handle remembers it, so that no pool takes back a unit of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// The memory the kernels compute in.
    Device,
    /// The memory of the host, for what is parked.
    Host,
    /// Files.
    Disk,
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Tier::Device => "device",
            Tier::Host => "host",
            Tier::Disk => "disk",
        })
    }
}

/// A kind of unit: [`Block`], [`Slot`] or [`Packed`], and no other.
pub trait Kind: Kept + fmt::Debug + Copy + Ord + Hash {
    /// The unit's name in messages.
    const NAME: &'static str;
}

/// Names the kind of a [`BlockHandle`] and a [`BlockId`]; has no values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Block {}

/// Names the kind of a [`SlotHandle`] and a [`SlotId`]; has no values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Slot {}

/// Names the kind of a [`PackedHandle`] and a [`PackedId`]; has no values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Packed {}

impl Kind for Block {
    const NAME: &'static str = "block";
}

impl Kind for Slot {
    const NAME: &'static str = "slot";
}

impl Kind for Packed {
    const NAME: &'static str = "packed slot";
}

/// Holds one block.
pub type BlockHandle = Handle<Block>;
/// Holds one slot.
pub type SlotHandle = Handle<Slot>;
/// Holds one packed slot.
pub type PackedHandle = Handle<Packed>;
/// Names one block of a tier, without holding it.
pub type BlockId = Id<Block>;
/// Names one slot of a tier, without holding it.
pub type SlotId = Id<Slot>;
/// Names one packed slot of a tier, without holding it.
pub type PackedId = Id<Packed>;

/// Names one unit of a tier, without holding it.
///
/// An id outlives nothing: once the last handle is released, the same id may name another
/// holder's unit. [`PoolLayout`](crate::PoolLayout) turns ids into byte offsets.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Id<K: Kind> {
    index: u32,
    kind: PhantomData<K>,
}

impl<K: Kind> Id<K> {
    pub(crate) fn new(index: u32) -> Id<K> {
        Id { index, kind: PhantomData }
    }

    /// The unit's number in its pool, from 0, dense within a page. Not an offset.
    pub fn index(self) -> usize {
        self.index as usize
    }
}

impl<K: Kind> fmt::Display for Id<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", K::NAME, self.index)
    }
}

impl<K: Kind> fmt::Debug for Id<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// Holds one unit of one tier until a [`StatePool`](crate::StatePool) takes it back.
///
/// # Panics
///
/// Dropping a handle instead of releasing it panics in builds with debug assertions, except while
/// unwinding. Without debug assertions the unit stays held for the life of the pool.
#[must_use = "a handle must be kept or given back with StatePool::release"]
pub struct Handle<K: Kind> {
    id: Id<K>,
    tier: Tier,
}

impl<K: Kind> Handle<K> {
    pub(crate) fn new(id: Id<K>, tier: Tier) -> Handle<K> {
        Handle { id, tier }
    }

    /// Ends the handle; the pool has counted it out.
    pub(crate) fn end(self) {
        std::mem::forget(self);
    }

    /// The unit this handle holds.
    pub fn id(&self) -> Id<K> {
        self.id
    }

    /// The tier whose pool minted this handle.
    pub fn tier(&self) -> Tier {
        self.tier
    }
}

impl<K: Kind> fmt::Debug for Handle<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "handle of {} {}", self.tier, self.id)
    }
}

impl<K: Kind> Drop for Handle<K> {
    fn drop(&mut self) {
        if cfg!(debug_assertions) && !std::thread::panicking() {
            panic!("{self:?} was dropped without release");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_and_handles_say_what_they_name() {
        let handle = SlotHandle::new(Id::new(7), Tier::Host);
        assert_eq!(handle.id().to_string(), "slot 7");
        assert_eq!(format!("{handle:?}"), "handle of host slot 7");
        assert_eq!((handle.id().index(), handle.tier()), (7, Tier::Host));
        handle.end();
        assert_eq!(format!("{:?}", BlockId::new(3)), "block 3");
        assert_eq!(PackedId::new(2).to_string(), "packed slot 2");
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "handle of device block 5 was dropped without release")]
    fn dropping_a_live_handle_panics() {
        drop(BlockHandle::new(Id::new(5), Tier::Device));
    }

    #[test]
    fn dropping_while_unwinding_does_not_abort() {
        let outcome = std::panic::catch_unwind(|| {
            let _held = BlockHandle::new(Id::new(0), Tier::Device);
            panic!("the first fault");
        });
        let message = outcome.expect_err("it panics");
        assert_eq!(message.downcast_ref(), Some(&"the first fault"));
    }
}
