//! Where the lines come from and where they go: files, or standard input and output.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use crate::cli::CliError;

/// Whether a path stands for standard input or output.
pub fn is_standard(path: &Path) -> bool {
    path == Path::new("-")
}

/// The error of a file, or of standard input.
pub fn read_error(path: &Path, source: io::Error) -> CliError {
    let standard = is_standard(path);
    let path = if standard { "standard input".to_owned() } else { path.display().to_string() };
    CliError::File { path, source }
}

/// Opens a file, or standard input.
pub fn open(path: &Path) -> Result<Box<dyn BufRead>, CliError> {
    if is_standard(path) {
        return Ok(Box::new(io::stdin().lock()));
    }
    let file = File::open(path).map_err(|source| read_error(path, source))?;
    Ok(Box::new(BufReader::new(file)))
}

/// A file, or standard output.
pub struct Output {
    /// None is standard output.
    file: Option<(File, PathBuf)>,
}

impl Output {
    /// Creates a file, or takes standard output.
    pub fn create(path: &Path) -> Result<Output, CliError> {
        if is_standard(path) {
            return Ok(Output { file: None });
        }
        let file = File::create(path)
            .map_err(|source| CliError::File { path: path.display().to_string(), source })?;
        Ok(Output { file: Some((file, path.to_owned())) })
    }

    /// Writes a line; whoever reads along has it at once.
    pub fn write(&mut self, line: &str) -> Result<(), CliError> {
        let line = format!("{line}\n");
        match &mut self.file {
            None => crate::cli::output::print(&line),
            Some((file, path)) => file
                .write_all(line.as_bytes())
                .map_err(|source| CliError::File { path: path.display().to_string(), source }),
        }
    }
}
