//! A call in the manner of Qwen3-Coder, behind its `<tool_call>`:
//!
//! ```text
//! <function=NAME>
//! <parameter=KEY>
//! VALUE
//! </parameter>
//! </function>
//! ```
//!
//! Values have no types: the tool's schema says what is a string, and what is no string but is
//! JSON goes out as it is.

use serde::de::IgnoredAny;
use serde_json::Value;

use super::Tool;
use super::json_call::Progress;
use super::out::Out;
use super::scan::{Scan, Scanner};

pub(super) const FUNCTION: &str = "<function=";
pub(super) const FUNCTION_END: &str = "</function>";
pub(super) const PARAMETER: &str = "<parameter=";
pub(super) const PARAMETER_END: &str = "</parameter>";
pub(super) const CALL_END: &str = "</tool_call>";

/// A call in the making.
#[derive(Debug, Default)]
pub(super) struct XmlCall {
    state: State,
    /// What was read of a name or a value.
    text: String,
    /// The properties of the tool's schema.
    properties: Option<Value>,
    key: String,
    parameters: usize,
    is_called: bool,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum State {
    #[default]
    Start,
    Name,
    Between,
    Key,
    Value,
}

impl XmlCall {
    /// Whether the call has gone out.
    pub(super) fn is_called(&self) -> bool {
        self.is_called
    }

    /// Takes what comes next of the text, and adds it to `raw` as long as the call has not gone
    /// out; none when nothing is certain yet.
    pub(super) fn step(
        &mut self,
        scanner: &mut Scanner,
        raw: &mut String,
        tools: &[Tool],
        out: &mut Out,
    ) -> Option<Progress> {
        let marks: &[&str] = match self.state {
            State::Start => &[FUNCTION, CALL_END],
            State::Name | State::Key => &[">", CALL_END],
            State::Between => &[PARAMETER, FUNCTION_END, CALL_END],
            State::Value => &[PARAMETER_END, PARAMETER, FUNCTION_END, CALL_END],
        };
        let mark = match scanner.next(marks) {
            Scan::Nothing => return None,
            Scan::Text(text) => {
                raw.push_str(&text);
                self.text.push_str(&text);
                let is_stray = self.state == State::Start && !text.trim().is_empty();
                return Some(if is_stray { Progress::Broken } else { Progress::More });
            }
            Scan::Mark(index) => marks[index],
        };
        raw.push_str(mark);
        let text = std::mem::take(&mut self.text);
        Some(match (self.state, mark) {
            (State::Start, FUNCTION) => self.go(State::Name),
            (State::Name, ">") if !text.trim().is_empty() => {
                let name = text.trim();
                let tool = tools.iter().find(|tool| tool.name == name);
                let schema = tool.and_then(|tool| tool.parameters.as_ref());
                self.properties = schema.and_then(|schema| schema.get("properties")).cloned();
                out.call(None, name.to_owned());
                self.is_called = true;
                self.go(State::Between)
            }
            (State::Start | State::Name, _) => Progress::Broken,
            (State::Between, PARAMETER) => self.go(State::Key),
            (State::Key, ">") => {
                self.key = text.trim().to_owned();
                self.go(State::Value)
            }
            (State::Value, _) => {
                self.give(&text, out);
                match mark {
                    PARAMETER_END => self.go(State::Between),
                    PARAMETER => self.go(State::Key),
                    _ => self.close(mark, scanner, out),
                }
            }
            (_, mark) => self.close(mark, scanner, out),
        })
    }

    fn go(&mut self, state: State) -> Progress {
        self.state = state;
        Progress::More
    }

    fn close(&mut self, mark: &str, scanner: &mut Scanner, out: &mut Out) -> Progress {
        if mark == CALL_END {
            // It is the end of what this call lies in.
            scanner.put_back(mark);
        }
        out.arguments(if self.parameters == 0 { "{}" } else { "}" });
        Progress::Done
    }

    /// A parameter goes out.
    fn give(&mut self, value: &str, out: &mut Out) {
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        let schema = self.properties.as_ref().map(|all| all.get(&self.key).unwrap_or(&Value::Null));
        let begin = if self.parameters == 0 { "{" } else { ", " };
        let key = Value::from(self.key.as_str());
        out.arguments(&format!("{begin}{key}: {}", typed(value, schema)));
        self.parameters += 1;
    }
}

/// The JSON of a value, as its schema says; without a schema at all, JSON if it is JSON.
fn typed(value: &str, schema: Option<&Value>) -> String {
    let types: Vec<&str> = match schema.and_then(|schema| schema.get("type")) {
        Some(Value::String(name)) => vec![name],
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    let is_text = types == ["string"] || (types.is_empty() && schema.is_some_and(Value::is_null));
    let trimmed = value.trim();
    if types.contains(&"boolean") && matches!(trimmed, "True" | "False") {
        return trimmed.to_ascii_lowercase();
    }
    if !is_text && serde_json::from_str::<IgnoredAny>(trimmed).is_ok() {
        return trimmed.to_owned();
    }
    Value::from(value).to_string()
}
