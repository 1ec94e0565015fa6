//! Mooncake traces: lengths of requests and the names of their 512-token blocks, from which tokens
//! are made up.
//!
//! A line is `{"timestamp", "input_length", "output_length", "hash_ids"}`, other keys are left
//! alone; requests are in the order of the lines. An id names a block together with all before it.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::Path;
use std::time::Duration;

use serde_json::{Map, Value};

use super::runs::{ANSWER, Run, Runs, UNIQUE};
use super::workload::Outline;

/// Tokens that an id of a trace stands for.
pub const TRACE_BLOCK: usize = 512;

/// No prompt or answer of a trace is longer.
const MOST_TOKENS: usize = 1 << 24;

/// No request comes later, in milliseconds: thirty years.
const MOST_TIME: f64 = 1e12;

/// Why a trace could not be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: String,
        /// What the system said.
        source: io::Error,
    },
    /// A line makes no sense.
    #[error("{path}:{line}: {reason}")]
    Line {
        /// The file.
        path: String,
        /// The line, from 1.
        line: usize,
        /// What is wrong, with the key.
        reason: String,
    },
    /// No line asks for anything.
    #[error("{path}: the trace has no request")]
    Empty {
        /// The file.
        path: String,
    },
}

/// A line of a trace.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// Its number in the file, from 1.
    pub line: usize,
    /// When it came, in milliseconds from the trace's beginning.
    pub timestamp: Option<f64>,
    /// Tokens of the prompt.
    pub input_len: usize,
    /// Tokens of the answer, one or more.
    pub output_len: usize,
    /// Names of the prompt's blocks; the last one may be partly filled.
    pub hash_ids: Vec<u64>,
}

impl Entry {
    /// Names of the blocks that are full.
    fn full_blocks(&self) -> &[u64] {
        &self.hash_ids[..self.input_len / TRACE_BLOCK]
    }
}

/// The first `limit` requests of a trace. Empty lines are skipped.
///
/// # Errors
/// A file that cannot be read, or the first line of it that makes no sense.
pub fn read(path: &Path, limit: Option<usize>) -> Result<Vec<Entry>, TraceError> {
    let name = || path.display().to_string();
    let failed = |source| TraceError::Io { path: name(), source };
    let mut entries = Vec::new();
    let lines = BufReader::new(File::open(path).map_err(failed)?).lines();
    for (number, text) in (1..).zip(lines) {
        if limit.is_some_and(|limit| entries.len() == limit) {
            break;
        }
        let text = text.map_err(failed)?;
        if text.trim().is_empty() {
            continue;
        }
        let entry = entry(number, &text);
        entries.push(entry.map_err(|reason| TraceError::Line {
            path: name(),
            line: number,
            reason,
        })?);
    }
    if entries.is_empty() {
        return Err(TraceError::Empty { path: name() });
    }
    Ok(entries)
}

/// When each of the requests came, counted from the first of them.
///
/// # Errors
/// The first line without a time, or with one before that of the line above.
pub(super) fn arrivals(path: &Path, entries: &[Entry]) -> Result<Vec<Duration>, TraceError> {
    let first = entries.first().and_then(|entry| entry.timestamp).unwrap_or(0.0);
    let mut last = first;
    let time = |entry: &Entry| {
        let time =
            entry.timestamp.filter(|time| (last..=MOST_TIME).contains(time)).ok_or_else(|| {
                TraceError::Line {
                    path: path.display().to_string(),
                    line: entry.line,
                    reason: format!(
                        "timestamp is to be a number of milliseconds, {last} or more and at most \
                         {MOST_TIME:e}"
                    ),
                }
            })?;
        last = time;
        Ok(Duration::try_from_secs_f64((time - first) / 1e3).unwrap_or(Duration::MAX))
    };
    entries.iter().map(time).collect()
}

fn entry(line: usize, text: &str) -> Result<Entry, String> {
    let object: Map<String, Value> =
        serde_json::from_str(text).map_err(|error| format!("not a JSON object: {error}"))?;
    let input_len = length(&object, "input_length", 1)?;
    let output_len = length(&object, "output_length", 0)?.max(1);
    let ids = value(&object, "hash_ids")?.as_array().ok_or("hash_ids is not a list")?;
    let id = |id: &Value| {
        let known = id.as_u64().filter(|id| *id < UNIQUE);
        known.ok_or(format!("hash_ids has {id}, which is no block's id: 0 to {}", UNIQUE - 1))
    };
    let hash_ids = ids.iter().map(id).collect::<Result<Vec<u64>, String>>()?;
    let blocks = input_len.div_ceil(TRACE_BLOCK);
    if hash_ids.len() != blocks {
        return Err(format!(
            "hash_ids has {} blocks, but input_length {input_len} takes {blocks} of {TRACE_BLOCK} \
             tokens",
            hash_ids.len(),
        ));
    }
    let timestamp = object.get("timestamp").and_then(Value::as_f64);
    Ok(Entry { line, timestamp, input_len, output_len, hash_ids })
}

