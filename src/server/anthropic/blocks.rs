//! The blocks of an answer in the making, and the events that tell of them.

use serde_json::{Map, Value, json};

use crate::server::tools::Call;
use crate::server::{random_id, sse};
use crate::text::Piece;

/// One block.
#[derive(Debug)]
enum Block {
    /// What the model thinks.
    Thinking(String),
    /// What it says.
    Text(String),
    /// A tool that it calls.
    ToolUse(Call),
}

/// The blocks of one answer.
#[derive(Debug, Default)]
pub struct Blocks {
    list: Vec<Block>,
    is_open: bool,
    /// A call that is not told of is being written.
    skips: bool,
    /// Events that have not been sent.
    events: String,
}

impl Blocks {
    /// Takes a piece in. Of several calls only the first counts when `is_single`.
    pub fn take_in(&mut self, piece: Piece, is_single: bool) {
        match piece {
            Piece::Reasoning(piece) => {
                if !matches!(self.last(), Some(Block::Thinking(_))) {
                    self.open(Block::Thinking(String::new()));
                }
                self.add(&piece, json!({ "type": "thinking_delta", "thinking": piece }));
            }
            Piece::Content(piece) => {
                if !matches!(self.last(), Some(Block::Text(_))) {
                    self.open(Block::Text(String::new()));
                }
                self.add(&piece, json!({ "type": "text_delta", "text": piece }));
            }
            Piece::Call { name, .. } => {
                self.skips = is_single && self.has_calls();
                if !self.skips {
                    let id = random_id("toolu_");
                    self.open(Block::ToolUse(Call { id, name, arguments: String::new() }));
                }
            }
            Piece::Arguments { text, .. } if !self.skips => {
                self.add(&text, json!({ "type": "input_json_delta", "partial_json": text }));
            }
            Piece::Arguments { .. } => {}
        }
    }

    /// Ends the block that is open.
    pub fn close(&mut self) {
        if !self.is_open {
            return;
        }
        let index = self.list.len() - 1;
        if let Some(Block::Thinking(text)) = self.last() {
            let signature = signature(text);
            self.delta(json!({ "type": "signature_delta", "signature": signature }));
        }
        self.is_open = false;
        self.tell("content_block_stop", json!({ "index": index }));
    }

    /// Whether a tool is called.
    pub fn has_calls(&self) -> bool {
        self.list.iter().any(|block| matches!(block, Block::ToolUse(_)))
    }

    /// The tools that are called.
    pub fn calls(&self) -> impl Iterator<Item = &Call> {
        self.list.iter().filter_map(|block| match block {
            Block::ToolUse(call) => Some(call),
            _ => None,
        })
    }

    /// All that the model says, and all that it thinks.
    pub fn texts(&self) -> (String, String) {
        let (mut said, mut thought) = (String::new(), String::new());
        for block in &self.list {
            match block {
                Block::Text(text) => said.push_str(text),
                Block::Thinking(text) => thought.push_str(text),
                Block::ToolUse(_) => {}
            }
        }
        (said, thought)
    }

    /// The events since the last call.
    pub fn take_events(&mut self) -> String {
        std::mem::take(&mut self.events)
    }

    /// The blocks as the content of a message.
    pub fn content(&self) -> Vec<Value> {
        self.list.iter().map(Block::to_json).collect()
    }

    /// The block that is open.
    fn last(&self) -> Option<&Block> {
        self.list.last().filter(|_| self.is_open)
    }

    fn open(&mut self, block: Block) {
        self.close();
        self.is_open = true;
        let start = block.to_json();
        self.list.push(block);
        let index = self.list.len() - 1;
        self.tell("content_block_start", json!({ "index": index, "content_block": start }));
    }

    /// Adds to the block that is open.
    fn add(&mut self, piece: &str, delta: Value) {
        if piece.is_empty() || !self.is_open {
            return;
        }
        match self.list.last_mut() {
            Some(Block::Thinking(text) | Block::Text(text)) => text.push_str(piece),
            Some(Block::ToolUse(call)) => call.arguments.push_str(piece),
            None => {}
        }
        self.delta(delta);
    }

