//! Where the lines come from and where they go: files, or standard input and output.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use crate::cli::CliError;

/// Whether a path stands for standard input or output.
pub fn is_standard(path: &Path) -> bool {
    path == Path::new("-")
}

/// Refuses two names of one file: what is written to it would be lost, or what is read from it.
pub fn check_distinct(files: &[(&str, &Path)]) -> Result<(), CliError> {
    for (i, (flag, path)) in files.iter().enumerate() {
        for (other, other_path) in &files[i + 1..] {
            let real = |path: &Path| path.canonicalize().ok().filter(|path| path.is_file());
            let same = path == other_path && !is_standard(path)
                || real(path).is_some_and(|path| Some(path) == real(other_path));
            if same {
                let path = path.display();
                let message = format!("{flag} and {other} are the same file, {path}");
                return Err(CliError::Usage(message));
            }
        }
    }
    Ok(())
}

/// The error of a file, or of standard input.
pub fn read_error(path: &Path, source: io::Error) -> CliError {
    CliError::file(if is_standard(path) { Path::new("standard input") } else { path }, source)
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
    /// Opens a file, which keeps what it has until [`Output::begin`], or takes standard output.
    pub fn open(path: &Path) -> Result<Output, CliError> {
        if is_standard(path) {
            return Ok(Output { file: None });
        }
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(path);
        let file = file.map_err(|source| CliError::file(path, source))?;
        Ok(Output { file: Some((file, path.to_owned())) })
    }

    /// Empties the file: from here on there are answers to write.
    pub fn begin(&mut self) -> Result<(), CliError> {
        let Some((file, path)) = &mut self.file else { return Ok(()) };
        // A pipe or a terminal has nothing to be emptied.
        let is_file = file.metadata().is_ok_and(|metadata| metadata.is_file());
        if is_file {
            file.set_len(0).map_err(|source| CliError::file(path, source))
        } else {
            Ok(())
        }
    }

    /// Writes a line; whoever reads along has it at once.
    pub fn write(&mut self, line: &str) -> Result<(), CliError> {
        let line = format!("{line}\n");
        match &mut self.file {
            None => crate::cli::output::print(&line),
            Some((file, path)) => {
                file.write_all(line.as_bytes()).map_err(|source| CliError::file(path, source))
            }
        }
    }
}
