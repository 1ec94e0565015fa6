//! Standard output and JSON results.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
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

/// Tries the files that results are to go to, so that what cannot be written is told before minutes
/// of work; nothing is changed.
///
/// # Errors
/// Such a file, by its name; two results that are to go to one.
pub fn check_outputs<'p>(files: impl IntoIterator<Item = &'p Path>) -> Result<(), CliError> {
    let files: Vec<&Path> = files.into_iter().collect();
    for (i, path) in files.iter().enumerate() {
        if files[..i].contains(path) {
            let path = path.display();
            return Err(CliError::Usage(format!("{path}: two results are to go there")));
        }
        if *path == Path::new("-") {
            return Err(CliError::Usage("-: a file is wanted here, not standard output".into()));
        }
        check_writable(path).map_err(|source| CliError::file(path, source))?;
    }
    Ok(())
}

fn check_writable(path: &Path) -> io::Result<()> {
    match fs::metadata(path) {
        Ok(there) if there.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        Ok(there) if there.is_file() => OpenOptions::new().append(true).open(path).map(drop),
        // To open a pipe is to wait for its reader.
        Ok(_) => Ok(()),
        Err(_) => {
            OpenOptions::new().write(true).create_new(true).open(path)?;
            fs::remove_file(path)
        }
    }
}

/// A file that takes its place at once when it is whole, and leaves nothing before. What is there
/// and is no file, a pipe or a device, is written to where it is.
#[derive(Debug)]
pub struct Draft {
    /// The draft, and the file that it becomes.
    names: Option<(PathBuf, PathBuf)>,
    file: BufWriter<File>,
}

impl Draft {
    /// An empty one.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn new(path: &Path) -> io::Result<Draft> {
        // A link stays one.
        let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let is_other = fs::metadata(&target).is_ok_and(|there| !there.is_file());
        let (names, file) = match is_other {
            true => (None, OpenOptions::new().write(true).open(path)?),
            false => {
                let mut draft = target.clone().into_os_string();
                draft.push(".new");
                let file = File::create(&draft)?;
                (Some((draft.into(), target)), file)
            }
        };
        Ok(Draft { names, file: BufWriter::new(file) })
    }

    /// It is whole.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn end(mut self) -> io::Result<()> {
        self.file.flush()?;
        self.names.take().map_or(Ok(()), |(draft, target)| fs::rename(draft, target))
    }
}

impl Write for Draft {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if let Some((draft, _)) = &self.names {
            // Who writes it has told why it is not whole.
            let _ = fs::remove_file(draft);
        }
    }
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
