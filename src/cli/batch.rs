//! `deltapool batch`: runs a file of requests, many at once, and writes a file of answers.

mod answer;
mod constraint;
mod line;
mod replay;
mod streams;
mod summary;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use clap::Args;
use kernels::Isa;

use super::CliError;
use super::common::{CommonArgs, JsonArgs};
use super::limits::{EngineArgs, Shown, Weighed};
use super::loading::{Files, Progress, bar, on_interrupt};
use super::output::JsonTarget;
use crate::config::Preempt;
use line::LineReader;
use replay::{Replay, tell_error};
use streams::Output;
use summary::Summary;

/// Arguments of `batch`.
#[derive(Debug, Args)]
#[command(after_help = LINES)]
pub struct BatchArgs {
    /// Requests, one JSON object a line; - for standard input.
    #[arg(short, long, value_name = "FILE")]
    pub input: PathBuf,
    /// Answers, one JSON object a line in the order of the requests; - for standard output.
    #[arg(short, long, value_name = "FILE", default_value = "-")]
    pub output: PathBuf,
    /// Which model, how it is computed, and whether that is told.
    #[command(flatten)]
    pub common: CommonArgs,
    /// Where the result is reported.
    #[command(flatten)]
    pub report: JsonArgs,
    /// Limits of the engine.
    #[command(flatten)]
    pub engine: EngineArgs,
}

const LINES: &str = "\
A request: {\"prompt\": TEXT} or {\"prompt_ids\": [...]} or {\"messages\": [...]}, and if wanted
  id                  string or number, echoed and not compared; default: place in the input, from 0
  max_tokens          default: 256, or what is left of --max-model-len
  n                   answers, default 1
  temperature         default 0: the likeliest token
  seed                answer i has the seed i beyond it; default: a random one
  top_p, top_k, min_p, repetition_penalty, presence_penalty, frequency_penalty
  logit_bias          {\"token id\": bias}
  stop                a string or a list of strings; stop_token_ids: a list of ids
  include_stop_str_in_output  leave the stop string that ends the answer in it
  ignore_eos          go on past the model's end of sequence
  min_tokens          nothing but max_tokens ends the answer within so many
  skip_special_tokens default true: special tokens are left out of the text
  structured_outputs  what the answer may be, one of {\"json\": SCHEMA}, {\"regex\": TEXT},
                      {\"choice\": [TEXT, ...]}, {\"grammar\": Lark of llguidance}
  response_format     {\"type\": \"json_object\"}, or {\"type\": \"json_schema\",
                      \"json_schema\": {\"schema\": SCHEMA}}
  logprobs            this many alternatives beside each token's own, 0 to 20
  priority            lower first; only with --scheduling-policy priority
  program_id          the agent or user whose share it is served from, under the policy fair
  cache_salt          requests of different salts share nothing that was computed
  checkpoint_at       tokens of the prompt after which to keep its state: a list of numbers
  arrival_ms          submitted so long after the start; default: at once
Null is absent, empty lines are skipped, any other field is an error.

An answer: id, output_ids, text, logprobs [{logprob, top: [[id, logprob], ...]}, ...] when asked,
finish_reason (stop, length, or error and beside it why), matched_tokens, cached_tokens,
replayed_tokens, miss_reason (null, never_taken, no_slot, evicted or not_exact), preemptions,
swapped_bytes, recomputed_tokens, queue_ms, ttft_ms, mean_itl_ms. With n above 1 the answers are in
choices, each with its index.

A line that cannot be run becomes {id, error, line} in its place and is told on standard error; the
others go on, and the exit code is 1. After Ctrl-C what is finished is written; what is not is left
out, to be run again, and the exit code is 130. --json gives the summary at the end as an object.";

/// Runs the command.
pub fn run(args: &BatchArgs, isa: Isa) -> Result<(), CliError> {
    let target = args.report.target();
    if target == JsonTarget::Output && streams::is_standard(&args.output) {
        let message = "--json prints to standard output, where the answers go; give --json=FILE, \
                       or --output FILE";
        return Err(CliError::Usage(message.to_owned()));
    }
    let mut files = vec![("--input", args.input.as_path()), ("--output", args.output.as_path())];
    if let JsonTarget::File(path) = &target {
        files.push(("--json", path));
    }
    streams::check_distinct(&files)?;
    let quiet = args.common.quiet;
    let input = streams::open(&args.input)?;
    let files = Files::open(&args.common, isa)?;
    let tokenizer = files.tokenizer()?;
    let reader = LineReader::new(&files, tokenizer.clone());
    let config = args.engine.config(args.common.threads(), files.device.kind());
    let progress = Progress::bar(quiet);
    let (engine, (lines, mut output)) =
        files.engine(tokenizer, isa, config, progress, |limits| {
            if !quiet {
                eprintln!("{}", Shown(limits));
            }
            let lines = reader.read_all(input, limits.max_model_len);
            let lines = lines.map_err(|source| streams::read_error(&args.input, source))?;
            for line in &lines {
                if let Err(error) = &line.work {
                    tell_error(line.number, error);
                }
            }
            Ok((lines, Output::open(&args.output)?))
        })?;
    if !quiet && engine.limits().config.preempt == Preempt::Auto {
        eprintln!("{}", Weighed(engine.cost()));
    }
    output.begin()?;
    let interrupted = interruption()?;
    let bar = bar(quiet, "{bar:40} {pos}/{len} answers, {msg}");
    let (tally, time) = Replay::new(&engine, lines, bar).run(&mut output, &interrupted)?;
    engine.drain();
    let summary = Summary::new(&tally, time, &engine.stats(), engine.limits());
    if !quiet {
        eprintln!("{summary}");
    }
    target.write(&serde_json::json!(summary))?;
    if interrupted.load(Ordering::Relaxed) {
        return Err(CliError::Interrupted);
    }
    if engine.stats().scheduler.audits_that_differ > 0 {
        let message = "an audit found other bits: a fault of this program or of the machine";
        return Err(CliError::Failed(message.to_owned()));
    }
    match (tally.failed, tally.requests) {
        (0, _) => Ok(()),
        (failed, all) => Err(CliError::Failed(format!("{failed} of {all} requests failed"))),
    }
}

/// Is set when Ctrl-C is pressed, which also wakes this thread.
fn interruption() -> Result<Arc<AtomicBool>, CliError> {
    let interrupted = Arc::new(AtomicBool::new(false));
    let (pressed, this_thread) = (Arc::clone(&interrupted), thread::current());
    on_interrupt(move || {
        pressed.store(true, Ordering::Relaxed);
        this_thread.unpark();
    })?;
    Ok(interrupted)
}
