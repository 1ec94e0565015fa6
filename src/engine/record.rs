//! What the engine knows of an answer in the making, and what a token does to it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::constraint::Matcher;
use super::core::RequestId;
use super::text::AnswerText;
use crate::request::{Event, Figures, FinishReason, PromptLogprobs, Request, StopCause};
use crate::scheduler::{Scheduler, SequenceId, StepPlan, StepReport};

/// One answer in the making.
pub(super) struct Record {
    pub(super) request: Arc<Request>,
    pub(super) id: RequestId,
    pub(super) choice: usize,
    pub(super) seed: u64,
    pub(super) text: AnswerText,
    /// Follows the tokens, where the request has a constraint; away while its mask is computed.
    pub(super) matcher: Option<Matcher>,
    /// When it was submitted, on the executor's clock.
    pub(super) submitted: Duration,
    pub(super) last_token: Duration,
    pub(super) figures: Figures,
    /// Of each token of the prompt after the first, as far as it was scored, or why one was not.
    pub(super) prompt_logprobs: Result<Vec<PromptLogprobs>, String>,
}

impl Record {
    /// An event in which nothing has happened yet.
    pub(super) fn event(&self) -> Event {
        let choice = self.choice;
        Event {
            choice,
            token: None,
            text: String::new(),
            logprobs: None,
            prompt_logprobs: None,
            finish: None,
        }
    }

    /// Takes the score of the prompt's token at `position` in, unless it is known already: what is
    /// computed again gets the same.
    pub(super) fn take_score(&mut self, position: usize, score: Result<PromptLogprobs, String>) {
        let Ok(known) = &mut self.prompt_logprobs else { return };
        match score {
            Ok(score) if position == known.len() + 1 => known.push(score),
            Ok(_) => {}
            Err(reason) => self.prompt_logprobs = Err(format!("token {position}: {reason}")),
        }
    }

    /// The scores of the whole prompt, where the request wants them and this answer computed it:
    /// once, with its first event.
    ///
    /// # Errors
    /// Why a token could not be scored.
    pub(super) fn scores(&mut self) -> Result<Option<Vec<PromptLogprobs>>, String> {
        if self.request.prompt_logprobs.is_none() || self.figures.generated_tokens > 0 {
            return Ok(None);
        }
        let scores = std::mem::replace(&mut self.prompt_logprobs, Ok(Vec::new()))?;
        match scores.len() + 1 == self.request.prompt.len() {
            // The others share what the first has computed, be it of no token.
            _ if self.choice > 0 && scores.is_empty() => Ok(None),
            true => Ok(Some(scores)),
            false if self.choice > 0 => Ok(None),
            false => Err("the prompt was not scored as a whole".to_owned()),
        }
    }

    /// Counts a token that was drawn by `now`; returns the text that became final and why the
    /// answer ends here, if it does.
    pub(super) fn advance(
        &mut self,
        token: u32,
        stop_tokens: &[u32],
        now: Duration,
    ) -> (String, Option<FinishReason>) {
        let figures = &mut self.figures;
        figures.generated_tokens += 1;
        match figures.generated_tokens {
            1 => figures.time_to_first_token = now - self.submitted,
            _ => figures.decode += now - self.last_token,
        }
        self.last_token = now;
        let stop = self.stop_cause(token, stop_tokens);
        let may_end = self.figures.generated_tokens > self.request.min_tokens;
        let (text, stopped_by) = self.text.push(token, stop.is_some(), may_end);
        let by_text = |index: usize| StopCause::Text(self.request.stop[index].clone());
        let is_full = self.figures.generated_tokens == self.request.max_tokens;
        let reason = match stop.or_else(|| stopped_by.map(by_text)) {
            Some(cause) => Some(FinishReason::Stop(cause)),
            None => self.match_on(token).or(is_full.then_some(FinishReason::Length)),
        };
        (text, reason)
    }

    /// Tells the constraint of a token; returns why the answer ends with it, if it does.
    fn match_on(&mut self, token: u32) -> Option<FinishReason> {
        match self.matcher.as_mut()?.advance(token) {
            Ok(false) => None,
            Ok(true) => Some(FinishReason::Stop(StopCause::Constraint)),
            Err(reason) => Some(FinishReason::Failed(reason)),
        }
    }

    /// The ends that may not be drawn next: all before `min_tokens`; and where the model's own are
    /// to be ignored a constraint, which would allow them, must not bring them up.
    pub(super) fn ruled_out<'a>(&'a self, stop_tokens: &'a [u32]) -> [&'a [u32]; 2] {
        let request = &self.request;
        let is_early = self.figures.generated_tokens < request.min_tokens;
        let rules_eos = if request.ignore_eos { request.constraint.is_some() } else { is_early };
        let if_set = |is_set: bool, ids: &'a [u32]| if is_set { ids } else { &[] };
        [if_set(rules_eos, stop_tokens), if_set(is_early, &request.stop_token_ids)]
    }

    fn stop_cause(&self, token: u32, stop_tokens: &[u32]) -> Option<StopCause> {
        if stop_tokens.contains(&token) && !self.request.ignore_eos {
            Some(StopCause::Eos)
        } else if self.request.stop_token_ids.contains(&token) {
            Some(StopCause::Token(token))
        } else {
            None
        }
    }
}

/// Hands the scores of a step to the answers whose prompts they are of.
pub(super) fn take_scores(
    report: &mut StepReport,
    plan: &StepPlan,
    scheduler: &Scheduler,
    records: &mut HashMap<SequenceId, Record>,
) {
    let mut scored = report.scored.drain(..);
    for span in &plan.spans {
        let sequence = scheduler.sequence(span.sequence);
        let Some((_, positions)) = sequence.and_then(|s| s.scores(span)) else { continue };
        // One that was cancelled has no record any more.
        let mut record = records.get_mut(&span.sequence);
        for (position, score) in positions.zip(&mut scored) {
            if let Some(record) = &mut record {
                record.take_score(position, score);
            }
        }
    }
}
