//! What a replay gave: a table of one screen, and one JSON object.

use std::fmt;

use serde::Serialize;

use super::sizes::Sizes;
use crate::cli::output::grouped;
use crate::simulate::{CacheFigures, DeviceMemory, Outcome, Setup, Share, TierFigures, Workload};

/// The figures of a replay. Field names are the keys of the JSON form.
#[derive(Debug, Serialize)]
pub struct Report {
    workload: String,
    model: Model,
    device: TierReport,
    host: TierReport,
    policy: String,
    grid_tokens: usize,
    /// None when all were open together.
    concurrency: Option<usize>,
    #[serde(flatten)]
    all: ShareReport,
    first_half: ShareReport,
    second_half: ShareReport,
    #[serde(flatten)]
    cache: CacheFigures,
    transfers_out: u64,
    transfers_in: u64,
    demoted_bytes: u64,
    promoted_bytes: u64,
    swapped_bytes: u64,
    preemptions: u64,
    steps: u64,
    seconds: f64,
}

#[derive(Debug, Serialize)]
struct Model {
    config: String,
    slot_bytes: usize,
    block_bytes: usize,
}

#[derive(Debug, Serialize)]
struct TierReport {
    /// None without a limit.
    memory_bytes: Option<usize>,
    #[serde(flatten)]
    figures: TierFigures,
}

#[derive(Debug, Serialize)]
struct ShareReport {
    #[serde(flatten)]
    share: Share,
    cached_percent: f64,
    ideal_percent: f64,
    of_ideal_percent: f64,
}

impl From<Share> for ShareReport {
    fn from(share: Share) -> ShareReport {
        ShareReport {
            share,
            cached_percent: share.cached_percent(),
            ideal_percent: share.ideal_percent(),
            of_ideal_percent: share.of_ideal_percent(),
        }
    }
}

impl Report {
    /// The report on `workload`, replayed on `setup`.
    pub fn new(workload: &Workload, sizes: &Sizes, setup: &Setup, outcome: &Outcome) -> Report {
        let device_bytes = match setup.device_memory {
            DeviceMemory::Bytes(bytes) => Some(bytes),
            DeviceMemory::Unlimited => None,
        };
        let scheduler = &outcome.scheduler;
        Report {
            workload: workload.name.clone(),
            model: Model {
                config: sizes.model.clone(),
                slot_bytes: sizes.slot_bytes,
                block_bytes: sizes.block_bytes,
            },
            device: TierReport { memory_bytes: device_bytes, figures: outcome.device },
            host: TierReport { memory_bytes: Some(setup.host_memory), figures: outcome.host },
            policy: setup.policy.to_string(),
            grid_tokens: setup.state_grid,
            concurrency: setup.concurrency.or((!workload.is_burst).then_some(1)),
            all: outcome.all.into(),
            first_half: outcome.first_half.into(),
            second_half: outcome.second_half.into(),
            cache: outcome.cache,
            transfers_out: outcome.transfers_out,
            transfers_in: outcome.transfers_in,
            demoted_bytes: scheduler.demoted_bytes,
            promoted_bytes: scheduler.promoted_bytes,
            swapped_bytes: scheduler.swapped_bytes,
            preemptions: scheduler.parked + scheduler.recomputed,
            steps: scheduler.steps,
            seconds: outcome.time.as_secs_f64(),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "workload   {}", self.workload)?;
        writeln!(
            f,
            "sizes      {}: slot {} bytes, block {} bytes (state f32, all else bf16)",
            self.model.config,
            grouped(self.model.slot_bytes),
            grouped(self.model.block_bytes),
        )?;
        write_tier(f, "device", &self.device)?;
        write_tier(f, "host", &self.host)?;
        let open = match self.concurrency {
            Some(open) => format!("{} open", grouped(open)),
            None => "all open".to_owned(),
        };
        let grid = grouped(self.grid_tokens);
        writeln!(f, "policy     {}, grid {grid}, {open} at a time\n", self.policy)?;
        write_shares(f, self)?;
        let count = |count: u64| grouped(usize::try_from(count).unwrap_or(usize::MAX));
        writeln!(
            f,
            "\nstates     {} on the device at most, {} on the host",
            grouped(self.device.figures.most_states),
            grouped(self.host.figures.most_states),
        )?;
        let cache = &self.cache;
        writeln!(
            f,
            "snapshots  {} taken, {} left out; {} evicted, {} of the host; {} demoted, {} promoted",
            grouped(cache.snapshots),
            grouped(cache.left_out),
            grouped(cache.evicted),
            grouped(cache.host_evicted),
            grouped(cache.demoted),
            grouped(cache.promoted),
        )?;
        writeln!(
            f,
            "matched    {} tokens, {} of them computed again",
            grouped(cache.matched_tokens),
            grouped(cache.replayed_tokens),
        )?;
        writeln!(
            f,
            "transfers  {} to the host, {} back; {} bytes of states and {}, {} of requests",
            count(self.transfers_out),
            count(self.transfers_in),
            count(self.demoted_bytes),
            count(self.promoted_bytes),
            count(self.swapped_bytes),
        )?;
        writeln!(f, "preempted  {} times", count(self.preemptions),)?;
        write!(f, "time       {:.2} s for {} steps", self.seconds, count(self.steps))
    }
}

fn write_tier(f: &mut fmt::Formatter<'_>, name: &str, tier: &TierReport) -> fmt::Result {
    let figures = &tier.figures;
    if figures.pages == 0 {
        return writeln!(f, "{name:<10} no memory");
    }
    let memory =
        tier.memory_bytes.map_or("unlimited".to_owned(), |b| format!("{} bytes", grouped(b)));
    let slots = match figures.slots_per_page {
        0 => String::new(),
        1 => "1 slot or ".to_owned(),
        slots => format!("{slots} slots or "),
    };
    writeln!(
        f,
        "{name:<10} {memory}, {} pages of {} ({slots}{} blocks), {} held at most",
        grouped(figures.pages),
        grouped(figures.page_bytes),
        figures.blocks_per_page,
        grouped(figures.most_pages),
    )
}

fn write_shares(f: &mut fmt::Formatter<'_>, report: &Report) -> fmt::Result {
    let titles = ["requests", "prompt tokens", "cached %", "ideal %", "of ideal %", "hits"];
    let row = |of: &ShareReport| {
        [
            grouped(of.share.requests),
            grouped(of.share.prompt_tokens),
            format!("{:.2}", of.cached_percent),
            format!("{:.2}", of.ideal_percent),
            format!("{:.1}", of.of_ideal_percent),
            grouped(of.share.hits),
        ]
    };
    let rows = [
        ("", titles.map(str::to_owned)),
        ("all", row(&report.all)),
        ("first half", row(&report.first_half)),
        ("second half", row(&report.second_half)),
    ];
    let width = |column: usize| rows.iter().map(|(_, row)| row[column].len()).max().unwrap_or(0);
    for (name, row) in &rows {
        write!(f, "{name:<11}")?;
        for (column, text) in row.iter().enumerate() {
            write!(f, "  {text:>width$}", width = width(column))?;
        }
        writeln!(f)?;
    }
    Ok(())
}
