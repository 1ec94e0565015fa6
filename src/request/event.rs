//! What a caller hears of a request.

use std::time::Duration;

use serde::Serialize;

/// One more token of an answer, or its end.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// Which of the request's answers, from 0.
    pub choice: usize,
    /// The token; absent only when a request begins ([`tells_start`]), ends between two tokens
    /// (cancelled, failed), or asks for none.
    ///
    /// [`tells_start`]: super::Request::tells_start
    pub token: Option<u32>,
    /// Text that became final with this token: empty while bytes of a character are missing or
    /// the text may still become a stop string.
    pub text: String,
    /// The token's logprob and its alternatives, when asked for.
    pub logprobs: Option<Logprobs>,
    /// Of each token of the prompt after the first, when asked for: in the event of the
    /// request's first token only, or of its end, whichever answer that is of.
    pub prompt_logprobs: Option<Vec<PromptLogprobs>>,
    /// Why nothing follows, and what the answer cost; present in its last event only.
    pub finish: Option<Finish>,
}

/// The end of an answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Finish {
    /// Why it ended.
    pub reason: FinishReason,
    /// What it cost.
    pub figures: Figures,
}

/// What one answer cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Figures {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens generated.
    pub generated_tokens: usize,
    /// From submit to the first step that computed something of it; none when none did.
    pub queue: Option<Duration>,
    /// From submit to the first token.
    pub time_to_first_token: Duration,
    /// From the first token to the last.
    pub decode: Duration,
    /// Times it was pushed out of the device memory.
    pub preemptions: u64,
    /// Bytes of it that were copied between device and host.
    pub swapped_bytes: u64,
    /// Tokens computed again after it was pushed out.
    pub recomputed_tokens: u64,
    /// The longest run of the prompt's first tokens that was known.
    pub matched_tokens: usize,
    /// Prompt tokens that were not computed, since a state behind them was kept.
    pub cached_tokens: usize,
    /// Known tokens that were computed all the same: matched less cached.
    pub replayed_tokens: usize,
    /// Prompt tokens up to the deepest state that was kept of it for later requests, less those
    /// that were cached.
    pub cache_write_tokens: usize,
    /// Why no deeper state was there, if one could have helped: `never_taken`, `no_slot`,
    /// `evicted` or `not_exact`.
    pub miss_reason: Option<&'static str>,
}

impl Figures {
    /// Prompt tokens per second, from the first step on.
    pub fn prompt_rate(&self) -> f64 {
        let queue = self.queue.unwrap_or_default();
        rate(self.prompt_tokens, self.time_to_first_token.saturating_sub(queue))
    }

    /// Generated tokens per second, the first not counted: it belongs to the prompt's step.
    pub fn decode_rate(&self) -> f64 {
        rate(self.generated_tokens.saturating_sub(1), self.decode)
    }
}

fn rate(tokens: usize, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { tokens as f64 / time.as_secs_f64() }
}

/// Natural logarithms of raw probabilities: before penalties, bias and temperature.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Logprobs {
    /// Of the token that was drawn, or is there.
    pub chosen: f32,
    /// The likeliest tokens, likeliest first, the lower id first among equals.
    pub top: Vec<(u32, f32)>,
}

/// How likely a token of a prompt was, given those before it.
#[derive(Debug, Clone, PartialEq)]
pub struct PromptLogprobs {
    /// Its logprob, and the likeliest tokens in its place.
    pub logprobs: Logprobs,
    /// Its place among all tokens, 1 for the likeliest.
    pub rank: usize,
}

/// Why a request ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FinishReason {
    /// The model or the request said so.
    Stop(StopCause),
    /// `max_tokens` or the context's end was reached.
    Length,
    /// The caller cancelled it or dropped its handle.
    Cancelled,
    /// The engine could not go on with it; the text says why.
    Failed(String),
}

impl FinishReason {
    /// The word callers see: `stop`, `length`, `cancelled` or `error`.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Stop(_) => "stop",
            Self::Length => "length",
            Self::Cancelled => "cancelled",
            Self::Failed(_) => "error",
        }
    }
}

/// What stopped a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StopCause {
    /// The model's end of sequence.
    Eos,
    /// One of the request's `stop_token_ids`.
    Token(u32),
    /// One of the request's `stop` strings.
    Text(String),
    /// The request's constraint, which admits nothing more.
    Constraint,
}
