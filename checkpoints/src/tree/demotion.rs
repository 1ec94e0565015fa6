//! A copy ahead of need (rule 9): the least worthy checkpoint of the device gets a copy on the
//! host and stays where it is, so that dropping it later frees its units at once.

use state_pool::{BLOCK_LEN, BlockHandle, PackedHandle, PoolError, SlotHandle, StatePool, Tier};

use super::radix::NodeId;
use super::ranking::{Ranked, sizes};
use super::{PrefixTree, Units, release_all};
use crate::policy::{Candidate, value, worth};

/// Units to be copied from the device to the host, source by source to its target. They are held
/// while the copy is on its way (rule 8); [`PrefixTree::end_demotion`] takes them back.
#[derive(Debug)]
#[must_use = "a demotion must be ended"]
pub struct Demotion {
    /// Shares of the checkpoint's blocks that the host lacks.
    pub source_blocks: Vec<BlockHandle>,
    /// A share of its state; none without recurrent layers.
    pub source_slot: Option<SlotHandle>,
    /// As many fresh blocks of the host.
    pub target_blocks: Vec<BlockHandle>,
    /// A fresh slot of the host.
    pub target_slot: Option<SlotHandle>,
    /// In its place a fresh packed slot, on a host that packs.
    pub target_packed: Option<PackedHandle>,
    node: NodeId,
    /// Index of the first of the blocks among those of all tokens.
    first_block: usize,
}

impl PrefixTree {
    /// Begins to copy the least worthy checkpoint that the host lacks, of those that are not spent
    /// and that nobody else holds. None if there is none, or if what goes before it and is no loss
    /// frees `clean_bytes` bytes of the device already: what is spent, has its copy on the host or
    /// gets it, or had one that the host evicted since its last use. Until the demotion is ended,
    /// its shares keep the checkpoint from being evicted.
    ///
    /// On a full host it takes the room of checkpoints that are worth less there.
    ///
    /// # Errors
    ///
    /// [`PoolError::NoRoom`] if the host has no room for it even so.
    pub fn demote(
        &mut self,
        device: &mut StatePool,
        host: &mut StatePool,
        clean_bytes: usize,
    ) -> Result<Option<Demotion>, PoolError> {
        assert_eq!((device.tier(), host.tier()), (Tier::Device, Tier::Host));
        let Some(node) = self.next_to_copy(device, clean_bytes) else { return Ok(None) };
        self.make_room(device, host, node);
        let first_block = self.first_lacking(node);
        let path = self.nodes.path_up(node);
        let lacking = path.take_while(|id| self.nodes[*id].start / BLOCK_LEN >= first_block);
        let blocks = lacking.flat_map(|id| self.nodes[id].value.device.blocks.iter().rev());
        let mut sources: Vec<&BlockHandle> = blocks.collect();
        sources.reverse();
        let slot = self.nodes[node].value.device.slot.as_ref();
        let (target_blocks, target_slot, target_packed) = if packs(host) {
            let (blocks, packed) = host.allocate_packed(sources.len())?;
            (blocks, None, Some(packed))
        } else {
            let mut targets = host.allocate(sources.len(), usize::from(slot.is_some()))?;
            (targets.blocks, targets.slots.pop(), None)
        };
        let source_slot = slot.map(|slot| device.share(slot));
        let source_blocks = sources.into_iter().map(|block| device.share(block)).collect();
        self.nodes[node].value.is_leaving = true;
        Ok(Some(Demotion {
            source_blocks,
            source_slot,
            target_blocks,
            target_slot,
            target_packed,
            node,
            first_block,
        }))
    }

    /// The least worthy of the device that is lost if it goes; none once what goes before it and
    /// is not frees so many bytes.
    fn next_to_copy(&mut self, device: &StatePool, clean_bytes: usize) -> Option<NodeId> {
        let counts = |tree: &PrefixTree, id: NodeId| {
            tree.nodes[id].value.is_leaving || tree.may_go(device, id)
        };
        let mut ranking = self.rank(device, counts);
        let mut clean = 0;
        while clean < clean_bytes {
            let Ranked { id, worth, .. } = ranking.next(self, device, counts)?;
            if !self.is_clean(id, worth) {
                return Some(id);
            }
            let Candidate { slots, blocks, .. } = self.candidate(Tier::Device, id);
            clean += sizes(device).of(slots, blocks);
        }
        None
    }

