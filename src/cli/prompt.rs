//! Where a prompt or a text comes from: an argument, a file, standard input, or a list of ids.

use std::fs;
use std::io::{self, IsTerminal, Read};
use std::path::{Path, PathBuf};

use super::CliError;
use crate::text::Tokenizer;

/// A text, or the ids of one.
#[derive(Debug, PartialEq, Eq)]
pub enum Source {
    Text(String),
    Ids(Vec<u32>),
}

impl Source {
    /// Reads what the arguments name; standard input when they name nothing.
    pub fn read(
        text: Option<&str>,
        file: Option<&PathBuf>,
        ids_file: Option<&PathBuf>,
    ) -> Result<Source, CliError> {
        match (text, file, ids_file) {
            (Some(text), _, _) => Ok(Source::Text(text.to_owned())),
            (_, Some(path), _) => read_file(path).map(Source::Text),
            (_, _, Some(path)) => read_ids(path).map(Source::Ids),
            (None, None, None) => read_input().map(Source::Text),
        }
    }
}

/// A text whose tokens the model does not know is the fault of the model's files: its tokenizer is
/// another model's.
pub fn check_vocabulary(
    tokenizer: Option<&Tokenizer>,
    source: &Source,
    tokens: &[u32],
    vocab_size: usize,
) -> Result<(), CliError> {
    let unknown = tokens.iter().find(|id| **id as usize >= vocab_size);
    match (source, tokenizer, unknown) {
        (Source::Text(_), Some(tokenizer), Some(token)) => Err(CliError::Vocabulary {
            token: *token,
            tokenizer: tokenizer.vocab_size(),
            model: vocab_size,
        }),
        _ => Ok(()),
    }
}

fn read_file(path: &Path) -> Result<String, CliError> {
    fs::read_to_string(path)
        .map_err(|source| CliError::File { path: path.display().to_string(), source })
}

fn read_input() -> Result<String, CliError> {
    if io::stdin().is_terminal() {
        let message = "no text: give it as an argument, with --file or --ids-file, or on standard \
                       input";
        return Err(CliError::Usage(message.to_owned()));
    }
    let mut text = String::new();
    let read = io::stdin().read_to_string(&mut text);
    read.map_err(|source| CliError::File { path: "standard input".to_owned(), source })?;
    Ok(text)
}

fn read_ids(path: &Path) -> Result<Vec<u32>, CliError> {
    let text = read_file(path)?;
    serde_json::from_str(&text).map_err(|error| {
        CliError::Usage(format!("{}: not a JSON array of token ids: {error}", path.display()))
    })
}
