//! A tree, its two pools and the bytes behind them, as plain tokens: a block holds the prefix that
//! ends with its last row, a slot the prefix it has absorbed.

use std::collections::BTreeMap;

use checkpoints::{
    Demotion, Match, MatchOptions, MissReason, Prefix, PrefixTree, TreeOptions, Usable,
};
use state_pool::{
    BLOCK_LEN, BlockHandle, BlockId, PoolLayout, SequenceState, SlotHandle, SlotId, StatePool,
    Tier, TierSizes,
};

/// What one tier's arena holds.
#[derive(Default)]
struct Arena {
    blocks: BTreeMap<BlockId, Vec<u32>>,
    slots: BTreeMap<SlotId, Vec<u32>>,
}

pub struct House {
    pub tree: PrefixTree,
    pub device: StatePool,
    pub host: StatePool,
    pub is_recurrent: bool,
    device_arena: Arena,
    host_arena: Arena,
}

fn pool(tier: Tier, is_recurrent: bool, pages: usize) -> StatePool {
    let page_bytes = if is_recurrent { 3 * 4096 } else { 4096 };
    let sizes = TierSizes {
        slot_bytes: if is_recurrent { page_bytes } else { 0 },
        block_bytes: 4096,
        packed_bytes: 0,
        memory_bytes: pages * page_bytes,
        max_zero_byte_slots: 16,
    };
    StatePool::new(tier, PoolLayout::new(sizes).expect("a layout"))
}

impl House {
    /// Pages of three blocks or one slot; of one block without recurrent layers.
    pub fn new(options: TreeOptions, pages: usize) -> House {
        House {
            tree: PrefixTree::new(options),
            device: pool(Tier::Device, options.is_recurrent, pages),
            host: pool(Tier::Host, options.is_recurrent, pages),
            is_recurrent: options.is_recurrent,
            device_arena: Arena::default(),
            host_arena: Arena::default(),
        }
    }

    /// A cold run over the tokens; none if the device has no room.
    pub fn compute(&mut self, tokens: &[u32]) -> Option<SequenceState> {
        let state = SequenceState::allocate(&mut self.device, tokens.len()).ok()?;
        Some(self.write(state, tokens))
    }

    /// Goes on from a state of a prefix of the tokens, as a step does: shared units are not
    /// written. None, and the state is released, if the device has no room.
    pub fn go_on(&mut self, mut state: SequenceState, tokens: &[u32]) -> Option<SequenceState> {
        let tail = state.shared_blocks_to_write(&self.device, tokens.len()).collect::<Vec<_>>();
        let fresh_blocks = tail.len() + state.missing_blocks(tokens.len());
        if !self.device.fits(fresh_blocks, 1) {
            state.release(&mut self.device);
            return None;
        }
        for index in tail {
            let old = state.renew_block(&mut self.device, index).expect("it fits");
            let fresh = state.table().as_slice()[index].id();
            let content = self.device_arena.blocks[&old.id()].clone();
            self.device_arena.blocks.insert(fresh, content);
            self.device.release(old);
        }
        let old = state.renew_slot(&mut self.device).expect("it fits");
        self.device.release(old);
        state.grow(&mut self.device, tokens.len()).expect("it fits");
        Some(self.write(state, tokens))
    }

    fn write(&mut self, mut state: SequenceState, tokens: &[u32]) -> SequenceState {
        assert!(state.is_slot_sole(&self.device), "a shared slot is not written");
        for index in state.len() / BLOCK_LEN..tokens.len().div_ceil(BLOCK_LEN) {
            let block = &state.table().as_slice()[index];
            let end = tokens.len().min((index + 1) * BLOCK_LEN);
            if state.len() < end {
                assert!(self.device.is_sole(block), "a shared block is not written");
                self.device_arena.blocks.insert(block.id(), tokens[..end].to_vec());
            }
        }
        self.device_arena.slots.insert(state.slot().id(), tokens.to_vec());
        state.advance(tokens.len() - state.len());
        state
    }

    /// Gives a sequence's state to the tree at its end, and the sequence's own shares back.
    pub fn donate(&mut self, prefix: Prefix, state: SequenceState) {
        let (table, slot, _) = state.into_parts();
        let slot = if self.is_recurrent {
            Some(slot)
        } else {
            self.device.release(slot);
            None
        };
        self.tree.insert(&mut self.device, prefix, table.as_slice(), slot);
        table.release(&mut self.device);
    }

    /// Computes a prefix cold and keeps it.
    pub fn keep(&mut self, salt: Option<&str>, tokens: &[u32], exact_tokens: usize) {
        let state = self.compute(tokens).expect("room on the device");
        self.donate(Prefix { salt, tokens, exact_tokens, histories: &[] }, state);
    }

    pub fn look_up(&self, tokens: &[u32]) -> Match {
        self.tree.match_prefix(None, tokens, MatchOptions::default())
    }

    /// The position of the state found, 0 without one, and why there is none deeper.
    pub fn position(&self, tokens: &[u32]) -> usize {
        self.look_up(tokens).usable.map_or(0, |usable| usable.position)
    }

