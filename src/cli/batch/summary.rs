//! What a batch did: for people on standard error, and as one JSON object.

use std::fmt;
use std::time::Duration;

use serde::Serialize;

use crate::cli::output::grouped;
use crate::engine::{EngineLimits, EngineStats};
use crate::request::Figures;

/// What was written, counted as it is written.
#[derive(Debug, Clone, Copy, Default)]
pub struct Tally {
    /// Lines of the input that ask for something.
    pub requests: usize,
    /// Lines that could not be read, were refused or failed.
    pub failed: usize,
    /// Requests that were cancelled and left out.
    pub left_out: usize,
    answers: usize,
    prompt_tokens: usize,
    generated_tokens: usize,
    preemptions: u64,
    recomputed_tokens: u64,
}

impl Tally {
    /// Of `requests` requests nothing is written yet.
    pub fn new(requests: usize) -> Tally {
        Tally { requests, ..Tally::default() }
    }

    /// Counts a request whose answers have these figures.
    pub fn count(&mut self, figures: &[Figures]) {
        self.answers += figures.len();
        self.prompt_tokens += figures.first().map_or(0, |figures| figures.prompt_tokens);
        for figures in figures {
            self.generated_tokens += figures.generated_tokens;
            self.preemptions += figures.preemptions;
            self.recomputed_tokens += figures.recomputed_tokens;
        }
    }
}

/// The figures of a whole batch. Tokens and preemptions are those of the answers that were written,
/// the rest is the engine's.
#[derive(Debug, Serialize)]
pub struct Summary {
    requests: usize,
    failed: usize,
    left_out: usize,
    answers: usize,
    prompt_tokens: usize,
    generated_tokens: usize,
    seconds: f64,
    generated_tokens_per_second: f64,
    steps: u64,
    mean_running: f64,
    most_running: usize,
    device_pages: usize,
    most_pages: usize,
    most_stranded_pages: usize,
    most_stranded_bytes: usize,
    preemptions: u64,
    recomputed_tokens: u64,
    parked: u64,
    returned: u64,
    recomputed: u64,
    host_full: u64,
    swapped_bytes: u64,
    failed_transfers: u64,
    second_slots: u64,
    matched_tokens: u64,
    cached_tokens: u64,
    replayed_tokens: u64,
    full_hits: u64,
    followed: u64,
    snapshots_taken: usize,
    snapshots_left_out: usize,
    turn_ends_left_out: u64,
    checkpoints_evicted: usize,
    checkpoints_demoted: usize,
    checkpoints_promoted: usize,
    demoted_bytes: u64,
    promoted_bytes: u64,
    audit_percent: f64,
    audits: u64,
    audits_that_differ: u64,
    first_differing_layer: Option<usize>,
    pages_still_held: usize,
}

impl Summary {
    /// The summary of what `tally` counted in `time`, on an engine of its own.
    pub fn new(
        tally: &Tally,
        time: Duration,
        stats: &EngineStats,
        limits: &EngineLimits,
    ) -> Summary {
        let (scheduler, seconds) = (&stats.scheduler, time.as_secs_f64());
        Summary {
            requests: tally.requests,
            failed: tally.failed,
            left_out: tally.left_out,
            answers: tally.answers,
            prompt_tokens: tally.prompt_tokens,
            generated_tokens: tally.generated_tokens,
            seconds,
            generated_tokens_per_second: tally.generated_tokens as f64 / seconds.max(1e-9),
            steps: scheduler.steps,
            mean_running: stats.running_sum as f64 / scheduler.steps.max(1) as f64,
            most_running: stats.most_running,
            device_pages: stats.device.pages,
            most_pages: stats.most_pages,
            most_stranded_pages: stats.most_stranded_pages,
            most_stranded_bytes: stats.most_stranded_pages * limits.device.page_bytes,
            preemptions: tally.preemptions,
            recomputed_tokens: tally.recomputed_tokens,
            parked: scheduler.parked,
            returned: scheduler.returned,
            recomputed: scheduler.recomputed,
            host_full: scheduler.host_full,
            swapped_bytes: scheduler.swapped_bytes,
            failed_transfers: scheduler.failed_transfers,
            second_slots: scheduler.second_slots,
            matched_tokens: scheduler.matched_tokens,
            cached_tokens: scheduler.cached_tokens,
            replayed_tokens: scheduler.matched_tokens - scheduler.cached_tokens,
            full_hits: scheduler.full_hits,
            followed: scheduler.followed,
            snapshots_taken: stats.tree.inserted,
            snapshots_left_out: stats.tree.left_out,
            turn_ends_left_out: scheduler.turn_ends_left_out,
            checkpoints_evicted: stats.tree.lost,
            checkpoints_demoted: stats.tree.demoted,
            checkpoints_promoted: stats.tree.promoted,
            demoted_bytes: scheduler.demoted_bytes,
            promoted_bytes: scheduler.promoted_bytes,
            audit_percent: limits.config.audit_percent,
            audits: scheduler.audits,
            audits_that_differ: scheduler.audits_that_differ,
            first_differing_layer: scheduler.first_differing_layer,
            pages_still_held: stats.pages_held(),
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counted = |count: u64| grouped(usize::try_from(count).unwrap_or(usize::MAX));
        writeln!(
            f,
            "requests   {} ({} failed, {} left out), {} answers",
            grouped(self.requests),
            grouped(self.failed),
            grouped(self.left_out),
            grouped(self.answers),
        )?;
        writeln!(
            f,
            "tokens     {} of prompts, {} generated in {:.2} s: {:.0} a second",
            grouped(self.prompt_tokens),
            grouped(self.generated_tokens),
            self.seconds,
            self.generated_tokens_per_second,
        )?;
        writeln!(
            f,
            "occupancy  {:.1} sequences on the device in the mean, {} at most, {} steps",
            self.mean_running,
            grouped(self.most_running),
            counted(self.steps),
        )?;
        writeln!(
            f,
            "pages      {} of {} at most, {} still held; stranded {} at most, {} bytes",
            grouped(self.most_pages),
            grouped(self.device_pages),
            grouped(self.pages_still_held),
            grouped(self.most_stranded_pages),
            grouped(self.most_stranded_bytes),
        )?;
        writeln!(
            f,
            "preempted  {} times: {} parked, {} returned, {} computed again ({} for want of host \
             memory), {} tokens",
            counted(self.preemptions),
            counted(self.parked),
            counted(self.returned),
            counted(self.recomputed),
            counted(self.host_full),
            counted(self.recomputed_tokens),
        )?;
        writeln!(
            f,
            "transfers  {} bytes swapped, {} failed",
            counted(self.swapped_bytes),
            counted(self.failed_transfers),
        )?;
        write!(
            f,
            "reuse      {} prompt tokens known, {} of them not computed; {} states kept, {} left \
             out, {} evicted, {} copied to the host, {} brought back",
            counted(self.matched_tokens),
            counted(self.cached_tokens),
            grouped(self.snapshots_taken),
            grouped(self.snapshots_left_out),
            grouped(self.checkpoints_evicted),
            grouped(self.checkpoints_demoted),
            grouped(self.checkpoints_promoted),
        )?;
        if self.audit_percent == 0.0 {
            return Ok(());
        }
        write!(f, "\naudits     {}, ", counted(self.audits))?;
        match self.first_differing_layer {
            None if self.audits == 0 => write!(f, "for want of budget or memory to spare"),
            None => write!(f, "all found the same bits"),
            Some(layer) => {
                let differ = counted(self.audits_that_differ);
                write!(f, "{differ} found other bits, the first in layer {layer}")
            }
        }
    }
}
