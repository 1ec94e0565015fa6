//! What is heard of a request, whatever the shape its answers get.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::Stream;
use serde_json::{Map, Value, json};
use tokio::time::{Instant, Sleep, sleep_until, timeout_at};

use super::app::Live;
use super::error::ApiError;
use crate::request::{Event, Figures, FinishReason, StopCause};

/// How long a request may take.
#[derive(Debug, Clone, Copy, Default)]
pub struct Patience {
    /// From its arrival to its start.
    pub queue: Option<Duration>,
    /// From its arrival to its end.
    pub total: Option<Duration>,
}

/// The answers of one request in the making.
#[derive(Debug)]
pub struct Answers {
    live: Live,
    patience: Patience,
    /// The request was ended because its time was over.
    is_late: bool,
    /// Ends with its patience. It is kept: who hears several asks each of them many times.
    timer: Option<Pin<Box<Sleep>>>,
    /// The first event, which was waited for before the answer's headers were sent.
    first: Option<Event>,
    has_begun: bool,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens generated so far, of all choices.
    pub generated_tokens: usize,
    /// Of these, tokens that were reasoning: who takes answers apart counts them.
    pub reasoning_tokens: usize,
    /// What the choices that have ended cost.
    pub figures: Vec<Figures>,
}

impl Answers {
    /// The answers of `live`, whose prompt has `prompt_tokens` tokens.
    pub fn new(live: Live, prompt_tokens: usize, patience: Patience) -> Answers {
        Answers {
            live,
            patience,
            is_late: false,
            timer: None,
            first: None,
            has_begun: false,
            prompt_tokens,
            generated_tokens: 0,
            reasoning_tokens: 0,
            figures: Vec::new(),
        }
    }

    /// Waits until the request is begun, for `wait` at most: until then a request can still be
    /// answered with an error of its own status.
    ///
    /// # Errors
    /// When it has failed or waited too long already.
    pub async fn begin(&mut self, wait: Duration) -> Result<(), ApiError> {
        let until = Instant::now() + wait;
        let Ok(event) = timeout_at(until, self.receive()).await else { return Ok(()) };
        let event = event?;
        match event.as_ref().and_then(failure) {
            Some(error) => Err(error),
            None => {
                self.first = event;
                Ok(())
            }
        }
    }

    /// The next event; none when all choices have ended.
    ///
    /// # Errors
    /// When its start was waited for too long.
    pub async fn next(&mut self) -> Option<Result<Event, ApiError>> {
        let event = match self.first.take() {
            Some(event) => event,
            None => match self.receive().await.transpose()? {
                Ok(event) => event,
                Err(error) => return Some(Err(error)),
            },
        };
        self.generated_tokens += usize::from(event.token.is_some());
        if let Some(finish) = &event.finish {
            self.figures.push(finish.figures);
        }
        Some(Ok(event))
    }

    /// The next event that the engine tells of, or why the request was ended before it began.
    async fn receive(&mut self) -> Result<Option<Event>, ApiError> {
        let event = self.hear().await.inspect_err(|error| self.live.refused(error))?;
        if let Some(event) = &event {
            self.live.heard(event);
            self.has_begun = true;
            // A request gives way to no other once one of its prompts has begun.
            self.live.place.begin();
        }
        Ok(event)
    }

    async fn hear(&mut self) -> Result<Option<Event>, ApiError> {
        poll_fn(|context| self.poll_heard(context)).await
    }

    fn poll_heard(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Event>, ApiError>> {
        if let Poll::Ready(event) = self.poll_event(context) {
            return Poll::Ready(event);
        }
        let since = Instant::from_std(self.live.place.since());
        while !self.is_late {
            let queue = self.patience.queue.filter(|_| !self.has_begun);
            let limit = [queue, self.patience.total].into_iter().flatten().min();
            let Some(limit) = limit else { break };
            let until = since + limit;
            let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(until)));
            if timer.deadline() != until {
                timer.as_mut().reset(until);
            }
            ready!(timer.as_mut().poll(context));
            self.live.handle.cancel();
            if self.patience.total.is_none_or(|total| limit < total) {
                let message = format!("not begun after {} ms", limit.as_millis());
                let after = Duration::from_secs(1);
                return Poll::Ready(Err(ApiError::overloaded("queue_timeout", message, after)));
            }
            self.is_late = true;
        }
        Poll::Pending
    }

    fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Event>, ApiError>> {
        let event = ready!(Pin::new(&mut self.live.handle).poll_next(context));
        let end = event.as_ref().and_then(|event| event.finish.as_ref());
        let is_cut = end.is_some_and(|end| end.reason == FinishReason::Cancelled);
        let error = if is_cut { self.live.evicted() } else { None };
        Poll::Ready(error.map_or(Ok(event), Err))
    }

    /// The word for why a choice ended, and what stopped it.
    pub fn reason(&self, reason: &FinishReason) -> (&'static str, Value) {
        match reason {
            FinishReason::Stop(StopCause::Text(text)) => ("stop", text.as_str().into()),
            FinishReason::Stop(StopCause::Token(id)) => ("stop", (*id).into()),
            FinishReason::Cancelled if self.is_late => ("length", "timeout".into()),
            FinishReason::Cancelled => ("abort", Value::Null),
            other => (other.as_str(), Value::Null),
        }
    }

    /// Whether the request was ended because its time was over.
    pub fn is_late(&self) -> bool {
        self.is_late
    }
}

