//! A gang of worker threads, started once, that runs one job after another.
//!
//! An operator of a small decode step lasts a few microseconds, less than it takes to wake a
//! thread, so workers spin for a short while between jobs before they park. A job is a number of
//! tasks taken from a counter; the caller takes tasks too. A worker that wakes too late to find a
//! task is not waited for, so more threads than cores cost little.
//!
//! All gangs of a process share its processors: a worker joins a job only while fewer threads are
//! in jobs, of any gang, than there are processors. Engines beside each other therefore take turns
//! with the workers instead of pushing each other off the processors. Callers are not asked.
//!
//! Which worker runs a task, and in which order, is chance. An operator must therefore give the
//! same bits whoever runs its tasks: tasks write disjoint places and share no sum.

use std::cell::UnsafeCell;
use std::io;
use std::marker::PhantomData;
use std::num::NonZero;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{self, JoinHandle, Thread};

/// Rounds of spinning before a worker parks: some tens of microseconds.
const SPINS: u32 = 2_000;

/// Bit of `gate` that is set while a job may be joined; the bits below count the workers in it.
const OPEN: u32 = 1 << 31;

/// Threads that are in a job, of all gangs: callers and workers.
static BUSY: AtomicUsize = AtomicUsize::new(0);

/// A thread counted in [`BUSY`].
struct Seat;

impl Seat {
    /// The caller of a job needs no free processor: it runs already.
    fn of_caller() -> Seat {
        BUSY.fetch_add(1, Ordering::Relaxed);
        Seat
    }

    /// A worker's, while there is one.
    fn of_worker() -> Option<Seat> {
        let processors = processors();
        let take = |busy| (busy < processors).then_some(busy + 1);
        BUSY.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok().then(|| Seat)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        BUSY.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Processors that this process may run on, as they were when it was first asked.
fn processors() -> usize {
    static PROCESSORS: OnceLock<usize> = OnceLock::new();
    *PROCESSORS.get_or_init(|| thread::available_parallelism().map_or(1, NonZero::get))
}

/// A job: `body(worker, task)` for each task.
#[derive(Clone, Copy)]
struct Job {
    body: *const (dyn Fn(usize, usize) + Sync),
    tasks: usize,
}

struct Shared {
    /// Number of jobs so far; a change wakes spinning workers.
    epoch: AtomicU32,
    /// Whether the job may be joined, and how many workers are in it.
    gate: AtomicU32,
    /// The next task nobody has taken.
    next: AtomicUsize,
    /// Written by `run` while the gate is shut and empty, read by workers inside it.
    job: UnsafeCell<Option<Job>>,
    parked: Vec<AtomicBool>,
    panicked: AtomicBool,
    stop: AtomicBool,
}

// SAFETY: `job` is the one field that is not Sync. It is written only while `gate` is shut and
// empty, and read only by workers that entered through the gate after it was opened with release
// ordering; the body it points to is Sync.
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointer in `job` is used only while the `run` that set it is on the stack.
unsafe impl Send for Shared {}

/// Worker threads that wait for jobs. The thread that calls [`Gang::run`] is worker 0.
pub struct Gang {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    threads: Vec<Thread>,
    one_job_at_a_time: Mutex<()>,
}

impl Gang {
    /// A gang of `threads` workers, the caller among them.
    ///
    /// # Errors
    /// When the system refuses to start a thread; those already started end.
    ///
    /// # Panics
    /// When `threads` is 0.
    pub fn new(threads: usize) -> io::Result<Gang> {
        assert!(threads > 0, "a gang has at least the calling thread");
        let shared = Arc::new(Shared {
            epoch: AtomicU32::new(0),
            gate: AtomicU32::new(0),
            next: AtomicUsize::new(0),
            job: UnsafeCell::new(None),
            parked: (1..threads).map(|_| AtomicBool::new(false)).collect(),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        });
        let mut gang = Gang {
            shared,
            workers: Vec::new(),
            threads: Vec::new(),
            one_job_at_a_time: Mutex::new(()),
        };
        for worker in 1..threads {
            let shared = Arc::clone(&gang.shared);
            let builder = thread::Builder::new().name(format!("deltapool-{worker}"));
            let handle = builder.spawn(move || work(&shared, worker))?;
            gang.threads.push(handle.thread().clone());
            gang.workers.push(handle);
        }
        Ok(gang)
    }

    /// Number of workers, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `body(worker, task)` once for each task in `0..tasks` and returns when all are done.
    /// `worker` is below [`Gang::threads`], and no two tasks run with the same one at a time.
    ///
    /// # Panics
    /// When a task panics, or when called from inside a task that other threads take part in. A
    /// single task, or a gang of one, runs on the calling thread.
    pub fn run(&self, tasks: usize, body: impl Fn(usize, usize) + Sync) {
        if self.workers.is_empty() || tasks <= 1 {
            (0..tasks).for_each(|task| body(0, task));
            return;
        }
        let guard = self.one_job_at_a_time.try_lock().unwrap_or_else(|e| match e {
            std::sync::TryLockError::Poisoned(guard) => guard.into_inner(),
            std::sync::TryLockError::WouldBlock => panic!("a gang runs one job at a time"),
        });
        let body: &(dyn Fn(usize, usize) + Sync) = &body;
        // SAFETY: only the lifetime is erased. `shut` below does not return before every worker
        // that could have read the pointer has left the job.
        let body: *const (dyn Fn(usize, usize) + Sync) = unsafe { std::mem::transmute(body) };
        let seat = Seat::of_caller();
        self.open(Job { body, tasks });
        let own = catch_unwind(AssertUnwindSafe(|| take_tasks(&self.shared, 0)));
        self.shut();
        drop((seat, guard));
        if let Err(panic) = own {
            resume_unwind(panic);
        }
        assert!(!self.shared.panicked.swap(false, Ordering::Relaxed), "a task panicked");
    }

    fn open(&self, job: Job) {
        let shared = &*self.shared;
        debug_assert_eq!(shared.gate.load(Ordering::Acquire), 0);
        // SAFETY: the gate is shut and empty, so no worker reads the job.
        unsafe { *shared.job.get() = Some(job) };
        shared.next.store(0, Ordering::Relaxed);
        shared.gate.store(OPEN, Ordering::Release);
        // Sequentially consistent, as is the worker's look at `epoch` after it says it parks: one
        // of the two sees the other, so no wake-up is lost.
        shared.epoch.fetch_add(1, Ordering::SeqCst);
        for (parked, thread) in shared.parked.iter().zip(&self.threads) {
            if parked.load(Ordering::SeqCst) {
                thread.unpark();
            }
        }
    }

    /// Shuts the gate and waits until the workers inside have left.
    fn shut(&self) {
        let gate = &self.shared.gate;
        gate.fetch_and(!OPEN, Ordering::AcqRel);
        let mut rounds = 0u32;
        while gate.load(Ordering::Acquire) != 0 {
            rounds += 1;
            if rounds < SPINS { std::hint::spin_loop() } else { thread::yield_now() }
        }
    }
}

impl Drop for Gang {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches the panics of its tasks, so it always ends by itself.
            worker.join().expect("a worker ends when told to");
        }
    }
}

