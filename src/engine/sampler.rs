//! Chooses the next token from a row of logits.
//!
//! A draw is a pure function of the logits, the parameters, `seed + choice`, and the tokens so far
//! (their number is the position). Nothing moves between draws: the fields of [`Sampler`] are
//! scratch memory, so draws may be made in any order, by any sampler, after a preemption or a
//! restart, and give the same token.
//!
//! Order: repetition penalty, frequency and presence penalty, bias, what is ruled out (a
//! constraint's mask, tokens that must not end the answer yet), temperature, top-k, top-p, min-p.
//! What is kept is walked in descending probability, equal ones by rising id, until the
//! walk has passed `uniform(seed + choice, position)` of the kept mass. Only as much of the
//! vocabulary is sorted as the walk needs.
//!
//! Errors that still give fluent text: penalties over the prompt where only the answer counts,
//! top-p of the mass before top-k, logprobs of the tempered distribution. `tests/sampler.rs`
//! holds a naive twin and numbers worked by hand against each of them.

mod exp;
mod ranking;

use super::mask::TokenMask;
use crate::request::{Logprobs, PromptLogprobs, SamplingParams};
use exp::{exp_nonpositive, sum_exp};
use ranking::{Ranking, key_id, key_score};

/// Why no token could be drawn: the logits are the machine's fault, not the caller's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SampleError {
    /// A logit is NaN.
    #[error("the logit of token {id} is not a number")]
    NotANumber {
        /// The first such token.
        id: usize,
    },
    /// A logit is plus infinity: there is no distribution.
    #[error("the logit of token {id} is infinite")]
    Infinite {
        /// The first such token.
        id: usize,
    },
    /// Every token is ruled out.
    #[error("no token is left: every logit is minus infinity")]
    NothingLeft,
    /// Every token that the model could write is ruled out by the request.
    #[error("the constraint and the ends ruled out leave none of the model's tokens")]
    NothingAllowed,
}

/// What a draw depends on besides the logits.
#[derive(Debug, Clone, Copy)]
pub struct Draw<'a> {
    /// The request's parameters, checked at the door.
    pub params: &'a SamplingParams,
    /// The request's seed, its own or drawn once when it was submitted.
    pub seed: u64,
    /// Which of the request's answers this is, from 0.
    pub choice: usize,
    /// Prompt and answer so far; their number is the position of the drawn token.
    pub tokens: &'a [u32],
    /// How many of `tokens` are the prompt.
    pub prompt_len: usize,
    /// What a constraint allows, if there is one.
    pub mask: Option<&'a TokenMask>,
    /// Tokens that are not to be drawn here: ends that come too early.
    pub ruled_out: [&'a [u32]; 2],
}

impl<'a> Draw<'a> {
    /// A draw for the only answer of a request, from all tokens.
    pub fn new(
        params: &'a SamplingParams,
        seed: u64,
        tokens: &'a [u32],
        prompt_len: usize,
    ) -> Self {
        let (mask, ruled_out) = (None, [&[][..]; 2]);
        Draw { params, seed, choice: 0, tokens, prompt_len, mask, ruled_out }
    }

    /// How much of a row of `vocab` logits it looks at.
    pub fn needed(&self, vocab: usize) -> Needed {
        let params = self.params;
        if !self.leaves_logits_alone() || params.logprobs.is_some() {
            return Needed::All;
        }
        match params.top_k {
            _ if params.temperature == 0.0 => Needed::Likeliest,
            count if (1..vocab).contains(&count) => Needed::First(count),
            _ => Needed::All,
        }
    }

    /// Where its token is within the kept mass, from 0 to below 1.
    fn uniform(&self) -> f64 {
        uniform(self.seed.wrapping_add(self.choice as u64), self.tokens.len() as u64)
    }

    /// Whether the logits are used as the model gave them.
    fn leaves_logits_alone(&self) -> bool {
        let rules_out = self.mask.is_some() || self.ruled_out.iter().any(|ids| !ids.is_empty());
        self.params.leaves_logits_alone() && !rules_out
    }
}

/// How much of a row of logits a draw looks at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Needed {
    /// Its likeliest token, the lowest id of equals.
    Likeliest,
    /// So many tokens: the first by falling logit, equal ones by rising id.
    First(usize),
    /// Every token.
    All,
}

/// A drawn token.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampled {
    /// Its id.
    pub id: u32,
    /// Its logprob and alternatives, when the parameters ask for them.
    pub logprobs: Option<Logprobs>,
}

/// Scratch memory for draws; holds nothing that a later draw reads.
#[derive(Debug, Default)]
pub struct Sampler {
    /// Logits after penalties and bias.
    scores: Vec<f32>,
    /// Order keys of candidate tokens (see [`order_key`]).
    keys: Vec<u64>,
    /// Running sums of the kept weights, in descending order.
    sums: Vec<f64>,
    /// Occurrences per token id; all zero between draws.
    counts: Vec<u32>,
}

impl Sampler {
    /// A sampler without memory yet; it grows with the first vocabulary it sees.
    pub fn new() -> Self {
        Self::default()
    }

