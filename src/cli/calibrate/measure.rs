//! What is measured: memory, products and copies of the machine, and steps of the real engine.

use std::thread;
use std::time::Instant;

use indicatif::ProgressBar;
use kernels::{Arena, CELL_LEN, Cpu, Isa, ceilings};

use super::fit::{Chunk, Decode, Samples};
use crate::cli::CliError;
use crate::cli::bench::ids::TokenIds;
use crate::cli::bench::spread::Spread;
use crate::cli::bench::stepper::Stepper;
use crate::engine::{EngineError, StepRecord, probe};
use crate::models::spec::ModelSpec;

/// Rows of products that are measured.
pub const ROWS: [usize; 10] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512];

/// Sequences of the batches that generate.
pub const BATCHES: [usize; 6] = [1, 2, 4, 8, 16, 32];

/// Tokens of prompts that are computed in one step; the last is a check.
const PROMPTS: [usize; 4] = [64, 128, 256, 384];

/// Tokens of a step of a long prompt.
pub const CHUNK: usize = 512;

/// Most steps of the long prompt, and the seconds that computing it should stay below.
const MOST_CHUNKS: usize = 8;
const LONG_SECONDS: f64 = 10.0;

/// Rounds in which everything is timed.
const REPEATS: usize = 5;

/// Steps of a batch that are timed.
pub const STEPS: usize = 12;

/// Sequences of the batch that is a check, and tokens of their prompts.
const CHECKED: (usize, usize) = (6, 448);

/// Sequences that generate in the mixed step that is a check, and tokens of the prompt beside them.
const MIXED: (usize, usize) = (8, 256);

/// Bytes that are read to tell the memory's bandwidth: more than caches hold.
const STREAM_BYTES: usize = 256 << 20;

/// Copies of a sequence each way: bytes, and seconds of either.
#[derive(Debug, Clone, Copy)]
pub struct Copies {
    /// Bytes of the sequence.
    pub bytes: u64,
    /// Out.
    pub out_seconds: f64,
    /// In.
    pub in_seconds: f64,
}

/// A step that the fit does not see: its content, and what it took.
#[derive(Debug, Clone)]
pub struct Check {
    /// What it is called.
    pub name: String,
    /// Sequences that generated, and their contexts together.
    pub decode: (usize, f64),
    /// Pieces of prompts, `(start, rows)`.
    pub chunks: Vec<(usize, usize)>,
    /// How long it took.
    pub seconds: f64,
}

/// Bandwidth of reads by all threads together, the best of some passes, B/s.
///
/// # Errors
/// When the system refuses the memory.
pub fn stream(isa: Isa, threads: usize) -> Result<f64, CliError> {
    let values = STREAM_BYTES / size_of::<f32>();
    let mut arena = Arena::new(STREAM_BYTES).map_err(EngineError::Arena)?;
    let data = arena.f32s_mut(0, values);
    data.fill(1.0);
    let part = values / threads / 128 * 128;
    let pass = || {
        let start = Instant::now();
        thread::scope(|scope| {
            for part in data.chunks_exact(part.max(128)).take(threads) {
                scope.spawn(|| std::hint::black_box(ceilings::read(isa, part)));
            }
        });
        (part * threads * size_of::<f32>()) as f64 / start.elapsed().as_secs_f64()
    };
    Ok((0..2 * REPEATS).map(|_| pass()).fold(0.0, f64::max))
}

/// `(rows, FLOP/s)` of products with weights held as those of `spec`.
///
/// # Errors
/// When the system refuses threads or memory.
pub fn products(
    (isa, threads): (Isa, usize),
    spec: &ModelSpec,
    bar: &ProgressBar,
) -> Result<Vec<(usize, f64)>, CliError> {
    let mut cpu = Cpu::new(isa, threads).map_err(EngineError::Threads)?;
    cpu.compute = spec.compute;
    let mut rates = Vec::new();
    for rows in ROWS {
        bar.set_message(format!("products of {rows} rows"));
        let mut best = 0.0;
        for _ in 0..REPEATS {
            let rate = probe::product_flops(&cpu, spec, rows).map_err(EngineError::Arena)?;
            best = f64::max(best, rate);
        }
        rates.push((rows, best));
        bar.inc(1);
    }
    Ok(rates)
}

/// Measures steps.
pub struct Steps<'b> {
    stepper: Stepper,
    ids: TokenIds,
    bar: &'b ProgressBar,
}

