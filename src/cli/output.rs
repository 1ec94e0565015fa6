//! Standard output and JSON results.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::CliError;

/// Writes `text` to standard output and flushes it.
pub fn print(text: &str) -> Result<(), CliError> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(CliError::Output)
}

/// Where a JSON result goes: nowhere, to standard output instead of the text, or to a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JsonTarget {
    None,
    Output,
    File(PathBuf),
}

impl JsonTarget {
    /// The meaning of `--json[=FILE]`; `-` stands for standard output.
    pub fn new(argument: Option<&Path>) -> JsonTarget {
        match argument {
            None => JsonTarget::None,
            Some(path) if path == Path::new("-") => JsonTarget::Output,
            Some(path) => JsonTarget::File(path.to_owned()),
        }
    }

    /// The file, if it is one.
    pub fn file(&self) -> Option<&Path> {
        match self {
            JsonTarget::File(path) => Some(path),
            JsonTarget::None | JsonTarget::Output => None,
        }
    }

    /// Writes `value` as one line.
    pub fn write(&self, value: &Value) -> Result<(), CliError> {
        let line = format!("{value}\n");
        match self {
            JsonTarget::None => Ok(()),
            JsonTarget::Output => print(&line),
            JsonTarget::File(path) => {
                fs::write(path, line).map_err(|source| CliError::file(path, source))
            }
        }
    }
}

/// Tries whether a file can be written there, so that it is told before minutes of work; nothing is
/// changed.
///
/// # Errors
/// Why it cannot, by its name.
pub fn check_writable(path: &Path) -> Result<(), CliError> {
    let made = OpenOptions::new().write(true).create_new(true).open(path);
    let tried = match made {
        Ok(_) => fs::remove_file(path),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            OpenOptions::new().append(true).open(path).map(drop)
        }
        Err(error) => Err(error),
    };
    tried.map_err(|source| CliError::file(path, source))
}

/// The name under which a file is written before it takes its place at `path`, whole and at once.
pub fn beside(path: &Path) -> PathBuf {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    beside.into()
}

/// `1234567` as `1,234,567`.
pub fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}
