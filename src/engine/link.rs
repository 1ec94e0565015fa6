//! The link between the tiers as a matter of time: a queue each way. [`LinkExecutor`] watches a
//! real one and may slow it; a modelled executor has no other.

use std::hint::spin_loop;
use std::thread;
use std::time::Duration;

use super::executor::{Executor, PlannedDraw};
use super::lower::Job;
use crate::models::Batch;
use crate::scheduler::{Direction, StepReport, TransferId};

/// What is left of a wait when sleeping ends and spinning begins: the system wakes us late.
const SPIN: Duration = Duration::from_micros(200);

/// Transfers under way over a link whose ways do not hinder each other, and when each arrives.
#[derive(Debug, Default)]
pub struct Link {
    /// When each way is free again: out, in.
    free_at: [Duration; 2],
    due: Vec<(Duration, TransferId)>,
}

impl Link {
    /// Carries a transfer that takes so much `time`, behind those of its direction, from `now` on
    /// at the earliest; returns when it arrives.
    pub fn carry(
        &mut self,
        id: TransferId,
        direction: Direction,
        time: Duration,
        now: Duration,
    ) -> Duration {
        let free_at = &mut self.free_at[way(direction)];
        *free_at = (*free_at).max(now).saturating_add(time);
        self.due.push((*free_at, id));
        *free_at
    }

    /// When the first of those under way arrives.
    pub fn first_arrival(&self) -> Option<Duration> {
        self.due.iter().map(|due| due.0).min()
    }

    /// Those that have arrived by `now`, in the order in which they were sent.
    pub fn arrived(&mut self, now: Duration) -> impl Iterator<Item = TransferId> {
        self.due.extract_if(.., move |due| due.0 <= now).map(|due| due.1)
    }

    /// Those that failed do not arrive.
    fn forget(&mut self, failed: &[TransferId]) {
        self.due.retain(|(_, id)| !failed.contains(id));
    }
}

/// The number of a way in lists: out, in.
pub fn way(direction: Direction) -> usize {
    match direction {
        Direction::Out => 0,
        Direction::In => 1,
    }
}

/// An executor whose transfers are counted and, where a rate is set, take as long as they would
/// over a link of that rate.
///
/// The copies themselves are made at once. A paced transfer is reported when the link would have
/// carried its bytes behind those of the same direction before it; each direction has the whole
/// rate. Steps go on meanwhile: only one that computes nothing waits, for the transfer that arrives
/// first. Slots that are packed on their way are neither counted nor paced.
#[derive(Debug)]
pub struct LinkExecutor<E> {
    inner: E,
    bytes_per_second: Option<f64>,
    link: Link,
    moved: [u64; 2],
    busy: Duration,
}

impl<E: Executor> LinkExecutor<E> {
    /// `inner` behind a link of so many bytes a second each way; as fast as it copies without.
    pub fn new(inner: E, bytes_per_second: Option<f64>) -> LinkExecutor<E> {
        LinkExecutor {
            inner,
            bytes_per_second,
            link: Link::default(),
            moved: [0; 2],
            busy: Duration::ZERO,
        }
    }

    /// The executor behind the link.
    pub fn inner_mut(&mut self) -> &mut E {
        &mut self.inner
    }

    /// Bytes that were copied to the host, and back, since this was asked last.
    pub fn take_moved(&mut self) -> [u64; 2] {
        std::mem::take(&mut self.moved)
    }

    /// Time that was spent in steps of the executor, since this was asked last: what a step takes
    /// beyond is planning, lowering and events.
    pub fn take_busy(&mut self) -> Duration {
        std::mem::take(&mut self.busy)
    }

    /// Notes what the link has to carry, from `start` on.
    fn load(&mut self, jobs: &[Job], start: Duration) {
        for job in jobs {
            self.moved[way(job.direction)] += job.bytes() as u64;
            if let Some(rate) = self.bytes_per_second {
                let time = Duration::from_secs_f64(job.bytes() as f64 / rate);
                self.link.carry(job.id, job.direction, time, start);
            }
        }
    }

