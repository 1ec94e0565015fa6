//! What a model is computed on: opened before any weight is loaded, so that what is not there is
//! told at once.

use std::time::Duration;

#[cfg(feature = "cuda")]
use kernels::cuda::{Cuda, CudaError, DeviceArena, Direction, HostArena, NotPinned, Piece};
use kernels::{Cpu, Isa};

#[cfg(feature = "cuda")]
use super::cuda::CudaExecutor;
use super::executor::{CpuExecutor, Executor, PlannedDraw};
use super::limits::EngineLimits;
#[cfg(feature = "cuda")]
use super::limits::FreeMemory;
use super::lower::Job;
use super::{EngineError, probe};
#[cfg(feature = "cuda")]
use crate::config::{CheckpointDtype, InvalidLimit, Preempt, available_memory};
use crate::config::{Device, EngineConfig};
#[cfg(feature = "cuda")]
use crate::models::WeightBytes;
#[cfg(feature = "cuda")]
use crate::models::cuda::LoadError;
use crate::models::spec::ModelSpec;
use crate::models::{Batch, Model, ModelFiles};
use crate::scheduler::StepReport;

/// Not a number, as an f32 and as two bf16 values.
const POISON: f32 = f32::from_bits(0x7fc0_7fc0);

/// Bytes of the copies by which the link of a CUDA device is measured.
#[cfg(feature = "cuda")]
const LINK_BYTES: usize = 64 << 20;

/// Most tokens of a step on a CUDA device.
#[cfg(feature = "cuda")]
const MOST_ROWS: usize = 1 << 17;

/// Most sequences at once on a CUDA device.
#[cfg(feature = "cuda")]
const MOST_SEQUENCES: usize = 1 << 14;

/// Why a device cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("--device {device}: {reason}")]
pub struct DeviceError {
    /// The word that asked for it.
    pub device: &'static str,
    /// Why, on one line.
    pub reason: String,
}

impl DeviceError {
    fn cuda(reason: impl ToString) -> DeviceError {
        DeviceError { device: Device::Cuda.as_str(), reason: reason.to_string() }
    }
}

/// What a model is computed on.
#[derive(Debug)]
pub enum OpenDevice {
    /// The processor.
    Cpu,
    /// A CUDA device.
    #[cfg(feature = "cuda")]
    Cuda(Box<Cuda>),
}

impl OpenDevice {
    /// Opens what `device` says: for [`Device::Auto`] a CUDA device that serves, or else the
    /// processor.
    ///
    /// # Errors
    /// [`Device::Cuda`] without a driver, a device, or kernels for it; with a driver or a device
    /// that is too old; in a program that was built without the feature `cuda`.
    pub fn open(device: Device) -> Result<OpenDevice, DeviceError> {
        match device {
            Device::Cpu => Ok(OpenDevice::Cpu),
            Device::Cuda => open_cuda(),
            Device::Auto => Ok(open_cuda().unwrap_or(OpenDevice::Cpu)),
        }
    }

    /// Where that is; never [`Device::Auto`].
    pub fn kind(&self) -> Device {
        match self {
            OpenDevice::Cpu => Device::Cpu,
            #[cfg(feature = "cuda")]
            OpenDevice::Cuda(_) => Device::Cuda,
        }
    }

    /// The limits of `config` for a model there, as its weights will leave the memory.
    ///
    /// # Errors
    /// As [`EngineLimits::of_machine`], and what a CUDA device does not do.
    pub fn limits(
        &self,
        files: &ModelFiles,
        config: &EngineConfig,
    ) -> Result<EngineLimits, EngineError> {
        let config = EngineConfig { device: self.kind(), ..*config };
        match self {
            OpenDevice::Cpu => EngineLimits::of_machine(files, &config),
            #[cfg(feature = "cuda")]
            OpenDevice::Cuda(cuda) => cuda_limits(cuda, files, &config),
        }
    }

    /// Bytes per second of copies between its tiers: to the host, and back.
    ///
    /// # Errors
    /// When there is no memory to copy, or the device fails.
    pub fn link_bytes_per_second(&self) -> Result<[f64; 2], EngineError> {
        match self {
            OpenDevice::Cpu => Ok([probe::link_bytes_per_second()?; 2]),
            #[cfg(feature = "cuda")]
            OpenDevice::Cuda(cuda) => Ok(cuda_link(cuda).map_err(DeviceError::cuda)?),
        }
    }

