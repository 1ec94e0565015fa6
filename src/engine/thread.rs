//! The engine's thread: takes commands between steps, sends events to the handles.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use async_channel::Sender as EventSender;

use super::core::{Core, EngineStats, RequestId};
use super::executor::Executor;
use super::handle::Backlog;
use super::steps::{StepRecord, StepRing};
use super::view::{EngineView, VIEW_AGE};
use crate::request::{Event, Request};

/// What callers ask of the thread.
pub(super) enum Command {
    /// Take a request that the door let through.
    Submit {
        id: RequestId,
        request: Arc<Request>,
        seed: u64,
        backlog: Backlog,
        events: EventSender<Event>,
    },
    /// Cancel one.
    Cancel(RequestId),
    /// Cancel all.
    CancelAll,
    /// Give back what is kept for later requests.
    ClearPrefixCache,
    /// Tell when nothing is left.
    Drain(Sender<()>),
    /// Cancel all and end.
    Stop,
}

/// What the thread and its callers both see.
#[derive(Debug)]
pub(super) struct Desk {
    told: Mutex<Told>,
    view: Mutex<EngineView>,
    /// Whether requests are taken. Held for reading while one is sent, so that none is sent after
    /// the engine was told to drain.
    open: RwLock<bool>,
    /// Prompt tokens of requests that were sent and that the stats do not count yet.
    unseen_tokens: AtomicUsize,
    /// What the executor said when it failed for good.
    fault: OnceLock<String>,
    /// When the thread last got on with its work; none while it has none.
    beat: Mutex<Option<Instant>>,
}

/// What the thread tells after each step.
#[derive(Debug)]
struct Told {
    stats: EngineStats,
    steps: StepRing,
}

impl Desk {
    pub(super) fn new(stats: EngineStats, view: EngineView) -> Desk {
        Desk {
            told: Mutex::new(Told { stats, steps: StepRing::new() }),
            view: Mutex::new(view),
            open: RwLock::new(true),
            unseen_tokens: AtomicUsize::new(0),
            fault: OnceLock::new(),
            beat: Mutex::new(None),
        }
    }

    /// Why every request fails, once that is so.
    pub(super) fn fault(&self) -> Option<&str> {
        self.fault.get().map(String::as_str)
    }

    /// How long the thread has had work and ended no step.
    pub(super) fn silence(&self) -> Duration {
        let beat = *self.beat.lock().unwrap_or_else(PoisonError::into_inner);
        beat.map_or(Duration::ZERO, |beat| beat.elapsed())
    }

    fn set_beat(&self, beat: Option<Instant>) {
        *self.beat.lock().unwrap_or_else(PoisonError::into_inner) = beat;
    }

    pub(super) fn stats(&self) -> EngineStats {
        self.told().stats
    }

    pub(super) fn steps_since(&self, after: u64, most: usize) -> Vec<StepRecord> {
        self.told().steps.since(after, most)
    }

    pub(super) fn view(&self) -> EngineView {
        self.view.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn told(&self) -> MutexGuard<'_, Told> {
        // The values are written whole: a panic elsewhere leaves none half-written.
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does `send`, which sends a prompt of so many tokens, if requests are taken.
    pub(super) fn if_open<T>(&self, prompt_tokens: usize, send: impl FnOnce() -> T) -> Option<T> {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        open.then(|| {
            self.unseen_tokens.fetch_add(prompt_tokens, Ordering::Relaxed);
            send()
        })
    }

    /// Prompt tokens to be computed, as of the last step, with those that came since.
    pub(super) fn prompt_backlog(&self) -> usize {
        self.stats().occupancy.prompt_backlog + self.unseen_tokens.load(Ordering::Relaxed)
    }

    /// Takes no more requests.
    pub(super) fn close(&self) {
        *self.open.write().unwrap_or_else(PoisonError::into_inner) = false;
    }
}

/// Starts the thread.
pub(super) fn spawn<E: Executor + Send + 'static>(
    core: Core<E>,
    commands: Receiver<Command>,
    desk: Arc<Desk>,
) -> std::io::Result<JoinHandle<()>> {
    let (listeners, drains, viewed) = (HashMap::new(), Vec::new(), None);
    let looped = Loop { core, commands, desk, listeners, drains, untold_tokens: 0, viewed };
    Builder::new().name("deltapool-engine".to_owned()).spawn(move || looped.run())
}

