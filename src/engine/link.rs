//! A link between the tiers that is watched, and that may be slower than the machine's.

use std::hint::spin_loop;
use std::thread;
use std::time::Duration;

use super::executor::{Executor, PlannedDraw};
use super::lower::Job;
use crate::models::Batch;
use crate::scheduler::{Direction, StepReport, TransferId};

/// What is left of a wait when sleeping ends and spinning begins: the system wakes us late.
const SPIN: Duration = Duration::from_micros(200);

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
    /// When the link of each direction is free again.
    free_at: [Duration; 2],
    /// Transfers under way, and when each arrives.
    due: Vec<(Duration, TransferId)>,
    moved: [u64; 2],
    busy: Duration,
}

impl<E: Executor> LinkExecutor<E> {
    /// `inner` behind a link of so many bytes a second each way; as fast as it copies without.
    pub fn new(inner: E, bytes_per_second: Option<f64>) -> LinkExecutor<E> {
        LinkExecutor {
            inner,
            bytes_per_second,
            free_at: [Duration::ZERO; 2],
            due: Vec::new(),
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
            let way = match job.direction {
                Direction::Out => 0,
                Direction::In => 1,
            };
            self.moved[way] += job.bytes() as u64;
            if let Some(rate) = self.bytes_per_second {
                let time = Duration::from_secs_f64(job.bytes() as f64 / rate);
                let arrival = self.free_at[way].max(start).saturating_add(time);
                self.free_at[way] = arrival;
                self.due.push((arrival, job.id));
            }
        }
    }

    /// Transfers that have arrived by now.
    fn arrived(&mut self) -> Vec<TransferId> {
        let now = self.inner.now();
        let (arrived, due) = self.due.drain(..).partition(|(arrival, _)| *arrival <= now);
        self.due = due;
        let arrived: Vec<(Duration, TransferId)> = arrived;
        arrived.into_iter().map(|(_, id)| id).collect()
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
            self.due.retain(|(_, id)| !report.failed.contains(id));
            let is_idle = batch.rows() == 0 && batch.logits.is_empty();
            if let Some(first) = self.due.iter().map(|due| due.0).min().filter(|_| is_idle) {
                self.wait_until(first);
            }
            report.finished = self.arrived();
        }
        report.duration = self.inner.now().saturating_sub(start);
        self.busy += report.duration;
        report
    }

    fn now(&self) -> Duration {
        self.inner.now()
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
