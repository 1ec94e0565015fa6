//! The pool against a plain map of handle counts that finds every page by a scan.
//!
//! Each seed draws sizes and a history of calls. After every call the pool must have placed the
//! unit where the model says, refused what the model refuses, and count what the model counts. A
//! failure names its seed; the same seed gives the same history.

use std::collections::BTreeMap;

use state_pool::{
    BlockHandle, Handle, Kind, PackedHandle, PoolLayout, SlotHandle, StatePool, Tier, TierSizes,
};

const SEEDS: u64 = 4_000;
const CALLS: usize = 150;

/// xorshift64*: small, and the same on every machine.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % limit
    }
}

const BLOCKS: usize = 0;
const SLOTS: usize = 1;
const PACKED: usize = 2;
const KINDS: [usize; 3] = [BLOCKS, SLOTS, PACKED];

/// What is held of each kind: unit index to number of handles.
#[derive(Clone)]
struct Model {
    pages: usize,
    /// Places on a page by kind; 0 if units of the kind lie on no page.
    per_page: [usize; 3],
    limit: [usize; 3],
    handles: [BTreeMap<usize, usize>; 3],
}

impl Model {
    fn new(layout: &PoolLayout) -> Model {
        Model {
            pages: layout.pages,
            per_page: [layout.blocks_per_page, layout.slots_per_page, layout.packed_per_page],
            limit: [layout.max_blocks(), layout.max_slots(), layout.max_packed()],
            handles: Default::default(),
        }
    }

    fn held_on(&self, kind: usize, page: usize) -> usize {
        let per_page = self.per_page[kind];
        self.handles[kind].keys().filter(|unit| per_page > 0 && **unit / per_page == page).count()
    }

    fn is_free(&self, page: usize) -> bool {
        KINDS.iter().all(|kind| self.held_on(*kind, page) == 0)
    }

    fn free_pages(&self) -> usize {
        (0..self.pages).filter(|page| self.is_free(*page)).count()
    }

    /// The page the next unit goes to: the fullest with room, else the first free one.
    fn next_page(&self, kind: usize) -> Option<usize> {
        if self.per_page[kind] == 0 {
            return (self.handles[kind].len() < self.limit[kind]).then_some(0);
        }
        let open = |page: &usize| (1..self.per_page[kind]).contains(&self.held_on(kind, *page));
        // Of equal ones max_by_key gives the last, so the scan runs from the end.
        let fullest =
            (0..self.pages).rev().filter(open).max_by_key(|page| self.held_on(kind, *page));
        fullest.or_else(|| (0..self.pages).find(|page| self.is_free(*page)))
    }

    /// Puts units where they would go, without ids; false if one finds no page.
    fn try_all(&self, counts: [usize; 3]) -> bool {
        let mut trial = self.clone();
        for kind in KINDS {
            for _ in 0..counts[kind] {
                let Some(page) = trial.next_page(kind) else { return false };
                let first = page * trial.per_page[kind];
                let unit = (first..).find(|unit| !trial.handles[kind].contains_key(unit));
                trial.handles[kind].insert(unit.expect("a free place"), 1);
            }
        }
        true
    }

    /// Notes a unit the pool gave; it must be a free one on the page the model says.
    fn note<K: Kind>(&mut self, kind: usize, handle: &Handle<K>) {
        let page = self.next_page(kind).expect("the model has room too");
        let unit = handle.id().index();
        assert_eq!(unit.checked_div(self.per_page[kind]).unwrap_or(0), page);
        assert!(self.handles[kind].insert(unit, 1).is_none(), "{} is held already", handle.id());
    }

    fn share(&mut self, kind: usize, unit: usize) {
        *self.handles[kind].get_mut(&unit).expect("held") += 1;
    }

    /// True if the unit is free now.
    fn release(&mut self, kind: usize, unit: usize) -> bool {
        let count = self.handles[kind].get_mut(&unit).expect("held");
        *count -= 1;
        let is_last = *count == 0;
        if is_last {
            self.handles[kind].remove(&unit);
        }
        is_last
    }
}

struct Run {
    pool: StatePool,
    model: Model,
    blocks: Vec<BlockHandle>,
    slots: Vec<SlotHandle>,
    packed: Vec<PackedHandle>,
    random: Random,
    /// Calls that found room, and calls that did not.
    given: usize,
    refused: usize,
}

