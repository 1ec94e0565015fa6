//! Submits each request when its time has come and writes the answers in the order of the input.
//!
//! ```text
//! arrivals  [ latest ... next ] --submit--> engine
//! entries   [ next to write ... last ]      the events of all but the first wait in its handle
//! ```
//!
//! One thread does both. It listens to the first entry alone, is woken by its events, by Ctrl-C,
//! and often enough to submit in time and to move the bar.

use std::cmp::Reverse;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use serde_json::Value;

use super::answer::{Answers, bad_row};
use super::line::{Line, Work};
use super::streams::Output;
use super::summary::Tally;
use crate::cli::CliError;
use crate::engine::Engine;
use crate::request::Request;

/// Time between two looks at the engine's figures.
const TICK: Duration = Duration::from_millis(100);

/// A batch that is being run.
pub struct Replay<'e> {
    engine: &'e Engine,
    bar: ProgressBar,
    start: Instant,
    /// Requests that are not submitted yet, and the index of their lines; the next is the last.
    arrivals: Vec<(Duration, usize, Request)>,
    /// Lines that are not written yet.
    entries: VecDeque<Entry>,
    /// Index of the first of them.
    first: usize,
    stopped: bool,
    tally: Tally,
}

struct Entry {
    number: usize,
    id: Value,
    place: Place,
}

enum Place {
    /// Its time has not come.
    Ahead,
    /// The engine has it.
    Open(Answers),
    /// It cannot be run.
    Bad(String),
}

impl<'e> Replay<'e> {
    /// A run of `lines` on an engine that has done nothing yet.
    pub fn new(engine: &'e Engine, lines: Vec<Line>, bar: ProgressBar) -> Replay<'e> {
        let mut arrivals = Vec::new();
        let mut entries = VecDeque::new();
        let tally = Tally::new(lines.len());
        for (index, Line { number, id, work }) in lines.into_iter().enumerate() {
            let place = match work {
                Ok(Work { request, arrival }) => {
                    arrivals.push((arrival, index, request));
                    Place::Ahead
                }
                Err(error) => Place::Bad(error),
            };
            entries.push_back(Entry { number, id, place });
        }
        arrivals.sort_by_key(|(arrival, index, _)| Reverse((*arrival, *index)));
        let answers: usize = arrivals.iter().map(|(_, _, request)| request.n).sum();
        bar.set_length(answers as u64);
        let start = Instant::now();
        Replay { engine, bar, start, arrivals, entries, first: 0, stopped: false, tally }
    }

    /// Runs all, or what can be finished until `interrupted`; whoever sets that unparks this
    /// thread.
    ///
    /// # Errors
    /// When the output cannot be written.
    pub fn run(
        mut self,
        output: &mut Output,
        interrupted: &AtomicBool,
    ) -> Result<(Tally, Duration), CliError> {
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        let mut context = Context::from_waker(&waker);
        loop {
            if interrupted.load(Ordering::Relaxed) && !self.stopped {
                self.stop();
            }
            self.submit_due();
            self.write_ended(output, &mut context)?;
            if self.entries.is_empty() {
                self.bar.finish_and_clear();
                return Ok((self.tally, self.start.elapsed()));
            }
            self.show();
            thread::park_timeout(self.pause());
        }
    }

    /// Cancels what runs and submits nothing more.
    fn stop(&mut self) {
        self.stopped = true;
        self.arrivals.clear();
        self.engine.stopper().cancel_all();
    }

    fn submit_due(&mut self) {
        let now = self.start.elapsed();
        while self.arrivals.last().is_some_and(|(arrival, _, _)| *arrival <= now) {
            let (_, index, request) = self.arrivals.pop().expect("there is a last one");
            let (n, with_logprobs) = (request.n, request.sampling.logprobs.is_some());
            let place = match self.engine.submit(request) {
                Ok(handle) => Place::Open(Answers::new(handle, n, with_logprobs)),
                Err(error) => {
                    // Its answers will not come.
                    self.bar.dec_length(n as u64);
                    Place::Bad(error.to_string())
                }
            };
            let entry = &mut self.entries[index - self.first];
            if let Place::Bad(error) = &place {
                self.bar.suspend(|| tell_error(entry.number, error));
            }
            entry.place = place;
        }
    }

    /// Writes the first entries, as far as they have ended.
    fn write_ended(
        &mut self,
        output: &mut Output,
        context: &mut Context<'_>,
    ) -> Result<(), CliError> {
        while let Some(entry) = self.entries.front_mut() {
            let ended = match &mut entry.place {
                Place::Ahead => self.stopped,
                Place::Open(answers) => answers.poll(context).is_ready(),
                Place::Bad(_) => true,
            };
            if !ended {
                break;
            }
            let entry = self.entries.pop_front().expect("there is a first one");
            self.first += 1;
            if let Some(row) = self.close(entry) {
                self.bar.suspend(|| output.write(&row))?;
            }
        }
        Ok(())
    }

    /// Counts an entry that has ended. Its line of the output; none when it was cancelled.
    fn close(&mut self, entry: Entry) -> Option<String> {
        let Entry { number, id, place } = entry;
        match place {
            Place::Bad(error) => {
                self.tally.failed += 1;
                Some(bad_row(&id, number, &error))
            }
            Place::Open(answers) if !answers.is_cancelled() => {
                if let Some(error) = answers.error() {
                    self.tally.failed += 1;
                    self.bar.suspend(|| tell_error(number, error));
                }
                self.tally.count(answers.figures());
                Some(answers.into_row(&id))
            }
            Place::Open(_) | Place::Ahead => {
                self.tally.left_out += 1;
                None
            }
        }
    }

    fn show(&self) {
        let stats = self.engine.stats();
        let (now, tokens) = (stats.occupancy, stats.scheduler.generated_tokens);
        let rate = tokens as f64 / self.start.elapsed().as_secs_f64().max(1e-9);
        self.bar.set_position(stats.finished);
        self.bar.set_message(format!(
            "{} running, {} waiting, {} parked, {rate:.0} tok/s",
            now.running,
            now.waiting,
            now.parked + now.in_flight,
        ));
    }

    /// Until the next tick or the next arrival.
    fn pause(&self) -> Duration {
        let next = self.arrivals.last().map_or(TICK, |(arrival, _, _)| *arrival);
        next.saturating_sub(self.start.elapsed()).min(TICK)
    }
}

/// Says on standard error what is wrong with a line.
pub fn tell_error(number: usize, error: &str) {
    eprintln!("line {number}: {error}");
}

/// Wakes the thread that runs the batch.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}
