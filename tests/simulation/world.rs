//! The world of the simulation: arrivals, cancellations, and an executor of hashes.

#[path = "oracle.rs"]
mod oracle;

use std::collections::HashMap;
use std::time::Duration;

use deltapool::config::{Batching, Policy, Preempt};
use deltapool::engine::lower::{Job, lower, lower_transfers};
use deltapool::models::{Batch, LogitSource, StatePair};
use deltapool::scheduler::{
    Cost, Direction, End, Form, Limits, LongReserve, Place, Placement, Prompt, Reuse, SampledToken,
    Scheduler, SequenceId, SlotCopy, StepPlan, StepReport, Verdict,
};
use kernels::{BLOCK_LEN, NO_SLOT};
use state_pool::{PoolLayout, StatePool, Tier, TierSizes};

use oracle::{Kind, Oracle, Run, START, absorb, alone, draw, pack, row};

const POISON: u64 = 0xdead_dead_dead_dead;
/// Steps without a token, a transfer or an end after which a seed counts as stuck.
const STUCK: u32 = 200;

pub struct Random(u64);

impl Random {
    fn new(seed: u64) -> Random {
        Random(mix(seed, 0x5eed) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 11
    }

    fn below(&mut self, n: usize) -> usize {
        self.next() as usize % n
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

fn mix(a: u64, b: u64) -> u64 {
    let x = (a ^ b.wrapping_mul(0xff51_afd7_ed55_8ccd)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x ^ (x >> 29)
}

/// A fault planted between plan and lower, or in the report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// A fork's first step writes the slot it shares.
    WriteSharedSlot,
    /// A transfer leaves the slot out.
    ForgetSlot,
    /// A transfer is reported done before it is.
    ReportEarly,
    /// A prompt span ends off the grid.
    CutOffGrid,
    /// A prompt's tail is computed row by row.
    StepForTail,
    /// A shared tail block is not copied before it is written.
    ForgetCopy,
    /// A block that others share is written as well as its copy.
    WriteSharedBlock,
    /// A snapshot is of the row before.
    SnapshotOfWrongRow,
    /// One that the scheduler itself was built with.
    #[cfg(feature = "faults")]
    Within(deltapool::scheduler::faults::Fault),
}

impl Fault {
    pub const OUTSIDE: [Fault; 8] = [
        Fault::WriteSharedSlot,
        Fault::ForgetSlot,
        Fault::ReportEarly,
        Fault::CutOffGrid,
        Fault::StepForTail,
        Fault::ForgetCopy,
        Fault::WriteSharedBlock,
        Fault::SnapshotOfWrongRow,
    ];

    #[cfg(feature = "faults")]
    pub const WITHIN: [Fault; 8] = {
        use deltapool::scheduler::faults::Fault as Inner;
        [
            Fault::Within(Inner::FreeAtPlan),
            Fault::Within(Inner::RefusedKeepsUnit),
            Fault::Within(Inner::CancelledKeepsShare),
            Fault::Within(Inner::ResumeAtMatch),
            Fault::Within(Inner::KeyedOneOff),
            Fault::Within(Inner::SaltIgnored),
            Fault::Within(Inner::BeyondOwnPrompt),
            Fault::Within(Inner::LeaderForgotten),
        ]
    };
}

macro_rules! events {
    ($($name:ident),*) => {
        /// What happened: in a seed 0 or more times, in a sum the seeds in which it did.
        #[derive(Debug, Clone, Default)]
        pub struct Events { $(pub $name: u64),* }

        impl Events {
            pub fn add(&mut self, seed: &Events) {
                $(self.$name += u64::from(seed.$name > 0);)*
            }

            pub fn named(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name)),*]
            }
        }
    };
}

events!(
    parked,
    returned,
    recomputed,
    host_full,
    failed_transfer,
    late_transfer,
    fork_without_slot,
    page_changed_kind,
    cancelled_in_flight,
    lacking_together,
    shared_on_host,
    shared_on_device,
    resumed,
    not_exact,
    full_hit,
    followed,
    snapshot,
    left_out,
    evicted,
    evicted_on_host,
    demoted,
    promoted,
    handed_over,
    audited,
    unpacked
);

