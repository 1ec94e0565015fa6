//! The prompts of a completion: the four forms that they come in, and what is told of them.

use serde_json::Value;

use crate::server::app::App;
use crate::server::encode;
use crate::server::error::ApiError;
use crate::server::fields::{Fields, FromJson};
use crate::text::Specials;

/// Most prompts of a request.
const MAX_PROMPTS: usize = 256;

/// A text or token ids.
#[derive(Debug)]
pub enum Prompt {
    /// To be encoded.
    Text(String),
    /// As it is.
    Ids(Vec<u32>),
}

/// Takes `prompt`: a text, token ids, or a list of either.
///
/// # Errors
/// Anything else, an empty list or one that is too long.
pub fn take(fields: &mut Fields) -> Result<Vec<Prompt>, ApiError> {
    const EXPECTED: &str = "a string, an array of strings, of token ids or of arrays of token ids";
    let value = fields.raw("prompt").ok_or_else(|| ApiError::missing("prompt"))?;
    let wrong = |value: &Value| ApiError::wrong_type("prompt", EXPECTED, value);
    let list = match value {
        Value::String(text) => return Ok(vec![Prompt::Text(text)]),
        Value::Array(list) if list.is_empty() => {
            return Err(ApiError::value("prompt", "prompt is empty"));
        }
        Value::Array(list) => list,
        other => return Err(wrong(&other)),
    };
    if list[0].is_number() {
        let list = Value::Array(list);
        return Ok(vec![Prompt::Ids(Vec::from_json(&list).ok_or_else(|| wrong(&list))?)]);
    }
    if list.len() > MAX_PROMPTS {
        let message = format!("prompt has {} elements, {MAX_PROMPTS} at most", list.len());
        return Err(ApiError::value("prompt", message));
    }
    list.into_iter()
        .map(|element| match element {
            Value::String(text) => Ok(Prompt::Text(text)),
            other => Vec::from_json(&other).map(Prompt::Ids).ok_or_else(|| wrong(&other)),
        })
        .collect()
}

/// A prompt as tokens.
#[derive(Debug)]
pub struct Encoded {
    /// Its tokens.
    pub ids: Vec<u32>,
    /// Its text, where that is told.
    pub text: String,
}

impl Prompt {
    /// Its tokens, a text's with the specials of the model before them if `adds_specials`, and of
    /// them the last `kept` if that is a limit; with its text if that is told.
    ///
    /// # Errors
    /// A text that cannot be encoded.
    pub fn encode(
        self,
        app: &App,
        (adds_specials, kept): (bool, Option<usize>),
        with_text: bool,
    ) -> Result<Encoded, ApiError> {
        let tokenizer = &app.model.tokenizer;
        let (mut ids, text) = match self {
            Prompt::Ids(ids) => (ids, None),
            Prompt::Text(text) => {
                let ids = encode(|| match adds_specials {
                    true => tokenizer.encode_prompt(&text, Specials::Parse),
                    false => tokenizer.encode(&text, Specials::Parse),
                })?;
                (ids, Some(text))
            }
        };
        let cut = kept.map_or(0, |kept| ids.len().saturating_sub(kept));
        ids.drain(..cut);
        let text = match text {
            _ if !with_text => String::new(),
            Some(text) if cut == 0 => text,
            _ => tokenizer.decode(&ids),
        };
        Ok(Encoded { ids, text })
    }
}

/// What is told of the prompt in the answer.
#[derive(Debug, Clone, Copy)]
pub struct Echo {
    /// Its text, before that of the answer.
    pub text: bool,
    /// Logprobs of its tokens with so many alternatives, before those of the answer's.
    pub logprobs: Option<usize>,
    /// The same under a name of their own.
    pub of_prompt: Option<usize>,
}

impl Echo {
    /// Whether the prompt has to be scored.
    pub fn has_logprobs(self) -> bool {
        self.logprobs.or(self.of_prompt).is_some()
    }
}
