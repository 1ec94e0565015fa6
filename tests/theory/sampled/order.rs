//! Who is served first (SEEDS.md section 4.5).

use deltapool::config::Policy;
use deltapool::simulate::traffic::Arrival;
use deltapool::simulate::{Run, Simulation, StepModel};

use super::super::page::Rows;
use super::{hardware, model, near, requests, run, simulation, traffic, unit_steps};

/// One prefill server: a place, answers of one token, attention without the causal half (lecture
/// B's form).
fn prefill_server(policy: Policy, ageing: f64) -> Simulation {
    let mut model = model("7b-mha-seed");
    model.attention *= 2.0;
    simulation(hardware("h100-seed-b"), model, StepModel::Roofline, 20_000, |config| {
        (config.policy, config.sjf_ageing) = (policy, ageing);
        config.max_num_seqs = Some(1);
    })
}

/// A long prompt is first in the queue of 20 short ones. Means of all, and of the long one, in ms.
fn policy_mix(policy: Policy, ageing: f64) -> (f64, f64) {
    let all = requests((0..21).map(|i| (0.0, if i == 0 { 8_192 } else { 512 }, 1)));
    let report = run(&prefill_server(policy, ageing), &all);
    (1e3 * report.latency.ttft.mean, 1e3 * report.latency_long.expect("one is long").ttft.mean)
}

#[test]
fn shortest_first_serves_a_mix_in_170_ms_instead_of_436() {
    let (fcfs, sjf) = (policy_mix(Policy::Fcfs, 0.0), policy_mix(Policy::Sjf, 0.0));
    let mut rows = Rows::of("C50-C52");
    for (what, seeds, ours) in [
        ("first come, first served: mean TTFT, ms", 436.29, fcfs.0),
        ("first come, first served: the long one, ms", 294.1, fcfs.1),
        ("shortest first: mean TTFT, ms", 169.72, sjf.0),
        ("shortest first: the long one, ms", 578.5, sjf.1),
    ] {
        rows.tell(what, seeds, ours);
        near(ours, seeds, 0.005);
    }
    rows.check();
}

/// Ageing is in TFLOP a ms in the lecture; at 0.495 TFLOP a ms that is seconds a second.
#[test]
fn promotion_lets_the_long_prompt_go_after_eight_short_ones_at_1_31_and_after_seven_at_1_393() {
    let mut rows = Rows::of("P3");
    for (k, mean, long) in
        [(1.0, 303.0, 436.3), (1.31, 329.7, 407.9), (1.394, 343.0, 393.6), (2.0, 369.6, 365.2)]
    {
        let ours = policy_mix(Policy::Sjf, k / 0.495);
        rows.tell(&format!("promotion at {k}: mean TTFT, ms"), mean, ours.0);
        rows.tell(&format!("promotion at {k}: the long one, ms"), long, ours.1);
        near(ours.0, mean, 0.005);
        near(ours.1, long, 0.005);
    }
    rows.check();
}

/// Costs of a short and of a long prompt in ms, and the part of the requests that are short.
const COSTS: [f64; 2] = [14.217, 294.11];
const SHORTS: f64 = 20.0 / 21.0;

/// Mean time to the first token of a short and of a long one in ms, first come, first served and
/// shortest first, at so many a ms: Pollaczek and Khinchine, and its form for two classes of which
/// one goes first.
fn expected(rate: f64) -> [[f64; 2]; 2] {
    let parts = [SHORTS, 1.0 - SHORTS];
    let moment = |power| (0..2).map(|i| parts[i] * COSTS[i].powi(power)).sum::<f64>();
    let left = rate * moment(2) / 2.0;
    let (load, short_load) = (rate * moment(1), rate * parts[0] * COSTS[0]);
    let fcfs = left / (1.0 - load);
    let sjf = [left / (1.0 - short_load), left / (1.0 - short_load) / (1.0 - load)];
    [[fcfs + COSTS[0], fcfs + COSTS[1]], [sjf[0] + COSTS[0], sjf[1] + COSTS[1]]]
}

/// The mean of the same server over the same arrivals when the key is cost - k waited, which
/// SEEDS.md simulates: of all, and of the long ones, in ms.
fn linear_ageing(arrivals: &[(f64, f64)], k: f64) -> (f64, f64) {
    let (mut now, mut next, mut waiting) = (0.0_f64, 0, Vec::<(f64, f64)>::new());
    let (mut all, mut long) = (Vec::new(), Vec::new());
    // Of two keys that fall at one rate the difference stays: cost + k arrival.
    let key = |job: &(f64, f64)| job.1 + k * job.0;
    while next < arrivals.len() || !waiting.is_empty() {
        if waiting.is_empty() {
            now = now.max(arrivals[next].0);
        }
        while arrivals.get(next).is_some_and(|job| job.0 <= now) {
            waiting.push(arrivals[next]);
            next += 1;
        }
        let by_key = |a: &usize, b: &usize| key(&waiting[*a]).total_cmp(&key(&waiting[*b]));
        let least = (0..waiting.len()).min_by(by_key).expect("somebody waits");
        let (arrived, cost) = waiting.remove(least);
        now += cost;
        all.push(now - arrived);
        if cost > 100.0 {
            long.push(now - arrived);
        }
    }
    let mean = |times: &[f64]| times.iter().sum::<f64>() / times.len() as f64;
    (mean(&all), mean(&long))
}