struct Loop<E> {
    core: Core<E>,
    commands: Receiver<Command>,
    desk: Arc<Desk>,
    listeners: HashMap<RequestId, Listener>,
    drains: Vec<Sender<()>>,
    /// Prompt tokens that were taken in since the stats were last told.
    untold_tokens: usize,
    /// When the view was last taken; none once nothing has happened since.
    viewed: Option<Instant>,
}

/// Who hears the events of a request, and how many of its answers have not ended.
struct Listener {
    events: EventSender<Event>,
    open: usize,
}

impl<E: Executor> Loop<E> {
    fn run(mut self) {
        while self.take_commands() {
            self.step();
        }
        self.core.cancel_all();
        self.core.clear_prefix_cache();
        // Transfers on their way hold units until they are reported.
        while !self.core.is_idle() {
            self.step();
        }
    }

    /// Takes what has come in, and waits for something when there is nothing to do. False when the
    /// thread is to end.
    fn take_commands(&mut self) -> bool {
        loop {
            let command = if self.core.is_idle() {
                if !self.drains.is_empty() {
                    // Nobody comes after.
                    self.core.clear_prefix_cache();
                    self.tell_stats();
                    self.tell_view();
                }
                for done in self.drains.drain(..) {
                    let _ = done.send(());
                }
                if self.viewed.take().is_some() {
                    self.tell_view();
                }
                self.desk.set_beat(None);
                let command = self.commands.recv().map_err(|_| TryRecvError::Disconnected);
                self.desk.set_beat(Some(Instant::now()));
                command
            } else {
                self.commands.try_recv()
            };
            match command {
                Ok(Command::Submit { id, request, seed, backlog, events }) => {
                    self.listeners.insert(id, Listener { events, open: request.n });
                    self.untold_tokens += request.prompt.len();
                    backlog.set(self.core.submit(id, request, seed));
                }
                Ok(Command::Cancel(id)) => self.core.cancel(id),
                Ok(Command::CancelAll) => self.core.cancel_all(),
                Ok(Command::ClearPrefixCache) => {
                    self.core.clear_prefix_cache();
                    self.tell_stats();
                    self.tell_view();
                }
                Ok(Command::Drain(done)) => self.drains.push(done),
                Ok(Command::Stop) | Err(TryRecvError::Disconnected) => return false,
                Err(TryRecvError::Empty) => return true,
            }
        }
    }

    fn tell_stats(&mut self) {
        let stats = self.core.stats();
        self.desk.told().stats = stats;
        self.tell_taken();
    }

    /// The stats that were just told count what was taken in: twice for a moment, rather than not
    /// at all.
    fn tell_taken(&mut self) {
        let tokens = std::mem::take(&mut self.untold_tokens);
        self.desk.unseen_tokens.fetch_sub(tokens, Ordering::Relaxed);
    }

    fn tell_view(&self) {
        self.core.view(&mut self.desk.view.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Takes the view anew when it is old: before a step, so that it shows what the step is about.
    fn keep_view(&mut self) {
        let now = Instant::now();
        if self.viewed.is_none_or(|viewed| now - viewed >= VIEW_AGE) {
            self.viewed = Some(now);
            self.tell_view();
        }
    }

    fn step(&mut self) {
        self.keep_view();
        let before = self.core.last_step().number;
        let events = self.core.step();
        if let Some(fault) = self.core.fault() {
            // Before anybody hears of it: who then asks again is told why.
            self.desk.fault.get_or_init(|| fault.to_owned());
        }
        self.desk.set_beat(Some(Instant::now()));
        let (stats, last) = (self.core.stats(), self.core.last_step());
        let mut told = self.desk.told();
        told.stats = stats;
        // A step without work only tells of what was cancelled.
        if last.number > before {
            told.steps.push(last);
        }
        drop(told);
        self.tell_taken();
        for (id, event) in events {
            let listener = self.listeners.get_mut(&id).expect("a request has a listener");
            listener.open -= usize::from(event.finish.is_some());
            let ended = listener.open == 0;
            // A handle that was dropped hears nothing; its cancellation is on its way.
            let _ = listener.events.try_send(event);
            if ended {
                self.listeners.remove(&id);
            }
        }
    }
}
