//! Room on a tier: what goes for whom, and the copies that are made so that little is lost.
//!
//! In this order somebody who lacks memory gets it: an audit ends; checkpoints go, the least worthy
//! first; a copy on its way is waited for; then preemption has its turn. One that runs takes
//! whatever is kept at once, a waiting one waits for the host's copies of what it would cost.

use checkpoints::{Demotion, Match, PrefixTree, Room};
use state_pool::{BLOCK_LEN, SlotId, Tier};

use super::plan::{Direction, SlotCopy, Transfer, TransferId};
use super::sequence::SequenceId;
use super::{Lack, Planning, Scheduler};

/// Copies of checkpoints on their way to the host at once.
const MOST_DEMOTIONS: usize = 4;

impl Scheduler {
    /// The tree gives up the state behind a slot that somebody shares with it.
    pub(super) fn hand_over(&mut self, slot: SlotId) -> bool {
        let Some(tree) = &mut self.tree else { return false };
        let is_given = tree.hand_over(&mut self.device, slot);
        self.stats.handed_over += u64::from(is_given);
        is_given
    }

    /// Copies checkpoints to the host ahead of need, while little of the device is free.
    pub(super) fn demote_ahead(&mut self, step: &mut Planning) {
        let wanted = 2 * self.limits.watermark_pages.max(1);
        let free = self.device.free_pages();
        if free >= wanted {
            return;
        }
        let clean_bytes = (wanted - free) * self.device.layout().page_bytes;
        // Asked in every step, and mostly nothing has changed.
        let moment = (self.tree.as_ref().map_or(0, PrefixTree::uses), clean_bytes);
        if self.nothing_to_demote != moment && !self.demote(clean_bytes, step) {
            self.nothing_to_demote = moment;
        }
    }

    /// Starts copies of checkpoints until so many bytes of them may go without a loss. False if no
    /// more need a copy, or the host has no room for one.
    fn demote(&mut self, clean_bytes: usize, step: &mut Planning) -> bool {
        let has_host = self.host.layout().pages > 0;
        while self.demotions.len() < MOST_DEMOTIONS {
            let Some(tree) = self.tree.as_mut().filter(|_| has_host) else { return false };
            let demotion = tree.demote(&mut self.device, &mut self.host, clean_bytes);
            let Ok(Some(demotion)) = demotion else { return false };
            self.next_transfer += 1;
            let id = TransferId(self.next_transfer);
            let transfer = demotion_transfer(id, &demotion);
            let bytes = self.copied_bytes(&transfer);
            step.plan.transfers.push(transfer);
            self.demotions.push((id, demotion, bytes));
        }
        true
    }

    /// A demotion's copies have arrived, or failed. False if this is another transfer.
    pub(super) fn end_demotion(&mut self, id: TransferId, has_arrived: bool) -> bool {
        let Some(at) = self.demotions.iter().position(|(other, ..)| *other == id) else {
            return false;
        };
        let (_, demotion, bytes) = self.demotions.swap_remove(at);
        if has_arrived {
            self.stats.demoted_bytes += bytes;
        }
        let tree = self.tree.as_mut().expect("demotions are the tree's");
        tree.end_demotion(demotion, has_arrived, &mut self.device, &mut self.host);
        true
    }

    /// Bytes that a transfer copies.
    pub(super) fn copied_bytes(&self, transfer: &Transfer) -> u64 {
        let slot = match transfer.slot {
            None => 0,
            Some(SlotCopy::Plain(..)) => self.limits.cost.slot_bytes,
            Some(SlotCopy::Pack(..) | SlotCopy::Unpack(..)) => self.host.layout().packed_bytes,
        };
        (slot + transfer.blocks.len() * self.limits.cost.block_bytes) as u64
    }