/// What the request of a name cost, under the names that are used everywhere.
fn metrics(name: &str, figures: &[Figures]) -> Value {
    let mut map = Map::new();
    map.insert("request_id".to_owned(), name.into());
    let prompt = figures.first().copied().unwrap_or_default();
    let ms = |time: Duration| time.as_micros() as f64 / 1e3;
    let sum = |count: fn(&Figures) -> u64| figures.iter().map(count).sum::<u64>();
    let decode: Duration = figures.iter().map(|f| f.decode).sum();
    let gaps: usize = figures.iter().map(|f| f.generated_tokens.saturating_sub(1)).sum();
    let queue = figures.iter().filter_map(|f| f.queue).min();
    let spoke = figures.iter().filter(|f| f.generated_tokens > 0);
    let ttft = spoke.map(|f| f.time_to_first_token).min();
    let prefill = queue.zip(ttft).map(|(queue, ttft)| ttft.saturating_sub(queue));
    let rate = |gaps: usize| gaps as f64 / decode.as_secs_f64();
    for (name, value) in [
        ("queue_ms", queue.map(ms).into()),
        ("ttft_ms", ttft.map(ms).into()),
        ("prefill_ms", prefill.map(ms).into()),
        ("decode_ms", Value::from(ms(decode))),
        ("mean_itl_ms", (gaps > 0).then(|| ms(decode) / gaps as f64).into()),
        ("tokens_per_second", (gaps > 0 && !decode.is_zero()).then(|| rate(gaps)).into()),
        ("matched_tokens", prompt.matched_tokens.into()),
        ("cached_tokens", prompt.cached_tokens.into()),
        ("replayed_tokens", prompt.replayed_tokens.into()),
        ("recomputed_tokens", sum(|f| f.recomputed_tokens).into()),
        ("miss_reason", prompt.miss_reason.into()),
        ("preemptions", sum(|f| f.preemptions).into()),
        ("swapped_bytes", sum(|f| f.swapped_bytes).into()),
    ] {
        map.insert(name.to_owned(), value);
    }
    map.into()
}

/// The error that an event tells of.
pub fn failure(event: &Event) -> Option<ApiError> {
    match &event.finish.as_ref()?.reason {
        FinishReason::Failed(reason) => Some(ApiError::failed(reason.as_str())),
        _ => None,
    }
}

/// The answers of several requests, heard as they come.
#[derive(Debug)]
pub struct Several {
    /// The requests, in their order.
    pub all: Vec<Answers>,
    /// Whose turn it is to be asked first.
    turn: usize,
}

impl Several {
    /// The answers of `all`.
    pub fn new(all: Vec<Answers>) -> Several {
        Several { all, turn: 0 }
    }

    /// Waits for the first event of the first, as [`Answers::begin`] does.
    ///
    /// # Errors
    /// When it has failed or waited too long already.
    pub async fn begin(&mut self, wait: Duration) -> Result<(), ApiError> {
        match self.all.first_mut() {
            Some(first) => first.begin(wait).await,
            None => Ok(()),
        }
    }

    /// The next event of any, and whose it is; none when all have ended. Nothing is lost when the
    /// future is dropped.
    pub async fn next(&mut self) -> Option<(usize, Result<Event, ApiError>)> {
        poll_fn(|context| {
            let mut is_open = false;
            for step in 0..self.all.len() {
                let index = (self.turn + step) % self.all.len();
                match pin!(self.all[index].next()).poll(context) {
                    Poll::Ready(Some(event)) => {
                        self.turn = index + 1;
                        return Poll::Ready(Some((index, event)));
                    }
                    Poll::Ready(None) => {}
                    Poll::Pending => is_open = true,
                }
            }
            if is_open { Poll::Pending } else { Poll::Ready(None) }
        })
        .await
    }

    /// [`metrics`] of all together.
    pub fn metrics(&self) -> Value {
        let figures: Vec<_> = self.all.iter().flat_map(|a| a.figures.clone()).collect();
        metrics(self.all.first().map_or("", |first| first.live.name()), &figures)
    }

    /// `usage` of all together, so far, in the OpenAI shape.
    pub fn usage(&self) -> Value {
        let sum = |count: fn(&Answers) -> usize| self.all.iter().map(count).sum::<usize>();
        // What was kept of a prompt is the same for all its choices.
        let of_prompt = |count: fn(&Figures) -> usize| {
            self.all.iter().filter_map(|answers| answers.figures.first()).map(count).sum::<usize>()
        };
        let (prompt, generated) = (sum(|a| a.prompt_tokens), sum(|a| a.generated_tokens));
        json!({
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {
                "cached_tokens": of_prompt(|figures| figures.cached_tokens),
                "cache_write_tokens": of_prompt(|figures| figures.cache_write_tokens),
            },
            "completion_tokens_details": { "reasoning_tokens": sum(|a| a.reasoning_tokens) },
        })
    }
}
