//! The real engine's loop over the real executor, stepped by hand, with its link watched.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use crate::cli::CliError;
use crate::engine::core::Core;
use crate::engine::device::AnyExecutor;
use crate::engine::executor::Executor;
use crate::engine::link::LinkExecutor;
use crate::engine::{EngineError, RequestId, StepRecord};
use crate::request::{Event, FinishReason, Request, SamplingParams};
use crate::scheduler::SchedulerStats;

/// A request for the likeliest tokens, so many.
pub fn likeliest(prompt: Vec<u32>, tokens: usize) -> Request {
    Request {
        sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
        ignore_eos: true,
        ..Request::new(prompt, tokens)
    }
}

/// One step of a loop, and what happened in it.
///
/// # Errors
/// A request that failed.
pub fn events<E: Executor>(core: &mut Core<E>) -> Result<Vec<(RequestId, Event)>, CliError> {
    let events = core.step();
    let ends = events.iter().filter_map(|(_, event)| event.finish.as_ref());
    let mut reasons = ends.map(|finish| &finish.reason);
    match reasons.find(|reason| matches!(reason, FinishReason::Failed(_))) {
        Some(FinishReason::Failed(reason)) => Err(CliError::Failed(reason.clone())),
        _ => Ok(events),
    }
}

/// An engine's loop, and what its requests were answered so far.
pub struct Stepper {
    core: Core<LinkExecutor<AnyExecutor>>,
    next_request: u64,
    answers: HashMap<RequestId, Vec<u32>>,
}

/// A swap: seconds and bytes of either way.
#[derive(Debug, Clone, Copy)]
pub struct Swap {
    /// Seconds of the step that copied it out.
    pub out_seconds: f64,
    /// Seconds of the step that copied it in.
    pub in_seconds: f64,
    /// Bytes out, bytes in.
    pub bytes: [u64; 2],
}

impl Stepper {
    /// Steps `core`, in which nothing runs.
    pub fn new(core: Core<LinkExecutor<AnyExecutor>>) -> Stepper {
        Stepper { core, next_request: 0, answers: HashMap::new() }
    }

    /// Submits a prompt whose answer has `tokens` tokens, the likeliest ones.
    ///
    /// # Errors
    /// A prompt that the engine's limits do not take.
    pub fn submit(&mut self, prompt: Vec<u32>, tokens: usize) -> Result<RequestId, CliError> {
        let request = likeliest(prompt, tokens);
        self.core.door().check(&request)?;
        let id = RequestId(self.next_request);
        self.next_request += 1;
        self.core.submit(id, Arc::new(request), 0);
        self.answers.insert(id, Vec::new());
        Ok(id)
    }

    /// What a request was answered so far.
    pub fn answer(&self, id: RequestId) -> &[u32] {
        &self.answers[&id]
    }

    /// One step.
    ///
    /// # Errors
    /// A request that failed; that there was nothing to do.
    pub fn step(&mut self) -> Result<StepRecord, CliError> {
        if self.core.is_idle() {
            return Err(CliError::Failed("the engine had nothing left to do".to_owned()));
        }
        for (id, event) in events(&mut self.core)? {
            let answer = self.answers.get_mut(&id).expect("who draws was submitted");
            answer.extend(event.token);
        }
        Ok(self.core.last_step())
    }

    /// Steps until a request has `tokens` tokens of its answer; returns the steps.
    ///
    /// # Errors
    /// As [`Stepper::step`].
    pub fn until_answer(
        &mut self,
        id: RequestId,
        tokens: usize,
    ) -> Result<Vec<StepRecord>, CliError> {
        let mut steps = Vec::new();
        while self.answer(id).len() < tokens {
            steps.push(self.step()?);
        }
        Ok(steps)
    }

    /// Steps until all requests have their answers; returns the steps.
    ///
    /// # Errors
    /// As [`Stepper::step`].
    pub fn until_idle(&mut self) -> Result<Vec<StepRecord>, CliError> {
        let mut steps = Vec::new();
        while !self.core.is_idle() {
            steps.push(self.step()?);
        }
        self.answers.clear();
        Ok(steps)
    }

    /// Steps until `tokens` tokens of prompts are computed; returns the seconds that takes.
    ///
    /// # Errors
    /// As [`Stepper::step`], and a step that computes none, or more of them.
    pub fn compute(&mut self, tokens: usize) -> Result<f64, CliError> {
        let start = self.core.now();
        let mut done = 0;
        while done < tokens {
            match self.step()?.prompt_tokens {
                0 => return Err(CliError::Failed(format!("{done} of {tokens} tokens computed"))),
                computed => done += computed,
            }
        }
        match done == tokens {
            true => Ok(self.seconds_since(start)),
            false => Err(CliError::Failed(format!("{done} tokens computed, not {tokens}"))),
        }
    }

    /// Gives the state of a request that runs alone up and computes the first `tokens` tokens of
    /// its prompt again; returns the seconds that takes.
    ///
    /// # Errors
    /// As [`Stepper::compute`].
    pub fn recompute(&mut self, id: RequestId, tokens: usize) -> Result<f64, CliError> {
        self.poison_device()?;
        self.core.recompute(id);
        self.compute(tokens)
    }

    /// See [`AnyExecutor::poison`].
    fn poison_device(&mut self) -> Result<(), CliError> {
        let executor = self.core.executor_mut().inner_mut();
        executor.poison().map_err(|error| EngineError::from(error).into())
    }

    /// Copies the state of a request that runs alone out and in.
    ///
    /// # Errors
    /// As [`Stepper::step`]; that the host has no room for it.
    pub fn swap(&mut self, id: RequestId) -> Result<Swap, CliError> {
        self.core.executor_mut().take_moved();
        self.core.park(id);
        let out_seconds = self.transfer(|stats| stats.parked)?;
        self.poison_device()?;
        let in_seconds = self.transfer(|stats| stats.returned)?;
        Ok(Swap { out_seconds, in_seconds, bytes: self.core.executor_mut().take_moved() })
    }

    /// Seconds of the steps until one more transfer has ended, which `count` counts.
    fn transfer(&mut self, count: fn(&SchedulerStats) -> u64) -> Result<f64, CliError> {
        let start = self.core.now();
        let before = count(&self.core.stats().scheduler);
        while count(&self.core.stats().scheduler) == before {
            self.step()?;
        }
        Ok(self.seconds_since(start))
    }

    fn seconds_since(&self, start: Duration) -> f64 {
        self.core.now().saturating_sub(start).as_secs_f64()
    }

    /// Seconds that were spent in the executor's steps since this was asked last.
    pub fn take_busy(&mut self) -> f64 {
        self.core.executor_mut().take_busy().as_secs_f64()
    }

    /// Ends all requests.
    pub fn end(&mut self) {
        self.core.cancel_all();
        while !self.core.is_idle() {
            self.core.step();
        }
        self.answers.clear();
    }
}