    /// Makes room on a tier for so many units above a watermark, for a sequence that holds none of
    /// them yet: checkpoints go, unless they would go for nothing.
    pub(super) fn make_space(
        &mut self,
        tier: Tier,
        watermark: usize,
        blocks: usize,
        slots: usize,
    ) -> bool {
        if tier == Tier::Device && !self.device.fits_above(watermark, blocks, slots) {
            self.drop_audit();
        }
        let pool = match tier {
            Tier::Device => &mut self.device,
            _ => &mut self.host,
        };
        if pool.fits_above(watermark, blocks, slots) {
            return true;
        }
        self.tree.as_mut().is_some_and(|tree| {
            tree.could_free(pool, watermark, blocks, slots)
                && tree.free(pool, watermark, blocks, slots)
        })
    }

    /// Takes what a sequence that runs lacks from checkpoints: all of them go before it sits out.
    pub(super) fn take_space(&mut self, lack: &Lack) -> bool {
        self.drop_audit();
        let device = &mut self.device;
        match &mut self.tree {
            Some(tree) => tree.free(device, 0, lack.blocks, lack.slots),
            None => device.fits(lack.blocks, lack.slots),
        }
    }

    /// Makes room for a waiting sequence, without a loss where that is possible. What was found may
    /// have gone for it, here or on the host: it is found anew.
    pub(super) fn make_space_for_prompt(
        &mut self,
        id: SequenceId,
        found: &mut Match,
        step: &mut Planning,
    ) -> bool {
        let usable = found.usable.filter(|usable| usable.tier == Tier::Device);
        let there = usable.map_or(0, |usable| usable.position / BLOCK_LEN);
        let (blocks, slots) =
            (self.known_blocks(id) - there, usize::from(self.limits.is_recurrent()));
        let watermark = self.watermark();
        if self.device.fits_above(watermark, blocks, slots) {
            return true;
        }
        let held = usable.and_then(|usable| {
            let tree = self.tree.as_ref().expect("what is usable is in the tree");
            tree.hold(&usable, &mut self.device).ok()
        });
        let is_made = self.make_space_without_loss(watermark, blocks, slots, step);
        if let Some(held) = held {
            held.put_back(&mut self.device);
        }
        *found = self.look_up(id);
        is_made
    }

    /// Makes room on the device above a watermark, but first lets the host have copies of those
    /// checkpoints that it would cost. False while these are on their way: a step or two later than
    /// it could, a sequence finds what a whole prompt would be computed again for. What the host
    /// does not take, or did not get, is not waited for.
    pub(super) fn make_space_without_loss(
        &mut self,
        watermark: usize,
        blocks: usize,
        slots: usize,
        step: &mut Planning,
    ) -> bool {
        if !self.device.fits_above(watermark, blocks, slots) {
            self.drop_audit();
        }
        let Some(tree) = self.tree.as_mut().filter(|_| self.host.layout().pages > 0) else {
            return true;
        };
        let device = &mut self.device;
        if device.fits_above(watermark, blocks, slots)
            || !tree.could_free(device, watermark, blocks, slots)
        {
            return true;
        }
        let room = tree.free_without_loss(device, watermark, blocks, slots);
        if room == Room::Lossy {
            self.demote(usize::MAX, step);
        }
        room == Room::Made || self.demotions.is_empty()
    }
}

fn demotion_transfer(id: TransferId, demotion: &Demotion) -> Transfer {
    let sources = demotion.source_blocks.iter().map(|block| block.id());
    let targets = demotion.target_blocks.iter().map(|block| block.id());
    let slot = demotion.source_slot.as_ref().map(|source| {
        match (&demotion.target_slot, &demotion.target_packed) {
            (Some(target), _) => SlotCopy::Plain(source.id(), target.id()),
            (None, Some(target)) => SlotCopy::Pack(source.id(), target.id()),
            (None, None) => unreachable!("a state is copied somewhere"),
        }
    });
    Transfer { id, direction: Direction::Out, blocks: sources.zip(targets).collect(), slot }
}
