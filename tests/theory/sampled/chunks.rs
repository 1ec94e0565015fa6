//! Prompts in chunks beside sequences that generate (SEEDS.md sections 4.1 and 4.3).

#[path = "../../support/control.rs"]
mod control;

use std::time::Duration;

use control::{BLOCK_BYTES, SLOT_BYTES, scheduler_of};
use deltapool::config::EngineConfig;
use deltapool::scheduler::{End, Form, Prompt, Scheduler, SequenceId, StepReport};
use deltapool::simulate::{Report, StepLine, StepModel, StepWork, formulas, step_cost};

use super::super::page::Rows;
use super::{
    NO_BUDGET, hardware, lines, model, near, requests, simulation, unit_steps,
    with_common_beginning,
};

/// Sequences that generate beside the prompt.
const DECODES: usize = 32;

/// A prompt of 8,192 tokens beside 32 sequences with 2,048 tokens each.
struct LongPrompt {
    ttft: f64,
    /// The longest step that computed some of it.
    stall: f64,
    steps: usize,
    report: Report,
}

fn one_long_prompt(budget: usize) -> LongPrompt {
    const ARRIVES: f64 = 8.0;
    const REST_ARRIVES: Duration = Duration::from_secs(3);
    let simulation = simulation(
        hardware("h100-seed-a"),
        model("70b-gqa"),
        StepModel::Roofline,
        200_000,
        |config| {
            (config.max_num_batched_tokens, config.prefix_cache) = (budget, true);
            (config.long_prompt, config.max_num_seqs) = (4_096, Some(DECODES + 1));
        },
    );
    // Behind the first one prompts come in quickly: they have all but their last tokens in common.
    let mut all = with_common_beginning(DECODES, 2_047, "400");
    all.requests[1..].iter_mut().for_each(|request| request.at = REST_ARRIVES);
    all.requests.extend(requests([(ARRIVES, 8_192, 1)]).requests);
    let (report, lines) = lines(&simulation, &all);
    let mixed: Vec<&StepLine> = lines
        .iter()
        .filter(|line| line.t + line.seconds > ARRIVES && line.prompt_tokens > 0)
        .collect();
    assert!(mixed.iter().all(|line| line.decodes == DECODES), "all of them generate meanwhile");
    assert!(mixed.iter().all(|line| line.decodes + line.prompt_tokens <= budget), "{budget}");
    assert_eq!(mixed.iter().map(|line| line.prompt_tokens).sum::<usize>(), 8_192);
    let stall = mixed.iter().map(|line| line.seconds).fold(0.0, f64::max);
    let ttft = report.latency_long.expect("one is long").ttft.max;
    LongPrompt { ttft, stall, steps: mixed.len(), report }
}

/// Seconds of a step of the 70B with a chunk behind so many tokens, and with `decodes` sequences.
fn seconds(decodes: usize, start: usize, rows: usize) -> f64 {
    let chunks = [(start, rows)];
    let decode_context = (decodes * 2_048) as f64;
    let work = StepWork { decodes, decode_context, chunks: &chunks, dead_context: 0.0 };
    step_cost(StepModel::Roofline, &hardware("h100-seed-a"), &model("70b-gqa"), &work).seconds
}

