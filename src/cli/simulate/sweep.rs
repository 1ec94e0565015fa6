//! `deltapool simulate sweep`: one simulation for each of several values of a flag.

use std::ffi::OsString;

use clap::{Args, Parser};
use serde_json::{Map, Value, json};

use super::args::{simulation, usage};
use super::charts::{self, Plot};
use super::run::{RunArgs, simulate, wrong_plot};
use super::timeline::{Recorder, Timeline};
use crate::cli::CliError;
use crate::cli::chart::Chart;
use crate::cli::output::{JsonTarget, print};
use crate::simulate::{Report, StepLine};

/// Simulations of one sweep.
const MOST_CELLS: usize = 1000;

/// Arguments of `simulate sweep`.
#[derive(Debug, Args)]
#[command(
    after_help = "Example: deltapool simulate sweep --over max-num-batched-tokens=8192,2048,512 \
                        --model 70b-gqa --hardware h100-seed-a --device-memory 60GB\n\
                        The flags behind --over are those of `deltapool simulate run`."
)]
pub struct SweepArgs {
    /// A flag of `simulate run` and its values; several give all combinations. It may stand
    /// anywhere.
    #[arg(long, value_name = "FLAG=VALUE,VALUE..")]
    pub over: Vec<String>,
    /// The other flags of `simulate run`.
    #[arg(value_name = "RUN FLAGS", trailing_var_arg = true, allow_hyphen_values = true)]
    pub rest: Vec<OsString>,
}

/// One simulation of a sweep.
#[derive(Debug, Parser)]
#[command(name = "deltapool simulate run", args_override_self = true, no_binary_name = true)]
struct Cell {
    #[command(flatten)]
    run: RunArgs,
}

/// Flags that say what is told of all runs together.
const OF_THE_SWEEP: [&str; 7] = ["json", "plot", "svg", "csv", "trace", "perfetto", "quiet"];

/// Runs the command.
pub fn run(args: &SweepArgs) -> Result<(), CliError> {
    let (over, rest) = overs(args)?;
    let axes = over.iter().map(|text| axis(text)).collect::<Result<Vec<_>, CliError>>()?;
    for (i, (flag, _)) in axes.iter().enumerate() {
        if OF_THE_SWEEP.contains(&flag.as_str()) {
            return Err(usage(format!("--over {flag}: --{flag} is of the sweep, not of a run")));
        }
        if axes[..i].iter().any(|(other, _)| other == flag) {
            return Err(usage(format!("--over {flag}: it is swept twice")));
        }
    }
    let cells: usize = axes.iter().map(|(_, values)| values.len()).product();
    if cells > MOST_CELLS {
        return Err(usage(format!("--over: {cells} simulations; {MOST_CELLS} at most")));
    }
    let parse = |settings: &[(String, String)]| {
        let flags = settings.iter().map(|(flag, value)| format!("--{flag}={value}").into());
        let cell = Cell::try_parse_from(rest.iter().cloned().chain(flags));
        cell.map(|cell| cell.run).map_err(|error| CliError::Arguments(Box::new(error)))
    };
    // All of them are read before the first is run.
    let all = combinations(&axes);
    let cells = all.iter().map(|settings| parse(settings)).collect::<Result<Vec<_>, CliError>>()?;
    let output = &cells[0].output;
    let target = output.json.target();
    if let Some(plot) = output.plot.filter(|plot| !plot.is_of_sweep()) {
        return Err(usage(wrong_plot(plot, "one run", Plot::is_of_sweep)));
    }
    if output.trace.is_some() || output.perfetto.is_some() {
        return Err(usage("--trace and --perfetto are of one run, not of a sweep"));
    }
    if output.draws() && output.plot != Some(Plot::Batch) {
        can_be_drawn(&axes).map_err(usage)?;
        let has_targets = output.slo_ttft_ms.or(output.slo_tpot_ms).is_some();
        if output.plot == Some(Plot::Goodput) && !has_targets {
            return Err(usage(charts::NO_TARGETS));
        }
    }
    output.check()?;
    let (mut reports, mut timelines) = (Vec::new(), Vec::new());
    for (settings, cell) in all.iter().zip(&cells) {
        let simulation = simulation(&cell.machine, &cell.rules, &cell.output)?;
        let traffic = cell.traffic.traffic()?;
        let mut recorder = Recorder::new(&traffic);
        let mut observe = |line: &StepLine| recorder.note(line);
        let is_followed = output.plot == Some(Plot::Batch);
        let observe = is_followed.then_some(&mut observe as &mut dyn FnMut(&StepLine));
        let report = simulate(&simulation, &traffic, cell.output.quiet, observe)?;
        if target != JsonTarget::Output {
            print(&row(settings, &report, reports.is_empty()))?;
        }
        reports.push(report);
        timelines.push(recorder.timeline);
    }
    output.show(chart(&axes, &all, output.plot, (&reports, &timelines)), true)?;
    let rows = all.iter().zip(&reports).map(|(settings, report)| {
        let settings: Map<String, Value> =
            settings.iter().map(|(flag, value)| (flag.clone(), value.as_str().into())).collect();
        json!({ "settings": settings, "report": report })
    });
    target.write(&Value::Array(rows.collect()))
}

