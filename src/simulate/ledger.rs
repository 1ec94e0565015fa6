//! What a simulation remembers of its requests and steps, and what follows from it.

use std::collections::BTreeMap;
use std::time::Duration;

use super::figures::{
    Fairness, Goodput, Latencies, Occupied, Preempted, Spread, Stalls, Steps, Throughput,
};
use super::formulas::price_per_million;
use super::hardware::HardwareProfile;
use super::modelled::Totals;
use super::traffic::Traffic;
use crate::engine::StepRecord;
use crate::request::Event;
use crate::scheduler::{Occupancy, SchedulerStats};

/// What became of a request.
#[derive(Debug, Clone, Copy, Default)]
struct Kept {
    is_long: bool,
    prompt_tokens: usize,
    /// When it came; none before.
    arrived: Option<Duration>,
    started: Option<Duration>,
    first_token: Option<Duration>,
    last_token: Duration,
    tokens: usize,
    has_ended: bool,
    preemptions: u64,
    recomputed_tokens: u64,
}

impl Kept {
    /// Seconds from its arrival.
    fn since_arrival(&self, time: Duration) -> f64 {
        time.saturating_sub(self.arrived.unwrap_or_default()).as_secs_f64()
    }

    fn queue(&self) -> Option<f64> {
        self.started.map(|at| self.since_arrival(at))
    }

    fn ttft(&self) -> Option<f64> {
        self.first_token.map(|first| self.since_arrival(first))
    }

    /// Mean time of a token after the first; none with one token.
    fn tpot(&self) -> Option<f64> {
        let first = self.first_token.filter(|_| self.tokens > 1)?;
        Some((self.last_token - first).as_secs_f64() / (self.tokens - 1) as f64)
    }
}

/// Remembers what happened.
#[derive(Debug)]
pub(super) struct Ledger {
    requests: Vec<Kept>,
    entered: usize,
    ended: usize,
    /// Gaps between tokens of requests with a short prompt, and with a long one.
    gaps: [Vec<f64>; 2],
    /// Durations of steps that computed something.
    steps: Vec<f64>,
    steps_with_prompts: u64,
    mixed_steps: u64,
    decode_steps: u64,
    decodes: u64,
    /// Seconds by how many were on the device.
    running_seconds: Vec<f64>,
    /// The part of them in which somebody waited.
    queued_seconds: Vec<f64>,
    all_steps: u64,
    /// The program of each request.
    programs: Vec<Option<usize>>,
    /// Requests of each program that have not ended.
    unended: BTreeMap<usize, usize>,
    /// Tokens served to each program, while all of them had some to come.
    served: BTreeMap<usize, u64>,
    is_contended: bool,
}

impl Ledger {
    pub fn new(traffic: &Traffic, long_prompt: usize) -> Ledger {
        let kept = |len: usize| Kept {
            is_long: len >= long_prompt,
            prompt_tokens: len,
            ..Kept::default()
        };
        let programs: Vec<_> = traffic.requests.iter().map(|request| request.program).collect();
        let (mut unended, mut served) = (BTreeMap::new(), BTreeMap::new());
        for program in programs.iter().flatten() {
            *unended.entry(*program).or_insert(0) += 1;
            served.insert(*program, 0);
        }
        Ledger {
            requests: traffic.requests.iter().map(|request| kept(request.prompt.len())).collect(),
            entered: 0,
            ended: 0,
            gaps: Default::default(),
            steps: Vec::new(),
            steps_with_prompts: 0,
            mixed_steps: 0,
            decode_steps: 0,
            decodes: 0,
            running_seconds: Vec::new(),
            queued_seconds: Vec::new(),
            all_steps: 0,
            programs,
            unended,
            served,
            is_contended: true,
        }
    }

    /// Serves the program of a request; its prompt counts with the first token.
    fn serve(&mut self, index: usize, tokens: usize) {
        let program = self.programs[index].filter(|_| self.is_contended);
        if let Some(served) = program.and_then(|program| self.served.get_mut(&program)) {
            *served += tokens as u64;
        }
    }

    /// A request has ended: from when on a program has none left, its share says nothing.
    fn leave(&mut self, index: usize) {
        let program = self.programs[index];
        if let Some(unended) = program.and_then(|program| self.unended.get_mut(&program)) {
            *unended -= 1;
            self.is_contended &= *unended > 0;
        }
    }

    /// A request came at `at`.
    pub fn enter(&mut self, index: usize, at: Duration) {
        self.requests[index].arrived = Some(at);
        self.entered += 1;
    }

    /// Requests that came and have not ended.
    pub fn open(&self) -> usize {
        self.entered - self.ended
    }

    pub fn ended(&self) -> usize {
        self.ended
    }