#[test]
fn chunks_cut_a_stall_of_two_and_a_half_seconds_and_cost_little_time_to_the_first_token() {
    // Budget; seconds to the first token and of the longest step; ITL P50 and P99, mean TPOT, ms.
    let table = [
        (NO_BUDGET, 2.522, 2.504, [57.3, 58.0, 63.4]),
        (8_192, 2.569, 2.494, [57.3, 58.0, 63.4]),
        (4_096, 2.568, 1.290, [57.3, 58.0, 63.2]),
        (2_048, 2.566, 0.655, [57.3, 590.0, 62.9]),
        (1_024, 2.597, 0.329, [57.3, 313.0, 62.4]),
        (512, 2.720, 0.165, [57.3, 162.0, 61.5]),
        (256, 2.867, 0.082, [57.4, 81.0, 59.1]),
        (199, 3.028, 0.064, [57.4, 63.0, 57.7]),
        (128, 4.939, 0.058, [57.4, 58.0, 57.4]),
    ];
    let mut rows = Rows::of("4.3");
    let mut before: Option<(f64, f64)> = None;
    for (budget, seeds_ttft, seeds_stall, seeds_gaps) in table {
        let LongPrompt { ttft, stall, steps, report } = one_long_prompt(budget);
        let name = if budget == NO_BUDGET { "no budget".to_owned() } else { budget.to_string() };
        rows.tell(&format!("budget {name}: TTFT, s"), seeds_ttft, ttft);
        rows.tell(&format!("budget {name}: longest step, s"), seeds_stall, stall);
        let (itl, tpot) = (report.latency.itl, report.latency.tpot.mean);
        let gaps = [("ITL P50", itl.p50), ("ITL P99", itl.p99), ("mean TPOT", tpot)];
        for ((what, ours), seeds) in gaps.into_iter().zip(seeds_gaps) {
            rows.tell(&format!("budget {name}: {what}, ms"), seeds, 1e3 * ours);
        }
        assert_eq!(steps, 8_192_usize.div_ceil(budget - DECODES), "budget {budget}");
        if let Some((ttft_before, stall_before)) = before {
            assert!(stall < stall_before, "the longest step shrinks with the budget");
            assert!(ttft > ttft_before - 0.06, "to within a step");
        }
        before = Some((ttft, stall));
        // The last of the chunks is behind the whole prompt; contexts grow by 400 tokens at most.
        let chunk = (budget - DECODES).min(8_192);
        let (whole, last) = (seconds(DECODES, 0, chunk), seconds(DECODES, 8_192 - chunk, chunk));
        assert!(stall <= 1.03 * last, "{budget}: {stall}, {last}");
        // F10 counts each chunk as a full one in front of which nothing is: a bound where chunks
        // are few, up to twice too high.
        let bound = steps as f64 * whole;
        if [512, 2_048, 8_192].contains(&budget) {
            assert!(ttft <= 1.05 * bound + 0.06, "{budget}: {ttft}, {bound}");
        }
        assert!(budget != 8_192 || bound > 1.9 * ttft, "{ttft}, {bound}");
        let (is_blind, max) = (itl.p99 < 0.06, itl.max);
        if budget >= 4_096 {
            assert!(is_blind && max > 1.2, "P99 does not see a stall of {max} s: {}", itl.p99);
        } else if budget >= 256 {
            assert!(!is_blind, "{budget}: {}", itl.p99);
        }
    }
    rows.check();
}

/// Effect 2: a step of decodes and a step of a chunk, over one with both.
#[test]
fn a_chunk_beside_decodes_costs_less_than_a_step_of_its_own() {
    let mut rows = Rows::of("4.3 fused");
    for (chunk, seeds) in
        [(64, 1.87), (128, 1.87), (167, 1.86), (256, 1.57), (480, 1.32), (2_016, 1.08)]
    {
        let apart = seconds(DECODES, 0, 0) + seconds(0, 0, chunk);
        let ratio = apart / seconds(DECODES, 0, chunk);
        rows.tell(&format!("chunk of {chunk}: apart over together"), seeds, ratio);
        near(ratio, seeds, 0.01);
    }
    for step_model in [StepModel::Roofline, StepModel::Phased] {
        for (start, rows) in [(0, 1), (0, 8_192), (100_000, 64), (5_000, 3_000)] {
            let cost = |decodes: usize, chunks: &[(usize, usize)]| {
                let decode_context = (decodes * 2_048) as f64;
                let work = StepWork { decodes, decode_context, chunks, dead_context: 0.0 };
                step_cost(step_model, &hardware("h100"), &model("kimi-linear"), &work).seconds
            };
            let chunks = [(start, rows)];
            assert!(cost(64, &chunks) <= cost(64, &[]) + cost(0, &chunks), "{start}, {rows}");
        }
    }
    rows.check();
}

