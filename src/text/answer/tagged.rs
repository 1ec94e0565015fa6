//! Text with marks around what is not content: `<think>`, `<tool_call>`, and Kimi's sections.
//!
//! ```text
//! <think>REASONING</think>CONTENT
//! <tool_call>{"name": "f", "arguments": {...}}</tool_call>            Hermes, Qwen
//! <tool_call><function=f>...</function></tool_call>                   Qwen3-Coder
//! <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0
//!   <|tool_call_argument_begin|>{...}<|tool_call_end|><|tool_calls_section_end|>      Kimi
//! ```

use super::json_call::{JsonCall, Progress};
use super::out::Out;
use super::scan::{Scan, Scanner};
use super::xml_call::{CALL_END, XmlCall};
use super::{Calls, Tool};

pub(super) const THINK: &str = "<think>";
pub(super) const THINK_END: &str = "</think>";
pub(super) const CALL: &str = "<tool_call>";
pub(super) const SECTION: &str = "<|tool_calls_section_begin|>";
pub(super) const SECTION_END: &str = "<|tool_calls_section_end|>";
pub(super) const KIMI_CALL: &str = "<|tool_call_begin|>";
pub(super) const KIMI_ARGUMENTS: &str = "<|tool_call_argument_begin|>";
pub(super) const KIMI_CALL_END: &str = "<|tool_call_end|>";

/// Where the text is.
#[derive(Debug)]
pub(super) enum Tagged {
    /// Before anything but white space: reasoning may begin.
    Start,
    Reasoning,
    Content,
    /// Behind `<tool_call>`; what was read since, until a call has gone out.
    Body(String),
    Json(JsonCall, String),
    Xml(Box<XmlCall>, String),
    /// Behind a call, before `</tool_call>`.
    Closing,
    Section,
    /// Behind `<|tool_call_begin|>`; what was read since.
    Header(String),
    KimiArguments,
}

impl Tagged {
    /// Whether what comes next is content: reasoning is over, or does not begin.
    pub(super) fn is_content(&self, scanner: &Scanner) -> bool {
        let begins = |char: char| !char.is_whitespace() && !THINK.starts_with(char);
        match self {
            Tagged::Content => true,
            Tagged::Start => scanner.peek().is_some_and(begins),
            _ => false,
        }
    }

    /// Takes what comes next; false when nothing is certain yet.
    pub(super) fn step(
        &mut self,
        calls: Calls,
        tools: &[Tool],
        scanner: &mut Scanner,
        out: &mut Out,
    ) -> bool {
        let next = match std::mem::replace(self, Tagged::Content) {
            Tagged::Start => start(calls, scanner, out),
            Tagged::Reasoning => reasoning(calls, scanner, out),
            Tagged::Content => content(calls, scanner, out),
            Tagged::Body(raw) => body(raw, scanner, out),
            Tagged::Json(call, raw) => json(call, raw, scanner, out),
            Tagged::Xml(call, raw) => xml(call, raw, tools, scanner, out),
            Tagged::Closing => closing(scanner, out),
            Tagged::Section => section(scanner, out),
            Tagged::Header(raw) => header(raw, scanner, out),
            Tagged::KimiArguments => kimi_arguments(scanner, out),
        };
        let (state, moves) = match next {
            Next::State(state) => (state, true),
            Next::Wait(state) => (state, false),
        };
        *self = state;
        moves
    }

    /// The end of the text; `rest` is what might have become a mark.
    pub(super) fn finish(self, rest: &str, out: &mut Out) {
        let in_reasoning = matches!(self, Tagged::Reasoning);
        match self {
            Tagged::Reasoning => out.reasoning(rest),
            Tagged::Body(raw) => out.content(&format!("{CALL}{raw}{rest}")),
            Tagged::Json(call, raw) if !call.is_called() => out.content(&(raw + rest)),
            Tagged::Xml(call, raw) if !call.is_called() => out.content(&(raw + rest)),
            Tagged::Header(raw) => out.content(&format!("{KIMI_CALL}{raw}{rest}")),
            Tagged::KimiArguments => out.arguments(rest),
            // The call has gone out, and what would be more of it has not come.
            Tagged::Json(..) | Tagged::Xml(..) | Tagged::Closing | Tagged::Section => {}
            Tagged::Start | Tagged::Content => out.content(rest),
        }
        out.finish(in_reasoning);
    }
}

enum Next {
    State(Tagged),
    Wait(Tagged),
}

use Next::{State, Wait};

/// The marks that begin calls.
fn call_marks(calls: Calls) -> &'static [&'static str] {
    match calls {
        Calls::Hermes | Calls::Xml => &[CALL],
        Calls::Kimi => &[SECTION, KIMI_CALL],
        Calls::Xtml | Calls::Json => &[],
    }
}

/// Behind the mark of [`call_marks`].
fn called(mark: &str) -> Tagged {
    match mark {
        SECTION => Tagged::Section,
        KIMI_CALL => Tagged::Header(String::new()),
        _ => Tagged::Body(String::new()),
    }
}

fn start(calls: Calls, scanner: &mut Scanner, out: &mut Out) -> Next {
    let marks = [&[THINK], call_marks(calls)].concat();
    match scanner.next(&marks) {
        Scan::Nothing => Wait(Tagged::Start),
        Scan::Mark(0) => {
            out.begin();
            State(Tagged::Reasoning)
        }
        Scan::Mark(index) => State(called(marks[index])),
        Scan::Text(text) => {
            let is_space = text.trim().is_empty();
            out.content(&text);
            State(if is_space { Tagged::Start } else { Tagged::Content })
        }
    }
}