/// One tier's memory, by byte offset.
#[derive(Default)]
struct Memory {
    slots: HashMap<usize, Slot>,
    packed: HashMap<usize, Slot>,
    rows: HashMap<usize, Box<[u64; BLOCK_LEN]>>,
}

/// A slot: the state, and the last hidden row.
#[derive(Clone, Copy)]
struct Slot {
    hash: u64,
    hidden: u64,
}

impl Memory {
    fn slot(&self, at: usize) -> Slot {
        self.slots.get(&at).copied().unwrap_or(Slot { hash: POISON, hidden: POISON })
    }

    fn row(&self, block: usize, i: usize) -> u64 {
        self.rows.get(&block).map_or(POISON, |rows| rows[i])
    }

    fn block(&self, at: usize) -> Box<[u64; BLOCK_LEN]> {
        self.rows.get(&at).cloned().unwrap_or_else(|| Box::new([POISON; BLOCK_LEN]))
    }
}

/// A transfer on its way.
struct Pending {
    job: Job,
    steps_left: usize,
    fails: bool,
    /// It copies only when it ends: whatever reuses its source before is seen.
    copies_late: bool,
}

/// What a sequence is and has.
struct Stream {
    prompt: Vec<u32>,
    choice: u64,
    want: usize,
    got: Vec<u32>,
    salt: Option<&'static str>,
}

pub struct World {
    seed: u64,
    random: Random,
    fault: Option<Fault>,
    broken: Option<Direction>,
    /// Streams are cancelled at any moment; without that nothing but progress ends one.
    cancels: bool,
    scheduler: Scheduler,
    limits: Limits,
    kind: Kind,
    oracle: Oracle,
    /// Prompts, and prompts with their answers, with the salt they had.
    history: Vec<(Option<&'static str>, Vec<u32>)>,
    device: Memory,
    host: Memory,
    pending: Vec<Pending>,
    streams: HashMap<SequenceId, Stream>,
    to_come: usize,
    most_prompt: usize,
    most_answer: usize,
    events: Events,
    slot_pages: HashMap<usize, bool>,
}

impl World {
    pub fn new(seed: u64, long: bool, fault: Option<Fault>) -> World {
        let mut random = Random::new(seed);
        // Pages of one slot or of 1, 3 or 6 blocks; slots of no bytes too.
        let (slot_bytes, block_bytes) = match random.below(8) {
            0 => (0, 4096),
            1 => (4096, 4096),
            2..=5 => (3 * 4096, 4096),
            _ => (6 * 4096, 4096),
        };
        let grid = if slot_bytes == 0 && random.one_in(2) { 1 } else { 64 };
        let (most_prompt, most_answer, to_come): (usize, usize, usize) = match long {
            true => (1_500, 500, 3 + random.below(4)),
            false => (260, 60, 3 + random.below(10)),
        };
        let longest = (most_prompt + most_answer).div_ceil(BLOCK_LEN);
        let page_blocks = (slot_bytes.max(4096) / 4096).max(1);
        // The device holds the longest sequence, and little more, or much.
        let room = [1, 1, 5, 24][random.below(4)];
        let device_pages = longest.div_ceil(page_blocks) + 1 + random.below(room);
        // From a host that holds hardly one sequence to one that holds several.
        let host_pages = if random.one_in(2) { 2 } else { 2 + random.below(2 * device_pages) };
        // A host that packs.
        let packed_bytes = if slot_bytes > 0 && random.one_in(4) { slot_bytes / 2 } else { 0 };
        let pool = |tier, pages: usize| {
            let sizes = TierSizes {
                slot_bytes,
                block_bytes,
                packed_bytes: if tier == Tier::Host { packed_bytes } else { 0 },
                memory_bytes: pages.max(2) * page_blocks * 4096,
                max_zero_byte_slots: 3 + pages % 4,
            };
            StatePool::new(tier, PoolLayout::new(sizes).expect("a layout"))
        };
        let policy = Policy::ALL[random.below(Policy::ALL.len())];
        let limits = Limits {
            max_num_batched_tokens: [64, 65, 100, 128, 300][random.below(5)],
            prefill_floor: 64,
            max_num_seqs: 1 + random.below(12),
            max_model_len: most_prompt + most_answer,
            watermark_pages: random.below(3),
            grid,
            policy,
            sjf_ageing: [0.0, 0.2, 5.0][random.below(3)],
            batching: if random.one_in(8) { Batching::Static } else { Batching::Continuous },
            reserve_long: random
                .one_in(4)
                .then(|| LongReserve { places: random.below(4), prompt_tokens: 100 }),
            preempt: [Preempt::Swap, Preempt::Swap, Preempt::Auto, Preempt::Recompute]
                [random.below(4)],
            cost: Cost {
                slot_bytes,
                block_bytes,
                link_bytes_per_second: 1e6,
                tokens_per_second: 1e3,
                pair_seconds: 1e-6,
                overlaps: seed.is_multiple_of(2),
            },
            reuse: (!random.one_in(8)).then(|| Reuse {
                exact_only: random.one_in(5),
                placement: Placement {
                    every: random.one_in(4).then_some(64),
                    ..Placement::default()
                },
                keep_turn_ends: true,
                grid_tokens: grid,
                max_ghost_tokens: if random.one_in(4) { 500 } else { 100_000 },
            }),
            audit_percent: [3.0, 30.0, 100.0][random.below(3)],
            park_every: None,
        };
        let kind =
            Kind { is_recurrent: slot_bytes > 0, has_border: grid == 64, packs: packed_bytes > 0 };
        let device = pool(Tier::Device, device_pages);
        let host = match random.below(8) {
            0 => StatePool::new(Tier::Host, device.layout().without_memory()),
            _ => pool(Tier::Host, host_pages),
        };
        #[allow(unused_mut, reason = "a fault within is planted below")]
        let mut scheduler = Scheduler::new(limits.clone(), device, host);
        #[cfg(feature = "faults")]
        if let Some(Fault::Within(within)) = fault {
            scheduler.fault = Some(within);
        }
        // A link that never works, one way.
        let broken = match random.below(20) {
            0 => Some(Direction::Out),
            1 => Some(Direction::In),
            _ => None,
        };
        let cancels = !random.one_in(3);
        World {
            seed,
            random,
            fault,
            broken,
            cancels,
            scheduler,
            limits,
            kind,
            oracle: Oracle::new(kind),
            history: Vec::new(),
            device: Memory::default(),
            host: Memory::default(),
            pending: Vec::new(),
            streams: HashMap::new(),
            to_come,
            most_prompt,
            most_answer,
            events: Events::default(),
            slot_pages: HashMap::new(),
        }
    }

