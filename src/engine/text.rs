//! From tokens to the text a caller may see.

use crate::request::Request;
use crate::text::{Detokenizer, StopMatcher, Tokenizer};

/// The text of one answer in the making. Without a tokenizer there is none.
pub(super) struct AnswerText {
    parts: Option<(Detokenizer, StopMatcher)>,
    is_cut: bool,
}

impl AnswerText {
    /// The text of an answer to `request`, which the door let through.
    pub(super) fn new(tokenizer: Option<&Tokenizer>, request: &Request) -> AnswerText {
        let parts = tokenizer.map(|tokenizer| {
            let stop = StopMatcher::new(request.stop.clone());
            let stop = stop.expect("the door refuses empty strings");
            let stop = if request.include_stop_text { stop.including() } else { stop };
            let detokenizer = match request.skip_special_tokens {
                true => Detokenizer::new(tokenizer),
                false => Detokenizer::with_specials(tokenizer),
            };
            (detokenizer, stop)
        });
        AnswerText { parts, is_cut: false }
    }

    /// The text that became final with `token`, and the stop string it completed. A token that
    /// `ends` the answer is itself no text; in that of one at which it may not end, stop strings
    /// are not looked for.
    pub(super) fn push(
        &mut self,
        token: u32,
        ends: bool,
        may_end: bool,
    ) -> (String, Option<usize>) {
        match &mut self.parts {
            Some((detokenizer, _)) if !ends && !may_end => (detokenizer.push(token), None),
            Some((detokenizer, stop)) if !ends => {
                let is_whole = !detokenizer.holds_text() && !stop.holds_text();
                let released = stop.push(&detokenizer.push(token));
                if released.stopped_by.is_some() {
                    // A stop string that is part of the answer ends it inside a token if the token
                    // goes on; one that is not, unless it begins this very token.
                    self.is_cut = match stop.is_including() {
                        true => released.is_cut || detokenizer.holds_text(),
                        false => !is_whole || !released.text.is_empty(),
                    };
                }
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
