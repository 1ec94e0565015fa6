//! Grammars that force a call: what the model's format says is allowed to the last token, nothing
//! else is, and what comes out of any walk through the grammar is taken apart into calls again.

use std::sync::Arc;

use deltapool::engine::constraint::{Grammars, Matcher};
use deltapool::request::Constraint;
use deltapool::text::{AnswerFormat, Specials, Tokenizer, Tool};
use serde_json::{Value, json};

use super::{Said, format, parse, said, tools};

struct Forced {
    format: AnswerFormat,
    tokenizer: Arc<Tokenizer>,
    grammars: Grammars,
    stop: u32,
}

impl Forced {
    fn new(name: &str) -> Forced {
        let (format, tokenizer) = format(name);
        let tokenizer = Arc::new(tokenizer);
        let stop = tokenizer.eos().expect("it has one").id;
        let grammars = Grammars::new(Some(Arc::clone(&tokenizer)), &[stop]);
        Forced { format, tokenizer, grammars, stop }
    }

    fn matcher(&self, tools: &[Tool], several: bool, prompt: &str) -> Matcher {
        let grammar = self.format.force(tools, several, prompt).expect("there are tools");
        let matcher = self.grammars.matcher(&Constraint::Grammar(grammar.clone()));
        matcher.unwrap_or_else(|error| panic!("{error}\n{grammar}"))
    }

    /// How much of a text is allowed, and whether the answer may end there.
    fn allowed(&self, matcher: &mut Matcher, text: &str) -> (String, bool) {
        let ids = self.tokenizer.encode(text, Specials::Parse).expect("it encodes");
        let mut taken = Vec::new();
        for id in ids {
            if !matcher.mask().expect("something is allowed").allows(id) {
                return (self.tokenizer.decode_with_specials(&taken), false);
            }
            taken.push(id);
            if matcher.advance(id).expect("it was allowed") {
                return (self.tokenizer.decode_with_specials(&taken), true);
            }
        }
        let may_end = matcher.mask().expect("something is allowed").allows(self.stop);
        (self.tokenizer.decode_with_specials(&taken), may_end)
    }

    /// Walks at random until the answer is complete.
    fn walk(&self, matcher: &mut Matcher, random: &mut u64) -> Option<String> {
        let mut ids = Vec::new();
        for _ in 0..3_000 {
            let mask = matcher.mask().expect("something is allowed");
            let allowed: Vec<u32> =
                (0..self.tokenizer.vocab_size() as u32).filter(|id| mask.allows(*id)).collect();
            *random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let id = allowed[(*random >> 33) as usize % allowed.len()];
            if id == self.stop {
                return Some(self.tokenizer.decode_with_specials(&ids));
            }
            ids.push(id);
            if matcher.advance(id).expect("it was allowed") {
                return Some(self.tokenizer.decode_with_specials(&ids));
            }
        }
        None
    }
}

/// For each format: a prompt's end, an answer that calls, and what it says.
fn examples() -> Vec<(&'static str, &'static str, String, Said)> {
    let arguments = "{\"city\": \"Bern\", \"days\": 3}";
    let call = |id, reasoning: &str| said(reasoning, "", &[(id, "weather", arguments)]);
    let object = format!("{{\"name\": \"weather\", \"arguments\": {arguments}}}");
    let hermes = format!("<tool_call>\n{object}\n</tool_call>");
    let xml = "<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n<parameter=days>\n3\n\
        </parameter>\n</function>\n</tool_call>";
    let kimi = format!(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>\
         {arguments}<|tool_call_end|><|tool_calls_section_end|>"
    );
    let k3 = "<|open|>tools<|sep|><|open|>call tool=\"weather\" index=\"1\"<|sep|><|open|>argument \
        key=\"city\" type=\"string\"<|sep|>Bern<|close|>argument<|sep|><|open|>argument key=\"days\" \
        type=\"number\"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>\
        <|close|>message<|sep|>";
    let (thinks, responds) = ("<|open|>think<|sep|>", "<|open|>response<|sep|>");
    vec![
        ("plain", "", object.clone(), call(None, "")),
        ("think", "<think>\n", format!("So.\n</think>\n\n{object}"), call(None, "So.")),
        ("think", "x", format!("<think>So.</think>{object}"), call(None, "So.")),
        ("think", "x", object.clone(), call(None, "")),
        ("hermes", "<think>\n\n</think>\n\n", hermes.clone(), call(None, "")),
        ("hermes", "assistant\n", hermes.clone(), call(None, "")),
        ("hermes", "assistant\n", format!("<think>\nSo.\n</think>\n\n{hermes}"), call(None, "So.")),
        ("hermes", "<think>\n", format!("So.\n</think>\n\n{hermes}"), call(None, "So.")),
        ("xml", "", xml.to_owned(), call(None, "")),
        ("kimi", "", kimi, call(Some("functions.weather:0"), "")),
        ("k3", thinks, format!("So.<|close|>think<|sep|>{k3}"), call(None, "So.")),
        ("k3", responds, format!("<|close|>response<|sep|>{k3}"), call(None, "")),
    ]
}

