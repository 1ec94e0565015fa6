//! From what a model writes to reasoning, content and calls: each format by examples, every cut of
//! each, what is malformed, and the grammars that force a call.

#[path = "answers/force.rs"]
mod force;
#[path = "answers/malformed.rs"]
mod malformed;

use std::path::Path;

use deltapool::text::{
    AnswerFormat, AnswerParser, ChatTemplate, Piece, TextFiles, Tokenizer, Tool,
};
use serde_json::{Value, json};

/// What the pieces of an answer make when they are joined.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Said {
    reasoning: String,
    content: String,
    calls: Vec<(Option<String>, String, String)>,
}

impl Said {
    fn add(&mut self, pieces: Vec<Piece>) {
        for piece in pieces {
            match piece {
                Piece::Reasoning(text) => self.reasoning.push_str(&text),
                Piece::Content(text) => self.content.push_str(&text),
                Piece::Call { index, id, name } => {
                    assert_eq!(index, self.calls.len(), "calls are counted");
                    self.calls.push((id, name, String::new()));
                }
                Piece::Arguments { index, text } => {
                    assert_eq!(index + 1, self.calls.len(), "arguments of the last call");
                    self.calls[index].2.push_str(&text);
                }
            }
        }
    }
}

/// A format, made of the goldens' files.
fn format(name: &str) -> (AnswerFormat, Tokenizer) {
    let golden = |name: &str| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/tokenizers");
        TextFiles::read(&folder.join(name)).expect("the folder is there")
    };
    let (template, files) = match name {
        "kimi" | "llama3" => (None, golden(name)),
        "hermes" => (None, golden("qwen")),
        "xml" => (Some("{{ '<tool_call> <function=' }}"), golden("qwen")),
        "plain" => (Some("{{ messages }}"), golden("llama3")),
        "think" => (Some("{{ '</think>' }}"), golden("llama3")),
        "k3" => {
            let mut files = golden("kimi");
            let config = files.tokenizer_config.take().expect("it has one");
            let mut config: Value = serde_json::from_slice(&config).expect("JSON");
            for (id, content) in [
                ("531", "<|open|>"),
                ("532", "<|close|>"),
                ("533", "<|sep|>"),
                ("534", "<|end_of_msg|>"),
            ] {
                config["added_tokens_decoder"][id] = json!({"content": content, "special": true});
            }
            files.tokenizer_config = Some(config.to_string().into_bytes().into());
            files.tokenizer_json = None;
            (None, files)
        }
        _ => panic!("{name}"),
    };
    let mut files = files;
    if let Some(source) = template {
        files.chat_template = Some(source.as_bytes().into());
    }
    let tokenizer = Tokenizer::from_files(&files).expect("it loads");
    let template = ChatTemplate::from_files(&files).expect("it compiles");
    (AnswerFormat::detect(Some(&template), Some(&tokenizer)), tokenizer)
}

fn tools() -> Vec<Tool> {
    let weather = json!({
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "unit": {"enum": ["C", "F"]},
        },
        "required": ["city"],
    });
    let tool =
        |name: &str, parameters| Tool { name: name.to_owned(), description: None, parameters };
    vec![tool("weather", Some(weather)), tool("now", None)]
}

fn parse(format: &AnswerFormat, prompt: &str, forced: bool, pieces: &[&str]) -> Said {
    let mut parser = AnswerParser::new(format, &tools(), prompt, forced);
    let mut said = Said::default();
    for piece in pieces {
        said.add(parser.push(piece));
    }
    said.add(parser.finish());
    said
}

/// Parses a text whole, cut at each place and at each pair of places, and character by character;
/// all must say the same.
fn parse_all(format: &AnswerFormat, prompt: &str, forced: bool, text: &str) -> Said {
    let whole = parse(format, prompt, forced, &[text]);
    let cuts: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
    for (i, &first) in cuts.iter().enumerate() {
        // All pairs of a long text are many: every seventh will do.
        for &second in cuts[i..].iter().step_by(if text.len() > 150 { 7 } else { 1 }) {
            let pieces = [&text[..first], &text[first..second], &text[second..]];
            assert_eq!(parse(format, prompt, forced, &pieces), whole, "{pieces:?}");
        }
    }
    let chars: Vec<&str> = cuts.windows(2).map(|cut| &text[cut[0]..cut[1]]).collect();
    assert_eq!(parse(format, prompt, forced, &chars), whole, "{text}");
    whole
}

fn said(reasoning: &str, content: &str, calls: &[(Option<&str>, &str, &str)]) -> Said {
    let owned = |(id, name, arguments): &(Option<&str>, &str, &str)| {
        (id.map(str::to_owned), (*name).to_owned(), (*arguments).to_owned())
    };
    Said {
        reasoning: reasoning.to_owned(),
        content: content.to_owned(),
        calls: calls.iter().map(owned).collect(),
    }
}

