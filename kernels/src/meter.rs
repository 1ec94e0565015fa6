//! What operators do and how long it takes, by their names. Off until asked for.
//!
//! An operator says what it is about to do and holds the answer until it is done:
//!
//! ```ignore
//! let _timed = cpu.meter.time("conv", || Work::f32(operations, bytes));
//! ```
//!
//! Off, that is one branch: the closure is not called. On, the time is CPU time of the calling
//! thread, which takes part in every job and waits for its end by spinning: other work on the
//! machine does not stretch it. Operators do not call each other, so no time counts twice.

use std::collections::BTreeMap;
use std::ops::AddAssign;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::ceilings::Arithmetic;
use crate::clock::thread_cpu;

/// Operations that stand for an exponential, a sigmoid or the like.
pub(crate) const SPECIAL: usize = 20;

/// What a call of an operator has to do, whatever way it goes about it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Work {
    /// Additions and multiplications; an exponential or the like counts as twenty.
    pub operations: f64,
    /// Bytes that must be read or written once: weights, states and cached rows, and the rows that
    /// come in and go out.
    pub bytes: f64,
    /// The arithmetic of the operations.
    pub arithmetic: Arithmetic,
}

impl Work {
    /// Work in f32.
    pub fn f32(operations: usize, bytes: usize) -> Work {
        Work { operations: operations as f64, bytes: bytes as f64, arithmetic: Arithmetic::F32 }
    }
}

/// What all calls of an operator were together.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Totals {
    /// Calls.
    pub calls: u64,
    /// CPU time of the calling thread.
    pub time: Duration,
    /// Sum of their operations.
    pub operations: f64,
    /// Sum of their bytes.
    pub bytes: f64,
}

impl AddAssign<(Duration, Work)> for Totals {
    fn add_assign(&mut self, (time, work): (Duration, Work)) {
        self.calls += 1;
        self.time += time;
        self.operations += work.operations;
        self.bytes += work.bytes;
    }
}

/// An operator's name and its arithmetic.
pub type Operator = (&'static str, Arithmetic);

/// Collects what operators do.
#[derive(Debug, Default)]
pub struct Meter {
    is_on: AtomicBool,
    totals: Mutex<BTreeMap<Operator, Totals>>,
}

impl Meter {
    /// Starts or stops collecting.
    pub fn set_on(&self, is_on: bool) {
        self.is_on.store(is_on, Ordering::Relaxed);
    }

    /// What was collected, by operator; begins again from nothing.
    pub fn take(&self) -> BTreeMap<Operator, Totals> {
        std::mem::take(&mut *self.lock())
    }

    /// Counts a call of the operator `name`, which lasts until the result is dropped; `work` says
    /// what it does and is asked only when the meter is on.
    #[inline]
    pub(crate) fn time(
        &self,
        name: &'static str,
        work: impl FnOnce() -> Work,
    ) -> Option<Timed<'_>> {
        if !self.is_on.load(Ordering::Relaxed) {
            return None;
        }
        let work = work();
        Some(Timed { meter: self, name, work, start: thread_cpu() })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<Operator, Totals>> {
        // A panic of another holder leaves whole totals behind.
        self.totals.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// A call of an operator that is going on.
#[derive(Debug)]
#[must_use = "the call is over when this is dropped"]
pub(crate) struct Timed<'a> {
    meter: &'a Meter,
    name: &'static str,
    work: Work,
    start: Duration,
}

impl Drop for Timed<'_> {
    fn drop(&mut self) {
        let time = thread_cpu().saturating_sub(self.start);
        let operator = (self.name, self.work.arithmetic);
        *self.meter.lock().entry(operator).or_default() += (time, self.work);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_collected_by_operator_while_the_meter_is_on() {
        let meter = Meter::default();
        let call =
            |name, operations, bytes| drop(meter.time(name, || Work::f32(operations, bytes)));
        call("early", 1, 1);
        meter.set_on(true);
        call("conv", 10, 4);
        call("kda", 5, 5);
        call("conv", 20, 8);
        meter.set_on(false);
        call("late", 1, 1);
        let totals = meter.take();
        let names: Vec<&str> = totals.keys().map(|(name, _)| *name).collect();
        assert_eq!(names, ["conv", "kda"]);
        let conv = totals[&("conv", Arithmetic::F32)];
        assert_eq!((conv.calls, conv.operations, conv.bytes), (2, 30.0, 12.0));
        assert!(meter.take().is_empty());
    }

    #[test]
    fn nobody_is_asked_what_they_do_while_the_meter_is_off() {
        let meter = Meter::default();
        assert!(meter.time("conv", || panic!("asked")).is_none());
    }
}
