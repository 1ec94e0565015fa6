//! What a step costs the control plane: plan and commit, in CPU time of the thread.
//!
//! `cargo bench --bench scheduler`. Every running sequence draws a token in every step and takes a
//! block every 64th; with and without a queue of 100,000. Prints the minimum, median and maximum of
//! the steps of five rounds, interleaved over the sizes; then what the simulator's executor adds to
//! such a step, in percent of it.

#[path = "../tests/support/control.rs"]
mod control;

use std::time::Duration;

use cpu_time::ThreadTime;
use deltapool::engine::executor::{Executor, PlannedDraw};
use deltapool::engine::lower::lower;
use deltapool::engine::sampler::Draw;
use deltapool::request::SamplingParams;
use deltapool::scheduler::{Prompt, Scheduler, StepReport};
use deltapool::simulate::{HardwareProfile, ModelProfile, ModelledExecutor, StepModel, Timing};

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

/// What the modelled executor takes of a thread's time beside plan and commit of the same step.
fn modelled(running: usize) -> Vec<f64> {
    let mut case = Case::new(running, 0);
    let mut executor = ModelledExecutor::new(Timing {
        model: ModelProfile::preset("kimi-linear").expect("a preset"),
        hardware: HardwareProfile::preset("h200").expect("a preset"),
        step_model: StepModel::default(),
        overlap_copies: true,
        dead_slots_pay: false,
        buckets: Vec::new(),
        padding_reads: false,
    });
    (0..running as u64).for_each(|id| executor.expect(id, vec![7; 4_000]));
    let sampling = SamplingParams::default();
    let mut percent = Vec::new();
    for _ in 0..ROUNDS * STEPS {
        let start = ThreadTime::now();
        let plan = case.scheduler.plan(Duration::ZERO);
        let planned = start.elapsed();
        let find = |id| case.scheduler.sequence(id).expect("it is planned");
        let batch = lower(&plan, find, case.scheduler.device().layout());
        let draw = |(row, sequence): (usize, _)| {
            let tokens = find(sequence).tokens();
            let draw = Draw::new(&sampling, sequence.0, tokens, find(sequence).prompt_len());
            PlannedDraw { sequence, row, draw, mask: None }
        };
        let draws: Vec<_> = plan.draws.iter().copied().enumerate().map(draw).collect();
        let start = ThreadTime::now();
        let report = executor.step(&batch, Vec::new(), &draws);
        let modelled = start.elapsed();
        let start = ThreadTime::now();
        case.scheduler.commit(plan, &report);
        let step = planned + start.elapsed();
        percent.push(100.0 * modelled.as_secs_f64() / step.as_secs_f64());
    }
    std::mem::forget(case);
    percent
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
        let [min, median, max] = spread(&mut case.microseconds);
        let each = 1e3 * median / case.running as f64;
        println!(
            "{:>7}  {:>7}  {min:>7.1}  {median:>7.1}  {max:>7.1}             {each:>7.0}",
            case.running, case.waiting
        );
    }
    println!("running      min   median      max  % of a step, the modelled executor");
    for running in [32, 256] {
        let [min, median, max] = spread(&mut modelled(running));
        println!("{running:>7}  {min:>7.1}  {median:>7.1}  {max:>7.1}");
    }
    // A handle that is dropped is a leak; the schedulers end with the process.
    cases.into_iter().for_each(std::mem::forget);
}

/// The least, the median and the most.
fn spread(times: &mut [f64]) -> [f64; 3] {
    times.sort_by(f64::total_cmp);
    [times[0], times[times.len() / 2], times[times.len() - 1]]
}