    /// Loads the weights, and gives what runs batches within `limits`; and what works but is not as
    /// it should be.
    ///
    /// # Errors
    /// Weights that cannot be loaded, or memory that is not there.
    pub(super) fn executor(
        self,
        files: &ModelFiles,
        (limits, isa): (&EngineLimits, Isa),
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<(AnyExecutor, Vec<String>), EngineError> {
        match self {
            OpenDevice::Cpu => {
                let executor = cpu_executor(files, (limits, isa), progress)?;
                Ok((AnyExecutor::Cpu(Box::new(executor)), Vec::new()))
            }
            #[cfg(feature = "cuda")]
            OpenDevice::Cuda(cuda) => {
                let (executor, not_pinned) = cuda_executor(*cuda, files, limits, progress)?;
                let unpinned = not_pinned.map(|why| why.to_string());
                let eager = executor.model().graphs_off().map(str::to_owned);
                let warnings = unpinned.into_iter().chain(eager).collect();
                Ok((AnyExecutor::Cuda(Box::new(executor)), warnings))
            }
        }
    }
}

/// What runs batches on the processor.
pub(super) fn cpu_executor(
    files: &ModelFiles,
    (limits, isa): (&EngineLimits, Isa),
    progress: &mut dyn FnMut(usize, usize),
) -> Result<CpuExecutor, EngineError> {
    let model = Model::new(files, files.load(progress)?)?;
    let cpu = Cpu::new(isa, limits.config.threads).map_err(EngineError::Threads)?;
    Ok(limits.executor(cpu, model)?)
}

/// Runs batches on what was opened.
#[derive(Debug)]
pub enum AnyExecutor {
    /// On the processor.
    Cpu(Box<CpuExecutor>),
    /// On a CUDA device.
    #[cfg(feature = "cuda")]
    Cuda(Box<CudaExecutor>),
}

impl AnyExecutor {
    /// The processor's, if it is that.
    pub fn cpu(&self) -> Option<&CpuExecutor> {
        match self {
            AnyExecutor::Cpu(executor) => Some(executor),
            #[cfg(feature = "cuda")]
            AnyExecutor::Cuda(_) => None,
        }
    }

    /// What the model is.
    pub fn spec(&self) -> &ModelSpec {
        match self {
            AnyExecutor::Cpu(executor) => executor.model().spec(),
            #[cfg(feature = "cuda")]
            AnyExecutor::Cuda(executor) => executor.model().spec(),
        }
    }

    /// Makes the memory of the device's tier not-a-number, as f32 and as bf16, while nothing there
    /// is needed: the units that come back are mostly those that were given up, and their old bytes
    /// would hide what was not copied or computed.
    ///
    /// # Errors
    /// When the device fails.
    pub fn poison(&mut self) -> Result<(), DeviceError> {
        match self {
            AnyExecutor::Cpu(executor) => {
                let (device, ..) = executor.memory_mut();
                device.f32s_mut(0, device.bytes() / size_of::<f32>()).fill(POISON);
                Ok(())
            }
            #[cfg(feature = "cuda")]
            AnyExecutor::Cuda(executor) => executor.poison().map_err(DeviceError::cuda),
        }
    }

    /// Runs `batch` and returns its logits, `[sources][vocab_size]`.
    ///
    /// # Errors
    /// When the device fails.
    pub fn forward(&mut self, batch: &Batch) -> Result<&[f32], DeviceError> {
        match self {
            AnyExecutor::Cpu(executor) => Ok(executor.forward(batch)),
            #[cfg(feature = "cuda")]
            AnyExecutor::Cuda(executor) => executor.forward(batch).map_err(DeviceError::cuda),
        }
    }

