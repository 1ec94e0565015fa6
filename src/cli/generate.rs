//! `deltapool generate`: continues a prompt.

use std::io::{IsTerminal, stdout};
use std::path::PathBuf;

use clap::Args;
use kernels::Isa;
use serde_json::{Value, json};

use super::CliError;
use super::common::{CommonArgs, JsonArgs};
use super::loading::{Files, Progress, is_shown, on_interrupt};
use super::output::{JsonTarget, grouped, print};
use super::prompt::{Source, default_max_tokens, encode_chat, encode_text};
use super::sampling::{SamplingArgs, flag_spelling};
use crate::config::EngineConfig;
use crate::engine::{EngineError, EngineLimits};
use crate::request::{Figures, Finish, FinishReason, Request, SamplingParams};
use crate::text::{ChatTemplate, Tokenizer};

/// Arguments of `generate`.
#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// The text to continue; read from standard input when absent.
    #[arg(conflicts_with_all = ["file", "ids_file"])]
    pub prompt: Option<String>,
    /// Read the prompt from a file.
    #[arg(short, long, value_name = "FILE", conflicts_with = "ids_file")]
    pub file: Option<PathBuf>,
    /// Read the prompt as a JSON array of token ids; nothing is added to it.
    #[arg(long, value_name = "FILE")]
    pub ids_file: Option<PathBuf>,
    /// Most tokens to generate; default: 256, or what the model's context leaves.
    #[arg(short = 'n', long, value_name = "N")]
    pub max_tokens: Option<usize>,
    /// How each token is chosen.
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Put the prompt into the model's chat template, as a user's message.
    #[arg(long, conflicts_with = "ids_file")]
    pub chat: bool,
    /// Go on past the model's end of sequence.
    #[arg(long)]
    pub ignore_eos: bool,
    /// Most tokens of the prompt to compute in one step, 64 or more; default: 512, on a CUDA device
    /// 2048.
    #[arg(long, value_name = "N")]
    pub max_num_batched_tokens: Option<usize>,
    /// Which model, how it is computed, and whether that is told.
    #[command(flatten)]
    pub common: CommonArgs,
    /// Where the result is reported.
    #[command(flatten)]
    pub report: JsonArgs,
}

/// Runs the command.
pub fn run(args: &GenerateArgs, isa: Isa) -> Result<(), CliError> {
    let sources = "as an argument, with --file or --ids-file, or on standard input";
    let files = (args.file.as_ref(), args.ids_file.as_ref());
    let source = Source::read(args.prompt.as_deref(), files, sources)?;
    let files = Files::open(&args.common, isa)?;
    let tokenizer = files.tokenizer()?;
    let prompt = prompt_ids(args, &source, &files, tokenizer.as_deref())?;
    if tokenizer.is_none() && !args.sampling.stop.is_empty() {
        let message = "--stop needs a tokenizer, and the model has none";
        return Err(CliError::Usage(message.to_owned()));
    }
    let spec = &files.model.spec;
    let request = request(args, prompt, spec.context);
    request.check(spec.vocab_size).map_err(|error| CliError::Usage(flag_spelling(&error)))?;
    let tokens = request.prompt.len().saturating_add(request.max_tokens);
    if tokens > spec.context {
        return Err(EngineError::TooLong { tokens, limit: spec.context }.into());
    }
    let step = files.device.kind().default_max_num_batched_tokens();
    let config = EngineConfig {
        max_num_batched_tokens: args.max_num_batched_tokens.unwrap_or(step),
        threads: args.common.threads(),
        ..EngineConfig::one_sequence(tokens)
    };
    let (engine, ()) =
        files.engine(tokenizer, isa, config, Progress::bar(args.common.quiet), |_| Ok(()))?;
    let stopper = engine.stopper();
    on_interrupt(move || stopper.cancel_all())?;
    let target = args.report.target();
    let mut answer = Answer { prompt: request.prompt.clone(), ..Answer::default() };
    let handle = engine.submit(request)?;
    let seed = handle.seed();
    for event in handle {
        answer.ids.extend(event.token);
        answer.logprobs.extend(event.logprobs.map(|l| l.chosen));
        answer.text.push_str(&event.text);
        answer.finish = event.finish.or(answer.finish);
        if target != JsonTarget::Output {
            print(&event.text)?;
        }
    }
    let Some(Finish { reason, .. }) = &answer.finish else {
        unreachable!("an answer ends with its last event")
    };
    if let FinishReason::Failed(reason) = reason {
        return Err(CliError::Failed(reason.clone()));
    }
    answer.state_bytes = answer.state_bytes(engine.limits());
    if target != JsonTarget::Output && stdout().is_terminal() {
        print("\n")?; // for the prompt of the shell; a pipe gets the text and nothing else
    }
    target.write(&answer.json(seed))?;
    if is_shown(args.common.quiet) {
        eprintln!("{}", answer.summary());
    }
    let cancelled = answer.finish.is_some_and(|end| end.reason == FinishReason::Cancelled);
    if cancelled { Err(CliError::Interrupted) } else { Ok(()) }
}

