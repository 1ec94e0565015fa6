//! `structured_outputs` and `response_format` of a line: what the answer may be.

use serde_json::{Map, Value};

use super::line::{Fields, typed};
use crate::request::Constraint;

/// Takes both fields; only one of them may constrain.
pub fn take(fields: &mut Fields) -> Result<Option<Constraint>, String> {
    let outputs = fields.take("structured_outputs")?.map(structured_outputs).transpose()?;
    let format = fields.take("response_format")?.map(response_format).transpose()?.flatten();
    match (outputs, format) {
        (Some(_), Some(_)) => {
            Err("structured_outputs and response_format: only one of them may be given".to_owned())
        }
        (outputs, format) => Ok(outputs.or(format)),
    }
}

fn structured_outputs(keys: Map<String, Value>) -> Result<Constraint, String> {
    const FIELD: &str = "structured_outputs";
    let mut keys = keys.into_iter().filter(|(_, value)| !value.is_null());
    let (Some((key, value)), None) = (keys.next(), keys.next()) else {
        return Err(format!("{FIELD}: expected one of json, regex, choice and grammar"));
    };
    let name = format!("{FIELD}.{key}");
    match key.as_str() {
        "json" => Ok(Constraint::JsonSchema(value)),
        "regex" => typed(&name, value).map(Constraint::Regex),
        "choice" => typed(&name, value).map(Constraint::Choice),
        "grammar" => typed(&name, value).map(Constraint::Grammar),
        _ => Err(format!("unknown field: {name}")),
    }
}

/// OpenAI's field; `name` and `strict` of a schema change nothing here, it is always kept.
fn response_format(format: Map<String, Value>) -> Result<Option<Constraint>, String> {
    match format.get("type").and_then(Value::as_str) {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(Constraint::JsonObject)),
        Some("json_schema") => {
            let schema = format.get("json_schema").and_then(|schema| schema.get("schema"));
            let schema = schema.ok_or("response_format.json_schema.schema is missing")?;
            Ok(Some(Constraint::JsonSchema(schema.clone())))
        }
        _ => Err("response_format.type: expected text, json_object or json_schema".to_owned()),
    }
}