    pub fn run(mut self) -> Result<Events, String> {
        let mut idle = 0;
        while self.to_come > 0 || !self.scheduler.is_idle() {
            let before = (self.to_come, self.streams.len(), self.tokens_out());
            self.arrive();
            self.cancel_some();
            self.park_some();
            let plan = self.scheduler.plan(self.now());
            let moved = !plan.is_empty() || !self.pending.is_empty();
            self.step(plan)?;
            let after = (self.to_come, self.streams.len(), self.tokens_out());
            idle = if before == after { idle + 1 } else { 0 };
            // A long prompt is computed over many steps without a token.
            if idle > STUCK || (!moved && self.to_come == 0 && idle > 8) {
                let (occupancy, limits) = (self.scheduler.occupancy(), &self.limits);
                let order = (limits.policy, limits.batching, limits.reserve_long);
                let what = format!("no progress with {occupancy:?} under {order:?}");
                return Err(self.story(&what));
            }
        }
        self.count_reuse();
        if self.scheduler.stats().audits_that_differ > 0 {
            return Err(self.story("an audit found other bits"));
        }
        self.scheduler.clear_prefix_cache();
        let (device, host) = self.scheduler.pools();
        if device.free_pages != device.pages || host.free_pages != host.pages {
            return Err(self.story("units are lost"));
        }
        let stats = self.scheduler.stats();
        self.events.parked = stats.parked;
        self.events.returned = stats.returned;
        self.events.recomputed = stats.recomputed;
        self.events.host_full = stats.host_full;
        self.events.fork_without_slot = stats.forks_without_slot;
        self.events.lacking_together = stats.lacking_together;
        Ok(self.events)
    }

