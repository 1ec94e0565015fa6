//! What can go wrong between text and ids.

use std::path::PathBuf;

use super::files::{CHAT_TEMPLATE, TIKTOKEN_MODEL, TOKENIZER_CONFIG, TOKENIZER_JSON};

/// An error of the text module. Those about files name the file and the key or line.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// A file of the model folder is there but cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// The model has no tokenizer file.
    #[error("no tokenizer: the model has neither {TOKENIZER_JSON} nor {TIKTOKEN_MODEL}")]
    NoTokenizer,
    /// A file as a whole does not parse.
    #[error("{file}: {detail}")]
    BadFile {
        /// The file.
        file: &'static str,
        /// What is wrong with it.
        detail: String,
    },
    /// A key of a JSON file holds what we cannot use.
    #[error("{file}: {key}: {detail}")]
    BadKey {
        /// The file.
        file: &'static str,
        /// The key, with the way to it.
        key: String,
        /// What is wrong with it.
        detail: String,
    },
    /// A line of `tiktoken.model` is wrong.
    #[error("{TIKTOKEN_MODEL}: line {line}: {detail}")]
    BadRankLine {
        /// The line, from 1.
        line: usize,
        /// What is wrong with it.
        detail: String,
    },
    /// `tokenizer.json` turns tokens into text in a way we do not implement.
    #[error("{TOKENIZER_JSON}: decoder: {decoder} is not supported, only ByteLevel is")]
    UnsupportedDecoder {
        /// The decoder's type, a sequence with its parts.
        decoder: String,
    },
    /// The tokenizer gave up on a text.
    #[error("cannot encode the text: {detail}")]
    Encode {
        /// What the tokenizer says.
        detail: String,
    },
    /// The model has no chat template.
    #[error(
        "the model has no chat template: neither {CHAT_TEMPLATE} nor chat_template in \
         {TOKENIZER_CONFIG}"
    )]
    NoChatTemplate,
    /// The template itself refused the messages (`raise_exception`).
    #[error("{message}")]
    TemplateRaised {
        /// The template's words.
        message: String,
    },
    /// The template does not run on these messages.
    #[error("chat template: {detail}")]
    TemplateFailed {
        /// What failed, and where in the template.
        detail: String,
    },
    /// The last message is to be continued and has no text in what the template renders.
    #[error("the last message has no text that the model could continue")]
    NothingToContinue,
    /// An extra variable has the name of one that every template gets.
    #[error("chat template: the variable {name} cannot be set, it is part of the chat")]
    ReservedVariable {
        /// The variable.
        name: String,
    },
    /// A stop string is empty: it would match before the first token.
    #[error("stop string {index} is empty")]
    EmptyStopString {
        /// Its place among the stop strings, from 0.
        index: usize,
    },
}
