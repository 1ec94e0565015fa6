//! The files of a model folder that this module reads, and `tokenizer_config.json` as data.

use std::borrow::Cow;
use std::io::ErrorKind;
use std::path::Path;

use serde_json::{Map, Value};

use super::TextError;

pub(super) const TOKENIZER_JSON: &str = "tokenizer.json";
pub(super) const TIKTOKEN_MODEL: &str = "tiktoken.model";
pub(super) const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
pub(super) const CHAT_TEMPLATE: &str = "chat_template.jinja";

/// The contents of the files that say how text becomes ids; `None` is a file that is not there.
///
/// Bytes may be borrowed from the binary (`include_bytes!`) or read from a folder.
#[derive(Debug, Clone, Default)]
pub struct TextFiles {
    /// `tokenizer.json` of the tokenizers library.
    pub tokenizer_json: Option<Cow<'static, [u8]>>,
    /// `tiktoken.model`: a line `base64(bytes) rank` for each token.
    pub tiktoken_model: Option<Cow<'static, [u8]>>,
    /// `tokenizer_config.json`: special tokens, and often the chat template.
    pub tokenizer_config: Option<Cow<'static, [u8]>>,
    /// `chat_template.jinja`; it wins over the template in `tokenizer_config.json`.
    pub chat_template: Option<Cow<'static, [u8]>>,
}

impl TextFiles {
    /// Reads those of the files that the model folder has.
    pub fn read(folder: &Path) -> Result<Self, TextError> {
        let file = |name: &str| {
            let path = folder.join(name);
            match std::fs::read(&path) {
                Ok(bytes) => Ok(Some(Cow::Owned(bytes))),
                Err(error) if error.kind() == ErrorKind::NotFound && folder.is_dir() => Ok(None),
                Err(source) => Err(TextError::Io { path, source }),
            }
        };
        Ok(Self {
            tokenizer_json: file(TOKENIZER_JSON)?,
            tiktoken_model: file(TIKTOKEN_MODEL)?,
            tokenizer_config: file(TOKENIZER_CONFIG)?,
            chat_template: file(CHAT_TEMPLATE)?,
        })
    }
}

/// `tokenizer_config.json`; an absent file reads as one without keys.
pub(super) struct TokenizerConfig {
    keys: Map<String, Value>,
}

impl TokenizerConfig {
    pub(super) fn read(files: &TextFiles) -> Result<Self, TextError> {
        let Some(bytes) = &files.tokenizer_config else {
            return Ok(Self { keys: Map::new() });
        };
        let keys = serde_json::from_slice(bytes).map_err(|error| TextError::BadFile {
            file: TOKENIZER_CONFIG,
            detail: error.to_string(),
        })?;
        Ok(Self { keys })
    }

    /// A key that is not there and one that is null read alike.
    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        self.keys.get(key).filter(|value| !value.is_null())
    }

    pub(super) fn flag(&self, key: &str) -> Result<bool, TextError> {
        match self.get(key) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(_) => Err(bad_key(key, "is not true or false")),
        }
    }

    pub(super) fn string(&self, key: &str) -> Result<Option<&str>, TextError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(bad_key(key, "is not a string")),
        }
    }

    /// The text of a token such as `bos_token`, written as a string or as `{"content": ...}`.
    pub(super) fn token(&self, key: &str) -> Result<Option<&str>, TextError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let content = value.as_str().or_else(|| value.get("content")?.as_str());
        content.map(Some).ok_or_else(|| bad_key(key, "is neither a string nor has a content"))
    }
}

/// An error about a key of `tokenizer_config.json`.
pub(super) fn bad_key(key: impl Into<String>, detail: impl Into<String>) -> TextError {
    TextError::BadKey { file: TOKENIZER_CONFIG, key: key.into(), detail: detail.into() }
}
