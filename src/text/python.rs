//! JSON as Python's `json.dumps` writes it, which is what `tojson` means in a chat template.

use std::fmt::Write;

use serde_json::Value;

/// How `json.dumps` separates, indents and escapes.
pub(super) struct Dumps {
    pub(super) item_separator: String,
    pub(super) key_separator: String,
    /// One level of indentation; `None` writes all on one line.
    pub(super) indent: Option<String>,
    pub(super) ensure_ascii: bool,
    pub(super) sort_keys: bool,
}

impl Dumps {
    /// `json.dumps(value, ...)`.
    pub(super) fn write(&self, value: &Value) -> String {
        let mut out = String::new();
        self.value(value, 0, &mut out);
        out
    }

    fn value(&self, value: &Value, depth: usize, out: &mut String) {
        match value {
            Value::Null => out.push_str("null"),
            Value::Bool(flag) => out.push_str(if *flag { "true" } else { "false" }),
            Value::Number(number) => out.push_str(&number_text(number)),
            Value::String(text) => self.string(text, out),
            Value::Array(items) => {
                self.sequence(('[', ']'), items.iter(), depth, out, |item, out| {
                    self.value(item, depth + 1, out);
                });
            }
            Value::Object(entries) => {
                let mut entries: Vec<(&String, &Value)> = entries.iter().collect();
                if self.sort_keys {
                    entries.sort_by_key(|(key, _)| *key);
                }
                self.sequence(('{', '}'), entries.into_iter(), depth, out, |(key, item), out| {
                    self.string(key, out);
                    out.push_str(&self.key_separator);
                    self.value(item, depth + 1, out);
                });
            }
        }
    }

    fn sequence<T>(
        &self,
        (open, close): (char, char),
        items: impl ExactSizeIterator<Item = T>,
        depth: usize,
        out: &mut String,
        mut write: impl FnMut(T, &mut String),
    ) {
        let is_empty = items.len() == 0;
        let new_line = |depth: usize, out: &mut String| {
            if let (Some(indent), false) = (&self.indent, is_empty) {
                out.push('\n');
                out.push_str(&indent.repeat(depth));
            }
        };
        out.push(open);
        for (index, item) in items.enumerate() {
            if index > 0 {
                out.push_str(&self.item_separator);
            }
            new_line(depth + 1, out);
            write(item, out);
        }
        new_line(depth, out);
        out.push(close);
    }

    fn string(&self, text: &str, out: &mut String) {
        out.push('"');
        for char in text.chars() {
            match char {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{C}' => out.push_str("\\f"),
                '\0'..='\u{1F}' => push_units(char, out),
                '\u{7F}'.. if self.ensure_ascii => push_units(char, out),
                _ => out.push(char),
            }
        }
        out.push('"');
    }
}

/// The `\uXXXX` escapes of a character, two of them beyond U+FFFF.
fn push_units(char: char, out: &mut String) {
    for unit in char.encode_utf16(&mut [0; 2]) {
        write!(out, "\\u{unit:04x}").expect("a String takes all writes");
    }
}

/// Integers as they are; floats with the fewest digits that read back, in Python's layout.
fn number_text(number: &serde_json::Number) -> String {
    match number.as_f64() {
        Some(float) if number.is_f64() => float_text(float),
        _ => number.to_string(),
    }
}

fn float_text(float: f64) -> String {
    let scientific = format!("{float:e}");
    let (mantissa, exponent) = scientific.split_once('e').expect("{:e} writes an exponent");
    let exponent: i32 = exponent.parse().expect("{:e} writes a whole exponent");
    if (-4..16).contains(&exponent) {
        // `{:?}` would leave this range earlier, at 1e-5; `{}` leaves it never.
        let plain = format!("{float}");
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{mantissa}e{sign}{:02}", exponent.abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dumps(indent: Option<&str>, ensure_ascii: bool, sort_keys: bool) -> Dumps {
        let item_separator = if indent.is_some() { "," } else { ", " }.to_owned();
        let indent = indent.map(str::to_owned);
        Dumps { item_separator, key_separator: ": ".to_owned(), indent, ensure_ascii, sort_keys }
    }

    #[test]
    fn json_equals_that_of_python() {
        let value: Value = serde_json::from_str(
            r#"{"b":[1,2.5,[],{}],"a":{"<é>":"\"\\\n\t\u0001\u007f😀","n":null,"t":true}}"#,
        )
        .expect("valid JSON");
        // From `json.dumps(value, ensure_ascii=False)` and so on.
        assert_eq!(
            dumps(None, false, false).write(&value),
            "{\"b\": [1, 2.5, [], {}], \"a\": {\"<é>\": \"\\\"\\\\\\n\\t\\u0001\u{7f}😀\", \
             \"n\": null, \"t\": true}}"
        );
        assert_eq!(
            dumps(None, true, true).write(&value),
            "{\"a\": {\"<\\u00e9>\": \"\\\"\\\\\\n\\t\\u0001\\u007f\\ud83d\\ude00\", \
             \"n\": null, \"t\": true}, \"b\": [1, 2.5, [], {}]}"
        );
        let value = serde_json::json!({"a": [1, {"b": []}], "c": {}});
        assert_eq!(
            dumps(Some("  "), false, false).write(&value),
            "{\n  \"a\": [\n    1,\n    {\n      \"b\": []\n    }\n  ],\n  \"c\": {}\n}"
        );
    }

    #[test]
    fn floats_equal_those_of_python() {
        for (float, expected) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (-1.25e-7, "-1.25e-07"),
            (123_456.789, "123456.789"),
        ] {
            assert_eq!(float_text(float), expected);
        }
    }
}
