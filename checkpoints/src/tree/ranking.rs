//! Which checkpoint is next to leave a tier, found without a scan of the nodes.
//!
//! A checkpoint has its place in the order of its tier as long as it has a state there. Its value
//! follows from its neighbours: those next to one that comes or goes are placed anew, up to
//! [`MAX_REPLACED`]; what is further away is placed anew when its turn comes.

use state_pool::{StatePool, Tier};

use super::order::{Order, Place};
use super::radix::NodeId;
use super::{PrefixTree, Units};
use crate::policy::{Candidate, UnitBytes, class, value, worth};

/// A state that a path of more tokens than these passes by is no longer near that path's end.
pub(super) const NEAR_TOKENS: usize = 2048;
/// Checkpoints below one that are placed anew when it comes or goes.
const MAX_REPLACED: usize = 16;

/// Checkpoints of a tier, the least worthy first, while none comes or goes.
pub(super) struct Ranking {
    heads: Vec<Option<Ranked>>,
}

/// A checkpoint and what it is worth.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ranked {
    pub worth: u128,
    pub id: NodeId,
    last_used: u64,
}

impl PrefixTree {
    /// All checkpoints of the pool's tier that are asked for.
    pub(super) fn rank(
        &mut self,
        pool: &StatePool,
        is_asked_for: impl Fn(&PrefixTree, NodeId) -> bool,
    ) -> Ranking {
        loop {
            let classes = 0..self.order(pool.tier()).classes();
            let mut has_moved = false;
            let mut head = |class| self.head(pool, class, None, &is_asked_for, &mut has_moved);
            let heads = classes.map(&mut head).collect();
            if !has_moved {
                return Ranking { heads };
            }
        }
    }

    /// The first of a class behind another that is asked for. One that belongs to another class
    /// by now is moved there.
    fn head(
        &mut self,
        pool: &StatePool,
        of: usize,
        behind: Option<(u64, NodeId)>,
        is_asked_for: &impl Fn(&PrefixTree, NodeId) -> bool,
        has_moved: &mut bool,
    ) -> Option<Ranked> {
        let tier = pool.tier();
        let mut at = behind;
        loop {
            let next = self.order(tier).next(of, at)?;
            let (last_used, id) = next;
            at = Some(next);
            if !is_asked_for(self, id) {
                continue;
            }
            let value = value(&self.candidate(tier, id), sizes(pool));
            if class(value) == of {
                let worth = worth(value, last_used, self.clock);
                return Some(Ranked { worth, id, last_used });
            }
            *has_moved = true;
            self.set_place(tier, id, Some(Place { class: class(value), last_used }));
        }
    }

    pub(super) fn order(&self, tier: Tier) -> &Order {
        match tier {
            Tier::Device => &self.device_order,
            Tier::Host | Tier::Disk => &self.host_order,
        }
    }

    /// Puts a node where it belongs in the order of the pool's tier, or takes it out.
    pub(super) fn place(&mut self, pool: &StatePool, id: NodeId) {
        let tier = pool.tier();
        let is_last = self.options.is_recurrent || self.children_in(tier, id) == 0;
        let place = (is_last && self.has_state(tier, id)).then(|| Place {
            class: class(value(&self.candidate(tier, id), sizes(pool))),
            last_used: self.nodes[id].value.last_used,
        });
        self.set_place(tier, id, place);
    }

    /// Places those anew whose value a node that came or went has changed.
    pub(super) fn place_around(&mut self, pool: &StatePool, id: NodeId) {
        let tier = pool.tier();
        let above = self.nodes.path_up(id).skip(1).find(|id| self.has_state(tier, *id));
        if let Some(above) = above {
            self.place(pool, above);
        }
        let below = |id: NodeId| self.nodes[id].children().take(MAX_REPLACED);
        let mut open: Vec<NodeId> = below(id).collect();
        let mut seen = 0;
        let mut found = Vec::new();
        while let Some(id) = open.pop().filter(|_| seen < MAX_REPLACED) {
            seen += 1;
            if self.has_state(tier, id) {
                found.push(id);
            } else {
                open.extend(below(id));
            }
        }
        found.into_iter().for_each(|id| self.place(pool, id));
    }

