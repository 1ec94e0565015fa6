//! Where a prompt or a text comes from: an argument, a file, standard input, or a list of ids; and
//! how it becomes ids.

use std::fs;
use std::io::{self, IsTerminal, Read};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::CliError;
use crate::text::{Chat, ChatTemplate, Specials, TextError, Tokenizer};

/// Tokens to generate when nobody says, and there is room for them.
const DEFAULT_MAX_TOKENS: usize = 256;

/// A text, or the ids of one.
#[derive(Debug, PartialEq, Eq)]
pub enum Source {
    Text(String),
    Ids(Vec<u32>),
}

impl Source {
    /// Reads what the arguments name; standard input when they name nothing. `sources` says how
    /// the command can be given a text.
    pub fn read(
        text: Option<&str>,
        (file, ids_file): (Option<&PathBuf>, Option<&PathBuf>),
        sources: &str,
    ) -> Result<Source, CliError> {
        match (text, file, ids_file) {
            (Some(text), _, _) => Ok(Source::Text(text.to_owned())),
            (_, Some(path), _) => read_file(path).map(Source::Text),
            (_, _, Some(path)) => read_ids(path).map(Source::Ids),
            (None, None, None) => read_input(sources).map(Source::Text),
        }
    }
}

/// The ids of a text that is to be continued, or scored.
///
/// # Errors
/// A model without a tokenizer, or with another model's.
pub fn encode_text(
    tokenizer: Option<&Tokenizer>,
    vocab_size: usize,
    text: &str,
) -> Result<Vec<u32>, CliError> {
    let tokenizer = tokenizer.ok_or(TextError::NoTokenizer)?;
    known(tokenizer, vocab_size, tokenizer.encode_prompt(text, Specials::Plain)?)
}

/// The ids of a chat in the model's template, up to where the assistant speaks.
///
/// # Errors
/// As [`encode_text`], or what the template says.
pub fn encode_chat(
    tokenizer: Option<&Tokenizer>,
    vocab_size: usize,
    template: &ChatTemplate,
    messages: &[Value],
) -> Result<Vec<u32>, CliError> {
    let tokenizer = tokenizer.ok_or(TextError::NoTokenizer)?;
    let variables = &Map::new();
    let chat = Chat { messages, tools: None, add_generation_prompt: true, variables };
    let rendered = template.render(&chat)?;
    known(tokenizer, vocab_size, tokenizer.encode(&rendered, Specials::Parse)?)
}

/// A text whose tokens the model does not know is the fault of the model's files: its tokenizer is
/// another model's.
pub fn known(
    tokenizer: &Tokenizer,
    vocab_size: usize,
    tokens: Vec<u32>,
) -> Result<Vec<u32>, CliError> {
    match tokens.iter().find(|id| **id as usize >= vocab_size) {
        None => Ok(tokens),
        Some(token) => Err(CliError::Vocabulary {
            token: *token,
            tokenizer: tokenizer.vocab_size(),
            model: vocab_size,
        }),
    }
}

/// Tokens to generate when nobody says: 256, or what a sequence of `limit` tokens has left beside
/// its prompt.
pub fn default_max_tokens(prompt_tokens: usize, limit: usize) -> usize {
    limit.saturating_sub(prompt_tokens).clamp(1, DEFAULT_MAX_TOKENS)
}

fn read_file(path: &Path) -> Result<String, CliError> {
    fs::read_to_string(path).map_err(|source| CliError::file(path, source))
}

fn read_input(sources: &str) -> Result<String, CliError> {
    if io::stdin().is_terminal() {
        return Err(CliError::Usage(format!("no text: give it {sources}")));
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
