//! What an answer may be.

use super::{InvalidParam, require};

/// Most texts of a [`Constraint::Choice`].
pub const MAX_TEXTS: usize = 1024;

/// Longest text of a [`Constraint`], in bytes; of a choice, all its texts together.
pub const MAX_CONSTRAINT_BYTES: usize = 256 << 10;

/// What an answer may be: tokens that would leave it are ruled out before each draw, the model's
/// end of sequence until the answer is complete. An answer that is complete and admits nothing more
/// ends there.
#[derive(Debug, Clone, PartialEq)]
pub enum Constraint {
    /// A JSON object of whatever content.
    JsonObject,
    /// JSON that this schema admits. A keyword that cannot be enforced is refused.
    JsonSchema(serde_json::Value),
    /// A text that this regular expression matches as a whole, in Rust's dialect.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A text of this grammar, in llguidance's dialect of Lark; its rule `start` is the whole.
    Grammar(String),
}

impl Constraint {
    /// The field it is told under in errors.
    pub fn field(&self) -> &'static str {
        match self {
            Self::JsonObject => "json_object",
            Self::JsonSchema(_) => "json_schema",
            Self::Regex(_) => "regex",
            Self::Choice(_) => "choice",
            Self::Grammar(_) => "grammar",
        }
    }

    /// Refuses what is empty or too long. Whether it makes sense is for the engine to say.
    pub(super) fn check(&self) -> Result<(), InvalidParam> {
        let within = |bytes: usize| {
            let fits = (1..=MAX_CONSTRAINT_BYTES).contains(&bytes);
            require(fits, self.field(), format!("{bytes} bytes"), || {
                format!("1 to {MAX_CONSTRAINT_BYTES} bytes")
            })
        };
        match self {
            Self::JsonObject | Self::JsonSchema(_) => Ok(()),
            Self::Regex(text) | Self::Grammar(text) => within(text.len()),
            Self::Choice(texts) => {
                let fits = (1..=MAX_TEXTS).contains(&texts.len());
                require(fits, "choice", format!("{} texts", texts.len()), || {
                    format!("1 to {MAX_TEXTS} texts")
                })?;
                let is_whole = texts.iter().all(|text| !text.is_empty());
                require(is_whole, "choice", "an empty text", || "texts of 1 byte or more".into())?;
                within(texts.iter().map(String::len).sum())
            }
        }
    }
}
