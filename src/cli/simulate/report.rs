//! A simulation's report for people, on one screen.

use std::fmt;

use crate::cli::output::grouped;
use crate::simulate::{Latencies, Report, Spread};

/// A report.
#[derive(Debug)]
pub struct Shown<'r>(pub &'r Report);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let report = self.0;
        let header = &report.header;
        writeln!(f, "traffic    {}", header.traffic)?;
        writeln!(
            f,
            "on         {}, {}, {} steps, {} tokens and {} sequences at most",
            header.hardware,
            header.model,
            header.step_model,
            grouped(header.max_num_batched_tokens),
            header.max_num_seqs,
        )?;
        writeln!(
            f,
            "by         {}, {} batching, preempt {}, grid {}, {:.1} GB on the device",
            header.scheduling_policy,
            header.batching,
            header.preempt,
            header.grid,
            header.device_bytes as f64 / 1e9,
        )?;
        let rates = &report.throughput;
        writeln!(
            f,
            "rates      {:.2} requests, {:.0} prompt and {:.1} generated tokens a second over \
             {:.1} s",
            rates.requests, rates.prompt_tokens, rates.generated_tokens, report.seconds
        )?;
        if let Some(price) = rates.price_per_million {
            writeln!(f, "price      {price:.4} a million generated tokens")?;
        }
        writeln!(
            f,
            "\n{:<18}{:>10}{:>10}{:>10}{:>10}{:>10}{:>10}",
            "", "mean", "P50", "P90", "P99", "P99.9", "max"
        )?;
        write_latencies(f, "", &report.latency)?;
        for (name, latency) in [("short ", &report.latency_short), ("long ", &report.latency_long)]
        {
            if let Some(latency) = latency {
                write_row(f, &format!("{name}TTFT s"), &latency.ttft, 1.0)?;
                write_row(f, &format!("{name}ITL ms"), &latency.itl, 1e3)?;
            }
        }
        writeln!(f)?;
        write_steps(f, report)?;
        write_memory(f, report)?;
        write_service(f, report)
    }
}

fn write_latencies(f: &mut fmt::Formatter<'_>, name: &str, all: &Latencies) -> fmt::Result {
    write_row(f, &format!("{name}queue s"), &all.queue, 1.0)?;
    write_row(f, &format!("{name}TTFT s"), &all.ttft, 1.0)?;
    write_row(f, &format!("{name}TPOT ms"), &all.tpot, 1e3)?;
    write_row(f, &format!("{name}ITL ms"), &all.itl, 1e3)?;
    write_row(f, &format!("{name}E2E s"), &all.e2e, 1.0)
}

fn write_row(f: &mut fmt::Formatter<'_>, name: &str, row: &Spread, scale: f64) -> fmt::Result {
    write!(f, "{name:<18}")?;
    for value in [row.mean, row.p50, row.p90, row.p99, row.p999, row.max] {
        write!(f, "{:>10}", short(value * scale))?;
    }
    writeln!(f)
}

/// Four digits of a number.
fn short(value: f64) -> String {
    match value {
        value if value >= 1_000.0 => format!("{value:.0}"),
        value if value >= 100.0 => format!("{value:.1}"),
        value if value >= 10.0 => format!("{value:.2}"),
        value => format!("{value:.3}"),
    }
}

fn percent(part: f64) -> String {
    format!("{:.1} %", 100.0 * part)
}

fn number(number: u64) -> String {
    grouped(number as usize)
}

