//! What a simulation reports: plain data, whose field names are the keys of its JSON form. Times
//! are virtual seconds; nothing here depends on the machine that simulates.

use std::collections::BTreeMap;

use serde::Serialize;

/// How values are spread.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Spread {
    /// How many there are.
    pub count: usize,
    /// Their mean; all figures are 0 of nothing.
    pub mean: f64,
    /// Half of them are at most this.
    pub p50: f64,
    /// 90 percent.
    pub p90: f64,
    /// 99 percent.
    pub p99: f64,
    /// 99.9 percent: what a single long stall shows in (SEEDS.md 0, point 5).
    pub p999: f64,
    /// The largest.
    pub max: f64,
}

impl Spread {
    /// The spread of `values`, which are sorted by it.
    pub fn of(values: &mut [f64]) -> Spread {
        values.sort_unstable_by(f64::total_cmp);
        let count = values.len();
        let Some(&max) = values.last() else { return Spread::default() };
        // The nearest rank: the least value that so much of all is at or below.
        let at = |part: f64| values[((part * count as f64).ceil() as usize).clamp(1, count) - 1];
        Spread {
            count,
            mean: values.iter().sum::<f64>() / count as f64,
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p999: at(0.999),
            max,
        }
    }
}

/// How long some of the requests took, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Latencies {
    /// From arrival to the first step that computed something.
    pub queue: Spread,
    /// From arrival to the first token.
    pub ttft: Spread,
    /// Mean time of a token after the first.
    pub tpot: Spread,
    /// Between two tokens.
    pub itl: Spread,
    /// From arrival to the last token.
    pub e2e: Spread,
}

/// Gaps between tokens that were long beside the median.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Stalls {
    /// Above twice the median.
    pub above_2x: usize,
    /// Above five times.
    pub above_5x: usize,
    /// Above ten times.
    pub above_10x: usize,
}

/// Requests that kept to the targets.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Goodput {
    /// Most seconds to the first token.
    pub ttft: Option<f64>,
    /// Most seconds of a token after it, in the mean of a request.
    pub tpot: Option<f64>,
    /// Part of the requests that kept to both, 0 to 1.
    pub share: f64,
    /// So many a second.
    pub requests_per_second: f64,
}

/// What the steps did.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Steps {
    /// Steps.
    pub count: u64,
    /// Of those that computed something, the part that computed tokens of prompts, 0 to 1.
    pub with_prompts: f64,
    /// Of those, the ones that generated too.
    pub mixed: u64,
    /// Duration of a step that computed something.
    pub seconds: Spread,
    /// Of the time of such steps, the part that waited for the device's memory.
    pub bound_by_bandwidth: f64,
    /// For its arithmetic.
    pub bound_by_compute: f64,
    /// For what every step costs.
    pub bound_by_overhead: f64,
    /// Of the peak bandwidth, the part used over all the time.
    pub mbu: f64,
    /// Of the peak arithmetic.
    pub mfu: f64,
    /// Rows that only filled a bucket, in the mean of a step that generated.
    pub padding_rows: f64,
}

/// How many sequences ran.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Occupied {
    /// Sequences that generated, in the mean of the steps that generated.
    pub generating: f64,
    /// Sequences on the device, in the mean over time.
    pub running: f64,
    /// Most of them.
    pub most_running: usize,
    /// Of the time from first step to last token, all requests together, the part of those with a
    /// long prompt, 0 to 1; where there are short ones too.
    pub long_share: Option<f64>,
    /// Seconds with a place free while somebody waited.
    pub seconds_with_a_place_free_and_a_queue: f64,
    /// Seconds with none, one, two and so on of them on the device.
    pub seconds_by_running: Vec<f64>,
}

/// What the pools held, and what they lacked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Pools {
    /// Pages of the device.
    pub device_pages: usize,
    /// Most of them that held something after a step.
    pub most_device_pages: usize,
    /// Most of them that would have been free had the units been packed.
    pub most_stranded_pages: usize,
    /// Tokens that the device holds beside one slot for each of `max_num_seqs`.
    pub device_tokens: usize,
    /// Pages of the host.
    pub host_pages: usize,
    /// Steps in which somebody did not come in for want of a block.
    pub blocked_for_blocks: u64,
    /// Of a slot.
    pub blocked_for_slots: u64,
    /// Of a place.
    pub blocked_for_places: u64,
}

