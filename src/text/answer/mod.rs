//! From what a model writes to reasoning, content and tool calls, while it is written; and the
//! grammars that make it call a tool.
//!
//! ```text
//! text ... AnswerParser --> Piece::{Reasoning, Content, Call, Arguments}
//! ```
//!
//! Invariants:
//! - The pieces, joined by their kinds, do not depend on how the text was cut.
//! - No text is an error: what begins like a call and is none comes out as content.
//! - The arguments of a call are what the model wrote; a format that has no JSON is turned into it.
//!
//! Written here rather than taken from a library: the one that knows these formats brings 170
//! crates along, a Python parser, a runtime and the types of an API among them.

mod force;
mod json_call;
mod out;
mod scan;
mod tagged;
mod xml_call;
mod xtml;

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{ChatTemplate, Tokenizer};
use json_call::{JsonCall, Progress};
use out::Out;
pub use out::Piece;
use scan::Scanner;
use tagged::Tagged;
use xtml::Xtml;

/// A tool that a model may call.
#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// What it does.
    pub description: Option<String>,
    /// The JSON schema of its arguments, an object; any object without one.
    pub parameters: Option<Value>,
}

impl Tool {
    /// The description that chat templates expect.
    pub fn to_json(&self) -> Value {
        let mut function = json!({"name": self.name});
        if let Some(description) = &self.description {
            function["description"] = description.as_str().into();
        }
        let parameters = self.parameters.clone();
        let nothing = || json!({"type": "object", "properties": {}});
        function["parameters"] = parameters.unwrap_or_else(nothing);
        json!({"type": "function", "function": function})
    }
}

/// How a model writes calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Calls {
    /// In no way of its own; when forced, as a JSON object.
    Json,
    /// `<tool_call>{"name": ..., "arguments": ...}</tool_call>`.
    Hermes,
    /// `<tool_call><function=...>`.
    Xml,
    /// Kimi K2's and Kimi Linear's sections.
    Kimi,
    /// Kimi K3's channels.
    Xtml,
}

/// How a model marks reasoning and calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AnswerFormat {
    calls: Calls,
    /// Whether it reasons between `<think>` and `</think>`.
    thinks: bool,
    /// The marks that are tokens of their own.
    tokens: BTreeMap<&'static str, u32>,
    shows_specials: bool,
}

/// All marks that may be tokens.
const MARKS: [&str; 13] = [
    tagged::THINK,
    tagged::THINK_END,
    tagged::CALL,
    xml_call::CALL_END,
    tagged::SECTION,
    tagged::SECTION_END,
    tagged::KIMI_CALL,
    tagged::KIMI_ARGUMENTS,
    tagged::KIMI_CALL_END,
    xtml::OPEN,
    xtml::CLOSE,
    xtml::SEP,
    "<arg_key>",
];

impl AnswerFormat {
    /// The format of a model that marks nothing: all it writes is content.
    pub fn none() -> AnswerFormat {
        let tokens = BTreeMap::new();
        AnswerFormat { calls: Calls::Json, thinks: false, tokens, shows_specials: false }
    }

    /// What a model's chat template asks it to write, or its vocabulary was made for.
    pub fn detect(template: Option<&ChatTemplate>, tokenizer: Option<&Tokenizer>) -> AnswerFormat {
        let sources = template.map(ChatTemplate::sources).unwrap_or_default();
        let says = |mark: &str| sources.iter().any(|source| source.contains(mark));
        let id = |mark: &str| tokenizer.and_then(|tokenizer| tokenizer.special_id(mark));
        let calls = match () {
            () if [xtml::OPEN, xtml::CLOSE, xtml::SEP].iter().all(|mark| id(mark).is_some()) => {
                Calls::Xtml
            }
            () if says(tagged::KIMI_CALL) || id(tagged::KIMI_ARGUMENTS).is_some() => Calls::Kimi,
            // GLM's `<tool_call>` is another.
            () if says("<arg_key>") => Calls::Json,
            () if says(tagged::CALL) && says(xml_call::FUNCTION) => Calls::Xml,
            () if says(tagged::CALL) => Calls::Hermes,
            () => Calls::Json,
        };
        let thinks = calls != Calls::Xtml && says(tagged::THINK_END);
        let used = |mark: &&str| match calls {
            Calls::Xtml => mark.starts_with("<|"),
            Calls::Kimi => mark.starts_with("<|tool_") || (thinks && mark.contains("think")),
            Calls::Hermes | Calls::Xml => mark.contains("tool_call>") || mark.contains("think"),
            Calls::Json => thinks && mark.contains("think"),
        };
        let marks = MARKS.into_iter().filter(used);
        let tokens: BTreeMap<_, _> = marks.filter_map(|mark| Some((mark, id(mark)?))).collect();
        let is_special = |id: &u32| tokenizer.is_some_and(|tokenizer| tokenizer.is_special(*id));
        let shows_specials = tokens.values().any(is_special);
        AnswerFormat { calls, thinks, tokens, shows_specials }
    }

    /// Whether its marks are special tokens: a request then needs
    /// `skip_special_tokens: false`, or its text has none of them.
    pub fn shows_specials(&self) -> bool {
        self.shows_specials
    }

