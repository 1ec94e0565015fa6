//! Between text and token ids: tokenizers, chat templates, the way back to text, and what of an
//! answer's text is reasoning, content or a call.
//!
//! ```text
//! messages --ChatTemplate--> text --Tokenizer--> ids --(the engine)--> ids
//!                                                                       |
//!   client <--AnswerParser-- text <--StopMatcher-- text <--Detokenizer--+
//! ```
//!
//! Everything is read from [`TextFiles`], a model folder's files as bytes, so a model embedded in
//! the binary and one on disk take the same path. Two kinds of tokenizer are read: byte-level
//! `tokenizer.json` files and Kimi's `tiktoken.model`. Both end in one table of the bytes of each
//! token, and from there on nothing knows the difference.
//!
//! Invariants:
//! - Encoding and rendering equal the reference (transformers, tiktoken) exactly.
//! - What a [`Detokenizer`] emits, joined, equals [`Tokenizer::decode`] of all its ids, whatever
//!   the cuts; what a [`StopMatcher`] releases does not depend on how the text was cut.
//! - A bad file is an error that names the file and the key, never a panic and never a guess.
//!
//! Not here: when to stop, sampling, HTTP. The module imports nothing of this project.

mod answer;
mod chat_template;
mod date;
mod detokenizer;
#[cfg(feature = "embedded-model")]
mod embedded;
mod error;
mod files;
mod hugging_face;
mod lark;
mod python;
mod stop;
mod tiktoken;
mod tokenizer;
mod vocabulary;

pub use answer::{AnswerFormat, AnswerParser, Piece, Tool};
pub use chat_template::{Chat, ChatTemplate};
pub use detokenizer::Detokenizer;
pub use error::TextError;
pub use files::TextFiles;
pub use lark::{json_grammar, lark_literal};
pub use stop::{Released, StopMatcher};
pub use tokenizer::{NamedToken, Specials, Tokenizer};
