//! Ids to text while they are being generated.

use std::sync::Arc;

use super::Tokenizer;
use super::vocabulary::Vocabulary;

/// The replacement for bytes that are not UTF-8.
const REPLACEMENT: char = '\u{FFFD}';

/// Turns the ids of one sequence into text, token by token.
///
/// A token may end inside a character. Its bytes then wait for the next tokens, so no text that is
/// emitted is ever taken back, and all of it joined is the lossy UTF-8 reading of all bytes.
pub struct Detokenizer {
    vocabulary: Arc<Vocabulary>,
    shows_specials: bool,
    /// The start of a character: at most three bytes between two calls.
    pending: Vec<u8>,
}

impl Detokenizer {
    /// One that leaves special tokens out.
    pub fn new(tokenizer: &Tokenizer) -> Self {
        Self { vocabulary: tokenizer.vocabulary(), shows_specials: false, pending: Vec::new() }
    }

    /// One that writes special tokens out.
    pub fn with_specials(tokenizer: &Tokenizer) -> Self {
        Self { shows_specials: true, ..Self::new(tokenizer) }
    }

    /// Takes the next id and returns the text that is now certain, often the token's, sometimes
    /// none. Invalid bytes become U+FFFD as soon as no further byte can complete them.
    pub fn push(&mut self, id: u32) -> String {
        if let Some(bytes) = self.vocabulary.bytes(id)
            && (self.shows_specials || !self.vocabulary.is_special(id))
        {
            self.pending.extend_from_slice(bytes);
        }
        self.take_certain()
    }

    /// Whether the start of a character waits for its end.
    pub fn holds_text(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Returns what is left at the end: U+FFFD for a character that never completed.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }

    fn take_certain(&mut self) -> String {
        let mut text = String::new();
        let mut rest = self.pending.as_slice();
        while !rest.is_empty() {
            let error = match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(error) => error,
            };
            let (valid, after) = rest.split_at(error.valid_up_to());
            text.push_str(std::str::from_utf8(valid).expect("valid_up_to bounds valid UTF-8"));
            rest = after;
            let Some(invalid_bytes) = error.error_len() else { break };
            text.push(REPLACEMENT);
            rest = &rest[invalid_bytes..];
        }
        self.pending = rest.to_vec();
        text
    }
}
