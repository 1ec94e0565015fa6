//! From tokens to the text a caller may see.

use crate::text::{Detokenizer, StopMatcher, Tokenizer};

/// The text of one answer in the making. Without a tokenizer there is none.
pub(super) struct AnswerText {
    parts: Option<(Detokenizer, StopMatcher)>,
}

impl AnswerText {
    /// The text of an answer that ends before any of the strings `stop`, none of which is empty.
    pub(super) fn new(tokenizer: Option<&Tokenizer>, stop: &[String]) -> AnswerText {
        let parts = tokenizer.map(|tokenizer| {
            let stop = StopMatcher::new(stop.to_vec()).expect("the door refuses empty strings");
            (Detokenizer::new(tokenizer), stop)
        });
        AnswerText { parts }
    }

    /// The text that became final with `token`, and the stop string it completed. A token that
    /// `ends` the answer is itself no text.
    pub(super) fn push(&mut self, token: u32, ends: bool) -> (String, Option<usize>) {
        match &mut self.parts {
            Some((detokenizer, stop)) if !ends => {
                let released = stop.push(&detokenizer.push(token));
                (released.text, released.stopped_by)
            }
            _ => (String::new(), None),
        }
    }

    /// What was held back: half a character, or what might have become a stop string.
    pub(super) fn finish(&mut self) -> String {
        let Some((detokenizer, mut stop)) = self.parts.take() else { return String::new() };
        let mut text = stop.push(&detokenizer.finish()).text;
        text.push_str(&stop.finish());
        text
    }
}
