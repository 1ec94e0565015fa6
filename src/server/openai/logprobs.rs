//! Log-probabilities as the two OpenAI routes write them.

use serde_json::{Map, Value, json};

use crate::request::{Logprobs, PromptLogprobs};
use crate::text::Tokenizer;

/// How tokens are written.
#[derive(Clone, Copy)]
pub struct TokenNames<'a> {
    /// Who knows their texts.
    pub tokenizer: &'a Tokenizer,
    /// As `token_id:17`.
    pub as_ids: bool,
}

impl TokenNames<'_> {
    /// A token's text; where that is no whole character, the text that U+FFFD makes of it.
    pub fn of(&self, id: u32) -> String {
        if self.as_ids {
            return format!("token_id:{id}");
        }
        self.tokenizer.decode_with_specials(&[id])
    }

    fn bytes(&self, id: u32) -> &[u8] {
        self.tokenizer.token_bytes(id).unwrap_or_default()
    }
}

/// What cannot be a JSON number is the least that can: clients do not expect null.
fn finite(logprob: f32) -> f64 {
    f64::from(logprob.max(-9999.0))
}

/// An element of `logprobs.content` of a chat's choice.
pub fn chat(names: TokenNames<'_>, id: u32, logprobs: &Logprobs) -> Value {
    let entry = |id: u32, logprob: f32| {
        let (token, bytes) = (names.of(id), names.bytes(id));
        json!({ "token": token, "logprob": finite(logprob), "bytes": bytes })
    };
    let mut token = entry(id, logprobs.chosen);
    let top: Vec<Value> = logprobs.top.iter().map(|&(id, logprob)| entry(id, logprob)).collect();
    token["top_logprobs"] = top.into();
    token
}

/// `prompt_logprobs` of a choice: for each token of the prompt a map from token ids to what is
/// known of them, its own and the `top` likeliest; null for the first, which follows nothing.
pub fn of_prompt(
    names: TokenNames<'_>,
    prompt: &[u32],
    scores: &[PromptLogprobs],
    top: usize,
) -> Value {
    let entry = |id: u32, logprob: f32, rank: usize| {
        let token = names.of(id);
        json!({ "logprob": finite(logprob), "rank": rank, "decoded_token": token })
    };
    let tokens = prompt.iter().skip(1).zip(scores).map(|(&id, score)| {
        let PromptLogprobs { logprobs, rank } = score;
        let mut map = Map::new();
        map.insert(id.to_string(), entry(id, logprobs.chosen, *rank));
        for (i, &(other, logprob)) in logprobs.top.iter().take(top).enumerate() {
            map.entry(other.to_string()).or_insert_with(|| entry(other, logprob, i + 1));
        }
        map.into()
    });
    [Value::Null].into_iter().chain(tokens).collect()
}

/// Characters that a token adds to a text.
fn chars_of(names: TokenNames<'_>, id: u32) -> usize {
    names.tokenizer.decode(&[id]).chars().count()
}

/// `logprobs` of a choice of a completion: four lists with an entry for each token.
#[derive(Debug, Default)]
pub struct Lists {
    tokens: Vec<Value>,
    token_logprobs: Vec<Value>,
    top_logprobs: Vec<Value>,
    text_offset: Vec<Value>,
    /// Characters of the text so far.
    offset: usize,
}

impl Lists {
    /// Lists of a text that begins after `offset` characters.
    pub fn after(offset: usize) -> Lists {
        Lists { offset, ..Lists::default() }
    }

    /// Whether something was added since the last time.
    pub fn has_any(&self) -> bool {
        !self.tokens.is_empty()
    }

    /// Adds the tokens of a prompt, whose text has `chars` characters, each with the `top`
    /// likeliest in its place; the first follows nothing and has null.
    pub fn push_prompt(
        &mut self,
        names: TokenNames<'_>,
        prompt: &[u32],
        (scores, top): (&[PromptLogprobs], usize),
        chars: usize,
    ) {
        if let Some(&first) = prompt.first() {
            self.tokens.push(names.of(first).into());
            self.token_logprobs.push(Value::Null);
            self.top_logprobs.push(Value::Null);
            self.text_offset.push(self.offset.into());
            self.offset += chars_of(names, first);
        }
        for (&id, score) in prompt.iter().skip(1).zip(scores) {
            let likeliest = score.logprobs.top.iter().take(top);
            let logprobs =
                Logprobs { chosen: score.logprobs.chosen, top: likeliest.copied().collect() };
            self.push(names, id, &logprobs);
        }
        self.offset = chars;
    }

    /// Adds a token.
    pub fn push(&mut self, names: TokenNames<'_>, id: u32, logprobs: &Logprobs) {
        let mut top = Map::new();
        for &(id, logprob) in &logprobs.top {
            top.entry(names.of(id)).or_insert(finite(logprob).into());
        }
        top.entry(names.of(id)).or_insert(finite(logprobs.chosen).into());
        self.tokens.push(names.of(id).into());
        self.token_logprobs.push(finite(logprobs.chosen).into());
        self.top_logprobs.push(top.into());
        self.text_offset.push(self.offset.into());
        self.offset += chars_of(names, id);
    }

    /// What was added since the last time.
    pub fn take(&mut self) -> Value {
        let take = std::mem::take::<Vec<Value>>;
        json!({
            "tokens": take(&mut self.tokens),
            "token_logprobs": take(&mut self.token_logprobs),
            "top_logprobs": take(&mut self.top_logprobs),
            "text_offset": take(&mut self.text_offset),
        })
    }
}
