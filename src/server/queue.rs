//! Places among the answers that wait or run, and who gives one up to a request of a better
//! priority.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::engine::RequestId;

/// The answers that wait or run.
#[derive(Debug, Default)]
pub struct Queue {
    answers: AtomicUsize,
    waiting: Mutex<Vec<Waiting>>,
}

/// A request that has not begun.
#[derive(Debug)]
struct Waiting {
    id: RequestId,
    priority: i32,
    prompt_tokens: usize,
    answers: usize,
    is_evicted: Arc<AtomicBool>,
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

    /// Takes places for the answers of a request.
    pub fn take(self: &Arc<Queue>, answers: usize) -> Place {
        self.answers.fetch_add(answers, Ordering::Relaxed);
        Place {
            queue: Arc::clone(self),
            answers,
            since: Instant::now(),
            waits_as: None,
            is_evicted: Arc::default(),
        }
    }

    /// Takes the places of those that wait with a higher number than `priority`, the highest
    /// number first and of one number the latest, until nothing is lacking; returns whose they
    /// were. None, and nothing is taken, where that is not enough.
    pub fn evict(&self, priority: i32, lack: Lack) -> Option<Vec<RequestId>> {
        let mut waiting = self.waiting();
        waiting.sort_by_key(|waiting| (waiting.priority, waiting.id));
        let (mut answers, mut tokens, mut left) = (0, 0, waiting.len());
        while answers < lack.answers || tokens < lack.tokens {
            left = left.checked_sub(1).filter(|last| waiting[*last].priority > priority)?;
            answers += waiting[left].answers;
            tokens += waiting[left].prompt_tokens;
        }
        self.answers.fetch_sub(answers, Ordering::Relaxed);
        let evicted = waiting.drain(left..).map(|waiting| {
            waiting.is_evicted.store(true, Ordering::Relaxed);
            waiting.id
        });
        Some(evicted.collect())
    }

    fn waiting(&self) -> MutexGuard<'_, Vec<Waiting>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Places of the answers of one request; dropping it gives them up.
#[derive(Debug)]
pub struct Place {
    queue: Arc<Queue>,
    answers: usize,
    since: Instant,
    /// Its name among those that wait.
    waits_as: Option<RequestId>,
    is_evicted: Arc<AtomicBool>,
}

impl Place {
    /// When the request came.
    pub fn since(&self) -> Instant {
        self.since
    }

    /// The request waits: until it has begun, one of a lower number may take its places.
    pub fn wait(&mut self, id: RequestId, priority: i32, prompt_tokens: usize) {
        let (answers, is_evicted) = (self.answers, Arc::clone(&self.is_evicted));
        self.waits_as = Some(id);
        self.queue.waiting().push(Waiting { id, priority, prompt_tokens, answers, is_evicted });
    }

    /// The request has begun: nobody takes its places any more.
    pub fn begin(&mut self) {
        if let Some(id) = self.waits_as.take() {
            self.queue.waiting().retain(|waiting| waiting.id != id);
        }
    }

    /// Whether another has taken its places.
    pub fn is_evicted(&self) -> bool {
        self.is_evicted.load(Ordering::Relaxed)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // Nobody evicts what is not in the list, so what is read after it stays.
        self.begin();
        if !self.is_evicted() {
            self.queue.answers.fetch_sub(self.answers, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_of_the_highest_number_gives_its_place_and_none_of_a_lower_or_equal_one() {
        let queue = Arc::new(Queue::default());
        let mut places: Vec<Place> = [(1, 5), (2, 9), (3, 9), (4, 0)]
            .map(|(id, priority)| {
                let mut place = queue.take(1);
                place.wait(RequestId(id), priority, 100);
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
}
