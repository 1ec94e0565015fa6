//! What a machine has of CUDA: for people, and to know before weights are loaded whether kernels
//! can be run.

use std::path::Path;

use cudarc::driver::{CudaContext, sys as driver};
use cudarc::nvrtc::sys as nvrtc;

use super::device::driver_version;
use super::module::{Key, SOURCES, arch_of};
use super::{Cuda, CudaError, Options, Properties};

/// What a machine has of CUDA.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Survey {
    /// The driver's version, 1000 for each major and 10 for each minor one, or why there is none.
    pub driver: Result<i32, CudaError>,
    /// The version of libnvrtc, if it can be loaded.
    pub compiler: Option<(i32, i32)>,
    /// Each device the driver knows, or why it cannot be used.
    pub devices: Vec<Result<Surveyed, CudaError>>,
}

/// A device that can be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Surveyed {
    /// What it is.
    pub properties: Properties,
    /// Bytes of its memory that nobody holds.
    pub free_bytes: usize,
    /// Where its kernels come from.
    pub kernels: KernelsFrom,
}

/// Where the kernels of a device come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelsFrom {
    /// The program carries them.
    Program,
    /// They were compiled in an earlier run and kept.
    Kept,
    /// They are compiled when they are first used.
    Compiler,
    /// The program carries none, and libnvrtc cannot be loaded.
    Nowhere,
}

impl KernelsFrom {
    /// Where those of `capability` come from, with compiled ones kept in `cache`.
    fn of(capability: (i32, i32), cache: Option<&Path>) -> KernelsFrom {
        if SOURCES.iter().all(|source| source.is_carried()) {
            return KernelsFrom::Program;
        }
        if compiler().is_none() {
            return KernelsFrom::Nowhere;
        }
        let arch = arch_of(capability);
        let is_kept = |folder: &Path| {
            SOURCES.iter().all(|source| {
                let key = Key::new(source, &arch);
                key.read(&folder.join(key.file_name())).is_some()
            })
        };
        if cache.is_some_and(is_kept) { KernelsFrom::Kept } else { KernelsFrom::Compiler }
    }
}

/// Looks at the driver, its devices and the compiler. Devices are opened and closed again.
pub fn survey(cache: Option<&Path>) -> Survey {
    // SAFETY: loads the driver's library, which runs no code of ours.
    let driver = match unsafe { driver::is_culib_present() } {
        true => driver_version(),
        false => Err(CudaError::NoDriver),
    };
    let count = if driver.is_ok() { CudaContext::device_count().unwrap_or(0) } else { 0 };
    let look = |ordinal: i32| {
        let cuda = Cuda::open(Options { ordinal: ordinal as usize, ..Options::default() })?;
        let properties = cuda.properties().clone();
        let kernels = KernelsFrom::of(properties.capability, cache);
        Ok(Surveyed { free_bytes: cuda.free_bytes()?, properties, kernels })
    };
    Survey { driver, compiler: compiler(), devices: (0..count).map(look).collect() }
}

impl Cuda {
    /// Where its kernels come from, if compiled ones are kept in `cache`.
    pub fn kernels_from(&self, cache: Option<&Path>) -> KernelsFrom {
        KernelsFrom::of(self.properties().capability, cache)
    }
}

/// The compiler's version.
fn compiler() -> Option<(i32, i32)> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: loads the compiler's library, which runs no code of ours; two numbers are written to
    // where it is told.
    let asked = unsafe {
        nvrtc::is_culib_present().then(|| nvrtc::nvrtcVersion(&mut major, &mut minor).result())
    };
    asked?.ok().map(|()| (major, minor))
}