fn reasoning(calls: Calls, scanner: &mut Scanner, out: &mut Out) -> Next {
    // Kimi's marks are tokens of their own: a call ends the reasoning too.
    let sections: &[&str] = if calls == Calls::Kimi { call_marks(calls) } else { &[] };
    let marks = [&[THINK_END], sections].concat();
    match scanner.next(&marks) {
        Scan::Nothing => Wait(Tagged::Reasoning),
        Scan::Text(text) => {
            out.reasoning(&text);
            State(Tagged::Reasoning)
        }
        Scan::Mark(index) => {
            out.begin();
            State(if index == 0 { Tagged::Content } else { called(marks[index]) })
        }
    }
}

fn content(calls: Calls, scanner: &mut Scanner, out: &mut Out) -> Next {
    let marks = call_marks(calls);
    match scanner.next(marks) {
        Scan::Nothing => Wait(Tagged::Content),
        Scan::Text(text) => {
            out.content(&text);
            State(Tagged::Content)
        }
        Scan::Mark(index) => State(called(marks[index])),
    }
}

/// Which kind of call begins.
fn body(mut raw: String, scanner: &mut Scanner, out: &mut Out) -> Next {
    match scanner.peek() {
        None => Wait(Tagged::Body(raw)),
        Some('{') => State(Tagged::Json(JsonCall::default(), CALL.to_owned() + &raw)),
        Some('<') => State(Tagged::Xml(Box::default(), CALL.to_owned() + &raw)),
        Some(char) => {
            scanner.next_char();
            raw.push(char);
            if char.is_whitespace() {
                return State(Tagged::Body(raw));
            }
            out.content(&format!("{CALL}{raw}"));
            State(Tagged::Content)
        }
    }
}

fn json(mut call: JsonCall, mut raw: String, scanner: &mut Scanner, out: &mut Out) -> Next {
    while let Some(char) = scanner.next_char() {
        if !call.is_called() {
            raw.push(char);
        }
        match call.push(char, out) {
            Progress::More => {}
            Progress::Done => return State(Tagged::Closing),
            Progress::Broken if call.is_called() => return State(Tagged::Closing),
            Progress::Broken => {
                out.content(&raw);
                return State(Tagged::Content);
            }
        }
    }
    Wait(Tagged::Json(call, raw))
}

fn xml(
    mut call: Box<XmlCall>,
    mut raw: String,
    tools: &[Tool],
    scanner: &mut Scanner,
    out: &mut Out,
) -> Next {
    match call.step(scanner, &mut raw, tools, out) {
        None => Wait(Tagged::Xml(call, raw)),
        Some(Progress::More) => State(Tagged::Xml(call, raw)),
        Some(Progress::Done) => State(Tagged::Closing),
        Some(Progress::Broken) => {
            out.content(&raw);
            State(Tagged::Content)
        }
    }
}

fn closing(scanner: &mut Scanner, out: &mut Out) -> Next {
    match scanner.next(&[CALL_END, CALL]) {
        Scan::Nothing => Wait(Tagged::Closing),
        Scan::Mark(0) => State(Tagged::Content),
        Scan::Mark(_) => State(Tagged::Body(String::new())),
        Scan::Text(text) => {
            out.content(&text);
            State(Tagged::Closing)
        }
    }
}

fn section(scanner: &mut Scanner, out: &mut Out) -> Next {
    match scanner.next(&[KIMI_CALL, SECTION_END, SECTION]) {
        Scan::Nothing => Wait(Tagged::Section),
        Scan::Mark(0) => State(Tagged::Header(String::new())),
        Scan::Mark(1) => State(Tagged::Content),
        Scan::Mark(_) => State(Tagged::Section),
        Scan::Text(text) => {
            out.content(&text);
            State(Tagged::Section)
        }
    }
}

/// `functions.NAME:INDEX`, which as a whole is the model's name for the call.
fn header(mut raw: String, scanner: &mut Scanner, out: &mut Out) -> Next {
    const MARKS: [&str; 4] = [KIMI_ARGUMENTS, KIMI_CALL_END, SECTION_END, KIMI_CALL];
    let mark = match scanner.next(&MARKS) {
        Scan::Nothing => return Wait(Tagged::Header(raw)),
        Scan::Text(text) => {
            raw.push_str(&text);
            return State(Tagged::Header(raw));
        }
        Scan::Mark(mark) => mark,
    };
    let id = raw.trim();
    let name = id.strip_prefix("functions.").unwrap_or(id);
    let name = match name.rsplit_once(':') {
        Some((name, index)) if index.parse::<u32>().is_ok() => name,
        _ => name,
    };
    if mark == 0 && !name.is_empty() {
        out.call(Some(id.to_owned()), name.to_owned());
        return State(Tagged::KimiArguments);
    }
    out.content(&format!("{KIMI_CALL}{raw}"));
    if mark == 3 {
        return State(Tagged::Header(String::new()));
    }
    out.content(MARKS[mark]);
    State(if mark == 2 { Tagged::Content } else { Tagged::Section })
}

fn kimi_arguments(scanner: &mut Scanner, out: &mut Out) -> Next {
    match scanner.next(&[KIMI_CALL_END, SECTION_END, KIMI_CALL]) {
        Scan::Nothing => Wait(Tagged::KimiArguments),
        Scan::Mark(0) => State(Tagged::Section),
        Scan::Mark(1) => State(Tagged::Content),
        Scan::Mark(_) => State(Tagged::Header(String::new())),
        Scan::Text(text) => {
            out.arguments(&text);
            State(Tagged::KimiArguments)
        }
    }
}