/// Whether what is swept has a place on an axis.
fn can_be_drawn(axes: &[(String, Vec<String>)]) -> Result<(), String> {
    match axes {
        [(_, values)] => charts::numbers(values).map(drop),
        _ => Err("a sweep of one flag is drawn".to_owned()),
    }
}

/// What the sweep changed; why it cannot be drawn, where it cannot.
fn chart(
    axes: &[(String, Vec<String>)],
    all: &[Vec<(String, String)>],
    plot: Option<Plot>,
    (reports, timelines): (&[Report], &[Timeline]),
) -> Result<Chart, String> {
    if plot == Some(Plot::Batch) {
        let name = |settings: &Vec<(String, String)>| {
            let values: Vec<&str> = settings.iter().map(|(_, value)| value.as_str()).collect();
            values.join(" ")
        };
        let runs: Vec<_> = all.iter().map(name).zip(timelines).collect();
        return Ok(charts::bars(&reports[0].header.traffic, &runs));
    }
    can_be_drawn(axes)?;
    let (flag, values) = &axes[0];
    charts::of_sweep(plot.unwrap_or(Plot::Waiting), flag, values, reports)
}

/// What is swept, and the other flags; `--over` may stand among these.
fn overs(args: &SweepArgs) -> Result<(Vec<String>, Vec<OsString>), CliError> {
    let wanted = || usage("--over FLAG=VALUE,VALUE.. is wanted");
    let (mut over, mut rest) = (args.over.clone(), Vec::new());
    let mut flags = args.rest.iter();
    while let Some(flag) = flags.next() {
        match flag.to_str().and_then(|text| text.strip_prefix("--over")) {
            Some("") => over.push(flags.next().and_then(|o| o.to_str()).ok_or_else(wanted)?.into()),
            Some(text) if text.starts_with('=') => over.push(text[1..].to_owned()),
            _ => rest.push(flag.clone()),
        }
    }
    if over.is_empty() { Err(wanted()) } else { Ok((over, rest)) }
}

fn axis(text: &str) -> Result<(String, Vec<String>), CliError> {
    let wrong = || usage(format!("--over {text}: FLAG=VALUE,VALUE.. is wanted"));
    let (flag, values) = text.split_once('=').ok_or_else(wrong)?;
    let flag = flag.trim_start_matches('-');
    if flag.is_empty() || values.is_empty() {
        return Err(wrong());
    }
    // Values with commas of their own are parted by semicolons.
    let separator = if values.contains(';') { ';' } else { ',' };
    let values = values.split(separator).map(|value| value.trim().to_owned()).collect();
    Ok((flag.to_owned(), values))
}

/// All settings, the last flag's values running fastest.
fn combinations(axes: &[(String, Vec<String>)]) -> Vec<Vec<(String, String)>> {
    axes.iter().fold(vec![Vec::new()], |all, (flag, values)| {
        let with = |settings: &Vec<(String, String)>, value: &String| {
            settings.iter().cloned().chain([(flag.clone(), value.clone())]).collect()
        };
        all.iter().flat_map(|settings| values.iter().map(move |v| with(settings, v))).collect()
    })
}

/// A line of the table, with its header above the first.
fn row(settings: &[(String, String)], report: &Report, is_first: bool) -> String {
    let width = |(flag, value): &(String, String)| flag.len().max(value.len()).max(8) + 2;
    let mut text = String::new();
    if is_first {
        for setting in settings {
            text.push_str(&format!("{:<1$}", setting.0, width(setting)));
        }
        text.push_str(
            "gen tok/s  TTFT P50     P99 s  TPOT P50 ms  ITL P50       P99    max ms  running  \
             pushed out\n",
        );
    }
    for setting in settings {
        text.push_str(&format!("{:<1$}", setting.1, width(setting)));
    }
    let latency = &report.latency;
    text.push_str(&format!(
        "{:>9.1}  {:>8.3}  {:>8.3}  {:>11.2}  {:>7.2}  {:>8.2}  {:>8.2}  {:>7.1}  {:>10}\n",
        report.throughput.generated_tokens,
        latency.ttft.p50,
        latency.ttft.p99,
        1e3 * latency.tpot.p50,
        1e3 * latency.itl.p50,
        1e3 * latency.itl.p99,
        1e3 * latency.itl.max,
        report.occupancy.running,
        report.preempted.preemptions,
    ));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_flags_give_all_combinations() {
        let axes: Vec<_> = ["a=1,2", "--b=x;y,z"].map(|text| axis(text).expect("an axis")).into();
        let all: Vec<String> = combinations(&axes)
            .iter()
            .map(|settings| settings.iter().map(|(f, v)| format!("{f}{v}")).collect())
            .collect();
        assert_eq!(all, ["a1bx", "a1by,z", "a2bx", "a2by,z"]);
        for wrong in ["a", "=1", "a=", "--=2"] {
            assert!(axis(wrong).is_err(), "{wrong}");
        }
    }
}
