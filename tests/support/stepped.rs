//! The engine without its thread: the real door, scheduler, pools, `lower` and executor, stepped
//! by a test, over memory whose free units are not-a-number and transfers that may be late or fail.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use deltapool::config::{EngineConfig, MemorySize};
use deltapool::engine::core::Core;
use deltapool::engine::executor::{CpuExecutor, Executor, PlannedDraw};
use deltapool::engine::lower::Job;
use deltapool::engine::{Engine, RequestId};
use deltapool::models::{Batch, ModelFiles};
use deltapool::request::{Finish, Request};
use deltapool::scheduler::StepReport;
use kernels::{Arena, Isa};
use state_pool::StatePool;

use super::{POISON, Random};

/// How a [`Stepped`] engine runs.
#[derive(Debug, Clone, Copy)]
pub struct Setting {
    pub isa: Isa,
    pub config: EngineConfig,
    /// Each transfer is done and reported 1 to 5 steps late; half of them copy at once and are
    /// only reported late.
    pub late: bool,
    /// One transfer in so many fails; 0 for none.
    pub failing: usize,
    pub seed: u64,
}

impl Setting {
    /// Everything roomy: up to 8,192 rows a step, 48 MiB on either tier.
    pub fn roomy() -> Setting {
        let roomy = MemorySize::Bytes(48 << 20);
        let config = EngineConfig {
            device_memory: roomy,
            host_memory: roomy,
            threads: 1,
            // So that `auto` needs no measurement and prefers to swap.
            link_bytes_per_second: Some(1e12),
            prefill_tokens_per_second: Some(1.0),
            audit_percent: 50.0,
            ..EngineConfig::default()
        };
        Setting { isa: Isa::best(), config, late: false, failing: 0, seed: 1 }
    }

    pub fn with(mut self, change: impl FnOnce(&mut EngineConfig)) -> Setting {
        change(&mut self.config);
        self
    }
}

/// The real executor behind a link with faults.
pub struct Link {
    pub inner: CpuExecutor,
    random: Random,
    late: bool,
    failing: usize,
    pending: Vec<Pending>,
}

struct Pending {
    /// None when it was copied at once.
    job: Option<Job>,
    id: deltapool::scheduler::TransferId,
    steps_left: usize,
    fails: bool,
}

impl Link {
    fn start(&mut self, jobs: Vec<Job>) -> Vec<Job> {
        let mut now = Vec::new();
        for job in jobs {
            let id = job.id;
            let fails = self.failing > 0 && self.random.below(self.failing) == 0;
            let steps_left = if self.late { 1 + self.random.below(5) } else { 0 };
            let at_once = self.late && self.random.below(2) == 0 && !fails;
            let job = if at_once {
                now.push(job);
                None
            } else {
                Some(job)
            };
            self.pending.push(Pending { job, id, steps_left, fails });
        }
        now
    }
}

impl Executor for Link {
    fn step(&mut self, batch: &Batch, jobs: Vec<Job>, draws: &[PlannedDraw<'_>]) -> StepReport {
        let mut now = self.start(jobs);
        let (mut done, mut failed) = (Vec::new(), Vec::new());
        for mut pending in std::mem::take(&mut self.pending) {
            if pending.steps_left > 0 {
                pending.steps_left -= 1;
                self.pending.push(pending);
            } else if pending.fails {
                failed.push(pending.id);
            } else {
                now.extend(pending.job);
                done.push(pending.id);
            }
        }
        let mut report = self.inner.step(batch, now, draws);
        (report.finished, report.failed) = (done, failed);
        report
    }

    fn now(&self) -> Duration {
        self.inner.now()
    }
}

/// What one answer was: its tokens with the bits of their logprobs, and its end.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Answer {
    pub ids: Vec<u32>,
    pub logprobs: Vec<u32>,
    pub text: String,
    pub finish: Option<Finish>,
}

/// Answers by request and choice.
pub type Answers = BTreeMap<(u64, usize), Answer>;

pub struct Stepped {
    pub core: Core<Link>,
    pub answers: Answers,
    next: u64,
    /// Offsets of held slots and blocks of device and host after the last step.
    held: [BTreeSet<(usize, usize)>; 2],
    pub steps: usize,
}

impl Stepped {
    /// An engine for the model in `files`, all its memory poisoned.
    pub fn new(files: ModelFiles, setting: Setting) -> Stepped {
        let builder = Engine::builder(files).isa(setting.isa).config(setting.config);
        Stepped::over(builder, setting)
    }

