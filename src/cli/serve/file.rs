//! The file of `--config`: TOML whose keys are the names of flags.

use std::ffi::OsString;
use std::fs;
use std::path::Path;

use clap::{Arg, Command};

use super::settings::{self, COMMAND, Values};
use super::spelling::{self, Foreign};
use crate::cli::CliError;

/// What a file says, and a line for each key of another engine that changes nothing.
pub fn read(serve: &Command, path: &Path) -> Result<(Values, Vec<String>), CliError> {
    let shown = path.display();
    let text = fs::read_to_string(path)
        .map_err(|source| CliError::File { path: format!("--config {shown}"), source })?;
    let wrong = |detail: String| CliError::Usage(format!("{shown}: {detail}"));
    let mut table: toml::Table = text
        .parse()
        .map_err(|error: toml::de::Error| wrong(error.to_string().trim_end().into()))?;
    let inner = match table.remove(COMMAND) {
        None => toml::Table::new(),
        Some(toml::Value::Table(inner)) => inner,
        Some(_) => return Err(wrong(format!("{COMMAND} is not a table"))),
    };
    let (mut values, mut notes, mut faults) = (Values::new(), Vec::new(), Vec::new());
    for (key, value) in table.into_iter().chain(inner) {
        match read_key(serve, &key, value) {
            Ok(Key::Setting(name, _)) if values.iter().any(|(known, _)| *known == name) => {
                faults.push(format!("{key} is there twice"));
            }
            Ok(Key::Setting(name, texts)) => values.push((name, texts)),
            Ok(Key::Needless(note)) => notes.push(format!("{shown}: {note}")),
            Err(fault) => faults.push(fault),
        }
    }
    if faults.is_empty() { Ok((values, notes)) } else { Err(wrong(faults.join("; "))) }
}

/// A key of a file.
enum Key {
    /// A setting of ours, and its values.
    Setting(String, Vec<OsString>),
    /// Another engine's, which changes nothing here, and why.
    Needless(String),
}

/// What a key says, under whatever name a flag may have.
fn read_key(serve: &Command, key: &str, value: toml::Value) -> Result<Key, String> {
    let mut name = key.replace('_', "-");
    if !settings::settings(serve).any(|arg| settings::name(arg) == name) {
        match spelling::of_key(key, &name, &text_of(&value)) {
            None => return Err(unknown(serve, key, &name)),
            Some(Err(fault)) => return Err(fault),
            Some(Ok(Foreign::Needless(note))) => return Ok(Key::Needless(note)),
            Some(Ok(Foreign::Same(ours))) => ours.clone_into(&mut name),
        }
    }
    let arg = settings::settings(serve)
        .find(|arg| settings::name(arg) == name)
        .expect("it is one of ours");
    let texts =
        texts(value, settings::takes_many(arg)).map_err(|fault| format!("{key}: {fault}"))?;
    Ok(Key::Setting(name, texts))
}

/// How much a key must be like one of ours to be taken for it with a slip.
const ALIKE: f64 = 0.8;

/// What to say of a key that is no setting.
fn unknown(serve: &Command, key: &str, name: &str) -> String {
    if settings::NO_SETTINGS.contains(&name) {
        return format!("{key} is for the command line, not for a file");
    }
    let alike = |arg: &&Arg| strsim::jaro_winkler(settings::name(arg), name);
    let ours = settings::settings(serve).filter(|arg| !arg.is_hide_set());
    let nearest = ours.max_by(|a, b| alike(a).total_cmp(&alike(b)));
    match nearest.filter(|arg| alike(arg) >= ALIKE) {
        Some(arg) => format!("unknown key {key}; the nearest is {}", settings::name(arg)),
        None => format!("unknown key {key}; the keys are the flags of serve --help"),
    }
}

/// A single value as text, to compare it; empty for others.
fn text_of(value: &toml::Value) -> String {
    let texts = texts(value.clone(), false).unwrap_or_default();
    texts.into_iter().map(|text| text.to_string_lossy().into_owned()).collect()
}

/// A value of a file as arguments.
fn texts(value: toml::Value, takes_many: bool) -> Result<Vec<OsString>, &'static str> {
    match value {
        toml::Value::String(text) => Ok(vec![text.into()]),
        toml::Value::Integer(number) => Ok(vec![number.to_string().into()]),
        toml::Value::Float(number) => Ok(vec![number.to_string().into()]),
        toml::Value::Boolean(switch) => Ok(vec![switch.to_string().into()]),
        toml::Value::Array(values) if takes_many => {
            let texts: Result<Vec<Vec<OsString>>, _> =
                values.into_iter().map(|value| texts(value, false)).collect();
            Ok(texts?.into_iter().flatten().collect())
        }
        toml::Value::Array(_) => Err("takes one value"),
        _ => Err("takes a text, a number or true and false"),
    }
}