    fn story(&self, what: &str) -> String {
        format!(
            "seed {}: {what}; reproduce with DELTAPOOL_SEED={} cargo test --release --test \
             simulation",
            self.seed, self.seed
        )
    }

    fn tokens_out(&self) -> usize {
        self.streams.values().map(|stream| stream.got.len()).sum()
    }

    fn count_reuse(&mut self) {
        let stats = self.scheduler.stats();
        (self.events.full_hit, self.events.followed) = (stats.full_hits, stats.followed);
        (self.events.handed_over, self.events.audited) = (stats.handed_over, stats.audits);
        let Some(tree) = self.scheduler.tree_stats() else { return };
        self.events.resumed = tree.resumed as u64;
        self.events.snapshot = tree.inserted as u64;
        self.events.left_out = tree.left_out as u64;
        self.events.evicted = tree.device.evicted as u64;
        self.events.evicted_on_host = tree.host.evicted as u64;
        self.events.demoted = tree.demoted as u64;
        self.events.promoted = tree.promoted as u64;
    }

    /// A prompt, and its salt: a new one, or one that begins like an earlier one or goes on from
    /// it.
    fn prompt(&mut self) -> (Option<&'static str>, Vec<u32>) {
        let len = match self.random.below(4) {
            0 => 1 + self.random.below(4),
            1 => 64 * (1 + self.random.below(self.most_prompt / 64)),
            _ => 1 + self.random.below(self.most_prompt),
        };
        let mut fresh: Vec<u32> = (0..len).map(|_| self.random.below(99) as u32).collect();
        let salt = if self.random.one_in(6) { Some("salt") } else { None };
        if self.history.is_empty() || self.random.one_in(3) {
            return (salt, fresh);
        }
        let (salt, mut prompt) = self.history[self.random.below(self.history.len())].clone();
        // At times under another salt, where nothing of it may be seen.
        let salt = if self.random.one_in(12) { salt.xor(Some("salt")) } else { salt };
        match self.random.below(5) {
            0 => {}
            1 => prompt.truncate(1 + self.random.below(prompt.len())),
            2 => fresh.truncate(3),
            _ => {
                let part = 64 * self.random.below(prompt.len() / 64 + 1);
                prompt.truncate(part.max(1));
            }
        }
        prompt.extend(&fresh);
        if self.random.one_in(4) {
            prompt.truncate(prompt.len() - fresh.len());
        }
        prompt.truncate(self.most_prompt);
        (salt, prompt)
    }

    /// A step takes ten milliseconds.
    fn now(&self) -> Duration {
        Duration::from_millis(10 * self.scheduler.stats().steps)
    }

    fn arrive(&mut self) {
        while self.to_come > 0 && self.random.one_in(3) {
            self.to_come -= 1;
            let (salt, prompt) = self.prompt();
            let marks: Vec<usize> = match self.random.below(4) {
                0 => (0..3).map(|_| 1 + self.random.below(prompt.len())).collect(),
                _ => Vec::new(),
            };
            let want = 1 + self.random.below(self.most_answer);
            let choices = if self.random.one_in(3) { 2 + self.random.below(3) } else { 1 };
            let priority =
                (self.limits.policy == Policy::Priority).then(|| self.random.below(3) as i32);
            let program = [None, Some("a"), Some("b")][self.random.below(3)];
            let asked = Prompt {
                choices,
                priority,
                submitted: self.now(),
                program_id: program,
                cache_salt: salt,
                checkpoint_at: &marks,
                ..Prompt::new(&prompt, want)
            };
            let Ok(ids) = self.scheduler.submit(&asked) else { continue };
            self.history.push((salt, prompt.clone()));
            // A burst of equal prompts.
            if self.to_come > 0 && self.random.one_in(8) {
                self.history.extend(std::iter::repeat_n((salt, prompt.clone()), 8));
            }
            for (choice, id) in ids.into_iter().enumerate() {
                let (prompt, choice) = (prompt.clone(), choice as u64);
                let stream = Stream { prompt, choice, want, got: Vec::new(), salt };
                self.streams.insert(id, stream);
            }
        }
    }

