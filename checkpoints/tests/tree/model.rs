//! The tree against a plain list of what was kept, compared by brute force.
//!
//! Each seed draws a kind of model, a size of the pools and a history of calls: prefixes kept cold
//! or after a resume, evictions, demotions that arrive late or fail, prompts that wait, snapshots
//! left out. After every call the tree must hold exactly the blocks that the list's states need,
//! and answer matches and junctions as the list does. A failure names its seed; the same seed
//! gives the same history.

use std::collections::BTreeSet;

use checkpoints::{Demotion, Lineage, MatchOptions, MissReason, Prefix, TreeOptions, Usable};
use state_pool::{BLOCK_LEN, SequenceState, SlotId, Tier};

use crate::support::House;
use crate::twin::{Model, Path, Record};

const SEEDS: u64 = 1_000;
const CALLS: usize = 120;
const SALTS: [Option<&str>; 3] = [None, Some("a"), Some("b")];

/// xorshift64*: small, and the same on every machine.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % limit
    }
}

struct Run {
    house: House,
    model: Model,
    random: Random,
    /// States of sequences that run: they share units with the tree.
    running: Vec<SequenceState>,
    demotions: Vec<(Demotion, Path, usize)>,
    counts: Counts,
}

/// What the histories must have seen often, or they test nothing.
#[derive(Default)]
struct Counts {
    resumed: usize,
    promoted: usize,
    evicted: usize,
    demoted: usize,
    misses: usize,
    junctions: usize,
}

impl Run {
    fn new(seed: u64) -> Run {
        let mut random = Random::new(seed);
        let house = House::new(TreeOptions::default(), 12 + random.below(40));
        let (model, running, demotions) = (Model::default(), Vec::new(), Vec::new());
        Run { house, model, random, running, demotions, counts: Counts::default() }
    }

    /// Part of a path that was seen, and other tokens; or the path itself.
    fn draw_path(&mut self) -> Path {
        let known = self.model.records.iter().map(|record| &record.path);
        let known: Vec<&Path> = known.chain(&self.model.waiting).collect();
        let mut path = match known.len() {
            0 => Path { salt: None, tokens: vec![] },
            some => known[self.random.below(some)].clone(),
        };
        if self.random.below(4) == 0 {
            path.salt = SALTS[self.random.below(SALTS.len())];
        }
        if self.random.below(3) > 0 {
            let kept = self.random.below(path.tokens.len() + 1);
            let kept = if self.random.below(2) == 0 { kept / BLOCK_LEN * BLOCK_LEN } else { kept };
            path.tokens.truncate(kept);
        }
        // Few kinds of tokens and often one for a whole run, so that paths meet.
        let token = self.random.below(3) as u32;
        let more = [0, 1, 40, 64, 130][self.random.below(5)];
        path.tokens.extend(std::iter::repeat_n(token, more));
        if path.tokens.is_empty() {
            path.tokens.push(token);
        }
        path
    }

    fn make_room(&mut self, blocks: usize, slots: usize) -> bool {
        while !self.house.device.fits(blocks, slots) {
            if !self.evict(Tier::Device) {
                return false;
            }
        }
        true
    }

    /// Computes a path, from the deepest state or cold, and keeps what it ends with.
    fn keep(&mut self) {
        let path = self.draw_path();
        let tokens = &path.tokens;
        self.make_room(tokens.len().div_ceil(BLOCK_LEN), 2);
        let options = self.draw_options();
        let found = self.house.tree.match_prefix(path.salt, tokens, options);
        let usable = found.usable.filter(|_| self.random.below(4) > 0);
        let state = match usable {
            Some(usable) if usable.tier == Tier::Device => {
                self.counts.resumed += 1;
                let state = self.house.resume(&usable, tokens);
                self.house.go_on(state, tokens)
            }
            Some(usable) => {
                self.counts.promoted += 1;
                let state = self.house.promote(&usable);
                state.and_then(|state| self.house.go_on(state, tokens))
            }
            None => self.house.compute(tokens),
        };
        let Some(state) = state else { return };
        let is_exact = usable.is_none_or(|usable| usable.lineage == Lineage::Exact);
        let at_most = if is_exact { tokens.len() } else { self.exact_of(&path, usable) };
        let at_least = usable.map_or(0, |usable| usable.position.min(at_most));
        let exact_tokens = (at_least + self.random.below(at_most - at_least + 1)) / BLOCK_LEN;
        self.note_kept(&path, exact_tokens * BLOCK_LEN, state);
    }

