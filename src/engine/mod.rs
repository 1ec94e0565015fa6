//! The engine: requests in, events out.
//!
//! ```text
//!  callers' threads                        the engine's thread
//!  Engine::submit -> Door ... commands --> Core: [ plan -> lower -> forward -> sample -> commit ]
//!  Handle         <- ....... events <----
//! ```
//!
//! [`Engine::builder`] derives pools from limits once; [`core::Core`] is the loop, and nothing but
//! its thread touches pools, arenas or weights. A sequence that runs holds one slot and the blocks
//! of its tokens, and gives them back when it ends.
//!
//! ```
//! # #[cfg(feature = "embedded-model")] {
//! use deltapool::engine::Engine;
//! use deltapool::models::ModelFiles;
//! use deltapool::request::Request;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let engine = Engine::builder(ModelFiles::embedded()?).build()?;
//! let one = engine.submit(Request::new(vec![1, 2, 3], 4))?;
//! let two = engine.submit(Request { n: 2, ..Request::new(vec![4, 5], 4) })?;
//! assert!(one.into_iter().filter_map(|event| event.token).count() <= 4);
//! assert_eq!(two.into_iter().filter(|event| event.finish.is_some()).count(), 2);
//! # Ok(())
//! # }
//! # main().expect("the embedded model runs");
//! # }
//! ```

pub mod builder;
pub mod constraint;
pub mod core;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod device;
pub mod door;
mod error;
pub mod executor;
mod handle;
mod limits;
pub mod link;
pub mod lower;
pub mod mask;
pub mod probe;
mod record;
pub mod sampler;
mod score;
mod slo;
mod steps;
mod text;
mod thread;
mod view;

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

pub use self::core::{EngineStats, RequestId};
pub use builder::EngineBuilder;
pub use device::{DeviceError, OpenDevice};
pub use door::SubmitError;
pub use error::EngineError;
pub use handle::{Backlog, Events, Handle};
pub use limits::EngineLimits;
pub use score::Scorer;
pub use state_pool::{BLOCK_LEN, PoolLayout, PoolStats};
pub use steps::{Distribution, STEPS_KEPT, StepKind, StepRecord, StepTotals};
pub use view::{EngineView, SEQUENCES_SHOWN, SequenceState, SequenceView};

pub use crate::scheduler::{Blocked, PoolUse, Refused, UnitUse};

use self::core::Core;
use door::Door;
use executor::Executor;
use thread::{Command, Desk};

use crate::models::ModelFiles;
use crate::request::Request;
use crate::scheduler::Cost;

/// Runs requests over a model, on a thread of its own. Dropping it cancels what is left.
#[derive(Debug)]
pub struct Engine {
    door: Arc<Door>,
    limits: EngineLimits,
    desk: Arc<Desk>,
    commands: Sender<Command>,
    thread: Option<JoinHandle<()>>,
    next_request: AtomicU64,
}

impl Engine {
    /// What builds an engine for a model: limits, tokenizer, progress.
    pub fn builder<'p>(files: ModelFiles) -> EngineBuilder<'p> {
        EngineBuilder::new(files)
    }

    fn start<E: Executor + Send + 'static>(
        limits: EngineLimits,
        core: Core<E>,
    ) -> io::Result<Engine> {
        let door = Arc::clone(core.door());
        let (commands, inbox) = channel();
        let mut view = EngineView::default();
        core.view(&mut view);
        let desk = Arc::new(Desk::new(core.stats(), view));
        let thread = Some(thread::spawn(core, inbox, Arc::clone(&desk))?);
        Ok(Engine { door, limits, desk, commands, thread, next_request: AtomicU64::new(0) })
    }

    /// Takes a request; what happens to it is heard from the handle. Without a seed of its own it
    /// gets one that nobody can foresee. Does not wait for the engine's thread.
    ///
    /// # Errors
    /// A request that no engine could honour, or one beyond this engine's limits; nothing is kept
    /// of it.
    pub fn submit(&self, request: impl Into<Arc<Request>>) -> Result<Handle, SubmitError> {
        let request = request.into();
        if let Some(fault) = self.fault() {
            return Err(SubmitError::Failed(fault.to_owned()));
        }
        self.door.check(&request)?;
        let id = RequestId(self.next_request.fetch_add(1, Ordering::Relaxed));
        let seed = request.sampling.seed.unwrap_or_else(random_seed);
        let (events, receiver) = async_channel::unbounded();
        let (choices, tokens) = (request.n, request.prompt.len());
        let backlog = Backlog::new(tokens);
        let command = Command::Submit { id, request, seed, backlog: backlog.clone(), events };
        let sent = self.desk.if_open(tokens, || self.commands.send(command));
        sent.ok_or(SubmitError::Draining)?.map_err(|_| SubmitError::Stopped)?;
        Ok(Handle::new(id, seed, backlog, choices, receiver, self.commands.clone()))
    }

    /// Refuses what [`Engine::submit`] would refuse, and takes nothing.
    ///
    /// # Errors
    /// As [`Engine::submit`].
    pub fn check(&self, request: &Request) -> Result<(), SubmitError> {
        self.door.check(request)
    }

    /// Cancels a request: its unfinished answers end as cancelled before the next step. An unknown
    /// name, or that of a request that has ended, is nothing.
    pub fn cancel(&self, id: RequestId) {
        let _ = self.commands.send(Command::Cancel(id));
    }

    /// What cancels all requests, from any thread.
    pub fn stopper(&self) -> Stopper {
        Stopper { commands: self.commands.clone() }
    }

    /// Takes nothing more, waits until all that was taken has ended, and gives back what was kept
    /// for later requests: pages that are held after it are lost.
    pub fn drain(&self) {
        self.desk.close();
        let (done, wait) = channel();
        // A thread that has ended has nothing left to wait for.
        if self.commands.send(Command::Drain(done)).is_ok() {
            let _ = wait.recv();
        }
    }

    /// Gives back what is kept for later requests, before the next step; does not wait.
    pub fn clear_prefix_cache(&self) {
        let _ = self.commands.send(Command::ClearPrefixCache);
    }

    /// How long it has had work and ended no step: zero while it has none. None when its thread
    /// has ended.
    pub fn pulse(&self) -> Option<Duration> {
        let runs = self.thread.as_ref().is_some_and(|thread| !thread.is_finished());
        runs.then(|| self.desk.silence())
    }

    /// What the device said when it failed, once it has: every request fails from then on.
    pub fn fault(&self) -> Option<&str> {
        self.desk.fault()
    }

    /// Prompt tokens to be computed: of prompts that wait, what nothing that is kept covers; of
    /// those that run, what is left. Does not wait.
    pub fn prompt_backlog(&self) -> usize {
        self.desk.prompt_backlog()
    }

    /// What was done so far and is held, as of the last step. Does not wait.
    pub fn stats(&self) -> EngineStats {
        self.desk.stats()
    }

    /// Who is where and holds what, as of the last step or some 50 ms before. Does not wait.
    pub fn view(&self) -> EngineView {
        self.desk.view()
    }

    /// Of the last `most` steps, those of a number above `after`, oldest first. The last
    /// [`STEPS_KEPT`] are kept. Does not wait.
    pub fn steps_since(&self, after: u64, most: usize) -> Vec<StepRecord> {
        self.desk.steps_since(after, most)
    }

    /// What `--preempt auto` weighs: given or measured when the engine was built.
    pub fn cost(&self) -> Cost {
        self.door.limits.cost
    }

    /// What it works within.
    pub fn limits(&self) -> &EngineLimits {
        &self.limits
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.commands.send(Command::Stop);
        if let Some(thread) = self.thread.take() {
            // Its panic, if it had one, is told by the panic hook and by every handle.
            let _ = thread.join();
        }
    }
}

