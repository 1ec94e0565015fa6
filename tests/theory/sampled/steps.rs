//! Who is in which step, and what a step may take.

use std::time::Duration;

use deltapool::config::Preempt;
use deltapool::simulate::{StepModel, What};

use super::memory::crowded;
use super::{hardware, lines, model, requests, run, simulation, traffic, unit_steps};

/// An arrival inside a step is in the next one's batch, and who has ended is not (G2).
#[test]
fn who_comes_inside_a_step_is_in_the_next_one() {
    let simulation =
        simulation(unit_steps(), model("7b-mha"), StepModel::Roofline, 10_000, |config| {
            config.max_num_seqs = Some(2);
        });
    let all = requests([(0.0, 1, 3), (0.5, 1, 2), (0.7, 1, 1)]);
    let (report, lines) = lines(&simulation, &all);
    let batches: Vec<usize> = lines.iter().map(|line| line.decodes + line.prompt_tokens).collect();
    assert_eq!(batches, [1, 2, 2, 1], "{lines:?}");
    // The third one waits for a place, from 0.7 to 3 s, and has its token at 4 s.
    assert!((report.latency.ttft.max - 3.3).abs() < 1e-3, "{}", report.latency.ttft.max);
}

/// Also where the traffic has random lengths, arrivals and preemptions.
#[test]
fn two_runs_of_the_same_give_the_same_report_to_the_last_digit() {
    let json = || {
        let report = crowded(model("7b-gqa8"), 20_000, 8.3, |config| {
            (config.preempt, config.prefix_cache) = (Preempt::Auto, true);
        });
        serde_json::to_string(&report).expect("plain data")
    };
    assert_eq!(json(), json());
}

/// The default model is a mixture of experts, whose steps cost less for each row the more there
/// are: a line through the first ones would hold the engine at few.
#[test]
fn a_time_that_steps_keep_to_anyway_costs_next_to_nothing() {
    let timing = |slo: Option<u64>| {
        let (hardware, model) = (hardware("h200"), model("kimi-linear"));
        let held = simulation(hardware, model, StepModel::Phased, 400_000, |config| {
            (config.max_num_batched_tokens, config.max_num_seqs) = (2_048, Some(64));
            config.slo_itl = slo.map(Duration::from_millis);
        });
        run(&held, &traffic(600, "poisson:15", "uniform:100:2000", "exp:200"))
    };
    let (free, held) = (timing(None), timing(Some(60)));
    assert!(free.latency.itl.max < 0.054, "{}", free.latency.itl.max);
    let ratio = held.throughput.generated_tokens / free.throughput.generated_tokens;
    println!(
        "SLO     60 ms, met anyway: {ratio:.3} of the tokens/s, TTFT P99 {:.3} and {:.3} s",
        held.latency.ttft.p99, free.latency.ttft.p99
    );
    assert!(ratio > 0.97, "{ratio}");
    assert!(held.latency.ttft.p50 < 1.5 * free.latency.ttft.p50);
}

/// It sat out until somebody else ended otherwise.
#[test]
fn who_generates_is_in_every_step_whatever_time_steps_are_held_to() {
    let (hardware, model) = (hardware("h200"), model("7b-mha"));
    let simulation = simulation(hardware, model, StepModel::Phased, 400_000, |config| {
        (config.max_num_batched_tokens, config.max_num_seqs) = (2_048, Some(64));
        config.slo_itl = Some(Duration::from_millis(10));
    });
    let (_, lines) = lines(&simulation, &traffic(60, "poisson:3", "4000", "exp:128"));
    let mut generating = std::collections::BTreeSet::new();
    for line in &lines {
        assert!(generating.iter().all(|id| line.decode.contains(id)), "at {} s", line.t);
        for event in &line.events {
            match event.what {
                What::First => drop(generating.insert(event.id)),
                What::Finish => drop(generating.remove(&event.id)),
                _ => {}
            }
        }
    }
}