#[test]
fn a_call_in_the_models_own_format_is_allowed_to_its_end() {
    for (name, prompt, text, expected) in examples() {
        let forced = Forced::new(name);
        for several in [false, true] {
            let mut matcher = forced.matcher(&tools(), several, prompt);
            let allowed = forced.allowed(&mut matcher, &text);
            assert_eq!(allowed, (text.clone(), true), "{name} {prompt:?}");
        }
        assert_eq!(parse(&forced.format, prompt, true, &[&text]), expected, "{name}");
        // The other tool alone: the name is where it ends.
        let mut matcher = forced.matcher(&tools()[1..], false, prompt);
        let (allowed, may_end) = forced.allowed(&mut matcher, &text);
        assert!(!may_end && !allowed.contains("weather"), "{name}: {allowed}");
    }
}

#[test]
fn what_is_no_call_is_not_allowed() {
    for (name, prompt, text, _) in examples() {
        let forced = Forced::new(name);
        if prompt.is_empty() {
            let mut matcher = forced.matcher(&tools(), false, prompt);
            assert_eq!(forced.allowed(&mut matcher, "Hello"), (String::new(), false), "{name}");
        }
        for (right, wrong) in [("3", "~"), ("days", "dais")] {
            let mut matcher = forced.matcher(&strict(), false, prompt);
            let (allowed, may_end) = forced.allowed(&mut matcher, &text.replace(right, wrong));
            assert!(!may_end && !allowed.contains(wrong), "{name}: {allowed}");
        }
        let mut matcher = forced.matcher(&tools(), false, prompt);
        let (_, may_end) = forced.allowed(&mut matcher, &text[..text.len() - 3]);
        assert!(!may_end, "{name}: an end within the call");
    }
    assert_eq!(AnswerFormat::none().force(&[], true, ""), None);
}

/// A tool whose schema admits nothing else.
fn strict() -> Vec<Tool> {
    let mut tool = tools().remove(0);
    tool.parameters.as_mut().expect("it has them")["additionalProperties"] = false.into();
    vec![tool]
}

#[test]
fn every_walk_through_the_grammar_is_calls_with_arguments_of_the_schema() {
    let schema = json!({
        "type": "object",
        "properties": {
            "unit": {"type": "string", "enum": ["C", "\"F\" & <b>"]},
            "days": {"$ref": "#/$defs/days"},
            "on": {"type": "boolean"},
        },
        "required": ["unit", "days"],
        "additionalProperties": false,
        "$defs": {"days": {"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": 0}, "maxItems": 2}},
    });
    let tool = Tool { name: "fore&cast".to_owned(), description: None, parameters: Some(schema) };
    let mut random = 7;
    for (name, prompt) in [
        ("plain", ""),
        ("hermes", "</think>"),
        ("xml", ""),
        ("kimi", ""),
        ("k3", "<|open|>response<|sep|>"),
    ] {
        let forced = Forced::new(name);
        for several in [false, true] {
            for _ in 0..12 {
                let mut matcher = forced.matcher(std::slice::from_ref(&tool), several, prompt);
                let Some(text) = forced.walk(&mut matcher, &mut random) else {
                    panic!("{name}: it never ends")
                };
                let said = parse(&forced.format, prompt, true, &[&text]);
                assert_eq!((said.content.as_str(), said.reasoning.as_str()), ("", ""), "{text}");
                let calls = if several { 1..=16 } else { 1..=1 };
                assert!(calls.contains(&said.calls.len()), "{name}: {text}");
                for (_, called, arguments) in said.calls {
                    assert_eq!(called, tool.name);
                    let value: Value = serde_json::from_str(&arguments)
                        .unwrap_or_else(|error| panic!("{name}: {error}: {arguments}\n{text}"));
                    assert!(
                        ["C", "\"F\" & <b>"].map(Value::from).contains(&value["unit"]),
                        "{text}"
                    );
                    assert!(value["days"].as_array().is_some_and(|days| days.len() < 3), "{text}");
                }
            }
        }
    }
}

#[test]
fn a_constraint_of_the_content_leaves_room_for_reasoning() {
    for (name, prompt, text) in [
        ("hermes", "<think>\n", "So {\n</think>\n\n[1]"),
        ("hermes", "x", "<think>So.</think>[1]"),
        ("hermes", "x", "[1]"),
        ("think", "<think>\n", "So.</think>[1]"),
        (
            "k3",
            "<|open|>think<|sep|>",
            "So.<|close|>think<|sep|><|open|>response<|sep|>[1]<|close|>response<|sep|><|close|>message<|sep|>",
        ),
        ("k3", "<|open|>response<|sep|>", "[1]<|close|>response<|sep|><|close|>message<|sep|>"),
    ] {
        let forced = Forced::new(name);
        let grammar = forced.format.enclose("\"[\" /[0-9]/ \"]\"", prompt).expect("it is needed");
        let matcher = || {
            let matcher = forced.grammars.matcher(&Constraint::Grammar(grammar.clone()));
            matcher.unwrap_or_else(|error| panic!("{error}\n{grammar}"))
        };
        assert_eq!(forced.allowed(&mut matcher(), text), (text.to_owned(), true), "{name}");
        let (allowed, may_end) = forced.allowed(&mut matcher(), &text.replace("[1]", "[x]"));
        assert!(!may_end && !allowed.contains('x'), "{name}: {allowed}");
        let said = parse(&forced.format, prompt, false, &[text]);
        assert_eq!(said.content, "[1]", "{name}");
    }
    for (name, prompt) in [("plain", ""), ("kimi", ""), ("hermes", "</think>\n\n")] {
        assert_eq!(Forced::new(name).format.enclose("\"a\"", prompt), None);
    }
}