    fn delta(&mut self, delta: Value) {
        let index = self.list.len() - 1;
        self.tell("content_block_delta", json!({ "index": index, "delta": delta }));
    }

    fn tell(&mut self, name: &str, mut data: Value) {
        data["type"] = name.into();
        self.events.push_str(&sse::event(Some(name), &data));
    }
}

impl Block {
    fn to_json(&self) -> Value {
        match self {
            Block::Thinking(text) => {
                let signature = if text.is_empty() { String::new() } else { signature(text) };
                json!({ "type": "thinking", "thinking": text, "signature": signature })
            }
            Block::Text(text) => json!({ "type": "text", "text": text }),
            Block::ToolUse(call) => {
                // What was cut short is no JSON yet: the reason of the answer's end says so.
                let input: Map<String, Value> =
                    serde_json::from_str(&call.arguments).unwrap_or_default();
                json!({ "type": "tool_use", "id": call.id, "name": call.name, "input": input })
            }
        }
    }
}

/// Clients keep thoughts only with a signature and send both back. Here it names the text and no
/// more: nobody has to prove anything.
fn signature(text: &str) -> String {
    blake3::hash(text.as_bytes()).to_hex()[..32].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces() -> Vec<Piece> {
        let call = |index, name: &str| Piece::Call { index, id: None, name: name.to_owned() };
        let arguments = |index, text: &str| Piece::Arguments { index, text: text.to_owned() };
        vec![
            Piece::Reasoning("Let me ".to_owned()),
            Piece::Reasoning("see.".to_owned()),
            Piece::Content("I look.".to_owned()),
            call(0, "look"),
            arguments(0, "{\"at\":"),
            arguments(0, " 1}"),
            call(1, "look"),
            arguments(1, "{\"at\": 2"),
        ]
    }

    /// The names and indices of the events of `pieces`, and the blocks they make.
    fn told(is_single: bool) -> (Vec<String>, Vec<Value>) {
        let mut blocks = Blocks::default();
        for piece in pieces() {
            blocks.take_in(piece, is_single);
        }
        blocks.close();
        let events = blocks.take_events();
        let data = events.lines().filter_map(|line| line.strip_prefix("data: "));
        let told = data.map(|data| {
            let data: Value = serde_json::from_str(data).expect("it is JSON");
            let delta = data["delta"]["type"].as_str().or(data["type"].as_str());
            format!("{} {}", data["index"], delta.expect("a type"))
        });
        (told.collect(), blocks.content())
    }

    #[test]
    fn blocks_open_grow_and_close_one_after_the_other() {
        let (told, content) = told(false);
        let expected = [
            "0 content_block_start",
            "0 thinking_delta",
            "0 thinking_delta",
            "0 signature_delta",
            "0 content_block_stop",
            "1 content_block_start",
            "1 text_delta",
            "1 content_block_stop",
            "2 content_block_start",
            "2 input_json_delta",
            "2 input_json_delta",
            "2 content_block_stop",
            "3 content_block_start",
            "3 input_json_delta",
            "3 content_block_stop",
        ];
        assert_eq!(told, expected);
        assert_eq!(content[0]["thinking"], "Let me see.");
        assert_eq!(content[0]["signature"].as_str().map(str::len), Some(32));
        assert_eq!(content[1], json!({ "type": "text", "text": "I look." }));
        assert_eq!(content[2]["input"], json!({ "at": 1 }));
        assert_eq!(content[3]["input"], json!({}), "it was cut short");
    }

    #[test]
    fn where_one_call_is_wanted_no_other_is_told_of() {
        let (told, content) = told(true);
        assert_eq!(content.len(), 3);
        assert!(told.iter().all(|event| !event.starts_with('3')), "{told:?}");
    }
}
