//! From tokens to the text a caller may see.

use crate::text::{Detokenizer, StopMatcher, Tokenizer};

/// The text of one answer in the making. Without a tokenizer there is none.
pub(super) struct AnswerText {
    parts: Option<(Detokenizer, StopMatcher)>,
    is_cut: bool,
}

impl AnswerText {
    /// The text of an answer that ends before any of the strings `stop`, none of which is empty.
    pub(super) fn new(tokenizer: Option<&Tokenizer>, stop: &[String]) -> AnswerText {
        let parts = tokenizer.map(|tokenizer| {
            let stop = StopMatcher::new(stop.to_vec()).expect("the door refuses empty strings");
            (Detokenizer::new(tokenizer), stop)
        });
        AnswerText { parts, is_cut: false }
    }

    /// The text that became final with `token`, and the stop string it completed. A token that
    /// `ends` the answer is itself no text.
    pub(super) fn push(&mut self, token: u32, ends: bool) -> (String, Option<usize>) {
        match &mut self.parts {
            Some((detokenizer, stop)) if !ends => {
                let is_whole = !detokenizer.holds_text() && !stop.holds_text();
                let released = stop.push(&detokenizer.push(token));
                // A stop string that is not the beginning of this very token ends the text inside
                // a token: of this one, or of one before it.
                let is_here = is_whole && released.text.is_empty();
                self.is_cut = released.stopped_by.is_some() && !is_here;
                (released.text, released.stopped_by)
            }
            _ => (String::new(), None),
        }
    }

    /// Whether the text that a caller may see ends inside a token.
    pub(super) fn is_cut(&self) -> bool {
        self.is_cut
    }

    /// What was held back: half a character, or what might have become a stop string.
    pub(super) fn finish(&mut self) -> String {
        let Some((detokenizer, mut stop)) = self.parts.take() else { return String::new() };
        let mut text = stop.push(&detokenizer.finish()).text;
        text.push_str(&stop.finish());
        text
    }
}
