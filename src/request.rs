//! What a caller asks for and what it hears back: plain data, immutable after submit.
//!
//! Nothing here computes. [`Request::check`] and [`SamplingParams::check`] are the door: what they
//! let through, no later layer has to doubt. Limits that depend on memory (context length, blocks)
//! are the engine's and are checked at submit.

mod constraint;
mod event;

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

pub use constraint::{Constraint, MAX_CONSTRAINT_BYTES, MAX_TEXTS};
pub use event::{Event, Figures, Finish, FinishReason, Logprobs, PromptLogprobs, StopCause};

/// Most answers of one request.
pub const MAX_CHOICES: usize = 128;

/// Most stop strings of one request.
pub const MAX_STOP_STRINGS: usize = 16;

/// Longest stop string, in bytes.
pub const MAX_STOP_BYTES: usize = 256;

/// Longest `cache_salt`, in characters.
pub const MAX_CACHE_SALT: usize = 128;

/// Longest `program_id`, in characters.
pub const MAX_PROGRAM_ID: usize = 128;

/// Most positions of a `checkpoint_at`.
pub const MAX_CHECKPOINTS: usize = 64;

/// Most entries of a `logit_bias`.
pub const MAX_LOGIT_BIAS: usize = 1024;

/// Most alternatives reported beside a token.
pub const MAX_LOGPROBS: usize = 20;

/// Longest prompt whose own logprobs are reported, in tokens: all of them are kept until its last
/// token is computed.
pub const MAX_PROMPT_WITH_LOGPROBS: usize = 8192;

/// What a caller asks for.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// The prompt's token ids, at least one.
    pub prompt: Vec<u32>,
    /// Most tokens to generate, at least one; none only where `prompt_logprobs` are asked for.
    pub max_tokens: usize,
    /// Report the logprob of each token of the prompt after the first, and this many of the
    /// likeliest alternatives. The whole prompt is computed then, whatever is kept of it.
    pub prompt_logprobs: Option<usize>,
    /// How each token is chosen.
    pub sampling: SamplingParams,
    /// Texts that end the answer, matched across token borders; none of them is part of it unless
    /// `include_stop_text` says so.
    pub stop: Vec<String>,
    /// Leave the stop text that ended the answer in it.
    pub include_stop_text: bool,
    /// Token ids that end the answer besides the model's own end of sequence.
    pub stop_token_ids: Vec<u32>,
    /// Generate on past the model's end of sequence.
    pub ignore_eos: bool,
    /// No end within so many tokens, `max_tokens` at most: until then the model's end of sequence
    /// and `stop_token_ids` are ruled out, and stop texts are looked for only in what follows. A
    /// constraint that admits nothing more ends the answer all the same.
    pub min_tokens: usize,
    /// Leave special tokens out of the text; without it they are written out, but for the one that
    /// ends the answer.
    pub skip_special_tokens: bool,
    /// What the answer may be.
    pub constraint: Option<Constraint>,
    /// Answers wanted. The prompt is computed once; answer `i` is what a request for one answer
    /// with seed `seed + i` gives.
    pub n: usize,
    /// Lower numbers are served first; only where the policy is `priority`.
    pub priority: Option<i32>,
    /// The chain or bundle of requests that it is a part of, an agent for example; acts only where
    /// the policy is `fair`.
    pub program_id: Option<String>,
    /// Requests with different salts, or with and without one, share nothing that was computed.
    pub cache_salt: Option<String>,
    /// Prompt tokens after which the state is to be kept for later requests that begin alike. Each
    /// is kept at the multiple of 64 at or below it.
    pub checkpoint_at: Vec<usize>,
    /// Tell, by an event with nothing in it, that an answer is begun: with the first step that
    /// computes something of it.
    pub tells_start: bool,
}

