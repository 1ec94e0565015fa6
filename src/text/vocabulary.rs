//! The bytes of every token: what decoding needs to know of a tokenizer.

use std::collections::HashMap;

/// Ids at or above this are a broken file: no vocabulary comes near it, and the table of tokens is
/// as long as the largest id.
const MAX_ID: u32 = 1 << 24;

/// All tokens by id, and the added ones (control tokens and the like) by their text.
#[derive(Default)]
pub(super) struct Vocabulary {
    tokens: Vec<Option<Token>>,
    added: HashMap<String, u32>,
}

struct Token {
    bytes: Box<[u8]>,
    special: bool,
}

impl Vocabulary {
    /// Puts a token at an id. Refuses, with the reason, an id that is taken or absurd.
    pub(super) fn insert(&mut self, id: u32, bytes: &[u8], special: bool) -> Result<(), String> {
        if id >= MAX_ID {
            return Err(format!("id {id} is beyond any vocabulary (limit {MAX_ID})"));
        }
        let index = id as usize;
        if index >= self.tokens.len() {
            self.tokens.resize_with(index + 1, || None);
        }
        let place = &mut self.tokens[index];
        if place.is_some() {
            return Err(format!("id {id} is given twice"));
        }
        *place = Some(Token { bytes: bytes.into(), special });
        Ok(())
    }

    /// Names an added token. Refuses, with the reason, a text that names another id.
    pub(super) fn name(&mut self, content: &str, id: u32) -> Result<(), String> {
        match self.added.insert(content.to_owned(), id) {
            Some(other) if other != id => {
                Err(format!("{content:?} is both id {other} and id {id}"))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn added(&self) -> &HashMap<String, u32> {
        &self.added
    }

    pub(super) fn bytes(&self, id: u32) -> Option<&[u8]> {
        Some(&self.token(id)?.bytes)
    }

    pub(super) fn is_special(&self, id: u32) -> bool {
        self.token(id).is_some_and(|token| token.special)
    }

    pub(super) fn len(&self) -> usize {
        self.tokens.len()
    }

    fn token(&self, id: u32) -> Option<&Token> {
        self.tokens.get(id as usize)?.as_ref()
    }
}
