//! Leaving the tree for other reasons than want of room: a state that its last user takes over, and
//! states that must not be used any more.

use state_pool::{SlotId, StatePool, Tier};

use super::PrefixTree;
use super::radix::NodeId;

impl PrefixTree {
    /// Evicts the state that the tree holds in the pool's tier with this slot, although others
    /// hold its units: who shares it may then be its sole holder. False if there is none.
    pub fn hand_over(&mut self, pool: &mut StatePool, slot: SlotId) -> bool {
        let tier = pool.tier();
        let has_it = |id: &NodeId| {
            self.nodes[*id].value.held(tier).slot.as_ref().is_some_and(|held| held.id() == slot)
        };
        let Some(id) = self.nodes.ids().find(has_it) else { return false };
        self.evict(pool, id);
        true
    }

    /// Takes out, in both tiers, every state and block that lies on the path of these tokens
    /// behind the first `from` of them, and everything below: they are not to be used again.
    /// Returns the checkpoints taken out. A copy that is on its way to the host comes too late.
    pub fn discard(
        &mut self,
        (device, host): (&mut StatePool, &mut StatePool),
        salt: Option<&str>,
        tokens: &[u32],
        from: usize,
    ) -> usize {
        let Some(root) = self.nodes.find_root(salt) else { return 0 };
        let mut tops = Vec::new();
        self.nodes.walk(root, tokens, |id, common| {
            if self.nodes[id].start + common > from {
                tops.push(id);
            }
        });
        let mut bad: Vec<NodeId> = self.nodes.ids().collect();
        bad.retain(|id| self.nodes.path_up(*id).any(|above| tops.contains(&above)));
        // Children before parents.
        bad.sort_by_key(|id| (std::cmp::Reverse(self.nodes[*id].start), *id));
        let states = bad.iter().filter(|id| {
            [Tier::Device, Tier::Host].into_iter().any(|tier| self.has_state(tier, **id))
        });
        let count = states.count();
        let parents: Vec<NodeId> = tops.iter().filter_map(|id| self.nodes[*id].parent).collect();
        for id in bad {
            for pool in [&mut *device, &mut *host] {
                if self.nodes.get(id).is_some_and(|n| !n.value.held(pool.tier()).blocks.is_empty())
                {
                    self.release_node(pool, id);
                }
            }
        }
        // What was kept for the sake of these only goes too.
        for parent in parents {
            for pool in [&mut *device, &mut *host] {
                if self.nodes.get(parent).is_some_and(|node| node.parent.is_some()) {
                    self.prune(pool, parent);
                }
            }
        }
        count
    }
}
