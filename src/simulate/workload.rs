//! Requests in order, each with what an endless memory of perfect states would save of it.

use std::path::Path;

use super::named;
use super::runs::Runs;
use super::trace::{self, TraceError};

/// The workloads that have a name, and what each is.
pub const NAMED: [(&str, &str); 7] = [
    ("share1500+700x64", "64 prompts that share 1,500 tokens and have 700 of their own"),
    ("share1600+600x64", "64 prompts that share 1,600 tokens and have 600 of their own"),
    ("share2000+200x64", "64 prompts that share 2,000 tokens and have 200 of their own"),
    ("chat32x10", "32 chats of 10 turns, turn by turn; all share a system prompt of 600 tokens"),
    ("chat32x10_seq", "the same, chat by chat"),
    ("agents16x8", "16 agents of 8 steps, step by step; all share 6,000 tokens"),
    ("burst32", "32 equal prompts of 2,000 tokens, submitted together"),
];

/// Requests in the order in which they are submitted.
#[derive(Debug, Clone)]
pub struct Workload {
    /// The trace's file or the workload's name.
    pub name: String,
    /// The requests.
    pub requests: Vec<Outline>,
    /// All of them are submitted together.
    pub is_burst: bool,
}

/// A request before its tokens are written out.
#[derive(Debug, Clone)]
pub struct Outline {
    /// Where it comes from: `file:line`, or its number in a workload.
    pub place: String,
    /// The prompt.
    pub prompt: Runs,
    /// The answer it will get; one token or more.
    pub answer: Runs,
    /// Tokens of the prompt that an earlier request had, less than all of it.
    pub ideal_tokens: usize,
}

impl Outline {
    /// Tokens of prompt and answer together.
    pub fn tokens(&self) -> usize {
        self.prompt.len() + self.answer.len()
    }
}

impl Workload {
    /// The requests of a Mooncake trace, at most the first `limit`. With `chat` a prompt that goes
    /// on where an earlier one ended contains the end of that prompt and its answer.
    ///
    /// # Errors
    /// A file that cannot be read, or the first line of it that makes no sense.
    pub fn of_trace(path: &Path, chat: bool, limit: Option<usize>) -> Result<Workload, TraceError> {
        let entries = trace::read(path, limit)?;
        let (name, requests) = match chat {
            true => (format!("{}+chat", path.display()), trace::chat(path, &entries)),
            false => (path.display().to_string(), trace::plain(path, &entries)),
        };
        Ok(Workload { name, requests, is_burst: false })
    }

    /// One of [`NAMED`], at most its first `limit` requests.
    pub fn named(name: &str, limit: Option<usize>) -> Option<Workload> {
        let mut requests = named::requests(name)?;
        requests.truncate(limit.unwrap_or(usize::MAX));
        Some(Workload { name: name.to_owned(), requests, is_burst: name == named::BURST })
    }

    /// Tokens of all prompts.
    pub fn prompt_tokens(&self) -> usize {
        self.requests.iter().map(|request| request.prompt.len()).sum()
    }

    /// Tokens of all prompts that an earlier request had.
    pub fn ideal_tokens(&self) -> usize {
        self.requests.iter().map(|request| request.ideal_tokens).sum()
    }
}