    /// Draws one token.
    ///
    /// # Errors
    /// Logits that are no distribution, or nothing left to draw from.
    ///
    /// # Panics
    /// When a token id of `draw` is not below `logits.len()`, or `prompt_len` exceeds the tokens.
    pub fn draw(&mut self, logits: &[f32], draw: &Draw<'_>) -> Result<Sampled, SampleError> {
        refuse_broken(logits)?;
        let params = draw.params;
        let id = if draw.leaves_logits_alone() {
            choose(logits, draw, &mut self.keys, &mut self.sums)
        } else {
            self.scores.clear();
            self.scores.extend_from_slice(logits);
            self.counts.resize(logits.len(), 0);
            adjust(&mut self.scores, draw, &mut self.counts);
            rule_out(&mut self.scores, draw)?;
            choose(&self.scores, draw, &mut self.keys, &mut self.sums)
        };
        let logprobs = params.logprobs.map(|top| logprobs(logits, id, top, &mut self.keys));
        Ok(Sampled { id, logprobs })
    }

    /// Draws one token from those that the draw looks at ([`Needed::First`]): each with its logit,
    /// in their order. It has the bits of a draw from the whole row, which is a distribution.
    ///
    /// # Panics
    /// When there are none.
    pub fn draw_first(
        &mut self,
        first: impl Iterator<Item = (u32, f32)>,
        draw: &Draw<'_>,
    ) -> Sampled {
        let mut ranking = Ranking::of_first(first, &mut self.keys);
        let max = f64::from(key_score(ranking.key(0)));
        let filters = Filters::new(draw.params, max);
        let limit = ranking.len();
        let total = filters.total_of_first(&mut ranking, limit);
        let id = filters.walk(&mut ranking, limit, total, draw.uniform(), &mut self.sums);
        Sampled { id, logprobs: None }
    }

    /// How likely `token` is, and the `top` likeliest in its place.
    ///
    /// # Errors
    /// Logits that are no distribution.
    ///
    /// # Panics
    /// When `token` is not below `logits.len()`.
    pub fn score(
        &mut self,
        logits: &[f32],
        token: u32,
        top: usize,
    ) -> Result<PromptLogprobs, SampleError> {
        refuse_broken(logits)?;
        let id = token as usize;
        let is_before = |(other, x): (usize, &f32)| {
            usize::from(*x > logits[id] || *x == logits[id] && other < id)
        };
        let rank = 1 + logits.iter().enumerate().map(is_before).sum::<usize>();
        let logprobs = logprobs(logits, token, top, &mut self.keys);
        Ok(PromptLogprobs { logprobs, rank })
    }
}

