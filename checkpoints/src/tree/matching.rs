//! Looking a prompt up, and taking shares of the state found.

use state_pool::{
    BLOCK_LEN, BlockHandle, BlockTable, PoolError, SequenceState, SlotHandle, StatePool, Tier,
};

use super::radix::{Lineage, NodeId};
use super::{PrefixTree, release_all};

/// What a match may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatchOptions {
    /// Use exact states only (`--exact-prefix`, rule 5).
    pub exact_only: bool,
    /// Use no state behind more tokens than these: floor64 of the own prompt for a sequence that
    /// is computed again (rule 9).
    pub limit_tokens: usize,
}

impl Default for MatchOptions {
    /// Every state.
    fn default() -> MatchOptions {
        MatchOptions { exact_only: false, limit_tokens: usize::MAX }
    }
}

/// What the tree knows of a prompt.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Match {
    /// The longest run of the prompt's first tokens that the tree has blocks for.
    pub matched_tokens: usize,
    /// The deepest state that may be used; of equally deep ones the exact one, then the one on
    /// the device.
    pub usable: Option<Usable>,
    /// Why there is no deeper one, if one could have helped: the reason of the deepest known
    /// state that is lost or not allowed; where none is known, `NeverTaken` if a grid position
    /// of the match lies deeper.
    pub miss: Option<MissReason>,
}

/// A state to resume from, valid until units are evicted or the tree is cleared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usable {
    /// The tokens it stands behind, which need not be computed.
    pub position: usize,
    /// Whether it has the bits of a cold run.
    pub lineage: Lineage,
    /// Device: [`resume`](PrefixTree::resume) from it. Host:
    /// [`promote`](PrefixTree::promote) it.
    pub tier: Tier,
    node: NodeId,
}

/// Why a deeper state could not be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MissReason {
    /// Nobody meant to keep one.
    NeverTaken,
    /// It was to be kept, but there was no slot for it.
    NoSlot,
    /// It was kept and made room for something else.
    Evicted,
    /// It is there and is not exact, as was asked for.
    NotExact,
}

/// What a state on the host takes to be used: blocks that are on the device still, and shares of
/// the units to be copied there. They hold their units while the copy is on its way (rule 8).
#[derive(Debug)]
#[must_use = "the handles must be used or released"]
pub struct Promotion {
    /// The tokens the state stands behind.
    pub position: usize,
    /// The first blocks of the sequence, shared on the device.
    pub shared: BlockTable,
    /// The blocks that follow, on the host: each is copied to a fresh block of the device.
    pub blocks: Vec<BlockHandle>,
    /// The state on the host, to be copied to a fresh slot; none without recurrent layers.
    pub slot: Option<SlotHandle>,
}

impl Promotion {
    /// Gives everything back, if the copies were not made.
    pub fn release(self, device: &mut StatePool, host: &mut StatePool) {
        self.shared.release(device);
        release_all(host, self.blocks);
        release_all(host, self.slot);
    }

    /// The sequence's state on the device, once the copies are in `blocks` and `slot`: as many
    /// fresh blocks as were to be copied, in their order. Gives the sources back to the host.
    ///
    /// # Panics
    ///
    /// If there are fewer or more blocks than were to be copied.
    pub fn arrive(
        self,
        host: &mut StatePool,
        blocks: Vec<BlockHandle>,
        slot: SlotHandle,
    ) -> SequenceState {
        assert_eq!(blocks.len(), self.blocks.len(), "blocks copied and to be copied");
        release_all(host, self.blocks);
        release_all(host, self.slot);
        let mut table = self.shared.into_vec();
        table.extend(blocks);
        SequenceState::from_parts(BlockTable::from(table), slot, self.position)
    }
}

impl PrefixTree {
    /// Looks up the longest match of a prompt and the deepest state it may use. With recurrent
    /// layers a state behind the whole prompt counts: its slot has the last hidden row. Without,
    /// the last token is left to be computed.
    pub fn match_prefix(&self, salt: Option<&str>, tokens: &[u32], options: MatchOptions) -> Match {
        let last = if self.options.is_recurrent { 0 } else { 1 };
        let limit = tokens.len().saturating_sub(last).min(options.limit_tokens);
        let mut found = Match::default();
        let mut not_exact = 0;
        let look = |id: NodeId, common: usize| {
            let matched_tokens = self.nodes[id].start + common;
            found.matched_tokens = found.matched_tokens.max(matched_tokens);
            let Some(usable) = self.usable(id, common, limit) else { return };
            if options.exact_only && usable.lineage == Lineage::NonExact {
                not_exact = not_exact.max(usable.position);
            } else if found.usable.is_none_or(|best| usable.rank() > best.rank()) {
                found.usable = Some(usable);
            }
        };
        if let Some(root) = self.nodes.find_root(salt) {
            self.nodes.walk(root, tokens, look);
        }
        let lost = self.ghosts.deepest_lost(salt, tokens, limit, options.exact_only);
        found.miss = self.miss(&found, not_exact, lost, limit);
        found
    }