    pub fn over(builder: deltapool::engine::EngineBuilder<'_>, setting: Setting) -> Stepped {
        let core = builder.build_core(|inner| Link {
            inner,
            random: Random::new(setting.seed),
            late: setting.late,
            failing: setting.failing,
            pending: Vec::new(),
        });
        let mut core = core.expect("the engine is built");
        let (device, host, work) = core.executor_mut().inner.memory_mut();
        for arena in [device, host] {
            let len = arena.bytes() / 4;
            arena.f32s_mut(0, len).fill(POISON);
        }
        work.poison();
        Stepped { core, answers: Answers::new(), next: 0, held: Default::default(), steps: 0 }
    }

    pub fn submit(&mut self, request: &Request) -> RequestId {
        let id = RequestId(self.next);
        self.next += 1;
        for choice in 0..request.n {
            self.answers.insert((id.0, choice), Answer::default());
        }
        self.core.door().check(request).expect("it fits");
        self.core.submit(id, Arc::new(request.clone()), 0);
        id
    }

    /// One step; what it brought is added to the answers. Units that it freed are poisoned.
    pub fn step(&mut self) {
        self.steps += 1;
        assert!(self.steps < 20_000, "no end");
        for (id, event) in self.core.step() {
            let answer = self.answers.get_mut(&(id.0, event.choice)).expect("it was submitted");
            assert!(answer.finish.is_none(), "an event after the last");
            answer.ids.extend(event.token);
            if let Some(logprobs) = event.logprobs {
                answer.logprobs.push(logprobs.chosen.to_bits());
                answer.logprobs.extend(logprobs.top.iter().map(|(_, l)| l.to_bits()));
            }
            answer.text.push_str(&event.text);
            answer.finish = event.finish;
        }
        self.poison();
    }

    fn poison(&mut self) {
        let held = [self.core.scheduler().device(), self.core.scheduler().host()].map(units);
        let (device, host, _) = self.core.executor_mut().inner.memory_mut();
        for ((arena, now), before) in [device, host].into_iter().zip(&held).zip(&self.held) {
            before.difference(now).for_each(|unit| poison(arena, *unit, now));
        }
        self.held = held;
    }

    /// Steps until nothing is left, and checks that nothing is lost.
    pub fn finish(&mut self) {
        while !self.core.is_idle() {
            self.step();
        }
        let differs = self.core.stats().scheduler.first_differing_layer;
        assert_eq!(differs, None, "an audit found other bits in this layer");
        self.core.clear_prefix_cache();
        let (device, host) = self.core.scheduler().pools();
        assert_eq!((device.free_pages, host.free_pages), (device.pages, host.pages));
        assert!(self.answers.values().all(|answer| answer.finish.is_some()));
    }

    pub fn generated(&self, request: RequestId) -> usize {
        let of = |((id, _), answer): (&(u64, usize), &Answer)| {
            (*id == request.0).then_some(answer.ids.len())
        };
        self.answers.iter().filter_map(of).max().unwrap_or(0)
    }

    pub fn has_ended(&self, request: RequestId) -> bool {
        self.answers.iter().all(|((id, _), answer)| *id != request.0 || answer.finish.is_some())
    }
}

/// Offset and bytes of all held units.
fn units(pool: &StatePool) -> BTreeSet<(usize, usize)> {
    let layout = pool.layout();
    let slots = pool.held_slots().map(|id| (layout.slot_offset(id), layout.slot_bytes));
    let blocks = pool.held_blocks().map(|id| (layout.block_offset(id), layout.block_bytes));
    slots.chain(blocks).filter(|(_, bytes)| *bytes > 0).collect()
}

/// Makes a freed unit not-a-number, but for what is held again: its page may have changed kind.
fn poison(arena: &mut Arena, (mut at, bytes): (usize, usize), held: &BTreeSet<(usize, usize)>) {
    let end = at + bytes;
    let before = held.range(..(at, 0)).next_back().map(|(start, bytes)| start + bytes);
    at = at.max(before.unwrap_or(0)).min(end);
    for (start, bytes) in held.range((at, 0)..(end, 0)) {
        arena.f32s_mut(at, start.saturating_sub(at) / 4).fill(POISON);
        at = start + bytes;
    }
    arena.f32s_mut(at.min(end), end.saturating_sub(at) / 4).fill(POISON);
}
