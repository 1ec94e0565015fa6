//! Refuses constraints that intersect many patterns.
//!
//! Whether a text can match all of several regular expressions costs time and memory exponential
//! in their number, and the library's limits see that only when it is done. So the number is
//! bounded before it begins: counted from the text, rather too high than too low.

use serde_json::{Deserializer, Value};

/// Most patterns that may be intersected.
const MAX_PATTERNS: usize = 8;

/// Keys of a schema beside `$ref` that say nothing about the value.
const NOTES: [&str; 8] =
    ["$ref", "$defs", "definitions", "$schema", "$comment", "title", "description", "default"];

/// Refuses a schema whose parts are merged, if there are many patterns that could meet.
pub(super) fn check_schema(schema: &Value) -> Result<(), String> {
    let mut found = Found::default();
    found.look(schema);
    if found.merges && found.patterns > MAX_PATTERNS {
        return Err(format!(
            "{} patterns and formats in a schema that intersects some of them (allOf, or a key \
             beside $ref, anyOf or oneOf), allowed: {MAX_PATTERNS}",
            found.patterns
        ));
    }
    Ok(())
}

/// Refuses a grammar with many of the operators `&` and `~`, or with a schema that is refused.
pub(super) fn check_grammar(text: &str) -> Result<(), String> {
    let mut rest = text;
    while let Some((_, after)) = rest.split_once("%json") {
        rest = after;
        if let Some(Ok(schema)) = Deserializer::from_str(after).into_iter::<Value>().next() {
            check_schema(&schema)?;
        }
    }
    let operators = operators(text);
    if operators > MAX_PATTERNS {
        return Err(format!("{operators} operators & and ~, allowed: {MAX_PATTERNS}"));
    }
    Ok(())
}

#[derive(Debug, Default)]
struct Found {
    patterns: usize,
    merges: bool,
}

impl Found {
    fn look(&mut self, value: &Value) {
        match value {
            Value::Array(values) => values.iter().for_each(|value| self.look(value)),
            Value::Object(keys) => {
                let is_pattern = |key: &str| matches!(key, "pattern" | "format");
                let own = keys.keys().filter(|key| is_pattern(key)).count();
                let has = |key: &str| keys.contains_key(key);
                let beside_ref = keys.keys().any(|key| !NOTES.contains(&key.as_str()));
                self.patterns += own;
                self.merges |= has("allOf")
                    || (has("$ref") && beside_ref)
                    || (own > 0 && (has("anyOf") || has("oneOf")));
                keys.values().for_each(|value| self.look(value));
            }
            _ => {}
        }
    }
}

/// Operators `&` and `~` of a grammar, outside of literals, expressions and comments.
fn operators(text: &str) -> usize {
    let (mut operators, mut chars) = (0, text.chars().peekable());
    while let Some(char) = chars.next() {
        match char {
            '&' | '~' => operators += 1,
            '#' => while chars.next_if(|char| *char != '\n').is_some() {},
            '/' if chars.peek() == Some(&'/') => {
                while chars.next_if(|char| *char != '\n').is_some() {}
            }
            '"' | '/' => {
                while let Some(inner) = chars.next() {
                    match inner {
                        '\\' => drop(chars.next()),
                        _ if inner == char => break,
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    operators
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operators_are_counted_outside_of_literals() {
        for (text, count) in [
            ("start: A & ~B", 2),
            (r#"start: "a&~" /x\/&~/ "\"&" & B"#, 1),
            ("a: /b/ // & ~\n# & \nc: ~D", 1),
            ("%json {\"a\": \"&&&\"}", 0),
        ] {
            assert_eq!(operators(text), count, "{text}");
        }
    }
}
