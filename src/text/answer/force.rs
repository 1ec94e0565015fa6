//! Grammars that make a model call a tool, each in the model's own format.
//!
//! A mark that is a token of its own is asked for by its id; text never becomes it.

use std::fmt::Write;

use serde_json::{Map, Value, json};

use super::super::lark::{json_grammar, lark_literal};
use super::tagged::{
    CALL, KIMI_ARGUMENTS, KIMI_CALL, KIMI_CALL_END, SECTION, SECTION_END, THINK, THINK_END,
};
use super::xml_call::{CALL_END, FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END};
use super::xtml::{CLOSE, OPEN, SEP, Xtml};
use super::{AnswerFormat, Calls, Opening, Tool};

/// Most calls of one answer, so that it ends.
const MAX_CALLS: usize = 16;

impl AnswerFormat {
    /// The grammar of answers that call one of `tools`, or `several` times one of them (16 at
    /// most), after the reasoning that the end of `prompt` leaves room for; a named tool is given
    /// alone. It is a text for a request's grammar constraint; schemas are checked when that is
    /// compiled. None without tools.
    pub fn force(&self, tools: &[Tool], several: bool, prompt: &str) -> Option<String> {
        if tools.is_empty() {
            return None;
        }
        let mut grammar = Grammar::new(self);
        let calls: Vec<String> = (0..tools.len()).map(|i| format!("call_{i}")).collect();
        grammar.rule("call", &calls.join(" | "));
        for (i, tool) in tools.iter().enumerate() {
            let body = match self.calls {
                Calls::Json => grammar.object(i, tool),
                Calls::Hermes => grammar.hermes(i, tool),
                Calls::Xml => grammar.xml(i, tool),
                Calls::Kimi => grammar.kimi(i, tool, several),
                Calls::Xtml => grammar.xtml(i, tool, several),
            };
            grammar.rule(&format!("call_{i}"), &body);
        }
        let start = grammar.start(several, prompt);
        Some(format!("start: {start}\n{}", grammar.rules))
    }

    /// The grammar of answers whose content is `content`, the right-hand side of a rule, after the
    /// reasoning that the end of `prompt` leaves room for and within the format's own marks. None
    /// where nothing is to be added: a constraint of the content is one of the answer.
    pub fn enclose(&self, content: &str, prompt: &str) -> Option<String> {
        let mut grammar = Grammar::new(self);
        let start = match self.calls {
            Calls::Xtml => {
                let (end, message) = (grammar.close("response"), grammar.close("message"));
                format!("{} content {end} {message}", grammar.response(prompt))
            }
            _ if self.opening(prompt) == Opening::Content => return None,
            _ => grammar.reasoning(prompt) + "content",
        };
        grammar.rule("content", content);
        Some(format!("start: {start}\n{}", grammar.rules))
    }
}

/// A grammar in the making.
struct Grammar<'a> {
    format: &'a AnswerFormat,
    rules: String,
}

