//! What a caller holds of a request: its events, and the right to end it.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::task::{Context, Poll, ready};

use async_channel::Receiver;
use futures_core::Stream;

use super::core::RequestId;
use super::thread::Command;
use crate::request::{Event, Figures, Finish, FinishReason};

/// What a request that waits adds to [`Engine::prompt_backlog`](super::Engine::prompt_backlog).
#[derive(Debug, Clone)]
pub struct Backlog(Arc<AtomicUsize>);

impl Backlog {
    /// That of a prompt of so many tokens, of which nothing may be known.
    pub(crate) fn new(tokens: usize) -> Backlog {
        Backlog(Arc::new(AtomicUsize::new(tokens)))
    }

    /// The engine has looked up what is known of the prompt.
    pub(super) fn set(&self, tokens: usize) {
        self.0.store(tokens, Ordering::Relaxed);
    }

    /// Prompt tokens to be computed when the request came.
    pub fn tokens(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// The events of a request: a [`Stream`] that needs no particular runtime, and, for callers that
/// may block, [`Handle::recv`] and an iterator. All end when each answer has had its last event.
/// Dropping the handle cancels the request.
#[derive(Debug)]
pub struct Handle {
    id: RequestId,
    seed: u64,
    backlog: Backlog,
    /// Answers that have not ended.
    open: Vec<usize>,
    events: Pin<Box<Receiver<Event>>>,
    commands: Sender<Command>,
}

impl Handle {
    pub(super) fn new(
        id: RequestId,
        seed: u64,
        backlog: Backlog,
        choices: usize,
        events: Receiver<Event>,
        commands: Sender<Command>,
    ) -> Handle {
        let (open, events) = ((0..choices).collect(), Box::pin(events));
        Handle { id, seed, backlog, open, events, commands }
    }

    /// What it adds to the backlog while it waits.
    pub fn backlog(&self) -> Backlog {
        self.backlog.clone()
    }

    /// The request's name, for [`Engine::cancel`](super::Engine::cancel).
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// The seed of the first answer; answer `i` has the seed `i` beyond it.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Cancels the request: its unfinished answers end as cancelled before the next step.
    pub fn cancel(&self) {
        let _ = self.commands.send(Command::Cancel(self.id));
    }

    /// The next event; waits for it.
    pub fn recv(&mut self) -> Option<Event> {
        if self.open.is_empty() {
            return None;
        }
        let event = self.events.recv_blocking().ok();
        self.take_in(event)
    }

    /// Takes an event in; none when the engine has stopped: then each open answer ends here.
    fn take_in(&mut self, event: Option<Event>) -> Option<Event> {
        let event = match event {
            Some(event) => event,
            None => {
                let reason = FinishReason::Failed("the engine has stopped".to_owned());
                Event {
                    choice: *self.open.first()?,
                    token: None,
                    text: String::new(),
                    logprobs: None,
                    prompt_logprobs: None,
                    finish: Some(Finish { reason, figures: Figures::default() }),
                }
            }
        };
        if event.finish.is_some() {
            self.open.retain(|choice| *choice != event.choice);
        }
        Some(event)
    }
}

impl IntoIterator for Handle {
    type Item = Event;
    type IntoIter = Events;

    fn into_iter(self) -> Events {
        Events(self)
    }
}

/// The events of a request as they come; waits for each.
#[derive(Debug)]
pub struct Events(Handle);

impl Iterator for Events {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        self.0.recv()
    }
}

impl Stream for Handle {
    type Item = Event;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Event>> {
        if self.open.is_empty() {
            return Poll::Ready(None);
        }
        let event = ready!(self.events.as_mut().poll_next(context));
        Poll::Ready(self.take_in(event))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if !self.open.is_empty() {
            self.cancel();
        }
    }
}
