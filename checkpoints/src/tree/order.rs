//! The checkpoints of a tier in classes of like value, each class in the order of their last use:
//! the least worthy of all is the first of a class.

use std::collections::BTreeSet;
use std::ops::Bound;

use super::radix::NodeId;

/// Where a checkpoint stands in an order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    pub class: usize,
    pub last_used: u64,
}

/// Checkpoints by their places.
#[derive(Debug, Default)]
pub(super) struct Order {
    classes: Vec<BTreeSet<(u64, NodeId)>>,
}

impl Order {
    pub fn insert(&mut self, place: Place, id: NodeId) {
        if self.classes.len() <= place.class {
            self.classes.resize_with(place.class + 1, BTreeSet::new);
        }
        let is_new = self.classes[place.class].insert((place.last_used, id));
        assert!(is_new, "a checkpoint has one place");
    }

    pub fn remove(&mut self, place: Place, id: NodeId) {
        let was_there = self.classes[place.class].remove(&(place.last_used, id));
        assert!(was_there, "a checkpoint is where its place says");
    }

    /// How many classes there are, empty ones among them.
    pub fn classes(&self) -> usize {
        self.classes.len()
    }

    /// The next checkpoint of a class behind another, the one used longest ago first.
    pub fn next(&self, class: usize, behind: Option<(u64, NodeId)>) -> Option<(u64, NodeId)> {
        let from = behind.map_or(Bound::Unbounded, Bound::Excluded);
        self.classes[class].range((from, Bound::Unbounded)).next().copied()
    }

    /// How many checkpoints there are.
    pub fn len(&self) -> usize {
        self.classes.iter().map(BTreeSet::len).sum()
    }
}
