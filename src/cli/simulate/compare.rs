//! `deltapool simulate compare`: what differs between the results of two simulations.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::Value;

use super::args::{parse_from_0, usage};
use crate::cli::CliError;
use crate::cli::output::print;

/// Arguments of `simulate compare`.
#[derive(Debug, Args)]
pub struct CompareArgs {
    /// The JSON of one simulation.
    #[arg(value_name = "A.json")]
    pub a: PathBuf,
    /// The JSON of another.
    #[arg(value_name = "B.json")]
    pub b: PathBuf,
    /// Leave out figures that differ by less than so many percent.
    #[arg(
        long,
        value_name = "PERCENT",
        default_value_t = 0.5,
        value_parser = parse_from_0,
        allow_negative_numbers = true
    )]
    pub above: f64,
}

/// Runs the command.
pub fn run(args: &CompareArgs) -> Result<(), CliError> {
    let (a, b) = (read(&args.a)?, read(&args.b)?);
    let mut rows = Vec::new();
    compare(String::new(), &a, &b, args.above, &mut rows);
    if rows.is_empty() {
        return print(&format!("no figure differs by {} % or more\n", args.above));
    }
    let width = rows.iter().map(|row| row[0].len()).max().unwrap_or(0);
    let mut text = format!("{:<width$}  {:>14}  {:>14}  {:>8}\n", "", "A", "B", "B / A");
    for [name, a, b, ratio] in rows {
        text.push_str(&format!("{name:<width$}  {a:>14}  {b:>14}  {ratio:>8}\n"));
    }
    print(&text)
}

fn read(path: &Path) -> Result<Value, CliError> {
    let text = fs::read_to_string(path).map_err(|source| CliError::file(path, source))?;
    let value: Value = serde_json::from_str(&text)
        .map_err(|error| usage(format!("{}: not JSON: {error}", path.display())))?;
    let is_result = |value: &Value| value["header"].is_object() && value["steps"].is_object();
    if is_result(&value) {
        return Ok(value);
    }
    let reason = match value.get(0).is_some_and(|cell| is_result(&cell["report"])) {
        true => "of a sweep; one simulation is compared with another",
        false => "not the result of `deltapool simulate run --json=FILE` or `replay`",
    };
    Err(usage(format!("{}: {reason}", path.display())))
}

/// Adds a row for each leaf that differs.
fn compare(name: String, a: &Value, b: &Value, above: f64, rows: &mut Vec<[String; 4]>) {
    if let (Value::Object(a), Value::Object(b)) = (a, b) {
        let dot = if name.is_empty() { "" } else { "." };
        let more = b.keys().filter(|key| !a.contains_key(*key));
        for key in a.keys().chain(more) {
            let of = |map: &serde_json::Map<String, Value>| map.get(key).cloned();
            let (a, b) = (of(a).unwrap_or_default(), of(b).unwrap_or_default());
            compare(format!("{name}{dot}{key}"), &a, &b, above, rows);
        }
        return;
    }
    // A list is a spread, which other figures sum up.
    if a == b || a.is_array() || b.is_array() {
        return;
    }
    let ratio = match (a.as_f64(), b.as_f64()) {
        (Some(x), Some(y)) => {
            let ratio = y / x;
            if (ratio - 1.0).abs() * 100.0 < above {
                return;
            }
            if ratio.is_finite() { format!("{ratio:.3}") } else { String::new() }
        }
        _ => String::new(),
    };
    rows.push([name, shown(a), shown(b), ratio]);
}

fn shown(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        Value::Number(number) if number.is_f64() => {
            format!("{:.6}", number.as_f64().unwrap_or_default())
        }
        Value::Object(_) => "{..}".to_owned(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn leaves_that_differ_are_named_by_their_path() {
        let (a, b) = (
            json!({"x": {"y": 2.0, "z": 1}, "name": "one", "only": null}),
            json!({"x": {"y": 3.0, "z": 1}, "name": "two", "only": {"q": 1}}),
        );
        let mut rows = Vec::new();
        compare(String::new(), &a, &b, 0.5, &mut rows);
        let names: Vec<&str> = rows.iter().map(|row| row[0].as_str()).collect();
        assert_eq!(names, ["x.y", "name", "only"]);
        assert_eq!(rows[0][3], "1.500");
        rows.clear();
        compare(String::new(), &json!({"t": 1.0}), &json!({"t": 1.004}), 0.5, &mut rows);
        assert!(rows.is_empty());
    }
}