/// What was pushed out.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Preempted {
    /// Times.
    pub preemptions: u64,
    /// Of these, copied to the host.
    pub parked: u64,
    /// Computed again.
    pub recomputed: u64,
    /// Of those, because the host was full.
    pub host_full: u64,
    /// Times that somebody came back from the host.
    pub returned: u64,
    /// Preemptions because somebody lacked a block.
    pub for_blocks: u64,
    /// Because somebody lacked a slot.
    pub for_slots: u64,
    /// Because somebody who goes first lacked a place.
    pub for_places: u64,
    /// Tokens that one who was pushed out had computed, in the mean.
    pub victim_tokens: f64,
    /// Tokens computed again.
    pub recomputed_tokens: u64,
    /// Bytes of sequences copied either way.
    pub swapped_bytes: u64,
    /// Of these, bytes that came back.
    pub returned_bytes: u64,
    /// Of all the time, the part in which the link out was busy, 0 to 1.
    pub link_out_busy: f64,
    /// The link in.
    pub link_in_busy: f64,
}

/// What was there already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Reused {
    /// Tokens of prompts.
    pub prompt_tokens: u64,
    /// Of these, tokens that the tree knew.
    pub matched_tokens: u64,
    /// Of these, tokens that were not computed.
    pub cached_tokens: u64,
    /// Tokens that it knew and that were computed again.
    pub replayed_tokens: u64,
    /// States that it took.
    pub states_kept: usize,
    /// States that found no slot.
    pub states_left_out: usize,
    /// States evicted from the device.
    pub states_evicted: usize,
    /// Prompts of which nothing was computed.
    pub full_hits: u64,
    /// Blocks copied because they were shared and about to be written.
    pub copied_blocks: u64,
    /// Bytes of states and blocks that were kept on the host.
    pub kept_bytes: u64,
    /// Bytes of them that came back.
    pub restored_bytes: u64,
}

/// Who was served.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Fairness {
    /// Tokens that each program was served, prompts with their first token, until the first of them
    /// had no request left: shares say nothing from then on.
    pub tokens: BTreeMap<String, u64>,
    /// Jain's index of them: 1 when all got alike, one over their number when one got all.
    pub jain: f64,
    /// Seconds that the requests of each program waited.
    pub queue: BTreeMap<String, Spread>,
    /// Seconds to their first tokens.
    pub ttft: BTreeMap<String, Spread>,
}

impl Fairness {
    /// Of so many tokens each, the waits left out.
    pub fn of(tokens: BTreeMap<String, u64>) -> Fairness {
        let sum: f64 = tokens.values().map(|t| *t as f64).sum();
        let squares: f64 = tokens.values().map(|t| (*t as f64).powi(2)).sum();
        let jain = if squares > 0.0 { sum * sum / (tokens.len() as f64 * squares) } else { 1.0 };
        Fairness { tokens, jain, ..Fairness::default() }
    }
}

/// Rates over all the time.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Throughput {
    /// Requests a second.
    pub requests: f64,
    /// Tokens of prompts a second, those that were there already among them.
    pub prompt_tokens: f64,
    /// Generated tokens a second.
    pub generated_tokens: f64,
    /// Price of a million generated tokens, where an hour has one.
    pub price_per_million: Option<f64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_occurred() {
        let mut values: Vec<f64> = (1..=1_000).rev().map(f64::from).collect();
        let spread = Spread::of(&mut values);
        assert_eq!((spread.p50, spread.p90, spread.p99), (500.0, 900.0, 990.0));
        assert_eq!((spread.p999, spread.max, spread.mean), (999.0, 1_000.0, 500.5));
        assert_eq!(Spread::of(&mut [3.0]).p999, 3.0);
        assert_eq!(Spread::of(&mut []), Spread::default());
    }

    #[test]
    fn jains_index_is_one_of_equals_and_their_inverse_number_of_a_favourite() {
        let of = |tokens: &[u64]| {
            let named = tokens.iter().enumerate().map(|(i, tokens)| (i.to_string(), *tokens));
            Fairness::of(named.collect()).jain
        };
        assert_eq!((of(&[5, 5, 5, 5]), of(&[7, 0, 0, 0]), of(&[])), (1.0, 0.25, 1.0));
        assert_eq!(of(&[6, 2]), 64.0 / (2.0 * 40.0));
    }
}