    pub(super) fn set_place(&mut self, tier: Tier, id: NodeId, place: Option<Place>) {
        let before = std::mem::replace(&mut self.nodes[id].value.held_mut(tier).place, place);
        let order = match tier {
            Tier::Device => &mut self.device_order,
            Tier::Host | Tier::Disk => &mut self.host_order,
        };
        if before == place {
            return;
        }
        if let Some(before) = before {
            order.remove(before, id);
        }
        if let Some(place) = place {
            order.insert(place, id);
        }
    }

    /// Moves a node that was used, or spent, in both tiers. One that is spent no longer finds its
    /// class when its turn comes.
    pub(super) fn replace(&mut self, id: NodeId) {
        let Units { last_used, is_spent, .. } = self.nodes[id].value;
        for tier in [Tier::Device, Tier::Host] {
            if let Some(Place { class, .. }) = self.nodes[id].value.held(tier).place {
                let class = if is_spent { 0 } else { class };
                self.set_place(tier, id, Some(Place { class, last_used }));
            }
        }
    }

    pub(super) fn candidate(&self, tier: Tier, id: NodeId) -> Candidate {
        let value = &self.nodes[id].value;
        let children = self.children_in(tier, id);
        let mut candidate = Candidate {
            is_spent: value.is_spent,
            is_inner: children == 1 && self.tokens_below(tier, id).is_none(),
            passes: value.passes,
            saved_tokens: 0,
            slots: usize::from(self.options.is_recurrent),
            blocks: 0,
        };
        let mut is_freed = children == 0;
        for above in self.nodes.path_up(id) {
            let node = &self.nodes[above];
            let held = node.value.held(tier);
            if above != id {
                if held.has_slot() || !self.options.is_recurrent {
                    break;
                }
                is_freed &= self.children_in(tier, above) == 1;
            }
            candidate.saved_tokens += node.tokens.len();
            candidate.blocks += if is_freed { held.blocks.len() } else { 0 };
        }
        candidate
    }

    /// The tokens of the one path below a node, up to its end or where it parts. None if they
    /// are more than [`NEAR_TOKENS`].
    fn tokens_below(&self, tier: Tier, id: NodeId) -> Option<usize> {
        let (mut at, mut tokens) = (id, 0);
        loop {
            let holds = |id: &NodeId| !self.nodes[*id].value.held(tier).blocks.is_empty();
            let mut children = self.nodes[at].children().filter(holds);
            let (Some(next), None) = (children.next(), children.next()) else {
                return Some(tokens);
            };
            tokens += self.nodes[next].tokens.len();
            if tokens > NEAR_TOKENS {
                return None;
            }
            at = next;
        }
    }

    /// A node and the path below it to its end, if it parts nowhere and is short.
    pub(super) fn tail(&self, id: NodeId) -> Option<Vec<NodeId>> {
        let (mut path, mut tokens) = (vec![id], 0);
        loop {
            let mut children = self.nodes[path[path.len() - 1]].children();
            let Some(next) = children.next() else { return Some(path) };
            tokens += self.nodes[next].tokens.len();
            if children.next().is_some() || tokens > NEAR_TOKENS {
                return None;
            }
            path.push(next);
        }
    }

    /// How many children hold units in a tier, counted up to two.
    pub(super) fn children_in(&self, tier: Tier, id: NodeId) -> usize {
        let holds = |id: &NodeId| !self.nodes[*id].value.held(tier).blocks.is_empty();
        self.nodes[id].children().filter(holds).take(2).count()
    }
}

impl Ranking {
    /// The least worthy of those that are left. One that is found in a wrong class is moved, and
    /// passed over if that class has been asked further already.
    pub fn next(
        &mut self,
        tree: &mut PrefixTree,
        pool: &StatePool,
        is_asked_for: impl Fn(&PrefixTree, NodeId) -> bool,
    ) -> Option<Ranked> {
        let heads = self.heads.iter().enumerate();
        let heads = heads.filter_map(|(class, head)| Some((class, (*head)?)));
        let (class, least) = heads.min_by_key(|(_, head)| (head.worth, head.last_used, head.id))?;
        let behind = Some((least.last_used, least.id));
        self.heads[class] = tree.head(pool, class, behind, &is_asked_for, &mut false);
        Some(least)
    }
}

/// Bytes of the units of a pool.
pub(super) fn sizes(pool: &StatePool) -> UnitBytes {
    let layout = pool.layout();
    let slot_bytes = if layout.packed_bytes > 0 { layout.packed_bytes } else { layout.slot_bytes };
    UnitBytes { slot_bytes, block_bytes: layout.block_bytes }
}