impl<'b> Steps<'b> {
    /// Measures on `stepper`, in which nothing runs; `bar` moves with it.
    pub fn new(stepper: Stepper, ids: TokenIds, bar: &'b ProgressBar) -> Steps<'b> {
        Steps { stepper, ids, bar }
    }

    /// All steps that the fit needs, the copies of the longest sequence, of up to `longest` tokens,
    /// and steps that the fit does not see. Everything is measured by turns: what else the machine
    /// does for a while is in all of it alike.
    ///
    /// # Errors
    /// As [`Stepper::step`].
    pub fn measure(
        &mut self,
        longest: usize,
        (stream, product_flops): (f64, f64),
    ) -> Result<(Samples, Copies, Vec<Check>), CliError> {
        // The first prompt warms memory and caches up.
        self.prompt(CHUNK)?;
        let chunk = self.prompt(CHUNK)?;
        let most = (LONG_SECONDS / REPEATS as f64 / chunk) as usize;
        let chunks = most.clamp(2, MOST_CHUNKS).min(longest / CHUNK).max(1);
        let mut taken = Taken::new(chunks);
        for _ in 0..REPEATS {
            self.round(&mut taken)?;
        }
        Ok(taken.settled(stream, product_flops))
    }

    fn round(&mut self, taken: &mut Taken) -> Result<(), CliError> {
        for (rows, times) in &mut taken.prompts {
            times.push(self.prompt(*rows)?);
            self.bar.inc(1);
        }
        self.long(taken)?;
        for batch in &mut taken.batches {
            self.batch(batch)?;
        }
        self.mixed(&mut taken.mixed)
    }

    fn prompt(&mut self, tokens: usize) -> Result<f64, CliError> {
        self.bar.set_message(format!("a prompt of {tokens} tokens"));
        let id = self.stepper.submit(self.ids.take(tokens), 1)?;
        let steps = self.stepper.until_answer(id, 1)?;
        self.stepper.end();
        Ok(steps.iter().map(seconds).sum())
    }

    /// The steps of a long prompt, the copies of its sequence, and how that goes on.
    fn long(&mut self, taken: &mut Taken) -> Result<(), CliError> {
        let tokens = taken.chunks.len() * CHUNK;
        self.bar.set_message(format!("a prompt of {tokens} tokens"));
        let id = self.stepper.submit(self.ids.take(tokens), 1 + STEPS)?;
        let steps = self.stepper.until_answer(id, 1)?;
        taken.chunks.iter_mut().zip(&steps).for_each(|(times, step)| times.push(seconds(step)));
        let swap = self.stepper.swap(id)?;
        taken.copied = swap.bytes[0];
        taken.ways[0].push(swap.out_seconds);
        taken.ways[1].push(swap.in_seconds);
        let steps = self.stepper.until_answer(id, 1 + STEPS)?;
        taken.long_decode.extend(steps.iter().map(seconds));
        self.stepper.end();
        self.bar.inc(1);
        Ok(())
    }

    /// Steps of a batch that generates.
    fn batch(&mut self, batch: &mut Batch) -> Result<(), CliError> {
        let sequences = batch.sequences;
        self.bar.set_message(format!("{sequences} sequences that generate"));
        batch.context = self.fill(sequences, batch.prompt)?;
        batch.context += sequences as f64 * STEPS as f64 / 2.0;
        for _ in 0..STEPS {
            self.stepper.take_busy();
            let step = seconds(&self.stepper.step()?);
            batch.beyond.push((step - self.stepper.take_busy()).max(0.0));
            batch.times.push(step);
        }
        self.stepper.end();
        self.bar.inc(1);
        Ok(())
    }

    /// Steps of a batch that generates beside a prompt.
    fn mixed(&mut self, batch: &mut Batch) -> Result<(), CliError> {
        self.bar.set_message("both together");
        batch.context = self.fill(batch.sequences, CELL_LEN)?;
        for _ in 0..2 {
            let id = self.stepper.submit(self.ids.take(batch.prompt), 1)?;
            let steps = self.stepper.until_answer(id, 1)?;
            batch.times.extend(steps.iter().map(seconds));
        }
        batch.context += batch.sequences as f64;
        self.stepper.end();
        self.bar.inc(1);
        Ok(())
    }

    /// Starts sequences with prompts of `prompt` tokens each, until all generate; returns their
    /// contexts together.
    fn fill(&mut self, sequences: usize, prompt: usize) -> Result<f64, CliError> {
        let mut all = Vec::new();
        for _ in 0..sequences {
            let prompt = self.ids.take(prompt);
            all.push(self.stepper.submit(prompt, fill_tokens(sequences))?);
        }
        self.stepper.until_answer(*all.last().expect("one at least"), 1)?;
        let answered: usize = all.iter().map(|id| self.stepper.answer(*id).len()).sum();
        Ok((sequences * prompt + answered) as f64)
    }
}

/// A batch that generates: its sequences, the tokens of their prompts (or of the prompt beside
/// them), and what was measured of it.
#[derive(Debug)]
struct Batch {
    sequences: usize,
    prompt: usize,
    /// Their contexts together, in the middle of the steps.
    context: f64,
    times: Vec<f64>,
    /// Seconds of each step that are not the executor's.
    beyond: Vec<f64>,
}

impl Batch {
    fn new(sequences: usize, prompt: usize) -> Batch {
        Batch { sequences, prompt, context: 0.0, times: Vec::new(), beyond: Vec::new() }
    }
}

/// What was measured so far.
#[derive(Debug)]
struct Taken {
    /// Prompts of one step; the last of them is a check.
    prompts: Vec<(usize, Vec<f64>)>,
    chunks: Vec<Vec<f64>>,
    long_decode: Vec<f64>,
    copied: u64,
    ways: [Vec<f64>; 2],
    /// The last of them is a check.
    batches: Vec<Batch>,
    mixed: Batch,
}

impl Taken {
    fn new(chunks: usize) -> Taken {
        let mut batches: Vec<Batch> =
            BATCHES.iter().map(|sequences| Batch::new(*sequences, CELL_LEN)).collect();
        batches.push(Batch::new(CHECKED.0, CHECKED.1));
        Taken {
            prompts: PROMPTS.iter().map(|rows| (*rows, Vec::new())).collect(),
            chunks: vec![Vec::new(); chunks],
            long_decode: Vec::new(),
            copied: 0,
            ways: [Vec::new(), Vec::new()],
            batches,
            mixed: Batch::new(MIXED.0, MIXED.1),
        }
    }

