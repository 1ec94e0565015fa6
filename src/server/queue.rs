//! Places among the answers that wait or run, and who gives one up to a request of a better
//! priority.
//!
//! A request that waits stands in the list of those that do, from [`Place::wait`] until it has
//! begun, is evicted or is dropped. Only who stands there can be evicted, and under the lock of the
//! list: so it either begins or is evicted, never both. `answers` counts the places of all that
//! were not evicted. `leaving` counts the prompt tokens of those that were, from their eviction
//! until their [`Place`] is dropped: so long the engine's own figure may have them still.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use crate::engine::{Backlog, RequestId};

/// The answers that wait or run.
#[derive(Debug, Default)]
pub struct Queue {
    answers: AtomicUsize,
    /// Prompt tokens of requests that gave their places up and are not gone yet.
    leaving: AtomicUsize,
    list: Mutex<Vec<Waiting>>,
}

/// A request that has not begun: what the engine calls its prompts, and what they add to the
/// tokens that wait.
#[derive(Debug)]
struct Waiting {
    prompts: Vec<(RequestId, Backlog)>,
    priority: i32,
    answers: usize,
    state: Arc<State>,
}

impl Waiting {
    fn first(&self) -> RequestId {
        self.prompts[0].0
    }

    fn tokens(&self) -> usize {
        self.prompts.iter().map(|(_, backlog)| backlog.tokens()).sum()
    }
}

/// What has become of a request that waited; nothing while it does.
type State = OnceLock<Fate>;

/// How the wait of a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// It has begun, or never waited: its places stay its own.
    Begun,
    /// It gave its places up, with so many prompt tokens.
    Evicted(usize),
}

/// What a request lacks to be let in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Lack {
    /// Places of answers.
    pub answers: usize,
    /// Prompt tokens that wait.
    pub tokens: usize,
}

impl Queue {
    /// Answers that wait or run.
    pub fn answers(&self) -> usize {
        self.answers.load(Ordering::Relaxed)
    }

    /// Of `backlog` prompt tokens, as the engine told of them, those that stay: it counts a request
    /// that gave its places up until its next step has ended.
    pub fn staying(&self, backlog: usize) -> usize {
        backlog.saturating_sub(self.leaving.load(Ordering::Relaxed))
    }

    /// Takes places for the answers of a request.
    pub fn take(self: &Arc<Queue>, answers: usize) -> Place {
        self.answers.fetch_add(answers, Ordering::Relaxed);
        Place { queue: Arc::clone(self), answers, since: Instant::now(), state: Arc::default() }
    }

    /// Takes the places of those that wait with a higher number than `priority`, the highest
    /// number first and of one number the latest, until nothing is lacking; returns whose they
    /// were. None, and nothing is taken, where that is not enough.
    pub fn evict(&self, priority: i32, lack: Lack) -> Option<Vec<RequestId>> {
        let mut list = self.list();
        list.sort_by_key(|waiting| (waiting.priority, waiting.first()));
        let (mut answers, mut tokens, mut left) = (0, 0, list.len());
        while answers < lack.answers || tokens < lack.tokens {
            left = left.checked_sub(1).filter(|last| list[*last].priority > priority)?;
            answers += list[left].answers;
            tokens += list[left].tokens();
        }
        self.answers.fetch_sub(answers, Ordering::Relaxed);
        let mut evicted = Vec::new();
        for waiting in list.drain(left..) {
            let tokens = waiting.tokens();
            self.leaving.fetch_add(tokens, Ordering::Relaxed);
            waiting.state.set(Fate::Evicted(tokens)).expect("who is in the list still waits");
            evicted.extend(waiting.prompts.iter().map(|(id, _)| *id));
        }
        Some(evicted)
    }

    fn list(&self) -> MutexGuard<'_, Vec<Waiting>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Places of the answers of one request, of all its prompts; dropping it gives them up.
#[derive(Debug)]
pub struct Place {
    queue: Arc<Queue>,
    answers: usize,
    since: Instant,
    state: Arc<State>,
}

impl Place {
    /// When the request came.
    pub fn since(&self) -> Instant {
        self.since
    }

