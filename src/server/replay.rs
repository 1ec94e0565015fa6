//! The tokens of answers, for conversations that send them back.
//!
//! A client sends an answer back as text, and tool calls as JSON of its own making. Rendered and
//! encoded again they may be other tokens than those that were drawn, and the state behind the
//! answer would not be found. So the tokens are remembered: a conversation that goes on from an
//! answer gets the very tokens of its prompt and of the answer, and then those of what is new.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::Value;

use super::conversation::Prompt;
use super::tools::Call;
use crate::request::{FinishReason, StopCause};

/// Tokens remembered, four bytes each: 64 MiB. The oldest answers are forgotten first.
const MAX_TOKENS: usize = 1 << 24;

/// Answers remembered.
const MAX_ANSWERS: usize = 100_000;

/// The answers remembered.
#[derive(Debug, Default)]
pub struct Replay(Mutex<Answers>);

#[derive(Debug, Default)]
struct Answers {
    by_key: HashMap<Key, Answer>,
    /// Oldest first.
    order: VecDeque<Key>,
    tokens: usize,
}

/// Names an answer by the text of its prompt, its content and its calls.
pub type Key = blake3::Hash;

/// An answer.
#[derive(Debug, Clone)]
pub struct Answer {
    /// Its prompt and itself, but for the token that ended it.
    pub tokens: Arc<[u32]>,
    /// What was reasoned in it.
    pub reasoning: Arc<str>,
}

/// The name of an answer to `prompt`. Calls are told apart by tools and arguments, and arguments
/// that are JSON by what they mean: spaces and the order of keys are the client's.
pub fn key<'a>(
    prompt: &str,
    content: &str,
    calls: impl Iterator<Item = (&'a str, &'a str)>,
) -> Key {
    let mut hasher = blake3::Hasher::new();
    let mut add = |text: &[u8]| {
        hasher.update(&(text.len() as u64).to_le_bytes());
        hasher.update(text);
    };
    add(prompt.as_bytes());
    add(content.as_bytes());
    for (name, arguments) in calls {
        add(name.as_bytes());
        match serde_json::from_str::<Value>(arguments) {
            Ok(mut value) => {
                value.sort_all_objects();
                add(value.to_string().as_bytes());
            }
            Err(_) => add(arguments.as_bytes()),
        }
    }
    hasher.finalize()
}

/// Names and arguments of calls.
pub fn parts(calls: &[Call]) -> impl Iterator<Item = (&str, &str)> {
    calls.iter().map(|call| (call.name.as_str(), call.arguments.as_str()))
}

impl Replay {
    /// The answer of this name.
    pub fn get(&self, key: Key) -> Option<Answer> {
        let answers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        answers.by_key.get(&key).cloned()
    }

    /// Remembers what was drawn for `prompt`, for a conversation that goes on from it, unless it
    /// ended inside what it said or not at all. The token that ends an answer is the template's to
    /// write.
    pub fn remember<'a>(
        &self,
        prompt: &Prompt,
        drawn: &[u32],
        reason: &FinishReason,
        (reasoning, content): (&str, &str),
        calls: impl Iterator<Item = (&'a str, &'a str)>,
    ) {
        if prompt.is_cut {
            return;
        }
        let drawn = match reason {
            FinishReason::Stop(StopCause::Eos) => &drawn[..drawn.len() - 1],
            FinishReason::Length | FinishReason::Stop(StopCause::Constraint) => drawn,
            _ => return,
        };
        let tokens = [prompt.ids.as_slice(), drawn].concat().into();
        let answer = Answer { tokens, reasoning: reasoning.into() };
        self.put(key(&prompt.text, content, calls), answer);
    }

    /// Remembers an answer. One that two requests gave in different tokens is that of the later.
    fn put(&self, key: Key, answer: Answer) {
        if answer.tokens.len() > MAX_TOKENS {
            return;
        }
        let mut answers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let answers = &mut *answers;
        answers.tokens += answer.tokens.len();
        match answers.by_key.insert(key, answer) {
            Some(before) => answers.tokens -= before.tokens.len(),
            None => answers.order.push_back(key),
        }
        while answers.tokens > MAX_TOKENS || answers.order.len() > MAX_ANSWERS {
            let Some(oldest) = answers.order.pop_front() else { break };
            if let Some(gone) = answers.by_key.remove(&oldest) {
                answers.tokens -= gone.tokens.len();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(tokens: usize) -> Answer {
        Answer { tokens: vec![1; tokens].into(), reasoning: "".into() }
    }

    #[test]
    fn arguments_are_told_apart_by_what_they_mean() {
        let key = |arguments| key("prompt", "", [("f", arguments)].into_iter());
        assert_eq!(key(r#"{"a":1,"b":[2]}"#), key(r#"{ "b": [2], "a": 1 }"#));
        assert_ne!(key(r#"{"a":1}"#), key(r#"{"a":2}"#));
        assert_ne!(key("no json"), key("no  json"));
    }

    #[test]
    fn the_oldest_answers_make_room_for_the_newest() {
        let replay = Replay::default();
        let name = |n: usize| key(&n.to_string(), "", std::iter::empty());
        for n in 0..5 {
            replay.put(name(n), answer(MAX_TOKENS / 4));
        }
        let there: Vec<bool> = (0..5).map(|n| replay.get(name(n)).is_some()).collect();
        assert_eq!(there, [false, true, true, true, true]);
        replay.put(name(4), answer(1));
        replay.put(name(5), answer(MAX_TOKENS / 4 - 1));
        assert!(
            replay.get(name(1)).is_some(),
            "a new form of an answer takes the place of the old"
        );
    }
}
