//! Rates over short bursts of work, of which those count that nothing disturbed.
//!
//! On a machine with other work a rate over seconds tells of that work too. A burst is about as
//! long as a turn on a core; one in which every thread was on its core from start to end shows what
//! the machine gives.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kernels::clock::thread_cpu;

/// Share of a burst's wall time that each thread must have had its core.
const UNDISTURBED: f64 = 0.97;

/// Batches of bursts that are tried.
const MOST_BATCHES: usize = 10;

/// What bursts gave.
pub struct Bursts {
    /// Amount per nanosecond of all threads together in each undisturbed burst.
    pub rates: Vec<f64>,
    /// Bursts in all.
    pub tried: usize,
}

/// One burst of one thread.
struct Burst {
    amount: f64,
    wall: Duration,
    cpu: Duration,
}

/// Runs bursts of `work(part, burst)`, one thread for each of `parts`, until `wanted` of them were
/// undisturbed or ten times as many were tried; `work` returns the amount it did.
pub fn bursts<P: Send>(
    mut parts: Vec<P>,
    wanted: usize,
    work: impl Fn(&mut P, usize) -> f64 + Sync,
) -> Bursts {
    let mut all = Bursts { rates: Vec::new(), tried: 0 };
    for batch in 0..MOST_BATCHES {
        if all.rates.len() >= wanted {
            break;
        }
        let threads = run_batch(&mut parts, batch * wanted..(batch + 1) * wanted, &work);
        for burst in 0..wanted {
            all.rates.extend(rate(threads.iter().map(|bursts| &bursts[burst])));
        }
        all.tried += wanted;
    }
    all
}

/// The bursts of each thread; all threads start a burst together.
fn run_batch<P: Send>(
    parts: &mut [P],
    numbers: std::ops::Range<usize>,
    work: &(impl Fn(&mut P, usize) -> f64 + Sync),
) -> Vec<Vec<Burst>> {
    let (threads, arrived) = (parts.len(), AtomicUsize::new(0));
    let one = |part: &mut P| {
        let mut bursts = Vec::with_capacity(numbers.len());
        for (turn, number) in numbers.clone().enumerate() {
            arrived.fetch_add(1, Ordering::AcqRel);
            while arrived.load(Ordering::Acquire) < threads * (turn + 1) {
                thread::yield_now();
            }
            let (start, cpu) = (Instant::now(), thread_cpu());
            let amount = work(part, number);
            let cpu = thread_cpu() - cpu;
            bursts.push(Burst { amount, wall: start.elapsed(), cpu });
        }
        bursts
    };
    thread::scope(|scope| {
        let (first, rest) = parts.split_first_mut().expect("a burst has a thread");
        let others: Vec<_> = rest.iter_mut().map(|part| scope.spawn(|| one(part))).collect();
        let mut all = vec![one(first)];
        all.extend(others.into_iter().map(|other| other.join().expect("a burst does not panic")));
        all
    })
}

/// The rate of a burst of several threads; none when it was disturbed.
fn rate<'a>(threads: impl Iterator<Item = &'a Burst> + Clone) -> Option<f64> {
    let wall = threads.clone().map(|burst| burst.wall).max()?.as_secs_f64();
    let least = threads.clone().map(|burst| burst.cpu).min()?.as_secs_f64();
    let amount: f64 = threads.map(|burst| burst.amount).sum();
    (wall > 0.0 && least >= UNDISTURBED * wall).then(|| amount / wall / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn burst(wall: u64, cpu: u64) -> Burst {
        Burst { amount: 8e9, wall: Duration::from_secs(wall), cpu: Duration::from_secs(cpu) }
    }

    #[test]
    fn a_burst_counts_when_every_thread_had_its_core() {
        let of = |bursts: &[Burst]| rate(bursts.iter());
        assert_eq!(of(&[burst(100, 98)]), Some(0.08));
        assert_eq!(of(&[burst(100, 98), burst(98, 98)]), Some(0.16));
        assert_eq!(of(&[burst(100, 98), burst(100, 50)]), None);
        assert_eq!(of(&[burst(100, 98), burst(60, 60)]), None);
    }

    #[test]
    fn every_thread_does_every_burst_until_enough_are_kept() {
        let counts: Vec<AtomicUsize> = (0..3).map(|_| AtomicUsize::new(0)).collect();
        let parts: Vec<&AtomicUsize> = counts.iter().collect();
        let bursts = bursts(parts, 4, |count, _| count.fetch_add(1, Ordering::Relaxed) as f64);
        assert!(bursts.tried >= 4 && bursts.tried <= 40);
        for count in &counts {
            assert_eq!(count.load(Ordering::Relaxed), bursts.tried);
        }
    }
}
