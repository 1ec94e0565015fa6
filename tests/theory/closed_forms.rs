//! The closed forms: every claim within its tolerance, the errors by name, and the page.

use std::fs;
use std::path::Path;

use deltapool::simulate::claims::{
    self, Claim, Tolerance, Verdict, claims, explain, find, sections,
};
use deltapool::simulate::formulas;

/// What is off in a claim: figures that are too far from SEEDS', or that are missing.
fn off(claim: &Claim) -> Vec<String> {
    let values = (claim.work)().values;
    if values.len() != claim.expected.len() {
        return vec![format!(
            "{}: {} figures, {} expected: {values:?}",
            claim.id,
            values.len(),
            claim.expected.len()
        )];
    }
    let pairs = values.iter().zip(claim.expected).enumerate();
    pairs
        .filter(|(_, (value, expected))| !claim.tolerance.holds(**value, **expected))
        .map(|(i, (value, expected))| {
            let gap = (value / expected - 1.0) * 100.0;
            format!("{} figure {}: {value}, not {expected} ({gap:+.3} %)", claim.id, i + 1)
        })
        .collect()
}

/// Prints a section's table, and fails with all rows that are off.
fn check(title: &str) {
    let section = sections().iter().find(|section| section.title == title).unwrap();
    let mut faults = Vec::new();
    println!("{:<9}{:<42}{:<56}{:<40}verdict", "", "lecture", "ours", "grid 64");
    for claim in section.claims {
        let (worked, lecture) = ((claim.work)(), claim.lecture.unwrap_or("-"));
        let (id, ours, grid) = (claim.id, worked.figures(), worked.grid_figures());
        println!("{id:<9}{lecture:<42}{ours:<56}{grid:<40}{}", claim.verdict);
        faults.extend(off(claim));
    }
    assert!(faults.is_empty(), "{title}, {} figures off:\n{}", faults.len(), faults.join("\n"));
}

#[test]
fn static_and_continuous_batching() {
    check("Static and continuous batching");
}

#[test]
fn throughput_and_the_bytes_of_a_step() {
    check("Throughput and the bytes of a step");
}

#[test]
fn mixed_steps() {
    check("Mixed steps");
}

#[test]
fn order_of_prefills() {
    check("Order of prefills");
}

#[test]
fn swap_or_recompute() {
    check("Swap or recompute");
}

#[test]
fn graph_buckets() {
    check("Graph buckets");
    // The closed form of a stride, and all paddings counted.
    for stride in [8_usize, 16, 64] {
        let buckets: Vec<usize> = (stride..=256).step_by(stride).collect();
        assert_eq!(formulas::mean_padding(256, &buckets).0, (stride - 1) as f64 / 2.0);
    }
}

#[test]
fn two_pools_and_crossovers() {
    check("Two pools and crossovers");
}

#[test]
fn all_sections_are_checked_and_no_claim_is_left_out() {
    let checked = 8;
    assert_eq!(sections().len(), checked, "a new section needs its test");
    let ids: Vec<&str> = claims().iter().map(|claim| claim.id).collect();
    let rows = (1..=11).chain(20..=45).chain(50..=55).chain(60..=71);
    for row in rows {
        assert!(ids.contains(&format!("C{row:02}").as_str()), "C{row:02} is not there");
    }
    for id in ["B1", "G4", "M4", "M5", "M7", "M8", "M9", "M10", "E1", "E9"] {
        assert!(ids.contains(&id), "{id} is not there");
    }
    let mut unique = ids.clone();
    unique.sort_unstable();
    unique.dedup();
    assert_eq!(unique.len(), ids.len(), "two claims of one name");
}

/// A hybrid's spans end at multiples of 64 tokens.
#[test]
fn claims_about_chunks_have_the_figures_of_a_grid_of_64_and_others_none() {
    let on_grid: [(&str, &str); 6] = [
        // Chunks of 832 and 704 tokens, which budgets of up to 63 more leave as they are.
        ("C36", "927, 799 tokens"),
        // The first chunk above 167 tokens, and above 141.84, is of 192.
        ("C37", "224, 224 tokens"),
        ("C38", "same"),
        ("C39", "19; 448, 128 tokens; 5; 1984, 256 tokens; 2; 8128, 64 tokens"),
        ("C40", "same"),
        ("G4", "same"),
    ];
    for claim in claims() {
        let worked = (claim.work)();
        let expected = on_grid.iter().find(|(id, _)| *id == claim.id).map_or("-", |(_, all)| all);
        assert_eq!(worked.grid_figures(), expected, "{}", claim.id);
        let has_line = explain(claim.id).unwrap().contains("  grid 64: ");
        assert_eq!(has_line, expected != "-", "{}", claim.id);
    }
    for value in (find("G4").unwrap().work)().grid_values {
        assert!((value / 1.234841 - 1.0).abs() < 1e-6, "{value}");
    }
}

