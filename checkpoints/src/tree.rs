//! The prefix tree: what a node holds, how a prefix enters and leaves it, and its counts.
//!
//! Looking up is in `matching`, leaving in `eviction`, the copy to the host in `demotion`;
//! `radix` knows tokens only and `ghosts` the prefixes there are no units for.
//!
//! Invariants, scanned by [`PrefixTree::check`]: per tier a node holds the blocks of all its
//! tokens or none; where it holds any, its parent does too; with recurrent layers it holds them
//! only while it or a node below it has a slot in that tier. A node that holds nothing is gone.

mod check;
mod demotion;
mod eviction;
mod ghosts;
mod histories;
mod matching;
mod order;
mod radix;
mod ranking;
mod removal;
mod stats;

use std::collections::BTreeSet;

use state_pool::{BLOCK_LEN, BlockHandle, Handle, PackedHandle, SlotHandle, StatePool, Tier};

pub use demotion::Demotion;
pub use eviction::Room;
pub use histories::History;
pub use matching::{Match, MatchOptions, MissReason, Usable};
pub use radix::{Lineage, common_tokens};
pub use stats::{SoleUnits, TierCounts, TreeStats};

use ghosts::Ghosts;
use order::{Order, Place};
use radix::{NodeId, Radix, Value};

/// What a tree is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TreeOptions {
    /// True if the model has recurrent layers: states are then what is resumed from.
    pub is_recurrent: bool,
    /// Positions to resume from without recurrent layers are multiples of so many tokens. With
    /// recurrent layers a missed position is told on this grid.
    pub grid_tokens: usize,
    /// The most tokens kept as ghosts, four bytes each.
    pub max_ghost_tokens: usize,
}

impl Default for TreeOptions {
    /// A hybrid model, and 64 MiB of ghosts.
    fn default() -> TreeOptions {
        TreeOptions { is_recurrent: true, grid_tokens: BLOCK_LEN, max_ghost_tokens: 1 << 24 }
    }
}

/// Computed tokens from the first on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prefix<'a> {
    /// The caller's `cache_salt`; prefixes of different salts never meet.
    pub salt: Option<&'a str>,
    /// The tokens, at least one.
    pub tokens: &'a [u32],
    /// How many of them, from the first on, are exact: a multiple of 64.
    pub exact_tokens: usize,
    /// How those behind were computed: positions in order, and what holds from each on.
    pub histories: &'a [(usize, History)],
}

/// Remembers prefixes and owns the units behind them. See the [crate](crate) for the contract.
#[derive(Debug)]
pub struct PrefixTree {
    options: TreeOptions,
    nodes: Radix<Units>,
    ghosts: Ghosts,
    device_order: Order,
    host_order: Order,
    /// Block handles held on the device and on the host.
    blocks: [usize; 2],
    /// Counts uses, so that one is later than another.
    clock: u64,
    /// What has happened; what is held now is filled in when asked.
    counts: TreeStats,
}

/// What a node holds and how it was used.
#[derive(Debug, Default)]
struct Units {
    device: Held,
    host: Held,
    /// How each block's last token was computed; nothing in an exact node.
    histories: Vec<History>,
    last_used: u64,
    /// Prompts known to pass here but for the one that left the state: one that did so before, if
    /// any is in the tree or a ghost, and each that resumed from it.
    passes: u32,
    /// Its copy to the host is on its way.
    is_leaving: bool,
    /// The host evicted its copy since its last use, or a copy failed: it is not copied again for
    /// nothing.
    is_refused: bool,
    /// Its only continuation so far is that of the one that resumed from it.
    is_spent: bool,
}

/// A node's units in one tier.
#[derive(Debug, Default)]
struct Held {
    blocks: Vec<BlockHandle>,
    slot: Option<SlotHandle>,
    /// In place of a slot, on a host that packs.
    packed: Option<PackedHandle>,
    /// Where it stands among those that may be evicted.
    place: Option<Place>,
}

impl Held {
    /// True if it has a state, as it was computed or packed.
    fn has_slot(&self) -> bool {
        self.slot.is_some() || self.packed.is_some()
    }
}

impl Units {
    fn held(&self, tier: Tier) -> &Held {
        match tier {
            Tier::Device => &self.device,
            Tier::Host => &self.host,
            Tier::Disk => panic!("a tree holds no units of the disk tier"),
        }
    }

    fn held_mut(&mut self, tier: Tier) -> &mut Held {
        match tier {
            Tier::Device => &mut self.device,
            Tier::Host => &mut self.host,
            Tier::Disk => panic!("a tree holds no units of the disk tier"),
        }
    }

    fn holds_nothing(&self) -> bool {
        self.device.blocks.is_empty() && self.host.blocks.is_empty()
    }
}

