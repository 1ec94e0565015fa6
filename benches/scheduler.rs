//! What a step costs the control plane: plan and commit, in CPU time of the thread.
//!
//! `cargo bench --bench scheduler`. Every running sequence draws a token in every step and takes a
//! block every 64th; with and without a queue of 100,000. Prints the minimum, median and maximum of
//! the steps of five rounds, interleaved over the sizes.

#[path = "../tests/support/control.rs"]
mod control;

use std::time::Duration;

use cpu_time::ThreadTime;
use deltapool::scheduler::{Prompt, Scheduler, StepReport};

const ROUNDS: usize = 5;
const STEPS: usize = 400;

struct Case {
    running: usize,
    waiting: usize,
    scheduler: Scheduler,
    report: StepReport,
    microseconds: Vec<f64>,
}

impl Case {
    fn new(running: usize, waiting: usize) -> Case {
        let mut scheduler = control::scheduler(running, 4_096);
        for _ in 0..running + waiting {
            scheduler.submit(&Prompt::new(&[1; 64], 4_000)).expect("it fits");
        }
        control::until_all_decode(&mut scheduler, running);
        let (report, microseconds) = (StepReport::default(), Vec::new());
        Case { running, waiting, scheduler, report, microseconds }
    }

    fn step(&mut self) {
        let start = ThreadTime::now();
        let plan = self.scheduler.plan(Duration::ZERO);
        let planned = start.elapsed();
        assert_eq!(plan.draws.len(), self.running);
        control::answer(&plan, &mut self.report);
        let start = ThreadTime::now();
        self.scheduler.commit(plan, &self.report);
        self.microseconds.push((planned + start.elapsed()).as_secs_f64() * 1e6);
    }
}

fn main() {
    // The test runner asks every bench what it has.
    if std::env::args().any(|arg| arg == "--list") {
        return;
    }
    let sizes = [32, 256, 1_024]
        .into_iter()
        .flat_map(|running| [0, 100_000].map(|waiting| Case::new(running, waiting)));
    let mut cases: Vec<Case> = sizes.collect();
    for _ in 0..ROUNDS {
        for case in &mut cases {
            (0..STEPS).for_each(|_| case.step());
        }
    }
    println!("running  waiting      min   median      max  us a step   median ns a sequence");
    for case in &mut cases {
        let times = &mut case.microseconds;
        times.sort_by(f64::total_cmp);
        let (min, median, max) = (times[0], times[times.len() / 2], times[times.len() - 1]);
        let each = 1e3 * median / case.running as f64;
        println!(
            "{:>7}  {:>7}  {min:>7.1}  {median:>7.1}  {max:>7.1}             {each:>7.0}",
            case.running, case.waiting
        );
    }
    // A handle that is dropped is a leak; the schedulers end with the process.
    cases.into_iter().for_each(std::mem::forget);
}