    fn inner(&self) -> &dyn Executor {
        match self {
            AnyExecutor::Cpu(executor) => executor.as_ref(),
            #[cfg(feature = "cuda")]
            AnyExecutor::Cuda(executor) => executor.as_ref(),
        }
    }
}

impl Executor for AnyExecutor {
    fn step(&mut self, batch: &Batch, jobs: Vec<Job>, draws: &[PlannedDraw<'_>]) -> StepReport {
        match self {
            AnyExecutor::Cpu(executor) => executor.step(batch, jobs, draws),
            #[cfg(feature = "cuda")]
            AnyExecutor::Cuda(executor) => executor.step(batch, jobs, draws),
        }
    }

    fn now(&self) -> Duration {
        self.inner().now()
    }

    fn fault(&self) -> Option<&str> {
        self.inner().fault()
    }
}

#[cfg(not(feature = "cuda"))]
fn open_cuda() -> Result<OpenDevice, DeviceError> {
    Err(DeviceError::cuda("this program was built without the feature cuda"))
}

#[cfg(feature = "cuda")]
fn open_cuda() -> Result<OpenDevice, DeviceError> {
    use kernels::cuda::{KernelsFrom, Options, default_cache};
    let cache = default_cache();
    let options = Options { cache: cache.clone(), ..Options::default() };
    let cuda = Cuda::open(options).map_err(DeviceError::cuda)?;
    if cuda.kernels_from(cache.as_deref()) == KernelsFrom::Nowhere {
        let reason = "its kernels have to be compiled and libnvrtc cannot be loaded; with nvcc \
                      there when the program is built they need not be";
        return Err(DeviceError::cuda(reason));
    }
    Ok(OpenDevice::Cuda(Box::new(cuda)))
}

/// Limits with the memory of a device and that of its host.
#[cfg(feature = "cuda")]
fn cuda_limits(
    cuda: &Cuda,
    files: &ModelFiles,
    config: &EngineConfig,
) -> Result<EngineLimits, EngineError> {
    refuse(&files.spec, config)?;
    let bytes = files.weight_bytes()?.unwrap_or(WeightBytes { stored: 0, held: 0 });
    let free = cuda.free_bytes().map_err(DeviceError::cuda)?;
    let device = free.checked_sub(bytes.stored).ok_or_else(|| {
        let weights = bytes.stored;
        DeviceError::cuda(format!("the weights take {weights} bytes, and {free} are free there"))
    })?;
    let host = available_memory();
    // A layer at a time is on its way.
    let most = if bytes.stored > 0 { files.rows()?.most_bytes() } else { 0 };
    if let Some(free) = host.filter(|free| most > *free) {
        return Err(DeviceError::cuda(format!(
            "a layer's weights take {most} bytes of the host on their way, and {free} are free \
             there"
        ))
        .into());
    }
    let mut config = *config;
    let rates = config.link_bytes_per_second.zip(config.prefill_tokens_per_second);
    if config.preempt == Preempt::Auto && rates.is_none() {
        // The probes measure the processor.
        config.preempt = Preempt::Swap;
    }
    EngineLimits::derive_in(&files.spec, &config, FreeMemory::Apart { device, host })
}

/// The rates of pinned copies to the host and back, after one that is not timed.
#[cfg(feature = "cuda")]
fn cuda_link(cuda: &Cuda) -> Result<[f64; 2], CudaError> {
    let mut device = DeviceArena::new(cuda, LINK_BYTES)?;
    let (mut host, _) = HostArena::new(cuda, LINK_BYTES, LINK_BYTES)?;
    let pieces = [Piece { device: 0, host: 0, bytes: LINK_BYTES }];
    let mut rates = [0.0; 2];
    for _ in 0..2 {
        for (rate, way) in rates.iter_mut().zip([Direction::ToHost, Direction::ToDevice]) {
            let seconds = cuda.time(|| {
                let transfer = cuda.transfer(way, &pieces, &mut device, &mut host)?;
                cuda.follow(&transfer)
            })?;
            *rate = LINK_BYTES as f64 / seconds.max(1e-9);
        }
    }
    Ok(rates)
}

/// Refuses by name what a CUDA device does not do.
#[cfg(feature = "cuda")]
fn refuse(spec: &ModelSpec, config: &EngineConfig) -> Result<(), InvalidLimit> {
    let refused = |flag, value: &dyn std::fmt::Display| {
        Err(InvalidLimit::new(flag, value, "not on a CUDA device for now; use --device cpu"))
    };
    if let Some(quantization) = spec.quantize {
        return refused("--quantize", &quantization.as_str());
    }
    if config.audit_percent > 0.0 {
        return refused("--audit", &config.audit_percent);
    }
    if config.checkpoint_dtype != CheckpointDtype::F32 {
        return refused("--checkpoint-dtype", &config.checkpoint_dtype.as_str());
    }
    for (flag, value, most) in [
        ("--max-num-batched-tokens", config.max_num_batched_tokens, MOST_ROWS),
        ("--max-num-seqs", config.max_num_seqs(), MOST_SEQUENCES),
    ] {
        if value > most {
            let reason = format!("{most} at most on a CUDA device");
            return Err(InvalidLimit::new(flag, value, reason));
        }
    }
    Ok(())
}

#[cfg(feature = "cuda")]
fn cuda_executor(
    cuda: Cuda,
    files: &ModelFiles,
    limits: &EngineLimits,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<(CudaExecutor, Option<NotPinned>), EngineError> {
    let bytes = (limits.device.arena_bytes(), limits.host.arena_bytes());
    // Memory that is pinned is lost to everybody else: half of what is free at most.
    let budget = available_memory().map_or(bytes.1, |free| free / 2);
    let weights = (files, files.rows()?.on_load(progress));
    CudaExecutor::new(cuda, weights, bytes, budget, limits.most()).map_err(|error| match error {
        LoadError::Files(error) => error.into(),
        LoadError::Device(CudaError::OutOfMemory { bytes, free }) => EngineError::Memory {
            needed: bytes,
            what: "on the CUDA device".to_owned(),
            available: free,
            advice: "give --device-memory less".to_owned(),
        },
        LoadError::Device(error) => DeviceError::cuda(error).into(),
    })
}
