//! Constraints: which tokens keep an answer within what its request allows.
//!
//! A grammar is compiled once, on the caller's side of the door, and kept for later requests that
//! ask for the same. Each answer has a [`Matcher`] of its own that follows its tokens; none of it
//! lies in the sequence's state, so parking and recomputing do not concern it. Masks are computed
//! while the step runs (`beside`) and waited for before the draw.
//!
//! A matcher shares nothing that changes with another: what it allows depends on its grammar and
//! its tokens alone, so a constrained answer too is the same whatever the batch.

mod intersections;

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use llguidance::api::{GrammarWithLexer, StopReason, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::panic_utils;
use llguidance::toktrie::{
    ApproximateTokEnv, INVALID_TOKEN, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie,
};
use llguidance::{ParserFactory, TokenParser};
use serde_json::{Value, json};

use super::mask::{PendingMask, TokenMask};
use crate::request::{Constraint, MAX_CONSTRAINT_BYTES};
use crate::text::{Tokenizer, json_grammar, lark_literal};

/// Compiled grammars that are kept, the latest used ones.
const MAX_KEPT: usize = 64;

/// Stack of the threads that compile grammars and compute masks: the library recurses as deeply as
/// a grammar is nested. Only what is used of it becomes memory.
const STACK_BYTES: usize = 256 << 20;

/// Longest that a caller waits for a grammar.
const COMPILE_LIMIT: Duration = Duration::from_secs(10);

/// Most threads that compile what nobody waits for any more.
const MAX_LATE: usize = 2;

/// Work to build a grammar's lexer, in the library's units.
const LEXER_FUEL: u64 = 1_000_000;

/// Symbols of a compiled grammar.
const MAX_SYMBOLS: usize = 200_000;

/// States of one answer's lexer, about 2 KiB each.
const MAX_LEXER_STATES: usize = 50_000;

/// Longer tokens, in bytes, are never allowed: the library's trie has no room for them.
const MAX_TOKEN_BYTES: usize = 1_000;

/// Longest reason of a refusal, in characters.
const MAX_REASON: usize = 400;

/// Why a constraint is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {reason}")]
pub struct ConstraintError {
    /// The field the constraint came in, as [`Constraint::field`] says.
    pub field: &'static str,
    /// What is wrong with it.
    pub reason: String,
}

/// The grammars of an engine, over the vocabulary of its model. The vocabulary is read at the first
/// constraint.
pub struct Grammars {
    compiler: Arc<Compiler>,
    /// Compiled grammars by their source, the latest used last; never advanced themselves.
    kept: Mutex<Vec<(String, TokenParser)>>,
}

impl Grammars {
    /// Grammars over the tokens of `tokenizer`; `stop_tokens` end an answer that is complete.
    pub fn new(tokenizer: Option<Arc<Tokenizer>>, stop_tokens: &[u32]) -> Grammars {
        let stop_tokens = stop_tokens.to_vec();
        let (factory, late) = (OnceLock::new(), AtomicUsize::new(0));
        let compiler = Arc::new(Compiler { tokenizer, stop_tokens, factory, late });
        Grammars { compiler, kept: Mutex::new(Vec::new()) }
    }

    /// A matcher at the start of an answer that `constraint` allows. A constraint that is new is
    /// compiled first, which takes milliseconds and 10 seconds at most.
    ///
    /// # Errors
    /// A constraint that makes no sense, asks for what cannot be enforced, or costs too much; or a
    /// model without a tokenizer.
    pub fn matcher(&self, constraint: &Constraint) -> Result<Matcher, ConstraintError> {
        let fault = |reason: String| {
            let reason = in_short(&reason);
            ConstraintError { field: constraint.field(), reason }
        };
        let (source, grammar) = grammar(constraint).map_err(fault)?;
        if let Some(matcher) = self.recall(&source) {
            return Ok(matcher);
        }
        let compiled = Compiler::run(&self.compiler, grammar).map_err(fault)?;
        let matcher = Matcher::of(&compiled);
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() == MAX_KEPT {
            kept.remove(0);
        }
        kept.push((source, compiled));
        Ok(matcher)
    }

    fn recall(&self, source: &str) -> Option<Matcher> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let at = kept.iter().position(|(known, _)| known == source)?;
        kept[at..].rotate_left(1);
        kept.last().map(|(_, compiled)| Matcher::of(compiled))
    }
}

impl std::fmt::Debug for Grammars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammars").finish_non_exhaustive()
    }
}

/// Compiles grammars, each on a thread of its own with a deep stack.
struct Compiler {
    tokenizer: Option<Arc<Tokenizer>>,
    stop_tokens: Vec<u32>,
    factory: OnceLock<Result<ParserFactory, String>>,
    /// Threads that went on after nobody waited for them any more. The library's limits end most
    /// work; what they do not see cannot be stopped, only kept from piling up.
    late: AtomicUsize,
}