    /// Whether a model may reason before it answers.
    pub fn has_reasoning(&self) -> bool {
        self.thinks || self.calls == Calls::Xtml
    }

    /// Whether a model has a way of its own to call tools.
    pub fn has_calls(&self) -> bool {
        self.calls != Calls::Json
    }

    /// Where an answer begins whose prompt ends so.
    fn opening(&self, prompt: &str) -> Opening {
        if !self.thinks {
            return Opening::Content;
        }
        let (last, end) = (prompt.rfind(tagged::THINK), prompt.rfind(tagged::THINK_END));
        let is_blank = |from: usize| prompt[from..].trim().is_empty();
        match (last, end) {
            (Some(start), _) if is_blank(start + tagged::THINK.len()) => Opening::Reasoning,
            (_, Some(start)) if is_blank(start + tagged::THINK_END.len()) => Opening::Content,
            _ => Opening::Either,
        }
    }
}

/// Where an answer begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Opening {
    /// In reasoning that the prompt has opened.
    Reasoning,
    /// In content, or reasoning if the model opens it.
    Either,
    /// In content: the model does not reason, or the prompt has closed it.
    Content,
}

/// Takes an answer apart while it is written.
#[derive(Debug)]
pub struct AnswerParser {
    calls: Calls,
    /// Whether content is JSON objects, each a call.
    objects: bool,
    state: State,
    tools: Vec<Tool>,
    scanner: Scanner,
    out: Out,
}

#[derive(Debug)]
enum State {
    /// Everything is content.
    Plain,
    /// JSON objects, each a call; and what was read of one that has not gone out.
    Objects(JsonCall, String),
    Tagged(Tagged),
    Xtml(Xtml),
}

impl AnswerParser {
    /// A parser for an answer to `prompt`, the rendered text or its end, which says whether
    /// reasoning is open. `tools` are those the model was told of: without any, nothing is a call.
    /// `forced` says that [`AnswerFormat::force`] holds for the answer.
    pub fn new(format: &AnswerFormat, tools: &[Tool], prompt: &str, forced: bool) -> AnswerParser {
        let opening = format.opening(prompt);
        let has_calls = format.has_calls() && !tools.is_empty();
        let objects = forced && !format.has_calls();
        let state = match format.calls {
            Calls::Xtml => State::Xtml(Xtml::after(prompt)),
            _ if opening == Opening::Reasoning => State::Tagged(Tagged::Reasoning),
            _ if opening == Opening::Either => State::Tagged(Tagged::Start),
            _ if has_calls || objects => State::Tagged(Tagged::Content),
            _ => State::Plain,
        };
        let calls = if has_calls { format.calls } else { Calls::Json };
        let mut out = Out::default();
        if opening == Opening::Reasoning {
            out.begin();
        }
        let scanner = Scanner::default();
        AnswerParser { calls, objects, state, tools: tools.to_vec(), scanner, out }
    }

    /// Whether what comes next is reasoning, as far as is known.
    pub fn is_reasoning(&self) -> bool {
        match &self.state {
            State::Tagged(state) => matches!(state, Tagged::Reasoning),
            State::Xtml(state) => state.is_thinking(),
            State::Plain | State::Objects(..) => false,
        }
    }

    /// Takes more of the text; returns what is certain by now.
    pub fn push(&mut self, text: &str) -> Vec<Piece> {
        self.scanner.push(text);
        while self.step() {}
        self.out.take()
    }

    /// The end of the answer; returns what was held back.
    pub fn finish(mut self) -> Vec<Piece> {
        let rest = self.scanner.take_rest();
        match self.state {
            State::Plain => self.out.exact(&rest),
            State::Objects(_, raw) => {
                self.out.content(&(raw + &rest));
                self.out.finish(false);
            }
            State::Tagged(state) => state.finish(&rest, &mut self.out),
            State::Xtml(state) => state.finish(&rest, &mut self.out),
        }
        self.out.take()
    }

    /// Takes what comes next; false when nothing is certain yet.
    fn step(&mut self) -> bool {
        match &mut self.state {
            State::Plain => {
                let text = self.scanner.take_rest();
                self.out.exact(&text);
                false
            }
            State::Objects(..) => self.step_objects(),
            State::Tagged(state) if self.objects && state.is_content(&self.scanner) => {
                self.objects = false;
                self.state = State::Objects(JsonCall::default(), String::new());
                true
            }
            State::Tagged(state) => {
                state.step(self.calls, &self.tools, &mut self.scanner, &mut self.out)
            }
            State::Xtml(state) => state.step(&mut self.scanner, &mut self.out),
        }
    }

    fn step_objects(&mut self) -> bool {
        let State::Objects(call, raw) = &mut self.state else { return false };
        let Some(char) = self.scanner.next_char() else { return false };
        if !call.is_called() {
            raw.push(char);
        }
        match call.push(char, &mut self.out) {
            Progress::More if call.is_called() => raw.clear(),
            Progress::More => {}
            Progress::Done => {
                (*call, *raw) = (JsonCall::default(), String::new());
            }
            Progress::Broken => {
                let raw = std::mem::take(raw);
                self.out.content(&raw);
                self.state = State::Tagged(Tagged::Content);
            }
        }
        true
    }
}
