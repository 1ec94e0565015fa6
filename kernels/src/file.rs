//! A read-only file mapped into memory: the one `mmap` of the project.

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::path::Path;

use memmap2::Mmap;

/// The bytes of a file, mapped read-only.
///
/// Weights are read in place, so the file must not be truncated or rewritten while it is mapped;
/// as with every engine that maps its weights, a shorter file ends the process with a bus error and
/// a changed one changes the weights.
#[derive(Debug)]
pub struct MappedFile(Mmap);

impl MappedFile {
    /// Maps the file at `path`.
    ///
    /// # Errors
    /// The error of opening or mapping the file.
    pub fn open(path: &Path) -> io::Result<MappedFile> {
        let file = File::open(path)?;
        // SAFETY: the mapping is read-only. Its hazard is a file that changes under it, which the
        // type's documentation rules out for weights.
        let map = unsafe { Mmap::map(&file)? };
        Ok(MappedFile(map))
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}
