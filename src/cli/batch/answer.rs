//! From the events of a request to its line of the output.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_core::Stream;
use serde::Serialize;
use serde_json::Value;

use crate::engine::Handle;
use crate::request::{Event, Figures, FinishReason};

/// The answers of one request in the making.
pub struct Answers {
    handle: Handle,
    answers: Vec<Answer>,
    figures: Vec<Figures>,
}

/// One answer, as the output has it.
#[derive(Debug, Default, Serialize)]
struct Answer {
    output_ids: Vec<u32>,
    text: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<Vec<TokenLogprob>>,
    finish_reason: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// A token's logprob and its likeliest alternatives. Written as the shortest decimals that are
/// these numbers again when read as f32.
#[derive(Debug, Serialize)]
struct TokenLogprob {
    logprob: f32,
    top: Vec<(u32, f32)>,
}

impl Answers {
    /// The `n` answers that `handle` will tell of, with logprobs if those were asked for.
    pub fn new(handle: Handle, n: usize, with_logprobs: bool) -> Answers {
        let logprobs = || with_logprobs.then(Vec::new);
        let answer = || Answer { logprobs: logprobs(), ..Answer::default() };
        let answers = (0..n).map(|_| answer()).collect();
        Answers { handle, answers, figures: vec![Figures::default(); n] }
    }

    /// Takes in what has happened since; ready when all answers have ended. Otherwise the waker is
    /// woken when there is more.
    pub fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        while let Some(event) = ready!(Pin::new(&mut self.handle).poll_next(context)) {
            self.take_in(event);
        }
        Poll::Ready(())
    }

    fn take_in(&mut self, event: Event) {
        let answer = &mut self.answers[event.choice];
        answer.output_ids.extend(event.token);
        answer.text.push_str(&event.text);
        if let (Some(all), Some(one)) = (&mut answer.logprobs, event.logprobs) {
            all.push(TokenLogprob { logprob: one.chosen, top: one.top });
        }
        if let Some(finish) = event.finish {
            answer.finish_reason = finish.reason.as_str();
            self.figures[event.choice] = finish.figures;
            if let FinishReason::Failed(reason) = finish.reason {
                answer.error = Some(reason);
            }
        }
    }

    /// Whether one of the answers was cancelled.
    pub fn is_cancelled(&self) -> bool {
        let cancelled = FinishReason::Cancelled.as_str();
        self.answers.iter().any(|answer| answer.finish_reason == cancelled)
    }

    /// Why one of the answers failed, if one did.
    pub fn error(&self) -> Option<&str> {
        self.answers.iter().find_map(|answer| answer.error.as_deref())
    }

    /// What each of the answers cost.
    pub fn figures(&self) -> &[Figures] {
        &self.figures
    }

    /// The line of the output, for the request that the caller calls `id`.
    pub fn into_row(mut self, id: &Value) -> String {
        let figures = std::mem::take(&mut self.figures);
        let row = Row { id, content: Content::new(self.answers), cost: Cost::of(&figures) };
        serde_json::to_string(&row).expect("its maps have strings for keys")
    }
}

/// The line of a request that was not run.
pub fn bad_row(id: &Value, line: usize, error: &str) -> String {
    serde_json::json!({ "id": id, "error": error, "line": line }).to_string()
}

#[derive(Serialize)]
struct Row<'a> {
    id: &'a Value,
    #[serde(flatten)]
    content: Content,
    #[serde(flatten)]
    cost: Cost,
}

/// One answer stands in the line itself, several in a list of choices.
#[derive(Serialize)]
#[serde(untagged)]
enum Content {
    One(Answer),
    Many { choices: Vec<Choice> },
}

#[derive(Serialize)]
struct Choice {
    index: usize,
    #[serde(flatten)]
    answer: Answer,
}

impl Content {
    fn new(mut answers: Vec<Answer>) -> Content {
        match answers.pop() {
            Some(only) if answers.is_empty() => Content::One(only),
            last => {
                let answers = answers.into_iter().chain(last).enumerate();
                let choices = answers.map(|(index, answer)| Choice { index, answer });
                Content::Many { choices: choices.collect() }
            }
        }
    }
}

/// What a request cost, its answers together: counters are added up, waiting ends with the first
/// answer that starts, and the time between two tokens is the mean of all answers'.
#[derive(Serialize)]
struct Cost {
    /// The longest run of the prompt's first tokens that was known.
    matched_tokens: usize,
    /// Prompt tokens that were not computed, since a state behind them was kept.
    cached_tokens: usize,
    /// Known tokens that were computed all the same.
    replayed_tokens: usize,
    /// Why there was no deeper state, if one could have helped.
    miss_reason: Option<&'static str>,
    preemptions: u64,
    swapped_bytes: u64,
    recomputed_tokens: u64,
    /// None when nothing of it was computed.
    queue_ms: Option<f64>,
    /// None when there was no token.
    ttft_ms: Option<f64>,
    /// None when no answer had two tokens.
    mean_itl_ms: Option<f64>,
}

impl Cost {
    fn of(figures: &[Figures]) -> Cost {
        let sum = |count: fn(&Figures) -> u64| figures.iter().map(count).sum();
        let ms = |time: Duration| time.as_micros() as f64 / 1e3;
        let started = figures.iter().filter_map(|f| f.queue);
        let spoke = figures.iter().filter(|f| f.generated_tokens > 0);
        let decode: Duration = figures.iter().map(|f| f.decode).sum();
        let gaps: usize = figures.iter().map(|f| f.generated_tokens.saturating_sub(1)).sum();
        let gaps = u32::try_from(gaps).expect("answers are shorter than 2^32 tokens");
        // All answers have the prompt in common; the first one's figures are the request's.
        let prompt = figures.first().copied().unwrap_or_default();
        Cost {
            matched_tokens: prompt.matched_tokens,
            cached_tokens: prompt.cached_tokens,
            replayed_tokens: prompt.replayed_tokens,
            miss_reason: prompt.miss_reason,
            preemptions: sum(|f| f.preemptions),
            swapped_bytes: sum(|f| f.swapped_bytes),
            recomputed_tokens: sum(|f| f.recomputed_tokens),
            queue_ms: started.min().map(ms),
            ttft_ms: spoke.map(|f| f.time_to_first_token).min().map(ms),
            mean_itl_ms: decode.checked_div(gaps).map(ms),
        }
    }
}