    fn cancel_some(&mut self) {
        let in_flight = |id: &SequenceId| {
            let place = self.scheduler.sequence(*id).expect("a stream is known").place();
            place.is_moving()
        };
        let mut ids: Vec<SequenceId> = self.streams.keys().copied().collect();
        ids.sort_unstable();
        let moving: Vec<SequenceId> = ids.iter().copied().filter(in_flight).collect();
        if !self.cancels {
            return;
        }
        let id = if !moving.is_empty() && self.random.one_in(12) {
            self.events.cancelled_in_flight += 1;
            moving[0]
        } else if !ids.is_empty() && self.random.one_in(40) {
            ids[self.random.below(ids.len())]
        } else {
            return;
        };
        self.streams.remove(&id);
        self.oracle.ends(id);
        self.scheduler.end(id, End::Cancelled);
    }

    /// Parks a stream at times, and often one whose prompt is on the host already.
    fn park_some(&mut self) {
        let mut ids: Vec<SequenceId> = self.streams.keys().copied().collect();
        ids.sort_unstable();
        if self.random.one_in(40) && !ids.is_empty() {
            self.scheduler.park(ids[self.random.below(ids.len())]);
        }
        let on_host = |id: &&SequenceId| {
            let place = self.scheduler.sequence(**id).expect("a stream is known").place();
            matches!(place, Place::Host(_))
        };
        let parked = ids.iter().find(on_host).map(|id| &self.streams[id].prompt);
        // Behind a dead link somebody is always parked: parking the others in every other step
        // would be a livelock of the test's.
        let parked = parked.filter(|_| self.broken.is_none());
        if let Some(prompt) = parked.filter(|prompt| prompt.len() >= BLOCK_LEN)
            && self.random.one_in(2)
        {
            let sibling = ids.iter().filter(|id| self.streams[id].prompt == *prompt);
            sibling.for_each(|id| self.scheduler.park(*id));
        }
    }

    fn count_shared_copies(&mut self, plan: &StepPlan) {
        for transfer in &plan.transfers {
            let Some(SlotCopy::Plain(slot, _)) = transfer.slot else { continue };
            let moving = self.streams.keys().filter_map(|id| self.scheduler.sequence(*id));
            for sequence in moving {
                let source = match sequence.place() {
                    Place::Leaving { device, .. } => device,
                    Place::Returning { host, .. } => host,
                    _ => continue,
                };
                let own = source.slot().id() == slot;
                let all = source.len().div_ceil(BLOCK_LEN);
                let shared = u64::from(own && transfer.blocks.len() < all);
                match (transfer.direction, sequence.place()) {
                    (Direction::Out, Place::Leaving { .. }) => self.events.shared_on_host += shared,
                    (Direction::In, Place::Returning { .. }) => {
                        self.events.shared_on_device += shared;
                    }
                    _ => {}
                }
            }
        }
    }

    /// Tells the oracle what a plan computes.
    fn foretell(&mut self, plan: &StepPlan) -> Result<(), String> {
        let spans = plan.spans.iter().map(|span| (span.sequence, span.start, span.rows));
        let hits = plan.hits.iter().map(|hit| {
            let sequence = self.scheduler.sequence(hit.sequence).expect("it is planned");
            (hit.sequence, sequence.prompt_len(), 0)
        });
        for (id, start, rows) in spans.chain(hits) {
            // A shadow is no stream.
            if !self.streams.contains_key(&id) {
                continue;
            }
            let sequence = self.scheduler.sequence(id).expect("it is planned");
            let (tokens, prompt_len) = (sequence.tokens(), sequence.prompt_len());
            let salt = self.streams[&id].salt;
            let resumed_at = sequence.resumed_at();
            let run = Run { id, salt, tokens, prompt_len, start, rows, resumed_at };
            if !self.oracle.computes(&run) {
                return Err(self.story(&format!(
                    "sequence {} goes on at {start} from what nobody has computed",
                    id.0
                )));
            }
        }
        for (leader, draws) in plan.drawing() {
            draws.iter().filter(|id| **id != leader).for_each(|id| self.oracle.forks(*id, leader));
        }
        Ok(())
    }

