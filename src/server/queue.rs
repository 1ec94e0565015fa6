//! Places among the answers that wait or run, and who gives one up to a request of a better
//! priority.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use crate::engine::{Backlog, RequestId};

/// The answers that wait or run.
#[derive(Debug, Default)]
pub struct Queue {
    answers: AtomicUsize,
    /// Prompt tokens of requests that gave their places up and are not gone yet.
    leaving: AtomicUsize,
    waiting: Mutex<Vec<Waiting>>,
}

/// A request that has not begun: what the engine calls its prompts, and what they add to the
/// tokens that wait.
#[derive(Debug)]
struct Waiting {
    prompts: Vec<(RequestId, Backlog)>,
    priority: i32,
    answers: usize,
    evicted: Evicted,
}

impl Waiting {
    fn first(&self) -> RequestId {
        self.prompts[0].0
    }

    fn tokens(&self) -> usize {
        self.prompts.iter().map(|(_, backlog)| backlog.tokens()).sum()
    }
}

/// The prompt tokens with which a request gave its places up, once it did.
type Evicted = Arc<OnceLock<usize>>;

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
        Place {
            queue: Arc::clone(self),
            answers,
            since: Instant::now(),
            waits_as: None,
            is_waiting: AtomicBool::new(false),
            evicted: Evicted::default(),
        }
    }

    /// Takes the places of those that wait with a higher number than `priority`, the highest
    /// number first and of one number the latest, until nothing is lacking; returns whose they
    /// were. None, and nothing is taken, where that is not enough.
    pub fn evict(&self, priority: i32, lack: Lack) -> Option<Vec<RequestId>> {
        let mut waiting = self.waiting();
        waiting.sort_by_key(|waiting| (waiting.priority, waiting.first()));
        let (mut answers, mut tokens, mut left) = (0, 0, waiting.len());
        while answers < lack.answers || tokens < lack.tokens {
            left = left.checked_sub(1).filter(|last| waiting[*last].priority > priority)?;
            answers += waiting[left].answers;
            tokens += waiting[left].tokens();
        }
        self.answers.fetch_sub(answers, Ordering::Relaxed);
        let evicted = waiting.drain(left..).flat_map(|waiting| {
            let tokens = waiting.tokens();
            self.leaving.fetch_add(tokens, Ordering::Relaxed);
            waiting.evicted.set(tokens).expect("who is in the list was not evicted");
            waiting.prompts.into_iter().map(|(id, _)| id)
        });
        Some(evicted.collect())
    }

    fn waiting(&self) -> MutexGuard<'_, Vec<Waiting>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Places of the answers of one request, of all its prompts; dropping it gives them up.
#[derive(Debug)]
pub struct Place {
    queue: Arc<Queue>,
    answers: usize,
    since: Instant,
    /// Its name among those that wait, where it is one of them.
    waits_as: Option<RequestId>,
    is_waiting: AtomicBool,
    evicted: Evicted,
}

impl Place {
    /// When the request came.
    pub fn since(&self) -> Instant {
        self.since
    }

    /// The request waits, with these prompts: until one of them has begun, a request of a lower
    /// number may take its places.
    pub fn wait(&mut self, prompts: Vec<(RequestId, Backlog)>, priority: i32) {
        let (answers, evicted) = (self.answers, Arc::clone(&self.evicted));
        self.waits_as = prompts.first().map(|(id, _)| *id);
        self.is_waiting = AtomicBool::new(self.waits_as.is_some());
        if self.waits_as.is_some() {
            self.queue.waiting().push(Waiting { prompts, priority, answers, evicted });
        }
    }

    /// The request has begun: nobody takes its places any more.
    pub fn begin(&self) {
        if self.is_waiting.swap(false, Ordering::Relaxed) {
            self.queue.waiting().retain(|waiting| Some(waiting.first()) != self.waits_as);
        }
    }

    /// Whether another has taken its places.
    pub fn is_evicted(&self) -> bool {
        self.evicted.get().is_some()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // Nobody evicts what is not in the list, so what is read after it stays.
        self.begin();
        match self.evicted.get() {
            Some(tokens) => self.queue.leaving.fetch_sub(*tokens, Ordering::Relaxed),
            None => self.queue.answers.fetch_sub(self.answers, Ordering::Relaxed),
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
