//! Charts of simulations: who was where over time, and what a sweep changed.

use std::collections::BTreeMap;

use clap::ValueEnum;

use super::timeline::{Phase, Timeline};
use crate::cli::chart::{Axis, Chart, Mark, Scale, Series};
use crate::simulate::Report;

/// Points of a line over time.
const POINTS: usize = 400;

/// Requests that are drawn one by one, and programs.
const MOST_DRAWN: usize = 48;
const MOST_PROGRAMS: usize = 7;

/// Bins of gaps from one to ten times as long.
const BINS_A_DECADE: f64 = 12.0;

/// What is drawn. The first five are of one run; batch and the last four are of a sweep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Plot {
    /// Sequences on the device, waiting and parked, and the pages in use, over time.
    Where,
    /// Pages of slots and of blocks over time, and who was pushed out.
    Pools,
    /// Requests as bars: when they waited, were computed, generated, were pushed out.
    Batch,
    /// Part of the computed tokens that each program had so far, over time.
    Programs,
    /// How many gaps between tokens were how long.
    Gaps,
    /// Times to the first token and between tokens over the values of a sweep's flag.
    Waiting,
    /// Tokens a second over the time of a token, a point for each value.
    Frontier,
    /// Requests a second that kept to the targets, over the values.
    Goodput,
    /// Part of the prompt tokens that was cached, and states kept for a request, over the values.
    Reuse,
}

impl Plot {
    /// Whether it is drawn of one run.
    pub fn is_of_run(self) -> bool {
        matches!(self, Plot::Where | Plot::Pools | Plot::Batch | Plot::Programs | Plot::Gaps)
    }

    /// Whether it is drawn of a sweep.
    pub fn is_of_sweep(self) -> bool {
        self == Plot::Batch || !self.is_of_run()
    }
}

/// Why shares of programs are not drawn.
pub const NO_PROGRAMS: &str = "--plot programs: the requests are of no programs; give --programs";

/// Why nobody kept to targets.
pub const NO_TARGETS: &str = "--plot goodput: give --slo-ttft-ms or --slo-tpot-ms";

/// The chart of a run.
///
/// # Errors
/// What the run lacks.
pub fn of_run(plot: Plot, timeline: &Timeline, report: &Report) -> Result<Chart, String> {
    let title = &report.header.traffic;
    match plot {
        Plot::Pools => Ok(pools(title, timeline)),
        Plot::Batch => Ok(bars(title, &[(String::new(), timeline)])),
        Plot::Programs if timeline.service.is_empty() => Err(NO_PROGRAMS.to_owned()),
        Plot::Programs => Ok(programs(title, timeline)),
        Plot::Gaps => Ok(gaps(title, timeline)),
        _ => Ok(places(title, timeline)),
    }
}

fn lines(names: &[&str], points: impl Fn(usize) -> Vec<(f64, f64)>) -> Vec<Series> {
    let line = |(colour, name): (usize, &&str)| Series {
        name: (*name).to_owned(),
        mark: Mark::Line,
        colour,
        points: points(colour),
    };
    names.iter().enumerate().map(line).collect()
}

fn seconds() -> Axis {
    Axis::new("seconds", Scale::Linear)
}

/// A few points that stand for all steps: of each group the time of the first and the mean.
fn over_time(timeline: &Timeline, value: impl Fn(usize) -> f64) -> Vec<(f64, f64)> {
    let count = timeline.points.len();
    let each = count.div_ceil(POINTS).max(1);
    let group = |first: usize| {
        let steps = first..count.min(first + each);
        let mean = steps.clone().map(&value).sum::<f64>() / steps.len() as f64;
        (timeline.points[first].t, mean)
    };
    (0..count).step_by(each).map(group).collect()
}

fn percent(part: usize, pages: &[usize; 3]) -> f64 {
    100.0 * part as f64 / pages.iter().sum::<usize>().max(1) as f64
}

