//! A device: its context, its streams, and its kernels.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use cudarc::driver::sys::{CUdevice_attribute, CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaGraph, CudaStream, result, sys};

use super::CudaError;
use super::error::{Named, reason};
use super::launch::MOST_SHARED;
use super::module::{Modules, arch_of};
use crate::device::Compute;

/// The driver of CUDA 12.8: the oldest whose calls are those the bindings make.
const LEAST_DRIVER: i32 = 12080;

/// How to open a device.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Which device, in the driver's order.
    pub ordinal: usize,
    /// Where compiled kernels are kept from run to run; nowhere if none.
    pub cache: Option<PathBuf>,
    /// Compiles kernels for this very device even where the program carries compiled ones.
    pub compile: bool,
}

/// What a device is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Properties {
    /// Its name.
    pub name: String,
    /// Its compute capability.
    pub capability: (i32, i32),
    /// Its memory in bytes.
    pub memory_bytes: usize,
    /// Its multiprocessors.
    pub multiprocessors: usize,
    /// The driver's version, 1000 for each major and 10 for each minor one.
    pub driver: i32,
}

/// A device with a stream for kernels and one for copies in each direction: passed to every
/// operator. One thread at a time gives it work.
#[derive(Debug)]
pub struct Cuda {
    /// How bf16 weights are multiplied, and whether prompts may use tensor cores; f32 unless set.
    pub compute: Compute,
    pub(super) owner: Arc<Owner>,
    /// Where kernels run.
    pub(super) stream: Arc<CudaStream>,
    /// Where copies between tiers run: to the host, to the device.
    pub(super) copies: [Arc<CudaStream>; 2],
    pub(super) modules: Modules,
    /// The kernel launched last, to name when the device fails.
    pub(super) last: Mutex<&'static str>,
    properties: Properties,
}

/// What memory and graphs keep alive.
#[derive(Debug)]
pub(super) struct Owner {
    pub context: Arc<CudaContext>,
    held: Mutex<Held>,
}

/// Memory that was let go while a graph that may name it can still be replayed.
#[derive(Debug, Default)]
struct Held {
    graphs: usize,
    memory: Vec<sys::CUdeviceptr>,
}

impl Cuda {
    /// Opens a device.
    ///
    /// # Errors
    /// When there is no driver, no such device, it is too old or has too little shared memory.
    pub fn open(options: Options) -> Result<Cuda, CudaError> {
        Cuda::open_with(options, new_stream)
    }