#[test]
fn more_ageing_trades_the_mean_for_the_long_prompts() {
    let all = traffic(20_000, "poisson:29.04", "choice:512=20,8192=1", "1");
    let by = |policy, ageing| {
        let report = run(&prefill_server(policy, ageing), &all);
        let [long, short] = [report.latency_long, report.latency_short]
            .map(|latency| 1e3 * latency.expect("of both kinds").ttft.mean);
        (1e3 * report.latency.ttft.mean, long, short)
    };
    let mut rows = Rows::of("P5");
    let [fcfs_expected, sjf_expected] = expected(29.04e-3);
    let fcfs = by(Policy::Fcfs, 0.0);
    rows.tell("first come, first served: mean TTFT, ms", 422.0, fcfs.0);
    near(fcfs.2, fcfs_expected[0], 0.08);
    near(fcfs.1, fcfs_expected[1], 0.08);
    let arrival = |request: &Arrival| {
        let is_long = request.prompt.len() > 512;
        (1e3 * request.at.as_secs_f64(), COSTS[usize::from(is_long)])
    };
    let arrivals: Vec<(f64, f64)> = all.requests.iter().map(arrival).collect();
    let ageings =
        [(0.0, 169.0, 912.0), (0.2, 198.0, 884.0), (0.5, 284.0, 802.0), (2.65, 390.0, 701.0)];
    let (mut before, mut linear_before) = ((0.0, f64::INFINITY), (0.0, f64::INFINITY));
    for (k, seeds_mean, seeds_long) in ageings {
        let (mean, long, short) = by(Policy::Sjf, k);
        let linear = linear_ageing(&arrivals, k);
        rows.tell(&format!("promotion {k}: mean TTFT, ms"), seeds_mean, mean);
        rows.tell(&format!("promotion {k}: mean of the long ones, ms"), seeds_long, long);
        rows.tell(&format!("linear ageing {k}: mean TTFT, ms"), seeds_mean, linear.0);
        rows.tell(&format!("linear ageing {k}: mean of the long ones, ms"), seeds_long, linear.1);
        assert!(mean >= before.0 && long <= before.1, "{k}: {mean}, {long}");
        assert!(linear.0 >= linear_before.0 && linear.1 <= linear_before.1, "{k}: {linear:?}");
        (before, linear_before) = ((mean, long), linear);
        if k == 0.0 {
            near(short, sjf_expected[0], 0.08);
            near(long, sjf_expected[1], 0.08);
            near(mean, linear.0, 0.01);
            near(long, linear.1, 0.01);
        }
    }
    // Both end at first come, first served.
    let (mean, long, _) = by(Policy::Sjf, 1e6);
    for end in [linear_ageing(&arrivals, 1e6), (mean, long)] {
        near(end.0, fcfs.0, 0.01);
        near(end.1, fcfs.1, 0.01);
    }
    rows.check();
}

/// Eight servers, short and long jobs of 14 and 294 steps, more work than they can do.
#[test]
fn places_for_long_jobs_help_them_only_from_their_share_of_the_work_on() {
    // Eight places and 1.25 of what they can do: 574 steps of work in 21 jobs.
    let mut all = traffic(3_000, "poisson:0.366", "choice:50=20,5000=1", "1");
    for (i, request) in (0..).zip(&mut all.requests) {
        let len = if request.prompt.len() > 50 { 294 } else { 14 };
        request.answer = [Run::new(2_000_000_000 + i, len)].into_iter().collect();
    }
    let wait = |places| {
        let simulation =
            simulation(unit_steps(), model("7b-mha"), StepModel::Roofline, 200_000, |config| {
                (config.policy, config.sjf_ageing) = (Policy::Sjf, 0.0);
                (config.max_num_seqs, config.reserve_long) = (Some(8), places);
            });
        run(&simulation, &all)
    };
    let reports = [0, 1, 2, 4].map(wait);
    let mut rows = Rows::of("P6");
    let seeds = [(1_862.0, 68.0), (1_836.0, 62.0), (1_788.0, 66.0), (1_094.0, 962.0)];
    let waits = reports.map(|report| {
        // Long jobs are 294 of 294 + 20 x 14 steps.
        near(report.occupancy.long_share.expect("of both kinds"), 294.0 / 574.0, 0.05);
        let [long, short] = [report.latency_long, report.latency_short];
        [long, short].map(|latency| latency.expect("of both kinds").queue.mean)
    });
    for ((places, seeds), waits) in [0, 1, 2, 4].into_iter().zip(seeds).zip(waits) {
        rows.tell(&format!("{places} places kept: long ones wait, steps"), seeds.0, waits[0]);
        rows.tell(&format!("{places} places kept: short ones wait, steps"), seeds.1, waits[1]);
    }
    // Half of eight places is what long jobs have anyway.
    for few in [waits[1], waits[2]] {
        near(few[0], waits[0][0], 0.05);
    }
    assert!(waits[3][0] < 0.7 * waits[0][0], "{waits:?}");
    assert!(waits[3][1] > 2.0 * waits[0][1], "somebody pays");
    rows.check();
}
