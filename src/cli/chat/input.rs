//! What a user says, line by line: typed with an editor's keys, or from a pipe.

use std::io::{self, IsTerminal, Lines, StdinLock, stdin, stdout};

use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

use crate::cli::CliError;

/// Where lines come from.
pub enum Input {
    /// A person at a terminal. Earlier lines come back with the arrow keys; nothing is stored.
    Terminal(Box<DefaultEditor>),
    /// A file or another program.
    Pipe(Lines<StdinLock<'static>>),
}

/// What came.
#[derive(Debug, PartialEq, Eq)]
pub enum Line {
    /// A line, without its end.
    Text(String),
    /// Ctrl-C before the end of a line: it is dropped.
    Dropped,
    /// Nothing more follows.
    End,
}

impl Input {
    /// Standard input.
    pub fn open() -> Result<Input, CliError> {
        if !stdin().is_terminal() || !stdout().is_terminal() {
            return Ok(Input::Pipe(stdin().lines()));
        }
        let editor = DefaultEditor::new().map_err(|error| fault(io::Error::other(error)))?;
        Ok(Input::Terminal(Box::new(editor)))
    }

    /// Whether somebody types.
    pub fn is_terminal(&self) -> bool {
        matches!(self, Input::Terminal(_))
    }

    /// The next line; waits for it.
    pub fn next(&mut self) -> Result<Line, CliError> {
        match self {
            Input::Pipe(lines) => match lines.next() {
                None => Ok(Line::End),
                Some(line) => line.map(Line::Text).map_err(fault),
            },
            Input::Terminal(editor) => match editor.readline("> ") {
                Ok(text) => {
                    // A line that is not remembered is no fault.
                    let _ = editor.add_history_entry(&text);
                    Ok(Line::Text(text))
                }
                Err(ReadlineError::Interrupted) => Ok(Line::Dropped),
                Err(ReadlineError::Eof) => Ok(Line::End),
                Err(ReadlineError::Io(error)) => Err(fault(error)),
                Err(error) => Err(fault(io::Error::other(error))),
            },
        }
    }
}

fn fault(source: io::Error) -> CliError {
    CliError::File { path: "standard input".to_owned(), source }
}