    fn step(&mut self, mut plan: StepPlan) -> Result<(), String> {
        self.foretell(&plan)?;
        self.count_shared_copies(&plan);
        self.plant(&mut plan);
        let device = self.scheduler.device().layout().clone();
        let host = self.scheduler.host().layout().clone();
        let scheduler = &self.scheduler;
        let find = |id| scheduler.sequence(id).expect("a planned sequence is known");
        let batch = lower(&plan, find, &device);
        let jobs = lower_transfers(&plan, &device, &host);
        let draws: Vec<Vec<SequenceId>> = plan.drawing().map(|(_, ids)| ids.to_vec()).collect();
        let mut report = StepReport::default();
        self.start(jobs);
        let hashes = self.forward(&batch);
        assert_eq!(hashes.len(), draws.len());
        for (hash, ids) in hashes.into_iter().zip(draws) {
            for id in ids {
                // A stream that was cancelled in this very step is still drawn for.
                let choice = self.streams.get(&id).map_or(0, |stream| stream.choice);
                let drawn = Ok(draw(hash, choice));
                report.sampled.push(SampledToken { sequence: id, drawn, logprobs: None });
            }
        }
        report.verdict = batch.compare.as_ref().map(|pair| self.compare(pair));
        self.finish_transfers(&mut report);
        self.scheduler.commit(plan, &report);
        self.scheduler.device().check();
        self.scheduler.host().check();
        for drawn in report.sampled {
            let Some(stream) = self.streams.get_mut(&drawn.sequence) else { continue };
            let token = drawn.drawn.expect("hashes can be drawn from");
            stream.got.push(token);
            if !self.oracle.draws(drawn.sequence, stream.choice, token) {
                let (id, at) = (drawn.sequence.0, stream.got.len() - 1);
                return Err(self.story(&format!("sequence {id} draws another token at {at}")));
            }
            if stream.got.len() == stream.want {
                let stream = self.streams.remove(&drawn.sequence).expect("it is there");
                let sequence = self.scheduler.sequence(drawn.sequence).expect("it has not ended");
                let is_exact = sequence.is_exact();
                let (said, resumed_at) = (sequence.reuse().cached_tokens, sequence.resumed_at());
                // A fork says what its leader was given; who lost its state went on elsewhere.
                let knows = stream.choice == 0 && sequence.counters().preemptions == 0;
                if knows && said != resumed_at {
                    let id = drawn.sequence.0;
                    return Err(self.story(&format!(
                        "sequence {id} says {said} cached tokens, and went on at {resumed_at}"
                    )));
                }
                self.events.not_exact += u64::from(!is_exact);
                self.history.push((stream.salt, [&stream.prompt[..], &stream.got].concat()));
                self.oracle.ends(drawn.sequence);
                self.scheduler.end(drawn.sequence, End::Finished);
                let exact_only = self.limits.reuse.as_ref().is_some_and(|reuse| reuse.exact_only);
                let expected = alone(self.kind, &stream.prompt, stream.choice, stream.want);
                if (is_exact || exact_only) && stream.got != expected {
                    let at = stream.got.iter().zip(&expected).take_while(|(a, b)| a == b).count();
                    let (id, len) = (drawn.sequence.0, stream.prompt.len());
                    return Err(self.story(&format!(
                        "sequence {id} of {len} prompt tokens differs at its token {at}"
                    )));
                }
            }
        }
        self.watch_pages();
        self.poison();
        Ok(())
    }

    /// Changes a plan as a faulty scheduler would have made it.
    fn plant(&mut self, plan: &mut StepPlan) {
        match self.fault {
            Some(Fault::WriteSharedSlot) => {
                for span in &mut plan.spans {
                    if let Some(read) = span.read {
                        span.write = read;
                    }
                }
            }
            Some(Fault::ForgetCopy) => plan.copies.clear(),
            Some(Fault::SnapshotOfWrongRow) => {
                for (at, _) in plan.spans.iter_mut().flat_map(|span| &mut span.snapshots) {
                    *at -= 1;
                }
            }
            Some(Fault::StepForTail) => {
                for span in &mut plan.spans {
                    if span.rows == 1 {
                        span.form = Form::Step;
                    }
                }
            }
            Some(Fault::CutOffGrid) => {
                for span in &mut plan.spans {
                    if span.form == Form::Chunk && span.draws.is_empty() && span.rows > 64 {
                        span.rows -= 1;
                    }
                }
            }
            _ => {}
        }
    }