    /// The medians.
    fn settled(self, stream: f64, product_flops: f64) -> (Samples, Copies, Vec<Check>) {
        let tokens = self.chunks.len() * CHUNK;
        let [out_seconds, in_seconds] = self.ways.map(median);
        let copies = Copies { bytes: self.copied, out_seconds, in_seconds };
        let mut prompts: Vec<Chunk> = self
            .prompts
            .into_iter()
            .map(|(rows, times)| Chunk { start: 0, rows, seconds: median(times) })
            .collect();
        let overhead = median(self.batches[0].beyond.clone());
        let mut batches = self.batches;
        let check = batches.pop().expect("the last batch is a check");
        let decode = |batch: Batch| Decode {
            sequences: batch.sequences,
            context: batch.context,
            seconds: median(batch.times),
        };
        let checks = checks(check, prompts.pop().expect("the last prompt is one too"), self.mixed);
        let samples = Samples {
            stream,
            product_flops,
            overhead,
            decodes: batches.into_iter().map(decode).collect(),
            long_decode: Decode {
                sequences: 1,
                context: tokens as f64 + (1 + STEPS) as f64 / 2.0,
                seconds: median(self.long_decode),
            },
            prompts,
            chunks: (0..)
                .step_by(CHUNK)
                .zip(self.chunks)
                .map(|(start, times)| Chunk { start, rows: CHUNK, seconds: median(times) })
                .collect(),
        };
        (samples, copies, checks)
    }
}

/// Steps that no fit has seen: a batch of another size and context, a prompt of another length, and
/// both together.
fn checks(batch: Batch, prompt: Chunk, mixed: Batch) -> Vec<Check> {
    vec![
        Check {
            name: format!("{} generate at {} tokens", batch.sequences, batch.prompt),
            decode: (batch.sequences, batch.context),
            chunks: Vec::new(),
            seconds: median(batch.times),
        },
        Check {
            name: format!("a prompt of {} tokens", prompt.rows),
            decode: (0, 0.0),
            chunks: vec![(0, prompt.rows)],
            seconds: prompt.seconds,
        },
        Check {
            name: format!(
                "both: {} generate, {} tokens of a prompt",
                mixed.sequences, mixed.prompt
            ),
            decode: (mixed.sequences, mixed.context),
            chunks: vec![(0, mixed.prompt)],
            seconds: median(mixed.times),
        },
    ]
}

/// Tokens of the answers of a batch: what is drawn while the others' prompts are computed, and
/// what is timed.
pub fn fill_tokens(sequences: usize) -> usize {
    sequences + 2 * STEPS + REPEATS
}

/// Turns of the bar in [`Steps::measure`].
pub fn turns() -> u64 {
    (REPEATS * (PROMPTS.len() + 1 + BATCHES.len() + 1 + 1)) as u64
}

fn seconds(step: &StepRecord) -> f64 {
    step.duration.as_secs_f64()
}

fn median(times: Vec<f64>) -> f64 {
    Spread::of(times).expect("something was timed").median
}
