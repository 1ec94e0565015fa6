//! Kimi K3's format: channels between tags of control tokens.
//!
//! ```text
//! <|open|>think<|sep|>REASONING<|close|>think<|sep|>
//! <|open|>response<|sep|>CONTENT<|close|>response<|sep|>
//! <|open|>tools<|sep|>
//!   <|open|>call tool="NAME" index="1"<|sep|>
//!     <|open|>argument key="KEY" type="string"<|sep|>VALUE<|close|>argument<|sep|>
//!   <|close|>call<|sep|>
//! <|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>
//! ```
//!
//! An argument of type `string` is text as it is, any other is JSON; arguments may also come whole,
//! as `<|open|>json type="object"<|sep|>...`. Attributes are escaped as in HTML: `&quot;`, `&amp;`.
//! Line breaks are of this page only.

use serde::de::IgnoredAny;
use serde_json::Value;

use super::out::Out;
use super::scan::{Scan, Scanner};

pub(super) const OPEN: &str = "<|open|>";
pub(super) const CLOSE: &str = "<|close|>";
pub(super) const SEP: &str = "<|sep|>";
const END: &str = "<|end_of_msg|>";

/// Where the text is.
#[derive(Debug)]
pub(super) struct Xtml {
    place: Place,
    /// A tag in the making: whether it opens, and what was read of it.
    tag: Option<(bool, String)>,
    /// Arguments of the open call that have gone out.
    given: usize,
}

#[derive(Debug, PartialEq, Eq)]
enum Place {
    Outside,
    Think,
    Response,
    Tools,
    Call,
    /// In an argument that is text.
    Text,
    /// In one that is not; what was read of it.
    Json(String),
    /// In all arguments at once.
    Whole,
    /// Behind them.
    Given,
}

impl Xtml {
    /// Where an answer begins whose prompt ends so.
    pub(super) fn after(prompt: &str) -> Xtml {
        let opens = |name: &str| prompt.ends_with(&format!("{OPEN}{name}{SEP}"));
        let place = match () {
            () if opens("think") => Place::Think,
            () if opens("response") => Place::Response,
            () => Place::Outside,
        };
        Xtml { place, tag: None, given: 0 }
    }

    /// Whether it is in reasoning.
    pub(super) fn is_thinking(&self) -> bool {
        self.place == Place::Think
    }

    /// Whether the answer begins in its content.
    pub(super) fn is_responding(&self) -> bool {
        self.place == Place::Response
    }

    /// Takes what comes next; false when nothing is certain yet.
    pub(super) fn step(&mut self, scanner: &mut Scanner, out: &mut Out) -> bool {
        const MARKS: [&str; 4] = [OPEN, CLOSE, SEP, END];
        match (scanner.next(&MARKS), self.tag.take()) {
            (Scan::Nothing, tag) => {
                self.tag = tag;
                return false;
            }
            (Scan::Text(text), Some((opens, tag))) => self.tag = Some((opens, tag + &text)),
            (Scan::Text(text), None) => self.say(&text, out),
            (Scan::Mark(2), Some((opens, tag))) => self.take_tag(opens, &tag, out),
            (Scan::Mark(mark), tag) => {
                if let Some((opens, tag)) = tag {
                    self.say_tag(opens, &tag, "", out);
                }
                if mark < 2 {
                    self.tag = Some((mark == 0, String::new()));
                }
            }
        }
        true
    }

    /// The end of the text; `rest` is what might have become a mark. A tag that was cut short says
    /// nothing: its marks are tokens and no text.
    pub(super) fn finish(mut self, rest: &str, out: &mut Out) {
        if self.tag.is_none() {
            self.say(rest, out);
        }
        out.finish(true);
    }

    fn say(&mut self, text: &str, out: &mut Out) {
        match &mut self.place {
            Place::Think => out.exact_reasoning(text),
            Place::Response => out.exact(text),
            Place::Text => out.arguments(&escaped(text)),
            Place::Json(value) => value.push_str(text),
            Place::Whole => out.arguments(text),
            Place::Outside | Place::Tools | Place::Call | Place::Given => out.content(text),
        }
    }

    /// A tag that means nothing here is text.
    fn say_tag(&mut self, opens: bool, tag: &str, end: &str, out: &mut Out) {
        let mark = if opens { OPEN } else { CLOSE };
        self.say(&format!("{mark}{tag}{end}"), out);
    }

    fn take_tag(&mut self, opens: bool, tag: &str, out: &mut Out) {
        let name = tag.split_whitespace().next().unwrap_or_default();
        match (opens, name, &self.place) {
            (true, "think", _) => self.place = Place::Think,
            (true, "response", _) => self.place = Place::Response,
            (true, "message", _) | (false, "message" | "think" | "response" | "tools", _) => {
                out.begin();
                self.place = Place::Outside;
            }
            (true, "tools", _) => self.place = Place::Tools,
            (true, "call", Place::Outside | Place::Tools) if attribute(tag, "tool").is_some() => {
                out.call(None, attribute(tag, "tool").unwrap_or_default());
                (self.place, self.given) = (Place::Call, 0);
            }
            (true, "argument", Place::Call) => self.open_argument(tag, out),
            (true, "json", Place::Call) if self.given == 0 => self.place = Place::Whole,
            (false, "argument", Place::Text) => {
                out.arguments("\"");
                self.place = Place::Call;
            }
            (false, "argument", Place::Json(value)) => {
                let is_json = serde_json::from_str::<IgnoredAny>(value).is_ok();
                let quoted = || Value::from(value.as_str()).to_string();
                out.arguments(&if is_json { value.trim().to_owned() } else { quoted() });
                self.place = Place::Call;
            }
            (false, "json", Place::Whole) => self.place = Place::Given,
            (false, "call", Place::Call | Place::Given) => {
                if self.place == Place::Call {
                    out.arguments(if self.given == 0 { "{}" } else { "}" });
                }
                self.place = Place::Tools;
            }
            _ => self.say_tag(opens, tag, SEP, out),
        }
    }

    fn open_argument(&mut self, tag: &str, out: &mut Out) {
        let key = Value::from(attribute(tag, "key").unwrap_or_default());
        let begin = if self.given == 0 { "{" } else { ", " };
        out.arguments(&format!("{begin}{key}: "));
        self.given += 1;
        self.place = match attribute(tag, "type").as_deref() {
            None | Some("string") => {
                out.arguments("\"");
                Place::Text
            }
            Some(_) => Place::Json(String::new()),
        };
    }
}

/// The value of ` key="value"` in a tag.
fn attribute(tag: &str, key: &str) -> Option<String> {
    let (_, rest) = tag.split_once(&format!(" {key}=\""))?;
    let (value, _) = rest.split_once('"')?;
    let value = value.replace("&quot;", "\"").replace("&amp;", "&");
    (!value.is_empty()).then_some(value)
}

/// Text as it stands inside a JSON string.
fn escaped(text: &str) -> String {
    let quoted = Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}