    fn start(&mut self, jobs: Vec<Job>) {
        for mut job in jobs {
            if self.fault == Some(Fault::ForgetSlot) && job.packed.take().is_some() {
            } else if self.fault == Some(Fault::ForgetSlot) && job.pieces.len() > 1 {
                job.pieces.remove(0);
            }
            let steps_left = if self.random.one_in(2) { 0 } else { self.random.below(6) };
            let fails = self.random.one_in(8) || self.broken == Some(job.direction);
            let copies_late = self.random.one_in(2);
            self.events.late_transfer += u64::from(steps_left > 0);
            self.events.failed_transfer += u64::from(fails);
            if !copies_late {
                self.copy(&job);
            }
            self.pending.push(Pending { job, steps_left, fails, copies_late });
        }
    }

    fn copy(&mut self, job: &Job) {
        let (from, to) = match job.direction {
            Direction::Out => (&self.device, &mut self.host),
            Direction::In => (&self.host, &mut self.device),
        };
        match (job.packed, job.direction) {
            (Some((source, target)), Direction::Out) => {
                let slot = from.slot(source);
                to.packed.insert(target, Slot { hash: pack(slot.hash), ..slot });
            }
            (Some((source, target)), Direction::In) => {
                self.events.unpacked += 1;
                let poison = Slot { hash: POISON, hidden: POISON };
                to.slots.insert(target, from.packed.get(&source).copied().unwrap_or(poison));
            }
            (None, _) => {}
        }
        let block_bytes = self.limits.cost.block_bytes;
        let has_slot = self.limits.cost.slot_bytes > 0;
        for (i, piece) in job.pieces.iter().enumerate() {
            // The slot comes first; slots and blocks may be of one size.
            let is_slot = has_slot
                && job.packed.is_none()
                && i == 0
                && piece.bytes == self.limits.cost.slot_bytes;
            if is_slot && (piece.bytes != block_bytes || self.fault != Some(Fault::ForgetSlot)) {
                to.slots.insert(piece.target, from.slot(piece.source));
            } else {
                to.rows.insert(piece.target, from.block(piece.source));
            }
        }
    }

    fn finish_transfers(&mut self, report: &mut StepReport) {
        let mut waiting = Vec::new();
        for mut pending in std::mem::take(&mut self.pending) {
            if pending.steps_left > 0 && self.fault != Some(Fault::ReportEarly) {
                pending.steps_left -= 1;
                waiting.push(pending);
                continue;
            }
            if pending.fails {
                report.failed.push(pending.job.id);
            } else {
                // A transfer reported before it is done has not copied yet.
                let early = self.fault == Some(Fault::ReportEarly) && pending.steps_left > 0;
                if pending.copies_late && !early {
                    self.copy(&pending.job);
                }
                report.finished.push(pending.job.id);
            }
        }
        self.pending = waiting;
    }