impl Value for Units {
    fn divide(&mut self, blocks: usize) -> Units {
        let mut upper = Units { last_used: self.last_used, ..Units::default() };
        if !self.histories.is_empty() {
            let below = self.histories.split_off(blocks);
            upper.histories = std::mem::replace(&mut self.histories, below);
        }
        for tier in [Tier::Device, Tier::Host] {
            let all = &mut self.held_mut(tier).blocks;
            if !all.is_empty() {
                let below = all.split_off(blocks);
                upper.held_mut(tier).blocks = std::mem::replace(all, below);
            }
        }
        upper
    }
}

impl PrefixTree {
    /// An empty tree.
    ///
    /// # Panics
    ///
    /// If the grid is zero.
    pub fn new(options: TreeOptions) -> PrefixTree {
        assert!(options.grid_tokens > 0, "positions are multiples of at least one token");
        PrefixTree {
            options,
            nodes: Radix::new(),
            ghosts: Ghosts::new(options.max_ghost_tokens),
            device_order: Order::default(),
            host_order: Order::default(),
            blocks: [0; 2],
            clock: 0,
            counts: TreeStats::default(),
        }
    }

    /// Keeps a computed prefix: shares of those of its blocks that the tree lacks in the pool's
    /// tier, and the state behind its last token. A state that is there already is kept and the
    /// one given is released (rule 10: equal tokens share nodes within one lineage). So is all that
    /// is given where the tree has blocks of equal tokens with another history: a state goes with
    /// the rows of its own.
    ///
    /// `blocks` are the blocks of the tokens, more may follow. A tail block is shared too: who
    /// goes on writing it copies it first. `slot` is given exactly for models with recurrent
    /// layers, and nobody writes it from now on.
    ///
    /// # Panics
    ///
    /// If there are no tokens, exact ones end off a block border, blocks are missing, a handle is
    /// of another tier than the pool, or a slot is given or missing against the model.
    pub fn insert(
        &mut self,
        pool: &mut StatePool,
        prefix: Prefix,
        blocks: &[BlockHandle],
        slot: Option<SlotHandle>,
    ) {
        let Prefix { salt, tokens, exact_tokens, .. } = prefix;
        assert!(!tokens.is_empty(), "a prefix without tokens is no prefix");
        assert!(exact_tokens.is_multiple_of(BLOCK_LEN), "{exact_tokens} exact tokens");
        assert!(blocks.len() >= tokens.len().div_ceil(BLOCK_LEN), "blocks are missing");
        assert_eq!(slot.is_some(), self.options.is_recurrent, "slots are for recurrent layers");
        if self.has_other_history(&prefix) {
            self.counts.of_other_history += 1;
            return release_all(pool, slot);
        }
        let root = self.nodes.root(salt);
        let (exact, rest) = tokens.split_at(exact_tokens);
        let border = self.nodes.reach(root, Lineage::Exact, exact);
        let end = self.nodes.reach(border, Lineage::NonExact, rest);
        self.note_histories(end, prefix.histories);
        let is_new = self.adopt(pool, end, |pool, at| pool.share(&blocks[at]));
        let has_state = self.give_slot(pool, end, slot);
        let is_known = if self.options.is_recurrent { has_state } else { !is_new };
        self.counts.inserted += usize::from(!is_known);
        self.counts.duplicates += usize::from(is_known);
        if !is_known {
            let is_passed = !self.nodes[end].is_leaf() || self.ghosts.lead_on(salt, tokens);
            let value = &mut self.nodes[end].value;
            (value.passes, value.is_spent) = (u32::from(is_passed), false);
        }
        self.use_node(end);
        self.place(pool, end);
        if !is_known {
            self.place_around(pool, end);
        }
    }

    /// Fills the nodes from `end` up that hold no blocks in the pool's tier with what `block`
    /// gives for the block at an index. True if `end` was one of them.
    fn adopt(
        &mut self,
        pool: &mut StatePool,
        end: NodeId,
        mut block: impl FnMut(&mut StatePool, usize) -> BlockHandle,
    ) -> bool {
        let tier = pool.tier();
        let lacks = |id: &NodeId| self.nodes[*id].value.held(tier).blocks.is_empty();
        let path: Vec<NodeId> = self.nodes.path_up(end).take_while(lacks).collect();
        for id in &path {
            let node = &mut self.nodes[*id];
            let blocks = node.start / BLOCK_LEN..node.end().div_ceil(BLOCK_LEN);
            self.blocks[tier as usize] += blocks.len();
            node.value.held_mut(tier).blocks = blocks.map(|at| block(pool, at)).collect();
        }
        // Without recurrent layers what they were added to is no last one any more.
        let above = path.last().and_then(|id| self.nodes[*id].parent);
        if let Some(above) = above.filter(|id| self.nodes[*id].parent.is_some()) {
            self.place(pool, above);
        }
        !path.is_empty()
    }

    pub(crate) fn is_recurrent(&self) -> bool {
        self.options.is_recurrent
    }

    /// True if a tier has what a sequence needs to resume behind a node's last token.
    fn has_state(&self, tier: Tier, id: NodeId) -> bool {
        let held = self.nodes[id].value.held(tier);
        if self.options.is_recurrent { held.has_slot() } else { !held.blocks.is_empty() }
    }