/// Sizes of slot, block and packed slot in 2 KiB: the places on a page are given beside them.
const SHAPES: [(usize, usize, usize); 9] = [
    (6, 2, 2),  // 3 blocks, 1 slot or 3 packed slots
    (2, 6, 1),  // 1 block, 3 slots or 6 packed slots
    (4, 6, 4),  // 2 blocks, 3 slots or 3 packed slots
    (2, 2, 2),  // 1 unit of any kind
    (40, 2, 7), // 20 blocks, 1 slot or 5 packed slots
    (4, 0, 1),  // 1 slot or 4 packed slots; blocks have no bytes
    (6, 2, 0),  // 3 blocks or 1 slot; no packed slots
    (0, 2, 0),  // 1 block; slots have no bytes
    (4, 0, 0),  // 1 slot; blocks have no bytes
];

impl Run {
    fn new(seed: u64) -> Run {
        let mut random = Random::new(seed);
        let (slot, block, packed) = SHAPES[random.below(SHAPES.len())];
        let mut sizes = TierSizes {
            slot_bytes: slot * 2048,
            block_bytes: block * 2048,
            packed_bytes: packed * 2048,
            memory_bytes: usize::MAX >> 24,
            max_zero_byte_slots: 1 + random.below(5),
        };
        let page_bytes = PoolLayout::new(sizes).expect("a layout").page_bytes;
        sizes.memory_bytes = page_bytes * (2 + random.below(8)) + random.below(page_bytes);
        let layout = PoolLayout::new(sizes).expect("a layout");
        let model = Model::new(&layout);
        let pool = StatePool::new(Tier::Device, layout);
        let (blocks, slots, packed) = (vec![], vec![], vec![]);
        Run { pool, model, blocks, slots, packed, random, given: 0, refused: 0 }
    }

    fn alloc_one(&mut self) {
        let kind = self.random.below(3);
        let has_room = self.model.next_page(kind).is_some();
        self.given += usize::from(has_room);
        let model = &mut self.model;
        let is_given = match kind {
            BLOCKS => keep(model, kind, self.pool.alloc_block(), &mut self.blocks),
            SLOTS => keep(model, kind, self.pool.alloc_slot(), &mut self.slots),
            _ => keep(model, kind, self.pool.alloc_packed(), &mut self.packed),
        };
        assert_eq!(is_given, has_room);
    }

    fn allocate(&mut self) {
        let counts = [self.random.below(10), self.random.below(4), 0];
        let fits = self.pool.fits(counts[BLOCKS], counts[SLOTS]);
        assert_eq!(fits, self.model.try_all(counts), "fits {counts:?}");
        let before = self.pool.stats();
        match self.pool.allocate(counts[BLOCKS], counts[SLOTS]) {
            Ok(units) => {
                assert!(fits && units.blocks.len() == counts[BLOCKS]);
                assert_eq!(units.slots.len(), counts[SLOTS]);
                units.blocks.iter().for_each(|block| self.model.note(BLOCKS, block));
                units.slots.iter().for_each(|slot| self.model.note(SLOTS, slot));
                self.blocks.extend(units.blocks);
                self.slots.extend(units.slots);
                self.given += 1;
            }
            Err(_) => {
                assert!(!fits);
                assert_eq!(self.pool.stats(), before);
                self.refused += 1;
            }
        }
    }

    fn allocate_packed(&mut self) {
        let counts = [self.random.below(10), 0, 1];
        let fits = self.pool.fits_packed(counts[BLOCKS]);
        assert_eq!(fits, self.model.try_all(counts), "fits {counts:?}");
        let before = self.pool.stats();
        match self.pool.allocate_packed(counts[BLOCKS]) {
            Ok((blocks, packed)) => {
                assert!(fits && blocks.len() == counts[BLOCKS]);
                blocks.iter().for_each(|block| self.model.note(BLOCKS, block));
                self.model.note(PACKED, &packed);
                self.blocks.extend(blocks);
                self.packed.push(packed);
                self.given += 1;
            }
            Err(_) => {
                assert!(!fits);
                assert_eq!(self.pool.stats(), before);
                self.refused += 1;
            }
        }
    }

    fn share(&mut self) {
        let (pool, model, random) = (&mut self.pool, &mut self.model, &mut self.random);
        share_one(pool, model, random, BLOCKS, &mut self.blocks);
        share_one(pool, model, random, SLOTS, &mut self.slots);
        share_one(pool, model, random, PACKED, &mut self.packed);
    }