impl std::fmt::Debug for Gang {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Gang({})", self.threads())
    }
}

fn work(shared: &Shared, worker: usize) {
    let mut seen = 0;
    loop {
        seen = wait_for_change(shared, worker, seen);
        if shared.stop.load(Ordering::Acquire) {
            return;
        }
        let Some(_seat) = seat_while_open(&shared.gate) else { continue };
        if !enter(&shared.gate) {
            continue;
        }
        if catch_unwind(AssertUnwindSafe(|| take_tasks(shared, worker))).is_err() {
            shared.panicked.store(true, Ordering::Relaxed);
        }
        shared.gate.fetch_sub(1, Ordering::Release);
    }
}

/// A processor for a worker, which it waits for while the job goes on.
fn seat_while_open(gate: &AtomicU32) -> Option<Seat> {
    while gate.load(Ordering::Acquire) & OPEN != 0 {
        if let Some(seat) = Seat::of_worker() {
            return Some(seat);
        }
        thread::yield_now();
    }
    None
}

/// Waits until `epoch` differs from `seen` and returns it.
fn wait_for_change(shared: &Shared, worker: usize, seen: u32) -> u32 {
    for _ in 0..SPINS {
        let epoch = shared.epoch.load(Ordering::Acquire);
        if epoch != seen {
            return epoch;
        }
        std::hint::spin_loop();
    }
    let parked = &shared.parked[worker - 1];
    parked.store(true, Ordering::SeqCst);
    let epoch = loop {
        let epoch = shared.epoch.load(Ordering::SeqCst);
        if epoch != seen {
            break epoch;
        }
        thread::park();
    };
    parked.store(false, Ordering::Relaxed);
    epoch
}

/// Counts a worker into the job, unless it is shut.
fn enter(gate: &AtomicU32) -> bool {
    let join = |gate| (gate & OPEN != 0).then_some(gate + 1);
    gate.fetch_update(Ordering::AcqRel, Ordering::Acquire, join).is_ok()
}

