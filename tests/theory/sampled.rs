//! The sampled rows of SEEDS.md section 4: the real scheduler on a virtual clock. What its *Assert*
//! sentences say is tested; each value is told beside that of SEEDS.md, which comes from a
//! prototype with blocking swaps and another generator of random numbers, and compared with the
//! page.

#[path = "sampled/batching.rs"]
mod batching;
#[path = "sampled/chunks.rs"]
mod chunks;
#[path = "sampled/lab.rs"]
mod lab;
#[path = "sampled/memory.rs"]
mod memory;
#[path = "sampled/order.rs"]
mod order;
#[path = "sampled/steps.rs"]
mod steps;

use std::time::Duration;

use deltapool::config::{EngineConfig, Preempt};
use deltapool::simulate::traffic::Arrival;
use deltapool::simulate::{
    HardwareProfile, Lengths, MadeUp, ModelProfile, Report, Run, Simulation, StepLine, StepModel,
    Timing, Traffic,
};

/// A budget that no step reaches.
const NO_BUDGET: usize = 1 << 20;

fn hardware(name: &str) -> HardwareProfile {
    HardwareProfile::preset(name).expect("a preset")
}

fn model(name: &str) -> ModelProfile {
    ModelProfile::preset(name).expect("a preset")
}

/// Every step takes a second, whatever is in it.
fn unit_steps() -> HardwareProfile {
    let mut hardware = hardware("h100-seed-b");
    // Prompts cost next to nothing, but a longer one costs more.
    (hardware.memory_bandwidth, hardware.flops, hardware.step_overhead) = (1e40, 1e17, 1.0);
    (hardware.link_out, hardware.link_in) = (1e40, 1e40);
    hardware
}

/// A simulation with memory for `tokens` tokens beside a slot for each sequence, without reuse.
fn simulation(
    hardware: HardwareProfile,
    model: ModelProfile,
    step_model: StepModel,
    tokens: usize,
    change: impl FnOnce(&mut EngineConfig),
) -> Simulation {
    let mut config = EngineConfig {
        max_num_batched_tokens: NO_BUDGET,
        max_num_seqs: Some(256),
        watermark_percent: 0.0,
        preempt: Preempt::Swap,
        prefix_cache: false,
        threads: 1,
        ..EngineConfig::default()
    };
    change(&mut config);
    let slots = config.max_num_seqs() as f64 * model.state();
    let device_bytes = (slots + tokens as f64 * model.kv_bytes) as usize;
    Simulation {
        timing: Timing {
            model,
            hardware,
            step_model,
            overlap_copies: true,
            dead_slots_pay: false,
            buckets: Vec::new(),
            padding_reads: false,
        },
        config,
        device_bytes,
        host_bytes: 1 << 46,
        slo_ttft: None,
        slo_tpot: None,
    }
}

fn run(simulation: &Simulation, traffic: &Traffic) -> Report {
    simulation.run(traffic, &mut |_| {}, None).expect("it runs")
}

fn lines(simulation: &Simulation, traffic: &Traffic) -> (Report, Vec<StepLine>) {
    let mut lines = Vec::new();
    let mut observe = |line: &StepLine| lines.push(line.clone());
    let report = simulation.run(traffic, &mut |_| {}, Some(&mut observe));
    (report.expect("it runs"), lines)
}

fn traffic(requests: usize, arrivals: &str, prompts: &str, answers: &str) -> Traffic {
    Traffic::made_up(&plan(requests, arrivals, prompts, answers))
}

fn plan(requests: usize, arrivals: &str, prompts: &str, answers: &str) -> MadeUp {
    MadeUp {
        requests,
        arrivals: arrivals.parse().expect("arrivals"),
        prompts: prompts.parse().expect("lengths"),
        answers: answers.parse().expect("lengths"),
        turns: 1,
        think: Lengths::Const(1),
        most_answer: None,
        programs: Vec::new(),
        groups: None,
        seed: 1,
    }
}

/// Prompts with so many tokens in common and one of their own, at once.
fn with_common_beginning(requests: usize, tokens: usize, answers: &str) -> Traffic {
    let plan = plan(requests, "all", "1", answers);
    Traffic::made_up(&MadeUp { groups: Some((1, tokens)), ..plan })
}

/// Requests of these lengths (prompt, answer) at these seconds.
fn requests(lengths: impl IntoIterator<Item = (f64, usize, usize)>) -> Traffic {
    let arrival = |(i, (at, prompt, answer)): (u64, (f64, usize, usize))| Arrival {
        at: Duration::from_secs_f64(at),
        follows: None,
        prompt: [Run::new(1_000 + i, prompt)].into_iter().collect(),
        answer: [Run::new(2_000_000 + i, answer)].into_iter().collect(),
        program: None,
    };
    let requests = (0..).zip(lengths).map(arrival).collect();
    Traffic { name: "by hand".to_owned(), requests, open: None }
}

/// `ours` is within so much of `seeds`, as a part of it.
#[track_caller]
fn near(ours: f64, seeds: f64, part: f64) {
    assert!((ours / seeds - 1.0).abs() <= part, "{ours} is not {seeds} to {part}");
}
