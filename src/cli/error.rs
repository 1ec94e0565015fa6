//! Why a command failed, and the exit code that says so.

use std::io;
use std::path::Path;

use crate::cli::inspect::InspectError;
use crate::engine::{EngineError, SubmitError};
use crate::models::ModelError;
use crate::text::TextError;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// The arguments do not make sense.
    #[error("{0}")]
    Usage(String),
    /// The arguments cannot be parsed; or help or the version was asked for.
    #[error("{0}")]
    Arguments(Box<clap::Error>),
    /// The model's config or weights.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// What was given as a model's folder is none.
    #[error("there is no folder {path}: nothing is downloaded, a model is a folder here{}",
        switch(.path))]
    NoFolder {
        /// What was given.
        path: String,
    },
    /// The model's tokenizer or chat template.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The tokenizer belongs to another model.
    #[error(
        "the tokenizer gives token {token} (it knows {tokenizer}), but the model knows {model}"
    )]
    Vocabulary {
        /// The token.
        token: u32,
        /// Tokens of the tokenizer.
        tokenizer: usize,
        /// Tokens of the model.
        model: usize,
    },
    /// This binary was built without a model and none was named.
    #[error("this binary carries no model; name a folder with --model")]
    NoModel,
    /// The engine.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The engine does not take a request.
    #[error(transparent)]
    Submit(#[from] SubmitError),
    /// The engine gave a request up.
    #[error("{0}")]
    Failed(String),
    /// Inspection.
    #[error(transparent)]
    Inspect(#[from] InspectError),
    /// A file could not be read or written.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: String,
        /// What the system said.
        source: io::Error,
    },
    /// Standard output could not be written.
    #[error("standard output: {0}")]
    Output(io::Error),
    /// A server cannot listen there.
    #[error("{place}: {source}")]
    Listen {
        /// Address and port, or the path of a socket.
        place: String,
        /// What the system said.
        source: io::Error,
    },
    /// A server ended before all it served had been answered.
    #[error("{answers} {} cut short", if *.answers == 1 { "answer was" } else { "answers were" })]
    Cut {
        /// How many.
        answers: usize,
    },
    /// The user pressed Ctrl-C.
    #[error("interrupted")]
    Interrupted,
}

impl CliError {
    /// The fault of a file.
    pub fn file(path: &Path, source: io::Error) -> CliError {
        CliError::File { path: path.display().to_string(), source }
    }

    /// Exit code of wrong usage.
    pub const USAGE: u8 = 2;

    /// The exit code: 1 failed, 2 usage, 3 model, 4 memory or device, 5 address in use, 74 no
    /// listening there, 75 answers cut short, 130 interrupted. A reader that closed the pipe is no
    /// failure.
    pub fn exit_code(&self) -> u8 {
        match self {
            // Help and version are "errors" that go to standard output and succeed.
            CliError::Arguments(error) if !error.use_stderr() => 0,
            CliError::Usage(_) | CliError::Arguments(_) => CliError::USAGE,
            CliError::Model(_)
            | CliError::NoFolder { .. }
            | CliError::Text(_)
            | CliError::Vocabulary { .. }
            | CliError::NoModel => 3,
            CliError::Engine(error) => match error {
                EngineError::Memory { .. } | EngineError::Arena(_) | EngineError::Device(_) => 4,
                EngineError::Limit(_)
                | EngineError::Layout { .. }
                | EngineError::Param(_)
                | EngineError::TooLong { .. } => CliError::USAGE,
                EngineError::Model(_) => 3,
                EngineError::Threads(_) | EngineError::Sample { .. } | EngineError::Cancelled => 1,
            },
            CliError::Submit(error) => match error {
                SubmitError::Draining | SubmitError::Failed(_) | SubmitError::Stopped => 1,
                _ => CliError::USAGE,
            },
            CliError::Inspect(error) => match error {
                InspectError::Model(_) | InspectError::NoModel => 3,
                InspectError::Memory(_) => CliError::USAGE,
                InspectError::Write { source, .. } => pipe_code(source),
            },
            CliError::Output(error) => pipe_code(error),
            CliError::File { .. } | CliError::Failed(_) => 1,
            CliError::Listen { source, .. } => match source.kind() {
                io::ErrorKind::AddrInUse => 5,
                _ => 74,
            },
            CliError::Cut { .. } => 75,
            CliError::Interrupted => 130,
        }
    }

    /// Whether there is nothing to say: the reader of our output has left.
    pub fn is_quiet(&self) -> bool {
        match self {
            CliError::Output(error) => error.kind() == io::ErrorKind::BrokenPipe,
            CliError::Inspect(InspectError::Write { source, .. }) => {
                source.kind() == io::ErrorKind::BrokenPipe
            }
            _ => false,
        }
    }
}

/// What to say to who writes `--no-ui false`.
fn switch(folder: &str) -> &'static str {
    match folder {
        "true" | "false" => "; a switch takes its value behind =, as in --no-ui=false",
        _ => "",
    }
}

fn pipe_code(error: &io::Error) -> u8 {
    if error.kind() == io::ErrorKind::BrokenPipe { 0 } else { 1 }
}