#[test]
fn formats_are_found_in_template_and_vocabulary() {
    for (name, reasons, calls, specials) in [
        ("kimi", false, true, true),
        ("hermes", true, true, false),
        ("xml", false, true, false),
        ("k3", true, true, true),
        ("llama3", false, false, false),
        ("plain", false, false, false),
        ("think", true, false, false),
    ] {
        let (format, _) = format(name);
        let found = (format.has_reasoning(), format.has_calls(), format.shows_specials());
        assert_eq!(found, (reasons, calls, specials), "{name}: {format:?}");
    }
    assert_eq!(AnswerFormat::detect(None, None), AnswerFormat::none());
}

#[test]
fn kimi_calls_stand_in_their_section() {
    let (format, _) = format("kimi");
    let text = "Let me see.\n<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0\
        <|tool_call_argument_begin|>{\"city\": \"Bern <|x|>\"}<|tool_call_end|><|tool_call_begin|>\
        functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>";
    let calls = [
        (Some("functions.weather:0"), "weather", "{\"city\": \"Bern <|x|>\"}"),
        (Some("functions.now:1"), "now", "{}"),
    ];
    assert_eq!(parse_all(&format, "", false, text), said("", "Let me see.", &calls));
    // A text that the budget cuts off says what it has said.
    let cut = &text[..text.find("Bern").expect("it is there")];
    let begun = [(Some("functions.weather:0"), "weather", "{\"city\": \"")];
    assert_eq!(parse_all(&format, "", false, cut), said("", "Let me see.", &begun));
    // Names other than OpenAI's are taken as they are.
    let text = "<|tool_call_begin|>a.b:c<|tool_call_argument_begin|>[1]<|tool_call_end|> Done.";
    let calls = [(Some("a.b:c"), "a.b:c", "[1]")];
    assert_eq!(parse_all(&format, "", false, text), said("", " Done.", &calls));
}

#[test]
fn hermes_calls_are_json_between_tags() {
    let (format, _) = format("hermes");
    let text = "<think>\nWhich city?\n\n</think>\n\nI look.\n<tool_call>\n{\"name\": \"weather\", \
        \"arguments\": {\"city\": \"a\\\"</tool_call>{\", \"days\": [1, {}]}}\n</tool_call>\n<tool_call>\n\
        {\"arguments\": {}, \"name\": \"now\", \"id\": \"x1\"}\n</tool_call>\n";
    let calls = [
        (None, "weather", "{\"city\": \"a\\\"</tool_call>{\", \"days\": [1, {}]}"),
        (Some("x1"), "now", "{}"),
    ];
    assert_eq!(parse_all(&format, "", false, text), said("Which city?", "I look.", &calls));
    for (arguments, expected) in [
        ("\"{\\\"a\\\": 1}\"", "{\"a\": 1}"),
        ("null", "{}"),
        ("7", "7"),
        ("{\"é\": \"🙂\"}", "{\"é\": \"🙂\"}"),
    ] {
        let text =
            format!("<tool_call>{{\"name\":\"now\",\"arguments\":{arguments}}}</tool_call>Ok");
        let expected = said("", "Ok", &[(None, "now", expected)]);
        assert_eq!(parse_all(&format, "", false, &text), expected);
    }
    let text = "<tool_call>{\"name\": \"now\"}</tool_call>";
    assert_eq!(parse_all(&format, "", false, text), said("", "", &[(None, "now", "{}")]));
}

#[test]
fn reasoning_is_open_or_closed_as_the_prompt_says() {
    let (format, _) = format("hermes");
    for (prompt, text, reasoning, content) in [
        ("<|im_start|>assistant\n<think>\n", "So.\n</think>\n\nYes.", "So.", "Yes."),
        ("<think>\n\n</think>\n\n", "Yes.", "", "Yes."),
        ("<think>\n\n</think>\n\n", "a <think> b", "", "a <think> b"),
        ("assistant\n", "\n<think>So.</think>Yes.", "So.", "Yes."),
        ("assistant\n", " Yes. <think>", "", " Yes. <think>"),
        ("<think>old</think> question <|im_end|>", "<think>So.", "So.", ""),
        ("<think>", "So </thin", "So </thin", ""),
        ("<think>", " <b> </think> \n x \n", "<b>", "x \n"),
    ] {
        let expected = said(reasoning, content, &[]);
        assert_eq!(parse_all(&format, prompt, false, text), expected, "{prompt:?} {text:?}");
    }
    let (think, _) = self::format("think");
    let text = "So. <tool_call></think> Yes. <tool_call>{}";
    assert_eq!(
        parse_all(&think, "<think>\n", false, text),
        said("So. <tool_call>", "Yes. <tool_call>{}", &[])
    );
}