    /// How much of a state that is not exact is: any record of it will do.
    fn exact_of(&self, path: &Path, usable: Option<Usable>) -> usize {
        let position = usable.map_or(0, |usable| usable.position);
        let path = path.prefix(position);
        let records = self.model.records.iter();
        records
            .filter(|record| record.path == path)
            .map(|record| record.exact_tokens)
            .min()
            .unwrap_or(0)
    }

    fn note_kept(&mut self, path: &Path, exact_tokens: usize, state: SequenceState) {
        if self.random.below(4) == 0 {
            self.running.push(state.fork(&mut self.house.device));
        }
        let slot = state.slot().id();
        let prefix = Prefix { salt: path.salt, tokens: &path.tokens, exact_tokens, histories: &[] };
        self.house.donate(prefix, state);
        match self.model.find(path, exact_tokens) {
            Some(record) => record.device = record.device.or(Some(slot)),
            None => self.model.records.push(Record {
                path: path.clone(),
                exact_tokens,
                device: Some(slot),
                host: None,
                is_copied: false,
            }),
        }
    }

    /// Evicts one and finds out by its slot which it was.
    fn evict(&mut self, tier: Tier) -> bool {
        let is_shared = |slot: SlotId| {
            let held = self.running.iter().map(|state| state.slot().id());
            tier == Tier::Device && held.collect::<Vec<_>>().contains(&slot)
        };
        let may_go = |record: &&Record| {
            !record.is_copied && record.slot(tier).is_some_and(|slot| !is_shared(slot))
        };
        let may_go: Vec<SlotId> =
            self.model.records.iter().filter(may_go).filter_map(|r| r.slot(tier)).collect();
        let has_evicted = self.house.evict_one(tier);
        assert_eq!(has_evicted, !may_go.is_empty(), "{may_go:?}");
        if !has_evicted {
            return false;
        }
        self.counts.evicted += 1;
        assert_eq!(self.note_gone(tier, None), 1, "one state goes at a time");
        true
    }

    /// Takes what has left a tier out of the list, and says how many states that were. The slot
    /// of one may have been `taken` again at once.
    fn note_gone(&mut self, tier: Tier, taken: Option<SlotId>) -> usize {
        let pool = if tier == Tier::Device { &self.house.device } else { &self.house.host };
        let held: BTreeSet<SlotId> = pool.held_slots().collect();
        let mut gone = 0;
        for record in &mut self.model.records {
            let is_gone = |slot| !held.contains(&slot) || taken == Some(slot);
            if record.slot(tier).is_some_and(is_gone) {
                *(if tier == Tier::Device { &mut record.device } else { &mut record.host }) = None;
                gone += 1;
            }
        }
        let is_lost = |record: &Record| record.device.is_none() && record.host.is_none();
        let lost: Vec<Record> =
            self.model.records.extract_if(.., |record| is_lost(record)).collect();
        for record in lost {
            self.model.lose(record.path.clone(), record.is_exact(), MissReason::Evicted);
        }
        gone
    }

    fn demote(&mut self) {
        let demotion = self.house.demote();
        let target = demotion.as_ref().and_then(|demotion| demotion.target_slot.as_ref());
        self.note_gone(Tier::Host, target.map(|slot| slot.id()));
        let Some(demotion) = demotion else { return };
        let source = demotion.source_slot.as_ref().map(|slot| slot.id());
        let record = self.model.records.iter_mut().find(|record| record.device == source);
        let record = record.expect("the source is a state of the device");
        assert!(record.host.is_none() && !record.is_copied);
        record.is_copied = true;
        self.demotions.push((demotion, record.path.clone(), record.exact_tokens));
    }

    fn end_demotion(&mut self) {
        if self.demotions.is_empty() {
            return;
        }
        let (demotion, path, exact_tokens) =
            self.demotions.swap_remove(self.random.below(self.demotions.len()));
        let target = demotion.target_slot.as_ref().map(|slot| slot.id());
        let before = self.house.tree.stats().demoted;
        let has_arrived = self.random.below(4) > 0;
        self.house.end_demotion(demotion, has_arrived);
        let has_landed = self.house.tree.stats().demoted > before;
        assert!(has_arrived || !has_landed);
        self.counts.demoted += usize::from(has_landed);
        let record = self.model.find(&path, exact_tokens).expect("it is not evicted meanwhile");
        record.is_copied = false;
        record.host = if has_landed { target } else { None };
    }

    fn wait_or_leave(&mut self) {
        let count = self.model.waiting.len();
        if count > 0 && self.random.below(2) == 0 {
            let path = self.model.waiting.swap_remove(self.random.below(count));
            assert!(self.house.tree.remove_waiting(path.salt, &path.tokens));
        } else {
            let path = self.draw_path();
            assert!(self.house.tree.add_waiting(path.salt, &path.tokens));
            self.model.waiting.push(path);
        }
    }