/// A number in `[0, 1)` for one position of one stream, the same on every platform.
///
/// Element `position` of the SplitMix64 sequence that starts at a hash of `stream`: streams of
/// neighbouring seeds start far apart, and no element depends on another having been drawn.
pub fn uniform(stream: u64, position: u64) -> f64 {
    const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;
    let start = mix64(stream.wrapping_add(GAMMA));
    let bits = mix64(start.wrapping_add(GAMMA.wrapping_mul(position.wrapping_add(1))));
    (bits >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

/// The finalizer of SplitMix64 (Steele, Lea, Flood 2014, variant 13 of Stafford).
fn mix64(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Refuses logits that no distribution can be made of.
pub(super) fn refuse_broken(logits: &[f32]) -> Result<(), SampleError> {
    // One pass without a branch per element; the position is looked for only when there is one.
    let bad = logits.iter().fold(false, |bad, &x| bad | x.is_nan() | (x == f32::INFINITY));
    let alive = logits.iter().fold(false, |alive, &x| alive | (x > f32::NEG_INFINITY));
    if bad {
        if let Some(id) = logits.iter().position(|x| x.is_nan()) {
            return Err(SampleError::NotANumber { id });
        }
        if let Some(id) = logits.iter().position(|&x| x == f32::INFINITY) {
            return Err(SampleError::Infinite { id });
        }
    }
    if alive { Ok(()) } else { Err(SampleError::NothingLeft) }
}

/// Penalties, then bias, in place. Repetition looks at prompt and answer, the other two at the
/// answer only.
fn adjust(scores: &mut [f32], draw: &Draw<'_>, counts: &mut [u32]) {
    let params = draw.params;
    let answer = &draw.tokens[draw.prompt_len..];
    if params.repetition_penalty != 1.0 {
        let penalty = params.repetition_penalty;
        for_each_distinct(draw.tokens, counts, |id, _| {
            let score = scores[id];
            let penalized = if score > 0.0 { score / penalty } else { score * penalty };
            set_finite(&mut scores[id], penalized);
        });
    }
    if params.frequency_penalty != 0.0 || params.presence_penalty != 0.0 {
        for_each_distinct(answer, counts, |id, count| {
            let penalty = params.frequency_penalty * count as f32 + params.presence_penalty;
            let penalized = scores[id] - penalty;
            set_finite(&mut scores[id], penalized);
        });
    }
    for (&id, &bias) in &params.logit_bias {
        let biased = scores[id as usize] + bias;
        set_finite(&mut scores[id as usize], biased);
    }
}

/// Rules tokens out, in place.
fn rule_out(scores: &mut [f32], draw: &Draw<'_>) -> Result<(), SampleError> {
    if let Some(mask) = draw.mask {
        mask.apply(scores);
    }
    for &id in draw.ruled_out.into_iter().flatten() {
        scores[id as usize] = f32::NEG_INFINITY;
    }
    let is_left = scores.iter().any(|&score| score > f32::NEG_INFINITY);
    if is_left { Ok(()) } else { Err(SampleError::NothingAllowed) }
}

/// Calls `visit` with each id of `tokens` and how often it occurs. `counts` is zero before and
/// after.
fn for_each_distinct(tokens: &[u32], counts: &mut [u32], mut visit: impl FnMut(usize, u32)) {
    for &id in tokens {
        counts[id as usize] += 1;
    }
    for &id in tokens {
        let count = std::mem::take(&mut counts[id as usize]);
        if count > 0 {
            visit(id as usize, count);
        }
    }
}

/// Minus infinity stays what it is, a token ruled out; anything else stays finite, because two
/// infinities have no difference.
fn set_finite(score: &mut f32, value: f32) {
    if *score > f32::NEG_INFINITY {
        *score = value.clamp(f32::MIN, f32::MAX);
    }
}

fn choose(scores: &[f32], draw: &Draw<'_>, keys: &mut Vec<u64>, sums: &mut Vec<f64>) -> u32 {
    let best = argmax(scores);
    let params = draw.params;
    if params.temperature == 0.0 {
        return best as u32;
    }
    let filters = Filters::new(params, f64::from(scores[best]));
    let mut ranking = Ranking::new(scores, keys);
    let limit = if params.top_k == 0 { scores.len() } else { params.top_k.min(scores.len()) };
    let total = if limit < scores.len() {
        filters.total_of_first(&mut ranking, limit)
    } else {
        sum_exp(scores, filters.max, filters.rate)
    };
    filters.walk(&mut ranking, limit, total, draw.uniform(), sums)
}

/// The highest score, the lower id among equals.
fn argmax(scores: &[f32]) -> usize {
    let max = scores.iter().fold(f32::NEG_INFINITY, |max, &x| if x > max { x } else { max });
    scores.iter().position(|&x| x == max).expect("a row of logits has at least one token")
}

/// Filters and walks. Weights are relative to the likeliest token, whose weight is 1: that makes
/// `min_p` a plain bound, and top-p the only filter that needs a total.
struct Filters<'a> {
    params: &'a SamplingParams,
    /// The score of the likeliest token.
    max: f64,
    /// One over the temperature.
    rate: f64,
}

impl<'a> Filters<'a> {
    fn new(params: &'a SamplingParams, max: f64) -> Filters<'a> {
        Filters { params, max, rate: 1.0 / f64::from(params.temperature) }
    }

    fn weight(&self, key: u64) -> f64 {
        exp_nonpositive((f64::from(key_score(key)) - self.max) * self.rate)
    }

    /// The mass of the first `limit` tokens.
    fn total_of_first(&self, ranking: &mut Ranking<'_>, limit: usize) -> f64 {
        ranking.first(limit).iter().map(|&key| self.weight(key)).sum()
    }

    /// The token at `u` of the kept mass of the first `limit` tokens, whose mass is `total`.
    fn walk(
        &self,
        ranking: &mut Ranking<'_>,
        limit: usize,
        total: f64,
        u: f64,
        sums: &mut Vec<f64>,
    ) -> u32 {
        let (top_p, min_p) = (f64::from(self.params.top_p), f64::from(self.params.min_p));
        let filtered = top_p < 1.0 || min_p > 0.0;
        let nucleus = top_p * total;
        sums.clear();
        let mut sum = 0.0;
        for rank in 0..limit {
            let weight = self.weight(ranking.key(rank));
            if weight < min_p || weight == 0.0 {
                break;
            }
            sum += weight;
            sums.push(sum);
            let passed = if filtered { top_p < 1.0 && sum >= nucleus } else { sum > u * total };
            if passed {
                break;
            }
        }
        let mass = if filtered { sum } else { total };
        // Rounding can leave `u * mass` at or above the last sum: the last kept token is meant.
        let rank = sums.partition_point(|&sum| sum <= u * mass).min(sums.len() - 1);
        key_id(ranking.key(rank)) as u32
    }
}

/// Raw log-probabilities of the drawn token and of the `top` likeliest.
fn logprobs(logits: &[f32], id: u32, top: usize, keys: &mut Vec<u64>) -> Logprobs {
    let max = f64::from(logits[argmax(logits)]);
    let log_total = max + sum_exp(logits, max, 1.0).ln();
    let logprob = |id: usize| (f64::from(logits[id]) - log_total) as f32;
    let mut likeliest = Vec::with_capacity(top);
    if top > 0 {
        let mut ranking = Ranking::new(logits, keys);
        let first = ranking.first(top.min(logits.len()));
        likeliest.extend(first.iter().map(|&key| (key_id(key) as u32, logprob(key_id(key)))));
    }
    Logprobs { chosen: logprob(id as usize), top: likeliest }
}