#[test]
fn xml_parameters_become_json_of_their_types() {
    let (format, _) = format("xml");
    let text = "I look.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nNew \"York\"\n\n</parameter>\n\
        <parameter=days>\n3\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n<parameter=unit>\nC\n\
        </parameter>\n<parameter=note>\n12\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n\
        <function=now>\n</function>\n</tool_call>";
    let arguments = "{\"city\": \"New \\\"York\\\"\\n\", \"days\": 3, \"exact\": true, \"unit\": \"C\", \
        \"note\": \"12\"}";
    let calls = [(None, "weather", arguments), (None, "now", "{}")];
    assert_eq!(parse_all(&format, "", false, text), said("", "I look.", &calls));
    serde_json::from_str::<Value>(arguments).expect("JSON");
    // Ends that were forgotten, and a tool that nobody knows.
    let text = "<tool_call><function=other><parameter=a>\n{\"b\": 1}\n<parameter=c>x</function></tool_call>";
    let calls = [(None, "other", "{\"a\": {\"b\": 1}, \"c\": \"x\"}")];
    assert_eq!(parse_all(&format, "", false, text), said("", "", &calls));
    let text = "<tool_call><function=now><parameter=a>5</tool_call>Then.";
    assert_eq!(
        parse_all(&format, "", false, text),
        said("", "Then.", &[(None, "now", "{\"a\": 5}")])
    );
}

#[test]
fn channels_of_k3_are_told_apart() {
    let (format, _) = format("k3");
    let call = "<|open|>tools<|sep|><|open|>call tool=\"weather\" index=\"1\"<|sep|>\
        <|open|>argument key=\"ci&quot;ty\" type=\"string\"<|sep|>New \"York\"\n<|close|>argument<|sep|>\
        <|open|>argument key=\"days\" type=\"number\"<|sep|>3<|close|>argument<|sep|>\
        <|open|>argument key=\"list\" type=\"array\"<|sep|>[1, oops<|close|>argument<|sep|>\
        <|close|>call<|sep|><|open|>call tool=\"now\" index=\"2\"<|sep|><|close|>call<|sep|>\
        <|open|>call tool=\"now\" index=\"3\"<|sep|><|open|>json type=\"object\"<|sep|>{\"a\": 1}\
        <|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>";
    let arguments = "{\"ci\\\"ty\": \"New \\\"York\\\"\\n\", \"days\": 3, \"list\": \"[1, oops\"}";
    let calls = [(None, "weather", arguments), (None, "now", "{}"), (None, "now", "{\"a\": 1}")];
    let think = "message role=\"assistant\"<|sep|><|open|>think<|sep|>";
    let text = format!(
        "So <b>.\n<|close|>think<|sep|><|open|>response<|sep|> I look.\n<|close|>response<|sep|>{call}"
    );
    assert_eq!(parse_all(&format, think, false, &text), said("So <b>.\n", " I look.\n", &calls));
    let respond = "message role=\"assistant\"<|sep|><|open|>response<|sep|>";
    let text = "Yes.<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>";
    assert_eq!(parse_all(&format, respond, false, text), said("", "Yes.", &[]));
    let cut = "Yes.<|close|>resp";
    assert_eq!(parse_all(&format, respond, false, cut), said("", "Yes.", &[]));
}

#[test]
fn a_model_without_a_format_says_content_unless_it_is_forced() {
    let format = AnswerFormat::none();
    let text = " {\"name\": \"now\", \"arguments\": {}}\n<think> <tool_call>\n";
    assert_eq!(parse_all(&format, "<think>", false, text), said("", text, &[]));
    let text = "{\"name\": \"now\", \"arguments\": {\"a\": [\"}\"]}}\n{\"name\": \"b\", \"arguments\": {}}\n";
    let calls = [(None, "now", "{\"a\": [\"}\"]}"), (None, "b", "{}")];
    assert_eq!(parse_all(&format, "", true, text), said("", "", &calls));
}

#[test]
fn without_tools_nothing_is_a_call() {
    let (format, _) = format("hermes");
    let mut parser = AnswerParser::new(&format, &[], "", false);
    let mut all = Said::default();
    let text = "<think>a</think><tool_call>{\"name\": \"now\", \"arguments\": {}}</tool_call>";
    all.add(parser.push(text));
    all.add(parser.finish());
    assert_eq!(all, said("a", &text["<think>a</think>".len()..], &[]));
}