    fn release(&mut self, most: usize) {
        for _ in 0..self.random.below(most) {
            let (pool, model, random) = (&mut self.pool, &mut self.model, &mut self.random);
            release_one(pool, model, random, BLOCKS, &mut self.blocks);
            release_one(pool, model, random, SLOTS, &mut self.slots);
            release_one(pool, model, random, PACKED, &mut self.packed);
        }
    }

    fn check(&self) {
        self.pool.check();
        let stats = self.pool.stats();
        let free_pages = self.model.free_pages();
        assert_eq!((stats.free_pages, self.pool.free_pages()), (free_pages, free_pages));
        let handles = [self.blocks.len(), self.slots.len(), self.packed.len()];
        for (kind, units) in [stats.blocks, stats.slots, stats.packed].into_iter().enumerate() {
            assert_eq!(units.held, self.model.handles[kind].len());
            assert_eq!(units.handles, handles[kind]);
        }
        self.check_soles(BLOCKS, &self.blocks);
        self.check_soles(SLOTS, &self.slots);
        self.check_soles(PACKED, &self.packed);
    }

    fn check_soles<K: Kind>(&self, kind: usize, held: &[Handle<K>]) {
        for handle in held {
            let is_sole = self.model.handles[kind][&handle.id().index()] == 1;
            assert_eq!(self.pool.is_sole(handle), is_sole);
        }
    }

    fn finish(mut self) {
        while !(self.blocks.is_empty() && self.slots.is_empty() && self.packed.is_empty()) {
            self.release(10);
        }
        self.check();
        assert_eq!(self.pool.free_pages(), self.pool.layout().pages);
        assert_eq!(self.pool.free_slots(), self.pool.layout().max_slots());
        assert_eq!(self.pool.free_blocks(), self.pool.layout().max_blocks());
        assert_eq!(self.pool.free_packed(), self.pool.layout().max_packed());
    }
}

/// Notes and keeps a unit that was given; false if none was.
fn keep<K: Kind, E>(
    model: &mut Model,
    kind: usize,
    unit: Result<Handle<K>, E>,
    held: &mut Vec<Handle<K>>,
) -> bool {
    let Ok(unit) = unit else { return false };
    model.note(kind, &unit);
    held.push(unit);
    true
}

fn share_one<K: Kind>(
    pool: &mut StatePool,
    model: &mut Model,
    random: &mut Random,
    kind: usize,
    held: &mut Vec<Handle<K>>,
) {
    if let Some(index) = pick(random, held) {
        model.share(kind, held[index].id().index());
        held.push(pool.share(&held[index]));
    }
}

fn release_one<K: Kind>(
    pool: &mut StatePool,
    model: &mut Model,
    random: &mut Random,
    kind: usize,
    held: &mut Vec<Handle<K>>,
) {
    if let Some(index) = pick(random, held) {
        let handle = held.swap_remove(index);
        let is_last = model.release(kind, handle.id().index());
        assert_eq!(pool.release(handle), is_last);
    }
}

fn pick<T>(random: &mut Random, held: &[T]) -> Option<usize> {
    (!held.is_empty()).then(|| random.below(held.len()))
}

/// Runs one history and tells how many transactions it saw given and refused.
fn run(seed: u64) -> (usize, usize) {
    let mut run = Run::new(seed);
    for _ in 0..CALLS {
        match run.random.below(10) {
            0..3 => run.alloc_one(),
            3..5 => run.allocate(),
            5 => run.allocate_packed(),
            6 => run.share(),
            7..9 => run.release(4),
            _ => run.release(40),
        }
        run.check();
    }
    let counts = (run.given, run.refused);
    run.finish();
    counts
}

#[test]
fn the_pool_does_what_a_plain_map_does() {
    let (mut given, mut refused) = (0, 0);
    for seed in 0..SEEDS {
        let outcome = std::panic::catch_unwind(|| run(seed));
        let counts = outcome.unwrap_or_else(|_| panic!("seed {seed} failed; see the panic above"));
        given += counts.0;
        refused += counts.1;
    }
    // Both must be common, or the histories test nothing.
    let calls = SEEDS as usize * CALLS;
    assert!(given > calls / 10 && refused > calls / 10, "{given} given, {refused} refused");
}

#[test]
fn the_same_calls_give_the_same_ids() {
    let ids = |seed| {
        let mut run = Run::new(seed);
        for _ in 0..CALLS {
            run.alloc_one();
            run.release(3);
        }
        let ids: Vec<_> = run.blocks.iter().map(|block| block.id()).collect();
        run.finish();
        ids
    };
    assert!((0..50).all(|seed| ids(seed) == ids(seed)));
}
