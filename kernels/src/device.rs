//! The processor that kernels run on.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::meter::Meter;
use crate::simd::Isa;
use crate::threads::Gang;

/// How bf16 weights are multiplied. Weights of other types are not concerned.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Compute {
    /// Activations stay f32.
    #[default]
    F32,
    /// Activations are rounded to bf16 once for each operator; sums are f32.
    Bf16,
}

impl Compute {
    /// The name people see: `f32` or `bf16`.
    pub fn as_str(self) -> &'static str {
        match self {
            Compute::F32 => "f32",
            Compute::Bf16 => "bf16",
        }
    }
}

/// An instruction set and a gang of threads: passed to every fast kernel.
#[derive(Debug)]
pub struct Cpu {
    /// The instruction set kernels are run with.
    pub isa: Isa,
    /// The threads kernels share their tasks among.
    pub gang: Gang,
    /// How products with bf16 weights are computed; f32 unless set.
    pub compute: Compute,
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
            compute: Compute::default(),
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