/// Cancels all requests of an engine. It may outlive the engine, and is nothing then.
#[derive(Debug, Clone)]
pub struct Stopper {
    commands: Sender<Command>,
}

impl Stopper {
    /// Cancels all requests taken so far; they end before the next step.
    pub fn cancel_all(&self) {
        let _ = self.commands.send(Command::CancelAll);
    }
}

/// A seed nobody can foresee: the standard library's hash keys come from the system.
fn random_seed() -> u64 {
    RandomState::new().build_hasher().finish()
}

#[cfg(all(test, feature = "embedded-model"))]
mod tests {
    use std::time::Duration;

    use super::executor::PlannedDraw;
    use super::lower::Job;
    use super::*;
    use crate::config::EngineConfig;
    use crate::models::Batch;
    use crate::request::FinishReason;
    use crate::scheduler::StepReport;

    struct Broken;

    impl Executor for Broken {
        fn step(&mut self, _: &Batch, _: Vec<Job>, _: &[PlannedDraw<'_>]) -> StepReport {
            panic!("a fault of the executor");
        }

        fn now(&self) -> Duration {
            Duration::ZERO
        }
    }

    /// Every answer ends with the reason, nothing hangs, and nothing more is taken.
    #[test]
    fn a_thread_that_panics_ends_every_answer() {
        let files = ModelFiles::embedded().expect("the model is sound");
        let config = EngineConfig { threads: 1, ..EngineConfig::one_sequence(100) };
        let mut builder = Engine::builder(files).config(config);
        let limits = builder.limits().expect("it fits");
        let core = builder.build_core(|_| Broken).expect("it is built");
        let engine = Engine::start(limits, core).expect("a thread");
        let handle = engine.submit(Request { n: 3, ..Request::new(vec![1], 5) });
        let ends: Vec<_> = handle.expect("it is taken").into_iter().collect();
        assert_eq!(ends.len(), 3);
        for (choice, event) in ends.into_iter().enumerate() {
            let reason = event.finish.expect("an end").reason;
            assert_eq!(event.choice, choice);
            assert_eq!(reason, FinishReason::Failed("the engine has stopped".to_owned()));
        }
        engine.drain();
        assert!(matches!(engine.submit(Request::new(vec![1], 5)), Err(SubmitError::Draining)));
    }

    #[test]
    fn one_request_is_cancelled_by_its_name_and_others_go_on() {
        let files = ModelFiles::embedded().expect("the model is sound");
        let config =
            EngineConfig { threads: 1, max_num_seqs: Some(2), ..EngineConfig::one_sequence(2_000) };
        let engine = Engine::builder(files).config(config).build().expect("it is built");
        let long = Request { ignore_eos: true, ..Request::new(vec![1], 1_900) };
        let cancelled = engine.submit(long).expect("it is taken");
        let kept = engine.submit(Request { ignore_eos: true, ..Request::new(vec![1], 5) });
        engine.cancel(cancelled.id());
        let last = cancelled.into_iter().last().and_then(|event| event.finish);
        assert_eq!(last.map(|finish| finish.reason), Some(FinishReason::Cancelled));
        assert_eq!(kept.expect("it is taken").into_iter().count(), 5);
    }
}