    fn wait_until(&self, moment: Duration) {
        while let Some(left) = moment.checked_sub(self.inner.now()).filter(|left| !left.is_zero()) {
            match left.checked_sub(SPIN) {
                Some(sleep) => thread::sleep(sleep),
                None => spin_loop(),
            }
        }
    }
}

impl<E: Executor> Executor for LinkExecutor<E> {
    fn step(&mut self, batch: &Batch, jobs: Vec<Job>, draws: &[PlannedDraw<'_>]) -> StepReport {
        let start = self.inner.now();
        self.load(&jobs, start);
        let mut report = self.inner.step(batch, jobs, draws);
        if self.bytes_per_second.is_some() {
            self.link.forget(&report.failed);
            let is_idle = batch.rows() == 0 && batch.logits.is_empty();
            if let Some(first) = self.link.first_arrival().filter(|_| is_idle) {
                self.wait_until(first);
            }
            report.finished = self.link.arrived(self.inner.now()).collect();
        }
        report.duration = self.inner.now().saturating_sub(start);
        self.busy += report.duration;
        report
    }

    fn now(&self) -> Duration {
        self.inner.now()
    }

    fn fault(&self) -> Option<&str> {
        self.inner.fault()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::lower::Piece;

    /// Finishes all it is given at once; a millisecond passes in each step, and a quarter in each
    /// look at the clock.
    #[derive(Debug, Default)]
    struct Instantly {
        steps: u32,
        looks: std::cell::Cell<u32>,
    }

    impl Executor for Instantly {
        fn step(&mut self, _: &Batch, jobs: Vec<Job>, _: &[PlannedDraw<'_>]) -> StepReport {
            self.steps += 1;
            let finished = jobs.iter().map(|job| job.id).collect();
            StepReport { finished, ..StepReport::default() }
        }

        fn now(&self) -> Duration {
            self.looks.set(self.looks.get() + 1);
            Duration::from_millis(self.steps.into()) + Duration::from_micros(250) * self.looks.get()
        }
    }

    fn job(id: u64, direction: Direction, bytes: usize) -> Job {
        let pieces = vec![Piece { source: 0, target: 0, bytes }];
        Job { id: TransferId(id), direction, pieces, packed: None }
    }

    fn working() -> Batch {
        Batch { tokens: vec![0], ..Batch::default() }
    }

    #[test]
    fn without_a_rate_transfers_are_counted_and_arrive_at_once() {
        let mut link = LinkExecutor::new(Instantly::default(), None);
        let jobs = vec![job(1, Direction::Out, 3), job(2, Direction::In, 5)];
        let report = link.step(&working(), jobs, &[]);
        assert_eq!(report.finished, [TransferId(1), TransferId(2)]);
        assert_eq!((link.take_moved(), link.take_moved()), ([3, 5], [0, 0]));
    }

    #[test]
    fn a_paced_transfer_arrives_when_the_link_has_carried_it_and_work_goes_on() {
        // 10 bytes a millisecond: 100 bytes take 10 ms, each way on its own.
        let mut link = LinkExecutor::new(Instantly::default(), Some(10e3));
        let jobs = vec![
            job(1, Direction::Out, 100),
            job(2, Direction::Out, 100),
            job(3, Direction::In, 100),
        ];
        let mut arrivals = Vec::new();
        let mut report = link.step(&working(), jobs, &[]);
        loop {
            let millis = link.now().as_millis();
            arrivals.extend(report.finished.iter().map(|id| (id.0, millis)));
            if arrivals.len() == 3 {
                break;
            }
            report = link.step(&working(), Vec::new(), &[]);
        }
        let [one, three, two] = arrivals[..] else { panic!("three transfers") };
        assert_eq!((one.0, three.0, two.0), (1, 3, 2));
        assert!((10..14).contains(&one.1) && (20..24).contains(&two.1), "{arrivals:?}");
    }

    #[test]
    fn a_step_that_computes_nothing_waits_for_the_first_arrival() {
        let mut link = LinkExecutor::new(Instantly::default(), Some(10e3));
        let jobs = vec![job(1, Direction::In, 70), job(2, Direction::Out, 500)];
        let report = link.step(&Batch::default(), jobs, &[]);
        assert_eq!(report.finished, [TransferId(1)]);
        assert!(report.duration >= Duration::from_millis(7));
    }
}