impl Grammar<'_> {
    fn new(format: &AnswerFormat) -> Grammar<'_> {
        Grammar { format, rules: String::new() }
    }

    fn rule(&mut self, name: &str, body: &str) {
        writeln!(self.rules, "{name}: {body}").expect("a string takes all");
    }

    /// A mark: the token if it is one, else its text.
    fn mark(&self, mark: &str) -> String {
        match self.format.tokens.get(mark) {
            Some(id) => format!("<[{id}]>"),
            None => lark_literal(mark),
        }
    }

    fn start(&mut self, several: bool, prompt: &str) -> String {
        let more = if several { MAX_CALLS - 1 } else { 0 };
        let calls = |between: &str| format!("call ({between} call){{0,{more}}}");
        let one_or_more = if several { calls("") } else { "call".to_owned() };
        let lines = if several { calls("\"\\n\"") } else { "call".to_owned() };
        match self.format.calls {
            Calls::Json | Calls::Hermes | Calls::Xml => self.reasoning(prompt) + &lines,
            Calls::Kimi => {
                let (begin, end) = (self.mark(SECTION), self.mark(SECTION_END));
                format!("{}{begin} {one_or_more} {end}", self.reasoning(prompt))
            }
            Calls::Xtml => {
                let before = self.channels(prompt);
                let (open, close) = (self.open("tools"), self.close("tools"));
                format!("{before} {open} {one_or_more} {close} {}", self.close("message"))
            }
        }
    }

    /// What may or must come before the first call, and a space.
    fn reasoning(&mut self, prompt: &str) -> String {
        let opening = self.format.opening(prompt);
        if opening == Opening::Content {
            return String::new();
        }
        self.text_until("reasoning", THINK_END);
        self.rule("SPACE", r"/\n{1,2}/");
        match opening {
            Opening::Reasoning => "reasoning SPACE? ".to_owned(),
            _ => format!("({} reasoning SPACE?)? ", self.mark(THINK)),
        }
    }

    /// A rule for whatever text up to a mark, and the mark.
    fn text_until(&mut self, name: &str, mark: &str) {
        if self.format.tokens.contains_key(mark) {
            let end = self.mark(mark);
            self.rule("TEXT", r"/(.|\n)+/");
            self.rule(name, &format!("TEXT? {end}"));
        } else {
            let name = format!("{name}[suffix={}]", lark_literal(mark));
            self.rule(&name, r"/(.|\n)*/");
        }
    }

    /// A rule for JSON of a schema.
    fn json(&mut self, name: &str, schema: &Value) {
        // What is no schema is left as it is: compiling says what is wrong with it.
        let schema = json_grammar(schema).unwrap_or_else(|_| schema.clone());
        self.rule(name, &format!("%json {schema}"));
    }

    /// A rule for the arguments of a tool as JSON; its name.
    fn arguments(&mut self, i: usize, tool: &Tool) -> String {
        let name = format!("arguments_{i}");
        let any = json!({"type": "object"});
        self.json(&name, tool.parameters.as_ref().unwrap_or(&any));
        name
    }

    fn object(&mut self, i: usize, tool: &Tool) -> String {
        let begin = format!("{{\"name\": {}, \"arguments\": ", Value::from(tool.name.as_str()));
        format!("{} {} \"}}\"", lark_literal(&begin), self.arguments(i, tool))
    }

    fn hermes(&mut self, i: usize, tool: &Tool) -> String {
        let (begin, end) = (self.mark(CALL), self.mark(CALL_END));
        format!("{begin} \"\\n\" {} \"\\n\" {end}", self.object(i, tool))
    }

    fn kimi(&mut self, i: usize, tool: &Tool, several: bool) -> String {
        let id = lark_literal(&format!("functions.{}:", tool.name));
        let index = if several { "/[0-9]{1,2}/" } else { "\"0\"" };
        let (begin, then, end) =
            (self.mark(KIMI_CALL), self.mark(KIMI_ARGUMENTS), self.mark(KIMI_CALL_END));
        format!("{begin} {id} {index} {then} {} {end}", self.arguments(i, tool))
    }

    fn xml(&mut self, i: usize, tool: &Tool) -> String {
        let mut body = format!(
            "{} {}",
            self.mark(CALL),
            lark_literal(&format!("\n{FUNCTION}{}>\n", tool.name))
        );
        for (j, parameter) in parameters(tool).iter().enumerate() {
            let (name, value) = (format!("parameter_{i}_{j}"), format!("value_{i}_{j}"));
            let begin = lark_literal(&format!("{PARAMETER}{}>\n", parameter.key));
            let end = format!("\n{PARAMETER_END}\n");
            let rest = match &parameter.value {
                ParameterValue::Text => {
                    let named = format!("{value}[suffix={}]", lark_literal(&end));
                    self.rule(&named, r"/(.|\n)*/");
                    value
                }
                ParameterValue::Texts(texts) => format!("{} {}", texts, lark_literal(&end)),
                ParameterValue::Json(_, schema) => {
                    self.json(&value, schema);
                    format!("{value} {}", lark_literal(&end))
                }
            };
            self.rule(&name, &format!("{begin} {rest}"));
            write!(body, " {name}{}", parameter.mark()).expect("a string takes all");
        }
        let end = lark_literal(&format!("{FUNCTION_END}\n"));
        format!("{body} {end} {}", self.mark(CALL_END))
    }

    fn xtml(&mut self, i: usize, tool: &Tool, several: bool) -> String {
        let index = if several { "/[0-9]{1,2}/" } else { "\"1\"" };
        let begin = lark_literal(&format!("call tool=\"{}\" index=\"", attribute(&tool.name)));
        let (open, sep) = (self.mark(OPEN), self.mark(SEP));
        let mut body = format!("{open} {begin} {index} \"\\\"\" {sep}");
        let parameters = parameters(tool);
        if parameters.is_empty() {
            let arguments = self.arguments(i, tool);
            let open = self.open("json type=\"object\"");
            write!(body, " {open} {arguments} {}", self.close("json")).expect("a string takes all");
        }
        for (j, parameter) in parameters.iter().enumerate() {
            let (name, value) = (format!("parameter_{i}_{j}"), format!("value_{i}_{j}"));
            let (kind, rest) = match &parameter.value {
                ParameterValue::Text => {
                    self.rule(&value.to_uppercase(), r"/(.|\n)+/");
                    ("string", format!("{}?", value.to_uppercase()))
                }
                ParameterValue::Texts(texts) => ("string", texts.clone()),
                ParameterValue::Json(kind, schema) => {
                    self.json(&value, schema);
                    (*kind, value)
                }
            };
            let key = attribute(&parameter.key);
            let open = self.open(&format!("argument key=\"{key}\" type=\"{kind}\""));
            let close = self.close("argument");
            self.rule(&name, &format!("{open} {rest} {close}"));
            write!(body, " {name}{}", parameter.mark()).expect("a string takes all");
        }
        format!("{body} {}", self.close("call"))
    }

    /// The end of the channel that the prompt has opened.
    fn channels(&mut self, prompt: &str) -> String {
        let place = Xtml::after(prompt);
        match () {
            () if place.is_thinking() => {
                self.rule("TEXT", r"/(.|\n)+/");
                format!("TEXT? {}", self.close("think"))
            }
            () if place.is_responding() => self.close("response"),
            () => String::new(),
        }
    }

    /// What must come before the text of the response.
    fn response(&mut self, prompt: &str) -> String {
        let place = Xtml::after(prompt);
        if place.is_responding() {
            return String::new();
        }
        format!("{} {}", self.channels(prompt), self.open("response"))
    }

    fn open(&self, tag: &str) -> String {
        format!("{} {} {}", self.mark(OPEN), lark_literal(tag), self.mark(SEP))
    }

    fn close(&self, tag: &str) -> String {
        format!("{} {} {}", self.mark(CLOSE), lark_literal(tag), self.mark(SEP))
    }
}

