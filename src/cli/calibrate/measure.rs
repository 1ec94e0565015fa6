//! What is measured: memory, products and copies of the machine, and steps of the real engine.

use std::thread;
use std::time::Instant;

use indicatif::ProgressBar;
use kernels::{Arena, CELL_LEN, Cpu, Isa, ceilings};

use super::fit::{Chunk, Decode, Samples};
use super::workloads::{self, Workload};
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

/// Tokens of prompts that are computed in one step.
const PROMPTS: [usize; 4] = [64, 128, 256, 384];

/// Tokens of a step of a long prompt.
pub const CHUNK: usize = 512;

/// Most steps of the long prompt, and the seconds that computing it should stay below.
const MOST_CHUNKS: usize = 8;
const LONG_SECONDS: f64 = 10.0;

/// Rounds in which everything is timed.
const REPEATS: usize = 11;

/// Steps of a batch that are timed.
pub const STEPS: usize = 12;

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
    vocab_size: usize,
    bar: &'b ProgressBar,
}

impl<'b> Steps<'b> {
    /// Measures on `stepper`, in which nothing runs; `bar` moves with it.
    pub fn new(stepper: Stepper, vocab_size: usize, bar: &'b ProgressBar) -> Steps<'b> {
        Steps { stepper, ids: TokenIds::new(1, vocab_size), vocab_size, bar }
    }

    /// All steps that the fit needs, the copies of the longest sequence, of up to `longest` tokens,
    /// and workloads that the fit does not see. Everything is measured by turns: what else the
    /// machine does for a while is in all of it alike.
    ///
    /// # Errors
    /// As [`Stepper::step`].
    pub fn measure(
        &mut self,
        longest: usize,
        (stream, product_flops): (f64, f64),
    ) -> Result<(Samples, Copies, Vec<Workload>), CliError> {
        // The first prompt warms memory and caches up.
        self.prompt(CHUNK)?;
        let chunk = self.prompt(CHUNK)?;
        let most = (LONG_SECONDS / REPEATS as f64 / chunk) as usize;
        let chunks = most.clamp(2, MOST_CHUNKS).min(longest / CHUNK).max(1);
        let mut taken = Taken::new(chunks);
        let mut workloads = workloads::all(chunks * CHUNK / 2);
        for _ in 0..REPEATS {
            self.round(&mut taken)?;
            for workload in &mut workloads {
                self.bar.set_message(workload.name());
                workload.run(&mut self.stepper, self.vocab_size)?;
                self.bar.inc(1);
            }
        }
        let (samples, copies) = taken.settled(stream, product_flops);
        Ok((samples, copies, workloads))
    }

    fn round(&mut self, taken: &mut Taken) -> Result<(), CliError> {
        for (rows, times) in &mut taken.prompts {
            times.push(self.prompt(*rows)?);
            self.bar.inc(1);
        }
        self.long(taken)?;
        taken.batches.iter_mut().try_for_each(|batch| self.batch(batch))
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
        batch.context = self.fill(sequences)?;
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

    /// Starts sequences with prompts of a cell each, until all generate; returns their contexts
    /// together.
    fn fill(&mut self, sequences: usize) -> Result<f64, CliError> {
        let mut all = Vec::new();
        for _ in 0..sequences {
            let prompt = self.ids.take(CELL_LEN);
            all.push(self.stepper.submit(prompt, fill_tokens(sequences))?);
        }
        self.stepper.until_answer(*all.last().expect("one at least"), 1)?;
        let answered: usize = all.iter().map(|id| self.stepper.answer(*id).len()).sum();
        Ok((sequences * CELL_LEN + answered) as f64)
    }
}

/// A batch that generates: its sequences, and what was measured of it.
#[derive(Debug)]
struct Batch {
    sequences: usize,
    /// Their contexts together, in the middle of the steps.
    context: f64,
    times: Vec<f64>,
    /// Seconds of each step that are not the executor's.
    beyond: Vec<f64>,
}

impl Batch {
    fn new(sequences: usize) -> Batch {
        Batch { sequences, context: 0.0, times: Vec::new(), beyond: Vec::new() }
    }
}

/// What was measured so far.
#[derive(Debug)]
struct Taken {
    /// Prompts of one step.
    prompts: Vec<(usize, Vec<f64>)>,
    chunks: Vec<Vec<f64>>,
    long_decode: Vec<f64>,
    copied: u64,
    ways: [Vec<f64>; 2],
    batches: Vec<Batch>,
}

impl Taken {
    fn new(chunks: usize) -> Taken {
        Taken {
            prompts: PROMPTS.iter().map(|rows| (*rows, Vec::new())).collect(),
            chunks: vec![Vec::new(); chunks],
            long_decode: Vec::new(),
            copied: 0,
            ways: [Vec::new(), Vec::new()],
            batches: BATCHES.into_iter().map(Batch::new).collect(),
        }
    }

    /// The medians.
    fn settled(self, stream: f64, product_flops: f64) -> (Samples, Copies) {
        let tokens = self.chunks.len() * CHUNK;
        let [out_seconds, in_seconds] = self.ways.map(median);
        let copies = Copies { bytes: self.copied, out_seconds, in_seconds };
        let overhead = median(self.batches[0].beyond.clone());
        let decode = |batch: Batch| Decode {
            sequences: batch.sequences,
            context: batch.context,
            seconds: median(batch.times),
        };
        let prompt =
            |(rows, times): (usize, Vec<f64>)| Chunk { start: 0, rows, seconds: median(times) };
        let samples = Samples {
            stream,
            product_flops,
            overhead,
            decodes: self.batches.into_iter().map(decode).collect(),
            long_decode: Decode {
                sequences: 1,
                context: tokens as f64 + (1 + STEPS) as f64 / 2.0,
                seconds: median(self.long_decode),
            },
            prompts: self.prompts.into_iter().map(prompt).collect(),
            chunks: (0..)
                .step_by(CHUNK)
                .zip(self.chunks)
                .map(|(start, times)| Chunk { start, rows: CHUNK, seconds: median(times) })
                .collect(),
        };
        (samples, copies)
    }
}

/// Tokens of the answers of a batch: what is drawn while the others' prompts are computed, and
/// what is timed.
pub fn fill_tokens(sequences: usize) -> usize {
    sequences + 2 * STEPS + REPEATS
}

/// Turns of the bar in [`Steps::measure`].
pub fn turns() -> u64 {
    (REPEATS * (PROMPTS.len() + 1 + BATCHES.len() + workloads::COUNT)) as u64
}

fn seconds(step: &StepRecord) -> f64 {
    step.duration.as_secs_f64()
}

fn median(times: Vec<f64>) -> f64 {
    Spread::of(times).expect("something was timed").median
}
