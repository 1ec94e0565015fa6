//! The processor that kernels run on.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::meter::Meter;
use crate::simd::Isa;
use crate::threads::Gang;

/// An instruction set and a gang of threads: passed to every fast kernel.
#[derive(Debug)]
pub struct Cpu {
    /// The instruction set kernels are run with.
    pub isa: Isa,
    /// The threads kernels share their tasks among.
    pub gang: Gang,
    /// What operators do, when it is on.
    pub meter: Meter,
    products: AtomicU64,
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
        Ok(Cpu {
            isa,
            gang: Gang::new(threads)?,
            meter: Meter::default(),
            products: AtomicU64::new(0),
        })
    }

    /// Matrix products computed so far, each over all rows it was given.
    pub fn products(&self) -> u64 {
        self.products.load(Ordering::Relaxed)
    }

    pub(crate) fn count_product(&self) {
        self.products.fetch_add(1, Ordering::Relaxed);
    }
}