fn places(title: &str, timeline: &Timeline) -> Chart {
    let value = |i: usize, step: usize| {
        let point = &timeline.points[step];
        match i {
            3 => 100.0 - percent(point.pages[2], &point.pages),
            i => point.sequences[i] as f64,
        }
    };
    let names = ["on the device", "waiting", "parked", "device pages in use, %"];
    Chart {
        title: title.to_owned(),
        x: seconds(),
        y: Axis::new("sequences, or %", Scale::Linear),
        series: lines(&names, |i| over_time(timeline, |step| value(i, step))),
    }
}

fn pools(title: &str, timeline: &Timeline) -> Chart {
    let share = |i: usize, step: usize| {
        let pages = &timeline.points[step].pages;
        percent(pages[i], pages)
    };
    let mut series = lines(&["pages of slots, %", "pages of blocks, %"], |i| {
        over_time(timeline, |step| share(i, step))
    });
    let pushed = timeline.points.iter().enumerate().filter(|(_, point)| point.pushed_out > 0);
    series.push(Series {
        name: "somebody is pushed out".to_owned(),
        mark: Mark::Points,
        colour: 2,
        points: pushed.map(|(step, point)| (point.t, share(0, step) + share(1, step))).collect(),
    });
    Chart {
        title: title.to_owned(),
        x: seconds(),
        y: Axis::new("% of the device's pages", Scale::Linear),
        series,
    }
}

/// Requests of one run or several as bars, those of the last run lowest.
pub fn bars(title: &str, runs: &[(String, &Timeline)]) -> Chart {
    let mut series = Vec::new();
    let mut top = 0.0;
    for (name, timeline) in runs.iter().rev() {
        for (colour, phase) in Phase::ALL.into_iter().enumerate() {
            let stays = timeline.stays.iter().filter(|stay| (stay.id as usize) < MOST_DRAWN);
            let bars = stays.filter(|stay| stay.phase == phase).flat_map(|stay| {
                let y = top + 1.0 + stay.id as f64;
                [(stay.from, y), (stay.to, y)]
            });
            let points: Vec<(f64, f64)> = bars.collect();
            if !points.is_empty() {
                let name = format!("{name} {}", phase.as_str()).trim_start().to_owned();
                series.push(Series { name, mark: Mark::Bars, colour, points });
            }
        }
        top += timeline.requests().min(MOST_DRAWN) as f64 + 2.0;
    }
    let most = runs.iter().map(|(_, timeline)| timeline.requests()).max().unwrap_or(0);
    let title = with_part(title, ("requests", MOST_DRAWN), most);
    Chart { title, x: seconds(), y: Axis::new("request", Scale::Linear), series }
}

/// The title, with what is drawn where that is not all.
fn with_part(title: &str, (what, drawn): (&str, usize), all: usize) -> String {
    match all > drawn {
        true => format!("{title}: the first {drawn} of {all} {what}"),
        false => title.to_owned(),
    }
}

