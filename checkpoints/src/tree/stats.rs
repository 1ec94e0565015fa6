//! What a tree holds and what has happened to it.

use state_pool::Tier;

use super::{Held, PrefixTree};

/// Counts of a tree: what it holds now, and what has happened to it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TreeStats {
    /// Nodes that hold units.
    pub nodes: usize,
    /// Tokens of these nodes.
    pub tokens: usize,
    /// Tokens of ghosts.
    pub ghost_tokens: usize,
    /// On the device.
    pub device: TierCounts,
    /// On the host.
    pub host: TierCounts,
    /// Prefixes whose end was not there.
    pub inserted: usize,
    /// Prefixes whose end was there already.
    pub duplicates: usize,
    /// Checkpoints that are in no tier any more: evicted from the last one that had them.
    pub lost: usize,
    /// Prefixes that were not kept, since equal tokens with another history were there.
    pub of_other_history: usize,
    /// Snapshots that got no slot.
    pub left_out: usize,
    /// Sequences that resumed from the device.
    pub resumed: usize,
    /// Sequences that got a copy of a state on the host.
    pub promoted: usize,
    /// Checkpoints copied to the host.
    pub demoted: usize,
    /// Copies to the host that did not arrive or came too late.
    pub demotions_failed: usize,
}

/// Counts of one tier.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TierCounts {
    /// Block handles held.
    pub blocks: usize,
    /// Handles of slots held, packed ones too.
    pub slots: usize,
    /// Checkpoints evicted so far, those that another tier still has among them.
    pub evicted: usize,
}

/// Units of one tier that nobody but the tree holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SoleUnits {
    /// Blocks.
    pub blocks: usize,
    /// Slots.
    pub slots: usize,
    /// Packed slots.
    pub packed: usize,
}

impl PrefixTree {
    /// The counts of this moment.
    pub fn stats(&self) -> TreeStats {
        let held = |tier: Tier, counts: TierCounts| TierCounts {
            blocks: self.blocks[tier as usize],
            slots: self.slots(tier),
            ..counts
        };
        TreeStats {
            nodes: self.nodes.len(),
            tokens: self.nodes.tokens(),
            ghost_tokens: self.ghosts.tokens(),
            device: held(Tier::Device, self.counts.device),
            host: held(Tier::Host, self.counts.host),
            ..self.counts
        }
    }

    /// Asserts that what is counted is what a scan of the nodes finds.
    pub(super) fn check_stats(&self) {
        let (mut nodes, mut device, mut host) = (0, TierCounts::default(), TierCounts::default());
        for node in self.nodes.ids().map(|id| &self.nodes[id]) {
            nodes += 1;
            device.add(&node.value.device);
            host.add(&node.value.host);
        }
        let stats = self.stats();
        let evicted = |counts: TierCounts| TierCounts { evicted: 0, ..counts };
        assert_eq!(
            (stats.nodes, evicted(stats.device), evicted(stats.host)),
            (nodes, device, host)
        );
    }
}

impl TierCounts {
    fn add(&mut self, held: &Held) {
        self.blocks += held.blocks.len();
        self.slots += usize::from(held.has_slot());
    }
}