    fn leave_out(&mut self) {
        let path = self.draw_path();
        let exact_tokens = self.random.below(2) * (path.tokens.len() / BLOCK_LEN * BLOCK_LEN);
        let prefix = Prefix { salt: path.salt, tokens: &path.tokens, exact_tokens, histories: &[] };
        self.house.tree.note_left_out(prefix);
        let is_exact = exact_tokens == path.tokens.len();
        self.model.lose(path, is_exact, MissReason::NoSlot);
    }

    fn draw_options(&mut self) -> MatchOptions {
        let limit_tokens =
            if self.random.below(4) == 0 { 64 * self.random.below(5) } else { usize::MAX };
        MatchOptions { exact_only: self.random.below(4) == 0, limit_tokens, device_only: false }
    }

    fn compare(&mut self) {
        let (asked, options) = (self.draw_path(), self.draw_options());
        let found = self.house.tree.match_prefix(asked.salt, &asked.tokens, options);
        let usable = found.usable.map(|usable| {
            let is_exact = usable.lineage == Lineage::Exact;
            (usable.position, is_exact, usable.tier == Tier::Device)
        });
        let expected = self.model.look_up(&asked, options);
        assert_eq!((found.matched_tokens, usable, found.miss), expected, "{asked:?} {options:?}");
        let junctions = self.house.tree.junctions(asked.salt, &asked.tokens);
        assert_eq!(junctions, self.model.junctions(&asked), "{asked:?}");
        self.counts.misses += usize::from(found.miss.is_some());
        self.counts.junctions += junctions.len();
    }

    fn check(&mut self) {
        self.house.check();
        let stats = self.house.tree.stats();
        for (tier, counts) in [(Tier::Device, stats.device), (Tier::Host, stats.host)] {
            let states = self.model.records.iter().filter(|record| record.slot(tier).is_some());
            assert_eq!(counts.slots, states.count(), "states of the {tier} tier");
            assert_eq!(counts.blocks, self.model.blocks(tier), "blocks of the {tier} tier");
        }
        let sources: usize = self.demotions.iter().map(|(d, ..)| d.source_blocks.len()).sum();
        let running: usize = self.running.iter().map(|state| state.table().len()).sum();
        let device = self.house.device.stats();
        assert_eq!(device.blocks.handles, stats.device.blocks + running + sources);
        let others = self.running.len() + self.demotions.len();
        assert_eq!(device.slots.handles, stats.device.slots + others);
        let host = self.house.host.stats();
        assert_eq!(host.blocks.handles, stats.host.blocks + sources);
        assert_eq!(host.slots.handles, stats.host.slots + self.demotions.len());
    }

    fn call(&mut self) {
        match self.random.below(16) {
            0..7 => self.keep(),
            7..9 => drop(self.evict(Tier::Device)),
            9 => (0..3).for_each(|_| self.demote()),
            10..12 => self.end_demotion(),
            12 if self.random.below(4) == 0 => drop(self.evict(Tier::Host)),
            12..14 => self.wait_or_leave(),
            14 => self.leave_out(),
            _ => {
                if let Some(state) = self.running.pop() {
                    state.release(&mut self.house.device);
                }
            }
        }
    }

    fn finish(mut self) -> Counts {
        while !self.demotions.is_empty() {
            self.end_demotion();
        }
        for state in self.running {
            state.release(&mut self.house.device);
        }
        for path in self.model.waiting {
            assert!(self.house.tree.remove_waiting(path.salt, &path.tokens));
        }
        self.house.finish();
        self.counts
    }
}

fn history(seed: u64) -> Counts {
    let mut run = Run::new(seed);
    for _ in 0..CALLS {
        run.call();
        run.check();
        run.compare();
        run.compare();
    }
    run.finish()
}

#[test]
fn the_tree_does_what_a_plain_list_does() {
    let mut all = Counts::default();
    for seed in 0..SEEDS {
        let outcome = std::panic::catch_unwind(|| history(seed));
        let counts = outcome.unwrap_or_else(|_| panic!("seed {seed} failed; see the panic above"));
        all.resumed += counts.resumed;
        all.promoted += counts.promoted;
        all.evicted += counts.evicted;
        all.demoted += counts.demoted;
        all.misses += counts.misses;
        all.junctions += counts.junctions;
    }
    let seen = [all.resumed, all.promoted, all.evicted, all.demoted, all.misses, all.junctions];
    println!("resumed, promoted, evicted, demoted, misses, junctions: {seen:?}");
    assert!(seen.iter().all(|count| *count > SEEDS as usize / 2), "{seen:?}");
}
