//! What an answer may be: `response_format` of OpenAI's API and `structured_outputs` of vLLM's.

use serde_json::{Value, json};

use super::error::ApiError;
use super::fields::Fields;
use crate::request::Constraint;
use crate::text::{AnswerFormat, json_grammar, lark_literal};

/// Takes both fields, of which one may constrain the answer.
///
/// # Errors
/// A format that is not known, or two of them.
pub fn take(fields: &mut Fields) -> Result<Option<Constraint>, ApiError> {
    let outputs = fields.object("structured_outputs")?.map(structured_outputs).transpose()?;
    let format = fields.object("response_format")?.map(response_format).transpose()?.flatten();
    match (outputs, format) {
        (Some(_), Some(_)) => {
            let message = "only one of structured_outputs and response_format may be given";
            Err(ApiError::value("structured_outputs", message))
        }
        (outputs, format) => Ok(outputs.or(format)),
    }
}

/// The same of a model that may reason first, or has marks of its own around its answers. A grammar
/// is taken for that of the whole answer.
pub fn enclose(asked: Constraint, format: &AnswerFormat, prompt: &str) -> Constraint {
    let json = |schema: &Value| json_grammar(schema).ok().map(|grammar| format!("%json {grammar}"));
    let content = match &asked {
        Constraint::JsonObject => json(&json!({ "type": "object" })),
        Constraint::JsonSchema(schema) => json(schema),
        Constraint::Regex(regex) => Some(regex_literal(regex)),
        Constraint::Choice(texts) => {
            Some(texts.iter().map(|text| lark_literal(text)).collect::<Vec<_>>().join(" | "))
        }
        Constraint::Grammar(_) => None,
    };
    let enclosed = content.and_then(|content| format.enclose(&content, prompt));
    enclosed.map_or(asked, Constraint::Grammar)
}

/// A regular expression between slashes; those in it are escaped, unless they are.
fn regex_literal(regex: &str) -> String {
    let mut literal = String::from("/");
    let mut is_escaped = false;
    for c in regex.chars() {
        if c == '/' && !is_escaped {
            literal.push('\\');
        }
        is_escaped = c == '\\' && !is_escaped;
        literal.push(c);
    }
    literal.push('/');
    literal
}

fn structured_outputs(mut fields: Fields) -> Result<Constraint, ApiError> {
    let given = [
        fields.raw("json").map(schema_of).transpose()?,
        fields.take("regex")?.map(Constraint::Regex),
        fields.take("choice")?.map(Constraint::Choice),
        fields.take("grammar")?.map(Constraint::Grammar),
        fields.or("json_object", false)?.then_some(Constraint::JsonObject),
    ];
    fields.refuse(&[
        ("structural_tag", ""),
        ("whitespace_pattern", ""),
        ("disable_any_whitespace", ""),
    ])?;
    let mut given = given.into_iter().flatten();
    match (given.next(), given.next()) {
        (Some(constraint), None) => Ok(constraint),
        _ => {
            let message = "structured_outputs: expected one of json, json_object, regex, choice \
                           and grammar";
            Err(ApiError::value("structured_outputs", message))
        }
    }
}

/// A schema, or the text of one.
fn schema_of(value: Value) -> Result<Constraint, ApiError> {
    match value {
        Value::String(text) => {
            serde_json::from_str(&text).map(Constraint::JsonSchema).map_err(|_| {
                let path = "structured_outputs.json";
                ApiError::value(path, format!("{path}: a text that is no JSON"))
            })
        }
        schema => Ok(Constraint::JsonSchema(schema)),
    }
}

fn response_format(mut fields: Fields) -> Result<Option<Constraint>, ApiError> {
    match fields.need::<String>("type")?.as_str() {
        "text" => Ok(None),
        "json_object" => Ok(Some(Constraint::JsonObject)),
        "json_schema" => {
            let path = fields.path("json_schema");
            let mut format =
                fields.object("json_schema")?.ok_or_else(|| ApiError::missing(path))?;
            let path = format.path("schema");
            let schema = format.raw("schema").ok_or_else(|| ApiError::missing(path))?;
            Ok(Some(Constraint::JsonSchema(schema)))
        }
        _ => {
            let path = fields.path("type");
            let message = format!("{path}: expected text, json_object or json_schema");
            Err(ApiError::value(path, message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slashes_of_a_regular_expression_are_escaped_once() {
        for (regex, literal) in
            [("a/b", r"/a\/b/"), (r"a\/b", r"/a\/b/"), (r"a\\/b", r"/a\\\/b/"), (r"\d+", r"/\d+/")]
        {
            assert_eq!(regex_literal(regex), literal);
        }
    }
}
