//! `deltapool doctor`: what this program was built with, and what this machine has for it.

use std::fmt;
use std::fs;

use clap::Args;
use kernels::Isa;
use serde::Serialize;

use super::CliError;
use super::bench::system::Machine;
use super::common::JsonArgs;
use super::output::{JsonTarget, grouped, print};
use crate::config::{available_memory, default_threads};

/// Arguments of `doctor`.
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub struct DoctorArgs {
    /// Where the result is reported.
    #[command(flatten)]
    pub report: JsonArgs,
}

const HELP: &str = "\
Kernels of a CUDA device come from the program (fatbin, where nvcc was there when it was built), or
are compiled on the device's machine by libnvrtc (NVRTC) when they are first used, and kept in the
user's cache folder (cached). With none of the three --device cuda is refused.
The exit code is 0 with and without a GPU.";

/// Runs the command.
pub fn run(args: &DoctorArgs, isa: Isa) -> Result<(), CliError> {
    let report = Report::of_this(isa);
    let target = args.report.target();
    if target != JsonTarget::Output {
        print(&report.to_string())?;
    }
    target.write(&serde_json::json!(report))
}

/// What is there. Field names are the keys of the JSON form.
#[derive(Debug, Serialize)]
struct Report {
    version: &'static str,
    features: Vec<&'static str>,
    processor: Machine,
    /// Threads that compute unless told otherwise.
    threads: usize,
    /// None where the system does not say.
    memory_free_bytes: Option<usize>,
    /// Memory that a process may lock; none where there is no limit, or none is told.
    locked_memory_limit_bytes: Option<usize>,
    /// None in a program without the feature.
    cuda: Option<Cuda>,
}

/// What there is of CUDA.
#[derive(Debug, Serialize)]
struct Cuda {
    /// The version of CUDA the driver is for, as 13.0.
    driver: Option<String>,
    /// Why there is no driver.
    driver_error: Option<String>,
    /// The version of libnvrtc.
    nvrtc: Option<String>,
    devices: Vec<Device>,
}

/// A device, or why it cannot be used.
#[derive(Debug, Serialize)]
#[serde(untagged)]
#[cfg_attr(not(feature = "cuda"), expect(dead_code))]
enum Device {
    Usable {
        name: String,
        compute_capability: String,
        multiprocessors: usize,
        memory_bytes: usize,
        memory_free_bytes: usize,
        /// `fatbin`, `cached`, `NVRTC` or `none`.
        kernels: &'static str,
    },
    Unusable {
        error: String,
    },
}

impl Report {
    fn of_this(isa: Isa) -> Report {
        let built = [
            ("cuda", cfg!(feature = "cuda")),
            ("cust", cfg!(feature = "cust")),
            ("embedded-model", cfg!(feature = "embedded-model")),
        ];
        let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
        Report {
            version: env!("CARGO_PKG_VERSION"),
            features: built.into_iter().filter_map(|(name, is_on)| is_on.then_some(name)).collect(),
            processor: Machine::this(isa),
            threads: default_threads(),
            memory_free_bytes: available_memory(),
            locked_memory_limit_bytes: locked_memory_limit(&limits),
            cuda: cuda(),
        }
    }
}

/// The soft limit of locked memory in the text of `/proc/self/limits`.
fn locked_memory_limit(text: &str) -> Option<usize> {
    let line = text.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(not(feature = "cuda"))]
fn cuda() -> Option<Cuda> {
    None
}

#[cfg(feature = "cuda")]
fn cuda() -> Option<Cuda> {
    use kernels::cuda::{CudaError, KernelsFrom, Surveyed, default_cache, survey};
    let found = survey(default_cache().as_deref());
    let dotted = |(major, minor): (i32, i32)| format!("{major}.{minor}");
    let (driver, driver_error) = match found.driver {
        Ok(version) => (Some(dotted((version / 1000, version % 1000 / 10))), None),
        Err(error) => (None, Some(error.to_string())),
    };
    let device = |found: Result<Surveyed, CudaError>| match found {
        Ok(Surveyed { properties, free_bytes, kernels }) => Device::Usable {
            name: properties.name,
            compute_capability: dotted(properties.capability),
            multiprocessors: properties.multiprocessors,
            memory_bytes: properties.memory_bytes,
            memory_free_bytes: free_bytes,
            kernels: match kernels {
                KernelsFrom::Program => "fatbin",
                KernelsFrom::Kept => "cached",
                KernelsFrom::Compiler => "NVRTC",
                KernelsFrom::Nowhere => "none",
            },
        },
        Err(error) => Device::Unusable { error: error.to_string() },
    };
    let devices = found.devices.into_iter().map(device).collect();
    Some(Cuda { driver, driver_error, nvrtc: found.compiler.map(dotted), devices })
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = |bytes: Option<usize>, none: &str| {
            bytes.map_or(none.to_owned(), |bytes| format!("{} bytes", grouped(bytes)))
        };
        writeln!(f, "deltapool  {}, with {}", self.version, listed(&self.features))?;
        writeln!(f, "processor  {}; {} threads", self.processor, self.threads)?;
        let free = bytes(self.memory_free_bytes, "the system does not say how much is");
        writeln!(f, "memory     {free} free")?;
        let locked = bytes(self.locked_memory_limit_bytes, "no limit");
        writeln!(f, "locked     {locked} (RLIMIT_MEMLOCK; drivers pin memory beside it)")?;
        match &self.cuda {
            None => writeln!(f, "CUDA       this program was built without the feature cuda"),
            Some(cuda) => cuda.fmt(f),
        }
    }
}

impl fmt::Display for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.driver, &self.driver_error) {
            (Some(version), _) => writeln!(f, "driver     for CUDA {version}")?,
            (None, why) => writeln!(f, "driver     {}", why.as_deref().unwrap_or("none"))?,
        }
        match &self.nvrtc {
            Some(version) => writeln!(f, "compiler   NVRTC {version}")?,
            None => writeln!(f, "compiler   none: libnvrtc cannot be loaded")?,
        }
        if self.devices.is_empty() {
            writeln!(f, "devices    none: models are computed on the processor")?;
        }
        for (ordinal, device) in self.devices.iter().enumerate() {
            writeln!(f, "device {ordinal}   {device}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Usable {
                name,
                compute_capability,
                multiprocessors,
                memory_bytes,
                memory_free_bytes,
                kernels,
            } => write!(
                f,
                "{name}, compute capability {compute_capability}, {multiprocessors} \
                 multiprocessors, {} of {} bytes free, kernels: {kernels}",
                grouped(*memory_free_bytes),
                grouped(*memory_bytes),
            ),
            Device::Unusable { error } => write!(f, "cannot be used: {error}"),
        }
    }
}

fn listed(features: &[&str]) -> String {
    if features.is_empty() { "no feature".to_owned() } else { features.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_of_locked_memory_is_the_soft_one() {
        let text = |limit: &str| format!("Max file locks x\nMax locked memory   {limit}  9  bytes");
        assert_eq!(locked_memory_limit(&text("8388608")), Some(8 << 20));
        assert_eq!(locked_memory_limit(&text("unlimited")), None);
        assert_eq!(locked_memory_limit(""), None);
    }
}
