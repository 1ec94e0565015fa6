//! Charts of simulations: what a sweep changed, and who was where over time.

use crate::cli::chart::{Axis, Chart, Mark, Scale, Series};
use crate::simulate::{Report, StepLine};

/// Points of a line over time.
const POINTS: usize = 400;

/// Columns and rows of a chart in a terminal.
pub const TEXT_SIZE: (usize, usize) = (78, 20);

/// Times to the first token and between tokens over the values of a flag; none if these are not
/// three numbers or more that grow.
pub fn of_sweep(flag: &str, values: &[String], reports: &[Report]) -> Option<Chart> {
    let mut points: Vec<(f64, &Report)> = Vec::new();
    for (value, report) in values.iter().zip(reports) {
        points.push((value.parse().ok().filter(|x: &f64| x.is_finite() && *x > 0.0)?, report));
    }
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    points.dedup_by(|a, b| a.0 == b.0);
    if points.len() < 3 {
        return None;
    }
    let names = ["TTFT P99", "TTFT P50", "ITL P99", "ITL P50"];
    let series = names.into_iter().enumerate().map(|(colour, name)| {
        let of = |(x, report): &(f64, &Report)| {
            let (ttft, itl) = (report.latency.ttft, report.latency.itl);
            (*x, 1e3 * [ttft.p99, ttft.p50, itl.p99, itl.p50][colour])
        };
        // What is 0 has no place on a logarithmic axis.
        let points = points.iter().map(of).filter(|point| point.1 > 0.0).collect();
        Series { name: name.to_owned(), mark: Mark::Line, colour, points }
    });
    Some(Chart {
        title: format!("Waiting over --{flag}"),
        x: Axis::new(flag, Scale::Log),
        y: Axis::new("ms", Scale::Log),
        series: series.collect(),
    })
}

/// What is kept of the steps for a chart over time.
#[derive(Debug, Default)]
pub struct Timeline {
    /// Of each step its time, sequences on the device, waiting and parked, and free pages.
    points: Vec<[f64; 5]>,
}

impl Timeline {
    /// Takes a step.
    pub fn note(&mut self, line: &StepLine) {
        let counts = [line.running, line.waiting, line.parked, line.free_pages];
        let [running, waiting, parked, free] = counts.map(|count| count as f64);
        self.points.push([line.t, running, waiting, parked, free]);
    }

    /// Sequences by where they are, and how many of the device's `pages` are in use.
    pub fn chart(&self, title: &str, pages: usize) -> Chart {
        let used = |free: f64| 100.0 * (1.0 - free / pages.max(1) as f64);
        let each = self.points.len().div_ceil(POINTS).max(1);
        let names = ["on the device", "waiting", "parked", "device pages in use, %"];
        let series = names.into_iter().enumerate().map(|(i, name)| {
            let mean = |points: &[[f64; 5]]| {
                let sum: f64 = points.iter().map(|point| point[i + 1]).sum();
                let mean = sum / points.len() as f64;
                (points[0][0], if i == 3 { used(mean) } else { mean })
            };
            let points = self.points.chunks(each).map(mean).collect();
            Series { name: name.to_owned(), mark: Mark::Line, colour: i, points }
        });
        Chart {
            title: title.to_owned(),
            x: Axis::new("seconds", Scale::Linear),
            y: Axis::new("sequences, or %", Scale::Linear),
            series: series.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(t: f64, running: usize) -> StepLine {
        StepLine {
            t,
            seconds: 1.0,
            decodes: running,
            prompt_tokens: 0,
            running,
            waiting: 0,
            parked: 0,
            free_pages: 5,
            copies_out: 0,
            copies_in: 0,
        }
    }

    #[test]
    fn many_steps_become_few_points_that_keep_their_mean() {
        let mut timeline = Timeline::default();
        for i in 0..10 * POINTS {
            timeline.note(&line(i as f64, i % 10));
        }
        let chart = timeline.chart("a run", 10);
        let points = &chart.series[0].points;
        assert_eq!(points.len(), POINTS);
        assert!(points.iter().all(|point| point.1 == 4.5));
        assert_eq!(chart.series[3].points[7], (70.0, 50.0));
    }
}
