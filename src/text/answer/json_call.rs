//! A call written as a JSON object: `{"name": "f", "arguments": {...}}`, character by character.
//!
//! The arguments go out while they are written, as they are written: their end is where brackets
//! and quotes say, so a mark of the format inside a string is part of it. Until they begin nothing
//! has gone out, and what turns out to be no call can still become content.

use serde_json::Value;

use super::out::Out;

/// Where a call is.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// It goes on.
    More,
    /// The object is closed.
    Done,
    /// This is no such object; the character that says so has been taken.
    Broken,
}

/// A call in the making.
#[derive(Debug, Default)]
pub(super) struct JsonCall {
    state: State,
    key: String,
    value: RawValue,
    name: Option<String>,
    id: Option<String>,
    /// Arguments that came before the name.
    early: Option<String>,
    is_called: bool,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum State {
    #[default]
    Start,
    BeforeKey,
    Key,
    AfterKey,
    BeforeValue,
    Value,
    AfterValue,
}

/// A JSON value as it is written.
#[derive(Debug, Default)]
struct RawValue {
    text: String,
    first: Option<char>,
    depth: usize,
    in_string: bool,
    is_escaped: bool,
}

impl JsonCall {
    /// Whether the call has gone out: what follows cannot make it content any more.
    pub(super) fn is_called(&self) -> bool {
        self.is_called
    }

    /// Takes the next character.
    pub(super) fn push(&mut self, char: char, out: &mut Out) -> Progress {
        let is_space = char.is_ascii_whitespace();
        match (self.state, char) {
            (State::Key, _) => {
                if self.value.push(char) {
                    self.key = decoded(&std::mem::take(&mut self.value.text)).unwrap_or_default();
                    self.state = State::AfterKey;
                }
            }
            (State::Value, _) => return self.push_value(char, out),
            (_, _) if is_space => {}
            (State::Start, '{') => self.state = State::BeforeKey,
            (State::BeforeKey, '"') => {
                self.value = RawValue::default();
                self.value.push(char);
                self.state = State::Key;
            }
            (State::AfterKey, ':') => self.state = State::BeforeValue,
            (State::BeforeValue, _) if !matches!(char, ',' | '}' | ']' | ':') => {
                self.value = RawValue::default();
                self.state = State::Value;
                return self.push_value(char, out);
            }
            (State::AfterValue, ',') => self.state = State::BeforeKey,
            (State::AfterValue, '}') => return self.close(out),
            _ => return Progress::Broken,
        }
        Progress::More
    }

    fn push_value(&mut self, char: char, out: &mut Out) -> Progress {
        // A number or a word ends with what does not belong to it.
        if self.value.is_bare() && (char.is_ascii_whitespace() || matches!(char, ',' | '}' | ']')) {
            self.end_value(out);
            return self.push(char, out);
        }
        let is_end = self.value.push(char);
        if self.is_arguments() && self.name.is_some() && self.value.is_nested() {
            self.begin(out);
            out.arguments(&std::mem::take(&mut self.value.text));
        }
        if is_end {
            self.end_value(out);
        }
        Progress::More
    }

    fn is_arguments(&self) -> bool {
        matches!(self.key.as_str(), "arguments" | "parameters")
    }

    fn end_value(&mut self, out: &mut Out) {
        self.state = State::AfterValue;
        let text = std::mem::take(&mut self.value.text);
        match self.key.as_str() {
            "name" => self.name = decoded(&text).filter(|name| !name.is_empty()),
            "id" => self.id = decoded(&text),
            "arguments" | "parameters" if !text.is_empty() => {
                // Some models write the object as a string once more.
                let arguments = decoded(&text).unwrap_or(text);
                let arguments = if arguments == "null" { "{}".to_owned() } else { arguments };
                if self.name.is_some() {
                    self.begin(out);
                    out.arguments(&arguments);
                } else {
                    self.early = Some(arguments);
                }
            }
            _ => {}
        }
    }

    /// The call goes out.
    fn begin(&mut self, out: &mut Out) {
        if !self.is_called {
            let name = self.name.clone().unwrap_or_default();
            out.call(self.id.take(), name);
            self.is_called = true;
        }
    }

    fn close(&mut self, out: &mut Out) -> Progress {
        if self.is_called {
            return Progress::Done;
        }
        if self.name.is_none() {
            return Progress::Broken;
        }
        self.begin(out);
        out.arguments(self.early.as_deref().unwrap_or("{}"));
        Progress::Done
    }
}

impl RawValue {
    /// Takes a character; whether the value ends with it, which a number or a word never does.
    fn push(&mut self, char: char) -> bool {
        self.text.push(char);
        self.first.get_or_insert(char);
        if self.in_string {
            match char {
                _ if self.is_escaped => self.is_escaped = false,
                '\\' => self.is_escaped = true,
                '"' => self.in_string = false,
                _ => {}
            }
            return !self.in_string && self.depth == 0;
        }
        match char {
            '"' => self.in_string = true,
            '{' | '[' => self.depth += 1,
            '}' | ']' => {
                self.depth = self.depth.saturating_sub(1);
                return self.depth == 0;
            }
            _ => {}
        }
        false
    }

    /// An object or an array.
    fn is_nested(&self) -> bool {
        matches!(self.first, Some('{' | '['))
    }

    /// A number or a word.
    fn is_bare(&self) -> bool {
        self.first.is_some_and(|first| !matches!(first, '"' | '{' | '['))
    }
}

/// The text of a JSON string; none when it is something else.
fn decoded(text: &str) -> Option<String> {
    match serde_json::from_str(text) {
        Ok(Value::String(text)) => Some(text),
        _ => None,
    }
}
