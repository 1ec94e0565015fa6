//! The pieces of an answer as they come out: neighbours joined, white space around what is taken
//! out of the text left out with it.

/// A part of what a model says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// More of its reasoning.
    Reasoning(String),
    /// More of its answer.
    Content(String),
    /// It begins to call a tool.
    Call {
        /// Which of the calls of this answer, from 0.
        index: usize,
        /// The model's own name for the call, where its format has one.
        id: Option<String>,
        /// The tool's name.
        name: String,
    },
    /// More of a call's arguments; all of them joined are what the model wrote: a JSON object, if
    /// it wrote one.
    Arguments {
        /// Which call.
        index: usize,
        /// The text.
        text: String,
    },
}

/// Collects pieces.
#[derive(Debug, Default)]
pub(super) struct Out {
    pieces: Vec<Piece>,
    calls: usize,
    /// White space at the end of the section so far: it is part of it only if more follows.
    space: String,
    /// Whether white space that comes now is left out: nothing stands before it.
    at_start: bool,
    /// Whether nothing but white space came since the last call.
    after_call: bool,
}

impl Out {
    /// Begins a section whose leading white space does not count, and drops that at the end of the
    /// last one.
    pub(super) fn begin(&mut self) {
        self.space.clear();
        self.at_start = true;
    }

    pub(super) fn reasoning(&mut self, text: &str) {
        self.say(text, Piece::Reasoning);
    }

    pub(super) fn content(&mut self, text: &str) {
        self.say(text, Piece::Content);
    }

    /// Content as it is, white space and all.
    pub(super) fn exact(&mut self, text: &str) {
        self.add(text.to_owned(), Piece::Content);
    }

    /// Reasoning as it is.
    pub(super) fn exact_reasoning(&mut self, text: &str) {
        self.add(text.to_owned(), Piece::Reasoning);
    }

    pub(super) fn call(&mut self, id: Option<String>, name: String) {
        self.space.clear();
        (self.at_start, self.after_call) = (false, true);
        self.pieces.push(Piece::Call { index: self.calls, id, name });
        self.calls += 1;
    }

    /// More arguments of the last call.
    pub(super) fn arguments(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        let index = self.calls - 1;
        match self.pieces.last_mut() {
            Some(Piece::Arguments { text: last, .. }) => last.push_str(text),
            _ => self.pieces.push(Piece::Arguments { index, text: text.to_owned() }),
        }
    }

    /// Takes the pieces so far.
    pub(super) fn take(&mut self) -> Vec<Piece> {
        std::mem::take(&mut self.pieces)
    }

    /// The end: white space that was held back, unless it only followed a call.
    pub(super) fn finish(&mut self, in_reasoning: bool) {
        let space = std::mem::take(&mut self.space);
        if !in_reasoning && !self.after_call {
            self.add(space, Piece::Content);
        }
    }

    fn say(&mut self, text: &str, piece: fn(String) -> Piece) {
        let text = if self.at_start { text.trim_start() } else { text };
        let said = text.trim_end();
        if said.is_empty() {
            self.space.push_str(text);
            return;
        }
        (self.at_start, self.after_call) = (false, false);
        let before = std::mem::replace(&mut self.space, text[said.len()..].to_owned());
        self.add(before + said, piece);
    }

    fn add(&mut self, text: String, piece: fn(String) -> Piece) {
        if text.is_empty() {
            return;
        }
        let piece = piece(text);
        match (self.pieces.last_mut(), piece) {
            (Some(Piece::Reasoning(last)), Piece::Reasoning(text))
            | (Some(Piece::Content(last)), Piece::Content(text)) => last.push_str(&text),
            (_, piece) => self.pieces.push(piece),
        }
    }
}