fn take_tasks(shared: &Shared, worker: usize) {
    // SAFETY: the caller is `run` itself or a worker inside the gate, so the job is set and is not
    // rewritten, and its body is alive until `shut` has seen the worker leave.
    let (body, tasks) = unsafe {
        let job = (*shared.job.get()).expect("an open gate has a job");
        (&*job.body, job.tasks)
    };
    loop {
        let task = shared.next.fetch_add(1, Ordering::Relaxed);
        if task >= tasks {
            return;
        }
        body(worker, task);
    }
}

/// A slice of which the tasks of a job write disjoint parts.
#[derive(Clone, Copy)]
pub struct Shards<'a, T> {
    start: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: a `Shards` gives references only through `unsafe` functions whose callers vouch that
// parts in use at one time do not overlap.
unsafe impl<T: Send + Sync> Sync for Shards<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Send for Shards<'_, T> {}

impl<'a, T> Shards<'a, T> {
    /// All of `slice`.
    pub fn new(slice: &'a mut [T]) -> Self {
        Shards { start: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// Number of values.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where the slice starts, for kernels that write strided parts of it.
    #[inline]
    pub fn as_mut_ptr(&self) -> *mut T {
        self.start
    }

    /// The part at `range`, to write.
    ///
    /// # Safety
    /// No other reference to any value of the part is in use while the result is.
    ///
    /// # Panics
    /// When the range leaves the slice.
    #[inline]
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn slice_mut(&self, range: Range<usize>) -> &'a mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "a part leaves its slice");
        // SAFETY: in bounds by the assertion, unaliased by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }

    /// The part at `range`, to read.
    ///
    /// # Safety
    /// No reference to write any value of the part is in use while the result is.
    ///
    /// # Panics
    /// When the range leaves the slice.
    #[inline]
    pub unsafe fn slice(&self, range: Range<usize>) -> &'a [T] {
        assert!(range.start <= range.end && range.end <= self.len, "a part leaves its slice");
        // SAFETY: in bounds by the assertion, not written by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.start.add(range.start), range.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_with_any_number_of_threads() {
        for threads in 1..=5 {
            let gang = Gang::new(threads).expect("threads start");
            for tasks in [0, 1, 2, 3, 7, 64, 1000] {
                let counts: Vec<AtomicU32> = (0..tasks).map(|_| AtomicU32::new(0)).collect();
                gang.run(tasks, |worker, task| {
                    assert!(worker < threads);
                    counts[task].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn jobs_follow_each_other_without_losing_a_wake_up() {
        let gang = Gang::new(3).expect("threads start");
        let total = AtomicUsize::new(0);
        for round in 0..20_000 {
            if round % 1_000 == 0 {
                thread::sleep(std::time::Duration::from_millis(1)); // long enough to park
            }
            gang.run(3, |_, task| {
                total.fetch_add(task + 1, Ordering::Relaxed);
            });
        }
        assert_eq!(total.load(Ordering::Relaxed), 20_000 * 6);
    }

    #[test]
    fn gangs_beside_each_other_keep_to_the_processors() {
        let (gangs, threads) = (3, processors() + 1);
        let (inside, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        thread::scope(|scope| {
            for _ in 0..gangs {
                scope.spawn(|| {
                    let gang = Gang::new(threads).expect("threads start");
                    for _ in 0..20 {
                        gang.run(4 * threads, |_, _| {
                            let now = inside.fetch_add(1, Ordering::SeqCst) + 1;
                            most.fetch_max(now, Ordering::SeqCst);
                            thread::sleep(std::time::Duration::from_micros(200));
                            inside.fetch_sub(1, Ordering::SeqCst);
                        });
                    }
                });
            }
        });
        // Callers come without asking.
        let allowed = processors() + gangs;
        let most = most.into_inner();
        assert!((2..=allowed).contains(&most), "{most} tasks at once, {allowed} are allowed");
    }

    #[test]
    fn a_panicking_task_panics_the_caller_and_the_gang_goes_on() {
        let gang = Gang::new(3).expect("threads start");
        let result = catch_unwind(AssertUnwindSafe(|| {
            gang.run(8, |_, task| assert_ne!(task, 5, "task five"));
        }));
        assert!(result.is_err());
        let count = AtomicU32::new(0);
        gang.run(8, |_, _| {
            count.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(count.load(Ordering::Relaxed), 8);
    }

    #[test]
    fn tasks_write_their_own_part_of_a_slice() {
        let gang = Gang::new(4).expect("threads start");
        let mut data = vec![0usize; 400];
        let shards = Shards::new(&mut data);
        gang.run(40, |_, task| {
            // SAFETY: each task has ten values of its own.
            let part = unsafe { shards.slice_mut(task * 10..task * 10 + 10) };
            part.iter_mut().enumerate().for_each(|(i, x)| *x = task * 10 + i);
        });
        assert!(data.iter().enumerate().all(|(i, x)| i == *x));
    }
}
