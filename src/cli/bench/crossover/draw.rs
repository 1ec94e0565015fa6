//! The chart: an arm a line over the length, both axes logarithmic.

use super::report::{Arm, Report, Row};
use crate::cli::chart::{Axis, Chart, Mark, Scale, Series};

/// Arms that are drawn, in the order of their colours.
const DRAWN: [Arm; 4] = [Arm::Swap, Arm::Recompute, Arm::RecomputeMarginal, Arm::Checkpoint];

/// The chart for a terminal: what was measured, or else the model lines.
pub fn text_chart(report: &Report) -> Chart {
    let series = DRAWN.iter().enumerate().filter_map(|(colour, arm)| {
        series(report, *arm, arm.as_str().to_owned(), (colour, Mark::Dots), Row::ms)
    });
    chart(report, series.collect())
}

/// The chart for a file: what was measured over the model lines, and where they cross.
pub fn full_chart(report: &Report) -> Chart {
    let mut all = Vec::new();
    for (colour, arm) in DRAWN.iter().enumerate() {
        let model = format!("{}, model", arm.as_str());
        all.extend(series(report, *arm, model, (colour, Mark::Line), |row| row.model_ms));
        let name = arm.as_str().to_owned();
        all.extend(series(report, *arm, name, (colour, Mark::Dots), |row| row.ms_p50));
    }
    let crossover = &report.crossover;
    for (name, tokens) in
        [("measured", crossover.measured_tokens), ("predicted", crossover.predicted_tokens)]
    {
        all.extend(tokens.and_then(|tokens| marker(report, name, tokens)));
    }
    chart(report, all)
}

fn chart(report: &Report, series: Vec<Series>) -> Chart {
    Chart {
        title: report.title.clone(),
        x: Axis::new("tokens", Scale::Log),
        y: Axis::new("milliseconds", Scale::Log),
        series,
    }
}

/// An arm as a series, if any of its rows has a value.
fn series(
    report: &Report,
    arm: Arm,
    name: String,
    (colour, mark): (usize, Mark),
    value: fn(&Row) -> Option<f64>,
) -> Option<Series> {
    let rows = report.rows.iter().filter(|row| row.arm == arm);
    let points: Vec<(f64, f64)> =
        rows.filter_map(|row| Some((row.tokens as f64, value(row)?))).collect();
    (!points.is_empty()).then_some(Series { name, mark, colour, points })
}

/// An upright line at L*, where it lies within the lengths.
fn marker(report: &Report, name: &str, tokens: f64) -> Option<Series> {
    let lengths = report.rows.iter().map(|row| row.tokens as f64);
    let times = report.rows.iter().filter(|row| DRAWN.contains(&row.arm)).filter_map(Row::ms);
    let times: Vec<f64> = times.filter(|ms| *ms > 0.0).collect();
    let (first, last) = (lengths.clone().min_by(f64::total_cmp)?, lengths.max_by(f64::total_cmp)?);
    let low = times.iter().copied().min_by(f64::total_cmp)?;
    let high = times.iter().copied().max_by(f64::total_cmp)?;
    (first..=last).contains(&tokens).then(|| Series {
        name: format!("L* {name}: {tokens:.0} tokens"),
        mark: Mark::Line,
        colour: if name == "measured" { 5 } else { 6 },
        points: vec![(tokens, low), (tokens, high)],
    })
}
