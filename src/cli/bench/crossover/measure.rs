//! The arms, on the real engine: what each takes, and that the answer goes on as if nothing was.

use indicatif::ProgressBar;
use kernels::CELL_LEN;

use super::report::Arm;
use crate::cli::CliError;
use crate::cli::bench::ids::TokenIds;
use crate::cli::bench::spread::Spread;
use crate::cli::bench::stepper::Stepper;
use crate::engine::{RequestId, StepRecord};

/// Tokens that are compared after each arm.
pub const COMPARED: usize = 8;

/// Sequences that decode beside the one that is computed again.
pub const DECODERS: usize = 8;

/// Steps of these alone, before, whose median is what a step takes without it.
const ALONE: usize = 8;

/// Tokens of an answer: one is drawn when the prompt is computed, the others after the arm.
pub const ANSWER: usize = 1 + COMPARED;

/// What a length is measured with.
#[derive(Debug, Clone)]
pub struct Case {
    /// Tokens of the prompt.
    pub tokens: usize,
    /// Bytes that a sequence of so many tokens holds.
    pub held_bytes: u64,
    /// Tokens before the nearest checkpoint below its end, and the bytes of that; none where it
    /// would be the start.
    pub checkpoint: Option<(usize, u64)>,
    prompt: Vec<u32>,
    /// The answer of a run that nothing disturbs.
    answer: Vec<u32>,
}

impl Case {
    /// Tokens that each decoder may need: its prompt, and a token in each step.
    pub fn decoder_tokens(tokens: usize) -> usize {
        // A step advances the prompt by a cell at least.
        CELL_LEN + 2 * ALONE + DECODERS + ANSWER + tokens.div_ceil(CELL_LEN)
    }
}

/// Seconds of an arm, one value a repeat.
#[derive(Debug, Clone)]
pub struct Times {
    /// Tokens of the prompt.
    pub tokens: usize,
    /// What was done.
    pub arm: Arm,
    /// How long it took each time.
    pub seconds: Vec<f64>,
}

impl Times {
    /// Least, middle and greatest, in seconds.
    pub fn spread(&self) -> Spread {
        Spread::of(self.seconds.clone()).expect("a repeat was made")
    }
}

/// What was measured.
#[derive(Debug, Clone)]
pub struct Measured {
    /// The arms of each length.
    pub times: Vec<Times>,
    /// `(tokens, seconds)`: the median of prompts that were computed alone before an arm.
    pub prompts: Vec<(usize, f64)>,
}

/// Measures the arms.
pub struct Bench {
    stepper: Stepper,
    vocab_size: usize,
}

impl Bench {
    /// Measures on `stepper`, in which nothing runs.
    pub fn new(stepper: Stepper, vocab_size: usize) -> Bench {
        Bench { stepper, vocab_size }
    }

    /// A case, with the answer of a run that nothing disturbs.
    ///
    /// # Errors
    /// As [`Stepper::step`].
    pub fn case(
        &mut self,
        tokens: usize,
        held_bytes: u64,
        checkpoint: Option<(usize, u64)>,
    ) -> Result<Case, CliError> {
        let prompt = TokenIds::new(tokens as u64, self.vocab_size).take(tokens);
        let id = self.stepper.submit(prompt.clone(), ANSWER)?;
        self.stepper.until_answer(id, ANSWER)?;
        let answer = self.stepper.answer(id).to_vec();
        self.stepper.end();
        Ok(Case { tokens, held_bytes, checkpoint, prompt, answer })
    }

    /// Measures all arms of all cases `repeats` times, by turns; `bar` moves with them.
    ///
    /// # Errors
    /// An answer that goes on otherwise after an arm, bytes that are not those of the layout; as
    /// [`Stepper::step`].
    pub fn measure(
        &mut self,
        cases: &[Case],
        repeats: usize,
        bar: &ProgressBar,
    ) -> Result<Measured, CliError> {
        let arms = [Arm::Swap, Arm::Recompute, Arm::RecomputeMarginal, Arm::Checkpoint];
        let mut taken = Taken::default();
        for repeat in 0..repeats {
            for case in cases {
                // Each arm comes first as often as any other.
                for turn in 0..arms.len() {
                    let arm = arms[(turn + repeat) % arms.len()];
                    bar.set_message(format!("{} of {} tokens", arm.as_str(), case.tokens));
                    self.run(arm, case, &mut taken)?;
                    bar.inc(1);
                }
            }
        }
        Ok(taken.measured())
    }

