//! `deltapool chat`: a conversation in the terminal.

mod conversation;
mod input;

use std::borrow::Cow;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Args;
use kernels::Isa;

use super::CliError;
use super::common::CommonArgs;
use super::limits::parse_tokens;
use super::loading::{Files, Progress, is_shown};
use super::output::{grouped, print};
use super::sampling::{SamplingArgs, flag_spelling};
use crate::config::{EngineConfig, MemorySize};
use crate::engine::Engine;
use crate::request::{Figures, Finish, FinishReason, Request, StopCause};
use crate::text::{ChatTemplate, TextError};
use conversation::Conversation;
use input::{Input, Line};

/// Arguments of `chat`.
#[derive(Debug, Args)]
#[command(after_help = COMMANDS)]
pub struct ChatArgs {
    /// What the system says before the first turn.
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// A chat template, instead of the model's own.
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<PathBuf>,
    /// Most tokens of an answer; default: what the conversation leaves.
    #[arg(short = 'n', long, value_name = "N")]
    pub max_tokens: Option<usize>,
    /// How each token is chosen.
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Most tokens of the conversation; default: the model's context, or what the device memory
    /// holds. 32k is 32,000 and 32K is 32,768; m and M as well.
    #[arg(long, value_name = "N", value_parser = parse_tokens)]
    pub max_model_len: Option<usize>,
    /// Memory of the conversation: bytes (64MiB, 8GB), or a percentage of what is free after the
    /// weights.
    #[arg(long, value_name = "SIZE", default_value = "25%")]
    pub device_memory: MemorySize,
    /// Which model, how it is computed, and whether that is told.
    #[command(flatten)]
    pub common: CommonArgs,
}

const COMMANDS: &str = "\
/stats         what the last turn and the conversation took
/reset         begin again
/system TEXT   begin again with another text of the system; without TEXT, with none
/help          these lines
/quit          end, as Ctrl-D does
//TEXT         say /TEXT
Ctrl-C         stop the answer

Lines from a file or a pipe are turns as well; then only answers go to standard output, and the
exit code is 1 when a line could not be done.

Tokens are the likeliest unless --temperature says otherwise; serve follows the model.";

/// Runs the command.
pub fn run(args: &ChatArgs, isa: Isa) -> Result<(), CliError> {
    let mut files = Files::open(&args.common, isa)?;
    if let Some(path) = &args.chat_template {
        let named = || format!("--chat-template {}", path.display());
        let bytes = fs::read(path).map_err(|source| CliError::File { path: named(), source })?;
        files.text.chat_template = Some(Cow::Owned(bytes));
    }
    let tokenizer = files.tokenizer()?.ok_or(TextError::NoTokenizer)?;
    let template = ChatTemplate::from_files(&files.text)?;
    let vocab_size = files.model.spec.vocab_size;
    let check = request(args, vec![0], 1).check(vocab_size);
    check.map_err(|error| CliError::Usage(flag_spelling(&error)))?;
    if args.max_tokens == Some(0) {
        return Err(CliError::Usage("--max-tokens is 0, allowed: 1 or more".to_owned()));
    }
    let config = EngineConfig {
        max_num_batched_tokens: files.device.kind().default_max_num_batched_tokens(),
        max_num_seqs: Some(1),
        max_model_len: args.max_model_len,
        device_memory: args.device_memory,
        host_memory: MemorySize::Bytes(0),
        threads: args.common.threads(),
        ..EngineConfig::default()
    };
    let progress = Progress::bar(args.common.quiet);
    let (engine, ()) =
        files.engine(Some(Arc::clone(&tokenizer)), isa, config, progress, |_| Ok(()))?;
    let system = args.system.as_deref();
    let mut session = Session {
        args,
        input: Input::open()?,
        interrupt: Interrupt::install(&engine)?,
        engine,
        conversation: Conversation::new(&tokenizer, &template, vocab_size, system),
        last: None,
        failed: 0,
    };
    if session.input.is_terminal() && !args.common.quiet {
        eprintln!("/help says what there is; Ctrl-D ends");
    }
    session.run()
}

/// A request with the sampling that was asked for.
fn request(args: &ChatArgs, prompt: Vec<u32>, max_tokens: usize) -> Request {
    let sampling = args.sampling.params();
    let stop = args.sampling.stop.clone();
    Request { sampling, stop, ..Request::new(prompt, max_tokens) }
}

struct Session<'m> {
    args: &'m ChatArgs,
    input: Input,
    interrupt: Arc<Interrupt>,
    engine: Engine,
    conversation: Conversation<'m>,
    last: Option<Figures>,
    /// Lines that could not be done.
    failed: usize,
}

