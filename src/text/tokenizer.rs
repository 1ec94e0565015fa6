//! Text to ids and back, whichever file the tokenizer comes from.

use std::path::Path;
use std::sync::Arc;

use super::files::{TextFiles, TokenizerConfig, bad_key};
use super::hugging_face::{self, HuggingFace};
use super::tiktoken::{self, RankBpe};
use super::vocabulary::Vocabulary;
use super::{Detokenizer, TextError};

/// `tokenizer_class` of the repositories that carry Kimi's `tiktoken.model`.
const KIMI_CLASS: &str = "TikTokenTokenizer";

/// What becomes of the text of an added token (`<|im_end|>`) inside a text to be encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Specials {
    /// It becomes that token: for text a chat template wrote.
    Parse,
    /// It is text like any other: no text can then speak as the system, close a turn or call a
    /// tool. This holds for all added tokens, also those a file does not mark as special.
    Plain,
}

/// A special token that the configuration names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedToken {
    /// Its text.
    pub content: String,
    /// Its id.
    pub id: u32,
}

/// A model's tokenizer.
pub struct Tokenizer {
    encoder: Encoder,
    vocabulary: Arc<Vocabulary>,
    bos: Option<NamedToken>,
    eos: Option<NamedToken>,
    /// `encode_prompt` puts BOS first itself: the configuration asks for it and the file's own
    /// post-processor does not do it.
    prepends_bos: bool,
}

enum Encoder {
    HuggingFace(Box<HuggingFace>),
    Tiktoken(Box<RankBpe>),
}

impl Tokenizer {
    /// Reads the tokenizer of a model folder.
    pub fn load(folder: &Path) -> Result<Self, TextError> {
        Self::from_files(&TextFiles::read(folder)?)
    }

    /// Makes the tokenizer of a model's files.
    ///
    /// With both `tokenizer.json` and `tiktoken.model` there, the first is taken, unless
    /// `tokenizer_class` names Kimi's tokenizer. `tokenizer.json` says itself how it splits text,
    /// while the split pattern of a `tiktoken.model` lies in code; for Kimi that code is the
    /// reference and a `tokenizer.json` a copy, which agrees on all goldens but can differ on a
    /// word that is itself a token without being reachable by merges, on ties, and on runs of
    /// 25,000 characters.
    pub fn from_files(files: &TextFiles) -> Result<Self, TextError> {
        let config = TokenizerConfig::read(files)?;
        let is_kimi = config.string("tokenizer_class")? == Some(KIMI_CLASS);
        let tiktoken_model =
            files.tiktoken_model.as_ref().filter(|_| is_kimi || files.tokenizer_json.is_none());
        let (encoder, vocabulary) = if let Some(ranks) = tiktoken_model {
            if !is_kimi {
                return Err(bad_key(
                    "tokenizer_class",
                    format!("must be {KIMI_CLASS}: no other class's tiktoken.model is supported"),
                ));
            }
            let (encoder, vocabulary) = tiktoken::read(ranks, &config)?;
            (Encoder::Tiktoken(Box::new(encoder)), vocabulary)
        } else if let Some(json) = &files.tokenizer_json {
            let (encoder, vocabulary) = hugging_face::read(json)?;
            (Encoder::HuggingFace(Box::new(encoder)), vocabulary)
        } else {
            return Err(TextError::NoTokenizer);
        };
        Self::new(encoder, vocabulary, &config)
    }

    fn new(
        encoder: Encoder,
        vocabulary: Vocabulary,
        config: &TokenizerConfig,
    ) -> Result<Self, TextError> {
        let mut tokenizer = Self {
            encoder,
            vocabulary: Arc::new(vocabulary),
            bos: None,
            eos: None,
            prepends_bos: false,
        };
        tokenizer.bos = tokenizer.named_token(config, "bos_token")?;
        tokenizer.eos = tokenizer.named_token(config, "eos_token")?;
        if config.flag("add_bos_token")? {
            let Some(bos) = &tokenizer.bos else {
                return Err(bad_key("add_bos_token", "is true, but there is no bos_token"));
            };
            tokenizer.prepends_bos =
                !tokenizer.encode_prompt("", Specials::Plain)?.contains(&bos.id);
        }
        Ok(tokenizer)
    }

