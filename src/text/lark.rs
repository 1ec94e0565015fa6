//! Words of the grammar dialect that constraints are written in: llguidance's Lark.

use serde_json::{Value, json};

/// White space between two tokens of JSON, as a regular expression: a space, or a new line and its
/// indentation. More would let a model go on for ever without saying anything.
const JSON_SPACE: &str = r"(\x20|\x0A[\x20\x09]{0,32})";

/// A text as a literal of a grammar: a JSON string in which DEL is escaped too.
pub fn lark_literal(text: &str) -> String {
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

/// A schema with our white space, unless it says itself how it is to be written.
///
/// # Errors
/// What is neither an object nor `true`: the reason.
pub fn json_grammar(schema: &Value) -> Result<Value, String> {
    const OPTIONS: &str = "x-guidance";
    let mut keys = match schema {
        Value::Object(keys) => keys.clone(),
        Value::Bool(true) => serde_json::Map::new(),
        _ => return Err("is neither an object nor true".to_owned()),
    };
    if !keys.contains_key(OPTIONS) {
        keys.insert(OPTIONS.to_owned(), json!({"whitespace_pattern": JSON_SPACE}));
    }
    Ok(keys.into())
}
