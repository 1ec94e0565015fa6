//! The queue: who waits, in the order of service.
//!
//! Priority comes first, then the policy's key, then who came first. A key is given when a prompt
//! is submitted, is that of the cheapest once it has waited long enough, and goes when it is
//! served, so that what was pushed out later stands before all keys:
//!
//! | policy | key |
//! |---|---|
//! | `fcfs`, `priority` | none |
//! | `sjf` | seconds that the prompt takes to compute, less what is kept of it |
//! | `fair` | virtual time at which the program's share reaches it; see [`super::fairness`] |

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::time::Duration;

use super::sequence::SequenceId;

/// Place in the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    /// Lower is served first.
    pub priority: i32,
    key: u64,
    /// Whose it is.
    pub id: SequenceId,
}

/// What a sequence is ranked by besides its priority.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Ticket {
    /// Lower is served first; 0 stands before all policies' keys.
    key: u64,
    /// Under `sjf` with ageing, the key and what ageing adds for coming late: of two, the lower has
    /// the lower aged cost at any time.
    aged: Option<u64>,
    /// Its prompt is one of those that places are kept for.
    pub is_long: bool,
}

impl Ticket {
    /// A ticket by the policy's key; see [`key_of`].
    pub fn by_key(key: u64, is_long: bool) -> Ticket {
        Ticket { key, aged: None, is_long }
    }

    /// A ticket by a cost of `cost` seconds, for one that comes at `now` and whose cost falls by
    /// `ageing` seconds for each second it waits.
    pub fn by_cost(cost: f64, ageing: f64, now: Duration, is_long: bool) -> Ticket {
        let aged = (ageing > 0.0).then(|| key_of(cost + ageing * now.as_secs_f64()));
        Ticket { key: key_of(cost), aged, is_long }
    }

    /// The ticket once it has waited long enough, while `cheapest` is the lowest key: it stands
    /// among those of that key, behind those that came before it, or it would pass all of them
    /// where more comes than is served. It goes on to age.
    pub fn promoted_to(self, cheapest: u64) -> Ticket {
        Ticket { key: cheapest, ..self }
    }

    /// Before all keys.
    pub fn first(self) -> Ticket {
        Ticket { key: 0, aged: None, ..self }
    }

    /// The place that it gives.
    pub fn rank(self, priority: i32, id: SequenceId) -> Rank {
        Rank { priority, key: self.key, id }
    }
}

/// A policy's number as a key: never 0, in billionths.
pub(super) fn key_of(number: f64) -> u64 {
    // The cast saturates.
    ((number * 1e9) as u64).max(1)
}

/// Those who wait.
#[derive(Debug, Default)]
pub(super) struct Queue {
    ranks: BTreeSet<Rank>,
    ageing: Ageing,
    /// Of those, the long ones.
    long: BTreeSet<Rank>,
}

impl Queue {
    pub fn insert(&mut self, rank: Rank, ticket: Ticket) {
        self.ranks.insert(rank);
        self.long.extend(ticket.is_long.then_some(rank));
        if let Some(aged) = ticket.aged {
            self.ageing.insert(aged, rank);
        }
    }

    pub fn remove(&mut self, rank: Rank, ticket: Ticket) {
        self.ranks.remove(&rank);
        self.long.remove(&rank);
        if let Some(aged) = ticket.aged {
            self.ageing.remove(aged, rank);
        }
    }

    /// Who is served first.
    pub fn first(&self) -> Option<Rank> {
        self.ranks.first().copied()
    }

    /// Who is served next behind `after`.
    pub fn next(&self, after: Bound<Rank>) -> Option<Rank> {
        self.ranks.range((after, Bound::Unbounded)).next().copied()
    }

    /// The long one that is served next behind `after`.
    pub fn next_long(&self, after: Bound<Rank>) -> Option<Rank> {
        self.long.range((after, Bound::Unbounded)).next().copied()
    }

    pub fn len(&self) -> usize {
        self.ranks.len()
    }

    pub fn iter(&self) -> impl Iterator<Item = &Rank> {
        self.ranks.iter()
    }

    /// One whose key is above the cheapest one's, and whose cost, aged by `ageing` seconds a second
    /// until `now`, is no more than that key, which does not age: it is to be promoted to it
    /// (SEEDS.md C53). An order by aged costs alone would never change among those that came
    /// together, since all age alike (C55).
    pub fn to_promote(&self, ageing: f64, now: Duration) -> Option<(Rank, u64)> {
        // Who ages has no priority, and who was served no key.
        let least = Rank { priority: 0, key: 1, id: SequenceId(0) };
        let cheapest = self.next(Bound::Included(least))?.key;
        let limit = cheapest.saturating_add(key_of(ageing * now.as_secs_f64()));
        let (aged, rank) = self.ageing.first_but(cheapest)?;
        (aged <= limit).then_some((rank, cheapest))
    }
}

