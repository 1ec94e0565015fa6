//! What begins like a call and is none comes out as content, and nothing panics.

use super::{format, parse, parse_all, said};

#[test]
fn malformed_calls_are_content() {
    for (name, texts) in [
        (
            "hermes",
            &[
                "<tool_call>now()</tool_call>",
                "<tool_call>{\"nam\": \"now\", \"arguments\": {}}</tool_call>",
                "<tool_call>{\"name\": 3, \"arguments\": {}}</tool_call>",
                "<tool_call>{\"name\": \"\", \"arguments\": {}}</tool_call>",
                "<tool_call>{name: \"now\"}</tool_call>",
                "<tool_call>[{\"name\": \"now\"}]</tool_call>",
                "<tool_call>",
                "<tool_call>\n{\"name\": \"now\", \"argu",
                "a <tool_cal",
                "a\n<tool_call>\nb\n",
                "<tool_call><functio",
                "<tool_call><b></tool_call>",
                "<tool_call><function=></function></tool_call>",
                "</tool_call>",
            ][..],
        ),
        (
            "kimi",
            &[
                "<|tool_call_begin|>functions.now:0<|tool_call_end|>",
                "<|tool_call_begin|><|tool_call_argument_begin|>",
                "<|tool_call_begin|>functions.now",
                "a <|tool_call_en",
            ],
        ),
    ] {
        let (format, _) = format(name);
        for text in texts {
            assert_eq!(parse_all(&format, "", false, text), said("", text, &[]), "{name}");
        }
    }
    let (k3, _) = format("k3");
    let text = "<|open|>call index=\"1\"<|sep|>x<|close|>call<|sep|>";
    assert_eq!(parse_all(&k3, "<|open|>response<|sep|>", false, text), said("", text, &[]));
    let (none, _) = format("plain");
    for text in ["Hello", "{\"a\": 1} b", "[]", "{\"name\": \"a\", ", "\"\\"] {
        assert_eq!(parse_all(&none, "", true, text), said("", text, &[]));
    }
}

/// All marks and some text in all orders of five: no panic, and every character of text is said.
#[test]
fn marks_in_any_order_lose_no_text_and_never_panic() {
    let marks = [
        "<tool_call>",
        "</tool_call>",
        "{\"name\": \"now\"",
        ", \"arguments\": {",
        "}",
        "<function=now>",
        "<parameter=a>",
        "</parameter>",
        "</function>",
        "<think>",
        "</think>",
        "~",
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
        "<|open|>",
        "<|close|>",
        "<|sep|>",
        "call tool=\"a\"",
        "argument key=\"b\" type=\"number\"",
        "response",
        "tools",
    ];
    let mut random = 1_u64;
    for name in ["hermes", "kimi", "k3", "plain", "think"] {
        let (format, _) = format(name);
        for round in 0..1_000 {
            let mut text = String::new();
            for _ in 0..2 + round % 8 {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                text.push_str(marks[(random >> 33) as usize % marks.len()]);
            }
            for prompt in ["", "<think>", "<|open|>think<|sep|>"] {
                for forced in [false, true] {
                    let whole = parse(&format, prompt, forced, &[&text]);
                    let chars: Vec<String> = text.chars().map(String::from).collect();
                    let chars: Vec<&str> = chars.iter().map(String::as_str).collect();
                    assert_eq!(parse(&format, prompt, forced, &chars), whole, "{name}: {text}");
                }
            }
        }
    }
}