    /// As [`Cuda::open`], with kernels on the stream that `compute` gives.
    pub(super) fn open_with(
        options: Options,
        compute: impl FnOnce(&Arc<CudaContext>) -> Result<Arc<CudaStream>, CudaError>,
    ) -> Result<Cuda, CudaError> {
        // SAFETY: loads the driver's library, which runs no code of ours.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::NoDriver);
        }
        let driver = driver_version()?;
        if driver < LEAST_DRIVER {
            return Err(CudaError::OldDriver { found: driver, needed: LEAST_DRIVER });
        }
        let found = CudaContext::device_count().unwrap_or(0) as usize;
        if options.ordinal >= found {
            return Err(CudaError::NoDevice { ordinal: options.ordinal, found });
        }
        let context = CudaContext::new(options.ordinal).named("opening the device")?;
        // SAFETY: no memory of the bindings' own types is allocated; the order between streams is
        // made here, by events.
        unsafe { context.disable_event_tracking() };
        let properties = properties(&context, driver)?;
        if properties.capability < (8, 0) {
            let Properties { name, capability, .. } = properties;
            return Err(CudaError::OldDevice { name, capability });
        }
        let most = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        let found = context.attribute(most).named("asking for shared memory")? as usize;
        if found < MOST_SHARED {
            let Properties { name, .. } = properties;
            return Err(CudaError::LittleShared { name, found, needed: MOST_SHARED });
        }
        let (stream, copies) = (compute(&context)?, [new_stream(&context)?, new_stream(&context)?]);
        let arch = arch_of(properties.capability);
        Ok(Cuda {
            compute: Compute::default(),
            stream,
            copies,
            modules: Modules::new(arch, options.cache, options.compile),
            last: Mutex::new("none"),
            properties,
            owner: Arc::new(Owner { context, held: Mutex::default() }),
        })
    }

    /// What the device is.
    pub fn properties(&self) -> &Properties {
        &self.properties
    }

    /// Bytes of the device's memory that nobody holds.
    ///
    /// # Errors
    /// When the device fails.
    pub fn free_bytes(&self) -> Result<usize, CudaError> {
        let (free, _) = self.owner.context.mem_get_info().named("asking for free memory")?;
        Ok(free)
    }

    /// Waits until everything given to the device so far is done.
    ///
    /// # Errors
    /// When some of it failed.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        for stream in [&self.stream].into_iter().chain(&self.copies) {
            stream.synchronize().map_err(|error| self.fault(error))?;
        }
        Ok(())
    }

    /// Waits until the kernels given to the device so far are done.
    pub(super) fn finish(&self) -> Result<(), CudaError> {
        self.stream.synchronize().map_err(|error| self.fault(error))
    }

    fn fault(&self, error: cudarc::driver::DriverError) -> CudaError {
        let last = *self.last.lock().expect("nobody panics while naming a kernel");
        CudaError::Fault { last, reason: reason(error) }
    }

    /// Records what `work` launches, to be launched again as one. Nothing of it runs now; it may
    /// upload and download nothing. Memory that it names stays until the graph is dropped.
    ///
    /// # Errors
    /// Those of `work`, and when it did what cannot be recorded.
    pub fn capture(
        &self,
        work: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<Graph, CudaError> {
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        self.stream.begin_capture(mode).named("beginning a graph")?;
        self.owner.hold();
        let worked = work();
        let graph = self.stream.end_capture(CUgraphInstantiate_flags(0)).named("ending a graph");
        let owner = Arc::clone(&self.owner);
        // From here on dropping the graph gives back what it holds.
        let graph = graph.map(|graph| Graph { graph, owner: owner.clone() });
        if graph.is_err() {
            owner.release();
        }
        worked?;
        graph
    }

    /// Runs a graph's kernels after all that was given to the device before.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn replay(&self, graph: &Graph) -> Result<(), CudaError> {
        let Some(graph) = &graph.graph else { return Ok(()) };
        *self.last.lock().expect("nobody panics while naming a kernel") = "of a graph";
        graph.launch().named("replaying a graph")
    }
}

/// Launches recorded by [`Cuda::capture`].
pub struct Graph {
    /// None for one of no launches.
    graph: Option<CudaGraph>,
    owner: Arc<Owner>,
}

// SAFETY: the driver asks only that one thread at a time uses a graph; whoever has it owns it, and
// shared references cannot be sent.
unsafe impl Send for Graph {}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Graph").field("empty", &self.graph.is_none()).finish()
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // Its last replay is done before what it names is freed.
        let _ = self.owner.context.synchronize();
        self.graph = None;
        self.owner.release();
    }
}

impl Owner {
    fn hold(&self) {
        self.held().graphs += 1;
    }

    fn release(&self) {
        let mut held = self.held();
        held.graphs -= 1;
        if held.graphs == 0 {
            held.memory.drain(..).for_each(|at| self.free_now(at));
        }
    }

    /// Frees memory, when no graph is left that may name it.
    pub fn free(&self, at: sys::CUdeviceptr) {
        let mut held = self.held();
        if held.graphs > 0 {
            held.memory.push(at);
        } else {
            self.free_now(at);
        }
    }

    fn free_now(&self, at: sys::CUdeviceptr) {
        // A device that failed takes nothing back; its memory goes with the process.
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: `at` was allocated, and its only owner gives it up. The driver waits for all
            // work that may use it.
            let _ = unsafe { result::free_sync(at) };
        }
    }

    fn held(&self) -> std::sync::MutexGuard<'_, Held> {
        self.held.lock().expect("nobody panics while freeing")
    }
}

fn new_stream(context: &Arc<CudaContext>) -> Result<Arc<CudaStream>, CudaError> {
    context.new_stream().named("making a stream")
}

pub(super) fn driver_version() -> Result<i32, CudaError> {
    let mut version = 0;
    // SAFETY: writes one number to where it is told.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result().named("asking for the version")?;
    Ok(version)
}

fn properties(context: &CudaContext, driver: i32) -> Result<Properties, CudaError> {
    let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    Ok(Properties {
        name: context.name().named("asking for the device's name")?,
        capability: context.compute_capability().named("asking for the compute capability")?,
        memory_bytes: context.total_mem().named("asking for the device's memory")?,
        multiprocessors: context.attribute(attribute).named("counting multiprocessors")? as usize,
        driver,
    })
}
