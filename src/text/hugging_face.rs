//! `tokenizer.json`, run by the tokenizers library.
//!
//! Only files whose decoder is ByteLevel are read: there every token is a string of bytes whatever
//! stands beside it, which is what lets one detokenizer serve all. SentencePiece-style files
//! (Metaspace, ByteFallback) are refused by name.

use std::panic::{AssertUnwindSafe, catch_unwind};

use serde::Deserialize;
use tokenizers::tokenizer::pre_tokenizer::PreTokenizedString;
use tokenizers::{
    DecoderWrapper, Encoding, Model, NormalizedString, Normalizer, OffsetType, PreTokenizer,
    Tokenizer,
};

use super::TextError;
use super::files::TOKENIZER_JSON;
use super::tokenizer::Specials;
use super::vocabulary::Vocabulary;

/// Reads the tokenizer and the bytes of all its tokens.
pub(super) fn read(json: &[u8]) -> Result<(HuggingFace, Vocabulary), TextError> {
    let bad_file = |detail: String| TextError::BadFile { file: TOKENIZER_JSON, detail };
    let mut tokenizer = Tokenizer::from_bytes(json).map_err(|e| bad_file(e.to_string()))?;
    // A saved training setup must neither cut prompts nor pad them.
    tokenizer.with_truncation(None).map_err(|e| bad_file(e.to_string()))?;
    tokenizer.with_padding(None);
    if !matches!(tokenizer.get_decoder(), Some(DecoderWrapper::ByteLevel(_))) {
        return Err(TextError::UnsupportedDecoder { decoder: decoder_name(&tokenizer) });
    }
    check_added_ids(json, &tokenizer)?;
    let vocabulary = vocabulary(&tokenizer).map_err(|detail| TextError::BadKey {
        file: TOKENIZER_JSON,
        key: "model.vocab".to_owned(),
        detail,
    })?;
    Ok((HuggingFace { tokenizer }, vocabulary))
}

/// A tokenizer of the tokenizers library.
pub(super) struct HuggingFace {
    tokenizer: Tokenizer,
}

impl HuggingFace {
    /// The ids of a text; with `post_process` also what the file's post-processor adds (BOS).
    ///
    /// The regex library panics on a match that backtracks ten million times, as a run of ten
    /// million spaces does; such a text is the caller's fault and becomes an error.
    pub(super) fn encode(
        &self,
        text: &str,
        specials: Specials,
        post_process: bool,
    ) -> Result<Vec<u32>, TextError> {
        let encode = || {
            let encoding = match specials {
                Specials::Parse => self.tokenizer.encode_fast(text, false)?,
                Specials::Plain => self.encode_plain(text)?,
            };
            self.tokenizer.post_process(encoding, None, post_process)
        };
        match catch_unwind(AssertUnwindSafe(encode)) {
            Ok(Ok(encoding)) => Ok(encoding.get_ids().to_vec()),
            Ok(Err(error)) => Err(TextError::Encode { detail: error.to_string() }),
            Err(panic) => {
                let detail = panic.downcast_ref::<String>().map_or("a panic", String::as_str);
                Err(TextError::Encode { detail: detail.to_owned() })
            }
        }
    }

    /// The library's steps without its first, which finds added tokens: it can be told to leave
    /// out the special ones only, and control tokens such as DeepSeek's `<|User|>` are not marked
    /// special.
    fn encode_plain(&self, text: &str) -> tokenizers::Result<Encoding> {
        let mut normalized = NormalizedString::from(text);
        if let Some(normalizer) = self.tokenizer.get_normalizer() {
            normalizer.normalize(&mut normalized)?;
        }
        let mut pieces = PreTokenizedString::from(normalized);
        if let Some(pre_tokenizer) = self.tokenizer.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut pieces)?;
        }
        self.tokenizer.get_model().tokenize_in_pretokenized(&mut pieces, None)?;
        pieces.into_encoding(None, 0, OffsetType::None)
    }
}

fn decoder_name(tokenizer: &Tokenizer) -> String {
    let json = serde_json::to_value(tokenizer.get_decoder()).unwrap_or_default();
    let name = |decoder: &serde_json::Value| decoder["type"].as_str().unwrap_or("none").to_owned();
    match json["decoders"].as_array() {
        Some(parts) => {
            format!("{} of {}", name(&json), parts.iter().map(name).collect::<Vec<_>>().join(", "))
        }
        None => name(&json),
    }
}

/// The library gives an added token the next free id whatever the file says. Where the two differ
/// the model would read another token than the one meant.
fn check_added_ids(json: &[u8], tokenizer: &Tokenizer) -> Result<(), TextError> {
    #[derive(Deserialize)]
    struct File {
        #[serde(default)]
        added_tokens: Vec<Added>,
    }
    #[derive(Deserialize)]
    struct Added {
        id: u32,
        content: String,
    }
    let file: File = serde_json::from_slice(json)
        .map_err(|e| TextError::BadFile { file: TOKENIZER_JSON, detail: e.to_string() })?;
    for added in file.added_tokens {
        if tokenizer.token_to_id(&added.content) != Some(added.id) {
            return Err(TextError::BadKey {
                file: TOKENIZER_JSON,
                key: "added_tokens".to_owned(),
                detail: format!("{:?} cannot have id {}", added.content, added.id),
            });
        }
    }
    Ok(())
}

fn vocabulary(tokenizer: &Tokenizer) -> Result<Vocabulary, String> {
    let added = tokenizer.get_added_vocabulary();
    let byte_of = byte_of_char();
    let mut vocabulary = Vocabulary::default();
    // An id with two names is refused by `insert`: the library would decode it as either.
    for (token, id) in tokenizer.get_vocab(true) {
        vocabulary.insert(id, &token_bytes(&token, &byte_of), added.is_special_token(&token))?;
    }
    for (content, &id) in added.get_vocab() {
        vocabulary.name(content, id)?;
    }
    Ok(vocabulary)
}

/// The bytes a token's characters stand for; a token with any other character (an added token with
/// a space, say) stands for itself.
fn token_bytes(token: &str, byte_of: &[Option<u8>]) -> Vec<u8> {
    let bytes: Option<Vec<u8>> =
        token.chars().map(|c| byte_of.get(c as usize).copied().flatten()).collect();
    bytes.unwrap_or_else(|| token.as_bytes().to_vec())
}

/// The inverse of GPT-2's byte alphabet: printable Latin-1 stands for itself, the 68 other bytes
/// in rising order for the characters from U+0100 on.
fn byte_of_char() -> Vec<Option<u8>> {
    let mut byte_of = vec![None; 0x144];
    let mut next = 0x100;
    for byte in 0..=255_u8 {
        let printable = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
        let char = if printable { usize::from(byte) } else { next };
        next += usize::from(!printable);
        byte_of[char] = Some(byte);
    }
    byte_of
}
