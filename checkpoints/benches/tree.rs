//! What the prefix tree costs the control plane: a match and an insert in a cache of 1,000 prompts,
//! and an eviction from it; an eviction and the begin of a demotion among 10,000 checkpoints.
//!
//! `cargo bench -p deltapool-checkpoints --bench tree`. Prompts of 8,192 or 131,072 tokens, a
//! quarter of each a system prompt that ten share, two checkpoints each (junction and end). The
//! match asks for a prompt and 100 tokens more: of another prompt every time, so that the tree's
//! tokens come from memory, and of the same, so that they come from a cache of the processor. The
//! insert is of a prompt that parts from a system prompt; three quarters of its 128 or 2,048
//! blocks are new.

use std::time::{Duration, Instant};

use checkpoints::{MatchOptions, Prefix, PrefixTree, TreeOptions};
use criterion::Criterion;
use state_pool::{BLOCK_LEN, BlockHandle, PoolLayout, StatePool, Tier, TierSizes};

const PROMPTS: usize = 1_000;
const SHARERS: usize = 10;
const SIZES: [usize; 2] = [8_192, 131_072];
/// Prompts of 1,024 tokens, two checkpoints each.
const MANY: usize = 5_000;
const MANY_TOKENS: usize = 1_024;

struct Cache {
    tree: PrefixTree,
    pool: StatePool,
    host: StatePool,
    blocks: Vec<BlockHandle>,
    tokens: usize,
}

/// Prompt `index`: a system prompt of its group, then tokens of its own.
fn prompt(index: usize, tokens: usize) -> Vec<u32> {
    let mut state = 0;
    let draw = |at: usize| {
        let seed = if at < tokens / 4 { index / SHARERS } else { PROMPTS + index };
        state = if at == 0 || at == tokens / 4 { seed as u64 + 1 } else { state };
        state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (state >> 47) as u32
    };
    (0..tokens).map(draw).collect()
}

impl Cache {
    fn new(prompts: usize, tokens: usize) -> Cache {
        let sizes = TierSizes {
            slot_bytes: 4096,
            block_bytes: 4096,
            packed_bytes: 0,
            memory_bytes: 1 << 40,
            max_zero_byte_slots: 0,
        };
        let mut pool = StatePool::new(Tier::Device, small(sizes, 3_000_000));
        let units = pool.allocate(tokens / BLOCK_LEN, 0).expect("room for one prompt");
        let (tree, blocks) = (PrefixTree::new(TreeOptions::default()), units.blocks);
        let host = StatePool::new(Tier::Host, small(sizes, 10_000));
        let mut cache = Cache { tree, pool, host, blocks, tokens };
        for index in 0..prompts {
            cache.insert(&prompt(index, tokens)[..tokens / 4]);
            cache.insert(&prompt(index, tokens));
        }
        cache
    }

    /// The blocks are the same for all: who holds how many handles is all the pool sees.
    fn insert(&mut self, tokens: &[u32]) {
        let slot = self.pool.alloc_slot().expect("room for a slot");
        let prefix = Prefix { salt: None, tokens, exact_tokens: tokens.len(), histories: &[] };
        self.tree.insert(&mut self.pool, prefix, &self.blocks, Some(slot));
    }

    fn clear(mut self) {
        self.tree.clear(&mut self.pool);
        self.blocks.into_iter().for_each(|block| {
            self.pool.release(block);
        });
    }
}

/// A layout of so many pages.
fn small(sizes: TierSizes, pages: usize) -> PoolLayout {
    let page_bytes =
        PoolLayout::new(TierSizes { memory_bytes: 1 << 20, ..sizes }).expect("a layout").page_bytes;
    PoolLayout::new(TierSizes { memory_bytes: pages * page_bytes, ..sizes }).expect("a layout")
}

/// The time of `calls` calls, without what is prepared before or put right after each.
fn timed(
    calls: u64,
    cache: &mut Cache,
    mut prepare: impl FnMut() -> Vec<u32>,
    mut call: impl FnMut(&mut Cache, &[u32]),
    mut after: impl FnMut(&mut Cache),
) -> Duration {
    let mut total = Duration::ZERO;
    for _ in 0..calls {
        let tokens = prepare();
        let start = Instant::now();
        call(cache, &tokens);
        total += start.elapsed();
        after(cache);
    }
    total
}

fn measure(criterion: &mut Criterion, tokens: usize) {
    let mut cache = Cache::new(PROMPTS, tokens);
    let mut group = criterion.benchmark_group(format!("{PROMPTS} prompts of {tokens} tokens"));
    group.sample_size(30).warm_up_time(Duration::from_millis(500));
    let mut next = 0;
    let mut known = || {
        next = (next + 7) % PROMPTS;
        [prompt(next, tokens), vec![7; 100]].concat()
    };
    let look_up = |cache: &mut Cache, query: &[u32]| {
        let found = cache.tree.match_prefix(None, query, MatchOptions::default());
        assert_eq!(found.usable.map(|usable| usable.position), Some(cache.tokens));
    };
    group.bench_function("match", |bencher| {
        bencher.iter_custom(|calls| timed(calls, &mut cache, &mut known, look_up, |_| ()));
    });
    let again = known();
    group.bench_function("match of the same prompt again", |bencher| {
        bencher.iter(|| look_up(&mut cache, &again));
    });
    let mut number = PROMPTS;
    let mut fresh = || {
        number += 1;
        [&prompt(number % PROMPTS, tokens)[..tokens / 4], &prompt(number, tokens)[tokens / 4..]]
            .concat()
    };
    let evict = |cache: &mut Cache| assert!(cache.tree.evict_one(&mut cache.pool));
    group.bench_function("insert", |bencher| {
        bencher.iter_custom(|calls| timed(calls, &mut cache, &mut fresh, Cache::insert, evict));
    });
    group.bench_function("evict one", |bencher| {
        let mut add = |cache: &mut Cache| cache.insert(&fresh());
        let evict = |cache: &mut Cache, _: &[u32]| evict(cache);
        bencher.iter_custom(|calls| timed(calls, &mut cache, Vec::new, evict, &mut add));
    });
    group.finish();
    cache.clear();
}

/// Where there is much to choose from.
fn measure_choice(criterion: &mut Criterion) {
    let mut cache = Cache::new(MANY, MANY_TOKENS);
    let mut group = criterion.benchmark_group(format!("{} checkpoints", 2 * MANY));
    group.sample_size(30).warm_up_time(Duration::from_millis(500));
    let mut number = MANY;
    group.bench_function("evict one", |bencher| {
        bencher.iter_custom(|calls| {
            let evict =
                |cache: &mut Cache, _: &[u32]| assert!(cache.tree.evict_one(&mut cache.pool));
            let add = |cache: &mut Cache| {
                number += 1;
                cache.insert(&prompt(number, MANY_TOKENS));
            };
            timed(calls, &mut cache, Vec::new, evict, add)
        });
    });
    group.bench_function("begin a demotion", |bencher| {
        bencher.iter_custom(|calls| {
            let mut total = Duration::ZERO;
            for _ in 0..calls {
                let Cache { tree, pool, host, .. } = &mut cache;
                let start = Instant::now();
                let demotion = tree.demote(pool, host, usize::MAX).expect("room on the host");
                total += start.elapsed();
                tree.end_demotion(demotion.expect("a checkpoint"), false, pool, host);
            }
            total
        });
    });
    group.finish();
    cache.clear();
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    for tokens in SIZES {
        measure(&mut criterion, tokens);
    }
    measure_choice(&mut criterion);
    criterion.final_summary();
}