impl Compiler {
    fn run(this: &Arc<Compiler>, grammar: TopLevelGrammar) -> Result<TokenParser, String> {
        if this.late.load(Ordering::Relaxed) >= MAX_LATE {
            return Err("cannot be compiled while earlier ones take too long".to_owned());
        }
        let (done, compiled) = sync_channel(1);
        // Set by whichever ends first, the work or the wait for it.
        let (compiler, is_over) = (Arc::clone(this), Arc::new(AtomicBool::new(false)));
        let work_over = Arc::clone(&is_over);
        let work = move || {
            let _ = done.send(compiler.compile(grammar));
            if work_over.swap(true, Ordering::Relaxed) {
                compiler.late.fetch_sub(1, Ordering::Relaxed);
            }
        };
        let thread = thread::Builder::new().name("deltapool-grammar".to_owned());
        let thread = thread.stack_size(STACK_BYTES).spawn(work);
        thread.map_err(|error| format!("no thread to compile it: {error}"))?;
        match compiled.recv_timeout(COMPILE_LIMIT) {
            Ok(compiled) => compiled,
            Err(RecvTimeoutError::Disconnected) => Err("its compiler panicked".to_owned()),
            Err(RecvTimeoutError::Timeout) => {
                this.late.fetch_add(1, Ordering::Relaxed);
                if is_over.swap(true, Ordering::Relaxed) {
                    this.late.fetch_sub(1, Ordering::Relaxed);
                }
                Err(format!("takes more than {} s to compile", COMPILE_LIMIT.as_secs()))
            }
        }
    }

    fn compile(&self, grammar: TopLevelGrammar) -> Result<TokenParser, String> {
        let factory = self.factory.get_or_init(|| self.factory());
        let factory = factory.as_ref().map_err(String::clone)?;
        let mut parser = factory.create_parser(grammar).map_err(|error| error.to_string())?;
        parser.start_without_prompt();
        // A grammar whose every step would cost too much is told by its first.
        match panic_utils::catch_unwind(AssertUnwindSafe(|| parser.compute_mask())) {
            Ok(_) => Ok(parser),
            Err(error) => Err(fault(&parser, &error.to_string())),
        }
    }

    fn factory(&self) -> Result<ParserFactory, String> {
        let tokenizer = self.tokenizer.as_deref();
        let tokenizer = tokenizer.ok_or("needs a tokenizer, and the model has none")?;
        let built = catch_unwind(AssertUnwindSafe(|| {
            let trie = trie(tokenizer, &self.stop_tokens);
            let vocabulary: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
            let slices = SlicedBiasComputer::general_slices();
            ParserFactory::new(&vocabulary, InferenceCapabilities::default(), &slices)
        }));
        let built = built.map_err(|_| "the vocabulary has too many tokens".to_owned())?;
        let mut factory = built.map_err(|error| format!("the vocabulary: {error}"))?;
        factory.quiet();
        let limits = factory.limits_mut();
        limits.initial_lexer_fuel = LEXER_FUEL;
        limits.max_grammar_size = MAX_SYMBOLS;
        limits.max_lexer_states = MAX_LEXER_STATES;
        limits.verbose_errors = false;
        Ok(factory)
    }
}

/// The tokens by their bytes. An added token is no text: its bytes stand behind a mark that no text
/// contains, so it is allowed only where a grammar names it.
fn trie(tokenizer: &Tokenizer, stop_tokens: &[u32]) -> TokTrie {
    let size = tokenizer.vocab_size() as u32;
    let added: HashSet<u32> = tokenizer.added_ids().collect();
    let words: Vec<Vec<u8>> = (0..size)
        .map(|id| match tokenizer.token_bytes(id) {
            Some(bytes) if bytes.len() > MAX_TOKEN_BYTES => Vec::new(),
            Some(bytes) if added.contains(&id) => {
                [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat()
            }
            // The mark itself is a byte that no UTF-8 contains.
            Some(bytes) if bytes.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER) => Vec::new(),
            Some(bytes) => bytes.to_vec(),
            None => Vec::new(),
        })
        .collect();
    let ends: Vec<u32> = stop_tokens.iter().copied().filter(|id| *id < size).collect();
    let first = ends.first().copied().unwrap_or(INVALID_TOKEN);
    let trie = TokTrie::from(&TokRxInfo::new(size, first), &words);
    if ends.is_empty() { trie } else { trie.with_eos_tokens(&ends) }
}

/// A constraint in the library's terms, and a text that is the same for the same constraint.
fn grammar(constraint: &Constraint) -> Result<(String, TopLevelGrammar), String> {
    let (text, grammar) = match constraint {
        Constraint::JsonObject => schema(&json!({"type": "object"}))?,
        Constraint::JsonSchema(value) => schema(value)?,
        Constraint::Regex(regex) => (regex.clone(), GrammarWithLexer::from_regex(regex)),
        Constraint::Choice(texts) => lark(&choice(texts)),
        Constraint::Grammar(text) => {
            intersections::check_grammar(text)?;
            lark(text)
        }
    };
    let kind = constraint.field();
    Ok((format!("{kind}\n{text}"), TopLevelGrammar::from_grammar(grammar)))
}