fn programs(title: &str, timeline: &Timeline) -> Chart {
    let mut totals: BTreeMap<usize, usize> = BTreeMap::new();
    for service in &timeline.service {
        *totals.entry(service.program).or_default() += service.tokens;
    }
    let shown: Vec<usize> = totals.keys().copied().take(MOST_PROGRAMS).collect();
    let mut points: Vec<Vec<(f64, f64)>> = vec![Vec::new(); shown.len()];
    let (mut so_far, mut all) = (vec![0; shown.len()], 0);
    let each = timeline.service.len().div_ceil(POINTS).max(1);
    for (i, service) in timeline.service.iter().enumerate() {
        all += service.tokens;
        if let Some(at) = shown.iter().position(|program| *program == service.program) {
            so_far[at] += service.tokens;
        }
        if (i + 1) % each == 0 || i + 1 == timeline.service.len() {
            for (points, tokens) in points.iter_mut().zip(&so_far) {
                points.push((service.t, 100.0 * *tokens as f64 / all as f64));
            }
        }
    }
    let names: Vec<String> = shown.iter().map(|program| format!("program {program}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    Chart {
        title: with_part(title, ("programs", MOST_PROGRAMS), totals.len()),
        x: seconds(),
        y: Axis::new("% of the tokens computed so far", Scale::Linear),
        series: lines(&names, |i| points[i].clone()),
    }
}

fn gaps(title: &str, timeline: &Timeline) -> Chart {
    let mut bins: BTreeMap<i64, usize> = BTreeMap::new();
    for gap in timeline.gaps.iter().filter(|gap| **gap > 0.0) {
        *bins.entry(((gap * 1e3).log10() * BINS_A_DECADE).floor() as i64).or_default() += 1;
    }
    let middle = |bin: i64| 10f64.powf((bin as f64 + 0.5) / BINS_A_DECADE);
    let points = bins.into_iter().map(|(bin, count)| (middle(bin), count as f64)).collect();
    let name = "gaps between tokens".to_owned();
    Chart {
        title: title.to_owned(),
        x: Axis::new("ms", Scale::Log),
        y: Axis::new("gaps", Scale::Log),
        series: vec![Series { name, mark: Mark::Dots, colour: 0, points }],
    }
}

/// The values of a flag as numbers, three or more.
///
/// # Errors
/// When they are not, or not different.
pub fn numbers(values: &[String]) -> Result<Vec<f64>, String> {
    let number = |value: &String| value.parse().ok().filter(|x: &f64| x.is_finite());
    let numbers: Vec<f64> = values.iter().filter_map(number).collect();
    let mut sorted = numbers.clone();
    sorted.sort_by(f64::total_cmp);
    sorted.dedup();
    match sorted.len() >= 3 && sorted.len() == values.len() {
        true => Ok(numbers),
        false => {
            Err("a sweep of one flag over three different numbers or more is drawn".to_owned())
        }
    }
}

/// What the values of a flag changed.
///
/// # Errors
/// What the sweep lacks for it.
pub fn of_sweep(
    plot: Plot,
    flag: &str,
    values: &[String],
    reports: &[Report],
) -> Result<Chart, String> {
    let mut points: Vec<(f64, &Report)> = numbers(values)?.into_iter().zip(reports).collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    let is_positive = points[0].0 > 0.0;
    let x = Axis::new(flag, if is_positive { Scale::Log } else { Scale::Linear });
    let series = |names: &[&str], value: &dyn Fn(usize, &Report) -> f64| {
        let mut series = lines(names, |i| points.iter().map(|(x, r)| (*x, value(i, r))).collect());
        series.iter_mut().for_each(|series| series.mark = Mark::Dots);
        series
    };
    match plot {
        Plot::Frontier => Ok(frontier(flag, &points)),
        Plot::Goodput if points.iter().any(|(_, report)| report.goodput.is_none()) => {
            Err(NO_TARGETS.to_owned())
        }
        Plot::Goodput => {
            let value = |i: usize, report: &Report| match (&report.goodput, i) {
                (Some(goodput), 0) => goodput.requests_per_second,
                _ => report.throughput.requests,
            };
            Ok(Chart {
                title: format!("Requests that kept to the targets over --{flag}"),
                x,
                y: Axis::new("requests a second", Scale::Linear),
                series: series(&["kept to the targets", "all"], &value),
            })
        }
        Plot::Reuse => {
            let value = |i: usize, report: &Report| match i {
                0 => {
                    let reuse = &report.reuse;
                    100.0 * reuse.cached_tokens as f64 / reuse.prompt_tokens.max(1) as f64
                }
                _ => report.reuse.states_kept as f64 / report.header.requests.max(1) as f64,
            };
            Ok(Chart {
                title: format!("Reuse over --{flag}"),
                x,
                y: Axis::new("%, or states", Scale::Linear),
                series: series(&["prompt tokens cached, %", "states kept for a request"], &value),
            })
        }
        _ => {
            let value = |i: usize, report: &Report| {
                let (ttft, itl) = (report.latency.ttft, report.latency.itl);
                1e3 * [ttft.p99, ttft.p50, itl.max, itl.p999, itl.p99, itl.p50][i]
            };
            let names = ["TTFT P99", "TTFT P50", "ITL max", "ITL P99.9", "ITL P99", "ITL P50"];
            Ok(Chart {
                title: format!("Waiting over --{flag}"),
                x,
                // What is 0 has no place on it.
                y: Axis::new("ms", Scale::Log),
                series: series(&names, &value),
            })
        }
    }
}

/// Throughput over the time of a token, each value of the flag by its name.
fn frontier(flag: &str, points: &[(f64, &Report)]) -> Chart {
    let point = |(_, r): &(f64, &Report)| (1e3 * r.latency.tpot.p50, r.throughput.generated_tokens);
    let mut all: Vec<(f64, f64)> = points.iter().map(point).collect();
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    let line =
        Series { name: "in order of TPOT".to_owned(), mark: Mark::Line, colour: 6, points: all };
    let named = points.iter().enumerate().map(|(colour, of)| Series {
        name: format!("{flag} {}", of.0),
        mark: Mark::Points,
        colour,
        points: vec![point(of)],
    });
    Chart {
        title: format!("Throughput over the time of a token, --{flag} changing"),
        x: Axis::new("TPOT P50, ms", Scale::Linear),
        y: Axis::new("generated tokens a second", Scale::Linear),
        series: [line].into_iter().chain(named).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::timeline::{Point, Service, Stay};
    use super::*;

    fn timeline(steps: usize) -> Timeline {
        let point = |i: usize| Point {
            t: i as f64,
            sequences: [i % 10, 0, 0],
            pages: [2, 3, 5],
            pushed_out: usize::from(i == 7),
        };
        Timeline { points: (0..steps).map(point).collect(), ..Timeline::default() }
    }

    fn points(chart: &Chart, series: usize) -> &[(f64, f64)] {
        &chart.series[series].points
    }

    #[test]
    fn many_steps_become_few_points_that_keep_their_mean() {
        let chart = places("a run", &timeline(10 * POINTS));
        assert_eq!(points(&chart, 0).len(), POINTS);
        assert!(points(&chart, 0).iter().all(|point| point.1 == 4.5));
        assert_eq!(points(&chart, 3)[7], (70.0, 50.0));
    }

    #[test]
    fn both_kinds_of_pages_are_drawn_and_who_is_pushed_out() {
        let chart = pools("a run", &timeline(10));
        assert_eq!((points(&chart, 0)[3], points(&chart, 1)[3]), ((3.0, 20.0), (3.0, 30.0)));
        assert_eq!(points(&chart, 2), [(7.0, 50.0)]);
    }

    #[test]
    fn bars_of_two_runs_lie_above_one_another() {
        let stay = |id, phase, from, to| Stay { id, phase, from, to };
        let run = Timeline {
            stays: vec![stay(0, Phase::Prompt, 0.0, 1.0), stay(1, Phase::Generating, 1.0, 4.0)],
            ..Timeline::default()
        };
        let chart = bars("two", &[("static".to_owned(), &run), ("continuous".to_owned(), &run)]);
        let of = |name: &str| {
            let series = chart.series.iter().find(|series| series.name == name).expect(name);
            series.points.clone()
        };
        assert_eq!(of("continuous generating"), [(1.0, 2.0), (4.0, 2.0)]);
        assert_eq!(of("static prompt"), [(0.0, 5.0), (1.0, 5.0)]);
        assert_eq!(chart.series.len(), 4);
    }

    #[test]
    fn shares_of_programs_are_of_all_that_was_computed_so_far() {
        let service = |t, program, tokens| Service { t, program, tokens };
        let service = vec![service(1.0, 4, 30), service(2.0, 9, 10)];
        let chart = programs("a run", &Timeline { service, ..Timeline::default() });
        assert_eq!(points(&chart, 0), [(1.0, 100.0), (2.0, 75.0)]);
        assert_eq!(points(&chart, 1), [(1.0, 0.0), (2.0, 25.0)]);
    }

    #[test]
    fn gaps_are_counted_in_bins_of_equal_ratios() {
        let gaps = vec![0.010, 0.010, 0.0101, 1.0];
        let chart = gaps_chart(gaps);
        assert_eq!(points(&chart, 0).iter().map(|p| p.1).collect::<Vec<_>>(), [3.0, 1.0]);
        let ratio = points(&chart, 0)[1].0 / points(&chart, 0)[0].0;
        assert!((ratio - 100.0).abs() < 1e-6, "{ratio}");
    }

    fn gaps_chart(gaps: Vec<f64>) -> Chart {
        super::gaps("a run", &Timeline { gaps, ..Timeline::default() })
    }
}