    /// Resumes and checks that every unit holds what the tokens say.
    pub fn resume(&mut self, usable: &Usable, tokens: &[u32]) -> SequenceState {
        let state = match usable.tier {
            Tier::Device => {
                let state = self.tree.hold(usable, &mut self.device).expect("a slot");
                self.tree.note_resumed(usable);
                state
            }
            _ => self.promote(usable).expect("room on the device"),
        };
        self.verify(&state, usable.position, tokens);
        state
    }

    fn verify(&self, state: &SequenceState, position: usize, tokens: &[u32]) {
        assert_eq!(state.len(), position);
        assert_eq!(state.table().len(), position.div_ceil(BLOCK_LEN));
        for (index, id) in state.table().ids().enumerate() {
            let end = position.min((index + 1) * BLOCK_LEN);
            assert_eq!(self.device_arena.blocks[&id][..end], tokens[..end], "block {index}");
        }
        let slot = &self.device_arena.slots.get(&state.slot().id());
        assert!(!self.is_recurrent || slot.is_some_and(|slot| slot == &tokens[..position]));
    }

    /// Copies a state from the host, but for the blocks that the device still has; none if the
    /// device has no room.
    pub fn promote(&mut self, usable: &Usable) -> Option<SequenceState> {
        let source = self.tree.hold(usable, &mut self.host).expect("a slot");
        let mut blocks = self.tree.share_blocks(usable, &mut self.device);
        let lacking = &source.table().as_slice()[blocks.len()..];
        let fresh = self.device.allocate(lacking.len(), 1);
        let state = match fresh {
            Ok(targets) => {
                copy(lacking, &targets.blocks, &self.host_arena, &mut self.device_arena);
                let slot = targets.slots.into_iter().next().expect("one was asked for");
                if self.is_recurrent {
                    let (from, to) = (&self.host_arena, &mut self.device_arena);
                    copy_slot(Some(source.slot()), Some(&slot), from, to);
                }
                blocks.extend(targets.blocks);
                self.tree.note_resumed(usable);
                Some(SequenceState::from_parts(blocks.into(), slot, usable.position))
            }
            Err(_) => {
                blocks.into_iter().for_each(|block| assert!(!self.device.release(block)));
                None
            }
        };
        source.release(&mut self.host);
        state
    }

    /// Begins a demotion if the host has room and the tree a checkpoint for it.
    pub fn demote(&mut self) -> Option<Demotion> {
        self.tree.demote(&mut self.device, &mut self.host, usize::MAX).ok()?
    }

    /// Ends a demotion, with the copies made or not.
    pub fn end_demotion(&mut self, demotion: Demotion, has_arrived: bool) {
        let (from, to) = (&self.device_arena, &mut self.host_arena);
        copy(&demotion.source_blocks, &demotion.target_blocks, from, to);
        copy_slot(demotion.source_slot.as_ref(), demotion.target_slot.as_ref(), from, to);
        self.tree.end_demotion(demotion, has_arrived, &mut self.device, &mut self.host);
    }

    pub fn evict_one(&mut self, tier: Tier) -> bool {
        let pool = if tier == Tier::Device { &mut self.device } else { &mut self.host };
        self.tree.evict_one(pool)
    }

    /// Checks the invariants of the tree and of both pools.
    pub fn check(&self) {
        self.tree.check();
        self.device.check();
        self.host.check();
    }

    /// Clears the tree; both pools must be at start level.
    pub fn finish(mut self) {
        self.tree.clear(&mut self.device);
        self.tree.clear(&mut self.host);
        self.check();
        assert_eq!(self.tree.stats().tokens, 0);
        for pool in [&self.device, &self.host] {
            assert_eq!(pool.stats().free_pages, pool.stats().pages);
            assert_eq!((pool.stats().blocks.handles, pool.stats().slots.handles), (0, 0));
        }
    }
}

fn copy(from: &[BlockHandle], to: &[BlockHandle], source: &Arena, target: &mut Arena) {
    assert_eq!(from.len(), to.len());
    for (from, to) in from.iter().zip(to) {
        target.blocks.insert(to.id(), source.blocks[&from.id()].clone());
    }
}

fn copy_slot(
    from: Option<&SlotHandle>,
    to: Option<&SlotHandle>,
    source: &Arena,
    target: &mut Arena,
) {
    if let (Some(from), Some(to)) = (from, to) {
        target.slots.insert(to.id(), source.slots[&from.id()].clone());
    }
}

/// Tokens that count up from a number; two such runs part at once.
pub fn run(first: u32, tokens: usize) -> Vec<u32> {
    (first..).take(tokens).collect()
}

/// The first tokens of a run, then others.
pub fn part(at: usize, then: u32, tokens: usize) -> Vec<u32> {
    [run(0, at), run(then, tokens - at)].concat()
}

pub fn hybrid() -> House {
    House::new(TreeOptions::default(), 40)
}

pub fn miss(house: &House, tokens: &[u32]) -> Option<MissReason> {
    house.look_up(tokens).miss
}