    /// The model: returns a hash for each row of logits.
    fn forward(&mut self, batch: &Batch) -> Vec<u64> {
        for copy in &batch.copies {
            let rows = self.device.block(copy.source);
            self.device.rows.insert(copy.target, rows);
        }
        let reads: Vec<u64> = batch
            .spans
            .iter()
            .map(|span| if span.read == NO_SLOT { START } else { self.device.slot(span.read).hash })
            .collect();
        let kind = self.kind;
        let mut last_rows = HashMap::new();
        for (span, read) in batch.spans.iter().zip(reads) {
            let table = &batch.tables[span.table.clone()];
            let chunk = span.form == kernels::Form::Chunk;
            let mut hash = if kind.is_recurrent { read } else { START };
            let mut chunk_start = span.start;
            for r in 0..span.rows {
                let position = span.start + r;
                if position % 64 == 0 {
                    chunk_start = position;
                }
                let token = batch.tokens[span.first_row + r];
                hash = absorb(kind, hash, token, chunk.then_some(chunk_start as u64 % 64));
                let row = row(kind, token, chunk, chunk && r < span.absorbed_from);
                let block = table[position / BLOCK_LEN];
                let copy = batch.copies.iter().find(|copy| copy.target == block);
                let shared = copy.filter(|_| self.fault == Some(Fault::WriteSharedBlock));
                for block in shared.map(|copy| copy.source).into_iter().chain([block]) {
                    let rows = self.device.rows.entry(block);
                    let rows = rows.or_insert_with(|| Box::new([POISON; BLOCK_LEN]));
                    rows[position % BLOCK_LEN] = row;
                }
                for snapshot in &batch.snapshots[span.snapshots.clone()] {
                    if snapshot.after_rows == r + 1 {
                        let hidden = self.hidden(hash, table, position + 1);
                        self.device.slots.insert(snapshot.slot, Slot { hash, hidden });
                    }
                }
            }
            let hidden = self.hidden(hash, table, span.end());
            if kind.is_recurrent {
                self.device.slots.insert(span.write, Slot { hash, hidden });
            }
            last_rows.insert(span.first_row + span.rows - 1, hidden);
        }
        let hidden = |source: &LogitSource| match source {
            LogitSource::Row(row) => last_rows[row],
            LogitSource::Slot(slot) => self.device.slot(*slot).hidden,
        };
        batch.logits.iter().map(hidden).collect()
    }

    fn compare(&self, pair: &StatePair) -> Verdict {
        let is_same = |slots: (usize, usize)| {
            let (one, other) = (self.device.slot(slots.0), self.device.slot(slots.1));
            (one.hash, one.hidden) == (other.hash, other.hidden)
        };
        let rows = |i: usize| {
            let (one, other) = pair.blocks[i / BLOCK_LEN];
            (self.device.row(one, i % BLOCK_LEN), self.device.row(other, i % BLOCK_LEN))
        };
        let differs = (0..pair.tokens).map(rows).any(|(one, other)| one != other)
            || !pair.slots.is_none_or(is_same);
        if differs { Verdict::Differs { layer: 0 } } else { Verdict::Same }
    }

    /// The hidden row of the last of `tokens` tokens.
    fn hidden(&self, hash: u64, table: &[usize], tokens: usize) -> u64 {
        let seen = (0..tokens).map(|i| self.device.row(table[i / BLOCK_LEN], i % BLOCK_LEN));
        mix(hash, seen.fold(START, mix))
    }

    /// Counts pages that held slots and now hold blocks, or the other way round.
    fn watch_pages(&mut self) {
        let pool = self.scheduler.device();
        let layout = pool.layout().clone();
        if layout.slots_per_page == 0 {
            return;
        }
        for id in pool.held_slots() {
            let page = layout.slot_offset(id) / layout.page_bytes;
            self.events.page_changed_kind +=
                u64::from(self.slot_pages.insert(page, true) == Some(false));
        }
        for id in pool.held_blocks() {
            let page = layout.block_offset(id) / layout.page_bytes;
            self.events.page_changed_kind +=
                u64::from(self.slot_pages.insert(page, false) == Some(true));
        }
    }

    /// Forgets the contents of everything that is free.
    fn poison(&mut self) {
        for (pool, memory) in
            [(self.scheduler.device(), &mut self.device), (self.scheduler.host(), &mut self.host)]
        {
            let layout = pool.layout();
            let slots: Vec<usize> = pool.held_slots().map(|id| layout.slot_offset(id)).collect();
            let blocks: Vec<usize> = pool.held_blocks().map(|id| layout.block_offset(id)).collect();
            let packed: Vec<usize> =
                pool.held_packed().map(|id| layout.packed_offset(id)).collect();
            memory.packed.retain(|at, _| packed.contains(at));
            memory.slots.retain(|at, _| slots.contains(at));
            memory.rows.retain(|at, _| blocks.contains(at));
        }
    }
}