/// A parameter of a tool, for formats that write them one by one.
struct Parameter {
    key: String,
    is_required: bool,
    value: ParameterValue,
}

enum ParameterValue {
    /// Any text, as it is.
    Text,
    /// One of some texts: the alternatives of a grammar.
    Texts(String),
    /// JSON: the name of its type, and its schema.
    Json(&'static str, Value),
}

impl Parameter {
    /// What stands behind its name in a rule.
    fn mark(&self) -> &'static str {
        if self.is_required { "" } else { "?" }
    }
}

fn parameters(tool: &Tool) -> Vec<Parameter> {
    let empty = Map::new();
    let schema = tool.parameters.as_ref().and_then(Value::as_object).unwrap_or(&empty);
    let required = schema.get("required").and_then(Value::as_array);
    let properties = schema.get("properties").and_then(Value::as_object).unwrap_or(&empty);
    let parameter = |(key, value): (&String, &Value)| Parameter {
        key: key.clone(),
        is_required: required.is_some_and(|names| names.iter().any(|name| name == key)),
        value: parameter_value(value, schema),
    };
    properties.iter().map(parameter).collect()
}

fn parameter_value(value: &Value, root: &Map<String, Value>) -> ParameterValue {
    let kind = match value.get("type") {
        Some(Value::Array(kinds)) => kinds.first().and_then(Value::as_str),
        kind => kind.and_then(Value::as_str),
    };
    let is_text = value.get("type").is_some_and(|kind| kind == "string");
    let texts = value.get("enum").and_then(Value::as_array);
    match texts.map(|texts| texts.iter().map(Value::as_str).collect::<Option<Vec<_>>>()) {
        Some(Some(texts)) if !texts.is_empty() => {
            let texts: Vec<String> = texts.into_iter().map(lark_literal).collect();
            return ParameterValue::Texts(format!("({})", texts.join(" | ")));
        }
        None if is_text => return ParameterValue::Text,
        _ => {}
    }
    let kind = match kind {
        Some("integer" | "number") => "number",
        Some("boolean") => "boolean",
        Some("array") => "array",
        Some("null") => "null",
        _ => "object",
    };
    let mut schema = value.clone();
    if let Some(keys) = schema.as_object_mut() {
        // References lead from the root of the tool's schema.
        for defs in ["$defs", "definitions"] {
            if let Some(defined) = root.get(defs) {
                keys.entry(defs).or_insert_with(|| defined.clone());
            }
        }
    }
    ParameterValue::Json(kind, schema)
}

/// A text inside the quotes of a tag.
fn attribute(text: &str) -> String {
    text.replace('&', "&amp;").replace('"', "&quot;")
}
