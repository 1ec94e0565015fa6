//! `deltapool score`: tells how likely a text is.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Args;
use kernels::Isa;
use serde_json::{Value, json};

use super::CliError;
use super::common::{CommonArgs, JsonArgs};
use super::loading::{Files, bar, loading_bar, on_interrupt};
use super::output::{JsonTarget, print};
use super::prompt::{Source, encode_text};
use crate::engine::{EngineError, Scorer};
use crate::text::Tokenizer;

/// Arguments of `score`.
#[derive(Debug, Args)]
pub struct ScoreArgs {
    /// Read the text from a file; default: standard input.
    #[arg(short, long, value_name = "FILE", conflicts_with = "ids_file")]
    pub file: Option<PathBuf>,
    /// Read the text as a JSON array of token ids; nothing is added to it.
    #[arg(long, value_name = "FILE")]
    pub ids_file: Option<PathBuf>,
    /// Which model, how it is computed, and whether that is told.
    #[command(flatten)]
    pub common: CommonArgs,
    /// Where the result is reported.
    #[command(flatten)]
    pub report: JsonArgs,
}

/// Runs the command.
pub fn run(args: &ScoreArgs, isa: Isa) -> Result<(), CliError> {
    let sources = "with --file or --ids-file, or on standard input";
    let source = Source::read(None, (args.file.as_ref(), args.ids_file.as_ref()), sources)?;
    let files = Files::open(&args.common, isa)?;
    let tokenizer = files.tokenizer()?;
    let vocab_size = files.model.spec.vocab_size;
    let (tokens, bytes) = match &source {
        Source::Ids(ids) => {
            let bytes = tokenizer.as_deref().and_then(|t| bytes_of(t, ids));
            (ids.clone(), bytes)
        }
        Source::Text(text) => {
            (encode_text(tokenizer.as_deref(), vocab_size, text)?, Some(text.len()))
        }
    };
    if tokens.len() < 2 {
        let message = format!("tokens to score: {}; 2 or more, each after another", tokens.len());
        return Err(CliError::Usage(message));
    }
    let limit = files.model.spec.context;
    if tokens.len() > limit {
        return Err(EngineError::TooLong { tokens: tokens.len(), limit }.into());
    }
    let (loading, mut show) = loading_bar(args.common.quiet);
    let cpu = (isa, args.common.threads());
    let scorer = Scorer::on(files.device, &files.model, cpu, tokens.len(), &mut show);
    loading.finish_and_clear();
    let mut scorer = scorer?;
    let cancel = Arc::new(AtomicBool::new(false));
    let cancelled = Arc::clone(&cancel);
    on_interrupt(move || cancelled.store(true, Ordering::Relaxed))?;
    let bar = bar(args.common.quiet, "scoring {bar:40} {pos}/{len} tokens");
    bar.set_length(tokens.len() as u64);
    let show = &mut |done| bar.set_position(done as u64);
    let scored = scorer.score(tokens.clone(), &cancel, show);
    bar.finish_and_clear();
    let logprobs = match scored {
        Err(EngineError::Cancelled) => return Err(CliError::Interrupted),
        other => other?,
    };
    let score = Score { tokens, logprobs, bytes };
    let target = args.report.target();
    if target != JsonTarget::Output {
        print(&score.table())?;
    }
    target.write(&score.json())
}

/// Bytes that the tokens stand for; none when one of them is no text.
fn bytes_of(tokenizer: &Tokenizer, ids: &[u32]) -> Option<usize> {
    let visible = ids.iter().filter(|id| !tokenizer.is_special(**id));
    visible.map(|id| tokenizer.token_bytes(*id).map(<[u8]>::len)).sum()
}

struct Score {
    tokens: Vec<u32>,
    /// Of each token after the first.
    logprobs: Vec<f64>,
    bytes: Option<usize>,
}

impl Score {
    fn sum(&self) -> f64 {
        self.logprobs.iter().sum()
    }

    fn perplexity(&self) -> f64 {
        (-self.sum() / self.logprobs.len() as f64).exp()
    }

    /// Bits that a byte of the text costs; the first token of a text without BOS is not counted as
    /// a cost, its bytes are.
    fn bits_per_byte(&self) -> Option<f64> {
        let bytes = self.bytes.filter(|bytes| *bytes > 0)?;
        Some(-self.sum() / std::f64::consts::LN_2 / bytes as f64)
    }

    fn json(&self) -> Value {
        json!({
            "ids": self.tokens,
            "logprobs": self.logprobs,
            "logprob_sum": self.sum(),
            "perplexity": self.perplexity(),
            "bytes": self.bytes,
            "bits_per_byte": self.bits_per_byte(),
        })
    }

    fn table(&self) -> String {
        let bits = self.bits_per_byte().map_or("unknown".to_owned(), |bits| format!("{bits:.4}"));
        format!(
            "tokens scored   {}\nlogprob sum     {:.4}\nperplexity      {:.4}\n\
             bits per byte   {}\n",
            self.logprobs.len(),
            self.sum(),
            self.perplexity(),
            bits
        )
    }
}