impl Session<'_> {
    /// Does line by line. Who types sees what fails; for a file or a pipe the exit code says it.
    fn run(&mut self) -> Result<(), CliError> {
        self.lines()?;
        match self.failed {
            0 => Ok(()),
            _ if self.input.is_terminal() => Ok(()),
            1 => Err(CliError::Failed("1 line could not be done".to_owned())),
            failed => Err(CliError::Failed(format!("{failed} lines could not be done"))),
        }
    }

    fn lines(&mut self) -> Result<(), CliError> {
        loop {
            let line = match self.input.next()? {
                Line::Text(line) => line,
                Line::Dropped => continue,
                Line::End => return Ok(()),
            };
            let line = line.trim();
            match line.strip_prefix('/') {
                None if line.is_empty() => {}
                None => self.turn(line)?,
                Some(text) if text.starts_with('/') => self.turn(text)?,
                Some("quit") => return Ok(()),
                Some(command) => self.command(command),
            }
        }
    }

    fn command(&mut self, command: &str) {
        let (name, text) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        match name {
            "stats" => eprintln!("{}", self.stats()),
            "help" => eprintln!("{COMMANDS}"),
            "reset" => self.conversation.reset(),
            "system" => self.conversation.set_system(text.trim()),
            _ => self.fail(format_args!("there is no command /{name}; /help says what there is")),
        }
    }

    /// Tells why a line could not be done.
    fn fail(&mut self, why: impl std::fmt::Display) {
        eprintln!("{why}");
        self.failed += 1;
    }

    /// Asks and prints the answer as it comes.
    fn turn(&mut self, text: &str) -> Result<(), CliError> {
        let turn = match self.conversation.ask(text) {
            // The template does not take this turn; another may do.
            Err(CliError::Text(error)) => {
                self.fail(error);
                return Ok(());
            }
            turn => turn?,
        };
        let limit = self.engine.limits().max_model_len;
        let Some(room) = limit.checked_sub(turn.ids().len()).filter(|room| *room > 0) else {
            let (tokens, limit) = (grouped(turn.ids().len()), grouped(limit));
            self.fail(format_args!(
                "the conversation has {tokens} tokens, {limit} at most: /reset"
            ));
            return Ok(());
        };
        let max_tokens = self.args.max_tokens.map_or(room, |tokens| tokens.min(room));
        self.interrupt.begin();
        let answer = self.answer(request(self.args, turn.ids().to_vec(), max_tokens));
        self.interrupt.end();
        let Answer { text, ids, finish } = answer?;
        print("\n")?;
        self.last = Some(finish.figures);
        if !text.is_empty() {
            self.conversation.answered(turn, &text, &ids);
        }
        match finish.reason {
            FinishReason::Failed(reason) => Err(CliError::Failed(reason)),
            FinishReason::Cancelled if !self.input.is_terminal() => Err(CliError::Interrupted),
            _ => {
                if self.input.is_terminal() && is_shown(self.args.common.quiet) {
                    eprintln!("{}", Spent(&finish.figures));
                }
                Ok(())
            }
        }
    }

    fn answer(&self, request: Request) -> Result<Answer, CliError> {
        let (mut text, mut ids) = (String::new(), Vec::new());
        for event in self.engine.submit(request)? {
            ids.extend(event.token);
            text.push_str(&event.text);
            print(&event.text)?;
            if let Some(finish) = event.finish {
                if matches!(finish.reason, FinishReason::Stop(StopCause::Eos | StopCause::Token(_)))
                {
                    // It ends the answer and is no part of it.
                    ids.pop();
                }
                return Ok(Answer { text, ids, finish });
            }
        }
        unreachable!("an answer ends with its last event")
    }

    fn stats(&self) -> String {
        let stats = self.engine.stats();
        let (pool, limits) = (&stats.device, self.engine.limits());
        let last = self.last.as_ref().map_or("none".to_owned(), |last| Spent(last).to_string());
        format!(
            "last turn     {last}\n\
             conversation  {} turn{}, {} tokens at most\n\
             memory        {} of {} pages: {} slots, {} blocks",
            self.conversation.turns(),
            if self.conversation.turns() == 1 { "" } else { "s" },
            grouped(limits.max_model_len),
            grouped(pool.pages - pool.free_pages),
            grouped(pool.pages),
            pool.slots.held,
            pool.blocks.held,
        )
    }
}

struct Answer {
    text: String,
    /// Those that stand for the text.
    ids: Vec<u32>,
    finish: Finish,
}

/// What a turn took, for people.
struct Spent<'a>(&'a Figures);

impl std::fmt::Display for Spent<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let figures = self.0;
        write!(
            f,
            "prompt_tokens {}  matched_tokens {}  cached_tokens {}  replayed_tokens {}  \
             generated_tokens {}  ttft {:.0} ms  {:.1} tokens/s",
            figures.prompt_tokens,
            figures.matched_tokens,
            figures.cached_tokens,
            figures.replayed_tokens,
            figures.generated_tokens,
            figures.time_to_first_token.as_secs_f64() * 1e3,
            figures.decode_rate(),
        )
    }
}

/// Ctrl-C stops the answer. The program ends at once when there is none, or when it is pressed
/// again before the answer has ended.
struct Interrupt {
    answers: AtomicBool,
    pressed: AtomicBool,
}

impl Interrupt {
    fn install(engine: &Engine) -> Result<Arc<Interrupt>, CliError> {
        let interrupt = Arc::new(Interrupt {
            answers: AtomicBool::new(false),
            pressed: AtomicBool::new(false),
        });
        let (seen, stopper) = (Arc::clone(&interrupt), engine.stopper());
        let handler = move || {
            let is_first = !seen.pressed.swap(true, Ordering::Relaxed);
            if !is_first || !seen.answers.load(Ordering::Relaxed) {
                std::process::exit(130);
            }
            stopper.cancel_all();
        };
        ctrlc::set_handler(handler)
            .map_err(|error| CliError::Usage(format!("no handler for Ctrl-C: {error}")))?;
        Ok(interrupt)
    }

    fn begin(&self) {
        self.pressed.store(false, Ordering::Relaxed);
        self.answers.store(true, Ordering::Relaxed);
    }

    fn end(&self) {
        self.answers.store(false, Ordering::Relaxed);
    }
}
