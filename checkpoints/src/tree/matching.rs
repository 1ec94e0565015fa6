//! Looking a prompt up, and taking shares of the state found.

use state_pool::{
    BLOCK_LEN, BlockHandle, BlockTable, PackedHandle, PoolError, SequenceState, SlotHandle,
    StatePool, Tier,
};

use super::PrefixTree;
use super::radix::{Lineage, NodeId};

impl MissReason {
    /// The word callers see.
    pub fn as_str(self) -> &'static str {
        match self {
            MissReason::NeverTaken => "never_taken",
            MissReason::NoSlot => "no_slot",
            MissReason::Evicted => "evicted",
            MissReason::NotExact => "not_exact",
        }
    }
}

/// What a match may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatchOptions {
    /// Use exact states only (`--exact-prefix`, rule 5).
    pub exact_only: bool,
    /// Use no state behind more tokens than these: floor64 of the own prompt for a sequence that
    /// is computed again (rule 9).
    pub limit_tokens: usize,
    /// Use no state on the host: copies from there have failed.
    pub device_only: bool,
}

impl Default for MatchOptions {
    /// Every state.
    fn default() -> MatchOptions {
        MatchOptions { exact_only: false, limit_tokens: usize::MAX, device_only: false }
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
    /// Of these tokens, those whose blocks have the bits of a cold run; all in an exact state.
    pub exact_tokens: usize,
    /// Device: a sequence can go on from it. Host: it is copied first.
    pub tier: Tier,
    /// It is packed, and not exact any more when it comes back: see
    /// [`hold_packed`](PrefixTree::hold_packed).
    pub is_packed: bool,
    pub(super) node: NodeId,
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
            let Some(usable) = self.usable(id, common, limit, options.device_only) else { return };
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
    fn usable(&self, id: NodeId, common: usize, limit: usize, device_only: bool) -> Option<Usable> {
        let node = &self.nodes[id];
        let tiers = if device_only { &[Tier::Device][..] } else { &[Tier::Device, Tier::Host] };
        let tier = tiers.iter().copied().find(|tier| self.has_state(*tier, id))?;
        let position = if self.options.is_recurrent {
            (common == node.tokens.len() && node.end() <= limit).then_some(node.end())
        } else {
            let position = self.floor_to_grid((node.start + common).min(limit));
            (position > node.start).then_some(position)
        };
        let position = position?;
        let is_exact = |id: &NodeId| self.nodes[*id].lineage == Lineage::Exact;
        let border = self.nodes.path_up(id).find(is_exact).map_or(0, |id| self.nodes[id].end());
        let exact_tokens = border.min(position);
        let is_packed = node.value.held(tier).packed.is_some();
        let lineage = if is_packed { Lineage::NonExact } else { node.lineage };
        Some(Usable { position, lineage, exact_tokens, tier, is_packed, node: id })
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

    pub(crate) fn floor_to_grid(&self, position: usize) -> usize {
        position - position % self.options.grid_tokens
    }

    /// Shares of a state in the pool's tier, as the state of a new sequence. Without recurrent
    /// layers the sequence gets a fresh slot of zero bytes. [`note_resumed`] tells that the
    /// sequence goes on from there.
    ///
    /// [`note_resumed`]: PrefixTree::note_resumed
    ///
    /// # Errors
    ///
    /// [`PoolError::NoRoom`] if no such slot is free; never with recurrent layers.
    ///
    /// # Panics
    ///
    /// If the state is in another tier, or was evicted since the match.
    pub fn hold(&self, usable: &Usable, pool: &mut StatePool) -> Result<SequenceState, PoolError> {
        assert_eq!(usable.tier, pool.tier());
        let slot = match self.share_slot(usable, pool) {
            Some(slot) => slot,
            None => pool.alloc_slot()?,
        };
        let blocks = self.share_blocks(usable, pool);
        Ok(SequenceState::from_parts(BlockTable::from(blocks), slot, usable.position))
    }

    /// Shares of a packed state on the host: its blocks, and the packed slot.
    ///
    /// # Panics
    ///
    /// If it is not packed, or was evicted since the match.
    pub fn hold_packed(&self, usable: &Usable, host: &mut StatePool) -> (BlockTable, PackedHandle) {
        let held = self.nodes[usable.node].value.held(Tier::Host);
        let slot = host.share(held.packed.as_ref().expect("a packed state"));
        (BlockTable::from(self.share_blocks(usable, host)), slot)
    }

    /// Marks the use of a state: a sequence has resumed from it. It may have been handed over to
    /// that sequence.
    pub fn note_resumed(&mut self, usable: &Usable) {
        if self.nodes.get(usable.node).is_some() {
            self.mark_resumed(usable.node);
        }
        match usable.tier {
            Tier::Device => self.counts.resumed += 1,
            Tier::Host | Tier::Disk => self.counts.promoted += 1,
        }
    }

    /// How many blocks of these tokens, from the first on, the tree holds in a tier with the bits
    /// of a cold run: full blocks of exact nodes.
    pub fn exact_blocks(&self, tier: Tier, salt: Option<&str>, tokens: &[u32]) -> usize {
        self.exact_path(tier, salt, tokens).map_or(0, |(_, blocks)| blocks)
    }

    /// Shares of the first `count` of these blocks.
    ///
    /// # Panics
    ///
    /// If there are fewer; see [`exact_blocks`](PrefixTree::exact_blocks).
    pub fn share_exact_blocks(
        &self,
        pool: &mut StatePool,
        salt: Option<&str>,
        tokens: &[u32],
        count: usize,
    ) -> Vec<BlockHandle> {
        let Some((end, there)) = self.exact_path(pool.tier(), salt, tokens) else {
            assert_eq!(count, 0, "no block is there");
            return Vec::new();
        };
        assert!(count <= there, "{count} of {there} blocks");
        self.share_path(end, pool, count)
    }

    /// The last node of the exact path of these tokens that holds blocks in a tier, and how many
    /// full blocks that path holds.
    fn exact_path(
        &self,
        tier: Tier,
        salt: Option<&str>,
        tokens: &[u32],
    ) -> Option<(NodeId, usize)> {
        let mut last = None;
        self.nodes.walk(self.nodes.find_root(salt)?, tokens, |id, common| {
            let node = &self.nodes[id];
            let blocks = (node.start + common) / BLOCK_LEN;
            let is_there =
                node.lineage == Lineage::Exact && !node.value.held(tier).blocks.is_empty();
            if is_there && last.is_none_or(|(_, most)| blocks > most) {
                last = Some((id, blocks));
            }
        });
        last
    }

    /// None without recurrent layers.
    fn share_slot(&self, usable: &Usable, pool: &mut StatePool) -> Option<SlotHandle> {
        let held = self.nodes[usable.node].value.held(pool.tier());
        assert_eq!(held.slot.is_some(), self.options.is_recurrent, "a state evicted since");
        held.slot.as_ref().map(|slot| pool.share(slot))
    }

    /// Shares of those blocks of a state that the pool's tier has, the first ones: what a copy of
    /// it from another tier need not bring.
    ///
    /// # Panics
    ///
    /// If the state was evicted since the match.
    pub fn share_blocks(&self, usable: &Usable, pool: &mut StatePool) -> Vec<BlockHandle> {
        self.share_path(usable.node, pool, usable.position.div_ceil(BLOCK_LEN))
    }

    /// Shares of the first `count` blocks that the pool's tier has of a path.
    fn share_path(&self, end: NodeId, pool: &mut StatePool, count: usize) -> Vec<BlockHandle> {
        let mut path: Vec<NodeId> = self.nodes.path_up(end).collect();
        path.reverse();
        let tier = pool.tier();
        let blocks = path.iter().flat_map(|id| &self.nodes[*id].value.held(tier).blocks);
        blocks.take(count).map(|block| pool.share(block)).collect()
    }

    /// The first to pass a state spends it, and with it the short rest of the path below: a prompt
    /// that had gone on from there would have matched it.
    fn mark_resumed(&mut self, id: NodeId) {
        self.use_node(id);
        let passes = self.nodes[id].value.passes;
        self.nodes[id].value.passes = passes.saturating_add(1);
        self.nodes[id].value.is_spent = false;
        self.replace(id);
        let may_spend = passes == 0 && self.options.is_recurrent;
        let spent = if may_spend { self.tail(id) } else { None };
        for id in spent.into_iter().flatten() {
            self.nodes[id].value.is_spent = true;
            self.replace(id);
        }
    }
}

impl Usable {
    fn rank(&self) -> (usize, bool, bool) {
        (self.position, self.lineage == Lineage::Exact, self.tier == Tier::Device)
    }
}