    /// True if nothing is lost that is worth a copy when this checkpoint leaves the device.
    pub(super) fn is_clean(&self, id: NodeId, worth: u128) -> bool {
        let Units { is_leaving, is_refused, .. } = self.nodes[id].value;
        worth == 0 || is_leaving || is_refused || self.has_state(Tier::Host, id)
    }

    /// Evicts from the host what is worth less there than a copy of this node, while the copy does
    /// not fit; nothing if it could not fit whatever goes.
    fn make_room(&mut self, device: &StatePool, host: &mut StatePool, node: NodeId) {
        let copy = self.candidate(Tier::Device, node);
        let copy = worth(value(&copy, sizes(device)), self.nodes[node].value.last_used, self.clock);
        let slots = usize::from(self.options.is_recurrent);
        loop {
            let blocks = self.nodes[node].end().div_ceil(BLOCK_LEN) - self.first_lacking(node);
            let fits =
                if packs(host) { host.fits_packed(blocks) } else { host.fits(blocks, slots) };
            let units = if packs(host) { (blocks, 0, 1) } else { (blocks, slots, 0) };
            if fits || !self.could_free_units(host, 0, units) {
                return;
            }
            match self.least_worthy(host) {
                Some(least) if least.worth < copy => self.evict(host, least.id),
                _ => return,
            }
        }
    }

    /// Index of the first block up to a node's end that the host lacks; what it lacks of a path
    /// is its end.
    fn first_lacking(&self, node: NodeId) -> usize {
        let path = self.nodes.path_up(node);
        let lacking = path.take_while(|id| self.nodes[*id].value.host.blocks.is_empty());
        let first = lacking.last().map(|id| self.nodes[id].start);
        first.unwrap_or(self.nodes[node].end()).div_ceil(BLOCK_LEN)
    }

    /// Ends a demotion. If the copies have arrived, the checkpoint has a copy on the host from now
    /// on, unless the tree was cleared or the host has lost what the copy goes on from; those
    /// count as failed, like copies that did not arrive. Gives the sources back.
    pub fn end_demotion(
        &mut self,
        demotion: Demotion,
        has_arrived: bool,
        device: &mut StatePool,
        host: &mut StatePool,
    ) {
        release_all(device, demotion.source_blocks);
        release_all(device, demotion.source_slot);
        let (id, first_block) = (demotion.node, demotion.first_block);
        let is_there = self.nodes.get(id).is_some();
        if is_there {
            self.nodes[id].value.is_leaving = false;
            self.nodes[id].value.is_refused |= !has_arrived;
        }
        if !has_arrived || !is_there || self.first_lacking(id) < first_block {
            release_all(host, demotion.target_blocks);
            release_all(host, demotion.target_slot);
            release_all(host, demotion.target_packed);
            self.counts.demotions_failed += 1;
            return;
        }
        // Another demotion may have brought the first of them meanwhile.
        let mut targets: Vec<Option<BlockHandle>> =
            demotion.target_blocks.into_iter().map(Some).collect();
        self.adopt(host, id, |_, at| {
            targets[at - first_block].take().expect("a node has each block once")
        });
        release_all(host, targets.into_iter().flatten());
        self.give_slot(host, id, demotion.target_slot);
        let packed = &mut self.nodes[id].value.host.packed;
        match demotion.target_packed {
            Some(target) if packed.is_none() => *packed = Some(target),
            target => release_all(host, target),
        }
        self.place(host, id);
        self.place_around(host, id);
        self.counts.demoted += 1;
    }
}

/// Whether the states of checkpoints are packed on this host.
fn packs(host: &StatePool) -> bool {
    host.layout().packed_bytes > 0
}