    /// The request waits, with these prompts: until one of them has begun, a request of a lower
    /// number may take its places.
    pub fn wait(&mut self, prompts: Vec<(RequestId, Backlog)>, priority: i32) {
        if !prompts.is_empty() {
            let (answers, state) = (self.answers, Arc::clone(&self.state));
            self.queue.list().push(Waiting { prompts, priority, answers, state });
        }
    }

    /// The request has begun: nobody takes its places any more. Costs nothing when it had.
    pub fn begin(&self) {
        if self.state.get().is_none() {
            let mut list = self.queue.list();
            list.retain(|waiting| !Arc::ptr_eq(&waiting.state, &self.state));
            // It may have been evicted before the list was locked.
            let _ = self.state.set(Fate::Begun);
        }
    }

    /// Whether another has taken its places.
    pub fn is_evicted(&self) -> bool {
        matches!(self.state.get(), Some(Fate::Evicted(_)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.begin();
        match self.state.get() {
            Some(Fate::Evicted(tokens)) => self.queue.leaving.fetch_sub(*tokens, Ordering::Relaxed),
            _ => self.queue.answers.fetch_sub(self.answers, Ordering::Relaxed),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_of_the_highest_number_gives_its_place_and_none_of_a_lower_or_equal_one() {
        let queue = Arc::new(Queue::default());
        let places: Vec<Place> = [(1, 5), (2, 9), (3, 9), (4, 0)]
            .map(|(id, priority)| {
                let mut place = queue.take(1);
                place.wait(vec![(RequestId(id), Backlog::new(100))], priority);
                place
            })
            .into();
        let one = Lack { answers: 1, tokens: 0 };
        assert_eq!(queue.evict(9, one), None);
        assert_eq!(queue.evict(2, one), Some(vec![RequestId(3)]));
        assert!(places[2].is_evicted() && !places[1].is_evicted());
        assert_eq!(queue.answers(), 3);
        // One that has begun stays.
        places[1].begin();
        assert_eq!(queue.evict(0, Lack { answers: 0, tokens: 101 }), None, "not enough");
        assert_eq!(queue.evict(0, Lack { answers: 1, tokens: 100 }), Some(vec![RequestId(1)]));
        drop(places);
        assert_eq!(queue.answers(), 0);
    }

    /// Between two steps the engine's figure still has the tokens of who was evicted.
    #[test]
    fn evictions_within_one_step_take_no_more_than_each_lacks() {
        let queue = Arc::new(Queue::default());
        let mut places: Vec<Place> = [1, 2, 3]
            .map(|id| {
                let mut place = queue.take(1);
                place.wait(vec![(RequestId(id), Backlog::new(100))], 9);
                place
            })
            .into();
        let stale = 300;
        let lack = |queue: &Queue, there: usize| Lack {
            answers: 0,
            tokens: queue.staying(stale) + there + 100 - 300,
        };
        assert_eq!(queue.evict(0, lack(&queue, 0)), Some(vec![RequestId(3)]));
        assert_eq!(queue.evict(0, lack(&queue, 100)), Some(vec![RequestId(2)]));
        assert_eq!(queue.staying(stale), 100);
        places.truncate(1);
        assert_eq!(queue.staying(100), 100, "who is gone is counted by nobody");
    }

    #[test]
    fn a_request_of_several_prompts_gives_all_or_none() {
        let queue = Arc::new(Queue::default());
        let of = |ids: [u64; 2]| ids.map(|id| (RequestId(id), Backlog::new(10))).into();
        let (mut place, mut other) = (queue.take(2), queue.take(2));
        place.wait(of([1, 2]), 5);
        other.wait(of([3, 4]), 6);
        other.begin();
        let both = Lack { answers: 1, tokens: 20 };
        assert_eq!(queue.evict(0, both), Some(vec![RequestId(1), RequestId(2)]));
        assert_eq!(queue.answers(), 2);
        drop(place);
        assert_eq!((queue.answers(), queue.staying(7)), (2, 7));
        assert_eq!(queue.evict(0, both), None, "it has begun");
    }
}