fn lark(text: &str) -> (String, GrammarWithLexer) {
    (text.to_owned(), GrammarWithLexer::from_lark(text.to_owned()))
}

fn schema(value: &Value) -> Result<(String, GrammarWithLexer), String> {
    let text = value.to_string();
    if text.len() > MAX_CONSTRAINT_BYTES {
        let bytes = text.len();
        return Err(format!("{bytes} bytes, allowed: {MAX_CONSTRAINT_BYTES} at most"));
    }
    intersections::check_schema(value)?;
    Ok((text, GrammarWithLexer::from_json_schema(json_grammar(value)?)))
}

/// The grammar of one of `texts`: one terminal, so that a text may begin another.
fn choice(texts: &[String]) -> String {
    let quoted: Vec<String> = texts.iter().map(|text| lark_literal(text)).collect();
    format!("start: TEXT\nTEXT: {}\n", quoted.join(" | "))
}

/// The first line of what the library says, and of a regular expression what is wrong with it: more
/// would be the grammar once again, or the trace of a panic.
fn in_short(reason: &str) -> String {
    let mut lines = reason.trim().lines();
    let first = lines.next().unwrap_or("is refused");
    let mut short: String = first.chars().take(MAX_REASON).collect();
    if short.len() < first.len() {
        short.push_str(" ...");
    }
    if let Some(error) = lines.find(|line| line.starts_with("error: ")) {
        short = format!("{short} {}", &error["error: ".len()..]);
    }
    short
}

/// Follows the tokens of one answer, or says why there is nothing to follow.
pub struct Matcher(Result<Box<TokenParser>, String>);

impl Matcher {
    /// One at the start of what `compiled` allows.
    fn of(compiled: &TokenParser) -> Matcher {
        Matcher(Ok(Box::new(compiled.deep_clone())))
    }

    /// One that allows nothing, because of an error.
    pub(super) fn broken(error: &ConstraintError) -> Matcher {
        Matcher(Err(error.to_string()))
    }

    /// Which tokens may come next; those that end an answer are among them when it is complete.
    ///
    /// # Errors
    /// When no token of the vocabulary can go on, or finding out costs too much.
    pub fn mask(&mut self) -> Result<TokenMask, String> {
        let parser = self.0.as_mut().map_err(|error| error.clone())?;
        let mask = panic_utils::catch_unwind(AssertUnwindSafe(|| parser.compute_mask()));
        let mask = mask.map_err(|error| told(fault(parser, &error.to_string())))?;
        Ok(TokenMask::new(mask.as_slice().to_vec()))
    }

    /// Takes the next token, which the mask allowed; returns whether the answer is complete and
    /// nothing can follow.
    ///
    /// # Errors
    /// When finding out costs too much.
    pub fn advance(&mut self, token: u32) -> Result<bool, String> {
        let parser = self.0.as_mut().map_err(|error| error.clone())?;
        let taken = panic_utils::catch_unwind(AssertUnwindSafe(|| {
            parser.consume_token(token)?;
            parser.check_stop()
        }));
        taken.map_err(|error| told(fault(parser, &error.to_string())))
    }
}

fn told(fault: String) -> String {
    format!("the constraint {fault}")
}

fn fault(parser: &TokenParser, error: &str) -> String {
    match parser.stop_reason() {
        StopReason::NoExtensionBias => "allows none of the model's tokens here".to_owned(),
        StopReason::LexerTooComplex | StopReason::ParserTooComplex => {
            "is too complex here".to_owned()
        }
        _ => in_short(error),
    }
}

/// Runs `step` while a thread beside it computes the mask of each of `matchers`.
pub(super) fn beside<T>(
    matchers: &mut [Matcher],
    pending: &[PendingMask],
    step: impl FnOnce() -> T,
) -> T {
    if matchers.is_empty() {
        return step();
    }
    let fill = || {
        for (matcher, pending) in matchers.iter_mut().zip(pending) {
            // Whoever waits must hear something.
            let mask = catch_unwind(AssertUnwindSafe(|| matcher.mask()));
            let mask = mask.unwrap_or_else(|_| Err("the constraint's matcher panicked".to_owned()));
            pending.set(mask);
        }
    };
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("deltapool-masks".to_owned());
        if let Err(error) = thread.stack_size(STACK_BYTES).spawn_scoped(scope, fill) {
            let told = format!("no thread to compute the constraint's mask: {error}");
            pending.iter().for_each(|pending| pending.set(Err(told.clone())));
        }
        step()
    })
}