/// Those who age.
#[derive(Debug, Default)]
struct Ageing {
    /// By their keys, those of one in the order of their aged costs.
    keys: BTreeMap<u64, BTreeSet<(u64, Rank)>>,
    /// The first of each key.
    firsts: BTreeSet<(u64, Rank)>,
}

impl Ageing {
    fn insert(&mut self, aged: u64, rank: Rank) {
        self.change(rank.key, |alike| alike.insert((aged, rank)));
    }

    fn remove(&mut self, aged: u64, rank: Rank) {
        self.change(rank.key, |alike| alike.remove(&(aged, rank)));
    }

    fn change(&mut self, key: u64, change: impl FnOnce(&mut BTreeSet<(u64, Rank)>) -> bool) {
        let alike = self.keys.entry(key).or_default();
        if let Some(first) = alike.first() {
            self.firsts.remove(first);
        }
        change(alike);
        match alike.first() {
            Some(first) => {
                self.firsts.insert(*first);
            }
            None => {
                self.keys.remove(&key);
            }
        }
    }

    /// The lowest aged cost of those of another key.
    fn first_but(&self, key: u64) -> Option<(u64, Rank)> {
        self.firsts.iter().find(|(_, rank)| rank.key != key).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enter(queue: &mut Queue, id: u64, ticket: Ticket) -> Rank {
        let rank = ticket.rank(0, SequenceId(id));
        queue.insert(rank, ticket);
        rank
    }

    /// The mix of SEEDS.md 3.4: costs of 294.1 and 14.2 ms, all there at once.
    #[test]
    fn a_long_prompt_is_promoted_when_its_aged_cost_is_that_of_a_short_one() {
        let (long, short, ageing) = (0.2941, 0.01422, 2.646);
        let mut queue = Queue::default();
        let by_cost = |cost| Ticket::by_cost(cost, ageing, Duration::ZERO, false);
        let first = enter(&mut queue, 0, by_cost(long));
        for id in 1..=20 {
            enter(&mut queue, id, by_cost(short));
        }
        let moment = (long - short) / ageing;
        let at =
            |queue: &Queue, seconds| queue.to_promote(ageing, Duration::from_secs_f64(seconds));
        assert_eq!(at(&queue, moment - 1e-4), None);
        let (promoted, cheapest) = at(&queue, moment + 1e-4).expect("it has waited");
        assert_eq!((promoted, cheapest), (first, key_of(short)));
        assert_eq!(queue.first().map(|rank| rank.id), Some(SequenceId(1)));
        queue.remove(first, by_cost(long));
        enter(&mut queue, 0, by_cost(long).promoted_to(cheapest));
        assert_eq!(queue.first().map(|rank| rank.id), Some(SequenceId(0)));
        assert_eq!(at(&queue, moment + 1.0), None);
        // What is cheaper yet passes it until it has waited for that as well.
        for id in 1..=20 {
            queue.remove(by_cost(short).rank(0, SequenceId(id)), by_cost(short));
        }
        enter(&mut queue, 21, by_cost(short / 2.0));
        assert_eq!(queue.first().map(|rank| rank.id), Some(SequenceId(21)));
        let later = moment + short / 2.0 / ageing;
        assert_eq!(at(&queue, later - 1e-4), None);
        let (promoted, cheapest) = at(&queue, later + 1e-4).expect("it has waited");
        assert_eq!((promoted.id, cheapest), (SequenceId(0), key_of(short / 2.0)));
    }

    /// However little more it costs than what comes again and again.
    #[test]
    fn a_prompt_that_costs_little_more_is_promoted_as_soon_as_it_has_waited_for_that() {
        let mut queue = Queue::default();
        let by_cost = |cost, at| Ticket::by_cost(cost, 0.5, Duration::from_secs(at), false);
        let dearer = enter(&mut queue, 0, by_cost(1.05, 2));
        for id in 1..=20 {
            enter(&mut queue, id, by_cost(1.0, id));
        }
        // 0.05 s more, half a second each second, from the second second on.
        let at = |millis| queue.to_promote(0.5, Duration::from_millis(millis)).map(|(id, _)| id);
        assert_eq!((at(2_099), at(2_101)), (None, Some(dearer)));
    }

    #[test]
    fn who_leaves_takes_all_that_was_noted_of_it() {
        let mut queue = Queue::default();
        let ticket = Ticket::by_cost(1.0, 0.5, Duration::from_secs(3), true);
        let rank = enter(&mut queue, 7, ticket);
        assert_eq!(queue.next_long(Bound::Unbounded), Some(rank));
        queue.remove(rank, ticket);
        queue.remove(rank, ticket);
        assert!(queue.long.is_empty() && queue.len() == 0);
        assert!(queue.ageing.keys.is_empty() && queue.ageing.firsts.is_empty());
    }
}