fn value<'o>(object: &'o Map<String, Value>, key: &str) -> Result<&'o Value, String> {
    object.get(key).ok_or_else(|| format!("{key} is missing"))
}

fn length(object: &Map<String, Value>, key: &str, least: usize) -> Result<usize, String> {
    let value = value(object, key)?;
    let length = value.as_u64().and_then(|length| usize::try_from(length).ok());
    length
        .filter(|length| (least..=MOST_TOKENS).contains(length))
        .ok_or_else(|| format!("{key} is {value}, allowed: {least} to {MOST_TOKENS}"))
}

/// A tree of the full blocks seen so far, by their ids.
#[derive(Debug, Default)]
struct SeenBlocks {
    children: HashMap<(u32, u64), u32>,
}

impl SeenBlocks {
    /// Adds the path of `ids`; returns how many of them were there from the start on, the node
    /// where these end and the node where all end. The root is node 0.
    fn add(&mut self, ids: &[u64]) -> (usize, u32, u32) {
        let (mut node, mut seen, mut seen_node) = (0, 0, 0);
        for (depth, id) in ids.iter().enumerate() {
            let fresh = u32::try_from(self.children.len() + 1).expect("a trace has fewer blocks");
            node = *self.children.entry((node, *id)).or_insert(fresh);
            if node != fresh {
                (seen, seen_node) = (depth + 1, node);
            }
        }
        (seen, seen_node, node)
    }
}

/// A block's tokens are its id's stream; what follows the full blocks, and the answer, no other
/// request has.
pub(super) fn plain(path: &Path, entries: &[Entry]) -> Vec<Outline> {
    let mut seen_blocks = SeenBlocks::default();
    let outline = |(n, entry): (u64, &Entry)| {
        let ids = entry.full_blocks();
        let (seen, _, _) = seen_blocks.add(ids);
        let blocks = ids.iter().map(|id| Run::new(*id, TRACE_BLOCK));
        let rest = Run::new(UNIQUE + n, entry.input_len % TRACE_BLOCK);
        Outline {
            place: place(path, entry),
            prompt: blocks.chain([rest]).collect(),
            answer: answer(n, entry),
            ideal_tokens: (seen * TRACE_BLOCK).min(entry.input_len - 1),
        }
    };
    (0..).zip(entries).map(outline).collect()
}

/// As [`plain`], but as chats go: a request whose first unseen block follows all full blocks of an
/// earlier one, two or more, goes on with the rest of that prompt and its answer. Each answer is
/// gone on with once. A block's tokens are what its id stood for when it was first seen.
pub(super) fn chat(path: &Path, entries: &[Entry]) -> Vec<Outline> {
    let mut chats = Chats::default();
    (0..).zip(entries).map(|(n, entry)| chats.go_on(path, n, entry)).collect()
}

#[derive(Debug, Default)]
struct Chats {
    seen_blocks: SeenBlocks,
    /// The tokens of each block seen.
    contents: HashMap<u64, Runs>,
    /// What follows the full blocks of the latest request that ended at a node: the rest of its
    /// prompt and its answer.
    ends: HashMap<u32, Runs>,
}

impl Chats {
    fn go_on(&mut self, path: &Path, n: u64, entry: &Entry) -> Outline {
        let ids = entry.full_blocks();
        let (seen, seen_node, end_node) = self.seen_blocks.add(ids);
        let continued = (seen > 1).then(|| self.ends.remove(&seen_node)).flatten();
        let needed = entry.input_len - seen * TRACE_BLOCK;
        // What follows the seen blocks, unless a block of it was seen elsewhere.
        let mut stream = Runs::default();
        let mut ideal = seen * TRACE_BLOCK;
        if let Some(continued) = &continued {
            stream = continued.slice(0..continued.len().min(needed));
            // The last token of an answer is never computed.
            ideal += needed.min(continued.len() - 1);
        }
        stream.push(Run::new(UNIQUE + n, needed - stream.len()));
        let mut prompt = Runs::default();
        ids[..seen].iter().for_each(|id| prompt.extend(&self.contents[id]));
        for (j, id) in ids[seen..].iter().enumerate() {
            let fresh = || stream.slice(j * TRACE_BLOCK..(j + 1) * TRACE_BLOCK);
            if j == 0 && self.contents.contains_key(id) {
                ideal = seen * TRACE_BLOCK;
            }
            prompt.extend(self.contents.entry(*id).or_insert_with(fresh));
        }
        let mut end = stream.slice((ids.len() - seen) * TRACE_BLOCK..stream.len());
        prompt.extend(&end);
        let answer = answer(n, entry);
        end.extend(&answer);
        self.ends.insert(end_node, end);
        let ideal_tokens = ideal.min(entry.input_len - 1);
        Outline { place: place(path, entry), prompt, answer, ideal_tokens }
    }
}

fn answer(n: u64, entry: &Entry) -> Runs {
    [Run::new(ANSWER + n, entry.output_len)].into_iter().collect()
}

fn place(path: &Path, entry: &Entry) -> String {
    format!("{}:{}", path.display(), entry.line)
}