/// 512 sequences fill the budget of 512: without a floor the prompt would never start.
#[test]
fn a_prompt_starts_though_generating_takes_all_of_the_budget() {
    let none = EngineConfig { prefill_floor: 0, ..EngineConfig::default() };
    let error = none.check().expect_err("a floor of 0").to_string();
    assert!(error.contains("--prefill-floor 0: a multiple of 64 from 64"), "{error}");
    assert_eq!(formulas::chunk_plan(8_192, 512, 512, 1), [0; 0]);
    let mut rows = Rows::of("4.3 floor");
    for (floor, seeds_steps, seeds_ttft) in [(64, 128, 20.0), (128, 64, 9.7)] {
        let simulation = simulation(
            hardware("h100-seed-a"),
            model("70b-gqa"),
            StepModel::Roofline,
            1_400_000,
            |config| {
                (config.max_num_batched_tokens, config.prefill_floor) = (512, floor);
                (config.max_num_seqs, config.prefix_cache) = (Some(512), true);
            },
        );
        let mut all = with_common_beginning(511, 2_047, "1200");
        all.requests.extend(requests([(60.0, 8_192, 1)]).requests);
        let (report, lines) = lines(&simulation, &all);
        let mixed: Vec<&StepLine> =
            lines.iter().filter(|line| line.t > 59.0 && line.prompt_tokens > 0).collect();
        let ttft = report.latency_long.expect("one is long").ttft.max;
        rows.tell(
            &format!("floor {floor}: steps with the prompt"),
            seeds_steps as f64,
            mixed.len() as f64,
        );
        rows.tell(&format!("floor {floor}: TTFT, s"), seeds_ttft, ttft);
        assert!(mixed.len() <= seeds_steps && mixed.len() >= seeds_steps - 8, "{}", mixed.len());
        assert!(mixed.iter().all(|line| line.decodes == 511), "nobody is skipped");
        // F11, behind the step that ran.
        let longest = mixed.iter().map(|line| line.seconds).fold(0.0, f64::max);
        assert!(ttft <= longest + formulas::floor_ttft_bound(8_192, floor, longest), "{ttft}");
        assert!(longest < 0.35, "two steps of SEEDS.md's rotation: {longest}");
    }
    rows.check();
}

/// With a hybrid's grid of 64 a budget of 512 beside 32 sequences has 448 tokens for a prompt.
#[test]
fn on_a_grid_of_64_a_long_prompt_takes_19_steps_instead_of_18() {
    let steps = |grid| {
        let mut model = model("70b-gqa");
        model.grid = grid;
        let simulation = simulation(unit_steps(), model, StepModel::Roofline, 200_000, |config| {
            config.max_num_batched_tokens = 512;
        });
        let short = (0..DECODES).map(|_| (0.0, 1, 100));
        let (_, lines) = lines(&simulation, &requests(short.chain([(1.5, 8_192, 1)])));
        lines.iter().filter(|line| line.t > 1.0 && line.prompt_tokens > 0).count()
    };
    assert_eq!((steps(1), steps(64)), (18, 19));
}

/// The chunks in which the scheduler computes a prompt of so many tokens beside those that
/// generate.
fn chunks(scheduler: &mut Scheduler, tokens: &[u32], budget: usize) -> Vec<usize> {
    let prompt = scheduler.submit(&Prompt::new(tokens, 1)).expect("it fits")[0];
    let (mut chunks, mut report) = (Vec::new(), StepReport::default());
    while chunks.iter().sum::<usize>() < tokens.len() {
        let plan = scheduler.plan(Duration::ZERO);
        let rows: usize = plan.spans.iter().map(|span| span.rows).sum();
        assert!(rows <= budget, "{rows} tokens of {budget}");
        let (first, last) = plan.spans.split_at(DECODES);
        assert!(first.iter().all(|span| span.form == Form::Step && span.rows == 1));
        let of: Vec<SequenceId> = last.iter().map(|span| span.sequence).collect();
        assert_eq!(of, [prompt], "decodes first, then the prompt");
        chunks.push(last[0].rows);
        control::answer(&plan, &mut report);
        scheduler.commit(plan, &report);
    }
    scheduler.end(prompt, End::Finished);
    chunks
}

/// G3.
#[test]
fn a_prompt_of_any_length_is_cut_as_the_closed_form_says() {
    const LONGEST: usize = 8_192;
    let tokens = vec![1; LONGEST];
    for (budget, grid) in [(512, 1), (512, 64), (2_048, 1), (2_048, 64), (8_192, 1), (8_192, 64)] {
        let bytes = 4_000 * 43_425_792;
        let mut scheduler = scheduler_of((SLOT_BYTES, BLOCK_BYTES), (bytes, 0), |limits| {
            (limits.max_num_batched_tokens, limits.grid) = (budget, grid);
        });
        for _ in 0..DECODES {
            scheduler.submit(&Prompt::new(&[1], 99_000)).expect("it fits");
        }
        control::until_all_decode(&mut scheduler, DECODES);
        for len in 1..=LONGEST {
            let plan = formulas::chunk_plan(len, budget, DECODES, grid);
            assert_eq!(plan.iter().sum::<usize>(), len);
            assert_eq!(chunks(&mut scheduler, &tokens[..len], budget), plan, "{len} at {budget}");
        }
    }
}
