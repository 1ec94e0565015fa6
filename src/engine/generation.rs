//! One answer, token by token.

use std::time::{Duration, Instant};

use super::executor::{Executor, PlannedDraw};
use super::lower::lower;
use super::sampler::Draw;
use super::{Engine, EngineError, FITS};
use crate::request::{Event, FinishReason, Logprobs, Request, StopCause};
use crate::scheduler::{Sequence, StepPlan, TokenBudget};
use crate::text::{Detokenizer, StopMatcher};

/// An answer in the making: an iterator of events, of which the last has a finish reason. Dropping
/// it cancels the request and gives back what it holds.
pub struct Generation<'e> {
    engine: &'e mut Engine,
    request: Request,
    seed: u64,
    /// None when the answer has ended.
    sequence: Option<Sequence>,
    text: Text,
    timings: Timings,
}

/// How long an answer took so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Timings {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// From the start to the first token.
    pub time_to_first_token: Duration,
    /// Tokens generated.
    pub generated_tokens: usize,
    /// From the first token to the last.
    pub decode: Duration,
}

impl Timings {
    /// Prompt tokens per second.
    pub fn prompt_rate(&self) -> f64 {
        rate(self.prompt_tokens, self.time_to_first_token)
    }

    /// Generated tokens per second, the first not counted: it belongs to the prompt's step.
    pub fn decode_rate(&self) -> f64 {
        rate(self.generated_tokens.saturating_sub(1), self.decode)
    }
}

fn rate(tokens: usize, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { tokens as f64 / time.as_secs_f64() }
}

impl<'e> Generation<'e> {
    pub(super) fn new(
        engine: &'e mut Engine,
        request: Request,
        seed: u64,
    ) -> Result<Generation<'e>, EngineError> {
        let text = Text {
            detokenizer: engine.tokenizer.as_deref().map(Detokenizer::new),
            stop: Some(StopMatcher::new(request.stop.clone())?),
        };
        let sequence = engine.begin(request.prompt.clone())?;
        let timings = Timings { prompt_tokens: request.prompt.len(), ..Timings::default() };
        Ok(Generation { engine, seed, sequence: Some(sequence), text, timings, request })
    }

    /// How long the answer took so far.
    pub fn timings(&self) -> Timings {
        self.timings
    }

    /// Bytes of state the sequence holds: its slot and its blocks.
    pub fn state_bytes(&self) -> usize {
        self.engine.state_bytes(self.timings.prompt_tokens + self.timings.generated_tokens)
    }

    /// Steps until a token is drawn, which is not yet part of the sequence.
    fn next_token(&mut self) -> Result<(u32, Option<Logprobs>), EngineError> {
        loop {
            if self.engine.is_cancelled() {
                return Err(EngineError::Cancelled);
            }
            let sequence = self.sequence.as_mut().expect("asked only while the answer runs");
            let engine = &mut *self.engine;
            let mut budget = TokenBudget::new(engine.config.max_num_batched_tokens, 0);
            let grid = engine.executor.model().spec().grid();
            let mut plan = StepPlan::default();
            let planned = plan.add(sequence, &mut engine.pool, &mut budget, grid);
            planned.expect(FITS);
            let batch = lower(&plan, |_| sequence, engine.pool.layout());
            let draw = Draw {
                params: &self.request.sampling,
                seed: self.seed,
                choice: 0,
                tokens: sequence.tokens(),
                prompt_len: sequence.prompt_len(),
            };
            let draws = [PlannedDraw { sequence: sequence.id(), row: 0, draw }];
            let position = sequence.tokens().len();
            let draws = &draws[..batch.logits.len()];
            let report = engine.executor.step(&batch, Vec::new(), draws);
            plan.spans.iter().for_each(|span| sequence.advance(span.rows));
            plan.retire(&mut engine.pool);
            if let Some(token) = report.sampled.into_iter().next() {
                let reason = |reason| EngineError::Sample { position, reason };
                return Ok((token.drawn.map_err(reason)?, token.logprobs));
            }
        }
    }

    /// Takes the next token in: text, stop conditions, and the sequence's tokens.
    fn advance(&mut self) -> Result<Event, EngineError> {
        let start = Instant::now();
        let (token, logprobs) = self.next_token()?;
        self.timings.generated_tokens += 1;
        match self.timings.generated_tokens {
            1 => self.timings.time_to_first_token = start.elapsed(),
            _ => self.timings.decode += start.elapsed(),
        }
        let stop = self.stop_cause(token);
        let (mut text, stopped_by) = self.text.push(token, stop.is_some());
        let stop = stop
            .or_else(|| stopped_by.map(|index| StopCause::Text(self.request.stop[index].clone())));
        let finish = match stop {
            Some(cause) => Some(FinishReason::Stop(cause)),
            None if self.timings.generated_tokens == self.request.max_tokens => {
                Some(FinishReason::Length)
            }
            None => None,
        };
        if finish.is_some() {
            text.push_str(&self.text.finish());
            self.release();
        } else if let Some(sequence) = &mut self.sequence {
            sequence.push(token);
        }
        Ok(Event { token: Some(token), text, logprobs, finish })
    }

    fn stop_cause(&self, token: u32) -> Option<StopCause> {
        let is_eos = self.engine.defaults.stop_tokens.contains(&token);
        if is_eos && !self.request.ignore_eos {
            Some(StopCause::Eos)
        } else if self.request.stop_token_ids.contains(&token) {
            Some(StopCause::Token(token))
        } else {
            None
        }
    }

    fn release(&mut self) {
        if let Some(sequence) = self.sequence.take() {
            sequence.release(&mut self.engine.pool);
            self.engine.pool.check();
        }
    }
}

impl Iterator for Generation<'_> {
    type Item = Result<Event, EngineError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.sequence.as_ref()?;
        let event = self.advance();
        match event {
            Err(EngineError::Cancelled) => {
                self.release();
                let text = self.text.finish();
                let finish = Some(FinishReason::Cancelled);
                Some(Ok(Event { token: None, text, logprobs: None, finish }))
            }
            Err(error) => {
                self.release();
                Some(Err(error))
            }
            Ok(event) => Some(Ok(event)),
        }
    }
}

impl Drop for Generation<'_> {
    fn drop(&mut self) {
        self.release();
    }
}

/// From tokens to the text a caller may see.
struct Text {
    detokenizer: Option<Detokenizer>,
    stop: Option<StopMatcher>,
}

impl Text {
    /// The text that became final with `token`, and the stop string it completed. A token that ends
    /// the answer is itself no text.
    fn push(&mut self, token: u32, ends: bool) -> (String, Option<usize>) {
        let (Some(detokenizer), Some(stop)) = (&mut self.detokenizer, &mut self.stop) else {
            return (String::new(), None);
        };
        if ends {
            return (String::new(), None);
        }
        let released = stop.push(&detokenizer.push(token));
        (released.text, released.stopped_by)
    }

    /// What was held back: half a character, or what might have become a stop string.
    fn finish(&mut self) -> String {
        let (Some(detokenizer), Some(mut stop)) = (self.detokenizer.take(), self.stop.take())
        else {
            return String::new();
        };
        let mut text = stop.push(&detokenizer.finish()).text;
        text.push_str(&stop.finish());
        text
    }
}
