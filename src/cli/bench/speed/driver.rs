//! Steps an engine through a case and times the rounds of it.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use kernels::clock::{process_cpu, thread_cpu};
use kernels::meter::Meter;

use super::case::{Case, WARM_UP_STEPS, prompts};
use super::roofline::Metered;
use crate::cli::CliError;
use crate::cli::bench::ids::TokenIds;
use crate::cli::bench::stepper::{events, likeliest};
use crate::engine::RequestId;
use crate::engine::core::Core;
use crate::engine::device::AnyExecutor;

/// Tokens of the untimed prompt before the rounds of a prefill: a step of full size.
const WARM_UP_TOKENS: usize = 512;

/// An engine's loop, and the sequences that run in it.
pub struct Driver {
    core: Core<AnyExecutor>,
    next_request: u64,
    ids: TokenIds,
    /// Tokens of each sequence, prompt and answer.
    lengths: HashMap<RequestId, usize>,
}

/// What a round did.
#[derive(Debug, Clone, Copy)]
pub struct Round {
    /// Prompt tokens computed, or tokens generated.
    pub tokens: usize,
    /// CPU time of the process.
    pub cpu: Duration,
    /// Time on the wall.
    pub wall: Duration,
}

/// What a case gave.
#[derive(Debug, Clone)]
pub struct Measured {
    /// Its rounds.
    pub rounds: Vec<Round>,
    /// Mean tokens of the sequences at the first timed step.
    pub context: f64,
    /// What operators did in one more round, if it was asked for.
    pub metered: Option<Metered>,
}

impl Driver {
    /// Drives `core`, in which nothing runs.
    pub fn new(core: Core<AnyExecutor>) -> Driver {
        let ids = TokenIds::new(0, core.door().vocab_size);
        Driver { core, next_request: 0, ids, lengths: HashMap::new() }
    }

    /// Runs `rounds` rounds of `case`, and one more with the meter on if `is_metered`; `bar` moves
    /// with them.
    pub fn measure(
        &mut self,
        case: &Case,
        rounds: usize,
        is_metered: bool,
        bar: &ProgressBar,
    ) -> Result<Measured, CliError> {
        let mut done = Vec::with_capacity(rounds);
        let mut metered = None;
        let mut context = 0.0;
        bar.set_message(case.to_string());
        match *case {
            Case::Prefill { tokens } => {
                self.prefill(tokens.min(WARM_UP_TOKENS))?;
                for _ in 0..rounds {
                    done.push(self.prefill(tokens)?);
                    bar.inc(1);
                }
                if is_metered {
                    metered = Some(self.metered(|driver| driver.prefill(tokens))?);
                }
            }
            Case::Decode { sequences, context: wanted, steps } => {
                let longest = case.longest(rounds + usize::from(is_metered));
                self.fill(sequences, wanted, longest, bar)?;
                self.decode(WARM_UP_STEPS)?;
                context = self.lengths.values().sum::<usize>() as f64 / sequences as f64;
                for _ in 0..rounds {
                    done.push(self.decode(steps)?);
                    bar.inc(1);
                }
                if is_metered {
                    metered = Some(self.metered(|driver| driver.decode(steps))?);
                }
                self.end();
            }
        }
        Ok(Measured { rounds: done, context, metered })
    }

    /// Runs a round with the meter on: apart from those that are timed, since it takes time too.
    fn metered(
        &mut self,
        round: impl FnOnce(&mut Driver) -> Result<Round, CliError>,
    ) -> Result<Metered, CliError> {
        self.meter().set_on(true);
        let start = thread_cpu();
        let done = round(self);
        let time = thread_cpu() - start;
        let meter = self.meter();
        meter.set_on(false);
        let totals = meter.take();
        done.map(|_| Metered { totals, time })
    }

    fn meter(&mut self) -> &Meter {
        let executor = self.core.executor_mut().cpu();
        &executor.expect("only the processor's operators are metered").cpu().meter
    }

    /// A prompt of `tokens` tokens, whose last step draws one.
    fn prefill(&mut self, tokens: usize) -> Result<Round, CliError> {
        self.submit(tokens, 1)?;
        let clock = Clock::start();
        while !self.core.is_idle() {
            self.step()?;
        }
        let round = clock.stop(tokens);
        self.lengths.clear();
        Ok(round)
    }

    /// Starts sequences and computes their prompts.
    fn fill(
        &mut self,
        sequences: usize,
        context: usize,
        longest: usize,
        bar: &ProgressBar,
    ) -> Result<(), CliError> {
        let wanted = bar.message();
        for prompt in prompts(sequences, context) {
            self.submit(prompt, longest - prompt)?;
        }
        let mut waiting: HashSet<RequestId> = self.lengths.keys().copied().collect();
        while !waiting.is_empty() {
            for id in self.step()? {
                waiting.remove(&id);
            }
            bar.set_message(format!("{wanted}, {} prompts to compute", waiting.len()));
        }
        bar.set_message(wanted);
        Ok(())
    }

    /// `steps` steps of all sequences.
    fn decode(&mut self, steps: usize) -> Result<Round, CliError> {
        let sequences = self.lengths.len();
        let clock = Clock::start();
        for _ in 0..steps {
            let drawn = self.step()?.len();
            assert_eq!(drawn, sequences, "every sequence has memory and tokens left");
        }
        Ok(clock.stop(steps * sequences))
    }

    /// Ends all sequences.
    fn end(&mut self) {
        self.core.cancel_all();
        while !self.core.is_idle() {
            self.core.step();
        }
        self.lengths.clear();
    }

    fn submit(&mut self, prompt: usize, max_tokens: usize) -> Result<(), CliError> {
        let request = likeliest(self.ids.take(prompt), max_tokens);
        self.core.door().check(&request)?;
        let id = RequestId(self.next_request);
        self.next_request += 1;
        self.core.submit(id, Arc::new(request), 0);
        self.lengths.insert(id, prompt);
        Ok(())
    }

    /// One step; returns who got a token.
    fn step(&mut self) -> Result<Vec<RequestId>, CliError> {
        let mut drawn = Vec::new();
        for (id, event) in events(&mut self.core)? {
            if event.token.is_some() {
                *self.lengths.get_mut(&id).expect("who draws was submitted") += 1;
                drawn.push(id);
            }
        }
        Ok(drawn)
    }
}

struct Clock {
    wall: Instant,
    cpu: Duration,
}

impl Clock {
    fn start() -> Clock {
        Clock { wall: Instant::now(), cpu: process_cpu() }
    }

    fn stop(self, tokens: usize) -> Round {
        Round { tokens, cpu: process_cpu() - self.cpu, wall: self.wall.elapsed() }
    }
}