#[test]
fn what_cannot_be_tested_says_so_and_nothing_else_is_without_a_figure() {
    for claim in claims() {
        let untestable = matches!(claim.verdict, Verdict::Untestable { .. });
        assert_eq!(claim.expected.is_empty(), untestable, "{}", claim.id);
        assert_eq!(untestable, claim.id == "C29");
        assert!(!(claim.work)().lines.is_empty(), "{} shows no work", claim.id);
    }
}

/// Our figures of an error of the lectures.
#[track_caller]
fn error<const N: usize>(id: &str, lecture: f64) -> [f64; N] {
    let claim = find(id).unwrap();
    assert_eq!(off(claim), [""; 0]);
    let values = (claim.work)().values;
    assert!(!Tolerance::Relative(1e-3).holds(values[0], lecture), "the lecture's figure");
    assert!(matches!(claim.verdict, Verdict::Differs { .. }));
    values.try_into().unwrap()
}

/// `value` rounds to `shown` at so many decimals.
#[track_caller]
fn shown(value: f64, decimals: usize, shown: &str) {
    assert_eq!(format!("{value:.decimals$}"), shown);
}

#[test]
fn static_efficiency_at_batch_128_is_18_percent_not_17() {
    let [share] = error("E1", 17.0);
    shown(share, 2, "18.41");
    // 17.0 % is a batch of about 200.
    shown(100.0 / formulas::harmonic(200), 1, "17.0");
}

#[test]
fn aged_mean_time_to_first_token_is_343_ms_not_324() {
    let [mean] = error("E2", 324.0);
    shown(mean, 1, "343.0");
}

#[test]
fn ageing_of_requests_that_arrive_together_changes_nothing() {
    // The lecture has no figure for it.
    let claim = find("E3").unwrap();
    assert_eq!(off(claim), [""; 0]);
    assert_eq!((claim.work)().values, [0.0; 3]);
    assert!(matches!(claim.verdict, Verdict::Differs { .. }));
    // Nor in any other queue.
    for costs in [&[3.0, 1.0, 2.0][..], &[5.0, 5.0, 1.0], &[1.0]] {
        let jobs = formulas::Jobs { costs, rate: 1.0 };
        for k in [0.0, 0.5, 1.31, 5.0, 1e6] {
            assert_eq!(jobs.linear_ageing(k), jobs.shortest_first());
        }
    }
}

#[test]
fn ageing_at_1_31_lets_8_short_requests_go_first_not_7() {
    let [before, first_token] = error("E4", 7.0);
    assert_eq!(before, 8.0);
    assert!(first_token > 400.0, "over the cap that 1.31 was to keep");
}

#[test]
fn gqa8_context_at_30_ms_is_2304_tokens_not_2360() {
    let [tokens] = error("E5", 2360.0);
    shown(tokens, 0, "2304");
}

#[test]
fn a_prefill_spike_of_149_ms_is_7_4_times_a_step_not_6_7() {
    let [after, roofline] = error("E6", 6.7);
    shown(after, 2, "7.44");
    shown(roofline, 2, "6.67");
}

#[test]
fn batch_164_breaks_its_own_20_ms_limit_and_163_keeps_it() {
    let [ms, most] = error("E7", 20.0);
    assert!(ms > 20.0);
    assert_eq!(most, 163.0);
}

#[test]
fn the_share_of_selective_batching_counts_32_layers_and_rises() {
    let [share, limit] = error("E8", 0.004);
    shown(share, 3, "0.128");
    assert!(limit > share);
}

#[test]
fn the_chance_of_32_short_outputs_is_0_0343_not_0_0342() {
    let claim = find("E9").unwrap();
    assert_eq!(off(claim), [""; 0]);
    shown((claim.work)().values[0], 4, "0.0343");
}

#[test]
fn dense_recompute_wins_below_its_crossover_and_hybrid_swap_above_its() {
    let (params, attention, kv, compute) = (6.738e9, 524_288.0, 524_288.0, 495e12);
    for link in [16e9, 25e9, 36e9] {
        let border = formulas::dense_crossover(params, attention, kv, link, compute);
        let wins = |tokens: f64| {
            formulas::recompute_seconds(params, attention, tokens, compute)
                < formulas::swap_seconds(0.0, tokens, kv, link)
        };
        assert!(wins(border - 1.0) && !wins(border + 1.0));
    }
    for link in [4e9, 64e9] {
        let border = formulas::hybrid_crossover(449e6, 27_648.0, link, 4550.0);
        let wins = |tokens: f64| {
            formulas::swap_seconds(449e6, tokens, 27_648.0, link)
                < formulas::replay_seconds(tokens, 4550.0)
        };
        assert!(!wins(border - 1.0) && wins(border + 1.0));
    }
    assert_eq!(formulas::hybrid_crossover(449e6, 27_648.0, 1e3, 4550.0), f64::INFINITY);
}