impl Request {
    /// A request for one answer of up to `max_tokens` tokens, sampled with the defaults.
    pub fn new(prompt: Vec<u32>, max_tokens: usize) -> Request {
        Request {
            prompt,
            max_tokens,
            prompt_logprobs: None,
            sampling: SamplingParams::default(),
            stop: Vec::new(),
            include_stop_text: false,
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            min_tokens: 0,
            skip_special_tokens: true,
            constraint: None,
            n: 1,
            priority: None,
            program_id: None,
            cache_salt: None,
            checkpoint_at: Vec::new(),
            tells_start: false,
        }
    }

    /// Refuses what no engine with `vocab_size` tokens could honour, naming field, value and range.
    pub fn check(&self, vocab_size: usize) -> Result<(), InvalidParam> {
        require(!self.prompt.is_empty(), "prompt", "empty", || "at least one token".into())?;
        for &id in &self.prompt {
            require_id("prompt", id, vocab_size)?;
        }
        require((1..=MAX_CHOICES).contains(&self.n), "n", self.n, || {
            format!("1 to {MAX_CHOICES}")
        })?;
        let has_work = self.max_tokens > 0 || self.prompt_logprobs.is_some();
        require(has_work, "max_tokens", self.max_tokens, || "1 or more".into())?;
        require(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, || {
            format!("0 to {}, the most tokens to generate", self.max_tokens)
        })?;
        require(self.stop.len() <= MAX_STOP_STRINGS, "stop", self.stop.len(), || {
            format!("{MAX_STOP_STRINGS} strings at most")
        })?;
        for text in &self.stop {
            let fits = (1..=MAX_STOP_BYTES).contains(&text.len());
            require(fits, "stop", format!("a string of {} bytes", text.len()), || {
                format!("strings of 1 to {MAX_STOP_BYTES} bytes")
            })?;
        }
        for &id in &self.stop_token_ids {
            require_id("stop_token_ids", id, vocab_size)?;
        }
        if let Some(salt) = &self.cache_salt {
            let fits = (1..=MAX_CACHE_SALT).contains(&salt.chars().count())
                && !salt.contains(['@', '/', '\\', '\0']);
            require(fits, "cache_salt", format!("{salt:?}"), || {
                format!("1 to {MAX_CACHE_SALT} characters, none of them @, /, \\ or NUL")
            })?;
        }
        if let Some(program) = &self.program_id {
            let fits = (1..=MAX_PROGRAM_ID).contains(&program.chars().count());
            require(fits, "program_id", format!("{program:?}"), || {
                format!("1 to {MAX_PROGRAM_ID} characters")
            })?;
        }
        let marks = self.checkpoint_at.len();
        require(marks <= MAX_CHECKPOINTS, "checkpoint_at", format!("{marks} positions"), || {
            format!("{MAX_CHECKPOINTS} positions at most")
        })?;
        for &position in &self.checkpoint_at {
            let fits = (1..=self.prompt.len()).contains(&position);
            require(fits, "checkpoint_at", position, || {
                format!("1 to {}, the tokens of the prompt", self.prompt.len())
            })?;
        }
        self.check_prompt_logprobs()?;
        self.constraint.as_ref().map_or(Ok(()), Constraint::check)?;
        self.sampling.check(vocab_size)
    }

    fn check_prompt_logprobs(&self) -> Result<(), InvalidParam> {
        let Some(top) = self.prompt_logprobs else { return Ok(()) };
        const FIELD: &str = "prompt_logprobs";
        require(top <= MAX_LOGPROBS, FIELD, top, || format!("0 to {MAX_LOGPROBS}"))?;
        let tokens = self.prompt.len();
        let asked = format!("for a prompt of {tokens} tokens");
        require(tokens <= MAX_PROMPT_WITH_LOGPROBS, FIELD, asked, || {
            format!("prompts of {MAX_PROMPT_WITH_LOGPROBS} tokens at most")
        })
    }
}