    fn named_token(
        &self,
        config: &TokenizerConfig,
        key: &str,
    ) -> Result<Option<NamedToken>, TextError> {
        let Some(content) = config.token(key)? else { return Ok(None) };
        let Some(id) = self.special_id(content) else {
            return Err(bad_key(key, format!("{content:?} is not among the added tokens")));
        };
        Ok(Some(NamedToken { content: content.to_owned(), id }))
    }

    /// The ids of a text, and nothing around them: for a rendered chat template or a piece of one.
    pub fn encode(&self, text: &str, specials: Specials) -> Result<Vec<u32>, TextError> {
        match &self.encoder {
            Encoder::HuggingFace(encoder) => encoder.encode(text, specials, false),
            Encoder::Tiktoken(encoder) => Ok(encoder.encode(text, specials)),
        }
    }

    /// The ids of a text that stands at the start of a sequence: with the BOS token first where
    /// the model's files ask for one, by a post-processor or by `add_bos_token`.
    ///
    /// A BOS that the text itself begins with is kept, as the reference does. `add_eos_token` is
    /// not followed: a prompt is to be continued.
    pub fn encode_prompt(&self, text: &str, specials: Specials) -> Result<Vec<u32>, TextError> {
        let mut ids = match &self.encoder {
            Encoder::HuggingFace(encoder) => encoder.encode(text, specials, true)?,
            Encoder::Tiktoken(encoder) => encoder.encode(text, specials),
        };
        if let (true, Some(bos)) = (self.prepends_bos, &self.bos) {
            ids.insert(0, bos.id);
        }
        Ok(ids)
    }

    /// The text of ids without special tokens. Bytes that are not UTF-8 become U+FFFD, ids beyond
    /// the vocabulary (a model's head may be padded) are nothing.
    pub fn decode(&self, ids: &[u32]) -> String {
        decode_all(Detokenizer::new(self), ids)
    }

    /// The text of ids, special tokens written out.
    pub fn decode_with_specials(&self, ids: &[u32]) -> String {
        decode_all(Detokenizer::with_specials(self), ids)
    }

    /// The bytes of a token, which may be part of a character; `None` for an id that is no token.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.vocabulary.bytes(id)
    }

    /// The id of an added token, special or not, by its text.
    pub fn special_id(&self, content: &str) -> Option<u32> {
        self.vocabulary.added().get(content).copied()
    }

    /// The ids of all added tokens, special or not, in no order: no text becomes one of them unless
    /// it is parsed for such tokens.
    pub fn added_ids(&self) -> impl Iterator<Item = u32> {
        self.vocabulary.added().values().copied()
    }

    /// Whether the file marks the token as special: such tokens are left out of decoded text.
    pub fn is_special(&self, id: u32) -> bool {
        self.vocabulary.is_special(id)
    }

    /// One more than the largest id.
    pub fn vocab_size(&self) -> usize {
        self.vocabulary.len()
    }

    /// The configuration's `bos_token`.
    pub fn bos(&self) -> Option<&NamedToken> {
        self.bos.as_ref()
    }

    /// The configuration's `eos_token`. Stop tokens come from `generation_config.json`; this is
    /// one more.
    pub fn eos(&self) -> Option<&NamedToken> {
        self.eos.as_ref()
    }

    pub(super) fn vocabulary(&self) -> Arc<Vocabulary> {
        Arc::clone(&self.vocabulary)
    }
}

fn decode_all(mut detokenizer: Detokenizer, ids: &[u32]) -> String {
    let mut text: String = ids.iter().map(|&id| detokenizer.push(id)).collect();
    text.push_str(&detokenizer.finish());
    text
}
