//! The file of `--port-file`: it is there while requests are taken, and at no other time.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::cli::output::Draft;

/// A file that holds the port of this server from [`PortFile::tell`] until it is dropped.
#[derive(Debug)]
pub struct PortFile {
    path: PathBuf,
    told: Option<String>,
}

impl PortFile {
    /// Removes what an earlier server has left at `path`, and makes sure that it can be written.
    ///
    /// # Errors
    /// When either cannot be done.
    pub fn new(path: &Path) -> io::Result<PortFile> {
        if fs::symlink_metadata(path).is_ok_and(|there| !there.is_file()) {
            return Err(io::Error::other("something else than a file is there"));
        }
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        // Dropped, it leaves nothing.
        Draft::new(path)?;
        Ok(PortFile { path: path.to_owned(), told: None })
    }

    /// Writes the port at once and whole: who waits for the file finds all of it.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn tell(&mut self, port: u16) -> io::Result<()> {
        let text = format!("{port}\n");
        let mut draft = Draft::new(&self.path)?;
        draft.write_all(text.as_bytes())?;
        draft.end()?;
        self.told = Some(text);
        Ok(())
    }
}

impl Drop for PortFile {
    fn drop(&mut self) {
        // Another server may have written its own since.
        if self.told.is_some() && fs::read_to_string(&self.path).ok() == self.told {
            let _ = fs::remove_file(&self.path);
        }
    }
}
