//! The message of a choice: what a stream tells of it piece by piece, and what it is as a whole.

use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::server::random_id;
use crate::server::tools::Call;
use crate::text::Piece;

/// The message of a choice in the making.
#[derive(Debug, Default)]
pub struct Message {
    /// What was reasoned.
    pub reasoning: String,
    /// What was said.
    pub content: String,
    /// The tools that were called.
    pub calls: Vec<Call>,
    /// A call that is not told of is being written.
    skips: bool,
}

/// What a stream tells of a message at a time.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub enum Delta {
    /// Who speaks, at the start.
    Role { role: &'static str, content: &'static str },
    /// More of the reasoning. Clients read what their engine taught them.
    Reasoning { reasoning_content: String, reasoning: String },
    /// More of what is said.
    Content { content: String },
    /// A call, or more of its arguments.
    Call { tool_calls: [Value; 1] },
    /// Nothing, at the end.
    None {},
}

impl Message {
    /// Takes a piece in; returns the delta that tells of it. Of several calls only the first counts
    /// when `is_single`.
    pub fn take_in(&mut self, piece: Piece, is_single: bool) -> Option<Delta> {
        match piece {
            Piece::Reasoning(text) => {
                self.reasoning.push_str(&text);
                Some(Delta::Reasoning { reasoning_content: text.clone(), reasoning: text })
            }
            Piece::Content(text) => {
                self.content.push_str(&text);
                Some(Delta::Content { content: text })
            }
            Piece::Call { name, .. } => {
                self.skips = is_single && !self.calls.is_empty();
                if self.skips {
                    return None;
                }
                let call = Call { id: random_id("call_"), name, arguments: String::new() };
                let mut delta = call.to_json();
                delta["index"] = self.calls.len().into();
                self.calls.push(call);
                Some(Delta::Call { tool_calls: [delta] })
            }
            Piece::Arguments { text, .. } => {
                let index = self.calls.len().checked_sub(1).filter(|_| !self.skips)?;
                self.calls[index].arguments.push_str(&text);
                let delta = json!({ "index": index, "function": { "arguments": text } });
                Some(Delta::Call { tool_calls: [delta] })
            }
        }
    }

    /// The whole message.
    pub fn to_json(&self) -> Value {
        let mut message = Map::new();
        message.insert("role".to_owned(), "assistant".into());
        // Null where there is nothing but calls.
        let content = (!self.content.is_empty() || self.calls.is_empty()).then_some(&self.content);
        message.insert("content".to_owned(), content.map(String::as_str).into());
        message.insert("refusal".to_owned(), Value::Null);
        if !self.reasoning.is_empty() {
            message.insert("reasoning_content".to_owned(), self.reasoning.as_str().into());
            message.insert("reasoning".to_owned(), self.reasoning.as_str().into());
        }
        if !self.calls.is_empty() {
            let calls: Vec<Value> = self.calls.iter().map(Call::to_json).collect();
            message.insert("tool_calls".to_owned(), calls.into());
        }
        message.into()
    }
}