    /// Puts a slot behind a node, or releases it if there is one. True if there was.
    fn give_slot(&mut self, pool: &mut StatePool, id: NodeId, slot: Option<SlotHandle>) -> bool {
        let Some(slot) = slot else { return false };
        let place = &mut self.nodes[id].value.held_mut(pool.tier()).slot;
        let has_state = place.is_some();
        if has_state {
            pool.release(slot);
        } else {
            assert_eq!(slot.tier(), pool.tier(), "a slot of another tier");
            *place = Some(slot);
        }
        has_state
    }

    /// Marks a use: of this state only, or of all blocks up to it where blocks are what is used.
    fn use_node(&mut self, id: NodeId) {
        self.clock += 1;
        let levels = if self.options.is_recurrent { 1 } else { usize::MAX };
        let used: Vec<NodeId> = self.nodes.path_up(id).take(levels).collect();
        for id in used {
            let value = &mut self.nodes[id].value;
            (value.last_used, value.is_refused) = (self.clock, false);
            self.replace(id);
        }
    }

    /// Notes a prompt that waits as a ghost. False if the bound on ghosts leaves no room for it;
    /// then it is not noted, and what was only remembered may have been dropped in trying.
    ///
    /// # Panics
    ///
    /// If there are no tokens.
    pub fn add_waiting(&mut self, salt: Option<&str>, tokens: &[u32]) -> bool {
        assert!(!tokens.is_empty(), "a prompt has tokens");
        self.ghosts.add_waiting(salt, tokens)
    }

    /// Takes out a prompt that no longer waits: it runs, or was cancelled. False if none like it
    /// was noted.
    pub fn remove_waiting(&mut self, salt: Option<&str>, tokens: &[u32]) -> bool {
        self.ghosts.remove_waiting(salt, tokens)
    }

    /// Notes that the state behind a prefix was to be kept and got no slot, so that a match that
    /// misses it says so.
    ///
    /// # Panics
    ///
    /// If there are no tokens.
    pub fn note_left_out(&mut self, prefix: Prefix) {
        let Prefix { salt, tokens, exact_tokens, .. } = prefix;
        assert!(!tokens.is_empty(), "a state follows tokens");
        let is_exact = tokens.len() <= exact_tokens;
        let lineage = if is_exact { Lineage::Exact } else { Lineage::NonExact };
        self.ghosts.remember(salt, tokens, lineage, MissReason::NoSlot);
        self.counts.left_out += 1;
    }

    /// The positions above zero where others leave the path of these tokens, down to the grid and
    /// in order: what is in the tree, what waits and what is remembered. A waiting prompt that is
    /// a prefix of these tokens leaves them at its end. Without recurrent layers there are none
    /// to know: every position can be resumed from.
    pub fn junctions(&self, salt: Option<&str>, tokens: &[u32]) -> Vec<usize> {
        let mut positions = BTreeSet::new();
        if self.options.is_recurrent {
            let mut note = |position| {
                positions.insert(position - position % self.options.grid_tokens);
            };
            self.ghosts.partings(salt, tokens, &mut note);
            if let Some(root) = self.nodes.find_root(salt) {
                self.nodes.partings(root, tokens, &mut note);
            }
        }
        positions.into_iter().filter(|position| *position > 0).collect()
    }

    /// Gives all units of the pool's tier back, without remembering them. Ghosts stay.
    pub fn clear(&mut self, pool: &mut StatePool) {
        let mut ids: Vec<NodeId> = self.nodes.ids().collect();
        ids.sort_by_key(|id| std::cmp::Reverse(self.nodes[*id].start));
        for id in ids {
            self.release_node(pool, id);
        }
    }

    /// Gives back what a node holds in the pool's tier. A node that then holds nothing goes.
    fn release_node(&mut self, pool: &mut StatePool, id: NodeId) {
        self.set_place(pool.tier(), id, None);
        let held = std::mem::take(self.nodes[id].value.held_mut(pool.tier()));
        self.blocks[pool.tier() as usize] -= held.blocks.len();
        release_all(pool, held.blocks);
        release_all(pool, held.slot);
        release_all(pool, held.packed);
        if self.nodes[id].value.holds_nothing() {
            self.nodes.remove(id);
        }
    }

    /// How often something of it was used or given to it: while this stays, so do the answers of
    /// [`demote`](PrefixTree::demote), but for states that were held by others.
    pub fn uses(&self) -> u64 {
        self.clock
    }

    /// States held in a tier.
    pub fn slots(&self, tier: Tier) -> usize {
        if self.options.is_recurrent { self.order(tier).len() } else { 0 }
    }
}

/// Gives handles back.
fn release_all<K: state_pool::Kind>(
    pool: &mut StatePool,
    handles: impl IntoIterator<Item = Handle<K>>,
) {
    for handle in handles {
        pool.release(handle);
    }
}
