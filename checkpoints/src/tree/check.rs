//! The scan of a tree's invariants.

use state_pool::{BLOCK_LEN, Tier};

use super::radix::{Lineage, Node};
use super::{PrefixTree, Units};

impl PrefixTree {
    /// Scans every node and asserts the invariants of the tree, of its tokens and of its ghosts.
    /// What a tier holds in all is in [`stats`](PrefixTree::stats), for a caller to compare with
    /// the pool's.
    ///
    /// # Panics
    ///
    /// If one does not hold, which is a fault of this crate.
    pub fn check(&self) {
        self.nodes.check();
        self.ghosts.check();
        self.check_order(Tier::Device);
        self.check_order(Tier::Host);
        self.check_stats();
        for node in self.nodes.ids().map(|id| &self.nodes[id]) {
            let is_tail = !node.end().is_multiple_of(BLOCK_LEN);
            assert!(!is_tail || node.lineage == Lineage::NonExact, "an exact tail");
            assert!(!node.value.holds_nothing(), "a node that holds nothing");
            let is_exact = node.lineage == Lineage::Exact;
            let known = if is_exact { 0 } else { node.tokens.len().div_ceil(BLOCK_LEN) };
            assert_eq!(node.value.histories.len(), known, "a history for each block");
            for tier in [Tier::Device, Tier::Host] {
                self.check_held(node, tier);
            }
        }
    }

    /// Every state has its place among those that may go, and nothing else has.
    fn check_order(&self, tier: Tier) {
        let mut placed = 0;
        for id in self.nodes.ids() {
            let value = &self.nodes[id].value;
            let is_last = self.options.is_recurrent || self.children_in(tier, id) == 0;
            let place = value.held(tier).place;
            assert_eq!(place.is_some(), is_last && self.has_state(tier, id));
            let Some(place) = place else { continue };
            assert_eq!(place.last_used, value.last_used, "a use without a move");
            assert!(!value.is_spent || place.class == 0, "what is spent goes first");
            placed += 1;
        }
        assert_eq!(placed, self.order(tier).len());
    }

    fn check_held(&self, node: &Node<Units>, tier: Tier) {
        let held = node.value.held(tier);
        assert!(!held.has_slot() || self.options.is_recurrent, "a slot without layers for it");
        assert!(held.packed.is_none() || tier == Tier::Host && held.slot.is_none());
        if held.blocks.is_empty() {
            assert!(!held.has_slot(), "a state without the blocks of its tokens");
            return;
        }
        assert_eq!(held.blocks.len(), node.tokens.len().div_ceil(BLOCK_LEN));
        assert!(held.blocks.iter().all(|block| block.tier() == tier));
        assert!(held.slot.iter().all(|slot| slot.tier() == tier));
        let parent = &self.nodes[node.parent.expect("roots hold nothing")];
        let has_above = parent.parent.is_none() || !parent.value.held(tier).blocks.is_empty();
        assert!(has_above, "{tier} blocks at {} without those before", node.start);
        let is_of_use = |id| !self.nodes[id].value.held(tier).blocks.is_empty();
        let is_needed = held.has_slot() || node.children().any(is_of_use);
        assert!(is_needed || !self.options.is_recurrent, "blocks that no checkpoint needs");
    }
}