    /// Takes a step that took `time`; who is where is told as of its end.
    pub fn note_step(
        &mut self,
        step: &StepRecord,
        occupancy: &Occupancy,
        time: Duration,
        has_computed: bool,
    ) {
        let seconds = time.as_secs_f64();
        self.all_steps += 1;
        let running = occupancy.running + occupancy.in_flight;
        note_seconds(&mut self.running_seconds, running, seconds);
        if occupancy.waiting > 0 {
            note_seconds(&mut self.queued_seconds, running, seconds);
        }
        if has_computed {
            self.steps.push(seconds);
            let (has_prompts, decodes) = (step.prompt_tokens > 0, step.decoding);
            self.steps_with_prompts += u64::from(has_prompts);
            self.mixed_steps += u64::from(has_prompts && decodes > 0);
            self.decode_steps += u64::from(decodes > 0);
            self.decodes += decodes as u64;
        }
    }

    /// Takes an event of a request that came of a step from `start` to `now`; true when the request
    /// has ended.
    pub fn note_event(
        &mut self,
        index: usize,
        event: &Event,
        (start, now): (Duration, Duration),
    ) -> bool {
        if event.token.is_some() {
            let kept = &self.requests[index];
            let prompt = if kept.first_token.is_none() { kept.prompt_tokens } else { 0 };
            self.serve(index, prompt + 1);
        }
        if event.finish.is_some() {
            self.leave(index);
        }
        let kept = &mut self.requests[index];
        kept.started.get_or_insert(start);
        if event.token.is_some() {
            match kept.first_token {
                None => kept.first_token = Some(now),
                Some(_) => {
                    let gap = now - kept.last_token;
                    self.gaps[usize::from(kept.is_long)].push(gap.as_secs_f64());
                }
            }
            kept.last_token = now;
            kept.tokens += 1;
        }
        let Some(finish) = &event.finish else { return false };
        kept.has_ended = true;
        kept.preemptions = finish.figures.preemptions;
        kept.recomputed_tokens = finish.figures.recomputed_tokens;
        self.ended += 1;
        true
    }

    /// When the last token came.
    pub fn end(&self) -> Duration {
        self.requests.iter().map(|kept| kept.last_token).max().unwrap_or_default()
    }

    /// Of all requests.
    pub fn latencies(&self) -> Latencies {
        self.latencies_of(|_| true, self.gaps.concat())
    }

    /// Of the requests with a short prompt, and with a long one, where there are both.
    pub fn latencies_by_length(&self) -> Option<(Latencies, Latencies)> {
        let long = self.requests.iter().filter(|kept| kept.is_long).count();
        let has_both = long > 0 && long < self.requests.len();
        let of = |is_long: bool| {
            let gaps = self.gaps[usize::from(is_long)].clone();
            self.latencies_of(|kept| kept.is_long == is_long, gaps)
        };
        has_both.then(|| (of(false), of(true)))
    }

    fn latencies_of(&self, is_asked: impl Fn(&Kept) -> bool, mut gaps: Vec<f64>) -> Latencies {
        let asked = || self.requests.iter().filter(|kept| is_asked(kept));
        let end = |kept: &Kept| kept.has_ended.then(|| kept.since_arrival(kept.last_token));
        Latencies {
            queue: spread(asked().filter_map(Kept::queue)),
            ttft: spread(asked().filter_map(Kept::ttft)),
            tpot: spread(asked().filter_map(Kept::tpot)),
            itl: Spread::of(&mut gaps),
            e2e: spread(asked().filter_map(end)),
        }
    }

    /// Gaps that are long beside the median of all.
    pub fn stalls(&self, median: f64) -> Stalls {
        let above =
            |times: f64| self.gaps.iter().flatten().filter(|gap| **gap > times * median).count();
        Stalls { above_2x: above(2.0), above_5x: above(5.0), above_10x: above(10.0) }
    }

    pub fn goodput(&self, (ttft, tpot): (Option<f64>, Option<f64>)) -> Option<Goodput> {
        if ttft.is_none() && tpot.is_none() {
            return None;
        }
        let keeps = |value: Option<f64>, target: Option<f64>| {
            target.is_none_or(|target| value.is_none_or(|value| value <= target))
        };
        let good =
            |kept: &&Kept| kept.has_ended && keeps(kept.ttft(), ttft) && keeps(kept.tpot(), tpot);
        let good = self.requests.iter().filter(good).count() as f64;
        Some(Goodput {
            ttft,
            tpot,
            share: good / self.requests.len().max(1) as f64,
            requests_per_second: good / self.end().as_secs_f64().max(f64::MIN_POSITIVE),
        })
    }

