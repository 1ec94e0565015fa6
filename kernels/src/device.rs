//! The processor that kernels run on.

use std::io;

use crate::simd::Isa;
use crate::threads::Gang;

/// An instruction set and a gang of threads: passed to every fast kernel.
#[derive(Debug)]
pub struct Cpu {
    /// The instruction set kernels are run with.
    pub isa: Isa,
    /// The threads kernels share their tasks among.
    pub gang: Gang,
}

impl Cpu {
    /// `threads` threads with instruction set `isa`.
    ///
    /// # Errors
    /// When the system refuses to start a thread.
    ///
    /// # Panics
    /// When `threads` is 0.
    pub fn new(isa: Isa, threads: usize) -> io::Result<Cpu> {
        Ok(Cpu { isa, gang: Gang::new(threads)? })
    }
}
