//! Workloads that no fit has seen: run by the engine on this machine, and by the simulator with the
//! profile that was written for it.

use std::fmt;

use serde::Serialize;

use super::measure::CHUNK;
use crate::cli::CliError;
use crate::cli::bench::spread::Spread;
use crate::cli::bench::stepper::Stepper;
use crate::config::EngineConfig;
use crate::engine::EngineLimits;
use crate::models::Model;
use crate::models::spec::ModelSpec;
use crate::simulate::{
    Arrivals, HardwareProfile, Lengths, MadeUp, ModelProfile, Simulation, StepModel, Timing,
    Traffic,
};

/// How many workloads there are.
pub const COUNT: usize = 3;

/// Chats, documents that are read, and both: `(name, requests)`.
const WORKLOADS: [(&str, usize); COUNT] = [("chats", 32), ("documents", 4), ("both", 12)];

/// Most tokens of a chat's prompt and of an answer.
const SHORT: usize = 192;

/// Requests that are all there when the first step is planned, so that both run the same steps.
#[derive(Debug)]
pub struct Workload {
    name: &'static str,
    traffic: Traffic,
    /// Seconds of all steps of all rounds.
    steps: Vec<f64>,
    /// Seconds of each round.
    rounds: Vec<f64>,
}

/// A workload, measured and modelled. Field names are the keys of the JSON form.
#[derive(Debug, Serialize)]
pub struct WorkloadReport {
    workload: &'static str,
    requests: usize,
    prompt_tokens: usize,
    generated_tokens: usize,
    /// Steps of a round.
    steps: usize,
    /// Median of a step.
    pub measured_p50_ms: f64,
    /// As the simulator has it.
    pub modelled_p50_ms: f64,
    /// Modelled beside measured, percent.
    pub p50_off_percent: f64,
    /// Median of the rounds.
    pub measured_seconds: f64,
    /// As the simulator has it.
    pub modelled_seconds: f64,
    /// Modelled beside measured, percent.
    pub seconds_off_percent: f64,
}

impl fmt::Display for WorkloadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let WorkloadReport { workload, steps, .. } = self;
        let (p50, all) = (self.p50_off_percent, self.seconds_off_percent);
        write!(
            f,
            "{workload:<11} {steps:>5} {:>12.3} ms {:>7.3} ms {p50:>+7.1} % {:>12.3} s {:>7.3} s \
             {all:>+7.1} %",
            self.measured_p50_ms,
            self.modelled_p50_ms,
            self.measured_seconds,
            self.modelled_seconds,
        )
    }
}

/// All workloads; documents are up to `longest` tokens long.
pub fn all(longest: usize) -> Vec<Workload> {
    let documents = Lengths::Uniform(longest / 2, longest);
    let short = Lengths::Uniform(16, SHORT);
    let lengths = [
        (short, Lengths::Exp(48.0)),
        (documents, Lengths::Const(8)),
        (Lengths::Uniform(SHORT / 2, CHUNK), Lengths::Exp(24.0)),
    ];
    let made_up = |((name, requests), (prompts, answers)): ((&'static str, usize), _)| {
        let plan = MadeUp {
            requests,
            arrivals: Arrivals::All,
            turns: 1,
            think: Lengths::Const(0),
            prompts,
            answers,
            most_answer: Some(SHORT),
            programs: Vec::new(),
            groups: None,
            seed: 0,
        };
        let traffic = Traffic::made_up(&plan);
        Workload { name, traffic, steps: Vec::new(), rounds: Vec::new() }
    };
    WORKLOADS.into_iter().zip(lengths).map(made_up).collect()
}

/// Tokens of the longest request of any workload.
pub fn most_tokens(longest: usize) -> usize {
    longest.max(CHUNK) + SHORT
}

impl Workload {
    /// What it is called.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Runs it once on the engine.
    ///
    /// # Errors
    /// As [`Stepper::step`].
    pub fn run(&mut self, stepper: &mut Stepper, vocab_size: usize) -> Result<(), CliError> {
        for request in &self.traffic.requests {
            let prompt = request.prompt.to_tokens();
            let prompt = prompt.into_iter().map(|id| id % vocab_size as u32).collect();
            stepper.submit(prompt, request.answer.len())?;
        }
        let steps = stepper.until_idle()?;
        let seconds = steps.iter().map(|step| step.duration.as_secs_f64());
        self.rounds.push(seconds.clone().sum());
        self.steps.extend(seconds);
        Ok(())
    }

    /// What was measured, beside what the simulator says.
    ///
    /// # Errors
    /// When the simulator does not take the same steps.
    pub fn report(self, simulation: &Simulation) -> Result<WorkloadReport, CliError> {
        let failed = |message: String| CliError::Failed(format!("{}: {message}", self.name));
        let mut modelled: Vec<f64> = Vec::new();
        let told = simulation.run(
            &self.traffic,
            &mut |_| {},
            Some(&mut |step| modelled.push(step.seconds)),
        );
        told.map_err(|error| failed(error.to_string()))?;
        let rounds = self.rounds.len();
        let (steps, simulated) = (self.steps.len() / rounds, modelled.len());
        if steps * rounds != self.steps.len() || steps != simulated {
            return Err(failed(format!("{steps} steps measured, {simulated} simulated")));
        }
        let modelled_seconds: f64 = modelled.iter().sum();
        let median = |times: Vec<f64>| Spread::of(times).expect("something was timed").median;
        let (measured_p50, modelled_p50) = (median(self.steps), median(modelled));
        let measured_seconds = median(self.rounds);
        let off = |modelled: f64, measured: f64| (modelled / measured - 1.0) * 100.0;
        let requests = &self.traffic.requests;
        Ok(WorkloadReport {
            workload: self.name,
            requests: requests.len(),
            prompt_tokens: requests.iter().map(|request| request.prompt.len()).sum(),
            generated_tokens: requests.iter().map(|request| request.answer.len()).sum(),
            steps,
            measured_p50_ms: measured_p50 * 1e3,
            modelled_p50_ms: modelled_p50 * 1e3,
            p50_off_percent: off(modelled_p50, measured_p50),
            measured_seconds,
            modelled_seconds,
            seconds_off_percent: off(modelled_seconds, measured_seconds),
        })
    }
}

/// The simulator over the pools of the engine that measured, on the profile that came of it.
pub fn simulation(
    hardware: &HardwareProfile,
    model: &ModelProfile,
    (spec, config, limits): (&ModelSpec, EngineConfig, &EngineLimits),
) -> Simulation {
    let layout = Model::layout_of(spec);
    let mut model = model.clone();
    // To the byte as the engine keeps them, padding included.
    (model.state_bytes, model.conv_bytes) = (layout.slot_bytes as u64, 0);
    model.kv_bytes = layout.block_bytes as f64 / kernels::BLOCK_LEN as f64;
    let timing = Timing {
        model,
        hardware: hardware.clone(),
        step_model: StepModel::default(),
        overlap_copies: true,
        dead_slots_pay: false,
        buckets: Vec::new(),
        padding_reads: false,
    };
    Simulation {
        timing,
        config,
        device_bytes: limits.device.arena_bytes(),
        host_bytes: limits.host.arena_bytes(),
        slo_ttft: None,
        slo_tpot: None,
    }
}