    /// What a node offers to a prompt that has its first `common` tokens.
    fn usable(&self, id: NodeId, common: usize, limit: usize) -> Option<Usable> {
        let node = &self.nodes[id];
        let tier = [Tier::Device, Tier::Host].into_iter().find(|tier| self.has_state(*tier, id))?;
        let position = if self.options.is_recurrent {
            (common == node.tokens.len() && node.end() <= limit).then_some(node.end())
        } else {
            let position = self.floor_to_grid((node.start + common).min(limit));
            (position > node.start).then_some(position)
        };
        Some(Usable { position: position?, lineage: node.lineage, tier, node: id })
    }

    fn miss(
        &self,
        found: &Match,
        not_exact: usize,
        lost: Option<(usize, MissReason)>,
        limit: usize,
    ) -> Option<MissReason> {
        let used = found.usable.map_or(0, |usable| usable.position);
        let lost = lost.filter(|(position, _)| *position > used.max(not_exact));
        let matched = self.floor_to_grid(found.matched_tokens.min(limit));
        match lost {
            Some((_, reason)) => Some(reason),
            None if not_exact > used => Some(MissReason::NotExact),
            None => (matched > used).then_some(MissReason::NeverTaken),
        }
    }

    fn floor_to_grid(&self, position: usize) -> usize {
        position - position % self.options.grid_tokens
    }

    /// Shares of a state on the device, as the state of a new sequence, and marks its use. Without
    /// recurrent layers the sequence gets a fresh slot of zero bytes.
    ///
    /// # Errors
    ///
    /// [`PoolError::NoRoom`] if no such slot is free; never with recurrent layers.
    ///
    /// # Panics
    ///
    /// If the state is on the host, or was evicted since the match.
    pub fn resume(
        &mut self,
        usable: &Usable,
        device: &mut StatePool,
    ) -> Result<SequenceState, PoolError> {
        assert_eq!((usable.tier, device.tier()), (Tier::Device, Tier::Device));
        let slot = match self.share_slot(usable, device) {
            Some(slot) => slot,
            None => device.alloc_slot()?,
        };
        let blocks = self.share_blocks(usable, device, 0);
        self.mark_resumed(usable.node);
        self.counts.resumed += 1;
        Ok(SequenceState::from_parts(BlockTable::from(blocks), slot, usable.position))
    }

    /// Shares of a state on the host and of what the device still has of its blocks, and marks
    /// its use. The caller makes the copies.
    ///
    /// # Panics
    ///
    /// If the state is on the device, or was evicted since the match.
    pub fn promote(
        &mut self,
        usable: &Usable,
        device: &mut StatePool,
        host: &mut StatePool,
    ) -> Promotion {
        assert_eq!(
            (usable.tier, device.tier(), host.tier()),
            (Tier::Host, Tier::Device, Tier::Host)
        );
        let slot = self.share_slot(usable, host);
        let shared = BlockTable::from(self.share_blocks(usable, device, 0));
        let blocks = self.share_blocks(usable, host, shared.len());
        self.mark_resumed(usable.node);
        self.counts.promoted += 1;
        Promotion { position: usable.position, shared, blocks, slot }
    }

    /// None without recurrent layers.
    fn share_slot(&self, usable: &Usable, pool: &mut StatePool) -> Option<SlotHandle> {
        let held = self.nodes[usable.node].value.held(pool.tier());
        assert_eq!(held.slot.is_some(), self.options.is_recurrent, "a state evicted since");
        held.slot.as_ref().map(|slot| pool.share(slot))
    }

    /// Shares those of the blocks up to a position that the pool's tier has, without the first
    /// `skip`.
    fn share_blocks(&self, usable: &Usable, pool: &mut StatePool, skip: usize) -> Vec<BlockHandle> {
        let mut path: Vec<NodeId> = self.nodes.path_up(usable.node).collect();
        path.reverse();
        let tier = pool.tier();
        let blocks = path.iter().flat_map(|id| &self.nodes[*id].value.held(tier).blocks);
        let needed = usable.position.div_ceil(BLOCK_LEN);
        blocks.take(needed).skip(skip).map(|block| pool.share(block)).collect()
    }

    fn mark_resumed(&mut self, id: NodeId) {
        self.use_node(id);
        let is_leaf = self.nodes[id].is_leaf();
        let value = &mut self.nodes[id].value;
        value.is_spent = value.resumes == 0 && is_leaf;
        value.resumes = value.resumes.saturating_add(1);
    }
}

impl Usable {
    fn rank(&self) -> (usize, bool, bool) {
        (self.position, self.lineage == Lineage::Exact, self.tier == Tier::Device)
    }
}