    pub fn throughput(&self, price_per_hour: Option<f64>) -> Throughput {
        let seconds = self.end().as_secs_f64().max(f64::MIN_POSITIVE);
        let tokens: usize = self.requests.iter().map(|kept| kept.tokens).sum();
        let prompts: usize = self.requests.iter().map(|kept| kept.prompt_tokens).sum();
        let generated_tokens = tokens as f64 / seconds;
        Throughput {
            requests: self.ended as f64 / seconds,
            prompt_tokens: prompts as f64 / seconds,
            generated_tokens,
            price_per_million: price_per_hour
                .map(|price| price_per_million(generated_tokens, price)),
        }
    }

    pub fn steps(&mut self, totals: &Totals, hardware: &HardwareProfile) -> Steps {
        let computed = self.steps.len();
        let seconds = Spread::of(&mut self.steps);
        let time: f64 = totals.bound_seconds.iter().sum();
        let part = |seconds: f64| seconds / time.max(f64::MIN_POSITIVE);
        let all = self.end().as_secs_f64().max(f64::MIN_POSITIVE);
        Steps {
            count: self.all_steps,
            with_prompts: self.steps_with_prompts as f64 / computed.max(1) as f64,
            mixed: self.mixed_steps,
            seconds,
            bound_by_bandwidth: part(totals.bound_seconds[0]),
            bound_by_compute: part(totals.bound_seconds[1]),
            bound_by_overhead: part(totals.bound_seconds[2]),
            mbu: totals.bytes / all / hardware.memory_bandwidth,
            mfu: totals.flops / all / hardware.flops,
            padding_rows: totals.padding_rows as f64 / self.decode_steps.max(1) as f64,
        }
    }

    pub fn occupancy(&self, most_running: usize, places: usize) -> Occupied {
        let seconds = self.running_seconds.iter().enumerate();
        let running: f64 = seconds.map(|(running, seconds)| running as f64 * seconds).sum();
        Occupied {
            generating: self.decodes as f64 / self.decode_steps.max(1) as f64,
            running: running / self.end().as_secs_f64().max(f64::MIN_POSITIVE),
            most_running,
            long_share: self.long_share(),
            seconds_with_a_place_free_and_a_queue: self.queued_seconds.iter().take(places).sum(),
            seconds_by_running: self.running_seconds.clone(),
        }
    }

    /// Of the time in places, the part of long prompts, if there are both kinds.
    fn long_share(&self) -> Option<f64> {
        let seconds = |is_long: bool| {
            let asked = self.requests.iter().filter(|kept| kept.is_long == is_long);
            let times =
                asked.filter_map(|kept| Some(kept.last_token.saturating_sub(kept.started?)));
            times.sum::<Duration>().as_secs_f64()
        };
        let (short, long) = (seconds(false), seconds(true));
        (short > 0.0 && long > 0.0).then(|| long / (short + long))
    }

    /// All but how busy the link was.
    pub fn preempted(&self, stats: &SchedulerStats) -> Preempted {
        Preempted {
            preemptions: self.requests.iter().map(|kept| kept.preemptions).sum(),
            parked: stats.parked,
            recomputed: stats.recomputed,
            host_full: stats.host_full,
            returned: stats.returned,
            for_blocks: stats.preempted_for_blocks,
            for_slots: stats.preempted_for_slots,
            for_places: stats.preempted_for_places,
            victim_tokens: stats.preempted_tokens as f64
                / (stats.parked + stats.recomputed).max(1) as f64,
            recomputed_tokens: self.requests.iter().map(|kept| kept.recomputed_tokens).sum(),
            swapped_bytes: stats.swapped_bytes,
            returned_bytes: stats.returned_bytes,
            ..Preempted::default()
        }
    }

    /// What each program got, if there are any.
    pub fn fairness(&self, traffic: &Traffic) -> Option<Fairness> {
        let mut programs: BTreeMap<String, Vec<&Kept>> = BTreeMap::new();
        for (kept, request) in self.requests.iter().zip(&traffic.requests) {
            programs.entry(request.program?.to_string()).or_default().push(kept);
        }
        if programs.is_empty() {
            return None;
        }
        let each = || programs.iter().map(|(name, all)| (name.clone(), all));
        let served = self.served.iter().map(|(program, tokens)| (program.to_string(), *tokens));
        let mut fairness = Fairness::of(served.collect());
        let waits = |all: &Vec<&Kept>, wait: fn(&Kept) -> Option<f64>| {
            spread(all.iter().filter_map(|kept| wait(kept)))
        };
        fairness.queue = each().map(|(name, all)| (name, waits(all, Kept::queue))).collect();
        fairness.ttft = each().map(|(name, all)| (name, waits(all, Kept::ttft))).collect();
        Some(fairness)
    }
}

/// Adds seconds with so many on the device.
fn note_seconds(by_running: &mut Vec<f64>, running: usize, seconds: f64) {
    by_running.resize(by_running.len().max(running + 1), 0.0);
    by_running[running] += seconds;
}

fn spread(values: impl Iterator<Item = f64>) -> Spread {
    Spread::of(&mut values.collect::<Vec<f64>>())
}