fn write_steps(f: &mut fmt::Formatter<'_>, report: &Report) -> fmt::Result {
    let Report { steps, stalls, occupancy, .. } = report;
    if let Some(goodput) = &report.goodput {
        let (share, rate) = (percent(goodput.share), goodput.requests_per_second);
        writeln!(f, "goodput    {share} of the requests kept to the targets, {rate:.2} a second")?;
    }
    writeln!(
        f,
        "stalls     {} gaps above twice the median, {} above 5 times, {} above 10 times",
        grouped(stalls.above_2x),
        grouped(stalls.above_5x),
        grouped(stalls.above_10x)
    )?;
    writeln!(
        f,
        "steps      {}, {} with prompts; MBU {}, MFU {}\n           bound by bandwidth {}, compute \
         {}, overhead {}",
        number(steps.count),
        percent(steps.with_prompts),
        percent(steps.mbu),
        percent(steps.mfu),
        percent(steps.bound_by_bandwidth),
        percent(steps.bound_by_compute),
        percent(steps.bound_by_overhead),
    )?;
    writeln!(
        f,
        "sequences  {:.1} generate in a step, {:.1} on the device in the mean, {} at most\n\
         {:11}{:.1} s with a place free and a queue",
        occupancy.generating,
        occupancy.running,
        occupancy.most_running,
        "",
        occupancy.seconds_with_a_place_free_and_a_queue,
    )?;
    let (kept, places) = (report.header.reserve_long, report.header.max_num_seqs);
    let too_few = |share: &f64| kept > 0 && (kept as f64) < share * places as f64;
    if let Some(share) = occupancy.long_share.filter(too_few) {
        writeln!(
            f,
            "warning    --reserve-long {kept} is less than the {} of {places} places that long \
             prompts take anyway:\n{:11}it does little for them",
            percent(share),
            "",
        )?;
    }
    match steps.padding_rows > 0.0 {
        true => writeln!(f, "padding    {:.2} rows in a step that generates", steps.padding_rows),
        false => Ok(()),
    }
}

fn write_memory(f: &mut fmt::Formatter<'_>, report: &Report) -> fmt::Result {
    let Report { pools, preempted, .. } = report;
    writeln!(
        f,
        "pools      {} of {} pages at most, {} stranded\n           steps blocked for blocks {}, \
         for slots {}, for places {}",
        grouped(pools.most_device_pages),
        grouped(pools.device_pages),
        grouped(pools.most_stranded_pages),
        number(pools.blocked_for_blocks),
        number(pools.blocked_for_slots),
        number(pools.blocked_for_places),
    )?;
    writeln!(
        f,
        "pushed out {}: {} parked ({:.2} GB swapped), {} computed again ({} tokens)",
        number(preempted.preemptions),
        number(preempted.parked),
        preempted.swapped_bytes as f64 / 1e9,
        number(preempted.recomputed),
        number(preempted.recomputed_tokens),
    )?;
    if preempted.parked + preempted.recomputed > 0 {
        writeln!(
            f,
            "           for blocks {}, slots {}, places {}; {:.0} tokens each in the mean; {} came \
             back",
            number(preempted.for_blocks),
            number(preempted.for_slots),
            number(preempted.for_places),
            preempted.victim_tokens,
            number(preempted.returned),
        )?;
    }
    writeln!(
        f,
        "link       busy {} out, {} in, states that are kept on the host included",
        percent(preempted.link_out_busy),
        percent(preempted.link_in_busy),
    )
}

fn write_service(f: &mut fmt::Formatter<'_>, report: &Report) -> fmt::Result {
    let reuse = &report.reuse;
    let cached = reuse.cached_tokens as f64 / reuse.prompt_tokens.max(1) as f64;
    writeln!(
        f,
        "reuse      {} of the prompt tokens cached, {} matched, {} replayed\n           {} states \
         kept over the run, {} left out, {} evicted again",
        percent(cached),
        number(reuse.matched_tokens),
        number(reuse.replayed_tokens),
        grouped(reuse.states_kept),
        grouped(reuse.states_left_out),
        grouped(reuse.states_evicted),
    )?;
    let Some(fairness) = &report.fairness else { return Ok(()) };
    let programs = fairness.tokens.len();
    let longest = fairness.queue.values().map(|queue| queue.max).fold(0.0, f64::max);
    writeln!(
        f,
        "fairness   {:.4} by Jain's index of {programs} programs; {longest:.3} s waited at most",
        fairness.jain,
    )
}