/// How a token is chosen. The fields are applied in the order penalties, bias, (a request's
/// constraint,) temperature, `top_k`, `top_p`, `min_p`; the defaults change nothing.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SamplingParams {
    /// Flattens the distribution above 1 and sharpens it below; 0 takes the likeliest token.
    pub temperature: f32,
    /// Keep this many of the likeliest tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep the fewest of the likeliest tokens that together have this probability.
    pub top_p: f32,
    /// Keep tokens with at least this fraction of the likeliest token's probability.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of all tokens in prompt and answer.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens in the answer.
    pub presence_penalty: f32,
    /// Subtracted from the logits of tokens in the answer, once per occurrence.
    pub frequency_penalty: f32,
    /// Added to the logits of these token ids.
    pub logit_bias: BTreeMap<u32, f32>,
    /// Same seed, same answer; without one the caller draws it from the operating system.
    pub seed: Option<u64>,
    /// Report each token's logprob and this many of the likeliest alternatives; none by default.
    pub logprobs: Option<usize>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: BTreeMap::new(),
            seed: None,
            logprobs: None,
        }
    }
}

impl SamplingParams {
    /// Refuses values out of range for a model of `vocab_size` tokens. No range admits NaN.
    pub fn check(&self, vocab_size: usize) -> Result<(), InvalidParam> {
        let positive = |x: f32| x > 0.0 && x.is_finite();
        let non_negative = self.temperature >= 0.0 && self.temperature.is_finite();
        require(non_negative, "temperature", self.temperature, || "0 or more, finite".into())?;
        let top_p = self.top_p > 0.0 && self.top_p <= 1.0;
        require(top_p, "top_p", self.top_p, || "above 0, at most 1".into())?;
        let min_p = (0.0..=1.0).contains(&self.min_p);
        require(min_p, "min_p", self.min_p, || "0 to 1".into())?;
        let penalty = self.repetition_penalty;
        require(positive(penalty), "repetition_penalty", penalty, || "above 0, finite".into())?;
        for (field, value) in [
            ("presence_penalty", self.presence_penalty),
            ("frequency_penalty", self.frequency_penalty),
        ] {
            require((-2.0..=2.0).contains(&value), field, value, || "-2 to 2".into())?;
        }
        let biases = self.logit_bias.len();
        require(biases <= MAX_LOGIT_BIAS, "logit_bias", biases, || {
            format!("{MAX_LOGIT_BIAS} entries at most")
        })?;
        for (&id, &bias) in &self.logit_bias {
            require_id("logit_bias", id, vocab_size)?;
            let fits = (-100.0..=100.0).contains(&bias);
            require(fits, "logit_bias", format!("{bias} for token {id}"), || "-100 to 100".into())?;
        }
        let logprobs = self.logprobs.unwrap_or(0);
        require(logprobs <= MAX_LOGPROBS, "logprobs", logprobs, || format!("0 to {MAX_LOGPROBS}"))
    }

    /// True when the logits are used as the model gave them: no penalty, no bias.
    pub fn leaves_logits_alone(&self) -> bool {
        self.repetition_penalty == 1.0
            && self.presence_penalty == 0.0
            && self.frequency_penalty == 0.0
            && self.logit_bias.is_empty()
    }
}

/// A parameter out of its range: the caller's fault, told at the door.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InvalidParam {
    /// The field's name as callers spell it.
    pub field: &'static str,
    /// What it was.
    pub value: String,
    /// What it may be.
    pub allowed: String,
}

impl fmt::Display for InvalidParam {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is {}, allowed: {}", self.field, self.value, self.allowed)
    }
}

impl std::error::Error for InvalidParam {}

fn require(
    holds: bool,
    field: &'static str,
    value: impl fmt::Display,
    allowed: impl FnOnce() -> String,
) -> Result<(), InvalidParam> {
    if holds {
        return Ok(());
    }
    Err(InvalidParam { field, value: value.to_string(), allowed: allowed() })
}

fn require_id(field: &'static str, id: u32, vocab_size: usize) -> Result<(), InvalidParam> {
    require((id as usize) < vocab_size, field, format!("token {id}"), || {
        format!("tokens 0 to {}", vocab_size.saturating_sub(1))
    })
}