    fn run(&mut self, arm: Arm, case: &Case, taken: &mut Taken) -> Result<(), CliError> {
        let id = match arm {
            Arm::Swap | Arm::SwapOut | Arm::SwapIn => {
                let id = self.begin(case, taken)?;
                let swap = self.stepper.swap(id)?;
                check_bytes((case.tokens, case.held_bytes), swap.bytes)?;
                taken.note(case, Arm::SwapOut, swap.out_seconds);
                taken.note(case, Arm::SwapIn, swap.in_seconds);
                taken.note(case, Arm::Swap, swap.out_seconds + swap.in_seconds);
                id
            }
            Arm::Recompute => {
                let id = self.begin(case, taken)?;
                taken.note(case, arm, self.stepper.recompute(id, case.tokens)?);
                id
            }
            Arm::RecomputeMarginal => {
                let (id, seconds) = self.beside_decoders(case)?;
                taken.note(case, arm, seconds);
                id
            }
            Arm::Checkpoint => {
                let Some(checkpoint) = case.checkpoint else { return Ok(()) };
                let id = self.begin(case, taken)?;
                taken.note(case, arm, self.restore(id, checkpoint, case.tokens)?);
                id
            }
        };
        self.stepper.until_answer(id, ANSWER)?;
        let answer = self.stepper.answer(id);
        if answer != case.answer {
            return Err(CliError::Failed(format!(
                "after {} of {} tokens the answer is {answer:?} and not {:?}",
                arm.as_str(),
                case.tokens,
                case.answer
            )));
        }
        self.stepper.end();
        Ok(())
    }

    /// Computes the prompt alone, and the first token of its answer.
    fn begin(&mut self, case: &Case, taken: &mut Taken) -> Result<RequestId, CliError> {
        let id = self.stepper.submit(case.prompt.clone(), ANSWER)?;
        let steps = self.stepper.until_answer(id, 1)?;
        taken.prompts.push((case.tokens, steps.iter().map(seconds).sum()));
        Ok(id)
    }

    /// Brings a sequence to where its checkpoint was taken, on the host; returns the seconds from
    /// there back to its end. A checkpoint and a parked sequence are the same bytes, and come back
    /// by the same copies.
    fn restore(
        &mut self,
        id: RequestId,
        checkpoint: (usize, u64),
        tokens: usize,
    ) -> Result<f64, CliError> {
        self.stepper.recompute(id, checkpoint.0)?;
        let swap = self.stepper.swap(id)?;
        check_bytes(checkpoint, swap.bytes)?;
        Ok(swap.in_seconds + self.stepper.compute(tokens - checkpoint.0)?)
    }

    /// Computes the prompt beside sequences that decode; returns by how much their steps took
    /// longer. The prompt is computed for the first time: that is the same work as again.
    fn beside_decoders(&mut self, case: &Case) -> Result<(RequestId, f64), CliError> {
        let tokens = Case::decoder_tokens(case.tokens) - CELL_LEN;
        let mut ids = TokenIds::new(0, self.vocab_size);
        let mut last = None;
        for _ in 0..DECODERS {
            last = Some(self.stepper.submit(ids.take(CELL_LEN), tokens)?);
        }
        self.stepper.until_answer(last.expect("there are decoders"), 1)?;
        let mut alone = Vec::with_capacity(ALONE);
        for _ in 0..ALONE {
            alone.push(seconds(&self.stepper.step()?));
        }
        let alone = Spread::of(alone).expect("steps were made").median;
        let id = self.stepper.submit(case.prompt.clone(), ANSWER)?;
        let steps = self.stepper.until_answer(id, 1)?;
        if let Some(step) = steps.iter().find(|step| step.decoding != DECODERS) {
            let message = format!("{} of {DECODERS} sequences decode in a step", step.decoding);
            return Err(CliError::Failed(message));
        }
        let all: f64 = steps.iter().map(seconds).sum();
        Ok((id, all - alone * steps.len() as f64))
    }
}

/// Refuses copies of other bytes than those that a sequence of so many tokens holds, each way.
fn check_bytes((tokens, held): (usize, u64), copied: [u64; 2]) -> Result<(), CliError> {
    if copied == [held; 2] {
        return Ok(());
    }
    Err(CliError::Failed(format!(
        "a sequence of {tokens} tokens holds {held} bytes, but {} were copied out and {} in",
        copied[0], copied[1]
    )))
}

fn seconds(step: &StepRecord) -> f64 {
    step.duration.as_secs_f64()
}

/// What was measured so far.
#[derive(Debug, Default)]
struct Taken {
    times: Vec<Times>,
    prompts: Vec<(usize, f64)>,
}

impl Taken {
    fn note(&mut self, case: &Case, arm: Arm, seconds: f64) {
        let tokens = case.tokens;
        let of = |times: &&mut Times| times.tokens == tokens && times.arm == arm;
        match self.times.iter_mut().find(of) {
            Some(times) => times.seconds.push(seconds),
            None => self.times.push(Times { tokens, arm, seconds: vec![seconds] }),
        }
    }

    fn measured(self) -> Measured {
        let mut lengths: Vec<usize> = self.prompts.iter().map(|prompt| prompt.0).collect();
        lengths.sort_unstable();
        lengths.dedup();
        let median = |tokens: usize| {
            let of = self.prompts.iter().filter(|prompt| prompt.0 == tokens);
            let spread = Spread::of(of.map(|prompt| prompt.1).collect());
            (tokens, spread.expect("the length was computed").median)
        };
        let mut times = self.times;
        times.sort_by_key(|times| (times.tokens, times.arm));
        Measured { times, prompts: lengths.into_iter().map(median).collect() }
    }
}
