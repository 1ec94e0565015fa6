//! A small engine room for tests: several sequences over the real pool, plan, `lower` and executor.

use deltapool::engine::executor::CpuExecutor;
use deltapool::engine::lower::lower;
use deltapool::models::decoder::Observer;
use deltapool::models::{Model, ModelFiles};
use deltapool::scheduler::{Sequence, SequenceId, StepPlan, TokenBudget, Wanted};
use half::bf16;
use kernels::{Cpu, Isa, KvDtype, KvPlace};
use state_pool::{PoolLayout, SequenceState, SlotHandle, StatePool, Tier, TierSizes};

use super::{POISON, Random};

/// How a [`Rig`] runs.
#[derive(Clone, Copy)]
pub struct Setting {
    pub isa: Isa,
    pub threads: usize,
    /// Bytes of the arena.
    pub memory: usize,
    /// Rows of the largest batch.
    pub most_rows: usize,
}

impl Default for Setting {
    fn default() -> Self {
        Setting { isa: Isa::best(), threads: 1, memory: 8 << 20, most_rows: 512 }
    }
}

pub struct Rig {
    pub executor: CpuExecutor,
    pub pool: StatePool,
    pub sequences: Vec<Sequence>,
    pub grid: usize,
}

/// What one step of a [`Rig`] computes: the next span of a sequence, of at most `budget` rows, with
/// snapshots after some of its rows.
pub struct Turn<'a> {
    pub sequence: usize,
    pub budget: usize,
    pub wanted: Wanted,
    pub snapshots: &'a [(usize, &'a SlotHandle)],
}

impl Turn<'_> {
    pub fn new(sequence: usize, budget: usize, wanted: Wanted) -> Turn<'static> {
        Turn { sequence, budget, wanted, snapshots: &[] }
    }
}

impl Rig {
    /// An engine room for the model in `files`, all its memory poisoned.
    pub fn new(files: &ModelFiles, setting: Setting) -> Rig {
        let weights = files.load(&mut |_, _| {}).expect("the weights are sound");
        let model = Model::new(files, weights).expect("memory");
        let (layout, grid) = (model.layout(), model.spec().grid());
        let sizes = TierSizes {
            slot_bytes: layout.slot_bytes,
            block_bytes: layout.block_bytes,
            packed_bytes: 0,
            memory_bytes: setting.memory,
            max_zero_byte_slots: 64,
        };
        let layout = PoolLayout::new(sizes).expect("the memory holds the model's units");
        let cpu = Cpu::new(setting.isa, setting.threads).expect("threads start");
        let bytes = layout.arena_bytes();
        let executor = CpuExecutor::new(cpu, model, (bytes, 0), setting.most_rows);
        let mut executor = executor.expect("a small arena");
        let (arena, _, work) = executor.memory_mut();
        arena.f32s_mut(0, bytes / 4).fill(POISON);
        work.poison();
        let pool = StatePool::new(Tier::Device, layout);
        Rig { executor, pool, sequences: Vec::new(), grid }
    }

    /// A new sequence; its blocks are taken as it grows.
    pub fn add(&mut self, prompt: &[u32]) -> usize {
        let state = SequenceState::allocate(&mut self.pool, 0).expect("a slot is free");
        self.add_with(prompt, state)
    }

    /// A new sequence that resumes from `state`.
    pub fn add_with(&mut self, prompt: &[u32], state: SequenceState) -> usize {
        let id = SequenceId(self.sequences.len() as u64);
        self.sequences.push(Sequence::on_device(id, prompt.to_vec(), state));
        self.sequences.len() - 1
    }

    /// Takes slots and gives them back in a random order, so that later ones come out of order.
    pub fn shuffle_pool(&mut self, random: &mut Random, slots: usize, blocks: usize) {
        let mut taken = self.pool.allocate(blocks, slots).expect("room to shuffle");
        while !taken.slots.is_empty() {
            let slot = taken.slots.swap_remove(random.below(taken.slots.len()));
            self.pool.release(slot);
        }
        while !taken.blocks.is_empty() {
            let block = taken.blocks.swap_remove(random.below(taken.blocks.len()));
            self.pool.release(block);
        }
    }

    /// One step; returns its logits.
    pub fn step(&mut self, turns: &[Turn<'_>]) -> Vec<f32> {
        self.step_observed(turns, &mut |_, _| {})
    }

    pub fn step_observed(&mut self, turns: &[Turn<'_>], observe: Observer<'_>) -> Vec<f32> {
        let mut plan = StepPlan::default();
        let mut turn_of_span = Vec::new();
        for turn in turns {
            let mut budget = TokenBudget::new(turn.budget, 0);
            let planned = plan.spans.len();
            let sequence = &mut self.sequences[turn.sequence];
            plan.add(sequence, &mut self.pool, &mut budget, self.grid).expect("room in the pool");
            if plan.spans.len() > planned {
                turn_of_span.push(turn);
            }
        }
        for (span, turn) in plan.spans.iter_mut().zip(&turn_of_span) {
            span.wanted = turn.wanted;
            let ids = turn.snapshots.iter().map(|(rows, slot)| (*rows, slot.id()));
            span.snapshots = ids.filter(|(rows, _)| *rows <= span.rows).collect();
        }
        let layout = self.pool.layout().clone();
        let batch = lower(&plan, |id| &self.sequences[id.0 as usize], &layout);
        let logits = self.executor.forward_observed(&batch, observe).to_vec();
        for span in &plan.spans {
            self.sequences[span.sequence.0 as usize].advance(span.rows);
        }
        plan.retire(&mut self.pool);
        self.pool.check();
        logits
    }

    /// Computes a sequence's prompt in spans of at most `budget` rows; returns the last logits.
    pub fn prefill(&mut self, sequence: usize, budget: usize) -> Vec<f32> {
        let mut logits = Vec::new();
        while self.sequences[sequence].computed() < self.sequences[sequence].tokens().len() {
            logits = self.step(&[Turn::new(sequence, budget, Wanted::Last)]);
        }
        logits
    }

    /// The bytes of a slot, as words.
    pub fn slot(&self, handle: &SlotHandle) -> Vec<f32> {
        let layout = self.pool.layout();
        let bytes = self.executor.model().layout().slot_bytes;
        self.executor.arena().f32s(layout.slot_offset(handle.id()), bytes / 4).to_vec()
    }

    /// The rows a sequence has computed of one attention layer, blocks in order.
    pub fn block_rows(&self, sequence: usize, place: KvPlace, values: usize) -> Vec<Vec<f32>> {
        let state = self.sequences[sequence].state().expect("it runs");
        let layout = self.pool.layout();
        let offsets = state.table().ids().map(|id| layout.block_offset(id));
        let arena = self.executor.arena();
        let widened = |at| match place.dtype {
            KvDtype::F32 => arena.f32s(at, values).to_vec(),
            KvDtype::Bf16 => {
                arena.values::<bf16>(at, values).iter().map(|value| value.to_f32()).collect()
            }
        };
        offsets.map(|offset| widened(offset + place.at)).collect()
    }

    /// Gives every sequence's units back and checks that none is lost.
    pub fn finish(mut self) {
        for sequence in self.sequences.drain(..) {
            sequence.release(&mut self.pool);
        }
        self.pool.check();
        assert_eq!(self.pool.free_pages(), self.pool.layout().pages);
    }
}

/// The highest value, the first among equals.
pub fn argmax(logits: &[f32]) -> u32 {
    let best = logits.iter().fold(f32::NEG_INFINITY, |m, x| if *x > m { *x } else { m });
    logits.iter().position(|x| *x == best).expect("logits are numbers") as u32
}