fn request(args: &GenerateArgs, prompt: Vec<u32>, context: usize) -> Request {
    let room = default_max_tokens(prompt.len(), context);
    Request {
        sampling: SamplingParams {
            logprobs: args.report.json.is_some().then_some(0),
            ..args.sampling.params()
        },
        stop: args.sampling.stop.clone(),
        ignore_eos: args.ignore_eos,
        ..Request::new(prompt, args.max_tokens.unwrap_or(room))
    }
}

fn prompt_ids(
    args: &GenerateArgs,
    source: &Source,
    files: &Files,
    tokenizer: Option<&Tokenizer>,
) -> Result<Vec<u32>, CliError> {
    let text = match source {
        Source::Ids(ids) => return Ok(ids.clone()),
        Source::Text(text) => text,
    };
    let vocab_size = files.model.spec.vocab_size;
    if !args.chat {
        return encode_text(tokenizer, vocab_size, text);
    }
    let template = ChatTemplate::from_files(&files.text)?;
    encode_chat(tokenizer, vocab_size, &template, &[json!({"role": "user", "content": text})])
}

/// What came out.
#[derive(Default)]
struct Answer {
    prompt: Vec<u32>,
    ids: Vec<u32>,
    logprobs: Vec<f32>,
    text: String,
    finish: Option<Finish>,
    state_bytes: usize,
}

impl Answer {
    /// What a sequence of this length holds: a slot and whole blocks.
    fn state_bytes(&self, limits: &EngineLimits) -> usize {
        let tokens = self.prompt.len() + self.ids.len();
        let blocks = tokens.div_ceil(kernels::BLOCK_LEN);
        limits.device.slot_bytes + blocks * limits.device.block_bytes
    }

    fn figures(&self) -> Figures {
        self.finish.as_ref().map(|finish| finish.figures).unwrap_or_default()
    }

    fn json(&self, seed: u64) -> Value {
        let t = &self.figures();
        json!({
            "prompt_ids": self.prompt,
            "output_ids": self.ids,
            "text": self.text,
            "logprobs": self.logprobs,
            "finish_reason": self.finish.as_ref().map(|finish| finish.reason.as_str()),
            "seed": seed,
            "timings": {
                "prompt_tokens": t.prompt_tokens,
                "generated_tokens": t.generated_tokens,
                "ttft_ms": t.time_to_first_token.as_secs_f64() * 1e3,
                "decode_ms": t.decode.as_secs_f64() * 1e3,
                "prompt_tokens_per_second": t.prompt_rate(),
                "decode_tokens_per_second": t.decode_rate(),
                "state_bytes": self.state_bytes,
            },
        })
    }

    fn summary(&self) -> String {
        let t = &self.figures();
        format!(
            "prompt {} tokens, {:.0} tok/s; decode {} tokens, {:.0} tok/s; ttft {:.0} ms; state {} \
             bytes",
            grouped(t.prompt_tokens),
            t.prompt_rate(),
            grouped(t.generated_tokens),
            t.decode_rate(),
            t.time_to_first_token.as_secs_f64() * 1e3,
            grouped(self.state_bytes),
        )
    }
}