#[test]
fn promotion_needs_the_k_that_the_closed_form_gives() {
    let mut costs = vec![7.0; 21];
    costs[0] = 145.0;
    let jobs = formulas::Jobs { costs: &costs, rate: 0.5 };
    let place = |k| jobs.promotion(k).iter().position(|job| *job == 0).unwrap();
    for shorts in 1..=20 {
        let least = formulas::promotion_threshold(145.0, 7.0, shorts, 0.5);
        assert_eq!(place(least * 1.000_001), shorts);
        assert!(place(least * 0.999_999) > shorts || shorts == 20);
    }
    assert_eq!(place(0.0), 20, "shortest first");
}

#[test]
fn formulas_of_the_loop_and_of_floors() {
    // A1, A2: SEEDS.md section 4.8.
    for (cpu, device, gain, gap) in [(20.0, 20.1, 1.995, 0.0), (5.0, 7.16, 1.70, 0.0)] {
        let [alone, ahead] = [false, true].map(|ahead| formulas::loop_seconds(cpu, device, ahead));
        assert!((alone / ahead / gain - 1.0).abs() < 2e-3);
        assert_eq!(formulas::idle_gap(cpu, device), gap);
    }
    shown(formulas::idle_gap(50.0, 20.1), 1, "29.9");
    shown(formulas::lookahead_waste(128.0) * 100.0, 2, "0.78");
    // A floor of 64 takes 8,192 tokens in 128 steps.
    assert_eq!(formulas::floor_ttft_bound(8192, 64, 0.5), 64.0);
    assert_eq!(formulas::chunk_plan(8192, 32, 32, 1), [0; 0], "the prompt never starts");
    for tokens in [1, 479, 480, 481, 8192] {
        assert_eq!(formulas::chunk_plan(tokens, 512, 32, 64).iter().sum::<usize>(), tokens);
    }
    assert_eq!(formulas::slo_budget(1.0, 100, |_| 2.0), None);
    assert_eq!(formulas::slo_budget(1.0, 100, |_| 1.0), Some(100));
    assert_eq!(formulas::slo_batch(0.001, 1e9, 2e6, 1.0, 0.0), 0.0, "weights alone take longer");
    assert_eq!(formulas::recompute_alone_seconds(0.01, 140e9, 2.8e12), 0.05);
    assert_eq!(formulas::padding(9, &[8, 32, 16]), Some(7));
    assert_eq!(formulas::padding(33, &[8, 32, 16]), None);
}

#[test]
fn an_explanation_has_the_numbers_in_the_formula() {
    let text = explain("c60").unwrap();
    for part in [
        "C60  Recompute of 512",
        "formula  F12: (2 P L + 2 d n L^2) / (pi MFU)",
        "(2 x 70e9 x 512 + 2 x 8192 x 80 x 512^2) / 495e12 = 145.50 ms",
        "lecture  145; 1,203; 12,111; 82,600 ms",
        "ours     145.50, 1202.9, 12111, 82562 ms",
        "verdict  agrees",
    ] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
    assert_eq!(explain("C99"), None);
}

/// So that a calculator can check each, without another explanation beside it.
#[test]
fn each_explanation_has_numbers_put_in_and_stands_alone() {
    for claim in claims().iter().filter(|claim| claim.id != "C29") {
        let lines = (claim.work)().lines;
        let has_numbers = |line: &String| {
            let (left, _) = line.rsplit_once(" = ").unwrap_or((line, ""));
            let is_operator = |word: &str| ["x", "/", "+", "-"].contains(&word);
            let is_sum = left.split(' ').any(is_operator) || left.contains(['^', '_']);
            is_sum && left.contains(|c: char| c.is_ascii_digit())
        };
        assert!(lines.iter().any(has_numbers), "{}: {lines:?}", claim.id);
        if ["G4", "M4", "M8", "M8-links", "M9", "M10", "C50", "C54", "E3"].contains(&claim.id) {
            let figures = lines.iter().filter(|line| has_numbers(line)).count();
            assert!(figures >= claim.expected.len(), "{}: {lines:?}", claim.id);
        }
        let first = claim.claim.split([' ', ',']).next().unwrap();
        let is_alone = !["The", "These"].contains(&first) && !claim.claim.contains("he same")
            || claim.id == "B1";
        assert!(is_alone && !claim.claim.contains(" such "), "{}: {}", claim.id, claim.claim);
    }
}

#[test]
fn an_explanation_is_not_wider_than_a_screen() {
    for claim in claims() {
        let text = explain(claim.id).unwrap();
        let long = text.lines().find(|line| line.chars().count() > 240);
        assert_eq!(long, None, "{}", claim.id);
    }
}

#[test]
fn the_page_shows_what_the_claims_say() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/theory.md");
    let page = fs::read_to_string(&path).unwrap().replace("\r\n", "\n");
    let table = claims::markdown();
    if !page.contains(&table) {
        let stale = table.lines().find(|line| !page.contains(*line)).unwrap_or("order of lines");
        panic!(
            "docs/theory.md is stale, first at\n{stale}\nreplace its tables with the output of \
             `deltapool simulate explain --markdown`"
        );
    }
}
